"""How the gradients of a group are reduced: the plan, made where something changed.

Owns what dtypes, trainable parameters, settings and the wire decide: the layout, the scale, the
numbers that reductions carry, and where sums that wait move when a plan changes. A steady step
enters nothing here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from fsdp2._core.agreement.collective_ids import CollectiveIds
from fsdp2._core.agreement.operation_ids import Signature
from fsdp2._core.base.capabilities import ROW_NBYTES
from fsdp2._core.base.errors import StateError
from fsdp2._core.base.policy import Residence, Settings
from fsdp2._core.comm.mesh import DataMesh
from fsdp2._core.comm.wire import Wire
from fsdp2._core.params import gradient_packing
from fsdp2._core.params.layout import ReduceLayout
from fsdp2._core.params.param import FSDPParam


@dataclass(frozen=True)
class GradientScale:
    """How gradients are joined: factors before and after it, and the operation of the wire."""

    before: float
    after: float
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM

    @staticmethod
    def choose(
        ranks: int,
        dtype: torch.dtype,
        divide_by: float | None = None,
        only_sums: bool = False,
    ) -> GradientScale:
        """Divide the sum over ``ranks`` by ``divide_by``; None means their number (the mean).

        fp16 divides in two steps of about the square root each: it ends at 65504, so a sum before
        the division could overflow, a division before the sum underflow. Wider exponents divide
        once: in the collective, if it is a mean and ``only_sums`` is not asked for, else after the
        sum, on the shard alone.

        Source: the rule of torch's FSDP and DDP communication hooks.
        """
        factor = float(ranks) if divide_by is None else float(divide_by)
        if dtype == torch.float16:
            before = 1
            while factor % before == 0 and factor / before > before:
                before *= 2
            return GradientScale(1.0 / before, before / factor)
        if divide_by is None and not only_sums and ranks > 1:
            return GradientScale(1.0, 1.0, dist.ReduceOp.AVG)
        return GradientScale(1.0, 1.0 / factor)


# --- Lanes, and the buffers that are in flight.


@dataclass(frozen=True, eq=False)
class ReducePlan:
    """What depends on the dtypes of a group's parameters, and on which are trainable."""

    layout: ReduceLayout
    members: list[FSDPParam]
    # the dtype in which gradients are packed: it holds what one backward leaves
    grad_dtype: torch.dtype
    dtypes: frozenset[torch.dtype]  # the dtypes of the gradients that one backward leaves
    codes: list[float]
    complete: Tensor
    free: list[FSDPParam]  # parameters whose gradients may have any dtype, and are reduced in that

    @cached_property
    def is_annotated(self) -> bool:
        """True if users say of some member what its gradient is."""
        return any(param.placement.annotation is not None for param in self.members)


@dataclass(eq=False)
class Unreduced:
    """Gradients of a group that wait for a reduction."""

    # gradients reduced over the first axis, and not over the second yet [rows between, numel]
    partial: Tensor | None = None
    # there is a partial sum, or there are gradients on unsharded parameters
    is_waiting: bool = False
    is_owed: bool = False  # a backward ran without sync, with a gradient here or not
    own_sums: int = 0  # how many backwards brought the partial sum a gradient of this rank

    def clear(self) -> None:
        self.partial, self.is_waiting, self.is_owed, self.own_sums = None, False, False, 0


class ReducePlanner:
    """Plans the reductions of a group, again where something changed that they depend on."""

    def __init__(
        self,
        params: Sequence[FSDPParam],
        data: DataMesh,
        residence: Residence,
        ids: CollectiveIds,
        unreduced: Unreduced,
    ) -> None:
        self._params = params
        self._data = data
        self._residence = residence
        self._ids = ids
        self._unreduced = unreduced
        # None after something that the plan depends on has changed
        self.current: ReducePlan | None = None
        # the layout of the last plan: gradients that wait lie as it says
        self._layout: ReduceLayout | None = None
        # the plan and the settings that the scale and the codes were made for
        self.prepared: tuple[ReducePlan | None, Settings | None] = (None, None)
        self.scale = GradientScale(1.0, 1.0)
        # complete tails of the plan, by the codes of the stamps
        self._completes: dict[tuple[float, ...], Tensor] = {}
        # reductions leave out the replicas, and have other numbers meanwhile
        self._is_partial = False

    def invalidate(self) -> None:
        """Forget the plan: dtypes, or the set of trainable parameters, changed."""
        self.current = None

    def see_dtypes(self) -> None:
        """Plan again if all-gather extensions made parameters of other dtypes than expected."""
        plan = self.current
        members = [] if plan is None else plan.members
        if plan is not None and members and plan.dtypes != {p.backward_dtype for p in members}:
            self.invalidate()

    @torch.inference_mode(False)
    def make(self, wire: Wire) -> ReducePlan:
        """Plan for the dtypes, and the trainable parameters, that there are now."""
        indices = [i for i, param in enumerate(self._params) if param.trainable]
        members = [self._params[i] for i in indices]
        dtypes = {param.backward_dtype for param in members} or {torch.float32}
        grad_dtype = functools.reduce(torch.promote_types, dtypes)
        dtype = self._sum_dtype(members) if members else grad_dtype
        shards = [param.placement.layout for param in members]
        size = self._data.shard.size
        # a real wire dtype has no place for imaginary parts
        chosen = None if dtype.is_complex else wire.gradient_dtype
        wire_dtype = dtype if size == 1 else chosen or dtype
        # A zero-copy gradient is sent as autograd left it: nothing was added up, nothing is cast.
        as_it_is = len(dtypes) == 1 and grad_dtype == dtype == wire_dtype != torch.float16
        layout = ReduceLayout.plan(
            indices,
            shards,
            size,
            dtype,
            len(members) + self._ids.reductions.numel,
            wire_dtype,
            wire.zero_copy if as_it_is and wire.scatters_zero_copy else None,
            ROW_NBYTES,
            self._data.shard.rank,
        )
        is_renumbered = self._number(layout, wire)
        codes = self._ids.reductions.codes
        complete = gradient_packing.tail(codes, layout, grad_dtype, self._residence.compute)
        if self._unreduced.partial is not None:
            old = self._layout or layout
            self._unreduced.partial = _rearranged(self._unreduced.partial, old, layout)
        self._layout = layout
        self._completes = {tuple(codes): complete}
        if is_renumbered:
            self._erase_stamps()
        free = _reduced_in_any(members)
        plan = ReducePlan(layout, members, grad_dtype, frozenset(dtypes), codes, complete, free)
        self.current = plan
        return plan

    def _sum_dtype(self, members: Sequence[FSDPParam]) -> torch.dtype:
        """Dtype of the reduction, which holds all sums; of a partial one before it, too."""
        dtypes = {param.accumulated_dtype for param in members}
        if self._unreduced.partial is not None and _reduced_in_any(members):
            dtypes.add(self._unreduced.partial.dtype)  # of a backward in a wider one, perhaps
        return functools.reduce(torch.promote_types, dtypes)

    def _number(self, layout: ReduceLayout, wire: Wire) -> bool:
        """Number reductions by how they travel; return whether some number is another one now."""
        _, scatter = wire.custom
        members = (layout.members, [shard.signature for shard in layout.shards])
        tensors = tuple(
            (self._params[i].fqn, shard.shape)
            for i, shard in zip(layout.members, layout.shards, strict=True)
        )

        def signature_of(is_scatter: bool) -> Signature:
            sent = layout.wire_dtype if is_scatter else layout.dtype
            dtypes, is_custom = (sent, layout.dtype), scatter is not None
            alone, is_partial = len(layout.zero_copy), self._is_partial
            return Signature(members, alone, dtypes, is_custom, is_partial, tensors)

        return self._ids.reductions.number(signature_of)

    def prepare(self, settings: Settings, wire: Wire) -> ReducePlan:
        """Return the plan, with the scale that the settings ask for."""
        is_partial = self._data.summed.size > 1 and not settings.all_reduce_grads
        if is_partial is not self._is_partial:
            self._is_partial = is_partial
            if self.current is not None:
                self.current = self._renumbered(self.current, wire)
        plan = self.current or self.make(wire)
        self.prepared = (plan, settings)
        layout = plan.layout
        self.scale = scale = self.scale_for(layout.wire_dtype, settings, wire)
        joined = 1.0 if scale.op == ReduceOp.AVG else self._data.size * scale.before
        stamps, sent_as = self._ids.reductions, layout.wire_dtype
        stamps.expect(plan.codes, joined, layout.dtype, layout.numel)
        *zero_copy, packed = [layout.numel] if layout.pieces else layout.output_sizes
        wire.exact = layout.exact
        scattered = [packed, *zero_copy] * self._data.rows_between
        stamps.register(wire, scattered, sent_as, scale.op, layout.pieces)
        return plan

    def scale_for(self, dtype: torch.dtype, settings: Settings, wire: Wire) -> GradientScale:
        """Say how gradients that travel in a dtype are divided."""
        only_sums = settings.only_sums or wire.only_sums
        return GradientScale.choose(self._data.size, dtype, settings.divide_by, only_sums)

    @torch.inference_mode(False)
    def _renumbered(self, plan: ReducePlan, wire: Wire) -> ReducePlan:
        """Return a plan with the numbers that stamps have now; nothing else of it changes."""
        layout = plan.layout
        if not self._number(layout, wire):
            return plan
        self._erase_stamps()
        codes = self._ids.reductions.codes
        complete = self._completes.get(tuple(codes))  # to make one lets a device's host wait
        if complete is None:
            complete = gradient_packing.tail(
                codes, layout, plan.grad_dtype, self._residence.compute
            )
            self._completes[tuple(codes)] = complete
        return replace(plan, codes=codes, complete=complete)

    def follow(self, plan: ReducePlan, settings: Settings, wire: Wire) -> ReducePlan:
        """Plan again if gradients that may have any dtype have another one than was expected."""
        for param in plan.free:
            grad = None if param.unsharded is None else param.unsharded.grad
            if grad is not None and grad.dtype is not param.accumulated_dtype:
                param.found_dtype = grad.dtype
                self.invalidate()
        if self._sum_dtype(plan.members) is not plan.layout.dtype:
            self.invalidate()
        return self.prepare(settings, wire)

    def separate(self, enable: bool, wire: Wire) -> None:
        """Reduce over a process group of its own, or over that of the gathers. Collective."""
        data = self._data
        wire.is_separate = enable
        is_other = enable and data.shard.size > 1
        shard = data.shard.separate() if is_other else data.shard
        wire.scatter_group = shard.pg if is_other else None
        self._ids.renew_reductions(replace(data, shard=shard))
        self._erase_stamps()
        self.invalidate()

    def refuse_toggle(self, params: Sequence[FSDPParam]) -> None:
        """Raise StateError if ``requires_grad`` must not change now: the same on every rank."""
        if self._unreduced.is_owed or self._unreduced.partial is not None:
            raise StateError(
                "FS312",
                f"{params[0].fqn}: requires_grad changed while gradients of its group are "
                "accumulated without sync. Set it back and run a backward with gradient sync "
                "first, or call reset_iter_state().",
            )

    def _erase_stamps(self) -> None:
        """Drop the stamps of gradients that wait: the next reduction has other ones."""
        if self._unreduced.partial is not None:
            self._ids.reductions.erase(self._unreduced.partial)


def _reduced_in_any(members: Sequence[FSDPParam]) -> list[FSDPParam]:
    return [param for param in members if param.chosen.is_reduced_in_any]


def _rearranged(partial: Tensor, old: ReduceLayout, new: ReduceLayout) -> Tensor:
    """Return half reduced gradients ``[rows, numel]`` of one layout as another one places them.

    Both layouts have the same members.
    """
    if old.offsets == new.offsets and old.numel == new.numel:
        return partial.to(new.dtype)
    moved = partial.new_zeros((len(partial), new.numel), dtype=new.dtype)
    parts = [(old.offsets[p], new.offsets[p], old.width(p)) for p in range(len(old.members))]
    for source, target, width in [*parts, (old.tail_start, new.tail_start, len(old.members))]:
        moved[:, target : target + width] = partial[:, source : source + width]
    return moved

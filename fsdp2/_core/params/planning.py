"""Plans of one group's all-gathers and reductions, and the buffers allocated from them.

Owns the memory of shards (over the full axis and over a smaller mesh) and of unsharded parameters,
and the plans of all-gathers and reductions. Contains no state or module code; the caller decides
when state transitions happen. Steady-state steps call almost none of these functions.

[Note: one plan]
``Buffers.plan`` computes everything that depends on shapes and dtypes. A plan is valid until a
parameter is replaced: by ``.to()``, ``load_state_dict(assign=True)``, ``to_empty``,
``swap_tensors``, unpickling, or an assignment. The next forward detects the replacement by
identity, and the group *adopts* the new parameter: it plans again and copies the registered values
to a new shard buffer. The group does not write to the old buffer, so an old parameter that is
registered again (``functional_call``) still has its values. The full buffer and the unsharded
parameters are kept if dtypes allow, because a recorded graph may need them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor

from fsdp2._core.agreement.agreement import GATHER_STAMP_NUMEL, Signature
from fsdp2._core.agreement.stamp import CollectiveIds, Stamp
from fsdp2._core.base import torch_dtensor, torch_tensors
from fsdp2._core.base.capabilities import ROW_NBYTES, ZeroCopy, capabilities
from fsdp2._core.base.errors import ConfigError, StateError
from fsdp2._core.base.policy import MixedPrecisionPolicy, Residence, Settings
from fsdp2._core.comm.mesh import DataMesh, MeshAxis
from fsdp2._core.comm.wire import InFlight, Wire
from fsdp2._core.params import gradient_packing, packing
from fsdp2._core.params.buffers import FullBuffer, PostForward, ShardBuffer
from fsdp2._core.params.extension import (
    ExtensionTail,
    has_extension,
    is_extended,
    needs_extension,
    own_shard,
    refuse_smaller,
)
from fsdp2._core.params.layout import GatherItem, GatherLayout, ReduceLayout
from fsdp2._core.params.param import FSDPParam
from fsdp2._core.params.placement import shrink

Source = tuple[Tensor, nn.Parameter | None]
"""An unpadded shard to copy, and the registered parameter that contains it (None: create one)."""


def own_rows(param: FSDPParam, whole: Tensor, rank: int) -> Tensor:
    """Return this rank's rows of an unsharded parameter: a view, or a copy of an extended one."""
    whole = torch_dtensor.local_part(whole.detach())
    if needs_extension(whole):
        return own_shard(whole, param, rank)
    return packing.shard_of(whole, param.placement.layout, rank)


def own_sources(params: Iterable[FSDPParam]) -> list[Source]:
    return [(torch_dtensor.local_tensor(param.sharded), param.sharded) for param in params]


def source_of(param: FSDPParam, new: Tensor | None, rank: int) -> Source:
    """Return the shard of a parameter's replacement. StateError: its placement does not match."""
    placement = param.placement
    if isinstance(new, nn.Parameter):
        if placement.is_sharded(new):
            local, fits = torch_dtensor.local_tensor(new), placement.layout.shard_shape(rank)
            if tuple(local.shape) != fits or local.layout is not torch.strided:
                raise StateError(
                    "FS317",
                    f"{param.fqn}: its local tensor was replaced by a tensor of shape "
                    f"{tuple(local.shape)} and layout {local.layout}, but a dense tensor of shape "
                    f"{fits} is required. Assign a dense tensor of this shape, or register a full "
                    "nn.Parameter on the module.",
                )
            return local, new
        if placement.is_unsharded(new):
            return own_rows(param, new, rank), None
    found = "None" if new is None else f"{type(new).__name__} of shape {tuple(new.shape)}"
    if isinstance(new, DTensor):
        found += f" with placements {new.placements} on {new.device_mesh}"
    raise StateError(
        "FS317",
        f"{param.fqn} was replaced by {found}, which this module cannot shard. Register an "
        f"nn.Parameter {placement.describe()}.",
    )


@dataclass(eq=False)
class Buffers:
    """The buffers of a group. ``params`` is the group's own list, not a copy."""

    _params: Sequence[FSDPParam]
    _data: DataMesh
    policy: InitVar[MixedPrecisionPolicy]
    _residence: Residence
    _ids: CollectiveIds
    rule: ZeroCopy | None = None  # of the current plan; see ``rule_for``
    home: ShardBuffer | None = None  # the shards; None in a copied group until it plans
    post_forward: PostForward = field(default_factory=PostForward)
    full: FullBuffer | None = None  # unsharded parameters, made by the first gather

    def __post_init__(self, policy: MixedPrecisionPolicy) -> None:
        self._trims = capabilities(self._residence.compute).is_host
        self.compute_by(policy)

    @property
    def all(self) -> list[ShardBuffer]:
        """The buffers that an all-gather may send from."""
        return [buffer for buffer in (self.home, self.post_forward.buffer) if buffer is not None]

    @property
    def whole_memory(self) -> Tensor | None:
        """Memory of the unsharded parameters, even while freed; None before the first gather."""
        return None if self.full is None else self.full.flat

    @property
    def flat_params(self) -> list[FSDPParam]:
        return [param for param in self._params if not param.wrapped.is_extended]

    @property
    def whole_nbytes(self) -> int:
        return sum(p.sharded.numel() * p.compute_dtype.itemsize for p in self._params)

    def lies_in(self, storage: torch.UntypedStorage) -> bool:
        return self.full is not None and self.full.number == torch_tensors.number_of(storage)

    def rule_for(self, wire: Wire) -> ZeroCopy | None:
        """Return the rule for gathering parameters separately. A custom all-gather, and one that
        also sends the data of extensions, needs one packed buffer."""
        is_extended = any(param.wrapped.is_extended for param in self._params)
        return wire.zero_copy if wire.gathers_zero_copy and not is_extended else None

    def compute_by(self, policy: MixedPrecisionPolicy) -> None:
        # data of extended parameters, sent after the other parameters
        self.open_tail = ExtensionTail(self._data, policy, self._residence.compute)

    @torch.inference_mode(False)
    @torch.no_grad()
    def plan(self, sources: Sequence[Source], wire: Wire, fqn: str) -> None:
        """Plan the layout for the dtypes and the device of ``sources``, and copy ``sources`` to a
        new buffer. On error (several devices, an unusable extension), nothing changes."""
        devices = {source.device for source, _ in sources}
        if len(devices) > 1:
            listing = ", ".join(
                f"{p.fqn} on {s.device}" for p, (s, _) in zip(self._params, sources, strict=True)
            )
            raise StateError(
                "FS226",
                f"{fqn or '<root>'}: parameters of one group are on several devices: {listing}. "
                "Move the entire module to one device.",
            )
        self._split([source for source, _ in sources])
        is_ruled_anew, self.rule = self.rule != self.rule_for(wire), self.rule_for(wire)
        for param, (source, _) in zip(self._params, sources, strict=True):
            param.storage_dtype = source.dtype
        items = [param.item_of(param.placement.layout) for param in self.flat_params]
        device, residence = devices.pop(), self._residence
        if residence.is_away and device.type != "meta":
            device = residence.storage
        buffer = self._buffer_of(
            items,
            self._data.shard,
            device,
            compute=residence.compute if residence.is_away else None,
            pinned=residence.is_pinned and device.type == "cpu",
        )
        if self.home is None or is_ruled_anew or not buffer.layout.has_full_of(self.home.layout):
            self.full = self.post_forward.buffer = None
        self._number(buffer, wire)
        if self.full is not None:
            self.full.bind(buffer)
        index = 0
        for param, (source, registered) in zip(self._params, sources, strict=True):
            if param.wrapped.is_extended:
                param.set_shard(source, registered)
                continue
            local = buffer.shards[index]
            local.copy_(source.detach())
            param.set_shard(local, registered, buffer.span(index))
            index += 1
        self.open_tail.plan([param for param in self._params if param.wrapped.is_extended])
        self.home = buffer

    def _stamp_of(self, axis: MeshAxis) -> Stamp | None:
        return self._ids.gather if axis is self._data.shard else self._ids.gather_smaller

    def _buffer_of(
        self,
        items: Sequence[GatherItem],
        axis: MeshAxis,
        device: torch.device,
        **how: Any,
    ) -> ShardBuffer:
        """Plan a buffer over the full axis or, between forward and backward, over the smaller."""
        stamp, rank = self._stamp_of(axis), self._data.shard.rank
        meshes = (self._data, self.post_forward.mesh)
        others = tuple(m.shard.size for m in meshes if m is not None and m.shard is not axis)
        numel = 0 if stamp is None else GATHER_STAMP_NUMEL
        layout = _plan_layout(tuple(items), axis.size, others, self.rule, rank, self._trims, numel)
        tail = stamp if len(layout.items) > len(items) else None
        return ShardBuffer(layout, axis, device, tail=tail, **how)

    def _split(self, shards: Sequence[Tensor]) -> None:
        """Move extended parameters out of the flat buffer. On error, nothing changes."""
        extended = [is_extended(p, s) for p, s in zip(self._params, shards, strict=True)]
        some_extended = [p for p, is_so in zip(self._params, extended, strict=True) if is_so]
        dealt = [p for p in self._params if p.placement.layout.deal is not None]
        if self.post_forward.mesh is not None:
            for param in (*some_extended, *dealt):
                refuse_smaller(param.fqn, param.placement.layout.deal)
        if some_extended and dealt:
            deal = dealt[0].placement.layout.deal
            assert deal is not None
            raise ConfigError(
                "FS510",
                f"{some_extended[0].fqn} has an all-gather extension, but {dealt[0].fqn}, in the "
                f"same group, {deal.asked_by}. Return Shard(0) or None for the latter from "
                "shard_placement_fn, or shard the two in separate units.",
            )
        for param, shard, is_so in zip(self._params, shards, extended, strict=True):
            if is_so and not param.wrapped.is_extended and shard is param.local:
                shard.data = shard.clone()  # the same object, moved out of the flat buffer
            param.wrapped.is_extended = is_so

    def wait_on(self, smaller: DataMesh | None) -> None:
        self.post_forward.mesh, self.post_forward.buffer = smaller, None
        axis = None if smaller is None else smaller.shard
        self._ids.gather_smaller = None if axis is None else self._ids.make(axis, "gather")

    def number(self, wire: Wire) -> None:
        """Number the gathers by their current signatures, and register them for later checks."""
        for buffer in self.all:
            self._number(buffer, wire)

    def _number(self, buffer: ShardBuffer, wire: Wire) -> None:
        """Number a buffer's gather; none may be in flight. Extended data is checked separately."""
        stamp = self._stamp_of(buffer.axis)
        buffer.follow(wire)
        if stamp is None or buffer.tail is None:
            return
        layout = buffer.layout
        sent = [(item.shard.signature, item.sent_as) for item in layout.items]
        numels, dtype = buffer.sent_numels(), layout.wire_dtype
        is_custom = wire.custom[0] is not None
        tensors = tuple((param.fqn, param.placement.layout.shape) for param in self.flat_params)
        stamp.update_signature(
            Signature(sent, len(numels) - 1, (dtype, dtype), is_custom, tensors=tensors)
        )
        buffer.renew_tail()
        if buffer.open_tail_nbytes or not self.open_tail.items:
            seen_as = layout.items[-1].compute_dtype
            start = layout.send_offsets[-1] // seen_as.itemsize
            pieces = tuple(nbytes // dtype.itemsize for nbytes in layout.landing.pieces)
            stamp.register(wire, numels, dtype, seen_as, start, pieces=pieces)

    @property
    def has_late_extension(self) -> bool:
        """Return True if an extension was set on a local tensor after the plan was made."""
        assert self.home is not None
        return any(map(has_extension, self.home.shards))

    @torch.inference_mode(False)
    @torch.no_grad()
    def build_full(self, wire: Wire, is_fixed: bool) -> FullBuffer:
        """Make the unsharded parameters and the shards over the smaller mesh; free their memory."""
        assert self.home is not None
        if self.post_forward.mesh is not None:
            self._build_waiting(self.post_forward.mesh, wire)
        layout = self.home.layout
        self.full = full = FullBuffer(layout.full_nbytes, self._residence.compute)
        for buffer in self.all:
            buffer.bind(full.flat)
        tensors = packing.full_tensors(full.flat, layout)
        for param, tensor in zip(self.flat_params, tensors, strict=False):
            param.set_unsharded(tensor)
        full.is_fixed = is_fixed
        full.free()
        return full

    def _build_waiting(self, smaller: DataMesh, wire: Wire) -> None:
        """Plan the shards over the smaller mesh; the full buffer keeps its layout."""
        placements = [shrink(param.placement, smaller) for param in self._params]
        items = [
            param.item_of(placement.layout, is_again=True)
            for placement, param in zip(placements, self._params, strict=True)
        ]
        buffer = self._buffer_of(items, smaller.shard, self._residence.compute, is_freed=True)
        self.post_forward.buffer = buffer
        self._number(buffer, wire)
        for param, placement, local in zip(self._params, placements, buffer.shards, strict=False):
            param.set_post_forward(local, placement)
        self.post_forward.free()

    def gather_extended(self, wire: Wire, async_op: bool) -> InFlight:
        buffer, tail = self.home, self.open_tail
        assert buffer is not None
        tail.before()
        if buffer.open_tail_nbytes != tail.nbytes:
            buffer.open_tail_nbytes = tail.nbytes
            self._number(buffer, wire)
        return buffer.gather(wire, async_op, tail.write)

    @torch.no_grad()
    def shrink(self) -> None:
        """Copy this rank's rows of unsharded parameters to the shards over the smaller mesh."""
        waiting = self.post_forward.buffer
        assert waiting is not None
        layout = waiting.layout
        waiting.flat.untyped_storage().resize_(layout.shard_nbytes)
        for param, item, shard in zip(self._params, layout.items, waiting.shards, strict=False):
            assert param.unsharded is not None
            whole = torch_dtensor.local_part(param.unsharded.detach())
            shard.copy_(packing.shard_of(whole, item.shard, waiting.axis.rank))
        waiting.write_tail()

    @torch.inference_mode(False)
    @torch.no_grad()
    def write_back(self, written: Sequence[Tensor]) -> None:
        """Copy this rank's rows of the ``written`` unsharded parameters to their shards."""
        for param in self.flat_params:
            assert param.unsharded is not None
            forms = param.unsharded, torch_dtensor.local_part(param.unsharded)
            if not any(form is one for form in forms for one in written):
                continue  # not written: the shard may be newer
            rows, shard = own_rows(param, param.unsharded, self._data.shard.rank), param.local
            assert shard is not None
            kept = shard.to(rows.device)
            if kept.dtype is not rows.dtype:  # unchanged elements keep their precision
                rows = torch.where(rows == kept.to(rows.dtype), kept, rows.to(kept.dtype))
            shard.copy_(rows)


# equal blocks of a model share a plan
_plan_layout = functools.lru_cache(maxsize=64)(GatherLayout.plan)


# Plans of reductions.


@dataclass(frozen=True)
class GradientScale:
    """Scaling of gradients: factors before and after the reduction, and the reduce op."""

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
        """Return the scale that divides the sum over ``ranks`` by ``divide_by`` (None: a mean).

        In fp16, divide before and after the sum, each time by about the square root of the divisor:
        otherwise the sum could overflow (the maximum is 65504), or small gradients could underflow.
        In other dtypes, divide once. A mean without ``only_sums`` is divided in the collective. Any
        other sum is divided afterwards, on the shard only. Source: torch's communication hooks.
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


@dataclass(frozen=True, eq=False)
class ReducePlan:
    """The part of a reduction that depends on parameter dtypes and ``requires_grad``."""

    layout: ReduceLayout
    members: list[FSDPParam]
    grad_dtype: torch.dtype  # dtype of packed gradients, wide enough for the result of one backward
    dtypes: frozenset[torch.dtype]  # dtypes of the gradients of one backward
    codes: list[float]
    complete: Tensor

    @cached_property
    def free(self) -> list[FSDPParam]:
        """Members reduced in the dtype of their gradients."""
        return _reduced_in_any(self.members)

    @cached_property
    def is_annotated(self) -> bool:
        return any(param.placement.annotation is not None for param in self.members)


@dataclass(eq=False)
class Unreduced:
    # gradients reduced over the first axis, but not yet over the second: [rows_between, numel]
    partial: Tensor | None = None
    is_waiting: bool = False  # a partial sum exists, or unsharded parameters have gradients
    is_owed: bool = False  # a backward ran without sync, with or without gradients on this rank
    own_sums: int = 0  # number of backwards that added this rank's gradients to the partial sum

    def become(self, other: Unreduced) -> None:
        self.partial, self.is_waiting = other.partial, other.is_waiting
        self.is_owed, self.own_sums = other.is_owed, other.own_sums

    def clear(self) -> None:
        self.become(Unreduced())


@dataclass(eq=False)
class ReducePlanner:
    """Plans the reductions of one group. ``Reducer`` carries them out."""

    params: Sequence[FSDPParam]
    data: DataMesh
    _residence: Residence
    ids: CollectiveIds
    wire: Wire = field(default_factory=Wire)  # also used by the group's gathers
    unreduced: Unreduced = field(default_factory=Unreduced)
    current_plan: ReducePlan | None = None  # reset to None when an input of the plan changes
    scale: GradientScale = GradientScale(1.0, 1.0)
    _layout: ReduceLayout | None = None  # layout of the last plan, and of a partial sum
    # plan and settings for which the scale and the stamps are valid
    _prepared: tuple[ReducePlan | None, Settings | None] = (None, None)
    # tails of the plan on a rank that has all gradients, keyed by the codes of the stamps
    _completes: dict[tuple[float, ...], Tensor] = field(default_factory=dict)
    _is_partial: bool = False  # True: reductions exclude replicas, and have other numbers

    def see_dtypes(self) -> None:
        """Drop the plan if all-gather extensions returned unexpected dtypes."""
        plan = self.current_plan
        members = [] if plan is None else plan.members
        if plan is not None and members and plan.dtypes != {p.backward_dtype for p in members}:
            self.current_plan = None

    def plan(self) -> ReducePlan:
        """Return the current plan, or make one. Plans are equal on all ranks."""
        return self.current_plan or self._make()

    @torch.inference_mode(False)
    def _make(self) -> ReducePlan:
        indices = [i for i, param in enumerate(self.params) if param.trainable]
        members = [self.params[i] for i in indices]
        dtypes = {param.backward_dtype for param in members} or {torch.float32}
        grad_dtype = functools.reduce(torch.promote_types, dtypes)
        dtype = self._sum_dtype(members) if members else grad_dtype
        shards = [param.placement.layout for param in members]
        size, wire = self.data.shard.size, self.wire
        # a real wire dtype cannot represent imaginary parts
        chosen = None if dtype.is_complex else wire.gradient_dtype
        wire_dtype = dtype if size == 1 else chosen or dtype
        # a zero-copy gradient is sent as autograd produced it, so it must need no cast or scaling
        as_it_is = len(dtypes) == 1 and grad_dtype == dtype == wire_dtype != torch.float16
        layout = ReduceLayout.plan(
            indices,
            shards,
            size,
            dtype,
            len(members) + self.ids.reductions.numel,
            wire_dtype,
            wire.zero_copy if as_it_is and wire.scatters_zero_copy else None,
            ROW_NBYTES,
            self.data.shard.rank,
            wire.adds_alike,
        )
        is_renumbered = self._number(layout)
        codes = self.ids.reductions.codes
        complete = gradient_packing.tail(codes, layout, grad_dtype, self._residence.compute)
        if self.unreduced.partial is not None:
            old = self._layout or layout
            self.unreduced.partial = _rearranged(self.unreduced.partial, old, layout)
        self._layout = layout
        self._completes = {tuple(codes): complete}
        if is_renumbered:
            self._erase_stamps()
        plan = ReducePlan(layout, members, grad_dtype, frozenset(dtypes), codes, complete)
        self.current_plan = plan
        return plan

    def _sum_dtype(self, members: Sequence[FSDPParam]) -> torch.dtype:
        """Dtype of the reduction, wide enough for all members and an existing partial sum."""
        dtypes = {param.accumulated_dtype for param in members}
        if self.unreduced.partial is not None and _reduced_in_any(members):
            dtypes.add(self.unreduced.partial.dtype)  # may be wider, from an earlier backward
        return functools.reduce(torch.promote_types, dtypes)

    def _number(self, layout: ReduceLayout) -> bool:
        """Number reductions by their signatures. Return True if a number changed."""
        _, scatter = self.wire.custom
        members = (layout.members, [shard.signature for shard in layout.shards])
        tensors = tuple(
            (self.params[i].fqn, shard.shape)
            for i, shard in zip(layout.members, layout.shards, strict=True)
        )

        def signature_of(is_scatter: bool) -> Signature:
            sent = layout.wire_dtype if is_scatter else layout.dtype
            dtypes, is_custom = (sent, layout.dtype), scatter is not None
            alone, is_partial = len(layout.zero_copy), self._is_partial
            return Signature(members, alone, dtypes, is_custom, is_partial, tensors)

        return self.ids.reductions.number(signature_of)

    def prepare(self, settings: Settings) -> ReducePlan:
        """Update the scale and the stamps to match the settings, and return the current plan."""
        plan, prepared = self.current_plan, self._prepared
        if plan is not None and prepared[0] is plan and prepared[1] is settings:
            return plan
        is_partial = self.data.summed.size > 1 and not settings.all_reduce_grads
        if is_partial is not self._is_partial:
            self._is_partial = is_partial
            if self.current_plan is not None:
                self.current_plan = self._renumbered(self.current_plan)
        plan = self.plan()
        self._prepared = (plan, settings)
        layout = plan.layout
        self.scale = scale = self.scale_for(layout.wire_dtype, settings)
        joined = 1.0 if scale.op == ReduceOp.AVG else self.data.size * scale.before
        stamps, sent_as = self.ids.reductions, layout.wire_dtype
        stamps.expect(plan.codes, joined, layout.dtype, layout.numel)
        *zero_copy, packed = [layout.numel] if layout.pieces else layout.output_sizes
        self.wire.exact = layout.exact
        scattered = [packed, *zero_copy] * self.data.rows_between
        stamps.register(self.wire, scattered, sent_as, scale.op, layout.pieces)
        return plan

    def scale_for(self, dtype: torch.dtype, settings: Settings) -> GradientScale:
        only_sums = settings.only_sums or self.wire.only_sums
        count = self.wire.summands(self.data.size)
        return GradientScale.choose(count, dtype, settings.divide_by, only_sums)

    @torch.inference_mode(False)
    def _renumbered(self, plan: ReducePlan) -> ReducePlan:
        """Return the plan with current stamp numbers, and otherwise unchanged."""
        layout = plan.layout
        if not self._number(layout):
            return plan
        self._erase_stamps()
        codes = self.ids.reductions.codes
        complete = self._completes.get(tuple(codes))  # making a tail blocks the host
        if complete is None:
            complete = gradient_packing.tail(
                codes, layout, plan.grad_dtype, self._residence.compute
            )
            self._completes[tuple(codes)] = complete
        return replace(plan, codes=codes, complete=complete)

    def follow(self, plan: ReducePlan, settings: Settings) -> ReducePlan:
        """Plan again if a gradient without a fixed dtype has a different dtype than planned."""
        for param in plan.free:
            grad = None if param.unsharded is None else param.unsharded.grad
            if grad is not None and grad.dtype is not param.accumulated_dtype:
                param.found_dtype = grad.dtype
                self.current_plan = None
        if self._sum_dtype(plan.members) is not plan.layout.dtype:
            self.current_plan = None
        return self.prepare(settings)

    def separate(self, enable: bool) -> None:
        """Reduce over a separate process group if ``enable``, else the gathers' one. Collective."""
        data, wire = self.data, self.wire
        wire.is_separate = enable
        is_other = enable and data.shard.size > 1
        shard = data.shard.separate() if is_other else data.shard
        wire.scatter_group = shard.pg if is_other else None
        self.ids.renew_reductions(replace(data, shard=shard))
        self._erase_stamps()
        self.current_plan = None

    def refuse_toggle(self, params: Sequence[FSDPParam]) -> None:
        """Raise StateError, on every rank, if ``requires_grad`` must not change now."""
        if self.unreduced.is_owed or self.unreduced.partial is not None:
            raise StateError(
                "FS312",
                f"{params[0].fqn}: requires_grad changed while gradients of its group are "
                "accumulated without sync. Set it back and run a backward with gradient sync "
                "first, or call reset_iter_state().",
            )

    def _erase_stamps(self) -> None:
        """Erase the stamps in a partial sum, because the next reduction has different stamps."""
        if self.unreduced.partial is not None:
            self.ids.reductions.erase(self.unreduced.partial)


def _reduced_in_any(members: Sequence[FSDPParam]) -> list[FSDPParam]:
    return [param for param in members if param.chosen.is_reduced_in_any]


def _rearranged(partial: Tensor, old: ReduceLayout, new: ReduceLayout) -> Tensor:
    """Move partially reduced gradients ``[rows, numel]`` to another layout of the same members."""
    if old.offsets == new.offsets and old.numel == new.numel:
        return partial.to(new.dtype)
    moved = partial.new_zeros((len(partial), new.numel), dtype=new.dtype)
    parts = [(old.offsets[p], new.offsets[p], old.width(p)) for p in range(len(old.members))]
    for source, target, width in [*parts, (old.tail_start, new.tail_start, len(old.members))]:
        moved[:, target : target + width] = partial[:, source : source + width]
    return moved

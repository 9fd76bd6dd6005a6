"""The functional step of a unit: what its modules do while a compiled model runs.

Owns the inputs of a group's functions (``TracedGroup``), and when a unit's parameters are there
(``TracedUnit``). It must not know the compiler.

[Note: the functional step]
While a functional step runs, no sharded parameter is registered on a module. Units are gathered
into *new* tensors, which are registered, used and forgotten: all of them before the model runs, if
one graph holds it (a pass moves each gather to its first use), else each when it is called. No
stream, no storage that is freed, no state: the functions in ``_compiled.ops`` are all that happens,
so it does not matter which parts of the step a compiler traced and which ran eagerly. Who frees
what is decided by the compiler, from uses; that a unit reshards after forward means that
``unshard`` is computed again in backward.

[Note: gradients that wait]
Without sync whole gradients leave the graph, and wait where eager ones do. If one graph holds the
model, the next recorded forward with sync *claims* what waits: its backward adds that to its own
gradients and reduces the sum. The claim lives with the graph, so that a forward without a backward
gives back what it took. What nobody claimed, or whose unit was not used, is reduced eagerly at the
end of a backward with sync (``OwedReductions``).

[Note: recorded as the step is]
A unit's parameters may be gathered where gradients are off and used where they are on: of a list
the first module is checkpointed (the reentrant kind runs it without gradients) or called under
``no_grad``, the second is not. So a gather is recorded if the step is, whatever holds where a
module is called.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor

from fsdp2._compiled.ops import outer_gather, unshard
from fsdp2._compiled.plan import (
    Neighbours,
    ReducePiece,
    TracedPlan,
    key_of,
    plans,
)
from fsdp2._core.base import torch_compiler, torch_dtensor, torch_modes
from fsdp2._core.base.containers import Loan, map_tensors
from fsdp2._core.base.errors import StateError
from fsdp2._core.engine.tree import Unit
from fsdp2._core.params import gradient_packing, packing
from fsdp2._core.params.gradients import as_gradient
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.layout import GatherLayout
from fsdp2._core.params.param import FSDPParam
from fsdp2._core.params.reduce import accumulate


class Claim:
    """Gradients that waited for a reduction, and that a recorded forward will reduce with its own.

    If its graph is dropped instead, they wait again.
    """

    def __init__(self, group: ParamGroup, params: Sequence[FSDPParam]) -> None:
        self.added: list[Tensor] = []
        self.mask = tuple(map(_waits, params))
        taken = []
        for param in params:
            grad = None if param.unsharded is None else param.unsharded.grad
            if grad is not None:
                param.unsharded.grad = None  # type: ignore[union-attr]  # it has a gradient
                self.added.append(torch_dtensor.local_part(grad))
                taken.append((param, grad))
        self.give_back = weakref.finalize(self, _let_wait, group, taken)
        self.give_back.atexit = False

    def settle(self, fqn: str) -> None:
        """They are reduced.

        Raises:
            StateError: they were, before.
        """
        if self.give_back.detach() is None:
            raise StateError(
                "FS807",
                f"{fqn or '<root>'}: a second backward ran through a compiled forward whose first "
                "one has reduced gradients that waited for sync, which would count twice. Run the "
                "forward again instead of retain_graph=True.",
            )


def _waits(param: FSDPParam) -> bool:
    """True if a gradient of a parameter waits for a reduction."""
    return param.unsharded is not None and param.unsharded.grad is not None


@torch.no_grad()
def _let_wait(group: ParamGroup, grads: Iterable[tuple[FSDPParam, Tensor]]) -> None:
    """Let unsharded gradients of a group wait for a reduction."""
    waits = group.reducer.unreduced
    waits.is_owed = waits.is_waiting = True
    for param, grad in grads:
        leaf = param.unsharded
        assert leaf is not None
        if leaf.grad is None:
            leaf.grad = grad
        else:
            leaf.grad += grad


class _Sinks(torch.autograd.Function):
    """Make tensors without memory; hand over what gradients they get, all at once.

    See [Note: the gradient of unshard] in ``ops``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        leaf: Tensor,
        deliver: Callable[[Sequence[Tensor | None]], None],
        shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    ) -> tuple[Tensor, ...]:
        ctx.deliver = deliver
        ctx.set_materialize_grads(False)
        made = {dtype: leaf.new_zeros((), dtype=dtype) for _, dtype in shapes}
        return tuple(made[dtype].expand(shape) for shape, dtype in shapes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        if any(grad is not None for grad in grads):
            ctx.deliver(grads)
        return None, None, None


class Delivery:
    """What takes the gradients of one forward: it knows by which plan they were made.

    A graph may return one tensor for two gradients, or one that the user gave to backward; what a
    parameter has in ``grad`` is its own. So what is no result of a collective is copied, and so is
    memory that the same backward has delivered (``delivered``: addresses).
    """

    def __init__(
        self, group: ParamGroup, key: str, joins: bool, claim: Claim | None, delivered: set[int]
    ) -> None:
        self._group = group
        self._key = key
        self._joins = joins  # the graph has reduced what waited, too
        self._claim = claim
        self._delivered = delivered

    @torch_compiler.always_eager
    def __call__(self, grads: Sequence[Tensor | None]) -> None:
        """Give gradients to the sharded parameters; without sync, let them wait.

        Raises:
            StateError: what is trained changed since the forward; see ``Claim``.
        """
        plan, group = plans[self._key], self._group
        *given, missing = grads
        params = [group.params[index] for index in plan.members]
        if tuple(param.trainable for param in group.params) != plan.trainable:
            raise StateError(
                "FS312",
                f"{group.fqn or '<root>'}: requires_grad changed between a compiled forward "
                "and its backward. Change it before the forward.",
            )
        if not plan.syncs:
            pairs = zip(params, given, strict=True)
            _let_wait(group, ((p, _as_waiting(grad, p)) for p, grad in pairs if grad is not None))
            return
        if self._claim is not None:
            self._claim.settle(group.fqn)
        rows = [self._own(row, plan) for row in given if row is not None]
        if missing is None or not plan.counts_used:
            used = set(range(len(params)))
        else:  # to look costs a synchronisation on a device; who has all gradients need not
            first, row = plan.reduces[0], rows[0]
            counts = row[first.layout.tail_start :].tolist()
            used = {position for position, count in enumerate(counts) if count != 0}
        if self._joins:
            group.reducer.unreduced.is_owed = group.reducer.unreduced.is_waiting = False
        found = {
            place: _sharded(row, piece, position, params[place], group)
            for piece, row in zip(plan.reduces, rows, strict=True)
            for position, place in enumerate(piece.positions)
            if place in used
        }
        places = sorted(found)
        accumulate([params[p].sharded for p in places], [found[p] for p in places])

    def _own(self, row: Tensor, plan: TracedPlan) -> Tensor:
        address = row.untyped_storage().data_ptr()
        if plan.size == 1 or address in self._delivered:
            return row.clone()
        self._delivered.add(address)
        return row


def _as_waiting(grad: Tensor, param: FSDPParam) -> Tensor:
    """Return a local gradient as it waits: over the parameter's own axes, to be added or kept."""
    if not _waits(param):
        grad = grad.clone(memory_format=torch.contiguous_format)
    spec = param.placement.unsharded_spec(grad.dtype)
    return grad if spec is None else torch_dtensor.new_dtensor(grad, spec)


def _sharded(
    row: Tensor, piece: ReducePiece, position: int, param: FSDPParam, group: ParamGroup
) -> Tensor:
    """Return the sharded gradient of a member, from the row that its piece was reduced to."""
    if piece.layout.slotted[position]:
        local = gradient_packing.sum_of_slots(row, piece.layout, position)
    else:
        rank = group.data.shard.rank
        local = gradient_packing.gradient_view(row, piece.layout, position, rank).contiguous()
    dtype = param.kept_dtype(row.dtype)
    if row.is_complex() and not dtype.is_complex:
        local = local.real
    return as_gradient(local.to(device=group.residence.storage, dtype=dtype), param)


class TracedGroup:
    """The inputs of a group's functions, and what becomes of its gradients."""

    def __init__(self, group: ParamGroup, mover: TracedUnit) -> None:
        self.group = group
        self.mover = mover
        self.params = list(group.params)
        self.key = ""
        self.waits = False
        self.syncs = True
        self.flats: list[Tensor] = []
        self.sinks: list[Tensor] = []
        self.added: list[Tensor] = []
        self.claim: Claim | None = None  # while the forward runs; then its graph holds it
        self.slots: tuple[tuple[nn.Module, str, int], ...] = ()
        self.wraps: tuple[Any, ...] = ()
        self.again: tuple[Tensor, ...] | None = None  # whole, in a backward
        self._leaf = _leaf_on(group.residence.compute)
        self._made_for: tuple[Any, ...] = ()  # compared by identity

    @torch.inference_mode(False)
    def refresh(self, keeps: bool, records: bool, joins: bool, delivered: set[int]) -> None:
        """Follow what changed since the last step: dtypes, ``requires_grad``, settings, memory.

        ``joins``: gradients that wait are reduced by the graph. ``delivered``: see ``Delivery``.

        Raises:
            StateError: gradients wait that were reduced over a part of the ranks.
        """
        group, reducer = self.group, self.group.reducer
        buffer = group.buffers.home
        assert buffer is not None  # the group was looked at
        if reducer.unreduced.partial is not None:
            raise StateError(
                "FS808",
                f"{group.fqn or '<root>'}: gradients that were reduced without the replicas wait "
                "for them, which a compiled step cannot join. Run the backward that reduces them "
                "(set_requires_all_reduce) with the model itself, or call reset_iter_state().",
            )
        reduction, settings = reducer.prepare(group.settings), group.settings
        self.let_go()
        self.syncs = syncs = settings.reduce_grads or not records
        claim = None
        if records and joins and settings.reduce_grads and reducer.unreduced.is_owed:
            members = [param for param in self.params if param.trainable]
            claim = Claim(group, members) if any(map(_waits, members)) else None
        mask = () if claim is None else claim.mask
        made_for = (buffer, reduction, keeps, group.buffers.post_forward.mesh, settings, syncs)
        is_same = all(a is b for a, b in itertools.zip_longest(made_for, self._made_for))
        if not is_same or plans[self.key].added != mask:
            plan = self._plan(buffer.layout, keeps, syncs, mask)
            self.key = key_of(plan)
            self.waits = plan.neighbours is not None
            if not syncs:
                group.prepare_unsharded()
        if self._made_for[:2] != made_for[:2]:
            self.flats = [
                nn.Parameter(
                    packing.typed(buffer.flat, s.shard_start, s.numel, s.storage_dtype),
                    requires_grad=False,
                )
                for s in buffer.layout.segments
            ]
            self.slots = tuple(
                (site.module, site.name, index)
                for index, param in enumerate(self.params)
                for site in param.sites
            )
            self.wraps = tuple(
                param.placement.unsharded_spec(param.compute_dtype) for param in self.params
            )
        self._made_for = made_for
        self.claim, self.added = claim, [] if claim is None else claim.added
        plan = plans[self.key]
        if records and plan.members:
            deliver = Delivery(group, self.key, joins, claim, delivered)
            with torch.enable_grad():
                self.sinks = list(_Sinks.apply(self._leaf, deliver, plan.sinks))  # type: ignore[no-untyped-call]  # torch's own

    def _plan(
        self, layout: GatherLayout, keeps: bool, syncs: bool, added: tuple[bool, ...]
    ) -> TracedPlan:
        group, reducer = self.group, self.group.reducer
        data, reduction, settings = group.data, reducer.plan(), group.settings
        scale, smaller = reducer.planner.scale, group.buffers.post_forward.mesh
        neighbours = None
        if smaller is not None and not keeps and layout.gather_nbytes:
            alone = data.replicate.size == 1
            neighbours = Neighbours(
                smaller.shard.size,
                smaller.shard.rank,
                _name_of(smaller.replicate) if alone else "",
                _name_of(smaller.shard),
            )
        return TracedPlan(
            layout=layout,
            rank=data.shard.rank,
            device=str(group.residence.compute),
            shard_group=_name_of(data.shard),
            replicate_group=_name_of(data.replicate),
            neighbours=neighbours,
            recompute=not keeps,
            trainable=tuple(param.trainable for param in self.params),
            widened=tuple(map(_widened, self.params)),
            reduce_dtype=reduction.layout.dtype,
            gradient_wire_dtype=reduction.layout.wire_dtype,
            grad_dtypes=tuple(_widened(p) or p.backward_dtype for p in self.params if p.trainable),
            scale=(scale.before, scale.after),
            op="avg" if scale.op == ReduceOp.AVG else "sum",
            counts_used=not settings.reduce_unused,
            # without the two that are about parts of roots, which a graph has no use for
            overlap=replace(settings.overlap, keeps_parts=False, synchronizes=False),
            bucketed=self.mover.bucketed,
            syncs=syncs,
            added=added,
        )

    def let_go(self) -> None:
        """Hold nothing of a forward that is over: its graph does."""
        self.sinks, self.added, self.claim = [], [], None

    def abandon(self) -> None:
        """The forward failed: what it claimed waits again, whoever holds what is left of it."""
        if self.claim is not None:
            self.claim.give_back()
        self.let_go()

    # In the trace.

    def wholes(self) -> Sequence[Tensor]:
        """Gather; return the unsharded parameters."""
        waiting = outer_gather(self.key, self.flats) if self.waits else []
        tensors = unshard(self.key, self.sinks, waiting, self.added, self.flats)
        if any(spec is not None for spec in self.wraps):
            return tuple(
                tensor if spec is None else _wrap(tensor, spec).to(param.compute_dtype)
                for tensor, spec, param in zip(tensors, self.wraps, self.params, strict=True)
            )
        return tensors  # type: ignore[no-any-return]  # of an operation

    # In backward, see _compiled.backward.

    def wholes_again(self) -> tuple[Tensor, ...]:
        """Gather in backward, unless that was done and not forgotten."""
        if self.again is None:
            torch_modes.run_aside(self._gather_again)
            assert self.again is not None
        return self.again

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _gather_again(self) -> None:
        self.again = tuple(self.wholes())


@torch.inference_mode(False)
def _leaf_on(device: torch.device) -> Tensor:
    """Make what sinks hang on, so that gradients are computed for them."""
    return torch.zeros((), device=device, dtype=torch.float32, requires_grad=True)


def _widened(param: FSDPParam) -> torch.dtype | None:
    """Dtype in which the gradient of a parameter is summed over its own axes, if it is wider."""
    dtype = param.accumulated_dtype
    if not param.trainable or dtype.itemsize <= param.compute_dtype.itemsize:
        return None
    return dtype if param.placement.may_sum_gradients else None


def _wrap(tensor: Tensor, spec: Any) -> Tensor:
    """Return a DTensor over the parameter's own axes."""
    return DTensor.from_local(
        tensor, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )


def _name_of(axis: Any) -> str:
    """Return the name by which functional collectives know a process group; none for one rank."""
    return "" if axis.size == 1 else axis.pg.group_name


class TracedUnit:
    """What a unit does in a functional step. See [Note: the functional step]."""

    def __init__(self, unit: Unit, bucketed: bool = True) -> None:
        self.unit = unit
        self.bucketed = bucketed
        self.groups: tuple[TracedGroup, ...] = ()
        self._made_of: list[ParamGroup] = []
        self._forwards: dict[nn.Module, Callable[..., Any]] = {}  # of regions
        self.has_several_modules = len(unit.modules) > 1
        self.ran_outside = False
        self._is_recorded = False
        self.input_dtype: torch.dtype | None = None
        self.output_dtype: torch.dtype | None = None

    # Around the trace.

    def begin(self, joins: bool, delivered: set[int]) -> None:
        """Prepare a step: sharded parameters make room for those that the step will gather."""
        if self._made_of != self.unit.groups:
            self._made_of = list(self.unit.groups)
            self._forwards.clear()  # they know where parameters are registered
            self.groups = tuple(TracedGroup(group, self) for group in self.unit.groups)
        self._is_recorded = records = torch.is_grad_enabled()
        self.input_dtype = self.unit.precision.input_dtype  # others in evaluation, maybe
        self.output_dtype = self.unit.precision.policy.output_dtype
        keeps = self.unit.keeps_after_forward(True)
        for group in self.groups:
            group.refresh(keeps, records, joins, delivered)

    def enter_regions(self) -> None:
        """Let the forwards of modules that are marked as regions get their parameters, too."""
        for module in self.unit.modules:
            region = torch_compiler.region_of(module)
            if region is not None:
                if module not in self._forwards:
                    self._forwards[module] = self._region_forward(module, region)
                module.__dict__["forward"] = self._forwards[module]

    def leave_regions(self) -> None:
        for module in self._forwards:
            module.__dict__.pop("forward", None)

    def _region_forward(self, module: nn.Module, region: Callable[..., Any]) -> Callable[..., Any]:
        slots = [slot for group in self.groups for slot in group.slots]

        def forward(*args: Any, **kwargs: Any) -> Any:
            wholes = [holder._parameters[name] for holder, name, _ in slots]
            return region(module, wholes, args, kwargs)

        return forward

    def put_parameters_back(self) -> None:
        for group in self.groups:
            for module, name, index in group.slots:
                module._parameters[name] = group.params[index].sharded

    # In the trace.

    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module of the unit with whole parameters."""
        if not torch.compiler.is_compiling():
            self.ran_outside = True
        gathers = not self._is_whole()
        if gathers and not torch.is_grad_enabled() and self._is_recorded:
            with torch.inference_mode(False), torch.enable_grad():
                self.gather()
        elif gathers:
            self.gather()
        output = self.compute(run, args, kwargs)
        if gathers and not self.has_several_modules:
            self.forget()
        return output

    def gather(self) -> None:
        for group in self.groups:
            wholes = group.wholes()
            for module, name, index in group.slots:
                module._parameters[name] = wholes[index]  # type: ignore[assignment]  # no leaf

    def compute(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module of the unit, whose parameters are there, with the casts of its policy."""
        loan = Loan(lambda t: _cast(t, self.input_dtype))
        if self.input_dtype is not None or self.output_dtype is not None:
            args = tuple([loan.exchange(arg) for arg in args])
            kwargs = {name: loan.exchange(arg) for name, arg in kwargs.items()}
        output = run(*args, **kwargs)
        loan.give_back()
        if self.output_dtype is not None:
            output = map_tensors(lambda t: _cast(t, self.output_dtype), output)
            loan.map_added(lambda t: _cast(t, self.output_dtype))
        return output

    def _is_whole(self) -> bool:
        for group in self.groups:
            for module, name, _ in group.slots:
                return module._parameters[name] is not None
        return True

    def forget(self) -> None:
        """Take the parameters off the modules, so that no graph has to return them."""
        for group in self.groups:
            for module, name, _ in group.slots:
                module._parameters[name] = None


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    return tensor.to(dtype)

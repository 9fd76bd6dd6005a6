"""The functional step of a unit: the behaviour of its modules while a compiled model runs.

Owns the inputs of a group's traced functions (``TracedGroup``), and determines when a unit's
parameters are unsharded (``TracedUnit``). Independent of the compiler.

[Note: the functional step]
During a functional step, no sharded parameter is registered on a module. Units are gathered into
*new* tensors, which are registered, used and released. If the whole model is one graph, all units
are gathered before the model runs (a graph pass moves each gather to its first use); otherwise each
unit is gathered when it is called. A step uses only the operations in ``_compiled.ops``, and no
streams, freed storages or unit states, so it may be partly traced and partly eager. The compiler
frees tensors after their last use. If a unit reshards after forward, backward reruns ``unshard``.

[Note: gradients that wait]
Without gradient sync, the graph returns unreduced gradients, which are stored as in eager mode. If
the whole model is one graph, the next forward that has sync and is recorded by autograd *claims*
the stored gradients: its backward adds them to the gradients that it computes, and reduces the
sums. The claim belongs to that forward's autograd graph: if the graph is freed without a backward,
the gradients are stored again. Unclaimed gradients and gradients of unused units are reduced when a
backward with sync ends (``OwedReductions``).

[Note: recorded as the step is]
A unit's parameters may be gathered in no-grad mode but used in grad mode: if a unit has several
modules, the first may run under ``no_grad`` or reentrant checkpointing, and the second normally.
Autograd therefore records a gather if it records the step, regardless of the module's grad mode.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor

from fsdp2._compiled.ops import outer_gather, unshard
from fsdp2._compiled.plan import Joining, Neighbours, TracedPlan, key_of, plans
from fsdp2._core.base import torch_compiler, torch_dtensor, torch_modes
from fsdp2._core.base.containers import Loan, map_tensors
from fsdp2._core.base.errors import StateError
from fsdp2._core.engine.tree import Unit
from fsdp2._core.params import gradient_packing, packing
from fsdp2._core.params.gradients import as_gradient
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.layout import GatherLayout, ReduceLayout
from fsdp2._core.params.param import FSDPParam
from fsdp2._core.params.reduce import accumulate


class Claim:
    """Stored gradients that a forward claims. If no backward runs, they are stored again."""

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
        """Mark the gradients as reduced. Raise StateError if they were already reduced."""
        if self.give_back.detach() is None:
            raise StateError(
                "FS807",
                f"{fqn or '<root>'}: a second backward ran through the same compiled forward. The "
                "first backward already reduced the gradients accumulated without sync, so the "
                "second would count them twice. Run the forward again instead of using "
                "retain_graph=True.",
            )


def _waits(param: FSDPParam) -> bool:
    return param.unsharded is not None and param.unsharded.grad is not None


@torch.no_grad()
def _let_wait(group: ParamGroup, grads: Iterable[tuple[FSDPParam, Tensor]]) -> None:
    """Add a group's unreduced gradients to the gradients stored for a later reduction."""
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
    """Creates sinks, which are expanded zeros. Passes the gradients of all sinks to ``deliver`` in
    one call. See [Note: the gradient of unshard] in ``ops``."""

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


@dataclass(frozen=True, eq=False)
class Delivery:
    """Sets a group's gradients after a forward. A graph may return one tensor as two gradients, or
    return a tensor that the user passed to backward. A parameter's ``grad`` must not alias such a
    tensor, so a tensor is copied if no collective produced it or if it was already delivered."""

    group: ParamGroup
    key: str  # key of the plan that computed the gradients
    joins: bool  # whether the graph also reduces stored gradients
    claim: Claim | None
    delivered: set[int]  # addresses of storages that this step has delivered

    @torch_compiler.always_eager
    def __call__(self, grads: Sequence[Tensor | None]) -> None:
        """Set the gradients of the sharded parameters or, without sync, store them unreduced. Raise
        StateError if ``requires_grad`` changed since the forward; see also ``Claim.settle``."""
        plan, group = plans[self.key], self.group
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
        if self.claim is not None:
            self.claim.settle(group.fqn)
        rows = [self._own(row, plan) for row in given if row is not None]
        if missing is None or not plan.counts_used:
            used = set(range(len(params)))
        else:  # a gradient is missing: read the counts, which synchronizes the device
            counts = rows[0][plan.reduces[0].tail_start :].tolist()
            used = {position for position, count in enumerate(counts) if count != 0}
        if self.joins:
            group.reducer.unreduced.is_owed = group.reducer.unreduced.is_waiting = False
        found = {
            place: _sharded(row, piece, position, params[place], group)
            for piece, row in zip(plan.reduces, rows, strict=True)
            for position, place in enumerate(piece.members)
            if place in used
        }
        places = sorted(found)
        accumulate([params[p].sharded for p in places], [found[p] for p in places])

    def _own(self, row: Tensor, plan: TracedPlan) -> Tensor:
        address = row.untyped_storage().data_ptr()
        if plan.size == 1 or address in self.delivered:
            return row.clone()
        self.delivered.add(address)
        return row


def _as_waiting(grad: Tensor, param: FSDPParam) -> Tensor:
    """Return a local gradient to store, as a DTensor if the unsharded parameter is a DTensor."""
    if not _waits(param):
        grad = grad.clone(memory_format=torch.contiguous_format)
    spec = param.placement.unsharded_spec(grad.dtype)
    return grad if spec is None else torch_dtensor.new_dtensor(grad, spec)


def _sharded(
    row: Tensor,
    piece: ReduceLayout,
    position: int,
    param: FSDPParam,
    group: ParamGroup,
) -> Tensor:
    """Return a parameter's sharded gradient from the reduced row of the parameter's piece."""
    if piece.slotted[position]:
        local = gradient_packing.sum_of_slots(row, piece, position)
    else:
        rank = group.data.shard.rank
        local = gradient_packing.gradient_view(row, piece, position, rank).contiguous()
    dtype = param.kept_dtype(row.dtype)
    if row.is_complex() and not dtype.is_complex:
        local = local.real
    return as_gradient(local.to(device=group.residence.storage, dtype=dtype), param)


class TracedGroup:
    """The inputs of a group's traced functions, and the destination of its gradients."""

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
        self.claim: Claim | None = None  # set during the forward, then owned by the graph
        self.slots: tuple[tuple[nn.Module, str, int], ...] = ()
        self.wraps: tuple[Any, ...] = ()
        self.again: tuple[Tensor, ...] | None = None  # parameters gathered again in backward
        self._leaf = _leaf_on(group.residence.compute)
        self._made_for: tuple[Any, ...] = ()  # what the plan was made for

    @torch.inference_mode(False)
    def refresh(self, joins: bool, delivered: set[int]) -> None:
        """Apply all changes to dtypes, ``requires_grad``, settings and buffers since the last step.
        ``joins``: whether the graph reduces stored gradients. Raise StateError if a stored gradient
        still needs an all-reduce over replicas."""
        group, reducer = self.group, self.group.reducer
        keeps = self.mover.unit.keeps_after_forward(True)
        records = self.mover.is_recorded
        buffer = group.buffers.home
        assert buffer is not None  # set by ``inspect``
        if reducer.unreduced.partial is not None:
            raise StateError(
                "FS808",
                f"{group.fqn or '<root>'}: some gradients still need an all-reduce over replicas, "
                "which compiled steps do not support. Run the backward that all-reduces them "
                "(set_requires_all_reduce) on the original model, or call reset_iter_state().",
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
        if made_for != self._made_for or plans[self.key].added != mask:
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
        scale, smaller = reducer.scale, group.buffers.post_forward.mesh
        neighbours = None
        if smaller is not None and not keeps and layout.gather_nbytes:
            neighbours = Neighbours(
                smaller.shard.size,
                smaller.shard.rank,
                _name_of(smaller.replicate) if data.replicate.size == 1 else "",
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
            reduction=Joining(
                reduction.layout.dtype,
                reduction.layout.wire_dtype,
                (scale.before, scale.after),
                "avg" if scale.op == ReduceOp.AVG else "sum",
            ),
            grad_dtypes=tuple(_widened(p) or p.backward_dtype for p in self.params if p.trainable),
            counts_used=not settings.reduce_unused,
            # graphs ignore these two settings, which affect the separate parts of a root
            overlap=replace(settings.overlap, keeps_parts=False, synchronizes=False),
            bucketed=self.mover.bucketed,
            syncs=syncs,
            added=added,
        )

    def let_go(self) -> None:
        """Drop references to a completed forward's tensors; the graph has its own references."""
        self.sinks, self.added, self.claim = [], [], None

    def abandon(self) -> None:
        """Give back claimed gradients after a failed forward, even if its graph is still alive."""
        if self.claim is not None:
            self.claim.give_back()
        self.let_go()

    def wholes(self) -> Sequence[Tensor]:
        """Gather and return the unsharded parameters. The compiler traces this method."""
        waiting = outer_gather(self.key, self.flats) if self.waits else []
        tensors = unshard(self.key, self.sinks, waiting, self.added, self.flats)
        if any(spec is not None for spec in self.wraps):
            return tuple(
                tensor if spec is None else _wrap(tensor, spec).to(param.compute_dtype)
                for tensor, spec, param in zip(tensors, self.wraps, self.params, strict=True)
            )
        return tensors  # type: ignore[no-any-return]  # custom operations are untyped

    def wholes_again(self) -> tuple[Tensor, ...]:
        """Return the parameters, gathered in backward unless an earlier result is available."""
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
    """Create the leaf from which sinks are computed, so that sinks require grad."""
    return torch.zeros((), device=device, dtype=torch.float32, requires_grad=True)


def _widened(param: FSDPParam) -> torch.dtype | None:
    """Return the widened dtype for gradient sums over a parameter's own axes, or None."""
    dtype = param.accumulated_dtype
    if not param.trainable or dtype.itemsize <= param.compute_dtype.itemsize:
        return None
    return dtype if param.placement.may_sum_gradients else None


def _wrap(tensor: Tensor, spec: Any) -> Tensor:
    return DTensor.from_local(
        tensor, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )


def _name_of(axis: Any) -> str:
    """Return an axis's group name for functional collectives, or "" for an axis of one rank."""
    return "" if axis.size == 1 else axis.pg.group_name


class TracedUnit:
    """A unit in a functional step. See [Note: the functional step]."""

    def __init__(self, unit: Unit, bucketed: bool = True) -> None:
        self.unit = unit
        self.bucketed = bucketed
        self.groups: tuple[TracedGroup, ...] = ()
        self._forwards: dict[nn.Module, Callable[..., Any]] = {}  # keyed by region module
        self.has_several_modules = len(unit.modules) > 1
        self.ran_outside = False
        self.is_recorded = False  # by autograd
        self.input_dtype: torch.dtype | None = None
        self.output_dtype: torch.dtype | None = None

    def begin(self, joins: bool, delivered: set[int]) -> None:
        """Prepare a step, during which modules have unsharded instead of sharded parameters."""
        if [traced.group for traced in self.groups] != self.unit.groups:
            self._forwards.clear()  # cached forwards contain a snapshot of the groups' slots
            self.groups = tuple(TracedGroup(group, self) for group in self.unit.groups)
        self.is_recorded = torch.is_grad_enabled()
        self.input_dtype = self.unit.precision.input_dtype  # evaluation may use a different policy
        self.output_dtype = self.unit.precision.policy.output_dtype
        for group in self.groups:
            group.refresh(joins, delivered)

    def enter_regions(self) -> None:
        """On modules marked as regions, install a forward that passes parameters as inputs."""
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

    # The following methods are traced.

    def call(
        self,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if not torch.compiler.is_compiling():
            self.ran_outside = True
        gathers = not self._is_whole()
        if gathers and not torch.is_grad_enabled() and self.is_recorded:
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
                module._parameters[name] = wholes[index]  # type: ignore[assignment]  # not a leaf

    def compute(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module of a gathered unit, with the casts that the unit's policy specifies."""
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
        """Remove the parameters from the modules, because a graph would otherwise return them."""
        for group in self.groups:
            for module, name, _ in group.slots:
                module._parameters[name] = None


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    return tensor.to(dtype)

"""The functional step of a unit: what its modules do while a compiled model runs.

Owns the inputs of a group's functions (``TracedGroup``), and when a unit's parameters are there
(``TracedUnit``). It must not know the compiler.

[Note: the functional step]
While a functional step runs, no parameter is registered on a module: a unit that is called gathers
its parameters into *new* tensors, registers these, runs, and forgets them. No stream, no storage
that is freed, no state: the functions in ``_compiled.ops`` are all that happens, so it does not
matter which parts of the step a compiler traced and which ran eagerly. Who frees what is decided by
the compiler, from uses; that a unit reshards after forward means that ``unshard`` is computed again
in backward.

[Note: recorded as the step is]
A unit's parameters may be gathered where gradients are off and used where they are on: of a list
the first module is checkpointed (the reentrant kind runs it without gradients) or called under
``no_grad``, the second is not. So a gather is recorded if the step is, whatever holds where a
module is called.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor

from fsdp2._base import torch_compiler, torch_modes
from fsdp2._base.containers import map_tensors
from fsdp2._base.errors import StateError
from fsdp2._compiled.ops import (
    Neighbours,
    TracedPlan,
    incomplete,
    key_of,
    outer_gather,
    plans,
    unshard,
)
from fsdp2._engine.unit import Unit
from fsdp2._param_group import packing
from fsdp2._param_group.gradient_buffer import accumulate
from fsdp2._param_group.group import ParamGroup
from fsdp2._param_group.layout import GatherLayout, ReduceLayout
from fsdp2._param_group.param import FSDPParam


class TracedGroup:
    """The inputs of a group's functions, and what becomes of its gradients."""

    def __init__(self, group: ParamGroup, mover: TracedUnit) -> None:
        self.group = group
        self.mover = mover
        self.key = ""
        self.recompute = False
        self.waits = False
        self.flats: tuple[Tensor, ...] = ()
        self.sink: nn.Parameter | None = None
        self.slots: tuple[tuple[nn.Module, str, int], ...] = ()
        self.wraps: tuple[Any, ...] = ()
        self.again: tuple[Tensor, ...] | None = None  # whole, in a backward
        self._made_for: tuple[Any, ...] = ()

    @torch.inference_mode(False)
    def refresh(self, keeps: bool) -> None:
        """Follow what changed since the last step: dtypes, ``requires_grad``, settings, memory.

        Raises:
            StateError: gradients wait for a reduction, which no functional step can join.
        """
        group, reducer = self.group, self.group.reducer
        if group.reducer.unreduced.is_owed or reducer.unreduced.is_waiting:
            raise StateError(
                f"{group.fqn or '<root>'}: gradients that were accumulated without sync wait for "
                "their reduction, which a compiled step cannot join. Run the backward that syncs "
                "with the model itself, or call reset_iter_state()."
            )
        buffer = group.home_buffer
        assert buffer is not None  # the group was looked at
        reduction = reducer.prepare(group.settings)
        made_for = (buffer, reduction, reducer.scale, keeps, group.post_forward.mesh)
        if all(a is b for a, b in itertools.zip_longest(made_for, self._made_for)):
            return
        plan = self._plan(buffer.layout, keeps)
        self.key, self.recompute = key_of(plan, group.fqn), plan.recompute
        self.waits = plan.neighbours is not None
        self.flats = tuple(
            nn.Parameter(
                packing.typed(buffer.flat, s.shard_start, s.numel, s.storage_dtype),
                requires_grad=False,
            )
            for s in buffer.layout.segments
        )
        self.sink = self._make_sink(plan.reduce)
        self.slots = tuple(
            (site.module, site.name, index)
            for index, param in enumerate(group.params)
            for site in param.sites
        )
        self.wraps = tuple(
            param.placement.unsharded_spec(param.compute_dtype) for param in group.params
        )
        self._made_for = made_for

    def _plan(self, layout: GatherLayout, keeps: bool) -> TracedPlan:
        group, reducer = self.group, self.group.reducer
        data, reduction = group.data, reducer.plan()
        scale, smaller = reducer.scale, group.post_forward.mesh
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
            shard_group=_name_of(data.shard),
            replicate_group=_name_of(data.replicate),
            neighbours=neighbours,
            recompute=not keeps,
            trainable=tuple(param.trainable for param in group.params),
            reduce=reduction.layout,
            widened=tuple(map(_widened, group.params)),
            grad_dtypes=tuple(_widened(p) or p.backward_dtype for p in reduction.members),
            scale=(scale.before, scale.after),
            op="avg" if scale.op == ReduceOp.AVG else "sum",
            bucketed=self.mover.bucketed,
        )

    def _make_sink(self, layout: ReduceLayout) -> nn.Parameter | None:
        if not layout.members:
            return None
        one = torch.zeros((), dtype=layout.dtype, device=self.group.device)
        sink = nn.Parameter(one.expand(layout.numel))
        sink.register_post_accumulate_grad_hook(functools.partial(self._deliver, self.key))
        return sink

    @torch_compiler.always_eager
    def _deliver(self, key: str, sink: Tensor) -> None:
        """Take the reduced gradients from the sink, and give them to the sharded parameters.

        ``key`` is that of the plan by which they were reduced: a later forward may have another.

        Raises:
            StateError: what is trained changed since the forward.
        """
        reduced, sink.grad = sink.grad, None
        if reduced is None:  # a graph in which nothing of the group takes part in the outputs
            return
        reducer = self.group.reducer
        plan = reducer.plan()
        if plan.layout != plans[key].reduce:
            raise StateError(
                f"{self.group.fqn or '<root>'}: requires_grad changed between a compiled forward "
                "and its backward. Change it before the forward."
            )
        buffer = reducer.acquire()
        grads = buffer.fill(reduced)
        buffer.settle()
        params = [member.sharded for member in plan.members]
        if key in incomplete and not self.group.settings.reduce_unused:
            # Looking costs a synchronisation on a device; who has all gradients need not.
            counts = reduced[plan.layout.tail_start : plan.layout.stamp_start].tolist()
            used = [position for position, count in enumerate(counts) if count != 0]
            params, grads = [params[p] for p in used], [grads[p] for p in used]
        accumulate(params, grads)

    # In the trace.

    def wholes(self) -> tuple[Tensor, ...]:
        """Gather; return the unsharded parameters."""
        waiting = outer_gather(self.key, *self.flats) if self.waits else None
        tensors = unshard(self.key, self.sink, waiting, *self.flats)
        if any(spec is not None for spec in self.wraps):
            return tuple(
                tensor if spec is None else _wrap(tensor, spec).to(param.compute_dtype)
                for tensor, spec, param in zip(tensors, self.wraps, self.group.params, strict=True)
            )
        return tensors

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
        self.again = self.wholes()


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
        self.has_several_modules = len(unit.modules) > 1
        self.ran_outside = False
        self._is_recorded = False
        self.input_dtype: torch.dtype | None = None
        self.output_dtype: torch.dtype | None = None

    # Around the trace.

    def begin(self) -> None:
        """Prepare a step: sharded parameters make room for those that the step will gather."""
        if [group.group for group in self.groups] != self.unit.groups:
            self.groups = tuple(TracedGroup(group, self) for group in self.unit.groups)
        self._is_recorded = torch.is_grad_enabled()
        self.input_dtype = self.unit.precision.input_dtype  # others in evaluation, maybe
        self.output_dtype = self.unit.precision.policy.output_dtype
        keeps = self.unit.keeps_after_forward(True)
        for group in self.groups:
            group.refresh(keeps)

    def put_parameters_back(self) -> None:
        for group in self.groups:
            params = group.group.params
            for module, name, index in group.slots:
                module._parameters[name] = params[index].sharded

    # In the trace.

    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module of the unit with whole parameters."""
        if not torch.compiler.is_compiling():
            self.ran_outside = True
        gathers = not self._is_whole()
        if gathers and not torch.is_grad_enabled() and self._is_recorded:
            with torch.inference_mode(False), torch.enable_grad():
                self._gather()
        elif gathers:
            self._gather()
        output = self.compute(run, args, kwargs)
        if gathers and not self.has_several_modules:
            self.forget()
        return output

    def _gather(self) -> None:
        for group in self.groups:
            wholes = group.wholes()
            for module, name, index in group.slots:
                module._parameters[name] = wholes[index]  # type: ignore[assignment]  # no leaf

    def compute(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a module of the unit, whose parameters are there, with the casts of its policy."""
        dtype = self.input_dtype
        if dtype is not None:
            args = tuple([map_tensors(lambda t: _cast(t, dtype), arg) for arg in args])
            kwargs = {
                name: map_tensors(lambda t: _cast(t, dtype), arg) for name, arg in kwargs.items()
            }
        output = run(*args, **kwargs)
        if self.output_dtype is not None:
            output = map_tensors(lambda t: _cast(t, self.output_dtype), output)
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

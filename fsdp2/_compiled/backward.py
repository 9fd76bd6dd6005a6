"""Backward of a functional step, where modules are recomputed outside of graphs.

Owns the parameters that a module reads then (``FunctionalBackward``). Independent of the compiler.

[Note: recomputed outside of graphs]
Activation checkpointing that the compiler did not trace runs modules again in backward, after the
functional step. It may run a unit, one module of a list, a conditional unit whose parameters
another unit gathers, or any layer or function inside a unit, where we have no hooks. All of these
*read parameters*. So from the moment a backward reaches an output of the step until it ends,
reading a parameter that is still sharded gathers its group. The registered parameters are the
shards throughout; a recomputation reads unsharded ones.

- Reading by name (``module.weight``) counts as recomputation. A hook, which must see shards (and
  may run on one rank only), may call ``parameters()``. So that returns unsharded parameters only
  where grad mode is on or inside a unit's call; hooks run outside of both.
- A unit that is called is gathered at the start of the call and released after it, so ranks that
  use different parameters of the unit issue the same gathers. Otherwise its parameters are kept
  until another unit's are read or the backward ends. Early release only costs one more gather.
- Autograd records every gather. With reentrant checkpointing, gradients flow through it, and are
  reduced and accumulated at the end of the inner backward. With the non-reentrant kind, only its
  values are used, and gradients flow through the gather of the forward.
- Reentrant checkpointing runs backwards inside the backward, each with its own graph task number.
  Only the end of the outer one counts: its callback runs then, or is destroyed if that backward
  fails.

The engine's hooks do not report the end of the backward, and do not cover layers inside units.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._compiled.functional import TracedGroup, TracedUnit
from fsdp2._core.base import torch_autograd, torch_compiler
from fsdp2._core.base.containers import visit_tensors
from fsdp2._core.base.errors import StateError
from fsdp2._core.base.events import IDLE
from fsdp2._core.engine.tree import EndOfBackward, Unit
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.reduce import ReductionQueue
from fsdp2._core.params.registration import FORM_SHARDED


def watch(outputs: Any, begin: Callable[[tuple[Tensor | None, ...]], None]) -> None:
    """Call ``begin`` when a backward reaches one of these outputs, before its other nodes run."""

    def look(tensor: Tensor) -> None:
        # an in-place update of a view gives its base another node
        base = torch_autograd.base_of(tensor)
        for made in (tensor,) if base is None else (tensor, base):
            if made.grad_fn is not None:
                made.grad_fn.register_prehook(begin)

    visit_tensors(look, outputs)


class OwedReductions:
    """Reduces, at the end of a backward with sync, waiting gradients that no graph has reduced:
    those of units that the step did not use, all of them if there are graph breaks, and those of a
    forward without sync whose backward runs with sync."""

    def __init__(self, groups: Sequence[TracedGroup]) -> None:
        self._groups = [group.group for group in groups]
        self._claims = [group.claim for group in groups if group.claim is not None]
        self._is_running = False

    @torch_compiler.always_eager
    def begin(self, _grads: tuple[Tensor | None, ...]) -> None:
        if not self._is_running:
            self._is_running = True
            EndOfBackward(self._end, self._fail)

    def _fail(self) -> None:
        self._is_running = False

    def _end(self) -> None:
        self._is_running = False
        for claim in self._claims:
            claim.give_back()
        queue: ReductionQueue | None = None
        for group in self._groups:
            if group.reducer.unreduced.is_owed and group.settings.reduce_grads:
                queue = queue or ReductionQueue(group.context, is_large=False)
                queue.reduce(group.reducer, group.settings, with_graph=False)
        if queue is not None:
            queue.wait()


class FunctionalBackward:
    """The units of a functional step during its backward."""

    def __init__(self, units: Sequence[TracedUnit]) -> None:
        self._units = units
        self._open: dict[Unit, TracedUnit] = {}
        self._groups: dict[ParamGroup, TracedGroup] = {}
        self._kept: TracedUnit | None = None
        self._depth = 0
        self._number = 0
        self._placed: list[tuple[TracedGroup, Any]] = []  # the groups covered by ``_places``
        self._places: dict[nn.Module, dict[str, _Place]] = {}
        self._registered: dict[nn.Module, dict[str, Any]] = {}

    @torch_compiler.always_eager
    def begin(self, _grads: tuple[Tensor | None, ...]) -> None:
        """Make modules read unsharded parameters, from an output's first gradient to the end."""
        if self._open:
            return
        self._number += 1
        end = functools.partial(self.end, self._number)
        EndOfBackward(end, end)
        for traced in self._units:
            unit = traced.unit
            if unit.runner is None:  # otherwise another step of these units is in backward
                if unit.runtime is None or unit.runtime.context.phase is IDLE:
                    unit.reshard()  # the user has unsharded it in the meantime
                unit.runner, self._open[unit] = Again(self, traced), traced
        groups = [group for traced in self._open.values() for group in traced.groups]
        self._groups = {group.group: group for group in groups}
        placed = [(group, group.slots) for group in groups]
        if placed != self._placed:
            self._placed, self._places = placed, {}
            for group in groups:
                for module, name, index in group.slots:
                    self._places.setdefault(module, {})[name] = _Place(self, group, index)
        self._put_readers()

    def _put_readers(self) -> None:
        for module, places in self._places.items():
            attributes = module.__dict__  # setting an attribute of a module is ten times as slow
            self._registered[module] = registered = attributes["_parameters"]
            attributes["_parameters"] = _ReadInBackward(registered, places)

    def _take_readers_off(self) -> None:
        for module, registered in self._registered.items():
            changed = module._parameters.copy()
            registered.clear()
            registered.update(changed)
            module.__dict__["_parameters"] = registered
        self._registered.clear()

    @property
    def is_open(self) -> bool:
        return bool(self._open)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Remove the readers while a step runs in the backward: compilers inspect the dicts."""
        was_open = bool(self._registered)
        self._take_readers_off()
        try:
            yield
        finally:
            if was_open and self._open:
                self._put_readers()

    def end(self, number: int) -> None:
        """End the backward with this number, after success or failure."""
        if number != self._number:
            return
        self._take_readers_off()
        for unit in self._open:
            if isinstance(unit.runner, Again):  # a running step checks ``is_open`` itself
                unit.runner = None
        for group in self._groups.values():
            group.again = None
        self._open.clear()
        self._groups.clear()
        self._kept, self._depth = None, 0

    def call(
        self,
        traced: TracedUnit,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Recompute a module of a unit, as it ran in the step."""
        unit = traced.unit
        groups = [self._groups[group] for group in unit.groups or unit.own_groups]
        gathered = [group for group in groups if group.again is None]
        self._depth += 1
        try:
            for group in gathered:
                group.wholes_again()
            return traced.compute(run, args, kwargs)
        finally:
            self._depth -= 1
            for group in gathered:
                if traced.has_several_modules:  # the unit's next module may follow
                    self.keep(group.mover)
                else:
                    group.again = None

    def keep(self, traced: TracedUnit) -> None:
        """Keep the gathered parameters of a unit, and release those kept for another one."""
        kept, self._kept = self._kept, traced
        if kept is not None and kept is not traced:
            for group in kept.groups:
                group.again = None

    @property
    def is_recomputing(self) -> bool:
        """Heuristic: True if a recomputation is running, rather than a hook."""
        return self._depth > 0 or torch.is_grad_enabled()


@dataclass(frozen=True, eq=False)
class Again:
    """Runner of a unit while a backward of a functional step recomputes its modules."""

    backward: FunctionalBackward
    traced: TracedUnit

    @torch_compiler.never_traced
    def call(
        self,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        return self.backward.call(self.traced, run, args, kwargs)


@dataclass(frozen=True, eq=False, slots=True)
class _Place:
    """Reads a parameter's unsharded form."""

    backward: FunctionalBackward
    group: TracedGroup
    index: int

    def awaits(self, registered: object) -> bool:
        """Return True if the shard is registered, and the eager engine is not replacing it."""
        is_shard = registered is self.group.params[self.index].sharded
        return is_shard and self.group.group.registration.form is FORM_SHARDED

    def check(self) -> None:
        """Refuse reads of a recomputation inside summon_full_params: they have no gradient path."""
        unit = self.group.mover.unit
        if unit.summoned_on and self.backward.is_recomputing:
            raise StateError(
                "FS306",
                f"{unit.fqn or '<root>'}: the backward of a compiled model reads its parameters "
                "while recomputing activations, but ran inside summon_full_params. Exit the "
                "context before backward.",
            )

    @torch_compiler.always_eager
    def read(self) -> Tensor:
        if self.group.again is None:
            self.backward.keep(self.group.mover)
        return self.group.wholes_again()[self.index]


class _ReadInBackward(dict[str, Any]):
    """A module's registered parameters, which are shards: reading one gathers it, unless the eager
    engine or the user has replaced it since. ``get`` and ``copy`` gather nothing."""

    def __init__(self, registered: Mapping[str, Any], places: Mapping[str, _Place]) -> None:
        super().__init__(registered)
        self._places = places

    def __getitem__(self, name: str) -> Any:
        found, place = super().__getitem__(name), self._places.get(name)
        if place is None:
            return found
        if place.awaits(found):
            return place.read()
        place.check()
        return found

    def values(self) -> Any:
        return [value for _, value in self.items()]

    def items(self) -> Any:
        if any(place.backward.is_recomputing for place in self._places.values()):
            return [(name, self[name]) for name in self]
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)

"""Module recomputation outside of graphs, in the backward of a functional step.

Provides the parameters that recomputed modules read (``FunctionalBackward``), and reduces gradients
that no graph reduced (``OwedReductions``). Independent of the compiler.

[Note: recomputed outside of graphs]
Activation checkpointing that the compiler did not trace reruns modules in backward, after the
functional step. Checkpointing may rerun a unit, only one of a unit's modules, a conditional unit
whose parameters another unit gathers, or any layer or function inside a unit, where there are no
hooks. All of these *read parameters*. Therefore, from the time that a backward reaches an output of
the step until the backward ends, reading a sharded parameter gathers its group. The registered
parameters remain the shards; only the recomputation reads unsharded parameters.

- Attribute access (``module.weight``) is treated as recomputation. A hook may also call
  ``parameters()``, possibly on only one rank, and must get shards. Therefore ``parameters()``
  returns unsharded parameters only in grad mode or during a unit's call. Hooks run in neither case.
- A call of a unit gathers all its parameters first and releases them at the end, so that ranks that
  read different parameters issue the same gathers. Parameters read outside of a call are kept until
  parameters of another unit are read or the backward ends. An early release costs one gather.
- Autograd records every gather. With reentrant checkpointing, gradients flow through the gather in
  backward and are reduced and accumulated at the end of the inner backward. Non-reentrant
  checkpointing uses only the gathered values; gradients flow through the gather in forward.
- Reentrant checkpointing runs nested backwards, each with its own graph task id. Only the end of
  the outermost backward matters: its callback runs then, or is destroyed if this backward fails.

The engine's hooks do not suffice: they run neither inside units nor at the end of the backward.
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
    """Call ``begin`` when a backward reaches one of ``outputs``, before any later node runs."""

    def look(tensor: Tensor) -> None:
        # an in-place update of a view gives its base a new grad_fn
        base = torch_autograd.base_of(tensor)
        for made in (tensor,) if base is None else (tensor, base):
            if made.grad_fn is not None:
                made.grad_fn.register_prehook(begin)

    visit_tensors(look, outputs)


class OwedReductions:
    """At the end of a backward with sync, reduces the accumulated gradients that no graph reduced.
    These gradients belong to units that the step did not use, or to a forward without sync whose
    backward runs with sync. With graph breaks, no graph reduces any accumulated gradient."""

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
    """Manages the units of a functional step during its backward."""

    def __init__(self, units: Sequence[TracedUnit]) -> None:
        self._units = units
        self._open: dict[Unit, TracedUnit] = {}
        self.groups: dict[ParamGroup, TracedGroup] = {}
        self._kept: TracedUnit | None = None
        self.depth = 0
        self._number = 0
        self._placed: list[tuple[TracedGroup, Any]] = []  # the groups covered by ``_places``
        self._places: dict[nn.Module, dict[str, _Place]] = {}
        self._registered: dict[nn.Module, dict[str, Any]] = {}

    @torch_compiler.always_eager
    def begin(self, _grads: tuple[Tensor | None, ...]) -> None:
        """Make modules read unsharded parameters until this backward ends."""
        if self._open:
            return
        self._number += 1
        end = functools.partial(self.end, self._number)
        EndOfBackward(end, end)
        for traced in self._units:
            unit = traced.unit
            if unit.runner is None:  # otherwise another step of these units is in backward
                if unit.runtime is None or unit.runtime.context.phase is IDLE:
                    unit.reshard()  # in case the user unsharded the unit after forward
                unit.runner, self._open[unit] = Again(self, traced), traced
        groups = [group for traced in self._open.values() for group in traced.groups]
        self.groups = {group.group: group for group in groups}
        placed = [(group, group.slots) for group in groups]
        if placed != self._placed:
            self._placed, self._places = placed, {}
            for group in groups:
                for module, name, index in group.slots:
                    self._places.setdefault(module, {})[name] = _Place(self, group, index)
        self._put_readers()

    def _put_readers(self) -> None:
        for module, places in self._places.items():
            attributes = module.__dict__  # nn.Module.__setattr__ is ten times slower
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
        """Remove the readers during a step inside a backward, because compilers inspect modules."""
        was_open = bool(self._registered)
        self._take_readers_off()
        try:
            yield
        finally:
            if was_open and self._open:
                self._put_readers()

    def end(self, number: int) -> None:
        """Clean up after the backward with this number, whether it succeeded or failed."""
        if number != self._number:
            return
        self._take_readers_off()
        for unit in self._open:
            if isinstance(unit.runner, Again):  # a running step checks ``is_open`` itself
                unit.runner = None
        for group in self.groups.values():
            group.again = None
        self._open.clear()
        self.groups.clear()
        self._kept, self.depth = None, 0

    def keep(self, traced: TracedUnit) -> None:
        """Keep the gathered parameters of a unit, and release those of the previous unit."""
        kept, self._kept = self._kept, traced
        if kept is not None and kept is not traced:
            for group in kept.groups:
                group.again = None

    @property
    def is_recomputing(self) -> bool:
        """Guess whether a recomputation is running (True) or a hook (False)."""
        return self.depth > 0 or torch.is_grad_enabled()


@dataclass(frozen=True, eq=False)
class Again:
    """The runner of a unit whose modules are recomputed in the backward of a functional step."""

    backward: FunctionalBackward
    traced: TracedUnit

    @torch_compiler.never_traced
    def call(
        self,
        run: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Recompute a module of the unit, with the same parameters and casts as in the step."""
        backward, traced = self.backward, self.traced
        unit = traced.unit
        groups = [backward.groups[group] for group in unit.groups or unit.own_groups]
        gathered = [group for group in groups if group.again is None]
        backward.depth += 1
        try:
            for group in gathered:
                group.wholes_again()
            return traced.compute(run, args, kwargs)
        finally:
            backward.depth -= 1
            for group in gathered:
                if traced.has_several_modules:  # the unit's next module may be recomputed soon
                    backward.keep(group.mover)
                else:
                    group.again = None


@dataclass(frozen=True, eq=False, slots=True)
class _Place:
    """Reads the unsharded form of one parameter of a module."""

    backward: FunctionalBackward
    group: TracedGroup
    index: int

    def awaits(self, registered: object) -> bool:
        """Return True if the shard is registered, and the eager engine has not unsharded it."""
        is_shard = registered is self.group.params[self.index].sharded
        return is_shard and self.group.group.registration.form is FORM_SHARDED

    def check(self) -> None:
        """Raise StateError for recomputation in summon_full_params: gradients would be missing."""
        unit = self.group.mover.unit
        if unit.summoned_on and self.backward.is_recomputing:
            raise StateError(
                "FS306",
                f"{unit.fqn or '<root>'}: the backward of a compiled model reads the parameters of "
                "this unit while recomputing activations, but ran inside summon_full_params. Exit "
                "the context before backward.",
            )

    @torch_compiler.always_eager
    def read(self) -> Tensor:
        if self.group.again is None:
            self.backward.keep(self.group.mover)
        return self.group.wholes_again()[self.index]


class _ReadInBackward(dict[str, Any]):
    """A module's ``_parameters``: a dict of shards. Reading a parameter gathers it, unless the
    eager engine or the user has replaced it. ``get`` and ``copy`` do not gather."""

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

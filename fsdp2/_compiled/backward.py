"""The backward of a functional step, where modules run again outside of graphs.

Owns what parameters a module finds there (``FunctionalBackward``). It must not know the compiler.

[Note: recomputed outside of graphs]
Checkpointing that a compiler did not trace runs modules again in backward, when the functional step
is over: a unit, one module of a list, a conditional unit whose parameters another one gathers, or
any layer or function inside of a unit, of which no hook of ours hears. They have in common that
they *read parameters*. So from the moment at which a backward reaches an output of the step until
it ends, a parameter that is read and still lies in shards is gathered then, as a part of its group.
What is registered are the shards, all the time; what recomputation reads is whole.

- A name that is read (``module.weight``) is read by a recomputation. ``parameters()`` may be called
  by a hook as well, which has to find shards, on one rank alone too: it gives whole parameters only
  where gradients are recorded, or inside of a unit's call. Hooks run where they are not.
- A unit that is called is gathered at once and forgotten after the call, as in the step, so ranks
  that use different parameters of it ask for the same. Otherwise the parameters of one unit are
  kept, until another one's are read or the backward ends: to forget too early costs a gather, and
  is never wrong.
- Every gather is recorded. Under the reentrant kind of checkpointing it is the one that gradients
  flow through, and what they bring is reduced and added when that inner backward is through; under
  the other kind its values count only, and the gather of the forward takes the gradients.
- Reentrant checkpointing runs backwards inside of the backward, with numbers of their own: the end
  of the outer one counts, which its callback tells, or the loss of that callback if it fails.

The engine's hooks would do as well for the values of units, but nothing would tell them that the
backward is over, and of layers inside of units they hear nothing either.
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
    """Call ``begin`` when a backward reaches one of these outputs, before anything else of it."""

    def look(tensor: Tensor) -> None:
        base = torch_autograd.base_of(tensor)  # an update of a view in place gives it another node
        for made in (tensor,) if base is None else (tensor, base):
            if made.grad_fn is not None:
                made.grad_fn.register_prehook(begin)

    visit_tensors(look, outputs)


class OwedReductions:
    """At the end of a backward with sync: the reductions of what waited, and no graph has reduced.

    That is what waits of units that this step did not use, all of it where graphs break, and that
    of a forward without sync whose backward has it.
    """

    def __init__(self, groups: Sequence[TracedGroup]) -> None:
        self._groups = [group.group for group in groups]
        self._claims = [group.claim for group in groups if group.claim is not None]
        self._is_running = False

    @torch_compiler.always_eager
    def begin(self, _grads: tuple[Tensor | None, ...]) -> None:
        """A gradient reached an output."""
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
    """What the units of a functional step do in its backward."""

    def __init__(self, units: Sequence[TracedUnit]) -> None:
        self._units = units
        self._open: dict[Unit, TracedUnit] = {}
        self._groups: dict[ParamGroup, TracedGroup] = {}
        self._kept: TracedUnit | None = None
        self._depth = 0
        self._number = 0
        self._placed: list[tuple[TracedGroup, Any]] = []  # for which the next one holds
        self._places: dict[nn.Module, dict[str, _Place]] = {}
        self._registered: dict[nn.Module, dict[str, Any]] = {}

    @torch_compiler.always_eager
    def begin(self, _grads: tuple[Tensor | None, ...]) -> None:
        """A gradient reached an output: from here to the end modules find whole parameters."""
        if self._open:
            return
        self._number += 1
        end = functools.partial(self.end, self._number)
        EndOfBackward(end, end)
        for traced in self._units:
            unit = traced.unit
            if unit.runner is None:  # else another step of the same units is in its backward
                if unit.runtime is None or unit.runtime.context.phase is IDLE:
                    unit.reshard()  # somebody made it whole since
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
            attributes = module.__dict__  # to set an attribute of a module takes ten times as long
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
        """False once the backward ended, or failed."""
        return bool(self._open)

    @contextlib.contextmanager
    def set_aside(self) -> Iterator[None]:
        """Let a whole step run in the backward as anywhere else: compilers look at dicts."""
        was_open = bool(self._registered)
        self._take_readers_off()
        try:
            yield
        finally:
            if was_open and self._open:
                self._put_readers()

    def end(self, number: int) -> None:
        """The backward of this number is over, or failed."""
        if number != self._number:
            return
        self._take_readers_off()
        for unit in self._open:
            if isinstance(unit.runner, Again):  # else a step runs, which sees that this is over
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
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a module of a unit again, as it ran in the step."""
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
                if traced.has_several_modules:  # the next one may follow
                    self._keep(group.mover)
                else:
                    group.again = None

    def _keep(self, traced: TracedUnit) -> None:
        """Keep what a unit gathered, and not what another one was kept of."""
        kept, self._kept = self._kept, traced
        if kept is not None and kept is not traced:
            for group in kept.groups:
                group.again = None

    def read(self, group: TracedGroup, index: int) -> Tensor:
        if group.again is None:
            self._keep(group.mover)
        return group.wholes_again()[index]

    @property
    def is_recomputing(self) -> bool:
        """True if this is no hook, as far as one can tell."""
        return self._depth > 0 or torch.is_grad_enabled()


@dataclass(frozen=True, eq=False)
class Again:
    """Runs a unit's modules while a backward of a functional step runs them again."""

    backward: FunctionalBackward
    traced: TracedUnit

    @torch_compiler.never_traced
    def call(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.backward.call(self.traced, run, args, kwargs)


@dataclass(frozen=True, eq=False, slots=True)
class _Place:
    """Where a parameter's whole form comes from."""

    backward: FunctionalBackward
    group: TracedGroup
    index: int

    def awaits(self, registered: object) -> bool:
        """True if what is registered is the shard, and the engine is not about to change that."""
        is_shard = registered is self.group.params[self.index].sharded
        return is_shard and self.group.group.registration.form is FORM_SHARDED

    def check(self) -> None:
        """Refuse what no gradient would come back from; modules refuse their forwards there."""
        unit = self.group.mover.unit
        if unit.summoned_on and self.backward.is_recomputing:
            raise StateError(
                "FS306",
                f"{unit.fqn or '<root>'}: the backward of a compiled model reads its parameters in "
                "a recomputation, inside summon_full_params. Leave the context before backward.",
            )

    @torch_compiler.always_eager
    def read(self) -> Tensor:
        return self.backward.read(self.group, self.index)


class _ReadInBackward(dict[str, Any]):
    """A module's registered parameters: shards, which are gathered when they are read.

    What others registered since (the eager engine in a backward of both, users) is as it is.
    ``get`` and ``copy`` gather nothing.
    """

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

"""Records the events of a step, the memory at each event, and the unit that is computing."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch.nn as nn

from fsdp2._core.base import events
from fsdp2._core.engine.between_steps import units_below
from fsdp2._core.engine.tree import Runtime, Unit, Visit
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.registration import SMALLER
from fsdp2._tools.plan.clock import AnyClock
from fsdp2._tools.plan.imagined import groups_of
from fsdp2._tools.plan.lanes import LaneClock
from fsdp2._tools.plan.values import Collective, GroupPlan, MemoryPoint
from fsdp2._tools.plan.watch import GRADIENTS, MemoryWatch


@dataclass(frozen=True)
class Over:
    """Numbers of ranks in an event's collective, and in the collective that directly follows it."""

    ranks: int = 0
    then: int = 0
    is_smaller: bool = False

    @staticmethod
    def of(group: ParamGroup, kind: str) -> Over:
        if kind != "unshard":
            then = group.data.summed.size if group.settings.all_reduce_grads else 0
            return Over(group.data.scattered.size, then)
        smaller = group.buffers.post_forward.mesh
        if smaller is None or group.state is not SMALLER:
            return Over(group.data.shard.size)
        return Over(smaller.shard.size, is_smaller=True)


def with_stamps(event: events.Event, over: Over, sizes: Mapping[str, GroupPlan]) -> events.Event:
    """Return an event with the size that real ranks send, including their agreement stamps."""
    group = sizes.get(event.fqn)
    if group is None or not event.nbytes:
        return event
    nbytes = {
        "unshard": group.regather_nbytes if over.is_smaller else group.gather_nbytes,
        "reduce": group.reduce_nbytes,
        "reshard": group.whole_nbytes,
    }
    return replace(event, nbytes=nbytes.get(event.kind, event.nbytes))


def collectives_of(
    seen: Iterable[tuple[events.Event, Over]], sizes: Mapping[str, GroupPlan]
) -> Iterator[Collective]:
    for event, over in seen:
        phase, fqn = event.phase, event.fqn
        if event.kind == "unshard":
            yield Collective(phase, "all_gather", fqn, event.nbytes, over.ranks)
        elif event.kind == "reduce":
            yield Collective(phase, "reduce_scatter", fqn, event.nbytes, over.ranks)
            group = sizes[fqn]
            if over.then > 1 and group.all_reduce_nbytes > 0:
                nbytes, then = group.all_reduce_nbytes, over.then
                yield Collective(phase, "all_reduce", fqn, nbytes, then, over.ranks)
            elif over.then > 1:
                nbytes, then = group.outer_nbytes, over.then
                yield Collective(phase, "reduce_scatter", fqn, nbytes, then, over.ranks)


class Seen:
    """The events and memory of one step, and the unit that is computing: the innermost one in its
    forward or backward. ``begin`` resets them."""

    def __init__(
        self,
        model: nn.Module,
        watch: MemoryWatch,
        clock: AnyClock,
    ) -> None:
        self._groups = groups_of(model)
        self._watch, self._clock = watch, clock
        self._observed: set[Runtime] = set()
        self._running: list[str] = []  # names of running units, innermost last
        self._points: list[tuple[MemoryPoint, float]] = []  # each with a mark of the clock
        self.events: list[tuple[events.Event, Over]] = []
        for unit in units_below(model):
            for module in unit.modules:
                module.register_forward_pre_hook(functools.partial(self._enter_forward, unit))
                module.register_forward_hook(self._leave, always_call=True)

    def begin(self) -> int:
        """Reset, and return the memory at the start of a step, in bytes."""
        self.events.clear()
        self._points.clear()
        self._running.clear()
        self._show()
        self._clock.restart()
        self._watch.take_highest()
        if isinstance(self._clock, LaneClock):  # gradients are released when a forward begins
            return self._watch.nbytes - self._watch.by_kind[GRADIENTS]
        return self._watch.nbytes

    def see_event(self, event: events.Event) -> None:
        group = next((group for group in self._groups if group.fqn == event.fqn), None)
        self.events.append((event, Over() if group is None else Over.of(group, event.kind)))
        self.see(str(event))

    def see(self, label: str) -> int:
        """Record the current memory, and return the peak since the last record."""
        highest = self._watch.take_highest()
        kinds = tuple(self._watch.by_kind)
        point = MemoryPoint(label, 0.0, self._watch.nbytes, sum(highest), kinds, highest)
        self._points.append((point, self._clock.mark()))
        return point.peak_nbytes

    @property
    def peak_nbytes(self) -> int:
        return max(point.peak_nbytes for point, _ in self._points)

    def points(self) -> Iterator[MemoryPoint]:
        """Yield the records with their times. Call this after the clock's ``finish``."""
        for point, mark in self._points:
            yield replace(point, time=self._clock.time_of(mark))  # type: ignore[arg-type]

    def _enter_forward(self, unit: Unit, *_: Any) -> None:
        runtime = unit.runtime
        assert runtime is not None
        if runtime not in self._observed:
            self._observed.add(runtime)
            runtime.observe(self)
        self._enter(unit, runtime.context.phase)

    def around(
        self,
        kind: str,
        source: Any,
        call: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Track the units that a backward enters and leaves."""
        if kind not in ("arrive", "depart"):
            return call(*args, **kwargs)
        visit: Visit = args[0]
        was_open = visit.opened_in
        call(*args)
        if visit.opened_in == was_open:
            return None
        return self._enter(visit.unit, events.BACKWARD) if kind == "arrive" else self._leave()

    def _enter(self, unit: Unit, phase: str) -> None:
        self._running.append(f"{unit.fqn or '<root>'} {phase}")
        self._show()

    def _leave(self, *_: Any) -> None:
        if self._running:
            self._running.pop()
        self._show()

    def _show(self) -> None:
        self._clock.label = self._running[-1] if self._running else "outside of units"

"""Collectives in flight: when each was issued, when it was over, and who waited for it.

Owns what is launched in lanes. It must not know steps, or when units run.

[Note: when a collective is over]
On a device an event in its lane says so. On a CPU a rank sees it when it waits, or before that at
the next look (some works of gloo tell only who waits). So what nobody waited for may end later on
paper than it did, by as much as this rank computed in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fsdp2._core.comm.device_streams import ObservedFlight
from fsdp2._core.comm.wire import InFlight
from fsdp2._core.params.reduce import Reducer, Reduction
from fsdp2._core.params.registration import SMALLER as SMALLER_STATE
from fsdp2._tools.record.ledger import Ledger, Row
from fsdp2._tools.record.memory import Entry

SMALLER = ',"collective":"all_gather","is_smaller":true'
"""Of an all-gather over the smaller mesh on which a group waits for its backward."""

EXACT_NS = 20_000
"""A wait as long as this ended when the collective did; in a shorter one it may have been over."""


class Flown:
    """A collective that was launched, and hears who waits for it."""

    __slots__ = ("entry", "flight", "flights", "is_ahead", "kind", "row", "wait", "was_done")

    def __init__(self, flights: Flights, kind: str, entry: Entry, row: Row | None) -> None:
        self.flights = flights
        self.kind = kind
        self.entry = entry
        self.row = row  # None: it is written
        self.is_ahead = flights.is_prefetching
        self.wait: Row | None = None
        self.was_done = False
        self.flight: Callable[[], InFlight | None] = _nothing  # weak: it holds buffers

    def before_wait(self, flight: InFlight) -> None:
        self.flights.before_wait(self, flight)

    def after_wait(self) -> None:
        self.flights.after_wait(self)


def _nothing() -> None:
    return None


class Flights:
    """The collectives of a model."""

    def __init__(self, ledger: Ledger, by_reducer: dict[Reducer, Entry]) -> None:
        self._ledger = ledger
        self._by_reducer = by_reducer
        self._running: dict[Flown, None] = {}  # on a CPU, until they are seen to be over
        self.gathering: Entry | None = None  # the group that unshards right now
        self.is_prefetching = False
        self.waiter = ""  # the unit for which something is done
        self.is_on = True

    # Launches.

    def around_launch(
        self,
        launch: Callable[..., InFlight],
        lane: str,
        issue: Callable[..., InFlight],
        *args: Any,
        after: InFlight | None = None,
    ) -> InFlight:
        """Something of some model is launched: note it if it is ours, and a collective."""
        source = getattr(issue, "__self__", None)
        if isinstance(source, Reduction):
            entry = self._by_reducer.get(source.owner)
            kind = source.launched_as[issue.__func__]  # type: ignore[attr-defined]  # a bound method
        else:
            entry, kind, source = self.gathering, "all_gather", None
        is_host = self._ledger.clock.is_host
        if entry is None or (is_host and kind == "store"):
            return launch(lane, issue, *args, after=after)
        if self._ledger.profiles:
            with torch.profiler.record_function(f"fsdp2::{kind} {entry.name or '<root>'}"):
                return self._launch(entry, kind, source, launch, lane, issue, args, after)
        return self._launch(entry, kind, source, launch, lane, issue, args, after)

    def _launch(
        self,
        entry: Entry,
        kind: str,
        source: Reduction | None,
        launch: Callable[..., InFlight],
        lane: str,
        issue: Callable[..., InFlight],
        args: tuple[Any, ...],
        after: InFlight | None,
    ) -> InFlight:
        if self._ledger.clock.is_host:
            return self._on_host(entry, kind, source, partial(launch, lane, issue, *args), after)
        timed = _Timed(self._ledger, issue)
        flight = launch(lane, timed, *args, after=after)
        return self._on_device(entry, kind, source, flight, timed)

    def _begin_row(self, entry: Entry, kind: str, begin: Any, nbytes: int) -> Row:
        if kind == "all_gather":
            event, entry.unshard_event = entry.unshard_event, None
            is_smaller = entry.group.state is SMALLER_STATE
            more = SMALLER if is_smaller else ',"collective":"all_gather"'
        elif kind == "reduce_scatter":
            event, entry.reduce_event = entry.reduce_event, None
            more = ',"collective":"reduce_scatter"'
        else:
            event, more = None, ""
        phase = entry.group.context.phase
        if event is None:
            return self._ledger.begin(kind, entry.name, phase, nbytes, begin, more)
        return self._ledger.begin(event.kind, entry.name, event.phase, event.nbytes, begin, more)

    def _on_host(
        self,
        entry: Entry,
        kind: str,
        reduction: Reduction | None,
        launch: Callable[..., InFlight],
        after: InFlight | None,
    ) -> InFlight:
        if after is not None:
            after.wait()  # here, so that its wait is not taken for a part of this launch
        begin = self._ledger.clock.now()
        flight = launch(after=after)
        self._note_buffers(entry, reduction, kind, flight)
        row = self._begin_row(entry, kind, begin, sum(b.nbytes for b in flight.buffers))
        if not flight.runs:  # one rank, or a collective that is over when it returns
            self._ledger.end(row)
            return flight
        flown = Flown(self, kind, entry, row)
        heard = ObservedFlight(flight, flown)
        flown.flight = weakref.ref(heard)
        self._running[flown] = None
        return heard

    def _on_device(
        self,
        entry: Entry,
        kind: str,
        reduction: Reduction | None,
        flight: InFlight,
        timed: _Timed,
    ) -> InFlight:
        self._note_buffers(entry, reduction, kind, flight)
        if kind == "store":  # what compute waits for is the last collective of the reduction
            is_summed = entry.group.data.summed.size > 1
            flown = Flown(self, "all_reduce" if is_summed else "reduce_scatter", entry, None)
        else:
            nbytes = sum(buffer.nbytes for buffer in flight.buffers)
            row = self._begin_row(entry, kind, timed.begin, nbytes)
            self._ledger.end(row, timed.end, ',"is_exact":true')
            flown = Flown(self, kind, entry, None)
        return ObservedFlight(flight, flown)

    def _note_buffers(
        self, entry: Entry, reduction: Reduction | None, kind: str, flight: InFlight
    ) -> None:
        if kind == "all_gather":
            self._ledger.memory.begin_gather(entry, flight.buffers)
        elif kind == "reduce_scatter" and reduction is not None:
            self._ledger.memory.begin_reduction(reduction)

    def look(self) -> None:
        """See which collectives are over."""
        now = None
        for flown in tuple(self._running):
            flight = flown.flight()
            if flight is None or flight.is_done:
                if now is None:
                    now = self._ledger.clock.now()
                self._end(flown, now)

    def _end(self, flown: Flown, end: Any, is_exact: bool = False) -> None:
        self._running.pop(flown, None)
        row, flown.row = flown.row, None
        if row is not None:
            self._ledger.end(row, end, ',"is_exact":true' if is_exact else "")

    # Waits.

    def before_wait(self, flown: Flown, flight: InFlight) -> None:
        if not self.is_on:
            return
        ledger = self._ledger
        flown.was_done = flown.row is None or flight.is_done
        more = f',"for":"{flown.kind}","by":{ledger.quote(self.waiter)}'
        phase = flown.entry.group.context.phase
        flown.wait = row = ledger.begin("wait", flown.entry.name, phase, more=more)
        if ledger.profiles:
            ledger.show(row, f"wait {flown.kind} {flown.entry.name or '<root>'}")
        if ledger.clock.is_host and not flown.was_done:
            ledger.say_waiting(row)

    def after_wait(self, flown: Flown) -> None:
        row, flown.wait = flown.wait, None
        if row is None or not self.is_on:
            return
        entry, now = flown.entry, self._ledger.clock.now()
        if flown.row is not None:
            is_exact = not flown.was_done and now - row.begin >= EXACT_NS
            self._end(flown, row.begin if flown.was_done else now, is_exact)
        prefetch = ""
        if flown.kind == "all_gather" and entry.needs:
            prefetch = "ahead" if flown.is_ahead else "none"
        self._ledger.end(row, now, account=partial(row.step.add_wait, flown.kind, prefetch))

    def finish(self) -> None:
        """Hear nothing more; say what is still in flight."""
        self.look()
        self.is_on = False
        for flown in tuple(self._running):
            if flown.row is not None:
                self._ledger.leave_open(flown.row, ',"is_in_flight":true')
        self._running.clear()


class _Timed:
    """What a lane of a device runs, between two events in it."""

    def __init__(self, ledger: Ledger, issue: Callable[..., InFlight]) -> None:
        self._ledger = ledger
        self._issue = issue
        self.begin: Any = None
        self.end: Any = None

    def __call__(self, *args: Any) -> InFlight:
        self.begin = self._ledger.clock.now()
        flight = self._issue(*args)
        flight.wait()  # a work that a collective of the user's returned, unasked
        self.end = self._ledger.clock.now()
        return flight

"""Collectives in flight: when each was issued and completed, and which unit waited for it.

[Note: completion of collectives]
On a device, an event in the lane records the completion. On a CPU, a rank observes the completion
in a wait, or earlier in a poll (the ``Work`` of some gloo collectives reports completion only in a
wait). The recorded end may thus be late, by up to the rank's compute time before the next of these.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from fsdp2._core.comm.device_streams import ObservedFlight
from fsdp2._core.comm.wire import InFlight
from fsdp2._core.params.reduce import LAUNCHED_AS, Reduction
from fsdp2._core.params.registration import SMALLER as SMALLER_STATE
from fsdp2._tools.record.ledger import Ledger, Row, quoted
from fsdp2._tools.record.memory import Entry

SMALLER = ',"is_smaller":true'
"""Column for an all-gather over the smaller mesh to which a group reshards after forward."""
EXACT = ',"is_exact":true'
"""Column for a collective whose completion was observed immediately."""
_EVENTS = {"all_gather": "unshard", "reduce_scatter": "reduce"}  # kinds of events of collectives
EXACT_NS = 20_000
"""A wait of at least this length ends when its collective ends; a shorter wait may end later."""


@dataclass(eq=False)
class Flown:
    """Records the waits for a launched collective."""

    flights: Flights
    kind: str
    entry: Entry
    is_ahead: bool
    row: Row | None = None  # None once the row is written
    wait: Row | None = None
    was_done: bool = False
    flight: Callable[[], InFlight | None] = lambda: None  # weak: a flight holds buffers

    def before_wait(self, flight: InFlight) -> None:
        flights = self.flights
        ledger = flights.ledger
        if not flights.is_on:
            return
        self.was_done = self.row is None or flight.is_done
        more = f',"for":"{self.kind}","by":{quoted(flights.active or "")}'
        phase = self.entry.group.context.phase
        self.wait = row = ledger.begin("wait", self.entry.name, phase, more=more)
        if ledger.profiles:
            ledger.show(row, f"wait {self.kind} {self.entry.name or '<root>'}")
        if ledger.clock.is_host and not self.was_done:
            ledger.say_waiting(row)

    def after_wait(self) -> None:
        flights = self.flights
        ledger = flights.ledger
        row, self.wait = self.wait, None
        if row is None or not flights.is_on:
            return
        now = ledger.clock.now()
        if self.row is not None:
            is_exact = not self.was_done and now - row.begin >= EXACT_NS
            flights.end(self, row.begin if self.was_done else now, EXACT if is_exact else "")
        prefetch = ""
        if self.kind == "all_gather" and self.entry.needs:
            prefetch = "ahead" if self.is_ahead else "none"
        ledger.end(row, now, account=partial(row.step.add_wait, self.kind, prefetch))


@dataclass(eq=False)
class Flights:
    ledger: Ledger
    _entry_of: Mapping[Any, Entry]  # keys include the groups' reducers
    _running: dict[Flown, None] = field(default_factory=dict)  # CPU only: not seen to be complete
    gathering: Entry | None = None  # the group that is unsharding now
    is_prefetching: bool = False
    active: str | None = None  # name of the unit that is being processed
    is_on: bool = True

    def around_launch(
        self,
        launch: Callable[..., InFlight],
        lane: str,
        issue: Callable[..., InFlight],
        *args: Any,
        after: InFlight | None = None,
    ) -> InFlight:
        """Record a launch if it is a collective of the recorded model."""
        ledger = self.ledger
        launched: Any = getattr(issue, "launched", issue)
        source: Any = getattr(launched, "__self__", None)
        if isinstance(source, Reduction):
            entry = self._entry_of.get(source.owner)
            kind = LAUNCHED_AS[launched.__func__]
        else:
            entry, kind = self.gathering, "all_gather"
        if entry is None or (ledger.clock.is_host and kind == "store"):
            return launch(lane, issue, *args, after=after)
        name = f"fsdp2::{kind} {entry.name or '<root>'}"
        with torch.profiler.record_function(name) if ledger.profiles else nullcontext():
            flown = Flown(self, kind, entry, self.is_prefetching)
            begin = end = None
            if ledger.clock.is_host:
                if after is not None:
                    after.wait()  # before reading the clock: this wait is not part of the launch
                begin = ledger.clock.now()
                flight = launch(lane, issue, *args, after=after)
            else:
                timed = _Timed(ledger, issue)
                flight = launch(lane, timed, *args, after=after)
                begin, end = timed.begin, timed.end
            if kind == "all_gather":
                ledger.memory.begin_gather(entry, flight.buffers)
            elif kind == "reduce_scatter":
                ledger.memory.begin_reduction(source)
            return self._follow(flown, flight, begin, end)

    def _follow(
        self,
        flown: Flown,
        flight: InFlight,
        begin: Any,
        end: Any,
    ) -> InFlight:
        """Observe waits for a launched collective; write its row, now or when it completes."""
        entry = flown.entry
        heard = ObservedFlight(flight, flown)
        if flown.kind == "store":  # its waits count as waits for the reduction's last collective
            flown.kind = "all_reduce" if entry.group.data.summed.size > 1 else "reduce_scatter"
            return heard
        kind, phase, more = flown.kind, entry.group.context.phase, ""
        nbytes = sum(buffer.nbytes for buffer in flight.buffers)
        if kind in _EVENTS:
            more = f',"collective":"{kind}"'
            if kind == "all_gather" and entry.group.state is SMALLER_STATE:
                more += SMALLER
            event = entry.events.pop(_EVENTS[kind], None)
            if event is not None:
                kind, phase, nbytes = event.kind, event.phase, event.nbytes
        row = self.ledger.begin(kind, entry.name, phase, nbytes, begin, more)
        if end is not None:
            self.ledger.end(row, end, EXACT)
        elif flight.runs:
            flown.row = row
            flown.flight = weakref.ref(heard)
            self._running[flown] = None
        else:  # complete: a single rank, or a synchronous collective
            self.ledger.end(row)
            return flight
        return heard

    def look(self) -> None:
        now = None
        for flown in tuple(self._running):
            flight = flown.flight()
            if flight is None or flight.is_done:
                if now is None:
                    now = self.ledger.clock.now()
                self.end(flown, now)

    def end(self, flown: Flown, end: Any, extra: str = "") -> None:
        self._running.pop(flown, None)
        row, flown.row = flown.row, None
        if row is not None:
            self.ledger.end(row, end, extra)

    def finish(self) -> None:
        """Stop recording. Rows of collectives that are still in flight have no end time."""
        self.look()
        self.is_on = False
        for flown in tuple(self._running):
            if flown.row is not None:
                self.ledger.leave_open(flown.row, ',"is_in_flight":true')
        self._running.clear()


class _Timed:
    """Calls a function in a device's lane, and records an event before and after it."""

    def __init__(self, ledger: Ledger, issue: Callable[..., InFlight]) -> None:
        self._ledger = ledger
        self._issue = issue
        # a second recording of the same model may already have wrapped ``issue``
        self.launched: Any = getattr(issue, "launched", issue)
        self.begin: Any = None
        self.end: Any = None

    def __call__(self, *args: Any) -> InFlight:
        self.begin = self._ledger.clock.now()
        flight = self._issue(*args)
        flight.wait()  # a user-supplied collective may return a ``Work`` that was not requested
        self.end = self._ledger.clock.now()
        return flight

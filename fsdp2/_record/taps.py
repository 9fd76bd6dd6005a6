"""Taps: how a recording hears what the engine does, on single objects and while it is on.

Owns what is put onto units, groups, runtimes and lanes of one model, and taken off again. It must
not know what is made of it.

[Note: taps]
``events`` tells what was issued, in an order that tests and plans compare. A recording needs the
ends of things besides: when a collective was over, who waited for it, when a unit's own code ran.
These could be call sites in the engine with a truth test each, as ``events`` has them. They are
taps on *instances* instead: an attribute of the object itself that hides its class's method, put
there by the recording and deleted after it. So a run that nobody records pays nothing at all, the
engine's files do not mention recordings, and what happens to another model is not heard. What is
tapped is called through its object (``self.reduce(unit)``), so the tap is always met.

Several recordings may tap one object, and end in any order: a tap holds a list.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from fsdp2._comm.wire import InFlight
from fsdp2._engine.tree import Unit

Around = Callable[..., Any]
"""What runs in a method's place: it is given the method, and then the method's arguments."""


class Tap:
    """A method of one object, and what is around it; who came last is outermost."""

    __slots__ = ("arounds", "original")

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.arounds: list[Around] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(self.arounds) == 1:
            return self.arounds[0](self.original, *args, **kwargs)
        call = self.original
        for around in self.arounds:
            call = partial(around, call)
        return call(*args, **kwargs)


class Taps:
    """The taps of one recording."""

    def __init__(self) -> None:
        self._put: list[tuple[Any, str, Around]] = []
        self._calls: list[tuple[Unit, CallsHeard]] = []

    def put(self, target: object, name: str, around: Around) -> None:
        """Run ``around(method, *arguments)`` in place of a method of this one object."""
        tap = vars(target).get(name)
        if not isinstance(tap, Tap):
            tap = Tap(getattr(target, name))
            setattr(target, name, tap)
        tap.arounds.append(around)
        self._put.append((target, name, around))

    def hear_calls(self, unit: Unit, heard: CallsHeard) -> None:
        """Be told of the forwards of a unit, whatever runs them: hooks, a compiled module."""
        running = unit.calls.running
        if not isinstance(running, RunningCalls):
            running = unit.calls.running = RunningCalls(unit, running)
        running.heard_by.append(heard)
        self._calls.append((unit, heard))

    def remove_all(self) -> None:
        for target, name, around in reversed(self._put):
            tap = vars(target)[name]
            tap.arounds.remove(around)
            if not tap.arounds:
                delattr(target, name)
        for unit, heard in self._calls:
            running = unit.calls.running
            assert isinstance(running, RunningCalls)
            running.heard_by.remove(heard)
            if not running.heard_by:
                unit.calls.running = list(running)
        self._put, self._calls = [], []


class CallsHeard(Protocol):
    """What is told of a unit's forwards."""

    def enter_forward(self, unit: Unit) -> None: ...

    def leave_forward(self, unit: Unit) -> None: ...

    def drop_forward(self, unit: Unit) -> None: ...


class RunningCalls(list[Any]):
    """The running forwards of a unit; it tells when one begins, ends or raises.

    The engine appends to it when parameters are whole and inputs are about to be prepared, and
    takes from it as soon as the module has returned: in between, the unit's own code runs.
    """

    def __init__(self, unit: Unit, running: list[Any]) -> None:
        super().__init__(running)
        self._unit = unit
        self.heard_by: list[CallsHeard] = []

    def append(self, call: Any) -> None:
        super().append(call)
        for heard in self.heard_by:
            heard.enter_forward(self._unit)

    def pop(self, *args: Any) -> Any:
        for heard in self.heard_by:
            heard.leave_forward(self._unit)
        return super().pop(*args)

    def __delitem__(self, which: Any) -> None:
        before = len(self)
        super().__delitem__(which)
        self._drop(before - len(self))

    def clear(self) -> None:
        before = len(self)
        super().clear()
        self._drop(before)

    def _drop(self, count: int) -> None:
        for _ in range(count):
            for heard in self.heard_by:
                heard.drop_forward(self._unit)


class FlightHeard(Protocol):
    """What is told of the waits for one launch of a lane."""

    def before_wait(self, flight: InFlight) -> None: ...

    def after_wait(self) -> None: ...


class HeardFlight(InFlight):
    """A launch whose waits are told of. It takes the place of the one that was launched."""

    __slots__ = ("__weakref__", "heard_by")

    def __init__(self, flight: InFlight, heard: FlightHeard) -> None:
        super().__init__(flight.buffers, flight._work, flight._lost)
        self._event = flight._event
        self.heard_by = [heard]
        if isinstance(flight, HeardFlight):
            self.heard_by = [*flight.heard_by, heard]

    def wait(self) -> None:
        if self._work is None and self._event is None:
            return
        for heard in self.heard_by:
            heard.before_wait(self)
        try:
            super().wait()
        finally:
            for heard in self.heard_by:
                heard.after_wait()

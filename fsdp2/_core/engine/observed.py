"""Observers of a unit's forwards, both eager and compiled.

Units without observers do not use this module.
"""

from __future__ import annotations

from typing import Any, Protocol

from fsdp2._core.engine.tree import Unit


class CallsObserver(Protocol):
    """Receives the events of a unit's forwards."""

    def enter_forward(self, unit: Unit) -> None:
        """Called before the module's own forward, when parameters are unsharded."""

    def leave_forward(self, unit: Unit) -> None:
        """Called after the module's own forward has returned."""

    def drop_forward(self, unit: Unit) -> None:
        """Called if the forward raises, for example if activation recomputation stops early."""


class ObservedCalls(list[Any]):
    def __init__(self, unit: Unit, running: list[Any]) -> None:
        super().__init__(running)
        self._unit = unit
        self.observers: list[CallsObserver] = []

    def append(self, call: Any) -> None:
        super().append(call)
        for observer in self.observers:
            observer.enter_forward(self._unit)

    def pop(self, *args: Any) -> Any:
        for observer in self.observers:
            observer.leave_forward(self._unit)
        return super().pop(*args)

    def __delitem__(self, which: Any) -> None:
        before = len(self)
        super().__delitem__(which)
        for _ in range(before - len(self)):
            for observer in self.observers:
                observer.drop_forward(self._unit)


def observe(unit: Unit, observer: CallsObserver) -> None:
    calls = unit.calls
    if not isinstance(calls.running, ObservedCalls):
        calls.running = ObservedCalls(unit, calls.running)
    calls.running.observers.append(observer)


def leave(unit: Unit, observer: CallsObserver) -> None:
    calls = unit.calls
    assert isinstance(calls.running, ObservedCalls)
    calls.running.observers.remove(observer)
    if not calls.running.observers:
        calls.running = list(calls.running)

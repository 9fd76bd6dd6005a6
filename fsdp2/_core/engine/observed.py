"""Who listens to the forwards of a unit, whatever runs them: hooks, a compiled module.

Owns the list that a unit's running forwards are kept in while somebody is told of them. A run that
nobody observes enters nothing here.
"""

from __future__ import annotations

from typing import Any, Protocol

from fsdp2._core.engine.tree import Unit


class CallsObserver(Protocol):
    """Is told of the forwards of a unit, whatever runs them: hooks, a compiled module."""

    def enter_forward(self, unit: Unit) -> None:
        """The parameters are whole, and the module's own forward is about to run."""

    def leave_forward(self, unit: Unit) -> None:
        """The module's own forward has returned."""

    def drop_forward(self, unit: Unit) -> None:
        """The module's forward raised; a recomputation that has all it needs does so, too."""


class ObservedCalls(list[Any]):
    """The running forwards of a unit, while somebody is told of them."""

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
        self._drop(before - len(self))

    def clear(self) -> None:
        before = len(self)
        super().clear()
        self._drop(before)

    def _drop(self, count: int) -> None:
        for _ in range(count):
            for observer in self.observers:
                observer.drop_forward(self._unit)


def observe(unit: Unit, observer: CallsObserver) -> None:
    """Tell an observer of the forwards of a unit, from now on."""
    calls = unit.calls
    if not isinstance(calls.running, ObservedCalls):
        calls.running = ObservedCalls(unit, calls.running)
    calls.running.observers.append(observer)


def leave(unit: Unit, observer: CallsObserver) -> None:
    """Tell an observer no longer."""
    calls = unit.calls
    assert isinstance(calls.running, ObservedCalls)
    calls.running.observers.remove(observer)
    if not calls.running.observers:
        calls.running = list(calls.running)

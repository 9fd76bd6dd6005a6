"""Which unit comes next: a pure question over recorded orders.

Owns the forward order of the last iteration. The backward order needs no record: every call of a
unit remembers the call before it (see ``_engine.hooks``). It must not know tensors or groups.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Schedule(Generic[T]):
    """Predict a forward from the last one that began at the same unit.

    Several entry points (``forward``, ``generate``) have an order each. A forward that leaves the
    recorded order is not predicted any further; what it does is the record for the next time.
    """

    def __init__(self) -> None:
        self._recorded: dict[int, list[T]] = {}
        self._expected: list[T] = []
        self._running: list[T] = []
        self._entry: int | None = None
        self._on_track = False

    def begin(self, entry: T) -> None:
        """Start to record a forward whose first unit is ``entry``."""
        self._entry = id(entry)
        self._expected = self._recorded.get(self._entry, [])
        self._running = []
        self._on_track = bool(self._expected)

    def visit(self, unit: T) -> T | None:
        """Record a unit's forward; return the one that is expected to follow."""
        position = len(self._running)
        self._running.append(unit)
        expected = self._expected
        if not self._on_track:
            return None
        if position >= len(expected) or expected[position] is not unit:
            self._on_track = False
            return None
        return expected[position + 1] if position + 1 < len(expected) else None

    def upcoming(self, count: int) -> list[T]:
        """Return up to ``count`` units that are expected after the last one that was visited."""
        if not self._on_track:
            return []
        position = len(self._running)
        return self._expected[position : position + count]

    def end(self) -> None:
        """Keep the order of the forward that is over."""
        if self._entry is not None:
            self._recorded[self._entry] = self._running
        self._entry, self._running = None, []

    def abandon(self) -> None:
        """Forget the running forward; it did not end."""
        self._entry, self._running, self._on_track = None, [], False

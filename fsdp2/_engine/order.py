"""The order of units: which comes next in a forward, and how far a backward is in its forward.

``Schedule`` predicts a forward from the last one. ``Order`` lists what one forward entered and
left, and keeps the place of the running backward in it. Neither knows tensors or groups, or what
happens at an event: the runtime goes through those that it is given.

[Note: the order of backward]
Ranks enter and leave units in the same order in forward. Autograd runs younger nodes first, so each
rank's backward meets the same events in the reverse order; but not all of them. A rank may leave
parameters out, return a unit's input, detach an output, or update an input in place, and no
gradient reaches a unit there. So whatever a backward meets, it first goes through the events in
between, as if a gradient that is zero had come by: every rank gathers and reduces the same units in
the same order, wherever its graph is cut. The events before the last that it meets come at its end.

*Within one root.* Each root has orders of its own. Where a rank's graph is cut that goes through
several roots, it makes up for one root's events after those of another: ranks are out of step.

*The first backward* of a forward does so. A later one (``retain_graph``, a second derivative, the
weights of a pipeline stage on their own) may be about a few nodes, and in another order. It goes
the way of the first, and so makes up for what the first had to make up for.

*Entered first.* A backward leaves the first unit of a forward, and those around it, at its end if
their inputs need no gradient: nothing marks the place. They stay open until then, or until the
backward of another forward begins in the same one (a sum of two losses). The outermost is whole in
between: the other forward begins with it as a rule, and where backward leaves it is not on all
ranks the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch

from fsdp2._base import torch_autograd
from fsdp2._base.policy import MixedPrecisionPolicy

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


class Visit:
    """One forward of a unit, and the backwards that have been through it."""

    __slots__ = (
        "closed_by",
        "closed_in",
        "entered",
        "left",
        "marks_input",
        "opened_in",
        "order",
        "policy",
        "previous",
        "stream",
        "unit",
    )

    def __init__(self, unit: Any, order: Order | None, stream: torch.Stream | None) -> None:
        self.unit = unit  # a ``tree.Unit``
        self.policy: MixedPrecisionPolicy = unit.precision.policy
        self.previous: tuple[Any, ...] = ()  # whose forwards ended before, the last one first
        self.marks_input = False  # a gradient tells when backward leaves it
        self.opened_in = 0  # the number of the backward that is in it; 0: none is
        self.closed_in = 0  # the number of the last backward that was through it
        self.closed_by = -1  # which of autograd's runs was: one may begin inside another
        self.stream = stream  # in which it ran, and autograd goes back through it
        self.order = order  # None: a recomputation, which has no place of its own in the order
        self.entered = self.left = -1  # places in the order; left is -1 if no backward can come
        if order is not None:
            self.entered = len(order.events)
            order.events.append(self)

    def was_passed(self) -> bool:
        """True if the run of autograd that is under way has closed this visit.

        A gradient that comes then is of a node that has two marks, and needs no parameters. One of
        another run, inside or around the one that closed it, differentiates the forward again.
        """
        return self.closed_by == torch_autograd.graph_task_id()


class Order:
    """What one forward, begun outside of any other, entered and left."""

    __slots__ = ("_made_up", "backward", "events", "is_first", "place")

    def __init__(self) -> None:
        self.events: list[Visit] = []
        self.backward = 0  # the number of the last one that was here
        self.is_first = True
        self.place = 0  # of the running backward: this event and those after it are over
        self._made_up: set[int] = set()

    def begin(self, number: int) -> None:
        """A backward comes here, for the first time unless it was here before."""
        if number != self.backward:
            self.is_first = self.backward == 0
            self.backward = number
            self.place = len(self.events)

    def missed(self, place: int) -> Iterator[tuple[Visit, bool]]:
        """Go on to just after ``place``; yield the visits to come to (True) or to leave (False)."""
        while self.place > place + 1:
            self.place -= 1
            at, visit = self.place, self.events[self.place]
            if visit.left < 0:  # it trains nothing, and its output needed no gradient
                continue
            if self.is_first:
                self._made_up.add(at)
            elif at not in self._made_up:
                continue
            yield visit, at == visit.left

    def rest(self) -> Iterator[tuple[Visit, bool]]:
        """Go to the end of a backward. See *entered first* in [Note: the order of backward]."""
        first = next((at for at, visit in enumerate(self.events) if visit.left == at), 0)
        left = self.events[: self.place]  # which backward has yet to leave
        lowest = self.place
        for at, visit in enumerate(left):
            if at == visit.entered and visit.left >= 0 and (at > first or visit.marks_input):
                lowest = at
                break
        for visit, opens in self.missed(-1):
            if opens or visit.entered >= lowest:  # what is inside of one is left before it
                yield visit, opens

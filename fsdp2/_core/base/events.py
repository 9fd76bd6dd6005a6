"""The one observation seam: what the engine does, as it does it.

Owns the list of listeners. Tests pin orders with it, the profiler and the log are listeners of it.
It must not know what a group or a unit is. Call sites guard every ``emit`` with ``if listeners``,
so that a run that nobody watches pays one truth test for an event.

[Note: observers]
``events`` tells what was issued, in an order that tests and plans compare. A recording needs the
ends of things besides: when a collective was over, who waited for it, when a unit's own code ran.
A truth test at each of these places would be paid for by every run. So an object that is observed
gets an attribute for each observed method, which hides the method of its class and is deleted
afterwards. A run that nobody observes pays nothing at all, and what happens to another model is not
heard. What is observed is called through its object (``self.reduce(unit)``), so this is always met.

Several observers may observe one object, and leave in any order. Who came last is outermost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import torch

Listener = Callable[["Event"], None]

listeners: list[Listener] = []

IDLE, FORWARD, BACKWARD = "idle", "forward", "backward"

logger = logging.getLogger("fsdp2")


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that the engine did.

    ``kind`` is ``unshard`` (an all-gather was issued), ``wait_for_unshard`` (parameters are whole),
    ``reshard``, ``reduce`` (a reduction was issued), ``wait_for_reduce`` (gradients are in place),
    ``prefetch`` (the unshard that follows is ahead of its use), ``adopt`` (parameters that were
    replaced behind our back were taken over) or ``recover``. ``fqn`` names the unit, ``phase`` is
    ``idle``, ``forward`` or ``backward``, ``nbytes`` is the size of what the all-gather makes
    (unshard), of what is freed (reshard) or of what is reduced (reduce).
    """

    kind: str
    fqn: str
    phase: str
    nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.phase}: {self.kind} {self.fqn or '<root>'}"


def emit(kind: str, fqn: str, phase: str, nbytes: int = 0) -> None:
    """Tell every listener. Guard the call with ``if listeners``."""
    event = Event(kind, fqn, phase, nbytes)
    for listener in tuple(listeners):
        listener(event)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Hear every event inside the context."""
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


def log_event(event: Event) -> None:
    """Write an event to the ``fsdp2`` logger (a listener)."""
    logger.debug("%s (%d bytes)", event, event.nbytes)


def profile_event(event: Event) -> None:
    """Mark an event on the profiler's time line (a listener)."""
    with torch.profiler.record_function(f"fsdp2::{event.kind} {event.fqn or '<root>'}"):
        pass


def follow(listener: Listener, wanted: bool) -> None:
    """Add or remove a standing listener, so that it is there exactly when ``wanted``."""
    if wanted != (listener in listeners):
        if wanted:
            listeners.append(listener)
        else:
            listeners.remove(listener)


# Observers: how a recording hears what objects of the engine do, at no cost while nobody does.


class Observer(Protocol):
    """Runs something around what an object does."""

    def around(
        self, kind: str, source: Any, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Do ``call(*args, **kwargs)``, which is what ``source`` does, and return its result."""


class _Observed:
    """What stands in the place of one method of one object."""

    __slots__ = ("call", "kind", "observers", "source")

    def __init__(self, source: object, kind: str, call: Callable[..., Any]) -> None:
        self.source = source
        self.kind = kind
        self.call = call
        self.observers: list[Observer] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.call
        for observer in self.observers:
            call = partial(observer.around, self.kind, self.source, call)
        return call(*args, **kwargs)


class Observable:
    """An object whose methods can be observed, one object at a time. See [Note: observers]."""

    observed_as: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    """The observed methods, by what they are to an observer."""

    def observe(self, observer: Observer) -> None:
        """Let an observer be around each observed method of this object."""
        for kind, method in self.observed_as.items():
            name = method.__name__
            observed = vars(self).get(name)
            if not isinstance(observed, _Observed):
                observed = _Observed(self, kind, getattr(self, name))
                setattr(self, name, observed)
            observed.observers.append(observer)

    def leave(self, observer: Observer) -> None:
        """Let an observer go; the last one leaves the methods of the class."""
        for method in self.observed_as.values():
            observed = vars(self)[method.__name__]
            observed.observers.remove(observer)
            if not observed.observers:
                delattr(self, method.__name__)

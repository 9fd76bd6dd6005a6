"""Engine events (for tests, the profiler and the log), and observers of method calls.

Call sites guard every ``emit`` with ``if listeners``, so an unobserved event costs one truth test.

[Note: observers]
An event is emitted when an operation is issued. Tests and plans compare the order of events. A
recording also needs to show when a collective completed, which units waited, and when a unit's own
code ran. A truth test at each of these points would slow down every run. Instead, an observed
object gets an instance attribute for each observed method. The attribute shadows the class's method
and is deleted afterwards. Observed methods must therefore be called through the object
(``self.reduce(unit)``). Several observers may observe one object, and may be removed in any order.
The latest one is outermost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

import torch

Listener = Callable[["Event"], None]

listeners: list[Listener] = []

IDLE, FORWARD, BACKWARD = "idle", "forward", "backward"

logger = logging.getLogger("fsdp2")


@dataclass(frozen=True, slots=True)
class Event:
    """One operation of the engine. ``kind`` is ``unshard`` (an all-gather was issued),
    ``wait_for_unshard`` (parameters are unsharded), ``reshard``, ``reduce`` (a reduction was
    issued), ``wait_for_reduce`` (gradients are stored), ``prefetch`` (the next unshard is a
    prefetch), ``adopt`` (parameters replaced by the user were adopted) or ``recover``. ``fqn`` is
    the unit's name; ``phase`` is ``idle``, ``forward`` or ``backward``; ``nbytes`` is the size of
    the all-gather's output (unshard), the freed memory (reshard) or the reduced data (reduce)."""

    kind: str
    fqn: str
    phase: str
    nbytes: int = 0

    def __str__(self) -> str:
        return f"{self.phase}: {self.kind} {self.fqn or '<root>'}"


def emit(kind: str, fqn: str, phase: str, nbytes: int = 0) -> None:
    """Call every listener. Guard calls to this function with ``if listeners``."""
    event = Event(kind, fqn, phase, nbytes)
    for listener in tuple(listeners):
        listener(event)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


def log_event(event: Event) -> None:
    logger.debug("%s (%d bytes)", event, event.nbytes)


def profile_event(event: Event) -> None:
    """Mark an event on the profiler's timeline."""
    with torch.profiler.record_function(f"fsdp2::{event.kind} {event.fqn or '<root>'}"):
        pass


def follow(listener: Listener, wanted: bool) -> None:
    """Register a permanent listener if ``wanted``, else unregister it."""
    if wanted != (listener in listeners):
        change = listeners.append if wanted else listeners.remove
        change(listener)


class Observer(Protocol):
    """Wraps methods of observed objects."""

    def around(
        self,
        kind: str,
        source: Any,
        call: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Run ``call(*args, **kwargs)``, a method of ``source``, and return its result."""


@dataclass(eq=False, slots=True)
class _Observed:
    source: object
    kind: str
    call: Callable[..., Any]
    observers: list[Observer] = field(default_factory=list)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.call
        for observer in self.observers:
            call = partial(observer.around, self.kind, self.source, call)
        return call(*args, **kwargs)


class Observable:
    """An object whose methods can be observed per instance. See [Note: observers]."""

    observed_as: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    """Observed methods, by the ``kind`` that is passed to observers."""

    def observe(self, observer: Observer) -> None:
        """Wrap an observer around each observed method of this object."""
        for kind, method in self.observed_as.items():
            name = method.__name__
            observed = vars(self).get(name)
            if not isinstance(observed, _Observed):
                observed = _Observed(self, kind, getattr(self, name))
                setattr(self, name, observed)
            observed.observers.append(observer)

    @property
    def is_observed(self) -> bool:
        return any(isinstance(value, _Observed) for value in vars(self).values())

    def leave(self, observer: Observer) -> None:
        """Remove an observer. Removing the last observer restores the class's methods."""
        for method in self.observed_as.values():
            observed = vars(self)[method.__name__]
            observed.observers.remove(observer)
            if not observed.observers:
                delattr(self, method.__name__)

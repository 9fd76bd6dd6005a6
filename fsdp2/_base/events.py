"""The one observation seam: what the engine does, as it does it.

Owns the list of listeners. Tests pin orders with it, the profiler and the log are listeners of it.
It must not know what a group or a unit is. Call sites guard every ``emit`` with ``if listeners``,
so that a run that nobody watches pays one truth test for an event.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

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

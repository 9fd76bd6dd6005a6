"""Who listens to what is being planned: a plan of a large model takes seconds, and says so.

Owns the list of listeners. It must not know what they do with what they hear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str], None]
_listeners: list[Listener] = []


def tell(what: str) -> None:
    """Say what begins now, in a few words; empty: it is over."""
    for listener in tuple(_listeners):
        listener(what)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let a function hear what is planned inside."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)

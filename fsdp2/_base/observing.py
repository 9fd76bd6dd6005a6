"""Observers: how a recording hears what objects of the engine do, at no cost while nobody does.

Owns the seam alone. A class says beside its methods which of them are observed, and as what
(``observed_as``). It must not know what is observed, or what is made of it.

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

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Protocol


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

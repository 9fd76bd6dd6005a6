"""Launches whose waits somebody is told of. A run that nobody observes enters nothing here."""

from __future__ import annotations

from typing import Protocol

from fsdp2._comm.wire import InFlight


class FlightObserver(Protocol):
    """Is told of the waits for one launch of a lane."""

    def before_wait(self, flight: InFlight) -> None: ...

    def after_wait(self) -> None: ...


class ObservedFlight(InFlight):
    """A launch whose waits are told of. It takes the place of the one that was launched."""

    __slots__ = ("__weakref__", "_observers")

    def __init__(self, flight: InFlight, observer: FlightObserver) -> None:
        super().__init__(flight.buffers, flight._work, flight._lost)
        self._event = flight._event
        known = flight._observers if isinstance(flight, ObservedFlight) else ()
        self._observers: tuple[FlightObserver, ...] = (*known, observer)

    def wait(self) -> None:
        if self._work is None and self._event is None:
            return
        for observer in self._observers:
            observer.before_wait(self)
        try:
            super().wait()
        finally:
            for observer in self._observers:
                observer.after_wait()

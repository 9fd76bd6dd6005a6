"""The lanes of a device: streams ordered by events, without host waits. See ``wire.Streams``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from fsdp2._core.base import torch_autograd
from fsdp2._core.base.capabilities import capabilities
from fsdp2._core.comm.late_look import LateLook
from fsdp2._core.comm.wire import InFlight, Streams


class DeviceStreams(Streams):
    """One stream per lane, in addition to the current (compute) stream."""

    async_op = False

    def __init__(self, device: torch.device) -> None:
        # Gathers and reduce-scatters have priority: compute waits for gathered parameters, and for
        # reduce-scatters to free memory. As in torch, all-reduces have no priority, because compute
        # waits for them only at the end of backward.
        priority = capabilities(device).lane_priority
        priorities = {"gather": priority, "reduce": priority, "all_reduce": 0}
        self._lanes = {name: torch.Stream(device, priority=p) for name, p in priorities.items()}
        self._retired: dict[str, list[InFlight]] = {name: [] for name in self._lanes}
        module = torch.get_device_module(device.type)
        self._is_capturing = getattr(module, "is_current_stream_capturing", lambda: False)

    @property
    def current(self) -> torch.Stream | None:  # type: ignore[override]  # read-only
        return torch.accelerator.current_stream()

    def on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        assert stream is not None
        return stream

    def launch(
        self,
        lane: str,
        issue: Callable[..., InFlight],
        *args: object,
        after: InFlight | None = None,
    ) -> InFlight:
        stream, retired = self._lanes[lane], self._retired[lane]
        # do not wait for the last entry: compute may still read its buffers during this launch
        for held in retired[:-1]:
            held.hold_back(stream)
        del retired[:-1]
        if after is not None:
            after.hold_back(stream)
        with stream, torch_autograd.without_packing():
            flight = issue(*args)
            flight.wait()  # a custom collective may return a Work even without async_op
            flight.end_with(stream.record_event())
        if after is not None:  # keep its buffers, which this launch uses in another lane
            flight.buffers += after.buffers
        return flight

    def order_after_compute(self, lane: str) -> None:
        self._lanes[lane].wait_stream(torch.accelerator.current_stream())

    def order_after_event(self, lane: str, event: torch.Event) -> None:
        with self._lanes[lane]:
            event.wait()  # stream.wait_event silently ignores a torch.cuda.Event

    def hold_back(self, stream: torch.Stream | None) -> None:
        current = torch.accelerator.current_stream()
        if stream is not None and stream != current:
            stream.wait_stream(current)

    def lane_of(self, stream: torch.Stream) -> str:
        name = f"stream {stream.stream_id}"
        if name not in self._lanes:  # a torch.Stream, so that lanes can wait for its events
            self._lanes[name] = torch.Stream(
                stream_id=stream.stream_id,
                device_index=stream.device_index,
                device_type=stream.device_type,
            )
            self._retired[name] = []
        return name

    def note_late(self, looks: Iterable[LateLook]) -> None:
        if not self._is_capturing():
            for look in looks:
                look.note()

    def look_late(self, looks: Iterable[LateLook]) -> None:
        if not self._is_capturing():  # events must not be queried during graph capture
            for look in looks:
                look.look()

    def retire(self, lane: str, buffers: tuple[torch.Tensor, ...]) -> None:
        event = torch.accelerator.current_stream().record_event()
        self._retired[lane].append(InFlight(buffers).end_with(event))

    def drain(self, lane: str) -> None:
        stream, retired = self._lanes[lane], self._retired[lane]
        for held in retired:
            held.hold_back(stream)
        retired.clear()

    def reset(self) -> None:
        torch.accelerator.synchronize()
        self.forget()

    def forget(self) -> None:
        for held in self._retired.values():
            held.clear()
        self.host_read = None


def streams_for(device: torch.device) -> Streams:
    return DeviceStreams(device) if capabilities(device).has_lanes else Streams()


class FlightObserver(Protocol):
    """An observer of one launch in a lane, called before and after each wait for the launch."""

    def before_wait(self, flight: InFlight) -> None: ...

    def after_wait(self) -> None: ...


class ObservedFlight(InFlight):
    """Replaces the ``InFlight`` of an observed launch, and calls its observers at each wait."""

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

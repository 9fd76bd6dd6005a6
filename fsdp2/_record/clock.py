"""What time it is: on the host at once, on a device when an event says so, later.

Owns one clock for both, in nanoseconds from the recording's start, and where that start lies in
time of day. It must not know what is timed.

[Note: times of a device]
An event that a stream records has a time only once the stream got there. Nobody waits for it: a
moment is kept, and asked again when another step begins. Events tell differences in fp32
milliseconds, which is too coarse after minutes, so each step has an *anchor*: an event from which
its moments are measured, whose own time is that of the anchor before it and the difference. Only
the first one is waited for, before anything is recorded.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from fsdp2._base.capabilities import capabilities


class Clock:
    """The clock of a host: a moment is a number."""

    is_host = True

    def __init__(self) -> None:
        self._start = time.perf_counter_ns()
        # Between two looks at the other clock, the middle of which is the same moment.
        epoch = time.time_ns()
        self.epoch_ns = epoch - (time.perf_counter_ns() - self._start) // 2

    def host_now(self) -> int:
        return time.perf_counter_ns() - self._start

    def now(self) -> Any:
        """Return this moment, in the stream that is current."""
        return time.perf_counter_ns() - self._start

    def begin_step(self) -> None:
        """Measure what follows from here."""

    def when(self, moment: Any) -> int | None:
        """Return the time of a moment, or None if nobody can tell yet."""
        return int(moment)

    def settle(self) -> None:
        """Wait until every moment has a time."""


class Moment:
    """An event of a device, and the anchor before it."""

    __slots__ = ("anchor", "event", "time_ns")

    def __init__(self, event: torch.Event, anchor: Moment | None, time_ns: int | None) -> None:
        self.event = event
        self.anchor = anchor
        self.time_ns = time_ns  # None: it is not known yet


class DeviceClock(Clock):
    """The clock of a device. See [Note: times of a device]."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        module = torch.get_device_module(device.type)
        self._is_capturing = getattr(module, "is_current_stream_capturing", lambda: False)
        event = self._record()
        event.synchronize()
        super().__init__()
        self._anchor = Moment(event, None, 0)

    def _record(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def now(self) -> Any:
        if self._is_capturing():  # a graph that is captured has no times
            return self.host_now()
        return Moment(self._record(), self._anchor, None)

    def begin_step(self) -> None:
        if not self._is_capturing():
            self.when(self._anchor)
            self._anchor = Moment(self._record(), self._anchor, None)

    def when(self, moment: Any) -> int | None:
        if isinstance(moment, int):
            return moment
        if moment.time_ns is None and moment.event.query():
            start = self.when(moment.anchor)
            if start is None:
                return None
            passed_ms = moment.anchor.event.elapsed_time(moment.event)
            moment.time_ns = start + round(passed_ms * 1e6)
            moment.anchor = None  # else each anchor keeps all before it
        return moment.time_ns  # type: ignore[no-any-return]  # a moment's is a number

    def settle(self) -> None:
        torch.accelerator.synchronize()


def clock_for(device: torch.device) -> Clock:
    return DeviceClock(device) if capabilities(device).has_lanes else Clock()

"""Simulated time on a device: its streams and events, and the host that issues work and waits. See
``costs`` for the durations.

[Note: how time passes]
A stream runs its items in order. An item starts when the previous one has ended, the host has
issued it, and the events that its stream waits for have occurred. In addition:

- A process group is one communicator: its collectives start in the order of issue, regardless of
  their streams, each after the previous one has ended.
- A link carries one collective at a time. (If two groups used the link in parallel, their transfers
  would take the same total time.)
- A collective in a stream without priority starts when the running kernel ends, because the
  kernel's blocks occupy the device. In a high-priority stream it starts immediately.

The host issues work asynchronously, so nothing is simulated until the host waits or the step ends.
Items then start in the order of their earliest possible start; a wait advances the host's clock.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Ran:
    """An item in a stream: it takes time, records an event, or waits for one. ``number`` is its
    place in the order of issue. ``group`` is -1 except for a collective. ``mark``: event or -1.
    ``start`` and ``end`` are set when the item runs."""

    stream: int
    issued: float
    seconds: float = 0.0
    name: str = ""
    nbytes: int = 0
    group: int = -1
    link: float = 0.0
    mark: int = -1
    waits: bool = False
    number: int = 0
    label: str = ""
    start: float = 0.0
    end: float = 0.0


@dataclass(frozen=True, slots=True)
class HostWait:
    label: str
    start: float
    seconds: float


class DeviceClock:
    """Clocks of one device, its streams, and the host, in seconds. ``is_urgent``: whether a stream
    has high priority. ``straggler``: seconds by which the other ranks of a collective are late."""

    def __init__(self, is_urgent: Callable[[int], bool], straggler: float = 0.0) -> None:
        self._is_urgent = is_urgent
        self._straggler = straggler
        self.restart()

    def restart(self) -> None:
        self.host = self.seconds = 0.0
        self.label = ""
        self.ran: list[Ran] = []
        self.waits: list[HostWait] = []
        self._issued = 0
        self._recorded: set[int] = set()
        self._queues: dict[int, deque[Ran]] = {}
        # times at which streams (numbers), groups and links (pairs) become idle
        self._free_at: defaultdict[object, float] = defaultdict(float)
        self._moments: dict[int, float] = {}  # keyed by mark
        self._in_order: dict[int, deque[int]] = {}  # by group: collectives that have not started
        self._kernels: dict[int, Ran] = {}  # by stream: the most recently started kernel

    def work(self, seconds: float) -> None:
        self.host += seconds

    def kernel(self, stream: int, seconds: float, name: str, nbytes: int = 0) -> int:
        return self._add(Ran(stream, self.host, seconds, name, nbytes))

    def collective(
        self,
        stream: int,
        group: int,
        link: float,
        seconds: float,
        name: str,
        nbytes: int = 0,
    ) -> int:
        number = self._add(Ran(stream, self.host, seconds, name, nbytes, group, link))
        self._in_order.setdefault(group, deque()).append(number)
        return number

    def record(self, stream: int, mark: int) -> None:
        self._recorded.add(mark)
        self._add(Ran(stream, self.host, mark=mark))

    def hold_back(self, stream: int, mark: int) -> None:
        """Make a stream's later work wait for an event, if the event was recorded in this step."""
        if mark in self._recorded:
            self._add(Ran(stream, self.host, mark=mark, waits=True))

    def wait_for(self, mark: int) -> None:
        """Make the host wait for an event, if the event was recorded in this step."""
        if mark not in self._recorded:
            return
        while mark not in self._moments and self._start_next():
            pass
        self._wait_until(self._moments.get(mark, 0.0))

    def wait_for_stream(self, stream: int | None = None) -> None:
        """Make the host wait for the current work of a stream, or of all streams."""
        streams = self._queues if stream is None else [stream]
        while any(self._queues.get(one) for one in streams) and self._start_next():
            pass
        self._wait_until(max((self._free_at[one] for one in streams), default=0.0))

    def finish(self) -> float:
        """Simulate all items. Return the time at which the device and the host have finished."""
        while self._start_next():
            pass
        assert not any(self._queues.values()), "a stream waits for an event that is never recorded"
        self.seconds = max(self.host, *self._free_at.values(), 0.0)
        return self.seconds

    def time_of(self, mark: int) -> float:
        """Return the time of an event that has been simulated."""
        return self._moments[mark]

    def _wait_until(self, moment: float) -> None:
        self.waits.append(HostWait(self.label, self.host, max(moment - self.host, 0.0)))
        self.host = max(self.host, moment)

    def _add(self, item: Ran) -> int:
        self._issued += 1
        item.number, item.label = self._issued, self.label
        self._queues.setdefault(item.stream, deque()).append(item)
        return item.number

    def _start_next(self) -> bool:
        """Start the item that can start first. Return False if no item can start."""
        self._settle_events()
        best: Ran | None = None
        first = (math.inf, False, 0)
        for queue in self._queues.values():
            if queue and not queue[0].waits:
                item = queue[0]
                # a collective that waited for the end of a kernel starts before the next kernel
                order = (self._start_of(item), item.group < 0, item.number)
                if order < first:
                    best, first = item, order
        at = first[0]
        if best is None or at == math.inf:
            return False
        self._queues[best.stream].popleft()
        self.ran.append(best)
        best.start, best.end = at, at + best.seconds
        self._free_at[best.stream] = best.end
        if best.group < 0:
            self._kernels[best.stream] = best
        else:
            self._in_order[best.group].popleft()
            self._free_at["group", best.group] = self._free_at["link", best.link] = best.end
        return True

    def _settle_events(self) -> None:
        """Resolve the events and waits at the heads of the queues; they take no time."""
        goes_on = True
        while goes_on:
            goes_on = False
            for stream, queue in self._queues.items():
                while queue and queue[0].mark >= 0:
                    item = queue[0]
                    free_at = max(self._free_at[stream], item.issued)
                    if item.waits:
                        moment = self._moments.get(item.mark)
                        if moment is None:
                            break
                        self._free_at[stream] = max(self._free_at[stream], moment)
                    else:
                        self._moments[item.mark] = free_at
                    queue.popleft()
                    goes_on = True

    def _start_of(self, item: Ran) -> float:
        start = max(self._free_at[item.stream], item.issued)
        if item.group < 0:
            return start
        if self._in_order[item.group][0] != item.number:
            return math.inf
        start = max(
            start + self._straggler,
            self._free_at["group", item.group],
            self._free_at["link", item.link],
        )
        if not self._is_urgent(item.stream):
            for stream, kernel in self._kernels.items():
                if stream != item.stream and kernel.start < start < kernel.end:
                    start = kernel.end
        return start

"""Time on a device: streams run what they were given in order, events hold streams back.

Owns the queues of streams, the moments of events, and the host that issues and waits. What anything
costs is for ``costs`` to say; what is issued, for who plays a program here.

[Note: how time passes]
A stream runs its items in order. An item starts when the one before it has ended, when the host had
issued it, and when the events that its stream waits for have come. Besides:

- A process group is one communicator: its collectives start in the order in which they were issued,
  whatever streams they are in, and each when the one before it has ended.
- A link carries one collective at a time: what two groups send over it takes as long one behind the
  other as beside each other.
- A collective in a stream without priority starts when a kernel ends: until then blocks of that
  have the device. One in a stream of high priority starts at once.

The host issues without looking, so nothing is played until it waits, or the step is over. Then
items are started in the order of time. A wait of the host moves its clock to the event.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ran:
    """Something that took time, in seconds of the clock.

    ``number`` counts what the host issued; ``group`` is -1 unless it is a collective.
    """

    number: int
    name: str
    label: str
    stream: int
    start: float
    end: float
    nbytes: int
    group: int


@dataclass(slots=True)
class _Item:
    number: int  # in the order of issue
    stream: int
    issued: float
    seconds: float = 0.0
    mark: int = -1  # an event that is recorded, or waited for
    waits: bool = False
    group: int = -1
    link: float = 0.0
    name: str = ""
    label: str = ""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host waited: when, and for how long."""

    label: str
    start: float
    seconds: float


class DeviceClock:
    """One device, its streams, and the host. Seconds; a step begins at 0.

    Args:
        is_urgent: of the number of a stream, if it has high priority.
        straggler: seconds by which the other ranks of a collective are late.
    """

    def __init__(self, is_urgent: Callable[[int], bool], straggler: float = 0.0) -> None:
        self.host = 0.0
        self.label = ""
        self.ran: list[Ran] = []
        self.waits: list[HostWait] = []
        self._is_urgent = is_urgent
        self._straggler = straggler
        self._issued = 0
        self._queues: dict[int, deque[_Item]] = {}
        self._free_at: dict[int, float] = {}  # by stream
        self._moments: dict[int, float] = {}  # by mark
        self._in_order: dict[int, deque[int]] = {}  # collectives of a group that have not started
        self._group_free_at: dict[int, float] = {}
        self._link_free_at: dict[float, float] = {}
        self._kernels: dict[int, Ran] = {}  # the last one that each stream started

    # What the host does.

    def work(self, seconds: float) -> None:
        """Let the host do something else."""
        self.host += seconds

    def kernel(self, stream: int, seconds: float, name: str, nbytes: int = 0) -> int:
        """Issue a kernel, or a copy; return its number."""
        return self._add(_Item(0, stream, self.host, seconds, name=name, nbytes=nbytes))

    def collective(
        self, stream: int, group: int, link: float, seconds: float, name: str, nbytes: int = 0
    ) -> int:
        """Issue a collective; return its number."""
        item = _Item(
            0, stream, self.host, seconds, group=group, link=link, name=name, nbytes=nbytes
        )
        self._add(item)
        self._in_order.setdefault(group, deque()).append(item.number)
        return item.number

    def record(self, stream: int, mark: int) -> None:
        self._add(_Item(0, stream, self.host, mark=mark))

    def hold_back(self, stream: int, mark: int) -> None:
        """Let what a stream is given next wait for an event."""
        self._add(_Item(0, stream, self.host, mark=mark, waits=True))

    def wait_for(self, mark: int) -> None:
        """Let the host wait for an event that was recorded."""
        while mark not in self._moments and self._start_next():
            pass
        self._wait_until(self._moments.get(mark, 0.0))

    def wait_for_stream(self, stream: int | None = None) -> None:
        """Let the host wait for what a stream, or every stream, was given so far."""
        streams = self._queues if stream is None else [stream]
        while any(self._queues.get(one) for one in streams) and self._start_next():
            pass
        self._wait_until(max((self._free_at.get(one, 0.0) for one in streams), default=0.0))

    def finish(self) -> float:
        """Play everything; return when the last of the device and the host is over."""
        while self._start_next():
            pass
        assert not any(self._queues.values()), "something waits for what nobody records"
        return max(self.host, *self._free_at.values(), 0.0)

    def moment(self, mark: int) -> float:
        """Return when an event came that has been played."""
        return self._moments[mark]

    def _wait_until(self, moment: float) -> None:
        self.waits.append(HostWait(self.label, self.host, max(moment - self.host, 0.0)))
        self.host = max(self.host, moment)

    def _add(self, item: _Item) -> int:
        self._issued += 1
        item.number, item.label = self._issued, self.label
        self._queues.setdefault(item.stream, deque()).append(item)
        return item.number

    # What the device does.

    def _start_next(self) -> bool:
        """Start the item that can start first; False if none can."""
        self._settle_events()
        best: _Item | None = None
        first = (math.inf, False, 0)
        for queue in self._queues.values():
            if queue and not queue[0].waits:
                item = queue[0]
                # a collective that waited for a kernel to end comes before the kernel after it
                order = (self._start_of(item), item.group < 0, item.number)
                if order < first:
                    best, first = item, order
        at = first[0]
        if best is None or at == math.inf:
            return False
        self._queues[best.stream].popleft()
        end = at + best.seconds
        self._free_at[best.stream] = end
        ran = Ran(best.number, best.name, best.label, best.stream, at, end, best.nbytes, best.group)
        self.ran.append(ran)
        if best.group < 0:
            self._kernels[best.stream] = ran
        else:
            self._in_order[best.group].popleft()
            self._group_free_at[best.group] = self._link_free_at[best.link] = end
        return True

    def _settle_events(self) -> None:
        """Record events, and pass those that have a moment: that takes no time."""
        goes_on = True
        while goes_on:
            goes_on = False
            for stream, queue in self._queues.items():
                while queue and queue[0].mark >= 0:
                    item = queue[0]
                    free_at = max(self._free_at.get(stream, 0.0), item.issued)
                    if item.waits:
                        moment = self._moments.get(item.mark)
                        if moment is None:
                            break
                        self._free_at[stream] = max(self._free_at.get(stream, 0.0), moment)
                    else:
                        self._moments[item.mark] = free_at
                    queue.popleft()
                    goes_on = True

    def _start_of(self, item: _Item) -> float:
        start = max(self._free_at.get(item.stream, 0.0), item.issued)
        if item.group < 0:
            return start
        if self._in_order[item.group][0] != item.number:
            return math.inf
        start = max(
            start + self._straggler,
            self._group_free_at.get(item.group, 0.0),
            self._link_free_at.get(item.link, 0.0),
        )
        if not self._is_urgent(item.stream):
            for stream, kernel in self._kernels.items():
                if stream != item.stream and kernel.start < start < kernel.end:
                    start = kernel.end
        return start

"""Lanes of a device that is not there: the engine's own streams, on the clock of a device.

Owns what acts as streams and launches for the engine, and as a clock for whoever runs it. Tensors
are fake and lie with the host; what they are given to do is noted, and played when it is all known.
It must not know what a unit does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fsdp2._core.base.capabilities import capabilities
from fsdp2._core.comm.wire import InFlight, Streams
from fsdp2._tools.pages.content import COMPUTE, GATHER, REDUCE, Span
from fsdp2._tools.plan.costs import SHORTEST_KERNEL, Costs
from fsdp2._tools.plan.device_clock import DeviceClock, Ran
from fsdp2._tools.plan.hardware import Hardware, bandwidth_of

KERNELS = 0
"""The number of the stream that computes."""
LANES = {"gather": 1, "reduce": 2, "all_reduce": 3}
OUT, BACK = 4, 5
"""The numbers of the streams of copies to the host, and from it."""
LEAST_WAIT = 1e-9
"""Seconds: less is no wait, but what floating-point numbers leave."""


class Products:
    """What products take at the machine's peak; those that are computed again do not count."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.are_again = False

    def add(self, seconds: float) -> None:
        if not self.are_again:
            self.seconds += seconds


class LaneClock:
    """A device's time, as ``clock.Clock`` is that of a host that computes.

    ``stream`` is the number of the one that is given work now.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.seconds = 0.0
        self.stream = KERNELS
        self.products = Products()
        self._costs = Costs(hardware)
        self._groups: dict[tuple[Any, ...], int] = {}  # a number for each communicator
        self.restart()

    def restart(self) -> None:
        """Forget what was; a step begins at 0, with idle streams and links."""
        urgent = capabilities(torch.device(self.hardware.device_type)).lane_priority < 0
        lanes = (LANES["gather"], LANES["reduce"])
        self._device = DeviceClock(lambda stream: urgent and stream in lanes)
        self._marks = itertools.count()
        self._recorded: set[int] = set()
        self.products.seconds = 0.0
        self.seconds = 0.0

    @property
    def label(self) -> str:
        return self._device.label

    @label.setter
    def label(self, label: str) -> None:
        self._device.label = label

    def compute(self, seconds: float) -> None:
        """Let an operation take its time, in the stream that is given work."""
        if seconds > 0.0:
            self._device.kernel(self.stream, max(seconds, SHORTEST_KERNEL), self.label)

    def copy(self, nbytes: int) -> None:
        """Give a copy between the host and the device to the stream that is given work."""
        self._device.kernel(self.stream, self._costs.copy(nbytes), "copy", nbytes)

    def send(
        self, kind: str, unit: str, nbytes: int, ranks: int, stride: int, pieces: int = 1
    ) -> None:
        """Give a collective to the stream that is given work."""
        if ranks == 1 or nbytes == 0:
            return
        key = (kind == "all_reduce", ranks, stride)
        group = self._groups.setdefault(key, len(self._groups))
        took = self._costs.collective(kind, nbytes, ranks, stride, pieces=pieces)
        link = bandwidth_of(self.hardware, ranks, stride)
        name = f"{kind} {unit or '<root>'}"
        self._device.collective(self.stream, group, link, took, name, nbytes)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """Give work to another stream meanwhile."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def mark(self, stream: int | None = None) -> int:
        """Record an event: when what a stream was given so far is over."""
        mark = next(self._marks)
        self._recorded.add(mark)
        self._device.record(self.stream if stream is None else stream, mark)
        return mark

    def hold_back(self, stream: int, mark: int) -> None:
        """Let what a stream is given next wait for an event of this step."""
        if mark in self._recorded:
            self._device.hold_back(stream, mark)

    def wait_for(self, mark: int) -> None:
        """Let the host wait for an event of this step."""
        if mark in self._recorded:
            self._device.wait_for(mark)

    def time_of(self, mark: int) -> float:
        """Return when an event came, after ``finish``."""
        return self._device.moment(mark)

    def finish(self) -> None:
        """Play what was given so far."""
        self.seconds = self._device.finish()

    @property
    def spans(self) -> list[Span]:
        """What took time: in compute one span for what a label did, with the waits between."""
        return [*_joined(self._device.ran), *map(_span_of, self._collectives())]

    def _collectives(self) -> Iterator[Ran]:
        return (ran for ran in self._device.ran if ran.group >= 0)


def _span_of(ran: Ran) -> Span:
    lane = GATHER if ran.name.startswith("all_gather") else REDUCE
    return Span(lane, ran.name, ran.start, ran.end, ran.nbytes)


def _joined(ran: list[Ran]) -> Iterator[Span]:
    """Join kernels of compute that follow each other; between others compute waits."""
    kernels = sorted((r for r in ran if r.stream == KERNELS), key=lambda r: r.start)
    ends = sorted((r.end, r.name) for r in ran if r.group >= 0)
    begin = end = 0.0
    label = ""
    for one in kernels:
        gap = one.start - end
        if gap > LEAST_WAIT or one.label != label:
            if end > begin:
                yield Span(COMPUTE, label, begin, end)
            if gap > LEAST_WAIT:
                cause = next((name for at, name in reversed(ends) if at <= one.start), "the host")
                yield Span(COMPUTE, "waits", end, one.start, cause=cause)
            begin, label = one.start, one.label
        end = one.end
    if end > begin:
        yield Span(COMPUTE, label, begin, end)
    last, name = ends[-1] if ends else (0.0, "")
    if last - end > LEAST_WAIT:
        yield Span(COMPUTE, "waits", end, last, cause=name)


class LaneFlight(InFlight):
    """A launch in an imagined lane."""

    __slots__ = ("_clock", "_place")

    def __init__(self, buffers: tuple[torch.Tensor, ...], clock: LaneClock, mark: int) -> None:
        super().__init__(buffers)
        self._clock, self._place = clock, mark

    @property
    def is_done(self) -> bool:
        return False

    def wait(self) -> None:
        self._clock.hold_back(self._clock.stream, self._place)

    def synchronize(self) -> None:
        self.wait()
        self._clock.wait_for(self._place)

    def delay(self, stream: int) -> None:
        """Make another stream wait for the launch."""
        self._clock.hold_back(stream, self._place)


class ImaginedLanes(Streams):
    """The lanes of a device, as ``DeviceStreams`` are; see there for the rules."""

    async_op = False

    def __init__(self, clock: LaneClock) -> None:
        self._clock = clock
        self._retired: dict[str, list[LaneFlight]] = {name: [] for name in LANES}

    def launch(
        self,
        lane: str,
        issue: Callable[..., InFlight],
        *args: object,
        after: InFlight | None = None,
    ) -> InFlight:
        clock, stream, retired = self._clock, LANES[lane], self._retired[lane]
        for held in retired[:-1]:
            held.delay(stream)
        del retired[:-1]
        if isinstance(after, LaneFlight):
            after.delay(stream)
        with clock.on(stream):
            flight = issue(*args)
        behind = () if after is None else after.buffers
        return LaneFlight((*flight.buffers, *behind), clock, clock.mark(stream))

    def order_after_compute(self, lane: str) -> None:
        self._clock.hold_back(LANES[lane], self._clock.mark(KERNELS))

    def retire(self, lane: str, buffers: tuple[torch.Tensor, ...]) -> None:
        self._retired[lane].append(LaneFlight(buffers, self._clock, self._clock.mark(KERNELS)))

    def drain(self, lane: str) -> None:
        for held in self._retired[lane]:
            held.delay(LANES[lane])
        self._retired[lane].clear()

    def reset(self) -> None:
        for retired in self._retired.values():
            retired.clear()

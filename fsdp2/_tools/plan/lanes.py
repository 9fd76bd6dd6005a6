"""Simulated lanes of a device, which replace the engine's streams. Tensors are fake. Operations are
recorded first; a device clock simulates them when the host waits or the step ends."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._core.api.activations import Activations
from fsdp2._core.api.host_memory import CopyLanes, HostBuffer, HostMemory, Look
from fsdp2._core.base.capabilities import capabilities
from fsdp2._core.comm.wire import InFlight, Streams
from fsdp2._tools.pages.content import COMPUTE, GATHER, REDUCE, Span
from fsdp2._tools.plan.costs import SHORTEST_KERNEL, Costs
from fsdp2._tools.plan.device_clock import DeviceClock, Ran
from fsdp2._tools.plan.hardware import Hardware, bandwidth_of

KERNELS = 0
"""The number of the compute stream."""
LANES = {"gather": 1, "reduce": 2, "all_reduce": 3}
OUT, BACK = 4, 5
"""The numbers of the streams for copies to the host and back."""
LEAST_WAIT = 1e-9
"""Waits that are shorter than this many seconds are rounding errors."""
MIN_NBYTES = 1 << 18
"""Minimum size of an offloaded tensor in bytes, as in ``offload_activations``."""


class LaneClock(DeviceClock):
    """A ``DeviceClock`` with the interface of ``clock.Clock``. ``stream`` is the current stream."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.stream = KERNELS
        self.counts_products = True
        self._costs = Costs(hardware)
        self._groups: dict[tuple[Any, ...], int] = {}  # numbers of communicators
        has_priority = capabilities(torch.device(hardware.device_type)).lane_priority < 0
        urgent = (LANES["gather"], LANES["reduce"]) if has_priority else ()
        super().__init__(lambda stream: stream in urgent)

    def restart(self) -> None:
        super().restart()
        self.products = 0.0
        self._marks = itertools.count()

    def compute(self, seconds: float, product: float = 0.0) -> None:
        self.products += product
        self.kernel(self.stream, max(seconds, SHORTEST_KERNEL), self.label)

    def copy(self, nbytes: int) -> None:
        self.kernel(self.stream, self._costs.copy(nbytes), "copy", nbytes)

    def send(
        self,
        kind: str,
        unit: str,
        nbytes: int,
        ranks: int,
        stride: int,
        pieces: int = 1,
    ) -> None:
        if ranks == 1 or nbytes == 0:
            return
        key = (kind == "all_reduce", ranks, stride)
        group = self._groups.setdefault(key, len(self._groups))
        took = self._costs.collective(kind, nbytes, ranks, stride, pieces=pieces)
        link = bandwidth_of(self.hardware, ranks, stride)
        self.collective(self.stream, group, link, took, f"{kind} {unit or '<root>'}", nbytes)

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def run_in(
        self,
        lane: int,
        issue: Callable[[], object],
        after: int | None = None,
    ) -> int:
        """Issue work in a lane, after compute or after a mark. Return a mark at the work's end."""
        self.hold_back(lane, self.mark(KERNELS) if after is None else after)
        with self.on(lane):
            issue()
        return self.mark(lane)

    def mark(self, stream: int | None = None) -> int:
        """Record an event at the end of a stream's current work."""
        mark = next(self._marks)
        self.record(self.stream if stream is None else stream, mark)
        return mark

    @property
    def spans(self) -> list[Span]:
        """The spans of the step: compute (merged by label), waits of compute, and collectives."""
        return [*_joined(self.ran), *(_span_of(ran) for ran in self.ran if ran.group >= 0)]


def _span_of(ran: Ran) -> Span:
    lane = GATHER if ran.name.startswith("all_gather") else REDUCE
    return Span(lane, ran.name, ran.start, ran.end, ran.nbytes)


def _joined(ran: list[Ran]) -> Iterator[Span]:
    """Merge consecutive compute kernels; gaps between them are waits."""
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
    __slots__ = ("_after", "_clock")

    def __init__(
        self,
        buffers: tuple[Tensor, ...],
        clock: LaneClock,
        mark: int,
    ) -> None:
        super().__init__(buffers)
        self._clock, self._after = clock, mark

    is_done = False

    def wait(self) -> None:
        self.delay(self._clock.stream)

    def synchronize(self) -> None:
        self.wait()
        self._clock.wait_for(self._after)

    def delay(self, stream: int) -> None:
        self._clock.hold_back(stream, self._after)


class ImaginedLanes(Streams):
    """Simulated lanes of a device, which follow the rules of ``DeviceStreams``."""

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

    def retire(self, lane: str, buffers: tuple[Tensor, ...]) -> None:
        self._retired[lane].append(LaneFlight(buffers, self._clock, self._clock.mark(KERNELS)))

    def drain(self, lane: str) -> None:
        for held in self._retired[lane]:
            held.delay(LANES[lane])
        self._retired[lane].clear()

    def reset(self) -> None:
        for retired in self._retired.values():
            retired.clear()


class ImaginedMemory(HostMemory):
    """Simulated pinned memory, without storage."""

    def _allocate(self, nbytes: int) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu")


class ImaginedCopies(CopyLanes):
    """Simulated lanes for copies, whose events are marks of the clock."""

    def __init__(self, clock: LaneClock) -> None:
        self._clock = clock

    @property
    def compute(self) -> Any:
        return self

    def wait_event(self, mark: int) -> None:
        self._clock.hold_back(KERNELS, mark)

    def send_storage(self, tensor: Tensor, buffer: HostBuffer) -> Any:
        return self.move(OUT, tensor.untyped_storage().nbytes())

    def view(self, held: Tensor, look: Look) -> Tensor:
        """View memory without ``set_``: in a fake mode, ``set_`` would keep the storage alive."""
        dtype, size, stride, offset = look
        of_dtype = held if held.dtype is dtype else held.view(dtype)
        return of_dtype.as_strided(size, stride, offset)

    def bring_back(self, buffer: HostBuffer, target: Tensor) -> Any:
        return self.move(BACK, target.numel())

    def move(self, lane: int, nbytes: int, after: int | None = None) -> int:
        """Copy bytes after compute or after a mark. Return a mark at the end of the copy."""
        return self._clock.run_in(lane, functools.partial(self._clock.copy, nbytes), after)


class ImaginedActivations(Activations):
    """Offloads activations on a simulated device, without allocating memory."""

    def __init__(
        self,
        model: nn.Module,
        chosen: dict[nn.Module, bool],
        clock: LaneClock,
    ) -> None:
        self._copies = ImaginedCopies(clock)
        super().__init__(model, chosen, MIN_NBYTES)

    def _make_memory(self) -> HostMemory:
        return ImaginedMemory()

    def _lanes_of(self, device: torch.device) -> CopyLanes:
        return self._copies

    def _can_copy(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, DTensor)

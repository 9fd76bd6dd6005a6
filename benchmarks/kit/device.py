"""One rank of many on the simulated device, and a clock for what it was given to do.

Owns the process group of ranks that all do the same, and how a trace is played. It must not know
models or libraries.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch._meta_registrations  # shapes of what kernels make that do not run
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2._tools.plan import costs as figures
from fsdp2._tools.plan.costs import Costs
from fsdp2._tools.plan.device_clock import DeviceClock, HostWait, Ran
from fsdp2._tools.plan.hardware import bandwidth_of
from tests.kit import sim

KERNEL, COPY, COLLECTIVE, RECORD, BLOCK, WAIT, LABEL = range(7)
COMPUTE = 0  # the stream that a program begins in
BF16 = 15  # c10::ScalarType


@functools.cache
def simulator() -> Any:
    """Load the simulated device, and let large kernels of this process not run from now on."""
    loaded = sim.load()
    loaded.take_time()
    dist.Backend.register_backend(
        "mirror",
        lambda store, rank, size, timeout: loaded.make_mirror(rank, size),
        devices=[sim.DEVICE],
    )
    return loaded


@contextmanager
def ranks(shape: Sequence[int]) -> Iterator[DeviceMesh]:
    """Be rank 0 of many that hold the same; the last dim of the mesh shards."""
    simulator()
    dist.init_process_group(
        "sim:mirror", rank=0, world_size=math.prod(shape), store=dist.HashStore()
    )
    names = ("shard",) if len(shape) == 1 else ("replicate", "shard")
    try:
        with _late_looks_off():
            yield init_device_mesh(sim.DEVICE, tuple(shape), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


@contextmanager
def _late_looks_off() -> Iterator[None]:
    """Let nobody compare what ranks sent: large tensors have no values."""
    from fsdp2._core.comm.late_look import LateLook

    def look(self: LateLook) -> None:
        if self._event is not None and self._event.query():
            self._event = None

    with mock.patch.object(LateLook, "look", look):
        yield


def group_number(group: dist.ProcessGroup) -> int:
    """Return what a trace calls a process group."""
    loaded = simulator()
    loaded.begin_trace(False)
    dist.all_reduce(torch.zeros(1, device=sim.DEVICE), group=group)
    (step,) = [step for step in loaded.end_trace() if step[0] == COLLECTIVE]
    number: int = step[8]
    return number


def trace(step: Callable[[], None]) -> list[tuple[Any, ...]]:
    """Return what a step gives the device to do."""
    loaded = simulator()
    loaded.begin_trace(True)
    try:
        step()
    finally:
        steps: list[tuple[Any, ...]] = loaded.end_trace()
    return steps


def steady(
    model: nn.Module, step: Callable[[], None], warmup: int
) -> tuple[list[tuple[Any, ...]], int]:
    """Return the trace of a step after so many others, and its peak: bytes above its start."""
    for _ in range(warmup):
        step()
    model.zero_grad(set_to_none=True)
    loaded = simulator()
    before = loaded.counts()[2]
    loaded.reset_peak()
    steps = trace(step)
    return steps, loaded.counts()[3] - before


@dataclass(frozen=True)
class Played:
    """A step on the clock, in seconds."""

    seconds: float
    ran: list[Ran]
    waits: list[HostWait]
    host: float
    launches: int
    numbers: dict[int, int]  # of what took time, by its place in the trace

    def at(self, place: int) -> Ran:
        """Return what a place in the trace became."""
        return next(ran for ran in self.ran if ran.number == self.numbers[place])


def play(
    steps: Sequence[tuple[Any, ...]],
    costs: Costs,
    strides: dict[int, int],
    host: bool = True,
    delays: Callable[[int], float] = lambda place: 0.0,
) -> Played:
    """Play a trace.

    Args:
        strides: of process groups, how far apart neighbours are; those not named: 1.
        host: False lets the host issue everything at once, and cost nothing.
        delays: seconds more that the kernel, copy, collective or label at a place in the trace
            takes; a label's are the host's.
    """
    loaded = simulator()
    clock = DeviceClock(lambda stream: stream < 0 or loaded.priority(stream) < 0, costs.straggler)
    known: set[int] = set()
    calls = launches = 0
    numbers: dict[int, int] = {}

    def spend(seconds: float) -> None:
        if host:
            clock.work(seconds)

    for number, step in enumerate(steps):
        kind, name, stream, mark, read, written, operations, dtype, group, size, aligned, at = step
        spend((at - calls) * figures.CALL)
        calls = at
        if kind == LABEL:
            clock.label = name
            clock.work(delays(number))
        elif kind == KERNEL:
            launches += 1
            spend(figures.LAUNCH)
            multiplied = torch.bfloat16 if dtype == BF16 else torch.float32
            took = costs.kernel(read + written, operations, multiplied) + delays(number)
            numbers[number] = clock.kernel(stream, took, name, read + written)
        elif kind == COPY:
            launches += 1
            spend(figures.LAUNCH)
            took = costs.copy(written) + delays(number)
            numbers[number] = clock.kernel(stream, took, name, written)
        elif kind == COLLECTIVE:
            launches += 1
            spend(figures.LAUNCH_COLLECTIVE)
            stride = strides.get(group, 1)
            took = costs.collective(name, written, size, stride, aligned, read) + delays(number)
            link = bandwidth_of(costs.machine, size, stride)
            numbers[number] = clock.collective(stream, group, link, took, name, written)
        elif kind == RECORD:
            spend(figures.EVENT)
            clock.record(stream, mark)
            known.add(mark)
        elif kind == BLOCK:
            spend(figures.EVENT)
            if mark in known:
                clock.hold_back(stream, mark)
        elif mark >= 0:
            if mark in known:
                clock.wait_for(mark)
        else:
            clock.wait_for_stream(None if stream < 0 else stream)
    seconds = clock.finish()
    return Played(seconds, clock.ran, clock.waits, clock.host, launches, numbers)

"""What the clock of plans and of the simulated device assumes, beside what one GPU does.

    python -m benchmarks.costs                   skipped with 77 where there is no GPU
    python -m benchmarks.costs --hardware h100-nvlink-ib

Each figure of `fsdp2._plan.costs` that one GPU can show is measured: kernels by a replayed graph or
between events, shares as parts of the data sheet's peak in `--hardware`, host times as a loop's
seconds over its calls, without waiting. Collectives are those of one rank over NCCL: their host
time is that of any number of ranks. Figures are medians of `--rounds` measurements.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks._report import Figure, Measured, make_parser, run
from fsdp2._plan import costs
from fsdp2._plan.hardware import HARDWARE

SKIPPED = 77
PRODUCTS = {  # rows, of and to how many columns: those of a block of an 8 B model, 4096 tokens
    "q, o": (4096, 4096, 4096),
    "k, v": (4096, 4096, 1024),
    "w1, w3": (4096, 4096, 14336),
    "w2": (4096, 14336, 4096),
    "head": (4096, 4096, 128256),
}
LARGE = 1 << 30
HOST_CALLS = 1000


def measure(arguments: argparse.Namespace) -> Measured:
    peak = HARDWARE[arguments.hardware]
    rounds = arguments.rounds
    figures: list[Figure] = []

    def add(name: str, quantity: str, measured: float, assumed: float | None = None) -> None:
        figures.append(Figure(name, "measured", quantity, measured))
        if assumed is not None:
            figures.append(Figure(name, "costs.py", quantity, assumed))

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        store = dist.FileStore(str(Path(folder) / "store"), 1)
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        try:
            add("shortest kernel", "us", shortest_kernel(rounds) * 1e6, costs.SHORTEST_KERNEL * 1e6)
            for name, (rows, inner, columns) in PRODUCTS.items():
                share = product(rows, inner, columns, rounds) / peak.flops[torch.bfloat16]
                add(f"product {name}", "share of peak", share, costs.SHARE_OF_PRODUCTS)
            bandwidth = 2 * LARGE / copy_on_device(rounds)
            add(
                "copy on the device",
                "share of peak",
                bandwidth / peak.memory_bandwidth,
                costs.SHARE_OF_MEMORY,
            )
            for name, seconds in between_host(rounds).items():
                add(name, "GB/s", LARGE / seconds / 1e9, costs.HOST_LINK / 1e9)
            assumed = {
                "launch": costs.LAUNCH,
                "launch, recorded for backward": costs.LAUNCH,
                "collective": costs.LAUNCH_COLLECTIVE,
                "event recorded and waited for, each": costs.EVENT,
                "call of Python": costs.CALL,
            }
            for name, seconds in host_times(rounds).items():
                add(f"host: {name}", "us", seconds * 1e6, assumed[name] * 1e6)
        finally:
            dist.destroy_process_group()
    settings = {"rounds": rounds, "hardware": arguments.hardware}
    return Measured(figures, settings, [f"on one {torch.cuda.get_device_name()}"])


def device_time(work: Callable[[], object], rounds: int) -> float:
    """Return seconds of ``work`` between two events, the median."""
    work()
    found = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)


def shortest_kernel(rounds: int) -> float:
    """Return what each of many dependent kernels of one element takes, replayed as a graph."""
    value = torch.zeros(1, dtype=torch.float32, device="cuda")
    value.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(HOST_CALLS):
            value.add_(1)
    return device_time(graph.replay, rounds) / HOST_CALLS


def product(rows: int, inner: int, columns: int, rounds: int) -> float:
    """Return operations a second of one product in bf16, of random numbers, ten in a row."""
    left, right = (
        torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        for shape in ((rows, inner), (inner, columns))
    )

    def work() -> None:
        for _ in range(10):
            torch.mm(left, right)

    return 10 * 2.0 * rows * inner * columns / device_time(work, rounds)


def copy_on_device(rounds: int) -> float:
    source, target = (torch.ones(LARGE, dtype=torch.uint8, device="cuda") for _ in range(2))
    return device_time(lambda: target.copy_(source), rounds)


def between_host(rounds: int) -> dict[str, float]:
    on_device = torch.ones(LARGE, dtype=torch.uint8, device="cuda")
    pinned = torch.ones(LARGE, dtype=torch.uint8, device="cpu", pin_memory=True)
    return {
        "to the device": device_time(lambda: on_device.copy_(pinned, non_blocking=True), rounds),
        "from the device": device_time(lambda: pinned.copy_(on_device, non_blocking=True), rounds),
    }


def host_times(rounds: int) -> dict[str, float]:
    """Return the host's seconds of one call of each kind."""
    value = torch.zeros(16, 16, dtype=torch.float32, device="cuda")
    weight = torch.zeros(16, 16, dtype=torch.float32, device="cuda", requires_grad=True)
    streams = [torch.cuda.Stream() for _ in range(2)]
    events = [torch.cuda.Event() for _ in range(2)]

    def recorded() -> None:
        with torch.enable_grad():
            torch.mul(value, weight)

    def event() -> None:  # two calls: they count as one of each
        events[0].record(streams[0])
        streams[1].wait_event(events[0])

    def call(argument: int) -> int:
        return argument

    kinds: dict[str, Callable[[], object]] = {
        "launch": lambda: value.add_(1),
        "launch, recorded for backward": recorded,
        "collective": lambda: dist.all_reduce(value, async_op=True),
        "event recorded and waited for, each": event,
        "call of Python": lambda: call(1),
    }
    found: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        for name, work in kinds.items():
            count = HOST_CALLS // 10  # what is queued stays short: a full queue makes hosts wait
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(count):
                work()
            found.setdefault(name, []).append((time.perf_counter() - start) / count)
    medians = {name: statistics.median(times[1:]) for name, times in found.items()}
    empty = medians["call of Python"] / 2  # of the two calls that a loop makes for each
    for name in ("launch", "collective"):
        medians[name] -= empty
    medians["event recorded and waited for, each"] /= 2
    medians["call of Python"] = empty
    return medians


if __name__ == "__main__":
    if not torch.cuda.is_available():
        print("skipped: no GPU here")
        sys.exit(SKIPPED)
    parser = make_parser("costs", __doc__)
    parser.add_argument("--hardware", choices=list(HARDWARE), default="h100-nvlink-ib")
    parser.add_argument("--rounds", type=int, default=11)
    run("costs", __doc__, measure, parser)

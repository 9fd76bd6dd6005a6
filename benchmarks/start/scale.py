"""How the cost on the host grows with ranks, with groups, and with parameters in a group.

    python -m benchmarks.start.scale

One process plays rank 0 of 8 to 4096 over collectives that do nothing. Counted exactly, with
cProfile: calls of functions from Python, a step over the plain model's, and to shard the model (a
second one on the same mesh, so that torch's caches are warm for everybody).
That is a proxy for host time which misses what one call does inside: `host` counts that, for one
size. Also ops dispatched, and CPU milliseconds a step over the plain model's (the least of a few,
not gated). Every curve should be flat in ranks, and straight in groups and parameters.

Memory, in a process for each variant: a hundred blocks of eight parameters of width 32, on 1,024
and 4,096 ranks. `MB allocated a step` is exact, by the allocator's events in a steady step. The MB
of the process are its growth since before the model was built. They depend on the C library's heap,
and are not gated. MB are 10^6 bytes.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.kit import noop, plot
from benchmarks.kit.dispatch import OpCounter
from benchmarks.kit.models import OURS, Size, make_input, make_step
from benchmarks.kit.models import build as build_model
from benchmarks.kit.report import RESULTS, Figure, Measured, gated, make_parser, run

WARMUP = 3
TIMED = 7
RANKS = (8, 64, 512, 4096)
DEPTHS = (4, 8, 16, 32)
BLOCKS_PER_GROUP = (1, 2, 4, 8)
CALLS, SETUP, OPS, CPU = "calls a step", "calls to shard", "ops a step", "CPU ms a step"
ALLOCATED, GROWN = "MB allocated a step", "MB of the process"
MEMORY_RANKS = (1024, 4096)
MEMORY_BLOCKS = 100


@dataclass(frozen=True)
class Point:
    """One place on a curve: the curve's name, what lies on its axis, and what is run there."""

    curve: str
    x: int
    ranks: int
    depth: int
    blocks_per_group: int = 1

    @property
    def case(self) -> str:
        return f"{self.curve} = {self.x}"


@dataclass(frozen=True)
class Counted:
    """What one variant costs at one point, the plain model's part included."""

    calls: int
    setup: int
    ops: int
    cpu_ms: float


def measure(arguments: argparse.Namespace) -> Measured:
    figures = []
    for point in points():
        plain = count("plain", point)
        for library in arguments.libraries:
            is_grouped = library not in ("ddp", "fsdp1")
            if library == "plain" or (point.blocks_per_group > 1 and not is_grouped):
                continue
            found = count(library, point)
            values = {
                CALLS: found.calls - plain.calls,
                OPS: found.ops - plain.ops,
                SETUP: found.setup - plain.setup,
                CPU: found.cpu_ms - plain.cpu_ms,
            }
            for quantity, value in values.items():
                is_gated = gated(library) and quantity != CPU
                figures.append(Figure(point.case, library, quantity, value, is_gated))
    for ranks in MEMORY_RANKS:
        for library in arguments.libraries:
            if library not in ("ddp", "fsdp1", "torch tuned"):
                command = [sys.executable, "-m", "benchmarks.start.scale", "--memory-of", library]
                told = subprocess.check_output([*command, str(ranks)], text=True)
                for quantity, value in json.loads(told).items():
                    is_gated = gated(library) and quantity == ALLOCATED
                    case = f"small blocks, ranks = {ranks}"
                    figures.append(Figure(case, library, quantity, value, is_gated))
    if arguments.save:
        plot.save(RESULTS / "scale.svg", figures, CURVES, CALLS)
    return Measured(figures, {"curves": CURVES})


CURVES = {
    "ranks": RANKS,
    "groups": DEPTHS,
    "parameters in a group": tuple(9 * blocks for blocks in BLOCKS_PER_GROUP),
}


def points() -> Iterator[Point]:
    """Return the places that are measured."""
    for ranks in RANKS:
        yield Point("ranks", ranks, ranks, 4)
    for depth in DEPTHS:
        yield Point("groups", depth, 64, depth)
    for blocks in BLOCKS_PER_GROUP:
        yield Point("parameters in a group", 9 * blocks, 64, 8, blocks)


def count(library: str, point: Point) -> Counted:
    """Build a variant and run a few of its steps."""
    size = Size(point.depth)
    models: list[Any] = []
    with noop.ranks(point.ranks) as (_, mesh):

        def build() -> None:
            grouping = {"blocks_per_group": point.blocks_per_group}
            models.append(build_model(library, size, mesh, bf16=False, **grouping))

        build()  # what imports and torch's caches for a mesh cost depends on who came first
        setup = count_calls(build)
        step = make_step(models.pop(), make_input(library, size, bf16=False))
        for _ in range(WARMUP):
            step()
        calls = count_calls(step)
        with OpCounter() as counter:
            step()
        cpu_ms = min(_cpu_ms(step) for _ in range(TIMED))
    return Counted(calls, setup, counter.names.total(), cpu_ms)


class SmallBlock(nn.Sequential):
    """Eight parameters of width 32."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(32, 32) for _ in range(4)))


def memory_of(library: str, ranks: int, blocks: int = MEMORY_BLOCKS) -> dict[str, float]:
    """Run a few steps of small blocks in this process; return what they take, by quantity."""
    with noop.ranks(ranks) as (_, mesh):
        if library == OURS:
            from fsdp2 import fully_shard
        else:
            from torch.distributed.fsdp import fully_shard
        shard: Any = fully_shard if library != "plain" else lambda module, mesh: module
        warm = shard(nn.Linear(4, 4), mesh=mesh)
        warm(torch.ones(1, 4)).sum().backward()
        before = _resident_nbytes()
        model = nn.Sequential(*(SmallBlock() for _ in range(blocks)))
        for block in model:
            shard(block, mesh=mesh)
        shard(model, mesh=mesh)
        x = torch.randn(2, 32)

        def step() -> None:
            model(x).sum().backward()
            model.zero_grad()

        for _ in range(WARMUP):
            step()
        cpu_ms = min(_cpu_ms(step) for _ in range(TIMED))
        grown = _resident_nbytes() - before
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
    assert profiler.profiler is not None
    found = profiler.profiler.kineto_results
    assert found is not None
    sizes = [event.nbytes() for event in found.events() if event.name() == "[memory]"]
    allocated = sum(nbytes for nbytes in sizes if nbytes > 0)
    return {CPU: cpu_ms, ALLOCATED: allocated / 1e6, GROWN: grown / 1e6}


def _resident_nbytes() -> int:
    gc.collect()
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def count_calls(run: Callable[[], None]) -> int:
    """Return how many functions `run` calls from Python, C functions included."""
    profile = cProfile.Profile()
    profile.enable()
    run()
    profile.disable()
    entries: Sequence[Any] = profile.getstats()
    return sum(entry.callcount for entry in entries)


def _cpu_ms(step: Callable[[], None]) -> float:
    start = time.process_time()
    step()
    return (time.process_time() - start) * 1e3


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory-of"]:  # of one variant, in a process of its own
        torch.set_num_threads(1)
        print(json.dumps(memory_of(sys.argv[2], int(sys.argv[3]))))
        sys.exit()
    run("scale", __doc__, measure, make_parser("scale", __doc__))

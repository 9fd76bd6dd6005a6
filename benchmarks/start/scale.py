"""How the cost on the host grows with ranks, with groups, and with parameters in a group.

    python -m benchmarks.start.scale

One process plays rank 0 of 8 to 4096 over collectives that do nothing. Counted exactly, with
cProfile: calls of functions from Python, a step over the plain model's, and to shard the model (a
second one on the same mesh, so that torch's caches are warm for everybody).
That is a proxy for host time which misses what one call does inside: `host` counts that, for one
size. Also ops dispatched, and CPU milliseconds a step over the plain model's (the least of a few,
not gated). Every curve should be flat in ranks, and straight in groups and parameters.
"""

from __future__ import annotations

import argparse
import cProfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.kit import noop, plot
from benchmarks.kit.dispatch import OpCounter
from benchmarks.kit.models import Size, make_input, make_step
from benchmarks.kit.models import build as build_model
from benchmarks.kit.report import RESULTS, Figure, Measured, gated, make_parser, run

WARMUP = 3
TIMED = 7
RANKS = (8, 64, 512, 4096)
DEPTHS = (4, 8, 16, 32)
BLOCKS_PER_GROUP = (1, 2, 4, 8)
CALLS, SETUP, OPS, CPU = "calls a step", "calls to shard", "ops a step", "CPU ms a step"


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
    run("scale", __doc__, measure, make_parser("scale", __doc__))

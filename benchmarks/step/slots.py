"""What the same bits on any number of ranks cost: `fsdp2.reproducible` beside accumulation.

    python -m benchmarks.step.slots

Two and four gloo ranks run a global batch of eight micro-batches. `accumulation` reduces
after a rank's last one (`set_requires_gradient_sync`), `reproducible` after its last slot. Each
round runs one of each, its order rotated. Sent bytes are those of TCP (see `wire`); peak is that of
the host allocator over a step, counted by torch.profiler. Times: never gated, and only medians of
ratios within a round mean anything on a busy machine.

The same two are then compared on the clock of the simulated device, as in `graph`: four blocks of
8B shapes in bf16 with fp32 sums on 8 ranks, whose global batch has 16 slots. `--only-clock` runs
nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile

import fsdp2
from benchmarks.device.device import MACHINE
from benchmarks.device.graph import RANKS, is_output, make_8b
from benchmarks.kit import device
from benchmarks.kit.models import MEDIUM, OURS, build, make_input
from benchmarks.kit.ranks import run_on_ranks
from benchmarks.kit.report import Figure, Measured, make_parser, run
from benchmarks.kit.rounds import rotate, spread
from benchmarks.step.wire import bytes_sent
from fsdp2._tools.plan.costs import Costs, sustained

SLOTS, WARMUP = 8, 4  # the third step still gathers one block once more
SLOTS_OF_CLOCK = 16
DEFAULT, SAME = "accumulation", "reproducible"
SIZE = dataclasses.replace(MEDIUM, tokens=64)
"""Tokens of a slot: enough that compute takes longer than a sum of gradients."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one rank measured of a variant, for each round, and once."""

    walls: dict[str, list[float]]
    sent: dict[str, float]
    peaks: dict[str, float]


def measure(arguments: argparse.Namespace) -> Measured:
    figures = measure_on_clock()
    for ranks in () if arguments.only_clock else arguments.world_sizes:
        found: list[Cost] = run_on_ranks(measure_rank, ranks, arguments.rounds)
        case = f"fp32, N={ranks}, {SIZE.numel / 1e6:.1f} M parameters"
        walls = {
            name: [max(cost.walls[name][i] for cost in found) for i in range(arguments.rounds)]
            for name in (DEFAULT, SAME)
        }
        for name, wall in walls.items():
            sent = sum(cost.sent[name] for cost in found) / ranks
            before = sum(cost.sent[DEFAULT] for cost in found) / ranks
            figures += [
                Figure(case, name, "MB sent a rank", sent / 1e6),
                Figure(case, name, "sent / accumulation", sent / before),
                Figure(case, name, "peak above step start, MB", found[0].peaks[name] / 1e6),
                Figure(case, name, "step ms", *spread(wall)),
                Figure(case, name, "step / accumulation", *spread(wall, walls[DEFAULT])),
            ]
    return Measured(figures, {"rounds": arguments.rounds, "numel": SIZE.numel})


def measure_on_clock() -> list[Figure]:
    """Return a rank's step and its peak on the simulated device."""
    costs = Costs(sustained(MACHINE))
    case = f"clock, N={RANKS}, four 8B blocks, {SLOTS_OF_CLOCK // RANKS} slots a rank"
    figures, default = [], 0.0
    for name in (DEFAULT, SAME):
        with device.ranks((RANKS,)) as mesh:
            model, batch, _ = make_8b(mesh)
            loss = partial(is_output, model, batch)
            step = step_of(name, model, loss, SLOTS_OF_CLOCK, SLOTS_OF_CLOCK // RANKS)
            steps, peak = device.steady(model, step, WARMUP)
            seconds = device.play(steps, costs, {}).seconds
        default = default or seconds
        figures += [
            Figure(case, name, "step ms", seconds * 1e3),
            Figure(case, name, "step / accumulation", seconds / default),
            Figure(case, name, "peak above step start, MB", peak / 1e6),
        ]
    return figures


def measure_rank(rank: int, world_size: int, rounds: int) -> Cost:
    mesh = init_device_mesh("cpu", (world_size,))
    steps = {name: prepare(name, mesh, world_size) for name in (DEFAULT, SAME)}
    sent, peaks = {}, {}
    for name, step in steps.items():
        for _ in range(WARMUP):
            step()
        dist.barrier()
        before = bytes_sent()
        step()
        dist.barrier()
        sent[name] = float(bytes_sent() - before)
        peaks[name] = peak_of(step)

    def timed(step: Callable[[], None]) -> float:
        dist.barrier()
        started = time.perf_counter()
        step()
        return (time.perf_counter() - started) * 1e3

    walls = rotate(rounds, {name: partial(timed, step) for name, step in steps.items()})
    return Cost(walls, sent, peaks)


def prepare(name: str, mesh: DeviceMesh, world_size: int) -> Callable[[], None]:
    """Return a step over this rank's part of eight micro-batches."""
    model = build(OURS, SIZE, mesh, bf16=False)
    x = make_input(OURS, SIZE, bf16=False)
    return step_of(name, model, lambda: model(x).sum(), SLOTS, SLOTS // world_size)


def step_of(
    name: str, model: Any, loss: Callable[[], Tensor], slots: int, count: int
) -> Callable[[], None]:
    is_same = name == SAME
    if is_same:
        assert len(fsdp2.reproducible(model, slots=slots)) == count

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for index in range(count):
            if not is_same:
                model.set_requires_gradient_sync(index == count - 1)
            loss().backward()

    return step


def peak_of(step: Callable[[], None]) -> float:
    """Return the most bytes that a step holds above its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    assert seen.profiler is not None
    found = seen.profiler.kineto_results
    assert found is not None
    held = highest = 0
    for event in sorted(found.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    return float(highest)


if __name__ == "__main__":
    parser = make_parser("slots", __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--only-clock", action="store_true")
    run("slots", __doc__, measure, parser)

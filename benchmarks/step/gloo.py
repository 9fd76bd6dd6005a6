"""CPU time and step time of two gloo ranks, over the plain model.

    python -m benchmarks.step.gloo

Two processes hold every variant; each round runs one step of each on both ranks, its order rotated,
garbage collection off, and a barrier before each. CPU time is that of all threads of a rank (gloo's
included), the mean over ranks; step time is the slower rank's. `bare` is the plain model's step,
and then the collectives of the sharded one on buffers that are there already: what compute and
communication cost without any library. Figures are medians over rounds, with quartiles; ratios and
differences are taken within a round. Rounds that begin while the load average exceeds the cores are
dropped where enough others are left. Times: never gated.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.kit.models import MEDIUM, Size, prepare_step
from benchmarks.kit.ranks import run_on_ranks
from benchmarks.kit.report import Figure, Measured, make_parser, run
from benchmarks.kit.rounds import rotate, spread

RANKS = 2
WARMUP = 3
SIZE = dataclasses.replace(MEDIUM, depth=11, tokens=64)
BARE = "bare"


@dataclasses.dataclass(frozen=True)
class Times:
    """What one rank measured: a value a round for each variant, in ms, and the load it began in."""

    cpu: dict[str, list[float]]
    wall: dict[str, list[float]]
    load: list[float]


def measure(arguments: argparse.Namespace) -> Measured:
    ranks: list[Times] = run_on_ranks(time_steps, RANKS, arguments.libraries, arguments.rounds)
    kept = choose_rounds(ranks[0].load, os.cpu_count() or 1)
    figures = []
    case = f"fp32, N={RANKS}, {SIZE.numel / 1e6:.1f} M parameters"
    cpu, wall = {}, {}
    for name in ranks[0].cpu:
        cpu[name] = [sum(rank.cpu[name][i] for rank in ranks) / RANKS for i in kept]
        wall[name] = [max(rank.wall[name][i] for rank in ranks) for i in kept]
    for name in cpu:
        over = [own - bare for own, bare in zip(cpu[name], cpu[BARE], strict=True)]
        figures += [
            Figure(case, name, "CPU ms", *spread(cpu[name])),
            Figure(case, name, "CPU ms over bare", *spread(over)),
            Figure(case, name, "CPU / plain", *spread(cpu[name], cpu["plain"])),
            Figure(case, name, "step ms", *spread(wall[name])),
            Figure(case, name, "step / plain", *spread(wall[name], wall["plain"])),
        ]
    note = f"{len(kept)} of {arguments.rounds} rounds kept; load average {max(ranks[0].load):.1f}"
    return Measured(figures, {"rounds": arguments.rounds, "numel": SIZE.numel}, [note])


def choose_rounds(load: Sequence[float], cores: int) -> list[int]:
    """Return the rounds that began on an idle enough machine, or all if these are too few."""
    calm = [index for index, average in enumerate(load) if average <= cores]
    return calm if len(calm) >= 5 else list(range(len(load)))


def time_steps(rank: int, world_size: int, libraries: list[str], rounds: int) -> Times:
    """Run the rounds on one rank."""
    mesh = init_device_mesh("cpu", (world_size,))
    steps = {name: prepare_step(name, SIZE, mesh) for name in libraries}
    steps[BARE] = prepare_bare(prepare_step("plain", SIZE, mesh), SIZE, world_size)
    for step in steps.values():
        for _ in range(WARMUP):
            step()
    walls: dict[str, list[float]] = {name: [] for name in steps}
    load: list[float] = []

    def measure_one(name: str) -> float:
        if len(load) == len(walls[name]):
            load.append(os.getloadavg()[0])
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        steps[name]()
        cpu = time.process_time() - cpu
        walls[name].append((time.perf_counter() - wall) * 1e3)
        return cpu * 1e3

    cpu = rotate(rounds, {name: partial(measure_one, name) for name in steps})
    return Times(cpu, walls, load)


def prepare_bare(compute: Callable[[], None], size: Size, ranks: int) -> Callable[[], None]:
    """Return a step of compute, and then of the bare collectives of a sharded step."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    numels = [size.root_numel] + [size.block_numel] * size.depth
    rows = [-(-numel // ranks) for numel in numels]
    whole, shard = torch.ones(max(rows) * ranks), torch.ones(max(rows))

    def step() -> None:
        compute()
        for index, row in enumerate(rows):
            for _ in range(1 if index == 0 else 2):  # the root is gathered once
                gather(whole[: row * ranks], shard[:row])
            scatter(shard[:row], whole[: row * ranks], op=dist.ReduceOp.AVG)

    return step


if __name__ == "__main__":
    parser = make_parser("gloo", __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    run("gloo", __doc__, measure, parser)

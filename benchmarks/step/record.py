"""What `fsdp2.record` costs: instructions of a step, off and on, and CPU time of two gloo ranks.

    python -m benchmarks.step.record              both
    python -m benchmarks.step.record --no-wall    instructions only

Instructions come from callgrind, as in `benchmarks.step.host`: a figure is the difference between a
deep and a shallow model divided by the difference in depth, and `off again` is after a recording.
CPU time is that of all threads of a rank, recorded and not in turns, in rounds whose order rotates;
ratios are taken within a round. A case names the tokens of a rank's batch: what a recording costs
depends on units, what a step costs on tokens. Times are never gated.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from benchmarks.kit import callgrind
from benchmarks.kit import models as _models
from benchmarks.kit.fit import Cost
from benchmarks.kit.ranks import run_on_ranks
from benchmarks.kit.record_worker import MODES, make_label
from benchmarks.kit.report import REPOSITORY, Figure, Measured, make_parser, run
from benchmarks.kit.rounds import rotate, spread

TIME_LIMIT_S = 900
RANKS = 2
WARMUP = 3
STEPS = 3
"""In one measurement of CPU time."""
SIZE = replace(_models.MEDIUM, depth=8, width=512, hidden=1536)
SETTINGS = ("depths", "steps", "warmup", "world_size")


def measure(arguments: argparse.Namespace) -> Measured:
    settings: dict[str, Any] = {name: getattr(arguments, name) for name in SETTINGS}
    figures = count(settings)
    if arguments.wall:
        for tokens in arguments.tokens:
            figures += time_ranks(tokens, arguments.rounds)
        settings |= {"rounds": arguments.rounds, "tokens": arguments.tokens}
    return Measured(figures, settings)


def count(settings: dict[str, Any]) -> list[Figure]:
    """Count instructions in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {
            **os.environ,
            callgrind.SHIM_VARIABLE: str(callgrind.build_shim(folder)),
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
        }
        prefix = folder / "record"
        command = [sys.executable, "-m", "benchmarks.kit.record_worker", json.dumps(settings)]
        done = subprocess.run(
            callgrind.command_under_callgrind(command, prefix),
            capture_output=True,
            text=True,
            env=environment,
            cwd=REPOSITORY,
            timeout=TIME_LIMIT_S,
        )
        if done.returncode != 0:
            raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-12:]))
        dumps = callgrind.find_dumps(prefix)
        totals = {label: callgrind.read_total(dump) for label, dump in dumps.items()}
    depths, steps = settings["depths"], settings["steps"]
    figures = []
    for mode in MODES:
        values = [totals[make_label(mode, depth)] / steps for depth in depths]
        cost = Cost.fit(depths, values)
        figures += [
            Figure("instructions", mode, "M instr. a block", cost.per_block / 1e6, mode == "on"),
            Figure("instructions", mode, "M instr. a root", cost.root / 1e6),
        ]
    return figures


def time_ranks(tokens: int, rounds: int) -> list[Figure]:
    size = replace(SIZE, tokens=tokens)
    ranks: list[dict[str, list[float]]] = run_on_ranks(time_steps, RANKS, size, rounds)
    cpu = {
        mode: [sum(rank[mode][i] for rank in ranks) / RANKS for i in range(rounds)]
        for mode in ranks[0]
    }
    case = f"gloo, N={RANKS}, {size.numel / 1e6:.0f} M parameters, {tokens} tokens a rank"
    return [
        figure
        for mode, values in cpu.items()
        for figure in (
            Figure(case, mode, "CPU ms a step", *spread(values)),
            Figure(case, mode, "CPU / off", *spread(values, cpu["off"])),
        )
    ]


def time_steps(rank: int, world_size: int, size: _models.Size, rounds: int) -> dict[str, Any]:
    """Run the rounds on one rank: a few steps of two equal models, of which one is recorded."""
    mesh = init_device_mesh("cpu", (world_size,))
    steps: dict[str, Callable[[], None]] = {}
    models = {}
    for mode in ("off", "on"):
        models[mode] = _models.build("fsdp2", size, mesh, bf16=False)
        steps[mode] = _models.make_step(models[mode], _models.make_input("fsdp2", size, bf16=False))

    def measure_one(mode: str) -> float:
        dist.barrier()
        cpu = time.process_time()
        for _ in range(STEPS):
            steps[mode]()
        return (time.process_time() - cpu) * 1e3 / STEPS

    with tempfile.TemporaryDirectory() as folder, fsdp2.record(models["on"], folder):
        for step in steps.values():
            for _ in range(WARMUP):
                step()
        return rotate(rounds, {mode: partial(measure_one, mode) for mode in steps})


if __name__ == "__main__":
    parser = make_parser("record", __doc__)
    parser.add_argument("--depths", type=int, nargs=2, default=[4, 8], metavar="L")
    parser.add_argument("--steps", type=int, default=4, help="steps counted in a window")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--no-wall", dest="wall", action="store_false")
    run("record", __doc__, measure, parser)

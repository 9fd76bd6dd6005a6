"""Compiled whole models beside eager ones and compiled blocks, on two gloo ranks.

    python -m benchmarks.compiled.compile [--backend aot_eager]

Variants: the plain model compiled; torch's FSDP2 with compiled blocks (its hooks cannot be traced);
ours eager; ours with compiled blocks; `fsdp2.compile`, and the same with `overlap=True`. Graphs are
those that the compiler's backend made, of forwards and of backwards; collectives are those that the
process group ran in one step. `held` is what a forward leaves for backward and `peak` the most of
a step, above its start, from the allocator's own events on one rank (see `peak`). CPU and step
times are as in `gloo`: paired, medians over rounds with quartiles. Times: never gated.

    python -m benchmarks.compiled.compile --memory [--gloo]

The bytes alone, of eager and compiled steps, in both precisions and at each setting of
`set_memory`. Kernels are stubs there, which takes minutes off and no allocation: buffers and
collectives are what the emitted code asks for. One process is rank 0 of two over collectives that
are done at once, so figures repeat exactly; with `--gloo` there are two gloo ranks, whose threads
let go of buffers when they like, so figures differ by some buffers from run to run.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.kit import noop
from benchmarks.kit.models import (
    MEDIUM,
    PRECISION_NAMES,
    PRECISIONS,
    build,
    make_input,
    make_step,
)
from benchmarks.kit.ranks import run_on_ranks
from benchmarks.kit.report import Figure, Measured, run
from benchmarks.kit.rounds import rotate, spread
from benchmarks.step import peak
from benchmarks.step.gloo import choose_rounds
from tests.kit.emitted import stubbed_kernels

RANKS = 2
WARMUP = 3
SIZE = dataclasses.replace(MEDIUM, tokens=64)
VARIANTS = (
    "plain, compiled",
    "torch, compiled blocks",
    "fsdp2, eager",
    "fsdp2, compiled blocks",
    "fsdp2.compile",
    "fsdp2.compile, overlap",
)
EAGER = "fsdp2, eager"
BUDGET = 24_000_000
MEMORY: dict[str, str | int] = {
    "low": "low",
    "balanced": "balanced",
    "fast": "fast",
    f"{BUDGET / 1e6:.0f} MB": BUDGET,
}
COMPARED = (EAGER, "fsdp2.compile")


@dataclasses.dataclass(frozen=True)
class Found:
    """What one rank found of one variant: counts, and bytes above the step's start."""

    graphs: int
    collectives: int
    held_nbytes: int
    peak_nbytes: int
    compile_s: float


@dataclasses.dataclass(frozen=True)
class Setting:
    """A row of the peaks."""

    precision: str
    memory: str
    variant: str


@dataclasses.dataclass(frozen=True)
class Times:
    """A value a round for each variant, in ms, and the load that the round began in."""

    found: dict[str, Found]
    cpu: dict[str, list[float]]
    wall: dict[str, list[float]]
    load: list[float]


def measure(arguments: argparse.Namespace) -> Measured:
    return measure_memory(arguments) if arguments.memory else measure_times(arguments)


def measure_memory(arguments: argparse.Namespace) -> Measured:
    """Compare the peaks of eager and compiled steps at each memory setting."""
    figures: list[Figure] = []
    if arguments.gloo:
        found = run_on_ranks(look_at_all_on_rank, RANKS, arguments.backend)[0]
    else:
        with noop.ranks(RANKS) as (_, mesh):
            found = look_at_all(mesh, arguments.backend)
    for setting, one in found.items():
        case = f"{PRECISION_NAMES[setting.precision]}, N={RANKS}, {setting.memory}"
        eager = found[dataclasses.replace(setting, variant=EAGER)]
        figures += [
            Figure(case, setting.variant, "held MB", one.held_nbytes / 1e6),
            Figure(case, setting.variant, "peak MB", one.peak_nbytes / 1e6),
            Figure(case, setting.variant, "peak / eager", one.peak_nbytes / eager.peak_nbytes),
        ]
    settings = {"backend": arguments.backend, "numel": SIZE.numel}
    return Measured(figures, settings, suffix="-memory-gloo" if arguments.gloo else "-memory")


def look_at_all_on_rank(rank: int, world_size: int, backend: str) -> dict[Setting, Found]:
    return look_at_all(init_device_mesh("cpu", (world_size,)), backend)


def look_at_all(mesh: Any, backend: str) -> dict[Setting, Found]:
    """Find the bytes of one step on this rank, at every setting."""
    found: dict[Setting, Found] = {}
    for precision, memory, variant in itertools.product(PRECISIONS, MEMORY, COMPARED):
        bf16 = precision == "bf16"
        model = prepare(variant, mesh, backend, bf16=bf16, memory=MEMORY[memory])
        x = make_input("fsdp2", SIZE, bf16=bf16)
        with stubbed_kernels():
            step = make_step(model, x)
            for _ in range(WARMUP):
                step()
            found[Setting(precision, memory, variant)] = look(model, x)
        torch._dynamo.reset()
        del model, step
        gc.collect()
    return found


def measure_times(arguments: argparse.Namespace) -> Measured:
    ranks: list[Times] = run_on_ranks(measure_rank, RANKS, arguments.backend, arguments.rounds)
    kept = choose_rounds(ranks[0].load, os.cpu_count() or 1)
    case = f"{arguments.backend}, fp32, N={RANKS}, {SIZE.numel / 1e6:.1f} M parameters"
    cpu = {name: [sum(r.cpu[name][i] for r in ranks) / RANKS for i in kept] for name in VARIANTS}
    wall = {name: [max(r.wall[name][i] for r in ranks) for i in kept] for name in VARIANTS}
    figures = []
    for name in VARIANTS:
        found = ranks[0].found[name]
        figures += [
            Figure(case, name, "graphs", found.graphs),
            Figure(case, name, "collectives", found.collectives),
            Figure(case, name, "held MB", found.held_nbytes / 1e6),
            Figure(case, name, "peak MB", found.peak_nbytes / 1e6),
            Figure(case, name, "first step s", found.compile_s),
            Figure(case, name, "CPU ms", *spread(cpu[name])),
            Figure(case, name, "CPU / eager", *spread(cpu[name], cpu[EAGER])),
            Figure(case, name, "step ms", *spread(wall[name])),
        ]
    note = f"{len(kept)} of {arguments.rounds} rounds kept; load average {max(ranks[0].load):.1f}"
    suffix = "" if arguments.backend == "inductor" else f"-{arguments.backend}"
    settings = {"rounds": arguments.rounds, "backend": arguments.backend, "numel": SIZE.numel}
    return Measured(figures, settings, [note], suffix=suffix)


def prepare(
    variant: str,
    mesh: Any,
    backend: Any,
    *,
    bf16: bool = False,
    memory: str | int | None = None,
) -> nn.Module:
    """Return the module that a variant's step calls."""
    library = variant.split(",")[0].split(".")[0]
    model: Any = build(library, SIZE, mesh, bf16=bf16)
    if memory is not None:
        model.set_memory(memory)
    if variant.endswith("compiled blocks"):
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
    elif variant.startswith("fsdp2.compile"):
        import fsdp2

        overlap = variant.endswith("overlap")
        return fsdp2.compile(model, backend=backend, fullgraph=True, overlap=overlap)
    elif library == "plain":
        model.compile(backend=backend, fullgraph=True)
    return model  # type: ignore[no-any-return]  # a Module


def measure_rank(rank: int, world_size: int, backend: str, rounds: int) -> Times:
    """Prepare every variant on one rank, look at one step of each, and run the rounds."""
    mesh = init_device_mesh("cpu", (world_size,))
    x = make_input("fsdp2", SIZE, bf16=False)
    found: dict[str, Found] = {}
    steps: dict[str, Callable[[], None]] = {}
    for variant in VARIANTS:
        model = prepare(variant, mesh, backend)
        before, start = count_graphs(), time.perf_counter()
        steps[variant] = step = make_step(model, x)
        step()
        seconds, graphs = time.perf_counter() - start, count_graphs() - before
        for _ in range(WARMUP - 1):
            step()
        found[variant] = dataclasses.replace(look(model, x), graphs=graphs, compile_s=seconds)
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
    return Times(found, cpu, walls, load)


def count_graphs() -> int:
    """Return how many graphs of forwards and backwards torch's compiler has made."""
    counters = torch._dynamo.utils.counters["aot_autograd"]
    return 2 * int(counters["ok"])


def look(model: nn.Module, x: torch.Tensor) -> Found:
    """Count the collectives and the bytes of one step."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(peak.WARMUP + 1):
            model.zero_grad(set_to_none=True)
            gc.collect()
            with record_function(peak.STARTED):
                pass
            loss = model(x).sum()
            with record_function(peak.FORWARD_DONE):
                pass
            loss.backward()
            del loss
            with record_function(peak.DONE):
                pass
    bytes_found = peak.read(profiler)
    names = [event.name for event in profiler.events() or ()]
    ran = sum(name.startswith("c10d::") and "barrier" not in name for name in names)
    return Found(0, ran // (peak.WARMUP + 1), bytes_found.after_forward, bytes_found.highest, 0.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled.compile", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--backend", default="inductor", choices=("inductor", "aot_eager"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--gloo", action="store_true", help="with --memory: on two gloo ranks")
    parser.add_argument("--memory", action="store_true", help="peaks at each memory setting only")
    run("compile", __doc__, measure, parser)

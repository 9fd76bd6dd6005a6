"""Time, host time, kernels by kind and peak memory of a step on one GPU, by emulated collectives.

    python -m benchmarks.gpu                     skipped with 77 where there is no GPU
    python -m benchmarks.gpu --sleep-us 200      with time on the link

One process plays rank 0 of 8 and of 64; both sides get the collectives of `_emulated`. bf16
parameters with fp32 reduction. `step ms` is between CUDA events, `host ms` until everything is
enqueued; variants take turns, their order rotated, and figures are medians with quartiles. Kernel
times are sums of one profiled step: kernels of one kind may overlap others. `peak MB` (10^6 bytes)
is above what is allocated when the step starts. `plain` is the unsharded model in bf16: with
max(compute, link) the limit of the step, and the limit of the host time.
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import _noop
from benchmarks._emulated import GATHER_KERNEL, SCATTER_KERNEL, EmulatedGroup
from benchmarks._models import Size, applies, prepare_step
from benchmarks._report import Figure, Measured, make_parser, run
from benchmarks._rounds import rotate, spread

SKIPPED = 77
WARMUP = 5
SIZES = {
    "32 small blocks": Size(depth=32, width=256, hidden=768, vocabulary=4096, tokens=64),
    "0.9 B parameters": Size(depth=16, width=2048, hidden=5504, vocabulary=32000, tokens=2048),
    "4 blocks of an 8 B model": Size(
        depth=4, width=4096, hidden=14336, vocabulary=32000, tokens=2048
    ),
}
# The first that matches a kernel's name is its kind.
KINDS = {
    "emulated collectives": f"{GATHER_KERNEL}|{SCATTER_KERNEL}",
    "matrix products": r"gemm|cutlass|nvjet|cublas|splitK",
    "copies": r"[Mm]emcpy|copy|[Cc]at|split_with_sizes|chunk|foreach_copy",
    "fills": r"[Mm]emset|[Ff]ill",
    "other": "",
}


def measure(arguments: argparse.Namespace) -> Measured:
    # One cycle of the sleep kernel is one of the clock's, about 1.5 to 2 GHz.
    cycles = int(arguments.sleep_us * torch.cuda.get_device_properties(0).clock_rate / 1e3)
    figures = []
    libraries = [name for name in arguments.libraries if applies(name, "bf16")]
    for title in arguments.models:
        for ranks in arguments.world_sizes:
            make = partial(EmulatedGroup, sleep_cycles=cycles)
            with _noop.ranks(ranks, make, device="cuda") as (_, mesh):
                steps = {
                    name: prepare_step(name, SIZES[title], mesh, bf16=True) for name in libraries
                }
                figures += measure_steps(f"{title}, N={ranks}", steps, arguments.rounds)
                steps.clear()
            gc.collect()
            torch.cuda.empty_cache()
    settings = {"rounds": arguments.rounds, "sleep_us": arguments.sleep_us}
    return Measured(figures, settings, [f"on one {torch.cuda.get_device_name()}"])


def measure_steps(case: str, steps: dict[str, Callable[[], None]], rounds: int) -> list[Figure]:
    """Return the figures of variants that lie in memory together."""
    for step in steps.values():
        for _ in range(WARMUP):
            step()
    host: dict[str, list[float]] = {name: [] for name in steps}

    def time_step(name: str) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        began = time.perf_counter()
        start.record()
        steps[name]()
        end.record()
        host[name].append((time.perf_counter() - began) * 1e3)
        torch.cuda.synchronize()
        return start.elapsed_time(end)

    device = rotate(rounds, {name: partial(time_step, name) for name in steps})
    figures = []
    for name, step in steps.items():
        figures += [
            Figure(case, name, "step ms", *spread(device[name])),
            Figure(case, name, "host ms", *spread(host[name])),
        ]
        if "torch" in steps:
            figures.append(
                Figure(case, name, "step / torch", *spread(device[name], device["torch"]))
            )
        kernels = time_kernels(step)
        figures += [Figure(case, name, f"{kind}, ms", kernels[kind]) for kind in KINDS]
        figures.append(Figure(case, name, "peak MB", find_peak(step) / 1e6))
    return figures


def time_kernels(step: Callable[[], None]) -> Counter[str]:
    """Return the time on the device of one step's kernels, by kind, in ms."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in profiler.events() or []:
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kind = next(kind for kind, names in KINDS.items() if re.search(names, event.name))
            times[kind] += event.self_device_time_total / 1e3
    return times


def find_peak(step: Callable[[], None]) -> int:
    """Return the most bytes allocated in one step above its start."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    if not torch.cuda.is_available():
        print("skipped: no GPU here")
        sys.exit(SKIPPED)
    parser = make_parser("gpu", __doc__)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[8, 64], metavar="N")
    parser.add_argument("--models", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--sleep-us", type=float, default=0, help="time on the link, a collective")
    parser.add_argument("--rounds", type=int, default=15)
    run("gpu", __doc__, measure, parser)

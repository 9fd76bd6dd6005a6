"""Does it fit? Verdicts of plans beside one GPU that runs the same steps.

    python -m benchmarks.device.verdicts --plans PATH   the plans, on any machine
    python -m benchmarks.device.verdicts --simulated    beside the simulated device, which any
    machine has python -m benchmarks.device.verdicts                skipped with 77 where there is
    no GPU

One process is rank 0 of many, with the collectives of `kit/emulated`: what it allocates is what a
rank does, but for NCCL's own buffers. Weights are what memory had, and nobody reads the loss. Two
steps of each case are run, with AdamW in fp32 and bf16 compute. `peak` is what the allocator gave
out at most, `reserved` what it took from the device; a case that runs out of memory has none. With
more memory than `h100-nvlink-ib` has, the allocator is held to as much.

The simulated device counts what is allocated on it, and runs the engine's own streams and events.
It has no kernels of its own, so plans beside it count norms as a host makes them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import sys
import time
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.utils.checkpoint import checkpoint

import fsdp2
from benchmarks.kit import device as _device
from benchmarks.kit import noop
from benchmarks.kit.emulated import EmulatedGroup
from benchmarks.kit.report import Figure, Measured, make_parser, run
from fsdp2._tools.plan import step as _plan_step
from fsdp2._tools.plan.hardware import HARDWARE
from fsdp2._tools.plan.shapes import SHAPES, Decoder, Layer

SKIPPED = 77
MACHINE = "h100-nvlink-ib"
GIB = 1 << 30
STEPS = 2
POLICY = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Case:
    """A known shape, ranks that share it, and what a rank is given."""

    shape: str
    ranks: int
    rows: int
    length: int = 4096
    is_again: bool = False  # activation checkpointing
    memory: str = "balanced"

    def __str__(self) -> str:
        again = ", checkpointing" if self.is_again else ""
        batch = f"{self.rows} x {self.length}"
        return f"{self.shape}, {self.ranks} ranks, {batch}{again}, {self.memory}"


CASES = (
    Case("llama3-8b", 8, 1),
    Case("llama3-8b", 8, 2),
    Case("llama3-8b", 8, 3),
    Case("llama3-8b", 32, 2, memory="fast"),
    Case("llama3-8b", 8, 8, is_again=True),
    Case("llama3-8b", 8, 11, is_again=True),
    Case("qwen3-8b", 16, 2),
    Case("llama3-1b", 8, 6),
    Case("llama3-1b", 8, 7),
    Case("llama3-70b", 32, 4, is_again=True),
    Case("llama3-70b", 32, 1),
    Case("llama3-70b", 16, 1, is_again=True, memory="low"),
)


def planned(case: Case) -> Any:
    """Return the step that is planned."""
    with torch.device("meta"):
        model = Decoder(SHAPES[case.shape])
    return fsdp2.plan(
        model,
        mesh=case.ranks,
        policy={Layer},
        batch=torch.zeros(case.rows, case.length, dtype=torch.long, device="meta"),
        optimizer=torch.optim.AdamW,
        memory=case.memory,
        hardware=MACHINE,
        mp_policy=POLICY,
        activation_checkpointing=case.is_again,
    )


def measured(case: Case) -> dict[str, float]:
    """Run the step on this machine's GPU; return its figures, or none if memory ran out."""
    torch.cuda.reset_peak_memory_stats()
    with noop.ranks(case.ranks, EmulatedGroup, device="cuda") as (_, mesh):
        try:
            return _run(case, mesh)
        except torch.OutOfMemoryError:
            return {}
        finally:
            gc.collect()
            torch.cuda.empty_cache()


def simulated(case: Case) -> dict[str, float]:
    """Run the step on the simulated device; return the most bytes that were allocated."""
    loaded = _device.simulator()
    with _device.ranks((case.ranks,)) as mesh:
        model, optimizer, tokens = _built(case, mesh, "sim")
        for _ in range(STEPS):
            loaded.reset_peak()
            model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        found: int = loaded.counts()[3]
        del model, optimizer
    gc.collect()  # `run` has switched it off, and the next case needs the memory
    return {"peak GiB": found / GIB}


def _built(case: Case, mesh: Any, device: str) -> tuple[Any, torch.optim.Optimizer, torch.Tensor]:
    with torch.device("meta"):
        model = Decoder(SHAPES[case.shape])
    fsdp2.wrap.shard_model(model, {Layer}, mesh=mesh, mp_policy=POLICY)
    model.to_empty(device=device)
    model.set_memory(case.memory)  # type: ignore[operator]  # sharded now
    if case.is_again:
        for layer in model.layers:
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    optimizer = fsdp2.optim.local(torch.optim.AdamW, model.parameters(), foreach=True)
    return model, optimizer, torch.zeros(case.rows, case.length, dtype=torch.long, device=device)


def _run(case: Case, mesh: Any) -> dict[str, float]:
    model, optimizer, tokens = _built(case, mesh, "cuda")
    took = 0.0
    for _ in range(STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        took = time.perf_counter() - began
    return {
        "peak GiB": torch.cuda.max_memory_allocated() / GIB,
        "reserved GiB": torch.cuda.max_memory_reserved() / GIB,
        "step s": took,
    }


def measure(arguments: argparse.Namespace) -> Measured:
    figures: list[Figure] = []
    capacity = HARDWARE[MACHINE].memory_nbytes or 0
    notes = [f"capacity {capacity / GIB:.1f} GiB"]
    if arguments.simulated:
        _device.simulator()  # before autograd asks how many devices there are
    elif not arguments.plans:
        free, total = torch.cuda.mem_get_info()
        limit = min(free, capacity)
        torch.cuda.set_per_process_memory_fraction(limit / total)
        notes.append(
            f"{torch.cuda.get_device_name()}: {total / GIB:.2f} GiB, of which {free / GIB:.2f} "
            f"were free with CUDA's own loaded; held to {limit / GIB:.2f}"
        )
    for case in CASES[: arguments.cases]:
        if not arguments.device:
            host = mock.patch.object(_plan_step, "kernels_of_a_device", contextlib.nullcontext)
            with host if arguments.simulated else contextlib.nullcontext():
                plan = planned(case)
            step = plan.step
            figures += [
                Figure(str(case), "plan", "peak GiB", step.highest_nbytes / GIB),
                Figure(str(case), "plan", "step s", step.seconds),
                Figure(str(case), "plan", "fits", float(step.highest_nbytes <= capacity)),
            ]
        if arguments.simulated:
            found = simulated(case)
            figures.append(Figure(str(case), "simulated", "peak GiB", found["peak GiB"]))
            fits = found["peak GiB"] * GIB <= capacity
            figures.append(Figure(str(case), "simulated", "fits", float(fits)))
        elif not arguments.plans:
            found = measured(case)
            figures += [Figure(str(case), "device", name, value) for name, value in found.items()]
            figures.append(Figure(str(case), "device", "fits", float(bool(found))))
        for figure in figures:
            if figure.case == str(case):
                print(f"{case}: {figure.variant} {figure.quantity} {figure.value:.3f}", flush=True)
    return Measured(figures, {}, notes)


if __name__ == "__main__":
    parser = make_parser("verdicts", __doc__)
    parser.add_argument("--plans", action="store_true", help="only the plans")
    parser.add_argument("--simulated", action="store_true", help="beside the simulated device")
    parser.add_argument("--device", action="store_true", help="only what a GPU does")
    parser.add_argument("--cases", type=int, default=len(CASES), help="so many, from the first on")
    if not {"--plans", "--simulated"} & {*sys.argv} and not torch.cuda.is_available():
        print("skipped: no GPU here")
        sys.exit(SKIPPED)
    run("verdicts", __doc__, measure, parser)

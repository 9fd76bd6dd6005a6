"""Time and peak memory of saving and loading state, full and sharded, at several byte caps.

    python -m benchmarks.state.state

Gloo ranks hold the model of `gloo` (11.5 M parameters in fp32) and AdamW after one step:
parameters and two moments, 138 MB in all. `torch` is its FSDP2 with the helpers of
torch.distributed.checkpoint (`get_state_dict` and the like, with `full_state_dict`, `cpu_offload`,
`broadcast_from_rank0`), `fsdp2` is `fsdp2.checkpoint` with a cap. `full save` collects the state on
rank 0 and writes it with torch.save; `full load` reads it there and gives it to all, into a new
optimizer; `sharded` ones go through torch.distributed.checkpoint in both. `sharded load, no sums`
is ours with `verify=False`: what it takes less is what checking checksums costs. Files are in a
temporary folder.

Peak is what the CPU allocator's own events (torch.profiler) add up to above the start, plus the
shards that are there at the start; MB are 10^6 bytes. `others` is the worst rank but rank 0,
`limit` the shards after the operation plus the cap: more than 1.05 of it in a full save or load of
ours ends the command with 1. Times are medians of the slowest rank, without the profiler, and never
gated.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.kit.models import Size, build, make_input, make_step
from benchmarks.kit.ranks import run_on_ranks
from benchmarks.kit.report import Figure, Measured, make_parser, run
from benchmarks.step.gloo import SIZE

MB = 10**6
CAPS = (1 * MB, 8 * MB, 64 * MB)
OPERATIONS = ("full save", "full load", "sharded save", "sharded load")
UNVERIFIED = "sharded load, no sums"
TOLERANCE = 1.05


@dataclass(frozen=True)
class Cost:
    """What one operation took on one rank: seconds, and bytes."""

    seconds: list[float]
    peak: int
    shards: int


def measure(arguments: argparse.Namespace) -> Measured:
    figures: list[Figure] = []
    too_high: list[str] = []
    variants = [
        (library, cap)
        for library in arguments.libraries
        if library in ("torch", "fsdp2")
        for cap in (CAPS if library == "fsdp2" else (0,))
    ]
    for library, cap in variants:
        with tempfile.TemporaryDirectory() as folder:
            ranks: list[dict[str, Cost]] = run_on_ranks(
                measure_rank, arguments.ranks, SIZE, library, cap, arguments.rounds, folder
            )
        for operation in ranks[0]:
            is_full = operation.startswith("full")
            if cap > CAPS[0] and not is_full:
                continue  # no cap is in it
            costs = [rank[operation] for rank in ranks]
            variant = f"{library}, cap {cap // MB} MB" if cap and is_full else library
            slowest = [max(times) for times in zip(*(c.seconds for c in costs), strict=True)]
            others = max(cost.peak for cost in costs[1:])
            limit = max(cost.shards for cost in costs[1:]) + cap
            case = f"{operation}, N={arguments.ranks}"
            figures += [
                Figure(case, variant, "seconds", statistics.median(slowest)),
                Figure(case, variant, "peak of rank 0, MB", costs[0].peak / MB),
                Figure(case, variant, "peak of others, MB", others / MB),
            ]
            if cap and is_full:
                figures.append(Figure(case, variant, "others / limit", others / limit))
                if others > TOLERANCE * limit:
                    too_high.append(f"{case}, {variant}: {others / limit:.2f} of the limit")
    settings = {"numel": SIZE.numel, "ranks": arguments.ranks, "rounds": arguments.rounds}
    return Measured(figures, settings, too_high, failed=bool(too_high))


def measure_rank(
    rank: int, world_size: int, size: Size, library: str, cap: int, rounds: int, folder: str
) -> dict[str, Cost]:
    """Run every operation of a variant on one rank."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = build(library, size, mesh, bf16=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    make_step(model, make_input(library, size, bf16=False))()
    optimizer.step()
    optimizer.zero_grad()
    found: dict[str, Cost] = {}
    for operation in (*OPERATIONS, UNVERIFIED) if library == "fsdp2" else OPERATIONS:
        seconds: list[float] = []
        for number in range(rounds + 1):
            prepared = prepare(library, operation, model, optimizer, cap, Path(folder), rank)
            before = shard_nbytes(model, prepared.optimizer)
            dist.barrier()
            if number < rounds:
                start = time.perf_counter()
                prepared.run()
                dist.barrier()
                seconds.append(time.perf_counter() - start)
            else:
                peak = before + peak_of(prepared.run)
        found[operation] = Cost(seconds, peak, shard_nbytes(model, prepared.optimizer))
    return found


@dataclass(frozen=True)
class Prepared:
    """An operation, and the optimizer that it works on."""

    run: Callable[[], Any]
    optimizer: torch.optim.Optimizer


def prepare(
    library: str,
    operation: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    cap: int,
    folder: Path,
    rank: int,
) -> Prepared:
    """Return the operation; a load gets an optimizer without state."""
    if "load" in operation:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    make = _ours if library == "fsdp2" else _torchs
    return Prepared(make(operation, model, optimizer, cap, folder, rank), optimizer)


def _ours(
    operation: str, model: nn.Module, optimizer: Any, cap: int, folder: Path, rank: int
) -> Callable[[], Any]:
    from fsdp2 import checkpoint

    def full_save() -> None:
        state = checkpoint.full_state(model, optimizer, max_bytes=cap)
        if rank == 0:
            torch.save(state, folder / "full.pt")

    def full_load() -> None:
        state = torch.load(folder / "full.pt", weights_only=False) if rank == 0 else None
        checkpoint.load_full_state(model, state, optimizer, max_bytes=cap)

    return {
        "full save": full_save,
        "full load": full_load,
        "sharded save": lambda: checkpoint.save(folder / "sharded", model, optimizer),
        "sharded load": lambda: checkpoint.load(folder / "sharded", model, optimizer),
        UNVERIFIED: lambda: checkpoint.load(folder / "sharded", model, optimizer, verify=False),
    }[operation]


def _torchs(
    operation: str, model: nn.Module, optimizer: Any, cap: int, folder: Path, rank: int
) -> Callable[[], Any]:
    def full_save() -> None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_state_dict(model, optimizer, options=options)
        if rank == 0:
            torch.save(state, folder / "full.pt")

    def full_load() -> None:
        empty: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        state = torch.load(folder / "full.pt", weights_only=False) if rank == 0 else empty
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        # in two calls: one takes an empty model state for "the optimizer only"
        set_model_state_dict(model, state[0], options=options)
        set_optimizer_state_dict(model, optimizer, state[1], options=options)

    def sharded_save() -> None:
        state = get_state_dict(model, optimizer)
        dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=folder / "sharded")

    def sharded_load() -> None:
        model_state, optim_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optim_state}
        dcp.load(state, checkpoint_id=folder / "sharded")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    return {
        "full save": full_save,
        "full load": full_load,
        "sharded save": sharded_save,
        "sharded load": sharded_load,
    }[operation]


def shard_nbytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of a rank's parts of parameters and moments."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    total = 0
    for tensor in (*model.parameters(), *values):
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        total += local.nbytes
    return total


def peak_of(operation: Callable[[], Any]) -> int:
    """Return the most bytes that the CPU allocator gave out above the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        operation()
    live = highest = 0
    assert profiler.profiler is not None
    found = profiler.profiler.kineto_results
    assert found is not None
    for event in sorted(found.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            live += event.nbytes()
            highest = max(highest, live)
    return highest


if __name__ == "__main__":
    parser = make_parser("state", __doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    run("state", __doc__, measure, parser)

"""What each mode of sharding holds and sends in an optimizer step of four micro-batches.

    python -m benchmarks.step.sharding

The loop is the same for all: sync is off for all micro-batches but the last (`no_sync`), then AdamW
steps. Beside ours are DDP with torch's `ZeroRedundancyOptimizer`, and torch's own FSDP2 with
`reshard_after_forward=False`.

*Memory* is all that the allocator gave out on rank 0 of 8, over collectives that do nothing, from
the model's first tensor on, as torch.profiler reports it: the most in the last step, and what is
held behind it, when gradients are cleared. *Collectives* are what the process group was asked for
in the last step; of ours, gathers and reductions of units, each of which a backend may cut.
*Bytes* are what the kernel counts as sent
on the sockets of a rank (see `wire`), a mean over four gloo ranks; `2 x 2` is two nodes of two.

Legend: N ranks (S of them in a node, R nodes), m micro-batches, P numel of the model, P_k that of
the root, B that of its largest half, b_p and b_r bytes an element of the compute parameter and of
the reduced gradient, f(n) = (n - 1) / n, A the activations of the plain model.

Formulas of memory. Held: 16 P/N (parameters, two states, gradient shards; fp32). The most: that,
and A, and, of *parameters*: b_r P + 2 B b_p + 2 B b_r (gradients that wait, one unit ahead, two
reductions); of *gradients*: b_p P + B b_p + 2 B b_r + 4 P/N (whole parameters, a unit's gradient,
and gradient shards beside the sum of earlier ones, which a device gives back); of *optimizer*:
b_p P + b_r P + 2 B b_r. Formulas of bytes: of *parameters*
f(N) (m (2P - P_k) b_p + P b_r), of *gradients* f(N) (P b_p + m P b_r), of *optimizer*
f(N) (P b_p + P b_r), of torch's f(N) (m P b_p + P b_r), of DDP 2 f(N) P b_r + P b_r, of HSDP
f(S) (m (2P - P_k) b_p + P b_r) + 2 f(R) P b_r / S, of states over all ranks
f(N) P b_p + f(S) ((m (2P - P_k) - P) b_p + m P b_r) + f(R) P b_r / S, of an int
f(N) P b_p + f(S) (2m - 1) P b_p + f(N) P b_r.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.kit import noop
from benchmarks.kit.models import MEDIUM, PRECISION_NAMES, PRECISIONS, Stack, build, make_input
from benchmarks.kit.ranks import run_on_ranks
from benchmarks.kit.report import Figure, Measured, make_parser, run
from benchmarks.step.wire import bytes_sent
from fsdp2._core.base import events

MICRO_BATCHES = 4
WARMUP, STEPS = 3, 2
RANKS, NODES, NODE = 4, 2, 2
STARTED, DONE = "step started", "step done"

ALL = {
    "parameters": {},
    "gradients": {"shard": "gradients"},
    "optimizer": {"shard": "optimizer"},
}
"""Ours on one axis: keywords of `fully_shard`."""
NESTED: dict[str, dict[str, Any]] = {
    "parameters, 2 x 2": {"mesh": 2},
    "outer optimizer, 2 x 2": {"mesh": 2, "shard_outer": "optimizer"},
    "parameters, an int of 2": {"reshard_after_forward": 2},
}
OTHERS = ("ddp, zero", "torch, kept")
WHOLE, LARGEST, KEPT = MEDIUM.numel, MEDIUM.root_numel // 2, MEDIUM.root_numel


def measure(arguments: argparse.Namespace) -> Measured:
    figures: list[Figure] = []
    for precision in PRECISIONS:
        case, bf16 = PRECISION_NAMES[precision], precision == "bf16"
        activations = _activations(bf16)
        for variant in (*ALL, *OTHERS):
            if variant == "ddp, zero" and bf16:
                continue
            held, highest, calls = hold(variant, arguments.world_size, bf16)
            is_ours = variant in ALL
            figures += [
                Figure(case, variant, "held between steps, MB", held / 1e6, is_ours),
                Figure(case, variant, "peak, MB", highest / 1e6, is_ours),
                Figure(case, variant, "collectives a step", calls, is_ours),
            ]
            if is_ours:
                least = 16 * WHOLE / arguments.world_size
                more = transient(variant, arguments.world_size, 2 if bf16 else 4)
                most = least + activations + more
                figures += [
                    Figure(case, variant, "held / formula", held / least, True),
                    Figure(case, variant, "peak / formula", highest / most, True),
                ]
    variants = [
        (variant, precision == "bf16")
        for precision in PRECISIONS
        for variant in (*ALL, *NESTED, *OTHERS)
        if not (variant == "ddp, zero" and precision == "bf16")
    ]
    per_rank = run_on_ranks(count_sent, RANKS, variants)
    for index, (variant, bf16) in enumerate(variants):
        case = PRECISION_NAMES["bf16" if bf16 else "fp32"]
        sent = sum(counts[index] for counts in per_rank) / RANKS
        limit = least_sent(variant, 2 if bf16 else 4)
        is_ours = variant not in OTHERS
        figures += [
            Figure(case, variant, "MB a rank sends", sent / 1e6, is_ours),
            Figure(case, variant, "sent / formula", sent / limit, is_ours),
        ]
    facts = {"numel": WHOLE, "micro_batches": MICRO_BATCHES, "world_size": arguments.world_size}
    return Measured(figures, facts)


def transient(variant: str, ranks: int, b_p: int, b_r: int = 4) -> float:
    """Return the bytes of the formulas of memory that a step adds, without activations."""
    whole = {
        "parameters": b_r * WHOLE + 2 * LARGEST * b_p,
        "gradients": b_p * WHOLE + LARGEST * b_p + 4 * WHOLE / ranks,
        "optimizer": b_p * WHOLE + b_r * WHOLE,
    }[variant]
    return whole + 2 * LARGEST * b_r


def least_sent(variant: str, b_p: int, b_r: int = 4) -> float:
    """Return the bytes of the formulas of what a rank sends in a step."""
    m, whole, again = MICRO_BATCHES, WHOLE, 2 * WHOLE - KEPT
    every, node, outer = (RANKS - 1) / RANKS, (NODE - 1) / NODE, (NODES - 1) / NODES
    return {
        "parameters": every * (m * again * b_p + whole * b_r),
        "gradients": every * (whole * b_p + m * whole * b_r),
        "optimizer": every * (whole * b_p + whole * b_r),
        "torch, kept": every * (m * whole * b_p + whole * b_r),
        "ddp, zero": 2 * every * whole * b_r + whole * b_r,
        "parameters, 2 x 2": node * (m * again * b_p + whole * b_r)
        + 2 * outer * whole * b_r / NODE,
        "outer optimizer, 2 x 2": every * whole * b_p
        + node * ((m * again - whole) * b_p + m * whole * b_r)
        + outer * whole * b_r / NODE,
        "parameters, an int of 2": every * whole * (b_p + b_r) + node * (2 * m - 1) * whole * b_p,
    }[variant]


def prepare(variant: str, mesh: DeviceMesh, bf16: bool) -> tuple[Any, Any, Callable[[bool], Any]]:
    """Build a variant: its model, its optimizer, and a context for a backward with sync or not."""
    adamw = {"lr": 1e-6, "foreach": True}
    if variant == "ddp, zero":
        model: Any = build("ddp", MEDIUM, mesh, bf16=False)
        optimizer: Any = ZeroRedundancyOptimizer(
            model.parameters(),
            optimizer_class=torch.optim.AdamW,
            process_group=mesh.get_group(),
            **adamw,
        )
        return (
            model,
            optimizer,
            lambda syncs: contextlib.nullcontext() if syncs else model.no_sync(),
        )
    import fsdp2

    library: Any = torch.distributed.fsdp if variant == "torch, kept" else fsdp2
    kwargs = dict({**ALL, **NESTED}.get(variant, {"reshard_after_forward": False}))
    if kwargs.pop("mesh", 1) == 2:
        mesh = init_device_mesh("cpu", (NODES, NODE), mesh_dim_names=("outer", "inner"))
        for dim in ("outer", "inner"):
            mesh.get_group(dim).set_timeout(timedelta(seconds=60))
    if bf16:
        kwargs["mp_policy"] = library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    torch.manual_seed(0)
    with torch.device("cpu"):
        model = Stack(MEDIUM)
    for unit in (*model.blocks, model):
        library.fully_shard(unit, mesh=mesh, **kwargs)

    @contextlib.contextmanager
    def around(syncs: bool) -> Iterator[None]:
        model.set_requires_gradient_sync(syncs)
        yield

    return model, torch.optim.AdamW(model.parameters(), **adamw), around


def make_step(variant: str, mesh: DeviceMesh, bf16: bool) -> Callable[[], None]:
    """Return an optimizer step of several micro-batches."""
    model, optimizer, around = prepare(variant, mesh, bf16)
    x = make_input("fsdp2", MEDIUM, bf16=bf16)

    def step() -> None:
        for micro in range(MICRO_BATCHES):
            with around(micro == MICRO_BATCHES - 1):
                model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def hold(variant: str, ranks: int, bf16: bool) -> tuple[int, int, int]:
    """Return what is held behind a step, the most in it, and how many collectives it has."""
    gc.collect()
    with (
        noop.ranks(ranks) as (group, mesh),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        step = make_step(variant, mesh, bf16)
        for _ in range(WARMUP):
            step()
        gc.collect()
        before, seen = group.calls, list[str]()
        with record_function(STARTED):
            pass
        with events.listen(lambda event: seen.append(event.kind)):
            step()
        moves = seen.count("unshard") + seen.count("reduce")
        calls = moves or group.calls - before
        gc.collect()
        with record_function(DONE):
            pass
        del step
    return *_read(profiler), calls


def _read(profiler: Any) -> tuple[int, int]:
    """Sum up the allocator's events from the first one on."""
    live = highest = held = most = 0
    for event in sorted(
        profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()
    ):
        name = event.name()
        if name == STARTED:
            highest = live
        elif name == DONE:
            held, most = live, highest
        elif name == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU:
            live += event.nbytes()
            highest = max(highest, live)
    return held, most


def _activations(bf16: bool) -> int:
    """Return the bytes that a plain model has made when its forward is done."""
    with noop.ranks(1) as (_, mesh):
        model = build("plain", MEDIUM, mesh, bf16=bf16)
        x = make_input("plain", MEDIUM, bf16=bf16)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            loss = model(x).sum()
            with record_function(DONE):
                pass
            del loss
    return _read(profiler)[0]


def count_sent(rank: int, world_size: int, variants: list[tuple[str, bool]]) -> list[float]:
    """Return the bytes this rank sent in a step of each variant."""
    mesh = init_device_mesh("cpu", (world_size,))
    counts = []
    for variant, bf16 in variants:
        step = make_step(variant, mesh, bf16)
        for _ in range(WARMUP):
            step()
        dist.barrier()
        before = bytes_sent()
        for _ in range(STEPS):
            step()
        dist.barrier()
        counts.append((bytes_sent() - before) / STEPS)
        del step
        gc.collect()
    return counts


if __name__ == "__main__":
    parser = make_parser("sharding", __doc__)
    parser.add_argument("--world-size", type=int, default=8)
    run("sharding", __doc__, measure, parser)

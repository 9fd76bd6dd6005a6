"""Muon on shards: on whole matrices that have owners, and as torch's class steps DTensors.

    python -m benchmarks.muon                  both tables (two minutes)
    python -m benchmarks.muon --only measured  gloo ranks of this machine
    python -m benchmarks.muon --only planned   Llama's matrices on 8, 64 and 512 H100s, by the clock

Measured: the optimizer's step alone, on 30 matrices of 256 to 1024. CPU time of all ranks, bytes on
the wire a rank over the least ((N-1)/N of the gradients out and of the parameters back), FLOPs of
the busiest rank over the mean of one process' work, and what was allocated above the start. What is
not time repeats.

Planned: the step of the first rank, which is among the busiest. `repeated` gathers each matrix in
bf16 on every rank and orthogonalises it there, which is what DTensors make of the class.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Muon
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

import fsdp2
from benchmarks._ranks import run_on_ranks
from benchmarks._report import Figure, Measured, make_parser, run
from benchmarks.wire import bytes_sent
from fsdp2._plan.clock import ComputeTime
from fsdp2._plan.hardware import HARDWARE
from fsdp2._plan.lanes import LaneClock
from fsdp2._transfer.owners import newton_schulz_flops

WARMUP, STEPS, ROUNDS = 3, 3, 5
WIDTH, BLOCKS = 256, 6
LLAMAS = {"8B": (32, 4096, 14336, 1024), "70B": (80, 8192, 28672, 1024)}
RANKS = (8, 64, 512)
MACHINE = "h100-nvlink-ib"


class Block(nn.Module):
    """Five matrices, two of them wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.read, self.gate, self.out = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(torch.tanh(self.read(x)) * self.gate(x))
        return x + self.down(torch.relu(self.up(x)))


def _of_torch(params: Any) -> Any:
    return Muon(params, lr=0.01)


def _of_owners(params: Any) -> Any:
    return fsdp2.optim.whole(Muon, params, lr=0.01)


VARIANTS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "torch FSDP2, torch Muon": (torch_fsdp, _of_torch),
    "fsdp2, torch Muon": (fsdp2, _of_torch),
    "fsdp2, optim.whole": (fsdp2, _of_owners),
}


def measure(arguments: argparse.Namespace) -> Measured:
    figures: list[Figure] = []
    if arguments.only != "planned":
        for ranks in arguments.world_sizes:
            figures += measured(ranks)
    if arguments.only != "measured":
        figures += planned()
    return Measured(figures, {"width": WIDTH, "blocks": BLOCKS, "machine": MACHINE})


# --- measured -------------------------------------------------------------------------------------


def measured(ranks: int) -> Iterator[Figure]:
    per_rank = run_on_ranks(step_all, ranks)
    shapes = [tuple(p.shape) for p in Block(WIDTH).parameters()] * BLOCKS
    numel = sum(a * b for a, b in shapes)
    least = 2 * 4 * numel * (ranks - 1) / ranks / ranks
    share = sum(newton_schulz_flops(shape) - shape[0] * shape[1] for shape in shapes) / ranks
    for name in VARIANTS:
        own = [found[name] for found in per_rank]
        case = f"measured, N={ranks}"
        seconds = sum(one["seconds"] for one in own)
        yield Figure(case, name, "CPU ms a step, all ranks", 1e3 * seconds)
        yield Figure(case, name, "sent / least", sum(one["sent"] for one in own) / ranks / least)
        yield Figure(case, name, "busiest / mean FLOPs", max(one["flops"] for one in own) / share)
        yield Figure(case, name, "peak above start (MB)", max(one["peak"] for one in own) / 1e6)


def step_all(rank: int, ranks: int) -> dict[str, dict[str, float]]:
    """Step every variant in turn; return what each took."""
    steppers = {name: _prepare(*variant) for name, variant in VARIANTS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(ROUNDS):
        for name, step in steppers.items():
            dist.barrier()
            began = time.process_time()
            for _ in range(STEPS):
                step()
            seconds[name].append((time.process_time() - began) / STEPS)
    found = {}
    for name, step in steppers.items():
        dist.barrier()
        before = bytes_sent()
        for _ in range(STEPS):
            step()
        dist.barrier()
        sent = (bytes_sent() - before) / STEPS
        with FlopCounterMode(display=False) as counter:
            step()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            step()
        found[name] = {
            "seconds": statistics.median(seconds[name]),
            "sent": sent,
            "flops": float(counter.get_total_flops()),
            "peak": float(_peak(seen)),
        }
    return found


def _prepare(library: Any, make: Callable[[Any], Any]) -> Callable[[], None]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS)))
    for block in model:
        library.fully_shard(block, mesh=mesh)
    library.fully_shard(model, mesh=mesh)
    optimizer = make(model.parameters())
    model(torch.randn(4, WIDTH)).square().mean().backward()
    step: Callable[[], None] = functools.partial(optimizer.step)
    for _ in range(WARMUP):
        step()
    return step


def _peak(seen: profile) -> int:
    """Return the most bytes that were allocated at a time, above the start."""
    now = most = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]  # it ran
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


# --- planned --------------------------------------------------------------------------------------


class LlamaMatrices(nn.Module):
    """The matrices of a block: what a step of theirs costs does not depend on the forward."""

    def __init__(self, width: int, hidden: int, keys: int) -> None:
        super().__init__()
        sizes = [(width, width), (width, keys), (width, keys), (width, width)]
        self.each = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in sizes)
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        read = sum(layer(x).mean() for layer in self.each)
        return x + self.down(self.gate(x) * self.up(x)) + read


def planned() -> Iterator[Figure]:
    for name, (layers, width, hidden, keys) in LLAMAS.items():
        with torch.device("meta"):
            model = nn.Sequential(*(LlamaMatrices(width, hidden, keys) for _ in range(layers)))
        shapes = [tuple(p.shape) for p in model.parameters()]
        for ranks in RANKS:
            yield from _plan(f"{name}, N={ranks}", model, shapes, ranks)


def _plan(case: str, model: nn.Module, shapes: list[Any], ranks: int) -> Iterator[Figure]:
    plan = functools.partial(
        fsdp2.plan,
        model,
        mesh=ranks,
        policy={LlamaMatrices},
        batch=torch.zeros(1, shapes[0][1]),
        hardware=MACHINE,
    )
    without = plan().step.seconds
    assert without is not None
    adamw = plan(optimizer=torch.optim.AdamW).step
    owners = plan(optimizer=_of_owners).step
    assert adamw.seconds is not None
    assert owners.seconds is not None
    balance = fsdp2.optim.plan_owners(shapes, ranks=ranks)
    sent = sum(span.nbytes for span in owners.spans if span.name.startswith("all_to_all"))
    least = 2 * 4 * sum(a * b for a, b in shapes) / ranks
    rows = {
        "AdamW on shards": (adamw.seconds - without, adamw.optimizer_nbytes, None, None),
        "Muon, repeated": (_repeated(shapes, ranks), None, None, float(ranks)),
        "Muon, optim.whole": (
            owners.seconds - without,
            owners.optimizer_nbytes,
            sent / least,
            balance.imbalance,
        ),
    }
    for variant, (seconds, kept, wire, busiest) in rows.items():
        yield Figure(case, variant, "ms a step", 1e3 * seconds)
        if kept is not None:
            yield Figure(case, variant, "kept (GB)", kept / 1e9)
        if wire is not None:
            yield Figure(case, variant, "wire / least", wire)
        if busiest is not None:
            yield Figure(case, variant, "busiest / mean FLOPs", busiest)


def _repeated(shapes: list[Any], ranks: int) -> float:
    """Return the seconds in which every rank gathers and orthogonalises every matrix."""
    clock = LaneClock(HARDWARE[MACHINE])
    with FakeTensorMode():
        for shape in shapes:
            parameter = nn.Parameter(torch.empty(shape))
            parameter.grad = torch.empty(shape)
            optimizer = Muon([parameter], lr=0.01)
            optimizer.step()
            clock.send("all_gather", "matrix", 2 * parameter.numel(), ranks, 1)
            with ComputeTime(clock):
                optimizer.step()
    clock.finish()
    return clock.seconds


if __name__ == "__main__":
    parser = make_parser("muon", __doc__)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--only", choices=("measured", "planned"), help="one of the two tables")
    run("muon", __doc__, measure, parser)

"""Muon on shards: on whole matrices that have owners, and as torch's class steps DTensors.

    python -m benchmarks.optim.muon                  all tables (a quarter of an hour)
    python -m benchmarks.optim.muon --only measured  gloo ranks of this machine
    python -m benchmarks.optim.muon --only link      one serial link beside the compute, a virtual
    clock python -m benchmarks.optim.muon --only planned   Llama's matrices on 8, 64 and 512 H100s,
    by the clock

Measured: the optimizer's step alone, on 30 matrices of 256 to 1024. CPU time of all ranks, bytes on
the wire a rank over the least ((N-1)/N of the gradients out and of the parameters back), FLOPs of
the busiest rank over the mean of one process' work, and what was allocated above the start. What is
not time repeats.

On the link: a whole step of 8 ranks, forward and backward too, in the time of the compute of one
forward and backward; a link on which the gathers and reductions take 0.45, 1.2 and 2.8 times that.
Products of matrices move the clock, in the optimizer too. `rows` are shards of dim 0, `owned` are
those of `fsdp2.Whole`. The figures are of the first rank.

Planned: the step of the first rank, which is among the busiest. `repeated` gathers each matrix in
bf16 on every rank and orthogonalises it there, which is what DTensors make of the class. `whole
step` has forward and backward of one token in it: it is all communication.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Muon
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import fsdp2
from benchmarks.kit import noop
from benchmarks.kit.link import Link, LinkGroup, VirtualClock
from benchmarks.kit.ranks import run_on_ranks
from benchmarks.kit.report import Figure, Measured, make_parser, run
from benchmarks.step.wire import bytes_sent
from fsdp2._core.params.deals import Claim, Loads, deal_blocks, newton_schulz_flops
from fsdp2._tools.plan.clock import ComputeTime
from fsdp2._tools.plan.hardware import HARDWARE
from fsdp2._tools.plan.lanes import LaneClock

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
    tables: dict[str, Callable[[], Iterable[Figure]]] = {
        "measured": lambda: itertools.chain(*map(measured, arguments.world_sizes)),
        "link": on_the_link,
        "planned": planned,
    }
    for name, table in tables.items():
        if arguments.only in (None, name):
            figures += table()
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


# --- on a link ------------------------------------------------------------------------------------


class ProductsClock(VirtualClock):
    """Every product of matrices moves it, also those that add something."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", None)
        if packet in flop_registry:
            self.advance(flop_registry[packet](*args, **(kwargs or {}), out_val=found))
        return found


LINK_RANKS, TOKENS = 8, 512
LAYOUTS: dict[str, Callable[[nn.Parameter], fsdp2.Whole | None]] = {
    "rows": lambda param: None,
    "owned": lambda param: fsdp2.Whole(),
}
STEPPED: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda params: fsdp2.optim.local(torch.optim.AdamW, params, lr=0.01),
    "Muon": _of_owners,
}


def on_the_link() -> Iterator[Figure]:
    clock = ProductsClock()
    link = Link(clock)
    with noop.ranks(LINK_RANKS, functools.partial(LinkGroup, link=link)) as (_, mesh), clock:
        steps = {
            (layout, name): _link_step(mesh, choose, make)
            for layout, choose in LAYOUTS.items()
            for name, make in STEPPED.items()
        }
        link.bandwidth = None
        for step in steps.values():
            for _ in range(WARMUP):
                step()
        forward_and_backward = steps["rows", "AdamW"]  # which has no product of its own
        compute = _time_on(link, forward_and_backward)
        numel = sum(param.numel() for param in Block(WIDTH).parameters()) * BLOCKS
        least = 3 * 4 * numel * (LINK_RANKS - 1) / LINK_RANKS
        for ratio in (0.45, 1.2, 2.8):
            link.bandwidth = least / (ratio * compute)
            for (layout, name), step in steps.items():
                sent = link.nbytes
                took = _time_on(link, step)
                case, variant = f"link, communication/compute {ratio}", f"{name}, {layout}"
                yield Figure(case, variant, "step / compute", took / compute)
                yield Figure(case, variant, "sent / limit", (link.nbytes - sent) / least)


def _link_step(
    mesh: DeviceMesh,
    choose: Callable[[nn.Parameter], fsdp2.Whole | None],
    make: Callable[[Any], Any],
) -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(WIDTH) for _ in range(BLOCKS)))
    for block in model:
        fsdp2.fully_shard(block, mesh=mesh, shard_placement_fn=choose)
    fsdp2.fully_shard(model, mesh=mesh)
    optimizer, x = make(model.parameters()), torch.randn(TOKENS, WIDTH)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _time_on(link: Link, step: Callable[[], None]) -> float:
    link.wait_until_idle()
    start = link.clock.now()
    step()
    link.wait_until_idle()
    return link.clock.now() - start


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
    balance = fsdp2.optim.plan_owners(shapes, ranks=ranks).imbalance
    owned = _shares(shapes, len(shapes) // len(model), ranks)  # type: ignore[arg-type]  # a list of blocks
    repeated = _repeated(shapes, ranks)
    yield Figure(case, "Muon, repeated", "ms a step", 1e3 * repeated)
    yield Figure(case, "Muon, repeated", "busiest / mean FLOPs", float(ranks))
    least = 2 * 4 * sum(a * b for a, b in shapes) / ranks
    for layout, choose in LAYOUTS.items():
        without = plan(shard_placement_fn=choose).step.seconds
        assert without is not None
        for name, make in (("AdamW", torch.optim.AdamW), ("Muon, optim.whole", _of_owners)):
            step = plan(shard_placement_fn=choose, optimizer=make).step
            assert step.seconds is not None
            sent = sum(span.nbytes for span in step.spans if span.name.startswith("all_to_all"))
            variant = f"{name}, {layout}"
            yield Figure(case, variant, "ms a step", 1e3 * (step.seconds - without))
            yield Figure(case, variant, "whole step (ms)", 1e3 * step.seconds)
            yield Figure(case, variant, "kept (GB)", step.optimizer_nbytes / 1e9)
            if layout == "owned":
                yield Figure(case, variant, "busiest / mean bytes", owned[0])
            if name != "AdamW":
                busiest = balance if layout == "rows" else owned[1]
                yield Figure(case, variant, "wire / least", sent / least)
                yield Figure(case, variant, "busiest / mean FLOPs", busiest)


def _shares(shapes: list[Any], of_block: int, ranks: int) -> tuple[float, float]:
    """Return bytes and FLOPs of the busiest rank over the mean, of owned shards."""
    loads = Loads.of(ranks)
    for start in range(0, len(shapes), of_block):
        block = shapes[start : start + of_block]
        deal_blocks([Claim(shape, 4) for shape in block], loads)
    return tuple(max(one) * ranks / sum(one) for one in (loads.nbytes, loads.flops))  # type: ignore[return-value]  # a pair


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
    parser.add_argument("--only", choices=("measured", "link", "planned"), help="one of the tables")
    run("muon", __doc__, measure, parser)

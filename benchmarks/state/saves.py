"""What a save in the background costs training, and what a save sends, by count.

    python -m benchmarks.state.saves [--sizes 11 300] [--world-sizes 2 4] [--rounds 5]
    python -m benchmarks.state.saves --device cuda --world-sizes 1     one rank on a GPU, over NCCL

Gloo ranks train a stack of linear blocks with AdamW (fp32, 11.6 M or 302 M parameters; three
times that is saved). Each round times, on the slowest rank: a step, a plain save, the call of a
save in the background, each step until it is written, and how long that takes. `torch` is
`torch.distributed.checkpoint.save` and `async_save` of the same state. Figures are medians, with
quartiles, over the rounds but the first, which makes the host memory that later ones use again
(`blocked at first`). Two cores carry ranks and writing threads, so steps take longer meanwhile.

`counts` needs no ranks: of a 1.2 B model in 24 blocks on 8, 64 and 1,024 imagined ranks, the bytes
that the first rank reads of what all ranks report, beside the bytes of the plans, as objects, that
torch.distributed.checkpoint gathers on its first rank.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.kit.ranks import run_on_ranks
from benchmarks.kit.report import Figure, Measured, make_parser, run

SIZES = {"11": (512, 14, 8192), "300": (2048, 34, 8192)}
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
IMAGINED = (8, 64, 1024)


class Block(nn.Module):
    """A norm and two matrices, with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.up(self.norm(x)).relu())
        return x + hidden


def measure_rank(
    rank: int, world_size: int, size: str, rounds: int, top: str, device: str
) -> dict[str, Any]:
    """Return milliseconds of each round by quantity, on the slowest rank."""
    import fsdp2
    from fsdp2 import checkpoint

    width, layers, head = SIZES[size]
    torch.manual_seed(0)
    mesh = init_device_mesh(device, (world_size,))
    model = nn.Sequential(*(Block(width) for _ in range(layers)), nn.Linear(width, head))
    for block in model:
        fsdp2.fully_shard(block, mesh=mesh)
    fsdp2.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(4, width, device=device)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def timed(call: Callable[[], Any], waits: bool = True) -> float:
        dist.barrier()
        start = time.perf_counter()
        call()
        if waits and device != "cpu":
            torch.accelerator.synchronize()
        took = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return took.item() * 1e3

    group = dist.new_group()

    def state() -> dict[str, Any]:
        return checkpoint.sharded_state(model, optimizer)

    place, theirs = Path(top) / "saved", Path(top) / "theirs"
    variants: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "fsdp2": (
            lambda: checkpoint.save(place, model, optimizer),
            lambda: checkpoint.save(place, model, optimizer, background=True),
        ),
        "torch": (
            lambda: dcp.save(state(), checkpoint_id=theirs),
            # over the group of training its collectives would meet those of the steps
            lambda: dcp.async_save(state(), checkpoint_id=theirs, process_group=group),
        ),
    }
    found: dict[str, list[float]] = {}
    for _ in range(2):
        step()
    for variant in [*variants] * rounds:
        plain, background = variants[variant]
        told = {"step": timed(step), "plain save": timed(plain)}
        handles: list[Any] = []
        told["blocked"] = timed(lambda: handles.append(background()), waits=False)  # noqa: B023
        start, steps = time.perf_counter(), []
        is_written = False
        while not is_written:
            steps.append(timed(step))
            done = torch.tensor(float(handles[0].done()))
            dist.all_reduce(done, dist.ReduceOp.MIN)
            is_written = bool(done)
        told["step meanwhile"] = statistics.median(steps)
        told["written after"] = (time.perf_counter() - start) * 1e3
        for name, value in told.items():
            found.setdefault(f"{variant}:{name}", []).append(value)
    return {"numel": sum(p.numel() for p in model.parameters()), "rounds": found}


def measure(arguments: argparse.Namespace) -> Measured:
    figures: list[Figure] = []
    for size in arguments.sizes:
        for ranks in arguments.world_sizes:
            with tempfile.TemporaryDirectory() as top:
                given = (size, arguments.rounds, top, arguments.device)
                backend = BACKENDS[arguments.device]
                told = run_on_ranks(measure_rank, ranks, *given, backend=backend)[0]
            case = f"{told['numel'] / 1e6:.1f} M, N={ranks}"
            for name, values in told["rounds"].items():
                variant, _, quantity = name.partition(":")
                figures.append(of_rounds(case, variant, f"{quantity}, ms", values[1:]))
            for variant in ("fsdp2", "torch"):
                blocked = told["rounds"][f"{variant}:blocked"]
                plain = told["rounds"][f"{variant}:plain save"]
                figures.append(Figure(case, variant, "blocked at first, ms", blocked[0]))
                shares = [100 * b / p for b, p in zip(blocked[1:], plain[1:], strict=True)]
                figures.append(of_rounds(case, variant, "blocked, % of its plain save", shares))
    figures += counts()
    return Measured(figures, {"rounds": arguments.rounds})


def of_rounds(case: str, variant: str, quantity: str, values: list[float]) -> Figure:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    return Figure(case, variant, quantity, statistics.median(values), low=low, high=high)


def counts() -> list[Figure]:
    """Return what the first rank gets from all ranks, in bytes and messages, for a save."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from fsdp2._core.base.torch_dtensor import imagined_mesh
    from fsdp2._core.transfer.redistribute import Grids
    from fsdp2.checkpoint._contents import Contents
    from fsdp2.checkpoint._files import HEAD, ROW, SUM

    figures = []
    for ranks in IMAGINED:
        mesh = imagined_mesh((ranks,), ("shard",), 1)
        shapes = [(8192, 2048), (2048, 8192), (6144, 2048), (2048, 2048), (2048,), (2048,)]
        tensors: dict[str, Any] = {
            f"layers.{layer}.{kind}.{field}": DTensor.from_local(
                torch.zeros(()).expand(shape[0] // ranks, *shape[1:]),
                mesh,
                (Shard(0),),
                run_check=False,
            )
            for layer in range(24)
            for kind, shape in enumerate(shapes)
            for field in ("param", "exp_avg", "exp_avg_sq")
        }
        planner = DefaultSavePlanner(flatten_state_dict=True)
        planner.set_up_planner(tensors, None, False)
        plan = len(pickle.dumps(planner.create_local_plan()))
        contents = Contents.of({"model": tensors}, Grids([*tensors.values()]))
        rows = sum(
            content.own(number) is not None for number, content in enumerate(contents.common)
        )
        report = HEAD.size + rows * ROW.size + len(b"[]") + SUM.size
        case = f"counts, {ranks} ranks"
        figures += [
            Figure(case, "fsdp2", "MB that the first rank reads", report * ranks / 1e6),
            Figure(case, "fsdp2", "MB that any other rank gets", 0.0),
            Figure(case, "fsdp2", "files that the first rank reads", ranks),
            Figure(case, "torch", "MB that the first rank reads", plan * ranks / 1e6),
            Figure(case, "torch", "MB that any other rank gets", plan / 1e6),
            Figure(case, "torch", "messages to and from the first rank", 2 * (ranks - 1)),
        ]
    return figures


if __name__ == "__main__":
    parser = make_parser("saves", __doc__)
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES], default=[*SIZES])
    parser.add_argument("--world-sizes", nargs="+", type=int, default=[2, 4], metavar="N")
    parser.add_argument("--device", choices=[*BACKENDS], default="cpu")
    parser.add_argument("--rounds", type=int, default=6)
    run("saves", __doc__, measure, parser)

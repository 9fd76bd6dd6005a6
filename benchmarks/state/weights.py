"""Weights to an inference engine (`fsdp2.weights`): what travels, what it costs, what changed.

    python -m benchmarks.state.weights [--only plans gloo changed] [--rounds 5] [--megabytes 300]

`plans` needs no ranks: Llama 8B and 70B in bf16, sharded over 8 to 512 trainers (`2 x 256`: two
replicas), to engines of TP 8 in vLLM's layout, with 1 GiB of `max_bytes`. Bytes that travel (heads
of messages too) over the least; the busiest trainer over the mean; the largest buffers on each side
over `max_bytes`; planned seconds on H100s with NVLink and InfiniBand, beside all parameters
gathered and then broadcast, both by the planner's links.

`gloo`: 4 trainers and 4 engine ranks of TP 4 are 8 processes on this machine. Seconds of an update
to bf16, on the slowest rank, beside `full_params` with a broadcast from trainer 0 to the engine
ranks, which take their part. Rounds alternate; medians with quartiles.

`changed`: a decoder is trained on this repository's pages with AdamW, then updated 20 times at a
learning rate of 1e-6 (as in reinforcement learning) and 20 times at 1e-4, on 2 trainers. Each
update goes to 2 engine ranks with `since`; one restarts in the middle. Shares of blocks that
changed and of bytes, and whether all tensors were equal to the bit.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from benchmarks.kit.decoder_shapes import DECODERS, Decoder
from benchmarks.kit.engine_rules import LLAMA
from benchmarks.kit.ranks import run_on_ranks
from benchmarks.kit.report import Figure, Measured, make_parser, run
from fsdp2 import weights
from fsdp2._core.transfer.chunk_plan import Blocks, CutOf
from fsdp2._tools.plan.hardware import HARDWARE
from fsdp2.weights._route import Figures, Route, Source

BF16 = torch.bfloat16
TRAINERS, ENGINES = 4, 4
PLANS = [
    ("8B", (8,), 1), ("8B", (64,), 2), ("8B", (2, 256), 1), ("8B", (512,), 1),
    ("70B", (8,), 1), ("70B", (64,), 2), ("70B", (2, 256), 1), ("70B", (512,), 1),
]  # fmt: skip


def plans() -> Iterator[Figure]:
    for name, counts, engines in PLANS:
        decoder, trainers = DECODERS[name], math.prod(counts)
        shapes = decoder.shapes()
        cuts = (CutOf(len(counts) - 1, 0),)
        sources = [
            Source(n, s, BF16, Blocks(s, counts, cuts), tuple(range(trainers)))
            for n, s in shapes.items()
        ]
        layout = weights.tensor_parallel(decoder, 8, LLAMA, shapes=shapes) * engines
        start = time.perf_counter()
        route = Route(sources, layout, trainers=trainers, max_bytes=1 << 30)
        planned = time.perf_counter() - start
        figures = Figures(route)
        machine = HARDWARE["h100-nvlink-ib"]
        case = f"Llama {name}, {' x '.join(map(str, counts))} to {engines} x TP 8"
        peaks = [max(side) / (1 << 30) for side in figures.peaks]
        for quantity, value in (
            ("travels / least", figures.over_least),
            ("busiest / mean", figures.busiest),
            ("trainer buffers / max_bytes", peaks[0]),
            ("engine buffers / max_bytes", peaks[1]),
            ("messages", figures.messages),
            ("planned, s", figures.seconds(machine)),
            ("gathered and broadcast, s", figures.gathered_seconds(machine)),
            ("s to plan", planned),
        ):
            yield Figure(case, "fsdp2", quantity, value)


# On gloo.


def small(megabytes: int) -> Decoder:
    """Return a decoder whose parameters in fp32 have about so many bytes."""
    layers = 2
    hidden = max(64, round(math.sqrt(megabytes * 1e6 / 4 / (layers * 14)) / 64) * 64)
    return Decoder(layers, hidden, 3 * hidden, hidden // 64, hidden // 128, 64, 4 * hidden)


class Named(nn.Module):
    """Parameters by name, with no forward."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.of = nn.ParameterDict()
        for name, shape in shapes.items():
            self.of[name.replace(".", "/")] = nn.Parameter(torch.randn(shape) * 0.02)


def gloo_rank(rank: int, world_size: int, megabytes: int, rounds: int) -> dict[str, Any]:
    decoder = small(megabytes)
    shapes = {f"of.{n.replace('.', '/')}": s for n, s in decoder.shapes().items()}
    plain = decoder.shapes()
    layout = [
        {name: renamed(spec) for name, spec in one.items()}
        for one in weights.tensor_parallel(decoder, ENGINES, LLAMA, shapes=plain)
    ]
    group = dist.group.WORLD
    mesh = DeviceMesh("cpu", list(range(TRAINERS)))
    broadcasting = dist.new_group([0, *range(TRAINERS, world_size)])
    text = [""]
    if rank < TRAINERS:
        model = fsdp2.fully_shard(Named(plain), mesh=mesh)
        plan = weights.plan(model, layout, max_bytes=64 << 20)
        text = [plan.to_json()]
    dist.broadcast_object_list(text, src=0)
    receiver = weights.Receiver(text[0], rank - TRAINERS) if rank >= TRAINERS else None
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    times: dict[str, list[float]] = {"fsdp2": [], "full_params and broadcast": []}
    for _ in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        if receiver is None:
            plan.send(group, list(range(TRAINERS, world_size)))
        else:
            receiver.receive(group)
        dist.barrier()
        times["fsdp2"].append(time.perf_counter() - start)
        start = time.perf_counter()
        if receiver is None:
            for _, tensor in fsdp2.full_params(model, max_bytes=64 << 20, dtype=BF16):
                if rank == 0:
                    dist.broadcast(tensor, 0, group=broadcasting)
        else:
            kept = []
            for numel in sizes.values():
                whole = torch.empty(numel, dtype=BF16)
                dist.broadcast(whole, 0, group=broadcasting)
                kept.append(whole.chunk(ENGINES)[receiver._index].clone())
        dist.barrier()
        times["full_params and broadcast"].append(time.perf_counter() - start)
    return {
        "times": {name: some[1:] for name, some in times.items()},
        "megabytes": 4 * sum(sizes.values()) / 1e6,
    }


def renamed(spec: weights.Spec) -> weights.Spec:
    """Return a layout for parameters in a ``Named``."""
    parts: list[weights.Box | weights.Spec] = []
    for part in spec.boxes:
        if isinstance(part, weights.Spec):
            parts.append(renamed(part))
        else:
            name = None if part.name is None else f"of.{part.name.replace('.', '/')}"
            parts.append(weights.Box(name, part.start, part.shape, part.transposed))
    return weights.Spec(spec.shape, spec.dtype, parts, spec.dim)


def gloo(megabytes: int, rounds: int) -> Iterator[Figure]:
    found = run_on_ranks(gloo_rank, TRAINERS + ENGINES, megabytes, rounds)
    case = f"{found[0]['megabytes']:.0f} MB in fp32, 4 trainers to TP 4"
    for variant in found[0]["times"]:
        slowest = [max(r) for r in zip(*(one["times"][variant] for one in found), strict=True)]
        low, _, high = statistics.quantiles(slowest, n=4)
        yield Figure(case, variant, "s", statistics.median(slowest), low=low, high=high)


# Blocks that changed.


class Language(nn.Module):
    """A small decoder on bytes."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1))
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)  # type: ignore[no-any-return]  # a Linear's


def batches(seed: int) -> Iterator[torch.Tensor]:
    root = Path(__file__).resolve().parents[2] / "docs"
    text = b"".join(path.read_bytes() for path in sorted(root.glob("*.md")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    chance = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(data) - 65, (8,), generator=chance).tolist()
        yield torch.stack([data[start : start + 65] for start in starts])


def changed_rank(rank: int, world_size: int, warm: int, updates: int) -> dict[str, Any]:
    mesh = DeviceMesh("cpu", [0, 1])
    torch.manual_seed(0)
    model = Language()
    layout = [
        {
            name: weights.Spec(
                shape, BF16, [weights.Box(name, (e * shape[0], *[0] * (len(shape) - 1)), shape)]
            )
            for name, p in model.named_parameters()
            for shape in [(len(p) // 2, *p.shape[1:])]
        }
        for e in range(2)
    ]  # fmt: skip
    text = [""]
    if rank < 2:
        fsdp2.fully_shard(model, mesh=mesh)
        plan = weights.plan(model, layout, max_bytes=8 << 20)
        text = [plan.to_json()]
        least = plan.figures.sent_nbytes[rank]
    dist.broadcast_object_list(text, src=0)
    receiver = weights.Receiver(text[0], rank - 2) if rank >= 2 else None
    shares: dict[str, list[float]] = {}
    is_equal = True
    data = batches(rank)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for rate, steps in ((1e-3, warm), (1e-6, updates), (1e-4, updates)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        for step in range(steps):
            if rank < 2:
                batch = next(data)
                loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if rate == 1e-3:
                continue
            wholes = [None]
            if rank < 2:
                handle = plan.send(dist.group.WORLD, [2, 3], since=plan.version)
                shares.setdefault(f"{rate:g}", []).append(handle.nbytes / least)
                full = dict(fsdp2.full_params(model, max_bytes=1 << 24, dtype=BF16))
                wholes = [full]
            else:
                if step == 10 and rank == 3:  # it restarts
                    receiver = weights.Receiver(text[0], rank - 2)
                tensors = receiver.receive(dist.group.WORLD)
            dist.broadcast_object_list(wholes, src=0)
            if rank >= 2:
                for name, tensor in tensors.items():
                    is_equal &= torch.equal(tensor, wholes[0][name].chunk(2)[rank - 2])
    return {"shares": shares, "equal": is_equal}


def changed(updates: int) -> Iterator[Figure]:
    found = run_on_ranks(changed_rank, 4, 60, updates)
    for rate in found[0]["shares"]:
        means = [
            statistics.mean(some)
            for some in zip(*(one["shares"][rate] for one in found[:2]), strict=True)
        ]
        case = f"{updates} updates of a decoder of 3.3 M, lr {rate}"
        restart = means.pop(10)
        first = means.pop(0)
        yield Figure(case, "fsdp2", "first, bytes / all", first)
        low, middle, high = min(means), statistics.median(means), max(means)
        yield Figure(case, "fsdp2", "later, bytes / all", middle, low=low, high=high)
        yield Figure(case, "fsdp2", "one of two restarted, bytes / all", restart)
        yield Figure(case, "fsdp2", "equal to the bit", float(all(one["equal"] for one in found)))


def measure(arguments: argparse.Namespace) -> Measured:
    figures: list[Figure] = []
    if "plans" in arguments.only:
        figures += plans()
    if "gloo" in arguments.only:
        figures += gloo(arguments.megabytes, arguments.rounds)
    if "changed" in arguments.only:
        figures += changed(20)
    failed = any(f.quantity == "equal to the bit" and not f.value for f in figures)
    return Measured(figures, failed=failed)


if __name__ == "__main__":
    parser = make_parser("weights", __doc__)
    parser.add_argument("--only", nargs="+", default=["plans", "gloo", "changed"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=300)
    run("weights", __doc__, measure, parser)

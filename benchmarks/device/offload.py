"""Activations and optimizer states on the host: time of a step and peak memory, with and without.

    python -m benchmarks.device.offload                 one GPU, about a minute
    python -m benchmarks.device.offload --tiny          a small form that also runs without a GPU
    python -m benchmarks.device.offload --only states   the variants whose names contain this

One rank trains decoder blocks of Llama 8B (`_llama`), with bf16 parameters in compute and fp32
shards, and AdamW. A step is forward, backward and the optimizer's step. `step ms` is of a few in a
row: what one leaves behind may go on beside the next one. `peak GB` (10^9 bytes) is the most
allocated in a step, `start GB` what is allocated between steps, and `pinned GB` memory of the host
that copies use. The notes say how fast a large copy is in each direction.

`checkpoint` computes blocks again in backward, so that only what goes into them is saved;
`checkpoint, offload` keeps that on the host. `offload all` keeps on the host all that blocks save.
`states` keeps AdamW's states there: the link carries 8 bytes for each parameter, each way. With
`8 GB` of them on the device at a time (`max_bytes`) they begin to come in backward.
"""

from __future__ import annotations

import argparse
import functools
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from benchmarks.kit.llama import SHAPES, Block, Decoder, Shape
from benchmarks.kit.report import Figure, Measured, make_parser, run
from fsdp2._core.api.activations import ATTRIBUTE
from fsdp2.optim._offload import OffloadedStates

WARMUP = 3
GB = 1e9


@dataclass(frozen=True)
class Variant:
    """How a model is trained. ``most``: the ``max_bytes`` of states on the host."""

    name: str
    checkpoint: bool = False
    offload: bool = False
    states: bool = False
    most: int | None = None


VARIANTS = (
    Variant("none"),
    Variant("offload all", offload=True),
    Variant("checkpoint", checkpoint=True),
    Variant("checkpoint, offload", checkpoint=True, offload=True),
    Variant("checkpoint, states", checkpoint=True, states=True),
    Variant("checkpoint, states, 8 GB", checkpoint=True, states=True, most=8 * 10**9),
    Variant("checkpoint, offload, states", checkpoint=True, offload=True, states=True),
)


class Machine:
    """A device: its time and its memory; of a CPU nothing is known of memory."""

    def __init__(self) -> None:
        self.is_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", 0) if self.is_gpu else torch.device("cpu")

    def seconds(self, step: Callable[[], None]) -> float:
        self.wait()
        began = time.perf_counter()
        step()
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.is_gpu else 0

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.is_gpu else 0

    def forget_peak(self) -> None:
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats()

    def empty(self) -> None:
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()


def link_rates(machine: Machine) -> dict[str, float]:
    """Return bytes a second from and to the device, of one large copy."""
    nbytes = 1 << 28
    here = torch.empty(nbytes, dtype=torch.uint8, device=machine.device)
    host = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    found = {}
    for name, (target, source) in {"out": (host, here), "back": (here, host)}.items():
        target.copy_(source, non_blocking=True)
        took = machine.seconds(lambda t=target, s=source: t.copy_(s, non_blocking=True))  # type: ignore[misc]
        found[name] = nbytes / took
    return found


def pinned_nbytes(model: Any, optim: Any) -> int:
    """Return how much memory of the host activations and states were given."""
    activations = vars(model).get(ATTRIBUTE)
    found = 0 if activations is None else activations.memory.nbytes
    batches = optim._batches if isinstance(optim, OffloadedStates) else []
    return int(found + sum(batch.nbytes for batch in batches))


def repeated(step: Callable[[], None], count: int) -> None:
    for _ in range(count):
        step()


def measure_variant(
    variant: Variant,
    shape: Shape,
    tokens: int,
    rounds: int,
    machine: Machine,
    look: Callable[[Callable[[], None]], dict[str, float]] = lambda step: {},
) -> list[Figure]:
    """Train a model for a few steps. ``look`` is given the step, and adds figures."""
    torch.manual_seed(0)
    with machine.device:
        model: Any = Decoder(shape, shape.blocks)
    if variant.checkpoint:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    mesh = init_device_mesh(machine.device.type, (1,))
    fsdp2.wrap.shard_model(
        model,
        {Block},
        mesh=mesh,
        mp_policy=fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    )
    if variant.offload:
        fsdp2.offload_activations(model, {CheckpointWrapper if variant.checkpoint else Block})
    optim: Any = fsdp2.optim.local(
        torch.optim.AdamW, model.parameters(), lr=1e-4, fused=machine.is_gpu
    )
    if variant.states:
        fsdp2.optim.offload_states(optim, max_bytes=variant.most)
    length = min(tokens, 4096)
    batch = torch.randint(shape.vocabulary, (tokens // length, length), device=machine.device)
    losses = []

    def step() -> None:
        loss = model(batch)
        loss.backward()
        optim.step()
        optim.zero_grad()
        losses.append(loss.detach())

    for _ in range(WARMUP):
        step()
    machine.wait()
    start = machine.allocated()
    machine.forget_peak()
    seconds = machine.seconds(functools.partial(repeated, step, rounds)) / rounds
    peak = machine.peak()
    case = f"{shape.blocks} blocks, {tokens} tokens"
    figures = {
        "step ms": seconds * 1e3,
        "peak GB": peak / GB,
        "start GB": start / GB,
        "last loss": float(losses[-1]),
        "pinned GB": pinned_nbytes(model, optim) / GB,
        **look(step),
    }
    return [Figure(case, variant.name, name, value) for name, value in figures.items()]


def measure(arguments: argparse.Namespace) -> Measured:
    machine = Machine()
    is_tiny = arguments.tiny or not machine.is_gpu
    shape = replace(SHAPES["8B"], blocks=arguments.blocks, vocabulary=32000)
    tokens = arguments.tokens
    if is_tiny:
        shape, tokens = Shape("tiny", 64, 128, 4, 2, 3, 64), 32
    notes = [f"on one {torch.cuda.get_device_name()}" if machine.is_gpu else "on a CPU"]
    dist.init_process_group(
        "nccl" if machine.is_gpu else "gloo", rank=0, world_size=1, store=dist.HashStore()
    )
    figures = []
    try:
        if machine.is_gpu:
            rates = link_rates(machine)
            notes.append(", ".join(f"{k} {v / GB:.1f} GB/s" for k, v in rates.items()))
        for variant in VARIANTS:
            if not arguments.only or any(part in variant.name for part in arguments.only):
                figures += measure_variant(variant, shape, tokens, arguments.rounds, machine)
                machine.empty()
    finally:
        dist.destroy_process_group()
    settings = {"blocks": shape.blocks, "tokens": tokens, "rounds": arguments.rounds}
    return Measured(figures, settings, notes)


if __name__ == "__main__":
    parser = make_parser("offload", __doc__)
    parser.add_argument("--tiny", action="store_true", help="a small form, on any device")
    parser.add_argument("--only", nargs="+", help="parts of the names of variants")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    run("offload", __doc__, measure, parser)

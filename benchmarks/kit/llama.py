"""Decoders of Llama's shapes, for a device that computes shapes and time only.

Owns the models, their variants, and how they are sharded. Knows nothing of time.

A block has nine parameters: two norms, q, k, v, o, and a gated feed-forward of three matrices. Keys
and values have fewer heads than queries. A block of experts has a router and eight feed-forwards;
every batch uses two, and the others have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh

EXPERTS, USED = 8, 2
SPLIT = ("torch tuned", "fsdp2 split")
"""Variants in which embedding and head are units of their own, with the norm before the head."""
SEQUENCE = 4096


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder: numbers of elements, not bytes. ``blocks``: of the whole model."""

    name: str
    width: int
    hidden: int
    heads: int
    kv_heads: int
    blocks: int
    vocabulary: int = 128256

    @property
    def block_numel(self) -> int:
        kept = 2 * self.width + 2 * self.width * self.width
        return kept + 2 * self.width * self.kv_width + 3 * self.width * self.hidden

    @property
    def kv_width(self) -> int:
        return self.width // self.heads * self.kv_heads

    @property
    def root_numel(self) -> int:
        return 2 * self.width * self.vocabulary + self.width


SHAPES = {
    # Llama 3 (2024), table 3 of "The Llama 3 Herd of Models"
    "8B": Shape("8B", 4096, 14336, 32, 8, 32),
    "70B": Shape("70B", 8192, 28672, 64, 8, 80),
}


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Experts(nn.Module):
    """Eight feed-forwards; every batch goes to the first two."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(FeedForward(width, hidden // 4) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        out = torch.zeros_like(x)
        for number in range(USED):
            out = out + shares[..., number : number + 1] * self.experts[number](x)
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape, experts: bool) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.kv_heads = shape.heads, shape.kv_heads
        self.attention_norm = nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, shape.kv_width, bias=False)
        self.v = nn.Linear(width, shape.kv_width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.RMSNorm(width)
        make = Experts if experts else FeedForward
        self.feed_forward = make(width, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, heads in (
                (self.q(h), self.heads),
                (self.k(h), self.kv_heads),
                (self.v(h), self.kv_heads),
            )
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """``[sequences, tokens]`` of numbers in, the loss of the next ones out."""

    def __init__(
        self, shape: Shape, depth: int, *, experts: bool = False, fused_loss: bool = False
    ) -> None:
        super().__init__()
        self.fused_loss = fused_loss
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape, experts) for _ in range(depth))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        # a fused loss reads the head's weight, and never calls the head
        logits = F.linear(x, self.head.weight) if self.fused_loss else self.head(x)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


@dataclass(frozen=True)
class Variant:
    """How a decoder is trained. ``preset``: of ours, see ``set_memory``.

    ``checkpoint``: blocks are computed again in backward. ``away``: of every so many
    blocks one has what it saves on the host; 0: none. ``optimizer``: AdamW at the end of a step,
    with states on the "device" or on the "host"; a number is ``max_bytes`` of those on the host.
    """

    reduce: torch.dtype = torch.float32
    preset: str = "balanced"
    offload: bool = False
    experts: bool = False
    fused_loss: bool = False
    checkpoint: bool = False
    away: int = 0
    optimizer: str = ""


def build(library: str, shape: Shape, depth: int, mesh: DeviceMesh, variant: Variant) -> nn.Module:
    """Return a decoder as a library shards it, with bf16 parameters in compute."""
    with torch.device(mesh.device_type):
        model = Decoder(shape, depth, experts=variant.experts, fused_loss=variant.fused_loss)
    if variant.checkpoint:
        for place, block in enumerate(model.blocks):
            model.blocks[place] = checkpoint_wrapper(block, preserve_rng_state=False)
    if library in ("plain", "ddp"):
        model = model.to(torch.bfloat16)
        if library == "plain":
            return model
        return nn.parallel.DistributedDataParallel(
            model,
            process_group=mesh.get_group(),
            init_sync=False,
            find_unused_parameters=variant.experts,
        )
    is_ours = library.startswith("fsdp2")
    package = _package(is_ours)
    kwargs: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": package.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=variant.reduce
        ),
    }
    if variant.offload:
        kwargs["offload_policy"] = package.CPUOffloadPolicy()
    units: list[Any] = list(model.blocks)
    if library in SPLIT and not variant.fused_loss:
        units = [model.embed, *units, [model.norm, model.head]]
    for unit in units:
        # backward begins with the head: who trains Llama keeps it (torchtitan's models do)
        keeps = {"reshard_after_forward": False} if isinstance(unit, list) else {}
        package.fully_shard(unit, **kwargs, **keeps)
    sharded = package.fully_shard(model, **kwargs)
    if library == "torch tuned":
        _tune(sharded, [unit[0] if isinstance(unit, list) else unit for unit in units])
    if is_ours:
        sharded.set_memory(variant.preset)
    if variant.away:
        chosen = set(model.blocks[:: variant.away])
        package.offload_activations(
            model, lambda module: module in chosen, keep_last=int(variant.away == 1)
        )
    return model


def _package(is_ours: bool) -> Any:
    if is_ours:
        import fsdp2

        return fsdp2
    from torch.distributed import fsdp

    return fsdp


def _tune(root: Any, units: list[Any]) -> None:
    """Give torch's FSDP2 prefetch lists one unit deep and async all-gathers (a private switch)."""
    for unit, following in pairwise(units):
        unit.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([unit])
    root._set_unshard_async_op(True)


def make_step(
    model: nn.Module,
    shape: Shape,
    tokens: int,
    device: torch.device,
    say: Callable[[str], None],
    optimizer: str = "",
) -> Callable[[], None]:
    """Return one training step; ``say`` is told where it is. ``optimizer``: as in ``Variant``."""
    length = min(tokens, SEQUENCE)
    batch = torch.zeros(tokens // length, length, dtype=torch.int64, device=device)
    optim: Any = None
    if optimizer:
        import fsdp2

        optim = fsdp2.optim.local(torch.optim.AdamW, model.parameters(), lr=1e-4, fused=True)
        if optimizer != "device":
            most = None if optimizer == "host" else int(optimizer)
            fsdp2.optim.offload_states(optim, max_bytes=most)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        say("forward")
        loss = model(batch)
        say("backward")
        loss.backward()
        say("optimizer")
        if optim is not None:
            optim.step()
        say("end")

    return step

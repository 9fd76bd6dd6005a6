"""The model that a doctor trains, its batches, and how each library shards it.

Owns shapes and units. It must not know what is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2._base import torch_modules


@dataclass(frozen=True)
class Size:
    """Sizes of a model: numbers of elements, and rows of a batch on one rank."""

    depth: int
    width: int
    hidden: int
    vocabulary: int
    rows: int
    tokens: int


ODD = Size(depth=2, width=13, hidden=29, vocabulary=31, rows=3, tokens=5)
"""To be right: no dim divides by a number of ranks, and one parameter has a single row."""


class Block(nn.Module):
    """Attention with one head, and a feed-forward."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.up, self.down = nn.Linear(size.width, size.hidden), nn.Linear(size.hidden, size.width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        weights = torch.softmax(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5, -1)
        x = x + self.out(weights @ value)
        result: Tensor = x + self.down(F.gelu(self.up(x)))
        return result


class Model(nn.Module):
    """Words in, the loss of guessing the next ones out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.start = nn.Parameter(torch.randn(1, size.width, device=self.embed.weight.device))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.depth))
        self.head = nn.Linear(size.width, size.vocabulary)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words[:, :-1]) + self.start
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), words[:, 1:].flatten())


def build(size: Size, device: torch.device) -> Model:
    """Return the model, with the same values on every rank: they are made on the host."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        with torch.device("cpu"):
            model = Model(size)
    return model.to(device)


def batch(size: Size, ranks: int, device: torch.device, step: int = 0) -> Tensor:
    """Return the words of all ranks: ``[ranks * rows, tokens + 1]``, the same on every rank."""
    generator = torch.Generator("cpu").manual_seed(1000 + step)
    shape = (ranks * size.rows, size.tokens + 1)
    words = torch.randint(size.vocabulary, shape, generator=generator, device="cpu")
    return words.to(device)


Shard = Callable[..., Any]


def shard(model: Model, mesh: DeviceMesh, *, by_torch: bool = False, bf16: bool = False) -> None:
    """Shard each block, and the root: with torch's own ``fully_shard``, or with ours."""
    library: Any = torch_modules if by_torch else fsdp2
    policy = library.MixedPrecisionPolicy
    precision = {"mp_policy": policy(torch.bfloat16, torch.float32)} if bf16 else {}
    apply = partial(library.fully_shard, mesh=mesh, **precision)
    for block in model.blocks:
        apply(block)
    apply(model)

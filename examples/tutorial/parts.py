"""Shared by the tutorial's steps: a small language model, its batches, and functions that print."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2.plans import Plan

VOCABULARY, LENGTH, BATCH = 64, 32, 16


class Attention(nn.Module):
    def __init__(self, width: int, head: int = 32) -> None:
        super().__init__()
        self.head = head
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            projection(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm_2, self.feed_forward = nn.LayerNorm(width), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.feed_forward(self.norm_2(x))


class Model(nn.Module):
    """Predict the next token at each position."""

    def __init__(self, width: int = 128, blocks: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_batch(step: int, rank: int = 0, ranks: int = 1) -> Tensor:
    """Return a rank's rows of the batch of a step: lines that count up in steps of 1 to 4."""
    random = torch.Generator().manual_seed(step)
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=random)
    stride = torch.randint(1, 5, (BATCH, 1), generator=random)
    return ((start + stride * torch.arange(LENGTH + 1)) % VOCABULARY).chunk(ranks)[rank]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def mean_over_ranks(loss: Tensor) -> float:
    """Average the loss over ranks. Every rank must call it with the loss of its own rows."""
    mean = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    return mean.item()


def say(text: str) -> None:
    """Print on the first rank only."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.2f} MB"


def here(tensors: list[Tensor]) -> str:
    """Format the memory that tensors take on this rank."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return megabytes(sum(t.nbytes for t in local))


def say_plan(plan: Plan) -> None:
    """Print what a forward and its backward send, and the peak memory of a rank."""
    for kind in ("all_gather", "reduce_scatter"):
        sizes = [each.nbytes for each in plan.step.collectives if each.kind == kind]
        say(f"{kind}: {len(sizes)} times, {megabytes(sum(sizes))}")
    say(f"peak {megabytes(plan.step.peak_nbytes)}")


def say_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Print the memory that this rank keeps between steps."""
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    moments = [value for value in states if value.ndim]
    gradients = [p.grad for p in parameters if p.grad is not None]
    say(f"parameters {here(parameters)}, gradients {here(gradients)}, AdamW {here(moments)}")

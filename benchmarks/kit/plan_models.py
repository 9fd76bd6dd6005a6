"""Models that plans are held to account with: the example's, a Llama, and a mixture of experts.

Owns their sizes, their batches and their units. All shapes follow from those of the batch, as plans
ask for: an expert takes a fixed number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples._model import Block as ExampleBlock
from examples._model import ModelConfig, RotaryTable, Transformer


class GroupedAttention(nn.Module):
    """Attention whose keys and values serve several query heads each."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups = heads, groups
        head = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, groups * head, bias=False)
        self.value = nn.Linear(width, groups * head, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        query = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = (
            part(x).unflatten(-1, (self.groups, -1)).transpose(1, 2)
            for part in (self.key, self.value)
        )
        repeats = self.heads // self.groups
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (rotary(key), value))
        mixed = F.scaled_dot_product_attention(rotary(query), key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class GatedMLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Two experts of several for each token, each taking a fixed number of tokens at most."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(GatedMLP(width, hidden) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        scores = self.router(flat).softmax(-1)
        weights, chosen = scores.topk(2, dim=-1)
        gates = torch.zeros_like(scores).scatter(1, chosen, weights)
        room = max(2 * flat.shape[0] // len(self.experts), 1)
        mixed = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            gate, rows = gates[:, number].topk(room)
            mixed = mixed.index_add(0, rows, expert(flat[rows]) * gate[:, None])
        return mixed.view_as(x)


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama; with experts it is a mixture of them."""

    width: int
    layers: int
    heads: int
    groups: int
    hidden: int
    vocabulary: int
    experts: int = 0
    length: int = 64


LLAMA_405B = LlamaConfig(16384, 126, 128, 8, 53248, 128256, length=8192)
"""Sizes of Llama 3.1 405B. Source: "The Llama 3 Herd of Models", table 3 (arXiv 2407.21783)."""


class Layer(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.hidden
        self.attention_norm = nn.RMSNorm(width)
        self.attention = GroupedAttention(width, config.heads, config.groups)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = (
            Experts(width, hidden, config.experts) if config.experts else GatedMLP(width, hidden)
        )

    def forward(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Embedding, layers, norm and a head of its own."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.rotary = RotaryTable(
            ModelConfig(config.width, config.layers, config.heads, config.length)
        )
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.rotary)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def llama_405b() -> Llama:
    """Return a Llama of 405 B parameters: make it on the meta device."""
    return Llama(LLAMA_405B)


@dataclass(frozen=True)
class Case:
    """A model, its units, and what a rank's forward is given."""

    build: Callable[[], nn.Module]
    units: frozenset[type[nn.Module]]
    batch: tuple[int, int]

    def make_batch(self) -> tuple[Any, ...]:
        tokens = torch.zeros(self.batch, dtype=torch.long)
        return tokens, tokens.clone()


CASES = {
    "example": Case(
        lambda: Transformer(ModelConfig(192, 6, 6, 128)), frozenset({ExampleBlock}), (4, 128)
    ),
    "llama 100M": Case(
        lambda: Llama(LlamaConfig(768, 12, 12, 4, 2048, 16000)),
        frozenset({Layer}),
        (1, 64),
    ),
    "moe": Case(
        lambda: Llama(LlamaConfig(256, 4, 4, 2, 683, 2003, experts=6)),
        frozenset({Layer}),
        (2, 64),
    ),
}

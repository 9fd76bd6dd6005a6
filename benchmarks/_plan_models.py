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
from examples._model import ModelConfig, RotaryTable, SwiGLU, Transformer


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


class Experts(nn.Module):
    """Two experts of several for each token, each taking a fixed number of tokens at most."""

    def __init__(self, config: ModelConfig, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(config.width, experts, bias=False)
        self.experts = nn.ModuleList(SwiGLU(config) for _ in range(experts))

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


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, groups: int, experts: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width)
        self.attention = GroupedAttention(config.width, config.heads, groups)
        self.mlp_norm = nn.RMSNorm(config.width)
        self.mlp = Experts(config, experts) if experts else SwiGLU(config)

    def forward(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Embedding, layers, norm and a head of its own; with experts it is a mixture of them."""

    def __init__(self, config: ModelConfig, vocabulary: int, groups: int, experts: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.rotary = RotaryTable(config)
        self.layers = nn.ModuleList(Layer(config, groups, experts) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.rotary)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Case:
    """A model, its units, and what a rank's forward is given."""

    build: Callable[[], nn.Module]
    units: frozenset[type[nn.Module]]
    batch: tuple[int, int]

    def make_batch(self) -> tuple[Any, ...]:
        tokens = torch.zeros(self.batch, dtype=torch.long)
        return tokens, tokens.clone()


def llama(**size: int) -> Llama:
    """Return a Llama: width, layers, heads, groups, vocabulary, and perhaps experts."""
    config = ModelConfig(size["width"], size["layers"], size["heads"], size.get("length", 64))
    return Llama(config, size["vocabulary"], size["groups"], size.get("experts", 0))


CASES = {
    "example": Case(
        lambda: Transformer(ModelConfig(192, 6, 6, 128)), frozenset({ExampleBlock}), (4, 128)
    ),
    "llama 100M": Case(
        lambda: llama(width=768, layers=12, heads=12, groups=4, vocabulary=16000),
        frozenset({Layer}),
        (1, 64),
    ),
    "moe": Case(
        lambda: llama(width=256, layers=4, heads=4, groups=2, vocabulary=2003, experts=6),
        frozenset({Layer}),
        (2, 64),
    ),
}

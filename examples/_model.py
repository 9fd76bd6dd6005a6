"""A byte-level decoder-only transformer. Independent of ranks, meshes and files.

Shapes in brackets: `B` sequences, `T` positions, `D` width, `H` heads, `K = D / H`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True)
class ModelConfig:
    width: int
    layers: int
    heads: int
    sequence_length: int
    rotary_base: float = 10_000.0

    @property
    def hidden_width(self) -> int:
        """Width of the SwiGLU hidden layer: 8/3 of the model's, rounded up to a multiple of 64."""
        return math.ceil(self.width * 8 / 3 / 64) * 64


class RotaryTable(nn.Module):
    """The cosines and sines of rotary position embedding, [T, K/2] each."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        head_width = config.width // config.heads
        frequencies = config.rotary_base ** (-torch.arange(0, head_width, 2) / head_width)
        angles = torch.outer(torch.arange(config.sequence_length), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the rotary embedding to `x` [B, H, T, K], whose heads are rotated in two halves."""
        length = x.shape[-2]
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        """Causal self-attention, [B, T, D] -> [B, T, D]."""
        heads = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(rotary(query), rotary(key), value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_and_up = nn.Linear(config.width, 2 * config.hidden_width, bias=False)
        self.down = nn.Linear(config.hidden_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, rotary: RotaryTable) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.rotary = RotaryTable(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.RMSNorm(config.width, eps=1e-6)
        self._init_weights()

    def _init_weights(self) -> None:
        """Initialise weights with variance 1 / inputs, and less in projections to the residual."""
        # The head is tied to the embedding, so a position initially predicts its own byte. A small
        # norm weight weakens this, so the first loss is near log 256, that of a uniform prediction.
        nn.init.constant_(self.final_norm.weight, self.config.width**-0.5)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            # The embedding is also the head, so it is scaled like a matrix with D inputs.
            scale = parameter.shape[1] ** -0.5
            if name.endswith(("out.weight", "down.weight")):
                scale *= (2 * self.config.layers) ** -0.5
            nn.init.normal_(parameter, std=scale)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean negative log-likelihood of `targets` [B, T], in nats per byte."""
        return F.cross_entropy(self._logits(tokens).float().flatten(0, 1), targets.flatten())

    def _logits(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embedding.weight) * self.config.width**0.5
        for block in self.blocks:
            x = block(x, self.rotary)
        return F.linear(self.final_norm(x), self.embedding.weight)

    @torch.no_grad()
    def generate(
        self, prompt: Tensor, new_bytes: int, temperature: float, generator: torch.Generator
    ) -> Tensor:
        """Continue `prompt` [T] by `new_bytes` sampled bytes and return both, [T + new_bytes].

        It does not call `forward`, so a sharded model needs `register_fsdp_forward_method` for it.
        All ranks must call it together, with generators in the same state.
        """
        tokens = prompt
        for _ in range(new_bytes):
            window = tokens[-self.config.sequence_length :]
            logits = self._logits(window[None])[0, -1].float()
            weights = torch.softmax(logits / temperature, dim=-1).cpu()
            chosen = torch.multinomial(weights, 1, generator=generator)
            tokens = torch.cat((tokens, chosen.to(tokens.device)))
        return tokens

"""Models for plans only: well-known decoders, by name or by a Hugging Face ``config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder, in elements. ``is_tied``: head and embedding share a weight. ``bias``:
    query, key and value have a bias. ``head_norm``: query and key are normalized per head."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    head: int = 0  # elements of a head; 0: the width divided by the number of heads
    is_tied: bool = False
    bias: bool = False
    head_norm: bool = False

    @property
    def head_width(self) -> int:
        return self.head or self.width // self.heads


SHAPES = {
    # "The Llama 3 Herd of Models", table 3 (arXiv 2407.21783); 1b and 3b: the models' config.json
    "llama3-1b": Shape(2048, 16, 32, 8, 8192, 128256, 64, is_tied=True),
    "llama3-3b": Shape(3072, 28, 24, 8, 8192, 128256, 128, is_tied=True),
    "llama3-8b": Shape(4096, 32, 32, 8, 14336, 128256),
    "llama3-70b": Shape(8192, 80, 64, 8, 28672, 128256),
    "llama3-405b": Shape(16384, 126, 128, 8, 53248, 128256),
    # config.json of the models
    "llama2-7b": Shape(4096, 32, 32, 32, 11008, 32000),
    "llama2-13b": Shape(5120, 40, 40, 40, 13824, 32000),
    "llama2-70b": Shape(8192, 80, 64, 8, 28672, 32000),
    "mistral-7b": Shape(4096, 32, 32, 8, 14336, 32000),
    "qwen2.5-7b": Shape(3584, 28, 28, 4, 18944, 152064, bias=True),
    "qwen3-8b": Shape(4096, 36, 32, 8, 12288, 151936, 128, head_norm=True),
    "qwen3-32b": Shape(5120, 64, 64, 8, 25600, 151936, 128, head_norm=True),
}
FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
"""Values of ``model_type`` in configs of decoders that ``Decoder`` can represent."""


def shape_for(name: str) -> Shape | None:
    """Return the shape for a known name or a config file, or None for other names. Raise ValueError
    if a file cannot be read, or describes another kind of model."""
    if name.lower() in SHAPES:
        return SHAPES[name.lower()]
    path = Path(name)
    if path.is_dir() and (path / "config.json").exists():
        path = path / "config.json"
    if path.suffix != ".json":
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _not_planned(f"{path} cannot be read ({type(error).__name__}: {error})") from error
    return _shape_of(str(path), values)


def _shape_of(path: str, values: Any) -> Shape:
    if not isinstance(values, Mapping):
        raise _not_planned(f"{path} is not a model config")
    family = values.get("model_type")
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise _not_planned(f"{path} has model_type {family!r}, expected one of {known}")
    heads = _size(path, values, "num_attention_heads")
    width, head = _size(path, values, "hidden_size"), _size(path, values, "head_dim", 0)
    kv_heads = _size(path, values, "num_key_value_heads", heads)
    if heads % kv_heads or (not head and width % heads):
        raise _not_planned(
            f"{path} has {heads} heads, {kv_heads} key-value heads and width {width}, which do not "
            "divide evenly"
        )
    layers, hidden, vocabulary = (
        _size(path, values, key) for key in ("num_hidden_layers", "intermediate_size", "vocab_size")
    )
    return Shape(
        *(width, layers, heads, kv_heads, hidden, vocabulary, head),
        is_tied=bool(values.get("tie_word_embeddings", False)),
        bias=bool(values.get("attention_bias", family == "qwen2")),
        head_norm=family == "qwen3",
    )


def _size(
    path: str,
    values: Mapping[str, Any],
    key: str,
    default: int | None = None,
) -> int:
    found = values.get(key)
    if found is None and default is not None:
        return default
    if type(found) is not int or not 0 < found <= 1 << 32:
        raise _not_planned(f"{path} has {key} {found!r}, expected a number above 0")
    return found


def _not_planned(what: str) -> ValueError:
    return ValueError(f"{what}; pass a function that creates the model: package.module:name")


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        head, width = shape.head_width, shape.width
        self.head = head
        self.q_proj = nn.Linear(width, shape.heads * head, bias=shape.bias)
        self.k_proj = nn.Linear(width, shape.kv_heads * head, bias=shape.bias)
        self.v_proj = nn.Linear(width, shape.kv_heads * head, bias=shape.bias)
        self.o_proj = nn.Linear(shape.heads * head, width, bias=False)
        self.q_norm = nn.RMSNorm(head) if shape.head_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head) if shape.head_norm else nn.Identity()

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (-1, self.head))
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = _rotated(self.q_norm(query).transpose(1, 2), cosine, sine)
        key = _rotated(self.k_norm(key).transpose(1, 2), cosine, sine)
        mixed = F.scaled_dot_product_attention(
            query, key, value.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        made: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return made


def _rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return made


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine)
        made: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return made


class Decoder(nn.Module):
    """A decoder that returns its next-token loss, from token ids ``[sequences, tokens]``."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.is_tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cosine = x.new_zeros(tokens.shape[1], self.head_width)
        sine = torch.zeros_like(cosine)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        logits = self.lm_head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())

"""The model that host measurements run: identical small blocks whose kernels cost next to nothing.

Owns the shape of the model and how each library shards it. Knows nothing of counting.

A block holds nine parameters, like a decoder block of today: two norms, q, k, v, o, and a gated
feed-forward of three matrices. The root holds an input projection and a head, so that every block
sees an input that requires grad and no block is special.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

WIDTH = 16
TOKENS = 4


class Block(nn.Module):
    """One attention head and a gated feed-forward: `[TOKENS, WIDTH]` in, the same out."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feed_forward_norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.w1 = nn.Linear(WIDTH, WIDTH, bias=False)
        self.w2 = nn.Linear(WIDTH, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.attention_norm(x)
        weights = torch.softmax(self.q(h) @ self.k(h).t(), dim=-1)
        x = x + self.o(weights @ self.v(h))
        h = self.feed_forward_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Stack(nn.Module):
    """`depth` blocks between an input projection and a head."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(library: str, depth: int, mesh: DeviceMesh, *, bf16: bool) -> Stack:
    """Build the model of `depth` blocks as one of `LIBRARIES` runs it.

    `bf16` means bf16 parameters and fp32 reduction; the plain model is then simply in bf16.
    """
    torch.manual_seed(0)
    model = Stack(depth)
    if library == "plain":
        return model.to(torch.bfloat16) if bf16 else model
    if library == "fsdp2":
        import fsdp2

        return _shard(model, mesh, fsdp2, bf16=bf16)
    from torch.distributed import fsdp

    _shard(model, mesh, fsdp, bf16=bf16)
    if library == "torch tuned":
        _tune(model)
    return model


LIBRARIES = ("plain", "torch", "torch tuned", "fsdp2")


def _shard(model: Stack, mesh: DeviceMesh, library: Any, *, bf16: bool) -> Stack:
    kwargs: dict[str, Any] = {"mesh": mesh}
    if bf16:
        kwargs["mp_policy"] = library.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
    for block in model.blocks:
        library.fully_shard(block, **kwargs)
    library.fully_shard(model, **kwargs)
    return model


def _tune(model: Stack) -> None:
    """Give torch's FSDP2 prefetch lists one block deep and async all-gathers (a private switch)."""
    blocks: list[Any] = list(model.blocks)
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    root: Any = model
    root._set_unshard_async_op(True)


def make_step(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Return one training step without its optimizer: zero_grad to None, forward, backward."""
    x = torch.ones(TOKENS, WIDTH, dtype=dtype)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    return step

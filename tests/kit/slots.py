"""A model that trains slot by slot on the ranks, and a plain one that does so in one process.

The plain one knows nothing of the package but how random numbers of a slot are seeded: it adds up
gradients in a tree of its own, and takes norms with `math.fsum`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2._core.base.slot_clock import SlotClock
from tests.kit.parity import bits, whole

SLOTS, VOCAB, WIDTH = 8, 29, 13


class Block(nn.Module):
    """Odd shapes, a scalar, dropout, and a layer that only some slots use."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH + 2)
        self.down = nn.Linear(3 * WIDTH + 2, WIDTH)
        self.sometimes = nn.Linear(WIDTH, 1)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.recomputes = recomputes

    def forward(self, x: Tensor, uses_all: bool) -> Tensor:
        if self.recomputes:
            found: Tensor = checkpoint(self.inner, x, uses_all, use_reentrant=False)
            return found
        return self.inner(x, uses_all)

    def inner(self, x: Tensor, uses_all: bool) -> Tensor:
        hidden = F.dropout(F.gelu(self.up(self.norm(x))), 0.1)
        x = x + self.scale * self.down(hidden)
        return x * self.sometimes(x).sigmoid() if uses_all else x


class Net(nn.Module):
    def __init__(self, recomputes: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block(recomputes) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, bool(tokens[0, 0] % 2))
        return self.head(x)


def batch_of(step: int) -> Tensor:
    """Return the tokens of all slots of a step, `[SLOTS, 2, 6]`."""
    return torch.randint(0, VOCAB, (SLOTS, 2, 6), generator=torch.Generator().manual_seed(step))


def loss_of(model: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def tree(values: list[Any]) -> Any:
    """Add up in a binary tree; a missing gradient beside one that is there is a zero."""
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    left, right = tree(values[:half]), tree(values[half:])
    if left is None or right is None:
        kept = right if left is None else left
        return None if kept is None else kept + torch.zeros((), dtype=kept.dtype)
    return left + right


class Plain:
    """What every number of ranks has to repeat."""

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[Any], Optimizer],
        dtype: torch.dtype = torch.float32,
        node: torch.dtype = torch.float32,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = make_optimizer(self.model.parameters())
        self.dtype, self.node = dtype, node
        self.clock = SlotClock(SLOTS, range(SLOTS), 0, torch.device("cpu"))
        self.step = 0

    def train(self, max_norm: float) -> tuple[list[Tensor], Tensor]:
        """Run a step; return the losses of all slots, and the norm."""
        computes = self.model if self.dtype is torch.float32 else copy.deepcopy(self.model)
        if self.dtype is not torch.float32:
            computes.to(self.dtype)
        losses, found = [], []
        for tokens in batch_of(self.step):
            self.clock.begin_forward(was_dropped=False)
            loss = loss_of(computes, tokens)
            self.clock.end_forward()
            loss.backward()
            self.clock.is_done = True
            losses.append(loss.detach())
            grads = [p.grad for p in computes.parameters()]
            found.append([None if g is None else g.to(self.node) for g in grads])
            computes.zero_grad()
        for param, grads in zip(self.model.parameters(), zip(*found, strict=True), strict=True):
            total = tree(list(grads))
            param.grad = None if total is None else total.float() / SLOTS
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        numbers = torch.cat([g.reshape(-1) for g in grads]).double().square().tolist()
        norm = torch.tensor(math.sqrt(math.fsum(numbers)), dtype=torch.float32)
        for grad in grads:
            grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return losses, norm


def train(
    model: nn.Module, optimizer: Optimizer, mine: range, step: int, max_norm: float
) -> tuple[list[Tensor], Tensor]:
    """Run a step of a sharded model; return the losses of this rank's slots, and the norm."""
    losses = []
    tokens = batch_of(step)
    for slot in mine:
        loss = loss_of(model, tokens[slot])
        loss.backward()
        losses.append(loss.detach())
    norm = fsdp2.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return losses, norm


def assert_same_bits(found: Tensor, expected: Tensor, what: str) -> None:
    assert torch.equal(bits(found), bits(expected)), f"{what}: {found} is not {expected}"


def assert_same_step(
    found: tuple[list[Tensor], Tensor], expected: tuple[list[Tensor], Tensor], mine: range
) -> None:
    for slot, loss in zip(mine, found[0], strict=True):
        assert_same_bits(loss, expected[0][slot], f"the loss of slot {slot}")
    assert_same_bits(found[1], expected[1], "the norm")


def assert_same_model(model: nn.Module, plain: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same_bits(whole(param), other, name)


def adamw(params: Any, **options: Any) -> Optimizer:
    return AdamW(params, lr=1e-2, **options)

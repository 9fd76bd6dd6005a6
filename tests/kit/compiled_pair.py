"""`CompiledPair`: one sharded model compiled whole, its twin eager, and what users see of the two.

Only public names are used, so that these comparisons outlive any way to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

import fsdp2
from tests.kit.in_turn import advance
from tests.kit.models import Batch, Case, loss_of, seeded
from tests.kit.parity import ROWS, assert_same, assert_sharded, global_mean, names_of, shard

RTOL = {"aot_eager": 1e-6, "inductor": 5e-4}
RTOL_BF16 = 2e-2  # where the compiler rounds to bf16 in other places
EPS_BF16 = 0.1  # gradients that cancel are rounding then, which AdamW would make steps of
LEARNING_RATE = 1e-3
STEPS, MANY_STEPS = 8, 20  # a step of two models takes a hundredth of what compiling takes
LEAST_SCALE = 10 * LEARNING_RATE  # what ten steps move: some gradients are sums that cancel


def graphs_made() -> int:
    """Return how many graphs were compiled in this process."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def adamw(parameters: list[nn.Parameter], eps: float) -> torch.optim.Optimizer:
    """Make AdamW with an epsilon above rounding: it divides by gradients, those that cancel too."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.01, eps=eps)


def loss_of_output(model: nn.Module, batch: Batch) -> Tensor:
    return loss_of(model(*batch.args, **batch.kwargs))


class CompiledPair:
    """Two sharded models of equal values, one compiled, that train on the same batches."""

    def __init__(
        self,
        case: Case,
        *,
        backend: str = "aot_eager",
        loss: Callable[[nn.Module, Batch], Tensor] = loss_of_output,
        prepare: Callable[[nn.Module], Any] = lambda model: None,
        finish: Callable[[nn.Module], Any] = lambda model: None,
        batches: Sequence[Batch] = (),
        part: tuple[int, int] | None = None,
        rtol: float | None = None,
        eps: float = 1e-4,
        fullgraph: bool = True,
        compiling: dict[str, Any] | None = None,
        **sharding: Any,
    ) -> None:
        self.loss, self.rtol = loss, RTOL[backend] if rtol is None else rtol
        self.models = []
        for _ in range(2):
            model = seeded(case.build)
            prepare(model)
            shard(model, case, **sharding)
            finish(model)
            self.models.append(model)
        self.model, self.eager = self.models
        options = {"backend": backend, "fullgraph": fullgraph, **(compiling or {})}
        self.compiled = fsdp2.compile(self.model, **options)
        self.optimizers = [
            adamw([p for p in m.parameters() if p.requires_grad], eps)
            for m in (self.compiled, self.eager)
        ]
        index, count = (dist.get_rank(), dist.get_world_size()) if part is None else part
        self.batches = [b.chunk(index, count) for b in batches or [case.batch(ROWS)]]
        self.fullgraph = fullgraph
        self.scale = 0.0  # of the losses: rounding does not get less where terms cancel

    def step(self, batch: Batch) -> Tensor:
        """Run one step of both; return the mean of the ranks' losses."""
        losses = []
        for model in (self.compiled, self.eager):
            loss = self.loss(model, batch)
            loss.backward()
            losses.append(global_mean(loss))  # every rank compares the same, and none fails alone
        if not self.scale:
            self.check()  # gradients, of which AdamW forgets the scale
        advance(*self.optimizers)
        self.scale = max(self.scale, losses[1].abs().item())
        assert_same(losses[0], losses[1], "loss", self.rtol, self.scale)
        return losses[0]

    def train(self, steps: int = STEPS, warm_up: int = 1) -> None:
        """Train both, and compare parameters; nothing may be compiled after the first steps."""
        start, made = graphs_made(), 0
        losses: list[list[Tensor]] = [[] for _ in self.batches]
        for index in range(steps):
            which = index % len(self.batches)
            losses[which].append(self.step(self.batches[which]))
            if index < warm_up:
                made = graphs_made() - start
            assert graphs_made() - start == made, f"step {index} compiled again"
        assert made == 1 if self.fullgraph else made > 0, f"{made} graphs"
        for seen in losses:
            assert seen[-1] < seen[0], f"the loss went from {seen[0]} to {seen[-1]}"
        self.check()

    def check(self) -> None:
        """Compare what this rank holds of all parameters, and their gradients if there are any."""
        assert_sharded(self.model)
        expected = names_of(self.eager)
        grads = [p.grad.to_local() for p in expected.values() if p.grad is not None]
        largest = max((grad.abs().max().item() for grad in grads if grad.numel()), default=0.0)
        for name, parameter in names_of(self.model).items():
            for what, ours, theirs, least in (
                (name, parameter, expected[name], LEAST_SCALE),
                (f"{name}.grad", parameter.grad, expected[name].grad, largest / 5),
            ):
                assert (ours is None) == (theirs is None), f"only one has {what}"
                if ours is not None:
                    assert_same(ours.to_local(), theirs.to_local(), what, self.rtol, least)

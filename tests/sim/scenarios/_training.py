"""What scenarios share: a small model, batches made before the loop, and plain training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from tests.kit.models import CASES, WIDTH, Case, each_block, loss_of, stack
from tests.sim._world import UNSTEADY, Values, World

STACK = stack()
ROWS = 3  # of a rank's batch
LR = 0.05
SGD = functools.partial(torch.optim.SGD, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, eps=1e-3)  # so that rounding is not blown up


def learn(model: Any, x: Tensor) -> None:
    """Run one forward and its backward."""
    loss_of(model(x)).backward()


@dataclass
class Training:
    """A sharded model, its optimizer, and what it is trained on."""

    world: World
    model: Any
    optim: Any
    inputs: list[Tensor]
    count: int

    def steps(self, unsteady: int = UNSTEADY) -> Iterator[int]:
        return self.world.steps(self.count, unsteady)

    def update(self) -> None:
        self.optim.step()
        self.optim.zero_grad()

    def values(self, **more: Tensor) -> Values:
        return self.world.values(self.model, **more)


def training(
    world: World,
    make: Callable[[], nn.Module] = STACK,
    *,
    units: Callable[[nn.Module], Any] = each_block,
    prepare: Callable[[Any], Any] = lambda model: None,
    set_up: Callable[[Any], Any] = lambda model: None,
    steps: int = 4,
    microbatches: int = 1,
    optimizer: Callable[..., Any] = SGD,
    batch: tuple[int, ...] = (ROWS, WIDTH),
    **kwargs: Any,
) -> Training:
    """Make all that is needed; ``prepare`` comes before the model is sharded, ``set_up`` after."""
    model = world.build(make)
    prepare(model)
    world.shard(model, units(model), **kwargs)
    set_up(model)
    optim = optimizer([p for p in model.parameters() if p.requires_grad], lr=LR)
    inputs = [world.tensor(*batch, seed=step) for step in range(steps * microbatches)]
    return Training(world, model, optim, inputs, steps)


def train(
    world: World,
    make: Callable[[], nn.Module] = STACK,
    *,
    microbatches: int = 1,
    each: Callable[[Any, Tensor], Any] = learn,
    update: Callable[[Training], Any] = Training.update,
    unsteady: int = UNSTEADY,
    **kwargs: Any,
) -> Values:
    """Train a model the plain way."""
    run = training(world, make, microbatches=microbatches, **kwargs)
    for step in run.steps(unsteady):
        for index in range(microbatches):
            if microbatches > 1:
                run.model.set_requires_gradient_sync(index == microbatches - 1)
            each(run.model, run.inputs[step * microbatches + index])
        update(run)
    return run.values()


def train_case(world: World, name: str, steps: int = 4, **kwargs: Any) -> Values:
    """Train one of `tests.kit.models`, whatever its inputs are."""
    case: Case = CASES[name]
    model = world.build(case.build)
    world.shard(model, case.units(model), **kwargs)
    optim = SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    batches = [case.batch(ROWS) for _ in range(steps)]
    for step in world.steps(steps):
        batch = batches[step]
        loss_of(model(*batch.args, **batch.kwargs)).backward()
        optim.step()
        optim.zero_grad()
    return world.values(model)

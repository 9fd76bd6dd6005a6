"""What scenarios share: a small model, batches made before the loop, and plain training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from tests.kit.in_turn import advance
from tests.kit.models import CASES, WIDTH, Case, each_block, loss_of, stack
from tests.sim._world import TOLERANCE, UNSTEADY, Program, Values, World, scenario

STACK = stack()
ROWS = 3  # of a rank's batch
LR = 0.05
SGD = functools.partial(torch.optim.SGD, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, eps=1e-3)  # so that rounding is not blown up


def learn(model: Any, x: Tensor) -> None:
    """Run one forward and its backward."""
    loss_of(model(x)).backward()


def sets(**values: Any) -> Callable[[Any], None]:
    """Return what gives a model settings: ``sets(memory="low")`` calls ``set_memory("low")``."""

    def set_up(model: Any) -> None:
        for name, value in values.items():
            getattr(model, f"set_{name}")(value)

    return set_up


@dataclass
class Training:
    """A sharded model, its optimizer, and what it is trained on."""

    world: World
    model: Any
    optim: Any
    inputs: list[Tensor]
    count: int
    microbatches: int

    def steps(self, unsteady: int = UNSTEADY) -> Iterator[int]:
        return self.world.steps(self.count, unsteady)

    def learn(self, index: int) -> None:
        learn(self.model, self.inputs[index])

    def update(self) -> None:
        self.optim.step()
        self.optim.zero_grad()

    def train(self, index: int) -> None:
        self.learn(index)
        self.update()

    def accumulate(self, step: int, setting: str = "") -> None:
        """Train on the microbatches of a step; ``setting`` is true for the last of them alone."""
        for index in range(self.microbatches):
            if setting:
                getattr(self.model, setting)(index == self.microbatches - 1)
            self.learn(step * self.microbatches + index)
        self.update()

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
    return Training(world, model, optim, inputs, steps, microbatches)


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
        advance(optim)
    return world.values(model)


def each_step(
    ranks: int = 2,
    *,
    slow: bool = False,
    may_wait: str = "",
    tolerance: float = TOLERANCE,
    unsteady: int = UNSTEADY,
    **kwargs: Any,
) -> Callable[[Callable[[Training, int], Mapping[str, Tensor] | None]], Program]:
    """Make a scenario of what happens in a step; what it returns is compared as well."""

    def made(do: Callable[[Training, int], Mapping[str, Tensor] | None]) -> Program:
        @functools.wraps(do)
        def program(world: World) -> Values:
            run, seen = training(world, **kwargs), {}
            for step in run.steps(unsteady):
                seen |= {f"{name} {step}": found for name, found in (do(run, step) or {}).items()}
            return run.values(**seen)

        return scenario(ranks, slow=slow, may_wait=may_wait, tolerance=tolerance)(program)

    return made


def trained(
    name: str,
    ranks: int = 2,
    *,
    case: str = "",
    slow: bool = False,
    may_wait: str = "",
    tolerance: float = TOLERANCE,
    **kwargs: Any,
) -> None:
    """Put a scenario into the list that trains the plain way: a stack, or one of the cases."""

    def program(world: World) -> Values:
        return train_case(world, case, **kwargs) if case else train(world, **kwargs)

    program.__name__ = name
    scenario(ranks, slow=slow, may_wait=may_wait, tolerance=tolerance)(program)

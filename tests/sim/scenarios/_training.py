"""The scenarios: what users do with sharded models, each on the simulated device.

Every scenario trains a few steps and returns its parameters. Steps from the third on are steady:
there the host may not wait for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy
from tests._models import WIDTH, each_block, loss_of, stack
from tests.sim._world import Values, World, scenario

STACK = stack()
ROWS = 3  # of a rank's batch
LR = 0.05
SGD = functools.partial(torch.optim.SGD, momentum=0.9)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def train(
    world: World,
    make: Callable[[], nn.Module] = STACK,
    *,
    units: Callable[[nn.Module], Any] = each_block,
    prepare: Callable[[nn.Module], Any] = lambda model: None,
    set_up: Callable[[nn.Module], Any] = lambda model: None,
    steps: int = 4,
    microbatches: int = 1,
    optimizer: Callable[..., torch.optim.Optimizer] = SGD,
    **kwargs: Any,
) -> Values:
    """Train a model the plain way; ``prepare`` comes before it is sharded, ``set_up`` after."""
    model = world.build(make)
    prepare(model)
    world.shard(model, units(model), **kwargs)
    set_up(model)
    optim = optimizer(model.parameters(), lr=LR)
    inputs = [world.tensor(ROWS, WIDTH, seed=step) for step in range(steps * microbatches)]
    for step in world.steps(steps):
        for index in range(microbatches):
            model.set_requires_gradient_sync(index == microbatches - 1)  # type: ignore[operator]
            loss_of(model(inputs[step * microbatches + index])).backward()
        optim.step()
        optim.zero_grad()
    return world.values(model)


# Precision.


@scenario(2)
def fp32(world: World) -> Values:
    return train(world)


@scenario(2, tolerance=2e-2)
def bf16_reduced_in_fp32(world: World) -> Values:
    return train(world, mp_policy=BF16)


@scenario(3)
def uneven_ranks(world: World) -> Values:
    return train(world)


@scenario(1)
def one_rank(world: World) -> Values:
    return train(world)


# Meshes.


@scenario(4)
def replicas(world: World) -> Values:
    return train(world, mesh=world.mesh(2, 2))


@scenario(4)
def replicas_summed_late(world: World) -> Values:
    """HSDP whose all-reduce comes with the last microbatch only."""
    model: Any = world.build(STACK)
    world.shard(model, each_block(model), mesh=world.mesh(2, 2))
    optim = SGD(model.parameters(), lr=LR)
    inputs = [world.tensor(ROWS, WIDTH, seed=step) for step in range(12)]
    for step in world.steps(4):
        for index in range(3):
            model.set_requires_all_reduce(index == 2)
            loss_of(model(inputs[3 * step + index])).backward()
        optim.step()
        optim.zero_grad()
    return world.values(model)


@scenario(2)
def accumulated(world: World) -> Values:
    return train(world, microbatches=3)


# Memory.


@scenario(2, may_wait="the optimizer runs on the host, and needs the gradients there")
def offloaded(world: World) -> Values:
    """Shards live in pinned memory of the host."""
    return train(world, offload_policy=CPUOffloadPolicy())


@scenario(2)
def memory_low(world: World) -> Values:
    return train(world, set_up=lambda model: model.set_memory("low"))

"""Ranks of a device that go different ways: each gets an error, though no host waits to look."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from fsdp2 import StateError
from tests.kit import sim
from tests.kit.in_turn import advance
from tests.kit.models import WIDTH, Stack, each_block, loss_of
from tests.kit.pool import ranks
from tests.sim._world import World

STEPS = 12
GOES_ASTRAY = 4  # the step in which the last rank does something else
LATE = 4  # steps after which every rank must know: a step late, and one more for a slow device
sim_ranks = functools.partial(ranks, device="sim", limit_s=25.0)


class Branching(Stack):
    """A stack whose blocks run in the order that it is told."""

    order: tuple[int, ...] = (0, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index in self.order:
            x = self.blocks[index](x)
        return self.out(x)


def skip(model: Any) -> None:
    model.order = (0, 2)


def swap(model: Any) -> None:
    model.order = (1, 0, 2)


def freeze(model: Any) -> None:
    model.blocks[1].up.weight.requires_grad_(False)


def run_twice(model: Any) -> None:
    with torch.no_grad():
        model(torch.zeros(1, WIDTH))


ASTRAY: dict[str, Callable[[Any], None]] = {
    function.__name__: function for function in (skip, swap, freeze, run_twice)
}


def train(world: World, model: nn.Module, go_astray: Callable[[Any], None]) -> tuple[int, str]:
    """Train until an error; return in which step it came, and what it says."""
    optim = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = [world.tensor(3, WIDTH, seed=step) for step in range(STEPS)]
    for step in range(STEPS):
        try:
            if step == GOES_ASTRAY and world.rank == world.size - 1:
                go_astray(model)
            loss_of(model(inputs[step])).backward()
        except StateError as error:
            return step, str(error)
        advance(optim)
    return STEPS, "no error"


def world_of(rank: int, world_size: int) -> World:
    return World("sim", rank, world_size)


@pytest.mark.parametrize("way", ASTRAY)
@sim_ranks(2, 3)
def test_each_rank_gets_an_error(rank: int, world_size: int, way: str) -> None:
    world = world_of(rank, world_size)
    model = world.build(Branching)
    world.shard(model, each_block(model))
    begun = time.monotonic()
    step, said = train(world, model, ASTRAY[way])
    assert GOES_ASTRAY <= step <= GOES_ASTRAY + LATE, said
    assert "rank" in said, said
    assert "same units in the same order" in said or "differ" in said, said
    assert time.monotonic() - begun < 40
    assert train(world, model, lambda model: None)[0] <= 1  # for good


@sim_ranks(4)
def test_replicas_get_it_too(rank: int, world_size: int) -> None:
    world = world_of(rank, world_size)
    model = world.build(Branching)
    world.shard(model, each_block(model), mesh=world.mesh(2, 2))
    step, said = train(world, model, skip)
    assert GOES_ASTRAY <= step <= GOES_ASTRAY + LATE, said


@pytest.mark.parametrize("way", ASTRAY)
@sim_ranks(4)
def test_groups_of_some_ranks_get_it_too(rank: int, world_size: int, way: str) -> None:
    """Neighbours gather among themselves, and reductions have a process group of their own."""
    world = world_of(rank, world_size)
    model: Any = world.build(Branching)
    world.shard(model, each_block(model), reshard_after_forward=2)
    model.set_separate_reduce_scatter_group()
    step, said = train(world, model, ASTRAY[way])
    assert GOES_ASTRAY <= step <= GOES_ASTRAY + LATE, said


@sim_ranks(2)
def test_all_ranks_may_change_their_way(rank: int, world_size: int) -> None:
    """What all do alike is no error, and costs a wait where it is new alone."""
    world = world_of(rank, world_size)
    model: Any = world.build(Branching)
    world.shard(model, each_block(model))
    inputs = [world.tensor(3, WIDTH, seed=step) for step in range(20)]
    for step in range(20):
        model.order = (0, 2) if step in (4, 5) else (0, 1, 2)
        sim.load().forget()
        loss_of(model(inputs[step])).backward()
    assert sim.waits() == []

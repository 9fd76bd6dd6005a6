"""Parameters of every shape: uneven, empty, of no dims, permuted, tied, frozen, unused."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import fsdp2
from tests.kit.in_turn import advance
from tests.kit.models import CASES, WIDTH, loss_of
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import (
    LR,
    SGD,
    Training,
    each_step,
    learn,
    train,
    train_case,
    trained,
)
from tests.sim.scenarios.control import WHO_HAS_WHAT

# Three ranks, and parameters of one row or one element: two shards are empty.
trained("one_row", 3, case="one_row")
trained("few_rows", 3, case="few_rows", slow=True)


class NoRows(nn.Module):
    """A parameter without elements, alone in its unit, and another one beside some."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Module(), nn.Linear(WIDTH, WIDTH)])
        self.blocks[0].nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.blocks[0].forward = lambda x: x + self.blocks[0].nothing.sum()
        self.more = nn.Parameter(torch.empty(0, 3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x) + self.more.sum()


trained("no_rows", make=NoRows)
trained("scalars", case="scalars")
# Transposed, permuted and channels-last parameters, whose gradients are dense.
trained("not_contiguous_on_one_rank", 1, case="non_contiguous")
trained("not_contiguous", case="non_contiguous")


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Conv2d(3 if i == 0 else 5, 5, 3, padding=1) for i in range(3)
        )
        self.transposed = nn.Parameter(torch.randn(4, 5).t())

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(memory_format=torch.channels_last)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.mean((2, 3)) @ self.transposed


def convolutions(world: World, channels_last: bool, **kwargs: Any) -> Values:
    def prepare(model: nn.Module) -> None:
        if channels_last:
            model.to(memory_format=torch.channels_last)

    return train(world, Convolutions, prepare=prepare, batch=(2, 3, 6, 6), **kwargs)


@scenario(1)
def convolutions_on_one_rank(world: World) -> Values:
    return convolutions(world, False)


@scenario(1)
def channels_last_on_one_rank(world: World) -> Values:
    return convolutions(world, True)


@scenario(2)
def channels_last(world: World) -> Values:
    return convolutions(world, True)


@scenario(2)
def channels_last_on_replicas(world: World) -> Values:
    """Shards of size one: the bytes of a gradient are copied as they lie."""
    return convolutions(world, True, mesh=world.mesh(2, 1))


trained("tied_within_a_unit", case="tied_within", slow=True)
trained("tied_over_units", case="tied_blocks", slow=True)
trained("tied_embedding", case="tied_lm")
trained("block_called_twice", case="shared_block", slow=True)
trained("partly_frozen", case="partly_frozen")
trained("frozen_units", case="all_frozen_blocks", slow=True)


@each_step(unsteady=99, steps=5)  # a change makes a new plan, with numbers from the host
def frozen_later(run: Training, step: int) -> None:
    """Parameters are frozen and thawed between steps."""
    run.model.blocks[0].requires_grad_(step % 2 == 0)
    run.train(step)


trained("unused", case="unused_parts", may_wait=WHO_HAS_WHAT)


@scenario(2)
def unused_that_get_zeros(world: World) -> Values:
    case = CASES["unused_parts"]
    model: Any = world.build(case.build)
    world.shard(model, case.units(model))
    model.set_reduce_scatter_unused_params(True)
    optim = SGD(model.parameters(), lr=LR)
    batches = [world.tensor(3, WIDTH, seed=step) for step in range(4)]
    for step in world.steps(4):
        loss_of(model(batches[step])).backward()
        advance(optim)
    return world.values(model)


@scenario(4, may_wait=WHO_HAS_WHAT, slow=True)
def unused_and_summed_late(world: World) -> Values:
    """Partial sums of replicas in which a gradient misses."""
    case = CASES["unused_parts"]
    model: Any = world.build(case.build)
    world.shard(model, case.units(model), mesh=world.mesh(2, 2))
    optim = SGD(model.parameters(), lr=LR)
    batches = [world.tensor(3, WIDTH, seed=step) for step in range(8)]
    for step in world.steps(4):
        for index in range(2):
            model.set_requires_all_reduce(index == 1)
            learn(model, batches[2 * step + index])
        advance(optim)
    return world.values(model)


trained("embeddings", case="untied_lm", slow=True)
trained("auxiliary_outputs", case="aux_output", slow=True)
trained("containers", case="containers", slow=True)
trained("keyword_arguments", case="kwargs", slow=True)
trained("nested_units", case="nested_units", slow=True)
trained("one_group_of_many", case="one_group")
trained("sequential", case="sequential", slow=True)


@scenario(3, tolerance=5e-5)  # absolute values near zero: rounding grows fourfold a step
def complex_parameters(world: World) -> Values:
    class Turn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.randn(WIDTH, 5, dtype=torch.complex64))
            self.back = nn.Linear(5, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.back((x.to(torch.complex64) @ self.turn).abs())

    make = lambda: nn.Sequential(Turn(), Turn())  # noqa: E731
    return train(world, make, units=list)


def matrices_lie_whole(param: nn.Parameter) -> fsdp2.Whole | None:
    return fsdp2.Whole() if param.dim() > 1 else None


# Ranks send pieces of different lengths; matrices are used where they land.
trained("owned", 3, case="stack", shard_placement_fn=matrices_lie_whole)
# Owned parameters whose elements lie in another order are copied once they are there.
trained("owned_in_any_order", case="non_contiguous", shard_placement_fn=matrices_lie_whole)


@scenario(4, slow=True)
def owned_and_replicas(world: World) -> Values:
    mesh = world.mesh(2, 2)
    return train_case(world, "stack", mesh=mesh, shard_placement_fn=matrices_lie_whole)


@scenario(2, slow=True, may_wait="gradients are copied to the host, which reads them there")
def owned_offloaded(world: World) -> Values:
    offload = fsdp2.CPUOffloadPolicy()
    return train_case(world, "stack", offload_policy=offload, shard_placement_fn=matrices_lie_whole)


def blocks_of_four(param: nn.Parameter) -> fsdp2.Aligned | None:
    return fsdp2.Aligned(0, multiple_of=4) if param.dim() else None


# Pieces land in memory of their own, and rows of each parameter are copied from several.
trained("aligned", 3, case="stack", shard_placement_fn=blocks_of_four)


@scenario(2, slow=True, tolerance=8e-2)
def aligned_in_codes(world: World) -> Values:
    policy = fsdp2.MixedPrecisionPolicy(gather_dtype=torch.float8_e4m3fn)
    return train_case(world, "stack", mp_policy=policy, shard_placement_fn=blocks_of_four)

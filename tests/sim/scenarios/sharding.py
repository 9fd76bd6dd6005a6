"""What is sharded at all: whole parameters refreshed after a step, beside the next forward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import train
from tests.sim.scenarios.precision import COARSE
from tests.sim.scenarios.streams import optimizer_elsewhere

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@scenario(2)
def whole_until_the_next_step(world: World) -> Values:
    """The gather after a step reads what the optimizer wrote, and writes where compute has read."""
    return train(world, shard="gradients", microbatches=3)


@scenario(2)
def whole_with_whole_gradients(world: World) -> Values:
    return train(world, shard="optimizer", microbatches=3)


@scenario(2, slow=True, tolerance=COARSE)
def whole_in_bf16_with_local_steps(world: World) -> Values:
    make = partial(fsdp2.optim.local, torch.optim.SGD)
    return train(world, shard="gradients", microbatches=2, mp_policy=BF16, optimizer=make)


@scenario(2)
def whole_without_copies(world: World) -> Values:
    """Gathers land where whole parameters are used: there compute of the last step may run."""

    def set_up(model: Any) -> None:
        model.set_copy_free_min_bytes(1)

    return train(world, shard="gradients", microbatches=2, set_up=set_up)


@scenario(2)
def whole_beside_an_optimizer(world: World) -> Values:
    """Gathers wait for the optimizer's event alone, and for compute before they take its memory."""
    return optimizer_elsewhere(world, own=True, shard="gradients")


@scenario(4, slow=True)
def whole_with_replicas(world: World) -> Values:
    return train(world, shard="gradients", microbatches=3, mesh=world.mesh(2, 2))


OUTER = {"shard_outer": "optimizer"}


@scenario(4)
def states_over_all_ranks(world: World) -> Values:
    """Gradients go over two axes; parameters stay sharded over the inner one between backwards."""
    return train(world, microbatches=3, mesh=world.mesh(2, 2), **OUTER)


@scenario(4, slow=True)
def states_over_all_ranks_with_few_inputs(world: World) -> Values:
    """Inputs are given back early: what was scattered inside lies there while it goes on."""

    def few(model: Any) -> None:
        model.set_reduce_scatter_max_input_buffers(1)

    mesh = world.mesh(2, 2)
    return train(world, mesh=mesh, set_up=few, **OUTER)


@scenario(4, slow=True)
def states_over_all_ranks_without_copies(world: World) -> Values:
    def set_up(model: Any) -> None:
        model.set_copy_free_min_bytes(1)

    return train(world, microbatches=2, mesh=world.mesh(2, 2), set_up=set_up, **OUTER)


@scenario(4, slow=True, tolerance=COARSE)
def states_over_all_ranks_in_bf16(world: World) -> Values:
    return train(world, microbatches=2, mesh=world.mesh(2, 2), mp_policy=BF16, **OUTER)


@scenario(4, slow=True)
def neighbours_keep_shards_between_backwards(world: World) -> Values:
    return train(world, microbatches=3, reshard_after_forward=2)

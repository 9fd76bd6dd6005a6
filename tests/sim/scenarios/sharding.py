"""What is sharded at all: whole parameters refreshed after a step, beside the next forward."""

from __future__ import annotations

from functools import partial

import torch

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import sets, train, trained
from tests.sim.scenarios.precision import COARSE
from tests.sim.scenarios.streams import optimizer_elsewhere

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# The gather after a step reads what the optimizer wrote, and writes where compute has read.
trained("whole_until_the_next_step", shard="gradients", microbatches=3)
trained("whole_with_whole_gradients", shard="optimizer", microbatches=3)


@scenario(2, slow=True, tolerance=COARSE)
def whole_in_bf16_with_local_steps(world: World) -> Values:
    make = partial(fsdp2.optim.local, torch.optim.SGD)
    return train(world, shard="gradients", microbatches=2, mp_policy=BF16, optimizer=make)


# Gathers land where whole parameters are used: there compute of the last step may run.
trained(
    "whole_without_copies", shard="gradients", microbatches=2, set_up=sets(copy_free_min_bytes=1)
)


@scenario(2)
def whole_beside_an_optimizer(world: World) -> Values:
    """Gathers wait for the optimizer's event alone, and for compute before they take its memory."""
    return optimizer_elsewhere(world, own=True, shard="gradients")


trained("whole_with_replicas", 4, slow=True, shard="gradients", microbatches=3, mesh=(2, 2))


OUTER = {"shard_outer": "optimizer"}


# Gradients go over two axes; parameters stay sharded over the inner one between backwards.
trained("states_over_all_ranks", 4, microbatches=3, mesh=(2, 2), **OUTER)


@scenario(4, slow=True)
def states_over_all_ranks_with_few_inputs(world: World) -> Values:
    """Inputs are given back early: what was scattered inside lies there while it goes on."""

    mesh = world.mesh(2, 2)
    return train(world, mesh=mesh, set_up=sets(reduce_scatter_max_input_buffers=1), **OUTER)


trained(
    "states_over_all_ranks_without_copies",
    4,
    slow=True,
    microbatches=2,
    mesh=(2, 2),
    set_up=sets(copy_free_min_bytes=1),
    **OUTER,
)
trained(
    "states_over_all_ranks_in_bf16",
    4,
    slow=True,
    tolerance=COARSE,
    microbatches=2,
    mesh=(2, 2),
    mp_policy=BF16,
    **OUTER,
)
trained(
    "neighbours_keep_shards_between_backwards",
    4,
    slow=True,
    microbatches=3,
    reshard_after_forward=2,
)

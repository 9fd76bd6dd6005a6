"""Units as stages of torch's pipelining."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from tests.behaviour.test_pipelining import MICROBATCHES, PER_MICROBATCH, build, mse
from tests.kit.in_turn import advance, shard_each
from tests.kit.meshes import shared_mesh
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import LR, SGD

SHAPES = "a stage tells the next one the shapes of what it sends, over the host"


def pipelined(
    world: World,
    schedule: Callable[..., Any],
    stages: int,
    set_up: Callable[[Any], Any] = lambda part: None,
    **kwargs: Any,
) -> Values:
    mesh = shared_mesh((2, world.size // 2), ("pp", "dp"))
    pp, dp = mesh["pp"], mesh["dp"]
    rank = pp.get_local_rank()
    whole: Any = world.build(lambda: build(stages))
    own = list(range(rank, stages, 2))
    parts = []
    for index in own:
        part = whole[index]
        shard_each(*part.layers, mesh=dp, reshard_after_forward=False)
        parts.append(world.shard(part, mesh=dp, reshard_after_forward=False, **kwargs))
        set_up(part)
    made = [
        PipelineStage(part, index, stages, world.device, group=pp.get_group())
        for index, part in zip(own, parts, strict=True)
    ]
    run = schedule(made[0] if stages == 2 else made, n_microbatches=MICROBATCHES, loss_fn=mse)
    optim = SGD([p for part in parts for p in part.parameters()], lr=LR)
    rows = MICROBATCHES * PER_MICROBATCH
    seeds = [10 * step + dp.get_local_rank() for step in range(6)]
    inputs = [world.tensor(rows, 13, seed=seed, by_rank=False) for seed in seeds]
    # That callers run many forwards before their backwards is known after a step: the second one
    # gathers less, and no rank could predict that.
    for step in world.steps(6, unsteady=4):
        args = (inputs[step],) if 0 in own else ()
        target = {"target": torch.zeros_like(inputs[step])} if stages - 1 in own else {}
        run.step(*args, **target)
        advance(optim)
    return world.values(*parts)


@scenario(4, slow=True)
def pipelined_one_stage_a_rank(world: World) -> Values:
    return pipelined(world, Schedule1F1B, 2)


@scenario(4, slow=True)
def pipelined_one_after_the_other(world: World) -> Values:
    return pipelined(world, ScheduleGPipe, 2)


@scenario(4, slow=True)
def pipelined_two_stages_a_rank(world: World) -> Values:
    return pipelined(world, ScheduleInterleaved1F1B, 4)


@scenario(4, slow=True)
def pipelined_without_bubbles(world: World) -> Values:
    return pipelined(world, ScheduleInterleavedZeroBubble, 4)

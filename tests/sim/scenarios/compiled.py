"""Models that are compiled whole, and units that are compiled one by one."""

from __future__ import annotations

from typing import Any

import torch

import fsdp2
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import learn, training

COMPILES = "the first calls of a compiled model run and trace it"


def compiled_whole(world: World, **kwargs: Any) -> Values:
    run = training(world)
    model = fsdp2.compile(run.model, backend="aot_eager", fullgraph=True, **kwargs)
    for step in run.steps():
        learn(model, run.inputs[step])
        run.update()
    torch._dynamo.reset()
    return run.values()


@scenario(2, slow=True)
def compiled(world: World) -> Values:
    return compiled_whole(world)


@scenario(2, slow=True)
def compiled_with_overlap(world: World) -> Values:
    return compiled_whole(world, overlap=True)


@scenario(2, slow=True)
def compiled_without_buckets(world: World) -> Values:
    return compiled_whole(world, bucket=False)


@scenario(2, slow=True)
def units_compiled(world: World) -> Values:
    """``module.compile()`` on blocks: collectives stay outside of the graphs."""
    run = training(world)
    for block in run.model.blocks:
        block.compile(backend="aot_eager")
    for step in run.steps():
        learn(run.model, run.inputs[step])
        run.update()
    torch._dynamo.reset()
    return run.values()

"""Models that are compiled whole, and units that are compiled one by one."""

from __future__ import annotations

from typing import Any

import torch

import fsdp2
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import learn, training


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
def compiled_without_overlap(world: World) -> Values:
    return compiled_whole(world, overlap=False)


@scenario(2, slow=True)
def compiled_microbatches(world: World) -> Values:
    """Gradients of backwards without sync wait, and are reduced with those of the last one."""
    run = training(world, microbatches=3)
    model = fsdp2.compile(run.model, backend="aot_eager", fullgraph=True)
    for step in run.steps():
        for place in range(3):
            run.model.set_requires_gradient_sync(place == 2)
            learn(model, run.inputs[step * 3 + place])
        run.update()
    torch._dynamo.reset()
    return run.values()


@scenario(2, slow=True, may_wait="gradients are copied to the host, which reads them there")
def compiled_offloaded(world: World) -> Values:
    """Shards are copied to the device in the graph, gradients back where they are delivered."""
    run = training(world, offload_policy=fsdp2.CPUOffloadPolicy())
    model = fsdp2.compile(run.model, backend="aot_eager", fullgraph=True)
    for step in run.steps():
        learn(model, run.inputs[step])
        run.update()
    torch._dynamo.reset()
    return run.values()


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
        run.train(step)
    torch._dynamo.reset()
    return run.values()

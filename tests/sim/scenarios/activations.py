"""Activations on the host: copies out beside forward, and back beside backward."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy
from fsdp2._core.api.activations import ATTRIBUTE
from tests.kit.models import Block, loss_of, stack
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import Training, each_step, learn, trained, training
from tests.sim.scenarios.pipelines import pipelined
from tests.sim.scenarios.streams import on_a_side_stream

BLOCKS = stack(count=4)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def offload(policy: Any = frozenset({Block}), **kwargs: Any) -> Callable[[Any], None]:
    """Return what keeps activations on the host, down to the smallest tensor."""

    def set_up(model: Any) -> None:
        assert fsdp2.offload_activations(model, policy, min_bytes=1, **kwargs)

    return set_up


def pinned(model: Any) -> int:
    """Return how many bytes of the host's memory a model's activations were given."""
    nbytes: int = vars(model)[ATTRIBUTE].memory.nbytes
    return nbytes


def offloaded(world: World, set_up: Callable[[Any], None], **kwargs: Any) -> Training:
    return training(world, BLOCKS, set_up=set_up, **kwargs)


def learning(world: World, set_up: Callable[[Any], None] | None = None, **kwargs: Any) -> Values:
    """Train; after the first step no more memory is pinned, and nothing stays away."""
    run = offloaded(world, set_up or offload(), steps=5, **kwargs)
    known = 0
    for step in run.steps():
        run.train(step)
        if world.is_simulated:
            assert pinned(run.model) > 0
            assert step == 0 or pinned(run.model) == known
            known = pinned(run.model)
            assert not list(vars(run.model)[ATTRIBUTE]._groups)
    return run.values()


@scenario(2)
def activations_on_the_host(world: World) -> Values:
    return learning(world)


@scenario(2)
def activations_of_every_block_on_the_host(world: World) -> Values:
    """Backward begins with what has to come back first."""
    return learning(world, offload(keep_last=0))


@scenario(2, slow=True)
def activations_of_modules_inside_each_other(world: World) -> Values:
    """What a linear layer saves comes back before the rest of its block does."""
    return learning(world, offload({Block, nn.Linear}, keep_last=3))


@each_step(slow=True, make=BLOCKS, prepare=offload())
def activations_offloaded_before_sharding(run: Training, step: int) -> None:
    run.train(step)


@scenario(2, slow=True)
def activations_in_small_memory(world: World) -> Values:
    def set_up(model: Any) -> None:
        model.set_memory("low")
        offload()(model)

    return learning(world, set_up)


@scenario(2, slow=True, tolerance=2e-2)
def activations_in_bf16(world: World) -> Values:
    return learning(world, mp_policy=BF16)


@scenario(2, slow=True, may_wait="the optimizer runs on the host")
def activations_and_shards_on_the_host(world: World) -> Values:
    return learning(world, offload_policy=CPUOffloadPolicy())


# Gradients add up without sync.
trained("activations_of_microbatches", make=BLOCKS, slow=True, set_up=offload(), microbatches=3)


@scenario(2, slow=True)
def activations_of_forwards_before_their_backwards(world: World) -> Values:
    """Three graphs live at a time, and backward goes through them in both orders."""
    run = offloaded(world, offload(), microbatches=3)
    orders = itertools.cycle(((0, 1, 2), (2, 1, 0), (1, 2, 0)))
    for step in run.steps():
        losses = [loss_of(run.model(run.inputs[3 * step + place])) for place in range(3)]
        for place in next(orders):
            losses[place].backward()
        run.update()
    return run.values()


@each_step(make=BLOCKS, set_up=offload())
def activations_of_a_graph_that_stays(run: Training, step: int) -> None:
    """A second backward through one graph brings everything anew."""
    loss = loss_of(run.model(run.inputs[step]))
    loss.backward(retain_graph=True)
    loss.backward()
    run.update()


@each_step(slow=True, make=BLOCKS, set_up=offload(keep_last=0))
def activations_of_graphs_that_are_dropped(run: Training, step: int) -> None:
    """A forward whose backward never comes gives its memory back."""
    loss = loss_of(run.model(run.inputs[step]))
    del loss
    with torch.no_grad():
        run.model(run.inputs[step])
    run.train(step)


@scenario(2, may_wait="the host looks whether anybody had a gradient")
def activations_that_come_back_in_vain(world: World) -> Values:
    """A backward ends behind two blocks; what it brought ahead is dropped with the graph."""
    run = offloaded(world, offload(keep_last=0))
    blocks = run.model.blocks
    for step in run.steps():
        kept: list[Tensor] = []
        handle = blocks[-2].register_forward_pre_hook(lambda _, args, kept=kept: kept.append(*args))
        loss = loss_of(run.model(run.inputs[step]))
        handle.remove()
        torch.autograd.grad(loss, kept)
        kept.clear()
        del loss
        run.train(step)
    return run.values()


def recomputing(model: Any, implementation: CheckpointImpl = CheckpointImpl.NO_REENTRANT) -> None:
    for place, block in enumerate(model.blocks):
        model.blocks[place] = checkpoint_wrapper(block, implementation, preserve_rng_state=False)


def wrapped_blocks(model: Any) -> list[Any]:
    return list(model.blocks)


@scenario(2)
def inputs_of_checkpoints_on_the_host(world: World) -> Values:
    """Blocks are computed again, and what goes into them is on the host meanwhile."""
    return learning(world, offload({CheckpointWrapper}), prepare=recomputing)


@scenario(2, slow=True)
def inputs_of_checkpoints_by_the_wrapped_class(world: World) -> Values:
    """A wrapper is picked with the module that it is around."""
    return learning(world, prepare=recomputing, units=wrapped_blocks)


@scenario(2, slow=True)
def inputs_of_reentrant_checkpoints_on_the_host(world: World) -> Values:
    prepare = partial(recomputing, implementation=CheckpointImpl.REENTRANT)
    return learning(world, prepare=prepare)


@scenario(2, slow=True)
def checkpoints_inside_of_offloaded_blocks(world: World) -> Values:
    def prepare(model: Any) -> None:
        for block in model.blocks:
            block.up = checkpoint_wrapper(block.up, CheckpointImpl.NO_REENTRANT)

    return learning(world, prepare=prepare)


@scenario(2, slow=True)
def activations_on_a_side_stream(world: World) -> Values:
    return on_a_side_stream(world, make=BLOCKS, set_up=offload())


@scenario(2, slow=True)
def activations_of_compiled_blocks(world: World) -> Values:
    run = training(world, BLOCKS, set_up=offload())
    for block in run.model.blocks:
        block.compile(backend="aot_eager")
    for step in run.steps():
        run.train(step)
    if world.is_simulated:
        assert pinned(run.model) > 0
    torch._dynamo.reset()
    return run.values()


@scenario(2, slow=True)
def activations_of_a_functional_step_stay(world: World) -> Values:
    run = training(world, BLOCKS, set_up=offload())
    model = fsdp2.compile(run.model, backend="aot_eager", fullgraph=True)
    for step in run.steps():
        learn(model, run.inputs[step])
        run.update()
    if world.is_simulated:
        assert pinned(run.model) == 0
    torch._dynamo.reset()
    return run.values()


def of_layers(part: Any) -> None:
    fsdp2.offload_activations(part, lambda module: module in set(part.layers), min_bytes=1)


@scenario(4, slow=True)
def activations_of_a_pipeline(world: World) -> Values:
    return pipelined(world, Schedule1F1B, 2, set_up=of_layers)


@scenario(4, slow=True)
def activations_of_a_pipeline_one_after_the_other(world: World) -> Values:
    return pipelined(world, ScheduleGPipe, 2, set_up=of_layers)


@scenario(1)
def activations_in_two_streams(world: World) -> Values:
    """Two streams of the user's that nothing orders take turns with the same pinned memory."""
    model: Any = world.build(BLOCKS)
    offload(keep_last=0)(model)
    streams = [world.stream(), world.stream()]
    inputs = [world.tensor(3, 13, seed=step) for step in range(6)]
    for stream in streams:
        stream.wait_stream(world.current_stream)
    found = {}
    for step in range(6):
        with streams[step % 2]:
            grads = torch.autograd.grad(loss_of(model(inputs[step])), list(model.parameters()))
        found |= {f"{step}.{place}": grad for place, grad in enumerate(grads)}
    for stream in streams:
        world.current_stream.wait_stream(stream)
    return world.values(**found)


class Shared(nn.Module):
    """Blocks that all save a table which the root made, and their input once for each product."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Products() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        table = torch.linspace(0.5, 1.5, 13, device=x.device).expand(x.shape[0], 13).contiguous()
        for block in self.blocks:
            x = block(x, table)
        return x


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(13, 13) for _ in range(3))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        h = x * table
        out: Tensor = x + self.q(h).tanh() * self.k(h.view(1, -1, 13))[0] + self.v(h)
        return out


@scenario(2)
def activations_that_several_nodes_save(world: World) -> Values:
    run = training(
        world,
        Shared,
        units=lambda model: list(model.blocks),
        set_up=offload({Products}, keep_last=0),
    )
    for step in run.steps():
        run.train(step)
    if world.is_simulated:
        # of each block: h, the tanh and what k makes; and the table, once
        assert pinned(run.model) == (4 * 3 + 1) * 512
    return run.values()

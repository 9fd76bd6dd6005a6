"""Exceptions in forward and backward: caught, and training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp2 import StateError
from tests.kit.models import WIDTH, each_block, loss_of
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import (
    ROWS,
    STACK,
    Training,
    each_step,
    learn,
    sets,
    training,
)

AFTER_A_FAILURE = "after a step that failed the next one begins when the device is idle"


def fail(*_: Any) -> None:
    raise ArithmeticError("as planned")


def in_forward(model: Any, x: Tensor) -> None:
    handle = model.blocks[1].mid.register_forward_hook(fail)
    try:
        model(x)
    except ArithmeticError:
        handle.remove()
        return
    raise AssertionError("nothing was raised")


def in_backward(model: Any, x: Tensor) -> None:
    def spoil(module: Any, args: Any, output: Tensor) -> None:
        output.register_hook(fail)

    handle = model.blocks[1].mid.register_forward_hook(spoil)
    loss = loss_of(model(x))
    handle.remove()
    try:
        loss.backward()
    except ArithmeticError:
        return
    raise AssertionError("nothing was raised")


def failing(world: World, how: Callable[[Any, Tensor], None], **kwargs: Any) -> Values:
    """Fail before every other step."""
    run = training(world, steps=5, **kwargs)
    for step in run.steps():
        if step % 2:
            how(run.model, run.inputs[step])
            run.model.zero_grad()
        run.train(step)
    return run.values()


@scenario(2, may_wait=AFTER_A_FAILURE)
def failed_forwards(world: World) -> Values:
    return failing(world, in_forward)


@scenario(2, may_wait=AFTER_A_FAILURE)
def failed_backwards(world: World) -> Values:
    return failing(world, in_backward)


@scenario(2, slow=True, may_wait=AFTER_A_FAILURE)
def failed_backwards_with_much_memory(world: World) -> Values:
    return failing(world, in_backward, set_up=sets(memory="fast"))


@scenario(4, slow=True, may_wait=AFTER_A_FAILURE)
def failed_backwards_of_replicas(world: World) -> Values:
    return failing(world, in_backward, mesh=world.mesh(2, 2))


@each_step(may_wait=AFTER_A_FAILURE, steps=5)
def failures_and_reset(run: Training, step: int) -> None:
    """The user cleans up at once."""
    if step % 2:
        in_backward(run.model, run.inputs[step])
        run.model.reset_iter_state()
    run.train(step)


@scenario(2)
def exceptions_that_the_model_catches(world: World) -> Values:
    """A block that fails is skipped by the model itself, every other time."""
    run = training(world, steps=9)
    block = run.model.blocks[1]
    inner = block.forward

    def forward(x: Tensor) -> Tensor:
        if run.model.skips:
            raise ArithmeticError
        return inner(x)

    block.forward = forward

    def outer(x: Tensor) -> Tensor:
        x = run.model.inp(x)
        for each in run.model.blocks:
            try:
                x = each(x)
            except ArithmeticError:
                continue
        return run.model.out(x)

    run.model.forward = outer
    run.model.set_reduce_scatter_unused_params(True)
    for step in run.steps(unsteady=7):
        run.model.skips = step % 2 == 1
        run.train(step)
    return run.values()


@each_step()
def infinite_losses_skipped(run: Training, step: int) -> None:
    """Gradients of a bad step are dropped on the device, without a look."""
    loss = loss_of(run.model(run.inputs[step]))
    loss.backward()
    with torch.no_grad():
        for param in run.model.parameters():
            local = param.grad.to_local()
            local.copy_(torch.where(local.isfinite(), local, 0.0))
    run.update()


@scenario(2)
def ranks_that_go_different_ways(world: World) -> Values:
    """Each gets an error, a step late on a device; more of it is in `tests.sim.test_agreement`."""
    if not world.is_simulated:
        return {"told": torch.ones(1, device="cpu")}
    mesh = DeviceMesh.from_group(dist.new_group(), world.kind)  # it is of no use afterwards
    model: Any = world.build(STACK)
    world.shard(model, each_block(model), mesh=mesh)
    told = torch.zeros(1, device="cpu")
    inputs = [world.tensor(ROWS, WIDTH, seed=step) for step in range(12)]
    for step in range(12):
        try:
            if step == 5 and world.rank == 1:
                model.blocks[1].up.weight.requires_grad_(False)
            learn(model, inputs[step])
        except StateError:
            told.fill_(1)
            break
    return {"told": told}

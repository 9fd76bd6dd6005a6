"""What users switch in a step: sync, graphs, units that some ranks skip, ends of backwards."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.func import functional_call

import fsdp2
from tests.kit.in_turn import advance, shard_each
from tests.kit.models import WIDTH, Block, each_block, loss_of, stack
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import (
    LR,
    ROWS,
    SGD,
    STACK,
    Training,
    each_step,
    learn,
    sets,
    trained,
    training,
)

trained("accumulated", microbatches=3)


@each_step(slow=True, microbatches=2)
def no_sync(run: Training, step: int) -> None:
    with fsdp2.no_sync(run.model):
        run.learn(2 * step)
    run.train(2 * step + 1)


@each_step(slow=True, microbatches=2)
def last_backward_said(run: Training, step: int) -> None:
    run.accumulate(step, "set_is_last_backward")


@each_step()
def retained_graph(run: Training, step: int) -> None:
    """Two backwards through one graph: units are gathered again for the second."""
    loss = loss_of(run.model(run.inputs[step]))
    loss.backward(retain_graph=True)
    (2 * loss).backward()
    run.update()


@each_step(microbatches=3)
def several_forwards_with_one_backward(run: Training, step: int) -> None:
    losses = [loss_of(run.model(run.inputs[3 * step + index])) for index in range(3)]
    torch.stack(losses).sum().backward()
    run.update()


@each_step(microbatches=2)
def backwards_in_another_order(run: Training, step: int) -> None:
    first = loss_of(run.model(run.inputs[2 * step]))
    second = loss_of(run.model(run.inputs[2 * step + 1]))
    first.backward()
    second.backward()
    run.update()


@each_step(slow=True)
def forwards_without_backward(run: Training, step: int) -> Values:
    """Outputs that are dropped, and evaluations between steps."""
    run.model(run.inputs[step])
    with torch.no_grad():
        output = run.model(run.inputs[step])
    run.train(step)
    return {"output": output}


@scenario(2)
def inference_mode_before_training(world: World) -> Values:
    """What the first evaluation leaves behind is used in training."""
    run = training(world)
    with torch.inference_mode():
        run.model(run.inputs[0])
    for step in run.steps():
        run.train(step)
    return run.values()


@each_step()
def inference_mode(run: Training, step: int) -> Values:
    with torch.inference_mode():
        output = run.model(run.inputs[step])
    run.train(step)
    return {"output": output}


def finalized(world: World, async_op: bool) -> Values:
    run = training(world, microbatches=2, set_up=sets(manual_backward_finalization=True))
    for step in run.steps():
        for index in range(2):
            run.model.set_requires_gradient_sync(index == 1)
            run.learn(2 * step + index)
        handle = run.model.finalize_backward(async_op=async_op)
        if handle is not None:
            handle.wait()
        run.update()
    return run.values()


@scenario(2, slow=True)
def ended_by_hand(world: World) -> Values:
    return finalized(world, async_op=False)


@scenario(2)
def ended_by_hand_asynchronously(world: World) -> Values:
    return finalized(world, async_op=True)


@scenario(2)
def ended_by_hand_between_the_microbatches(world: World) -> Values:
    """Backwards that reduce by themselves are only waited for."""
    run = training(world, set_up=sets(manual_backward_finalization=True))
    for step in run.steps():
        run.learn(step)
        handle = run.model.finalize_backward(async_op=True)
        total = run.inputs[step].sum()  # something beside it
        handle.wait()
        run.update()
    return run.values(total=total)


@each_step()
def early_unshard(run: Training, step: int) -> None:
    """The user gathers units before their forward, all at once and waited for or not."""
    handles = [block.unshard(async_op=True) for block in run.model.blocks]
    handles[0].wait()
    run.train(step)


@each_step()
def unsharded_by_hand(run: Training, step: int) -> Values:
    """Whole parameters are read by the user, between steps."""
    seen = {}
    for index, block in enumerate(run.model.blocks):
        block.unshard()
        seen[f"{index}"] = block.up.weight.detach().clone()
        block.reshard()
    run.train(step)
    return seen


@each_step()
def early_unshard_given_up(run: Training, step: int) -> None:
    """A gather that nobody waited for is dropped."""
    for block in run.model.blocks:
        block.unshard(async_op=True)
    for block in run.model.blocks:
        block.reshard()
    run.train(step)


@scenario(2)
def two_roots_that_share_streams(world: World) -> Values:
    """``share_comm_ctx``: a forward of one between forward and backward of the other."""
    models: list[Any] = [world.build(STACK, seed=seed) for seed in (1, 2)]
    for model in models:
        world.shard(model, each_block(model))
    fsdp2.share_comm_ctx(models)
    optim = SGD([p for model in models for p in model.parameters()], lr=LR)
    inputs = [world.tensor(ROWS, WIDTH, seed=step) for step in range(4)]
    for step in world.steps(4):
        losses = [loss_of(model(inputs[step])) for model in models]
        losses[0].backward()
        losses[1].backward()
        advance(optim)
    return world.values(*models)


@scenario(2, slow=True)
def two_roots_one_after_the_other(world: World) -> Values:
    """What one model returns is the other one's input; each has streams of its own."""
    models: list[Any] = [world.build(stack(Block, 2), seed=seed) for seed in (1, 2)]
    models[0].out = nn.Linear(WIDTH, WIDTH).to(world.device)
    for param in models[0].out.parameters():
        nn.init.constant_(param, 0.1)
    for model in models:
        world.shard(model, each_block(model))
    optim = SGD([p for model in models for p in model.parameters()], lr=LR)
    inputs = [world.tensor(ROWS, WIDTH, seed=step) for step in range(4)]
    for step in world.steps(4):
        loss_of(models[1](models[0](inputs[step]))).backward()
        advance(optim)
    return world.values(*models)


class Routed(nn.Module):
    """Rank and step decide which experts run."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.chosen = [0, 1, 2]

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index in self.chosen:
            x = self.blocks[index](x)
        return x


WHO_HAS_WHAT = "where a rank has no gradient of its own, the host learns whether another has one"


def routed(world: World, reduce_unused: bool) -> Values:
    model: Any = world.build(Routed)
    shard_each(*model.blocks, mesh=world.mesh(), conditional=True)
    world.shard(model)
    model.set_reduce_scatter_unused_params(reduce_unused)
    optim = SGD(model.parameters(), lr=LR)
    inputs = [world.tensor(ROWS, WIDTH, seed=step) for step in range(5)]
    for step in world.steps(5):
        model.chosen = [[0, 2], [1], [0, 1]][(step + world.rank) % 3]
        learn(model, inputs[step])
        advance(optim)
    return world.values(model)


@scenario(2, may_wait=WHO_HAS_WHAT)
def conditional_units(world: World) -> Values:
    return routed(world, False)


@scenario(2)
def conditional_units_that_get_zeros(world: World) -> Values:
    return routed(world, True)


@scenario(2, slow=True, may_wait=WHO_HAS_WHAT)
def placeholders(world: World) -> Values:
    """``functional_call`` with other values for some parameters, and gradients for these."""
    run = training(world)
    grads = {}
    given = [world.tensor(WIDTH, seed=50 + step, by_rank=False) for step in range(4)]
    for step in run.steps():
        bias = given[step].requires_grad_()
        output = functional_call(run.model, {"inp.bias": bias}, (run.inputs[step],))
        loss_of(output).backward()
        grads[f"{step}"] = bias.grad
        run.update()
    return run.values(**grads)


@scenario(2, slow=True)
def other_forward_methods(world: World) -> Values:
    class WithEncoder(Block):
        def encode(self, x: Tensor) -> Tensor:
            return torch.sigmoid(self.forward(x))

    model: Any = world.build(lambda: nn.ModuleList([WithEncoder(), WithEncoder()]))
    for block in model:
        world.shard(block)
        fsdp2.register_fsdp_forward_method(block, "encode")
    optim = SGD(model.parameters(), lr=LR)
    inputs = [world.tensor(ROWS, WIDTH, seed=step) for step in range(4)]
    for step in world.steps(4):
        loss_of(model[1].encode(model[0].encode(inputs[step]))).backward()
        advance(optim)
    return world.values(*model)


@each_step(slow=True, may_wait=WHO_HAS_WHAT)
def gradients_of_inputs(run: Training, step: int) -> Values:
    """``torch.autograd.grad`` of inputs alone, then a backward of the rest."""
    x = run.inputs[step].requires_grad_()
    loss = loss_of(run.model(x))
    (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()
    x.grad = None
    run.update()
    return {"grad": grad}


@each_step(unsteady=99)  # a group plans again, with numbers from the host
def replaced_parameters(run: Training, step: int) -> None:
    """Every step a parameter is assigned anew, and adopted by the next forward."""
    run.train(step)
    block = run.model.blocks[1]
    values = block.up.weight.detach() * 1.5
    block.up.weight = nn.Parameter(values)
    run.optim = SGD(run.model.parameters(), lr=LR)

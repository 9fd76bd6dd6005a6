"""Optimizers: torch's and those on local shards, in backward, clipping and scaling."""

from __future__ import annotations

import functools
from typing import Any

import torch

import fsdp2
from tests.kit.models import TORCH_2_13
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import ADAMW, learn, train, training

ROUNDS = 1e-5  # what Adam makes of gradients that differ in their last bit
READS_STEPS = (
    "" if TORCH_2_13 else "torch 2.11 counts Adam's steps on the host on a device it does not know"
)
READS = "clip_grad_norm_ with error_if_nonfinite reads the norm on the host"


def local(kind: Any, **options: Any) -> Any:
    return functools.partial(fsdp2.optim.local, kind, **options)


@scenario(2, tolerance=ROUNDS, may_wait=READS_STEPS)
def adamw(world: World) -> Values:
    return train(world, optimizer=ADAMW)


@scenario(2, tolerance=ROUNDS, may_wait=READS_STEPS)
def local_adamw(world: World) -> Values:
    return train(world, optimizer=local(torch.optim.AdamW, eps=1e-3))


@scenario(2, tolerance=ROUNDS)
def local_adamw_fused(world: World) -> Values:
    return train(world, optimizer=local(torch.optim.AdamW, eps=1e-3, fused=True))


@scenario(2, slow=True, tolerance=ROUNDS)
def local_adamw_foreach(world: World) -> Values:
    """Steps are counted on the device; torch's kernels for many tensors."""
    return train(world, optimizer=local(torch.optim.AdamW, eps=1e-3, foreach=True))


@scenario(2, slow=True)
def local_sgd(world: World) -> Values:
    return train(world, optimizer=local(torch.optim.SGD, momentum=0.9), microbatches=2)


@scenario(2, slow=True)
def local_sgd_fused(world: World) -> Values:
    return train(world, optimizer=local(torch.optim.SGD, momentum=0.9, fused=True))


@scenario(3, slow=True, tolerance=ROUNDS)
def local_adam_capturable(world: World) -> Values:
    return train(world, optimizer=local(torch.optim.Adam, eps=1e-3, foreach=True))


@scenario(2)
def in_backward(world: World) -> Values:
    """A hook steps each parameter as soon as its gradient is there."""
    run = training(world)
    for param in run.model.parameters():
        optim = torch.optim.SGD([param], lr=0.05)

        def step(param: Any, optim: Any = optim) -> None:
            optim.step()
            optim.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    for index in run.steps():
        learn(run.model, run.inputs[index])
    return run.values()


@scenario(2, slow=True)
def hooks_on_gradients(world: World) -> Values:
    run = training(world)
    for param in run.model.parameters():
        param.register_hook(lambda grad: grad * 0.5)
    for index in run.steps():
        learn(run.model, run.inputs[index])
        run.update()
    return run.values()


@scenario(2)
def clipped(world: World) -> Values:
    norms = {}

    def update(run: Any) -> None:
        norms[f"norm {len(norms)}"] = fsdp2.clip_grad_norm_(run.model.parameters(), 0.05)
        run.update()

    return {**train(world, update=update), **{k: v.cpu() for k, v in norms.items()}}


@scenario(2)
def clipped_by_torch(world: World) -> Values:
    """torch's function: norms of DTensors, and one all-reduce for each parameter."""

    def update(run: Any) -> None:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
        run.update()

    return train(world, update=update)


@scenario(2, may_wait=READS)
def clipped_and_looked_at(world: World) -> Values:
    def update(run: Any) -> None:
        fsdp2.clip_grad_norm_(run.model.parameters(), 0.05, error_if_nonfinite=True)
        run.update()

    return train(world, update=update)


@scenario(4, slow=True)
def clipped_over_replicas(world: World) -> Values:
    def update(run: Any) -> None:
        fsdp2.clip_grad_norm_(run.model.parameters(), 0.05, norm_type=3.0)
        run.update()

    return train(world, mesh=world.mesh(2, 2), update=update)


@scenario(2, slow=True)
def clipped_by_value(world: World) -> Values:
    def update(run: Any) -> None:
        for param in run.model.parameters():
            param.grad.to_local().clamp_(-1e-3, 1e-3)
        run.update()

    return train(world, update=update)


@scenario(2)
def loss_gathered_for_a_log(world: World) -> Values:
    """Losses stay on the device until training is over."""
    run = training(world)
    losses = []
    for step in run.steps():
        loss = run.model(run.inputs[step]).square().mean()
        loss.backward()
        losses.append(loss.detach())
        run.update()
    return run.values(losses=torch.stack(losses))


@scenario(2, slow=True, may_wait="the user reads the loss on the host in each step")
def loss_read_in_each_step(world: World) -> Values:
    run = training(world)
    losses = []
    for step in run.steps():
        loss = run.model(run.inputs[step]).square().mean()
        loss.backward()
        losses.append(loss.item())
        run.update()
    return run.values(losses=torch.tensor(losses))


@scenario(2)
def learning_rate_changes(world: World) -> Values:
    run = training(world)
    schedule = torch.optim.lr_scheduler.StepLR(run.optim, 1, 0.5)
    for step in run.steps():
        learn(run.model, run.inputs[step])
        run.update()
        schedule.step()
    return run.values()

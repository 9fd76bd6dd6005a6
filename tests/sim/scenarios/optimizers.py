"""Optimizers: torch's and those on local shards, in backward, clipping and scaling."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

import fsdp2
from tests.kit.in_turn import advance
from tests.kit.models import TORCH_2_13
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import ADAMW, Training, train, trained, training

ROUNDS = 1e-5  # what Adam makes of gradients that differ in their last bit
READS_STEPS = (
    "" if TORCH_2_13 else "torch 2.11 counts Adam's steps on the host on a device it does not know"
)
READS = "clip_grad_norm_ with error_if_nonfinite reads the norm on the host"


def local(kind: Any, **options: Any) -> Any:
    return functools.partial(fsdp2.optim.local, kind, **options)


trained("adamw", tolerance=ROUNDS, may_wait=READS_STEPS, optimizer=ADAMW)
trained(
    "local_adamw",
    tolerance=ROUNDS,
    may_wait=READS_STEPS,
    optimizer=local(torch.optim.AdamW, eps=1e-3),
)
trained(
    "local_adamw_fused", tolerance=ROUNDS, optimizer=local(torch.optim.AdamW, eps=1e-3, fused=True)
)
# Steps are counted on the device; torch's kernels for many tensors.
trained(
    "local_adamw_foreach",
    slow=True,
    tolerance=ROUNDS,
    optimizer=local(torch.optim.AdamW, eps=1e-3, foreach=True),
)
trained("local_sgd", slow=True, optimizer=local(torch.optim.SGD, momentum=0.9), microbatches=2)
trained("local_sgd_fused", slow=True, optimizer=local(torch.optim.SGD, momentum=0.9, fused=True))
trained(
    "local_adam_capturable",
    3,
    slow=True,
    tolerance=ROUNDS,
    optimizer=local(torch.optim.Adam, eps=1e-3, foreach=True),
)


@scenario(2)
def in_backward(world: World) -> Values:
    """A hook steps each parameter as soon as its gradient is there."""
    run = training(world)
    for param in run.model.parameters():
        optim = torch.optim.SGD([param], lr=0.05)

        def step(param: Any, optim: Any = optim) -> None:
            advance(optim)

        param.register_post_accumulate_grad_hook(step)
    for index in run.steps():
        run.learn(index)
    return run.values()


@scenario(2, slow=True)
def hooks_on_gradients(world: World) -> Values:
    run = training(world)
    for param in run.model.parameters():
        param.register_hook(lambda grad: grad * 0.5)
    for index in run.steps():
        run.train(index)
    return run.values()


@scenario(2)
def clipped(world: World) -> Values:
    norms = {}

    def update(run: Any) -> None:
        norms[f"norm {len(norms)}"] = fsdp2.clip_grad_norm_(run.model.parameters(), 0.05)
        run.update()

    return {**train(world, update=update), **{k: v.cpu() for k, v in norms.items()}}


def before_steps(look: Callable[[Any], Any]) -> Callable[[Training], None]:
    """Return an update that does something with the gradients of a model first."""

    def update(run: Training) -> None:
        look(run.model)
        run.update()

    return update


def clip_values(model: Any) -> None:
    for param in model.parameters():
        param.grad.to_local().clamp_(-1e-3, 1e-3)


# torch's function: norms of DTensors, and one all-reduce for each parameter.
trained(
    "clipped_by_torch",
    update=before_steps(lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)),
)


trained(
    "clipped_and_looked_at",
    may_wait=READS,
    update=before_steps(
        lambda model: fsdp2.clip_grad_norm_(model.parameters(), 0.05, error_if_nonfinite=True)
    ),
)


trained(
    "clipped_over_replicas",
    4,
    slow=True,
    mesh=(2, 2),
    update=before_steps(
        lambda model: fsdp2.clip_grad_norm_(model.parameters(), 0.05, norm_type=3.0)
    ),
)


trained("clipped_by_value", slow=True, update=before_steps(clip_values))


def logged(world: World, look: Callable[[torch.Tensor], Any]) -> Values:
    run = training(world)
    losses = []
    for step in run.steps():
        loss = run.model(run.inputs[step]).square().mean()
        loss.backward()
        losses.append(look(loss))
        run.update()
    return run.values(losses=torch.stack([torch.as_tensor(loss) for loss in losses]))


@scenario(2)
def loss_gathered_for_a_log(world: World) -> Values:
    """Losses stay on the device until training is over."""
    return logged(world, torch.Tensor.detach)


@scenario(2, slow=True, may_wait="the user reads the loss on the host in each step")
def loss_read_in_each_step(world: World) -> Values:
    return logged(world, torch.Tensor.item)


@scenario(2)
def learning_rate_changes(world: World) -> Values:
    run = training(world)
    schedule = torch.optim.lr_scheduler.StepLR(run.optim, 1, 0.5)
    for step in run.steps():
        run.train(step)
        schedule.step()
    return run.values()

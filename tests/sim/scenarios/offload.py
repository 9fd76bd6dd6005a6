"""Shards in memory of the host: pinned and not, in training and in evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import functional_call

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.kit.in_turn import advance
from tests.kit.models import CASES
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import (
    ADAMW,
    Training,
    each_step,
    sets,
    train,
    train_case,
    trained,
    training,
)

ON_HOST = "the optimizer runs on the host, and needs the gradients there"
NOT_PINNED = "the host waits for copies of memory that is not pinned"
WRITES = "the host may write to shards once a forward is over, and waits until none is copied"
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# Shards live in pinned memory of the host.
trained("offloaded", may_wait=ON_HOST, offload_policy=CPUOffloadPolicy())
trained(
    "offloaded_not_pinned", may_wait=NOT_PINNED, offload_policy=CPUOffloadPolicy(pin_memory=False)
)
trained(
    "offloaded_in_bf16",
    slow=True,
    may_wait=ON_HOST,
    tolerance=2e-2,
    offload_policy=CPUOffloadPolicy(),
    mp_policy=BF16,
    microbatches=2,
)
trained(
    "offloaded_without_copies",
    may_wait=ON_HOST,
    offload_policy=CPUOffloadPolicy(),
    set_up=sets(copy_free_min_bytes=1),
)


@each_step(
    4, slow=True, may_wait=ON_HOST, mesh=(2, 2), offload_policy=CPUOffloadPolicy(), microbatches=2
)
def offloaded_replicas(run: Training, step: int) -> None:
    """Partial sums stay on the device until the all-reduce."""
    run.accumulate(step, "set_requires_all_reduce")


trained(
    "offloaded_over_a_smaller_mesh",
    4,
    slow=True,
    may_wait=ON_HOST,
    offload_policy=CPUOffloadPolicy(),
    reshard_after_forward=2,
)


@each_step(slow=True, may_wait=ON_HOST, offload_policy=CPUOffloadPolicy(), microbatches=2)
def offloaded_gradients_that_add_up(run: Training, step: int) -> None:
    run.accumulate(step)


def written_between(run: Training, step: int) -> Values:
    """Evaluate, write to the shards on the host, and evaluate again."""
    with torch.no_grad():
        output = run.model(run.inputs[step])
        for param in run.model.parameters():
            param.to_local().mul_(1.25)
    return {"output": output}


@each_step(slow=True, may_wait=WRITES, offload_policy=CPUOffloadPolicy())
def offloaded_evaluation(run: Training, step: int) -> Values:
    return written_between(run, step)


@each_step(may_wait=WRITES, offload_policy=CPUOffloadPolicy(), reshard_after_forward=False)
def offloaded_evaluation_kept_whole(run: Training, step: int) -> Values:
    return written_between(run, step)


@each_step(may_wait=WRITES, offload_policy=CPUOffloadPolicy())
def offloaded_and_gathered_by_hand(run: Training, step: int) -> None:
    """``unshard`` and ``reshard`` of a unit, and writes of the host after it."""
    run.train(step)
    for block in run.model.blocks:
        block.unshard()
        block.reshard()
        for param in block.parameters():
            param.detach().to_local().mul_(1.25)


@scenario(2, may_wait=ON_HOST)
def offloaded_and_clipped(world: World) -> Values:
    def update(run: Any) -> None:
        fsdp2.clip_grad_norm_(run.model.parameters(), 0.1)
        run.update()

    return train(world, offload_policy=CPUOffloadPolicy(), update=update)


@scenario(2, slow=True, may_wait=ON_HOST)
def offloaded_optimizer_in_backward(world: World) -> Values:
    """A hook that runs when a gradient is there steps its parameter on the host."""
    run = training(world, offload_policy=CPUOffloadPolicy())
    for param in run.model.parameters():
        optim = torch.optim.SGD([param], lr=0.05)

        def step(param: Any, optim: Any = optim) -> None:
            advance(optim)

        param.register_post_accumulate_grad_hook(step)
    for step_index in run.steps():
        run.learn(step_index)
    return run.values()


trained(
    "offloaded_and_unused", case="unused_parts", may_wait=ON_HOST, offload_policy=CPUOffloadPolicy()
)


@scenario(2, slow=True, may_wait=ON_HOST, tolerance=1e-5)
def offloaded_with_local_adamw(world: World) -> Values:
    def optimizer(params: Any, lr: float) -> Any:
        return fsdp2.optim.local(torch.optim.AdamW, params, lr=lr, eps=1e-3, fused=True)

    return train(world, offload_policy=CPUOffloadPolicy(), optimizer=optimizer)


trained(
    "offloaded_with_adamw",
    slow=True,
    may_wait=ON_HOST,
    tolerance=1e-5,
    offload_policy=CPUOffloadPolicy(),
    optimizer=ADAMW,
)


@scenario(2, slow=True, may_wait=ON_HOST)
def offloaded_and_not_contiguous(world: World) -> Values:
    assert CASES["non_contiguous"]
    return train_case(world, "non_contiguous", offload_policy=CPUOffloadPolicy())


@scenario(2, may_wait=WRITES)
def offloaded_and_gathered_before_the_first_forward(world: World) -> Values:
    """A unit that has no root yet is gathered by hand, and then the host writes to its shards."""
    run = training(world, offload_policy=CPUOffloadPolicy())
    for block in run.model.blocks:
        block.unshard(async_op=True).wait()
        block.reshard()
        for param in block.parameters():
            param.detach().to_local().mul_(1.25)
    for step in run.steps():
        run.train(step)
    return run.values()


@scenario(2, may_wait=ON_HOST)
def offloaded_placeholders(world: World) -> Values:
    """Shards on the host stand in for parameters of an evaluation, on the device."""
    run = training(world, offload_policy=CPUOffloadPolicy())
    outputs = {}
    for step in run.steps():
        weight = run.model.inp.weight.detach().mul(2.0)
        with torch.no_grad():
            given = {"inp.weight": weight}
            outputs[f"{step}"] = functional_call(run.model, given, (run.inputs[step],))
        run.train(step)
    if world.is_simulated:
        with pytest.raises(fsdp2.UnsupportedError, match="in its place a shard that requires grad"):
            functional_call(run.model, {"inp.weight": weight.requires_grad_()}, (run.inputs[0],))
    return run.values(**outputs)

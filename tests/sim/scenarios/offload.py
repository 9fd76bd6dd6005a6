"""Shards in memory of the host: pinned and not, in training and in evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.func import functional_call

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.kit.models import CASES
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import ADAMW, learn, train, train_case, training

ON_HOST = "the optimizer runs on the host, and needs the gradients there"
NOT_PINNED = "the host waits for copies of memory that is not pinned"
WRITES = "the host may write to shards once a forward is over, and waits until none is copied"
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@scenario(2, may_wait=ON_HOST)
def offloaded(world: World) -> Values:
    """Shards live in pinned memory of the host."""
    return train(world, offload_policy=CPUOffloadPolicy())


@scenario(2, may_wait=NOT_PINNED)
def offloaded_not_pinned(world: World) -> Values:
    return train(world, offload_policy=CPUOffloadPolicy(pin_memory=False))


@scenario(2, slow=True, may_wait=ON_HOST, tolerance=2e-2)
def offloaded_in_bf16(world: World) -> Values:
    return train(world, offload_policy=CPUOffloadPolicy(), mp_policy=BF16, microbatches=2)


@scenario(2, may_wait=ON_HOST)
def offloaded_without_copies(world: World) -> Values:
    return train(
        world,
        offload_policy=CPUOffloadPolicy(),
        set_up=lambda model: model.set_copy_free_min_bytes(1),
    )


@scenario(4, slow=True, may_wait=ON_HOST)
def offloaded_replicas(world: World) -> Values:
    """Partial sums stay on the device until the all-reduce."""
    run = training(world, mesh=world.mesh(2, 2), offload_policy=CPUOffloadPolicy(), microbatches=2)
    for step in run.steps():
        for index in range(2):
            run.model.set_requires_all_reduce(index == 1)
            learn(run.model, run.inputs[2 * step + index])
        run.update()
    return run.values()


@scenario(4, slow=True, may_wait=ON_HOST)
def offloaded_over_a_smaller_mesh(world: World) -> Values:
    return train(world, offload_policy=CPUOffloadPolicy(), reshard_after_forward=2)


@scenario(2, slow=True, may_wait=ON_HOST)
def offloaded_gradients_that_add_up(world: World) -> Values:
    run = training(world, offload_policy=CPUOffloadPolicy(), microbatches=2)
    for step in run.steps():
        for index in range(2):
            learn(run.model, run.inputs[2 * step + index])
        run.update()
    return run.values()


def written_between(world: World, **kwargs: Any) -> Values:
    """Evaluate, write to the shards on the host, and evaluate again."""
    run = training(world, offload_policy=CPUOffloadPolicy(), **kwargs)
    outputs = {}
    for step in run.steps():
        with torch.no_grad():
            outputs[f"{step}"] = run.model(run.inputs[step])
            for param in run.model.parameters():
                param.to_local().mul_(1.25)
    return run.values(**outputs)


@scenario(2, slow=True, may_wait=WRITES)
def offloaded_evaluation(world: World) -> Values:
    return written_between(world)


@scenario(2, may_wait=WRITES)
def offloaded_evaluation_kept_whole(world: World) -> Values:
    return written_between(world, reshard_after_forward=False)


@scenario(2, may_wait=WRITES)
def offloaded_and_gathered_by_hand(world: World) -> Values:
    """``unshard`` and ``reshard`` of a unit, and writes of the host after it."""
    run = training(world, offload_policy=CPUOffloadPolicy())
    for step in run.steps():
        learn(run.model, run.inputs[step])
        run.update()
        for block in run.model.blocks:
            block.unshard()
            block.reshard()
            for param in block.parameters():
                param.detach().to_local().mul_(1.25)
    return run.values()


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
            optim.step()
            optim.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    for step_index in run.steps():
        learn(run.model, run.inputs[step_index])
    return run.values()


@scenario(2, may_wait=ON_HOST)
def offloaded_and_unused(world: World) -> Values:
    return train_case(world, "unused_parts", offload_policy=CPUOffloadPolicy())


@scenario(2, slow=True, may_wait=ON_HOST, tolerance=1e-5)
def offloaded_with_local_adamw(world: World) -> Values:
    def optimizer(params: Any, lr: float) -> Any:
        return fsdp2.optim.local(torch.optim.AdamW, params, lr=lr, eps=1e-3, fused=True)

    return train(world, offload_policy=CPUOffloadPolicy(), optimizer=optimizer)


@scenario(2, slow=True, may_wait=ON_HOST, tolerance=1e-5)
def offloaded_with_adamw(world: World) -> Values:
    return train(world, offload_policy=CPUOffloadPolicy(), optimizer=ADAMW)


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
        learn(run.model, run.inputs[step])
        run.update()
    return run.values()


@scenario(2, may_wait=ON_HOST)
def offloaded_stand_ins(world: World) -> Values:
    """Shards on the host stand in for parameters of an evaluation, on the device."""
    run = training(world, offload_policy=CPUOffloadPolicy())
    outputs = {}
    for step in run.steps():
        weight = run.model.inp.weight.detach().mul(2.0)
        with torch.no_grad():
            given = {"inp.weight": weight}
            outputs[f"{step}"] = functional_call(run.model, given, (run.inputs[step],))
        learn(run.model, run.inputs[step])
        run.update()
    if world.is_simulated:
        with pytest.raises(fsdp2.UnsupportedError, match="a shard on cpu that requires"):
            functional_call(run.model, {"inp.weight": weight.requires_grad_()}, (run.inputs[0],))
    return run.values(**outputs)

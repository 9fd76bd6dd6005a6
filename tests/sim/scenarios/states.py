"""Optimizer states on the host, that come to the device for the step of their unit."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from fsdp2._core.base.torch_dtensor import local_part
from fsdp2.optim import _offload
from tests.kit.models import stack
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import ADAMW, LR, SGD, training

BLOCKS = stack(count=4)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LOOKS = "who reads a state on the host waits for it"
Make = Callable[..., Any]


def small_batches(program: Callable[[World], Values]) -> Callable[[World], Values]:
    """Let every unit of a small model step by itself."""

    @functools.wraps(program)
    def run(world: World) -> Values:
        with mock.patch.object(_offload, "LEAST_NBYTES", 1):
            return program(world)

    return run


def away(make: Make, max_bytes: int | None = None) -> Make:
    def made(params: Any, lr: float) -> Any:
        return fsdp2.optim.offload_states(make(params, lr=lr), max_bytes=max_bytes)

    return made


def local(make: Any, **kwargs: Any) -> Make:
    def made(params: Any, lr: float) -> Any:
        return fsdp2.optim.local(make, params, lr=lr, eps=1e-3, **kwargs)

    return made


def states(optim: Any) -> list[Tensor]:
    """Return all states of more than one element."""
    values = [v for entry in optim.state.values() for v in entry.values()]
    return [v for v in values if isinstance(v, Tensor) and v.dim()]


def stepping(world: World, make: Make, max_bytes: int | None = None, **kwargs: Any) -> Values:
    run = training(world, BLOCKS, optimizer=away(make, max_bytes), steps=5, **kwargs)
    for step in run.steps():
        run.train(step)
    if world.is_simulated:
        assert len(run.optim._batches) > 3
        assert sum(batch.nbytes for batch in run.optim._batches) > 0
        assert all(local_part(state).device.type == "cpu" for state in states(run.optim))
    return run.values()


@scenario(2)
@small_batches
def states_on_the_host(world: World) -> Values:
    return stepping(world, ADAMW)


@scenario(2)
@small_batches
def momentum_on_the_host(world: World) -> Values:
    return stepping(world, SGD)


@scenario(2, slow=True)
@small_batches
def states_of_a_foreach_step_on_the_host(world: World) -> Values:
    return stepping(world, functools.partial(ADAMW, foreach=True))


@scenario(2, tolerance=1e-5)
@small_batches
def states_of_runs_on_the_host(world: World) -> Values:
    return stepping(world, local(torch.optim.AdamW))


@scenario(3, slow=True, tolerance=1e-5)
@small_batches
def states_of_fused_runs_on_the_host(world: World) -> Values:
    return stepping(world, local(torch.optim.AdamW, fused=True))


@scenario(3, slow=True, tolerance=5e-2)
@small_batches
def states_of_bf16_steps_on_the_host(world: World) -> Values:
    return stepping(world, ADAMW, mp_policy=BF16)


@scenario(4, slow=True, tolerance=2e-6)
@small_batches
def states_of_replicas_on_the_host(world: World) -> Values:
    return stepping(world, ADAMW, mesh=world.mesh(2, 2))


@scenario(2)
@small_batches
def states_that_come_in_backward(world: World) -> Values:
    """All of them: they are there when the optimizer steps, and leave beside the next forward."""
    return stepping(world, ADAMW, max_bytes=1 << 30)


@scenario(2, slow=True)
@small_batches
def some_states_that_come_in_backward(world: World) -> Values:
    """There is room for a few units."""
    return stepping(world, ADAMW, max_bytes=20_000)


@scenario(2, slow=True, tolerance=1e-5)
@small_batches
def states_of_runs_that_come_in_backward(world: World) -> Values:
    return stepping(world, local(torch.optim.AdamW), max_bytes=20_000)


@scenario(2, slow=True)
@small_batches
def states_that_come_in_one_backward_of_three(world: World) -> Values:
    """Gradients add up over backwards, each of which reduces them."""
    run = training(world, BLOCKS, optimizer=away(ADAMW, 1 << 30), steps=5, microbatches=3)
    for step in run.steps():
        run.accumulate(step)
    return run.values()


def looked_at(world: World, make: Make) -> Values:
    """The host reads states between steps, and writes to them."""
    run = training(world, BLOCKS, optimizer=away(make), steps=5)
    found = {}
    for step in run.steps():
        run.train(step)
        for place, state in enumerate(states(run.optim)):
            part = local_part(state)
            found[f"{step}.{place}"] = part.clone()
            part.mul_(0.5)
    return run.values(**found)


@scenario(2, may_wait=LOOKS, tolerance=1e-5)
@small_batches
def states_that_the_host_reads_and_writes(world: World) -> Values:
    return looked_at(world, ADAMW)


@scenario(2, slow=True, may_wait=LOOKS, tolerance=1e-5)
@small_batches
def states_of_runs_that_the_host_reads_and_writes(world: World) -> Values:
    return looked_at(world, local(torch.optim.AdamW))


def saved_and_loaded(world: World, make: Make) -> Values:
    """A checkpoint of an optimizer with states on the host loads into one without, and back."""
    folder = [tempfile.mkdtemp() if world.rank == 0 else None]
    dist.broadcast_object_list(folder, src=0, device=world.device)
    run = training(world, BLOCKS, optimizer=away(make), steps=6)
    for step in run.steps():
        if step == 2:
            fsdp2.checkpoint.save(Path(str(folder[0])) / "a", run.model, run.optim)
            run.optim = make(run.model.parameters(), lr=LR)
            fsdp2.checkpoint.load(Path(str(folder[0])) / "a", run.model, run.optim)
        if step == 4:
            state = fsdp2.checkpoint.sharded_state(run.model, run.optim)
            run.optim = away(make)(run.model.parameters(), lr=LR)
            fsdp2.checkpoint.load_sharded_state(run.model, state, run.optim)
        run.train(step)
    found = {f"{place}": local_part(state) for place, state in enumerate(states(run.optim))}
    return run.values(**found)


@scenario(2, slow=True, may_wait=LOOKS, tolerance=1e-5)
@small_batches
def states_on_the_host_are_saved_and_loaded(world: World) -> Values:
    return saved_and_loaded(world, ADAMW)


@scenario(3, slow=True, may_wait=LOOKS, tolerance=1e-5)
@small_batches
def states_of_runs_on_the_host_are_saved_and_loaded(world: World) -> Values:
    return saved_and_loaded(world, local(torch.optim.AdamW))


@scenario(2, slow=True)
@small_batches
def states_after_some_steps_on_the_host(world: World) -> Values:
    """An optimizer has stepped on the device before its states leave."""
    run = training(world, BLOCKS, optimizer=ADAMW, steps=6)
    for step in run.steps():
        if step == 2:
            run.optim = fsdp2.optim.offload_states(run.optim)
        run.train(step)
    assert isinstance(run.optim, torch.optim.AdamW)
    assert all(isinstance(state, DTensor) for state in states(run.optim))
    return run.values()

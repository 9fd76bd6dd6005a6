"""Between steps: states, checkpoints, whole parameters, models that begin on meta."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2.checkpoint._save import Saving
from tests.kit.in_turn import advance
from tests.kit.models import each_block
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import (
    ADAMW,
    LR,
    SGD,
    STACK,
    Training,
    each_step,
    learn,
    training,
)

BETWEEN = "between steps the host reads what the device has"


@contextmanager
def held_back(owner: type, name: str) -> Iterator[threading.Event]:
    """Let other threads that call a method wait until the event is set."""
    go_on, method = threading.Event(), getattr(owner, name)

    def later(*args: Any) -> Any:
        go_on.wait()
        return method(*args)

    setattr(owner, name, later)
    try:
        yield go_on
    finally:
        go_on.set()
        setattr(owner, name, method)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """Give all ranks one folder."""
    told: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, device=torch.device("cpu"))
    try:
        yield Path(told[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(told[0])


@scenario(2)
def state_dicts(world: World) -> Values:
    """Taken after each step, and loaded into another model."""
    run = training(world)
    other = training(world)
    for step in run.steps(unsteady=99):
        run.train(step)
        other.model.load_state_dict(run.model.state_dict())
        learn(other.model, other.inputs[step])
        other.update()
    return world.values(run.model, other.model)


@scenario(2, slow=True)
def full_states(world: World) -> Values:
    run, other = training(world), training(world)
    for step in run.steps(unsteady=99):
        run.train(step)
        state = fsdp2.checkpoint.full_state(run.model, run.optim)
        fsdp2.checkpoint.load_full_state(other.model, state, other.optim)
        learn(other.model, other.inputs[step])
        other.update()
    return world.values(run.model, other.model)


@scenario(3)
def an_owned_one_is_loaded_first(world: World) -> Values:
    """A pair of ranks sends before any collective did: NCCL's communicator is not made yet."""
    backend = "cpu:gloo,sim:sim" if world.is_simulated else "gloo"  # objects travel over gloo
    mesh = DeviceMesh.from_group(dist.new_group(backend=backend), world.kind)
    model = world.build(lambda: nn.Linear(13, 29, bias=False))
    world.shard(model, mesh=mesh, shard_placement_fn=lambda param: fsdp2.Whole(owner=1))
    state = {"model": {"weight": world.tensor(29, 13, seed=9, by_rank=False)}}
    fsdp2.checkpoint.load_full_state(model, state if world.rank == 0 else None)
    return world.values(model)


@scenario(2, slow=True)
def full_states_on_the_device(world: World) -> Values:
    run = training(world, steps=3)
    for step in run.steps(unsteady=99):
        run.train(step)
    state = fsdp2.checkpoint.full_state(run.model, rank0_only=False, cpu_offload=False)
    return run.values(**{f"state {name}": value for name, value in state["model"].items()})


@scenario(2)
def checkpoints(world: World) -> Values:
    """Saved in the middle of training, loaded into another model, which goes on."""
    run, other = training(world, optimizer=SGD), training(world)
    with shared_folder() as folder:
        for step in run.steps(unsteady=99):
            run.train(step)
            if step == 1:
                fsdp2.checkpoint.save(folder / "saved", run.model, run.optim)
                fsdp2.checkpoint.load(folder / "saved", other.model, other.optim)
            if step > 1:
                learn(other.model, other.inputs[step])
                other.update()
    return world.values(run.model, other.model)


@scenario(2, tolerance=1e-5, may_wait="the thread that writes waits for the copies")
def saved_in_the_background(world: World) -> Values:
    """Copied beside the forward and the backward that come next, and before the step after."""
    run, other = training(world, optimizer=ADAMW), training(world, optimizer=ADAMW)
    with shared_folder() as folder:
        for step in run.steps():
            run.train(step)
            # held back, because a host that has waited for the copies has ordered what follows
            with held_back(Saving, "write") as go_on:
                save = fsdp2.checkpoint.save
                handle = save(folder / "saved", run.model, run.optim, background=True)
                wanted = [shard(param).clone() for param in run.model.parameters()]
                run.train(step)
                go_on.set()
                handle.wait()
        fsdp2.checkpoint.load(folder / "saved", other.model, other.optim)
    assert all(map(torch.equal, wanted, map(shard, other.model.parameters())))
    return world.values(run.model, other.model)


def shard(param: Any) -> torch.Tensor:
    return param.to_local().detach()  # type: ignore[no-any-return]  # of a DTensor


@scenario(2, slow=True)
def safetensors(world: World) -> Values:
    run, other = training(world, steps=2), training(world, steps=2)
    with shared_folder() as folder:
        for step in run.steps(unsteady=99):
            run.train(step)
        fsdp2.checkpoint.save_safetensors(folder / "saved", run.model)
        fsdp2.checkpoint.load_safetensors(folder / "saved", other.model)
    return world.values(run.model, other.model)


@scenario(2, slow=True, tolerance=1e-5)  # of Adam
def local_states(world: World) -> Values:
    run, other = training(world, optimizer=ADAMW), training(world, optimizer=ADAMW)
    for step in run.steps(unsteady=99):
        run.train(step)
    state = fsdp2.checkpoint.local_state(run.model, run.optim)
    fsdp2.checkpoint.load_local_state(other.model, state, other.optim)
    return world.values(other.model)


@each_step(unsteady=99)
def whole_parameters_one_by_one(run: Training, step: int) -> Values:
    run.train(step)
    return dict(fsdp2.full_params(run.model, max_bytes=4096))


@each_step(slow=True, unsteady=99)
def summoned(run: Training, step: int) -> None:
    run.train(step)
    with fsdp2.summon_full_params(run.model), torch.no_grad():
        for param in run.model.parameters():
            param.mul_(1.01)


@each_step(unsteady=99)
def summoned_with_gradients(run: Training, step: int) -> None:
    run.learn(step)
    with fsdp2.summon_full_params(run.model, with_grads=True), torch.no_grad():
        for param in run.model.parameters():
            param.grad.clamp_(-1e-3, 1e-3)
    run.update()


def init(module: nn.Module) -> None:
    """Initialise a module with numbers that no kernel of a device makes otherwise."""
    with torch.no_grad():
        for index, param in enumerate(module.parameters(recurse=False)):
            count = torch.arange(param.numel(), dtype=torch.float32, device="cpu")
            values = torch.sin(count * (index + 0.7)).view(param.shape) / 4
            param.copy_(values.to(param.device))


@scenario(2, slow=True)
def materialized(world: World) -> Values:
    with torch.device("meta"):
        model: Any = STACK()
    world.shard(model, each_block(model))
    fsdp2.materialize(model, world.device, init)
    optim = SGD(model.parameters(), lr=LR)
    inputs = [world.tensor(3, 13, seed=step) for step in range(4)]
    for step in world.steps(4):
        learn(model, inputs[step])
        advance(optim)
    return world.values(model)


@scenario(2)
def materialized_by_the_first_rank(world: World) -> Values:
    with torch.device("meta"):
        model: Any = STACK()
    world.shard(model, each_block(model))
    fsdp2.materialize(model, world.device, init, sync_from_rank0=True)
    learn(model, world.tensor(3, 13))
    return world.values(model)


@scenario(4, slow=True)
def synced_from_the_first_rank(world: World) -> Values:
    """Ranks begin with different values."""

    def prepare(model: Any) -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(float(world.rank))
        fsdp2.sync_from_rank0(model)

    run = training(world, mesh=world.mesh(2, 2), steps=3, prepare=prepare)
    for step in run.steps(unsteady=99):
        run.train(step)
    return run.values()


@scenario(2, tolerance=1e-4)  # its gradients are sums that nearly cancel
def moved_from_meta_by_hand(world: World) -> Values:
    """``to_empty`` and values by hand: groups adopt what they find."""
    with torch.device("meta"):
        model: Any = STACK()
    world.shard(model, each_block(model))
    model.to_empty(device=world.device)
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            local = param.to_local()
            count = torch.arange(local.numel(), dtype=torch.float32, device="cpu")
            local.copy_(torch.sin(count + index).view(local.shape).to(local.device))
    learn(model, world.tensor(3, 13))
    grads = {name: param.grad.to_local() for name, param in model.named_parameters()}
    return world.values(model, **grads)

"""How much is whole at a time, who keeps memory, and gathers and reductions without copies."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

import fsdp2
from fsdp2._core.engine.tree import unit_of
from tests.kit import sim
from tests.kit.meshes import shared_mesh
from tests.kit.models import WIDTH, Block, each_block
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import learn, train, training

LONG = 1e-5  # sums over 20480 elements
LEARNT = 7  # steps: ranks exchange what they know of parts in the first ones, and then no more
AGREES = "with little memory the host waits after backward, so that parts are reduced early"


@scenario(2)
def memory_low(world: World) -> Values:
    return train(world, set_up=lambda model: model.set_memory("low"))


@scenario(2, slow=True)
def memory_balanced(world: World) -> Values:
    return train(world, set_up=lambda model: model.set_memory("balanced"))


@scenario(2)
def memory_fast(world: World) -> Values:
    return train(world, set_up=lambda model: model.set_memory("fast"))


@scenario(2)
def memory_of_so_many_bytes(world: World) -> Values:
    return train(world, set_up=lambda model: model.set_memory(32768))


@scenario(2)
def kept_between_forward_and_backward(world: World) -> Values:
    return train(world, reshard_after_forward=False)


@scenario(2, slow=True)
def whole_storage_kept(world: World) -> Values:
    """The memory of whole parameters stays: gathers write where backward has read."""
    return train(world, set_up=lambda model: model.set_keep_unsharded_storage(True))


@scenario(2)
def whole_storage_kept_without_copies(world: World) -> Values:
    def set_up(model: Any) -> None:
        model.set_keep_unsharded_storage(True)
        model.set_copy_free_min_bytes(1)

    return train(world, set_up=set_up)


@scenario(2, slow=True)
def kept_after_backward(world: World) -> Values:
    """Units stay whole between the backwards of a step."""

    def set_up(model: Any) -> None:
        model.set_reshard_after_backward(False)

    run = training(world, set_up=set_up, microbatches=2, reshard_after_forward=False)
    for step in run.steps():
        for index in range(2):
            learn(run.model, run.inputs[2 * step + index])
        run.update()
    return run.values()


@scenario(2, slow=True)
def whole_at_evaluation(world: World) -> Values:
    """Parameters that stay whole between forwards without gradients, and steps in between."""
    run = training(world, reshard_after_forward=False)
    seen = {}
    for step in run.steps():
        with torch.no_grad():
            seen[f"first {step}"] = run.model(run.inputs[step])
            seen[f"second {step}"] = run.model(run.inputs[step])
        learn(run.model, run.inputs[step])
        run.update()
    return run.values(**seen)


@scenario(2)
def without_copies(world: World) -> Values:
    """Each parameter is gathered right where it is used."""
    return train(world, set_up=lambda model: model.set_copy_free_min_bytes(1))


@scenario(3, slow=True)
def without_copies_uneven(world: World) -> Values:
    return train(world, set_up=lambda model: model.set_copy_free_min_bytes(1))


@scenario(2)
def without_copies_with_little_memory(world: World) -> Values:
    def set_up(model: Any) -> None:
        model.set_copy_free_min_bytes(500)
        model.set_memory("low")

    return train(world, set_up=set_up, microbatches=2)


@scenario(4, slow=True)
def without_copies_over_a_smaller_mesh(world: World) -> Values:
    return train(
        world, set_up=lambda model: model.set_copy_free_min_bytes(1), reshard_after_forward=2
    )


class LargeRoot(nn.Module):
    """An embedding and a head of a MiB each, which are parts of the root, and a small norm.

    ``reads_weight``: the forward takes the head's weight and never calls the head, as a loss does
    that is fused with it.
    """

    def __init__(self, tied: bool = False, reads_weight: bool = False) -> None:
        super().__init__()
        self.reads_weight = reads_weight
        self.embed = nn.Linear(WIDTH, 20480, bias=False)
        self.mix = nn.Linear(20480, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 20480, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(self.embed(x)) / 100
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return nn.functional.linear(x, self.head.weight) if self.reads_weight else self.head(x)


@scenario(2, tolerance=LONG)
def parts_of_a_root(world: World) -> Values:
    """Large parts are groups of their own: reduced and released early, once that is learnt."""
    return train(world, LargeRoot, steps=8, unsteady=LEARNT)


@scenario(2, slow=True, tolerance=LONG, may_wait=AGREES)
def parts_of_a_root_with_little_memory(world: World) -> Values:
    return train(world, LargeRoot, set_up=lambda model: model.set_memory("low"))


@scenario(2, slow=True, tolerance=LONG)
def parts_of_a_root_kept(world: World) -> Values:
    set_up = operator.methodcaller("set_memory", "fast")
    return train(world, LargeRoot, steps=8, unsteady=LEARNT, set_up=set_up)


@scenario(2, slow=True, tolerance=LONG)
def parts_of_a_root_read_by_their_weights(world: World) -> Values:
    """Nothing tells who reads the head: after a few steps ranks ask each other no more."""
    return train(world, lambda: LargeRoot(reads_weight=True), steps=10, unsteady=LEARNT + 2)


@scenario(2, slow=True)
def gathered_memory_is_given_back(world: World) -> Values:
    """Between forward and backward, and after a step, no lane holds what it gathered."""
    run = training(world)
    for step in run.steps():
        loss = run.model(run.inputs[step]).square().sum()
        assert not held_by_lanes(run.model)
        loss.backward()
        assert not held_by_lanes(run.model)
        run.update()
    return run.values()


def held_by_lanes(model: nn.Module) -> list[Any]:
    unit = unit_of(model)
    assert unit is not None
    assert unit.runtime is not None
    retired = getattr(unit.runtime.context.streams, "_retired", {})
    return [held for lane in retired.values() for held in lane]


@scenario(2, slow=True, tolerance=LONG)
def parts_of_a_root_tied(world: World) -> Values:
    return train(world, lambda: LargeRoot(True), microbatches=2, steps=8, unsteady=LEARNT)


@scenario(2, tolerance=2e-2)
def wire_dtype(world: World) -> Values:
    """Gradients travel in bf16 and are summed in fp32: an all-to-all and a local sum."""
    return train(world, set_up=lambda model: model.set_gradient_wire_dtype(torch.bfloat16))


@scenario(2)
def one_reduction_at_a_time(world: World) -> Values:
    return train(world, set_up=lambda model: model.set_reduce_scatter_max_input_buffers(1))


@scenario(2, slow=True)
def prefetch_by_hand(world: World) -> Values:
    def set_up(model: Any) -> None:
        first, second, third = each_block(model)
        model.set_modules_to_forward_prefetch([first, second])
        first.set_modules_to_forward_prefetch([third])
        third.set_modules_to_backward_prefetch([second, first])

    return train(world, set_up=set_up)


@scenario(2, slow=True)
def backward_that_gathers_nothing(world: World) -> Values:
    """A unit whose backward reads no parameter is told not to gather."""

    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.shift

    make = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Shift(), nn.Linear(WIDTH, WIDTH))  # noqa: E731
    return train(
        world,
        make,
        units=lambda model: [model[0], model[1]],
        set_up=lambda model: model[1].set_unshard_in_backward(False),
    )


@scenario(2, tolerance=5e-6)  # gradients of a later step: small differences of large numbers
def gradients_that_users_keep(world: World) -> Values:
    """Gradients of every other step are kept: their memory is not used again."""
    run = training(world)
    kept = {}
    for step in run.steps():
        learn(run.model, run.inputs[step])
        if step % 2:
            for name, param in run.model.named_parameters():
                kept[f"{step} {name}"] = param.grad.to_local()
        run.update()
    return run.values(**kept)


@scenario(2)
def gradients_that_add_up(world: World) -> Values:
    """Sharded gradients are not cleared: a second reduction is added to the first."""
    run = training(world, microbatches=2)
    for step in run.steps():
        for index in range(2):
            learn(run.model, run.inputs[2 * step + index])
        run.update()
    return run.values()


@scenario(2, slow=True)
def gradients_that_are_zeroed(world: World) -> Values:
    run = training(world)
    for step in run.steps():
        learn(run.model, run.inputs[step])
        run.optim.step()
        run.optim.zero_grad(set_to_none=False)
    return run.values()


@scenario(2, slow=True)
def averages(world: World) -> Values:
    run = training(world)
    ema = fsdp2.optim.EMA(run.model, 0.9)
    for step in run.steps():
        learn(run.model, run.inputs[step])
        run.update()
        ema.update()
    with ema.swapped():
        seen = {
            f"average {name}": param.to_local().clone()
            for name, param in run.model.named_parameters()
        }
    return run.values(**seen)


def transient_nbytes(world: World, count: int, replicas: int) -> int:
    """Return the most memory of a step of so many layers, beyond what stays after it."""
    width = 64
    mesh = shared_mesh((replicas, world.size // replicas), ("replicate", "shard"))
    model: Any = nn.Sequential(*(nn.Linear(width, width) for _ in range(count))).bfloat16()
    policy = fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for module in (*model, model):
        fsdp2.fully_shard(module, mesh=mesh, mp_policy=policy)
    x = torch.ones(1, width, dtype=torch.bfloat16)
    for _ in range(3):  # what is learnt in the first steps takes memory once
        model.zero_grad()
        learn(model, x)
    model.zero_grad()
    if world.kind != "sim":
        return 0
    sim.finish()
    assert not sim.reports()
    sim.load().forget()
    learn(model, x)
    sim.finish()
    _, _, live, peak = sim.load().counts()
    return int(peak - live)


@scenario(4)
def reductions_of_many_layers_over_replicas(world: World) -> Values:
    """A layer's reduced gradient in fp32 is freed when its bf16 one is there, not after backward.

    Else the memory of a step grows by it with each layer (torch's pull request 179443).
    """
    reduced = 64 * 65 * 4 // 2  # bytes of a layer's part of two
    for replicas in (1, 2):
        few, many = (transient_nbytes(world, count, replicas) for count in (4, 16))
        assert many - few < 3 * reduced, (replicas, few, many)  # of twelve layers more
    return train(world, set_up=lambda model: model.set_memory("balanced"))

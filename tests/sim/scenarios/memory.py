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
from tests.kit.in_turn import shard_each
from tests.kit.meshes import shared_mesh
from tests.kit.models import WIDTH, Block, each_block
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import Training, each_step, learn, sets, train, trained, training

LONG = 1e-5  # sums over 20480 elements
LEARNT = 7  # steps: ranks exchange what they know of parts in the first ones, and then no more
AGREES = "with little memory the host waits after backward, so that parts are reduced early"


trained("memory_low", set_up=sets(memory="low"))
trained("memory_balanced", slow=True, set_up=sets(memory="balanced"))
trained("memory_fast", set_up=sets(memory="fast"))
trained("memory_of_so_many_bytes", set_up=sets(memory=32768))
trained("kept_between_forward_and_backward", reshard_after_forward=False)
# The memory of whole parameters stays: gathers write where backward has read.
trained("whole_storage_kept", slow=True, set_up=sets(keep_unsharded_storage=True))
trained(
    "whole_storage_kept_without_copies",
    set_up=sets(keep_unsharded_storage=True, copy_free_min_bytes=1),
)


@each_step(
    slow=True,
    set_up=sets(reshard_after_backward=False),
    microbatches=2,
    reshard_after_forward=False,
)
def kept_after_backward(run: Training, step: int) -> None:
    """Units stay whole between the backwards of a step."""
    run.accumulate(step)


@each_step(slow=True, reshard_after_forward=False)
def whole_at_evaluation(run: Training, step: int) -> Values:
    """Parameters that stay whole between forwards without gradients, and steps in between."""
    with torch.no_grad():
        first, second = (run.model(run.inputs[step]) for _ in range(2))
    run.train(step)
    return {"first": first, "second": second}


# Each parameter is gathered right where it is used.
trained("without_copies", set_up=sets(copy_free_min_bytes=1))
trained("without_copies_uneven", 3, slow=True, set_up=sets(copy_free_min_bytes=1))
trained(
    "without_copies_with_little_memory",
    set_up=sets(copy_free_min_bytes=500, memory="low"),
    microbatches=2,
)
trained(
    "without_copies_over_a_smaller_mesh",
    4,
    slow=True,
    set_up=sets(copy_free_min_bytes=1),
    reshard_after_forward=2,
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


# Large parts are groups of their own: reduced and released early, once that is learnt.
trained("parts_of_a_root", make=LargeRoot, tolerance=LONG, steps=8, unsteady=LEARNT)
trained(
    "parts_of_a_root_with_little_memory",
    make=LargeRoot,
    slow=True,
    tolerance=LONG,
    may_wait=AGREES,
    set_up=sets(memory="low"),
)


@scenario(2, slow=True, tolerance=LONG)
def parts_of_a_root_kept(world: World) -> Values:
    set_up = operator.methodcaller("set_memory", "fast")
    return train(world, LargeRoot, steps=8, unsteady=LEARNT, set_up=set_up)


# Nothing tells who reads the head: after a few steps ranks ask each other no more.
trained(
    "parts_of_a_root_read_by_their_weights",
    make=lambda: LargeRoot(reads_weight=True),
    slow=True,
    tolerance=LONG,
    steps=10,
    unsteady=LEARNT + 2,
)


@each_step(slow=True)
def gathered_memory_is_given_back(run: Training, step: int) -> None:
    """Between forward and backward, and after a step, no lane holds what it gathered."""
    loss = run.model(run.inputs[step]).square().sum()
    assert not held_by_lanes(run.model)
    loss.backward()
    assert not held_by_lanes(run.model)
    run.update()


def held_by_lanes(model: nn.Module) -> list[Any]:
    unit = unit_of(model)
    retired = getattr(unit.runtime.context.streams, "_retired", {})
    return [held for lane in retired.values() for held in lane]


trained(
    "parts_of_a_root_tied",
    make=lambda: LargeRoot(True),
    slow=True,
    tolerance=LONG,
    microbatches=2,
    steps=8,
    unsteady=LEARNT,
)
# Gradients travel in bf16 and are summed in fp32: an all-to-all and a local sum.
trained("wire_dtype", tolerance=2e-2, set_up=sets(gradient_wire_dtype=torch.bfloat16))
trained("one_reduction_at_a_time", set_up=sets(reduce_scatter_max_input_buffers=1))


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


@each_step(tolerance=5e-6)  # gradients of a later step: small differences of large numbers
def gradients_that_users_keep(run: Training, step: int) -> Values:
    """Gradients of every other step are kept: their memory is not used again."""
    run.learn(step)
    params = dict(run.model.named_parameters()) if step % 2 else {}
    kept = {name: param.grad.to_local() for name, param in params.items()}
    run.update()
    return kept


@each_step(microbatches=2)
def gradients_that_add_up(run: Training, step: int) -> None:
    """Sharded gradients are not cleared: a second reduction is added to the first."""
    run.accumulate(step)


@each_step(slow=True)
def gradients_that_are_zeroed(run: Training, step: int) -> None:
    run.learn(step)
    run.optim.step()
    run.optim.zero_grad(set_to_none=False)


@scenario(2, slow=True)
def averages(world: World) -> Values:
    run = training(world)
    ema = fsdp2.optim.EMA(run.model, 0.9)
    for step in run.steps():
        run.train(step)
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
    shard_each(*model, model, mesh=mesh, mp_policy=policy)
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
    return train(world, set_up=sets(memory="balanced"))

"""Scenarios for planted faults: each is as small as what it has to reach allows.

`tests.sim._faults` says which fault each one must find. Without a fault all of them are clean.
Where a line matters for one order of events only (the host writes right after an evaluation, a user
gathers right after the optimizer), the scenario makes just that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import Shard
from torch.func import functional_call

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.kit.in_turn import advance
from tests.kit.models import WIDTH, Block, Stack, each_block, loss_of, no_units, stack
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import (
    LR,
    ROWS,
    SGD,
    Training,
    each_step,
    learn,
    sets,
    train,
    trained,
)
from tests.sim.scenarios.comms import AsyncScatter, FreshMemory, made
from tests.sim.scenarios.graphs import COUNTED, loads
from tests.sim.scenarios.streams import optimizer_elsewhere

STACK = stack(count=2)
ON_HOST = "the optimizer runs on the host"
WRITES = "the host writes to shards, and waits until nothing reads them"
COARSE = 2e-2  # for sums in bf16
BF16 = torch.bfloat16

reach = functools.partial(trained, slow=True, make=STACK, steps=5)


def sharded(world: World, make: Callable[[], nn.Module] = STACK, **kwargs: Any) -> Any:
    model = world.build(make)
    return world.shard(model, each_block(model), **kwargs)


def batches(world: World, count: int) -> list[Tensor]:
    return [world.tensor(ROWS, WIDTH, seed=step) for step in range(count)]


# Reductions.


def learn_twice(model: Any, x: Tensor) -> None:
    for is_last in (False, True):
        model.set_requires_all_reduce(is_last)
        learn(model, x)


# HSDP with late sums in a dtype that no gradient is kept in: they lie in the wire's memory.
reach(
    "reach_sums_kept_apart",
    4,
    tolerance=COARSE,
    mesh=(2, 2),
    mp_policy=MixedPrecisionPolicy(reduce_dtype=BF16),
    each=learn_twice,
)


@scenario(2, slow=True)
def reach_a_hook_on_a_stream(world: World) -> Values:
    """An all-reduce hook in a stream of the user's, which computes a factor there."""
    stream = torch.Stream(world.device) if world.is_simulated else None
    factor = world.tensor(1, by_rank=False)

    def scale(reduced: Tensor) -> None:
        reduced.mul_(factor)

    def set_up(model: Any) -> None:
        for unit in (*model.blocks, model):
            unit.set_all_reduce_hook(scale, stream=stream)

    if stream is not None:
        stream.wait_stream(torch.accelerator.current_stream())

    def learn_by(model: Any, x: Tensor) -> None:
        if stream is None:
            factor.mul_(0.5)
        else:
            with stream:
                factor.mul_(0.5)
        learn(model, x)

    return train(world, STACK, steps=5, set_up=set_up, each=learn_by)


class Idle(Block):
    """A block with a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)


# Zeros stand for gradients that miss; the host has nothing to look at.
reach(
    "reach_unused_parameters_that_are_reduced",
    make=stack(Idle, 2),
    set_up=sets(reduce_scatter_unused_params=True),
)
# A parameter that nobody used has no gradient: weight decay would show one.
reach(
    "reach_unused_parameters",
    may_wait="the host looks whether anybody had a gradient",
    make=stack(Idle, 2),
    steps=3,
    optimizer=functools.partial(torch.optim.SGD, weight_decay=0.5),
)


class Transposed(nn.Module):
    """A linear layer whose weight lies in memory by columns, as its gradients then do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / 4)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight + self.bias)


# One rank, which packs each gradient whole.
reach("reach_permuted_gradients", 1, make=Transposed, units=no_units)


class Gain(nn.Module):
    """A scalar: a parameter that every rank keeps, and nobody sends."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class Empty(nn.Module):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.none.sum()


# One whose parameter every rank keeps, and one whose parameter has no elements.
reach(
    "reach_a_unit_that_gathers_nothing",
    make=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Gain(), Empty(), nn.Linear(WIDTH, 3)),
    units=lambda model: [model[1], model[2]],
)
reach("reach_gradients_that_travel_narrow", tolerance=COARSE, set_up=sets(gradient_wire_dtype=BF16))


def scatter_asynchronously(model: Any) -> None:
    for unit in (*model.blocks, model):
        unit.set_custom_reduce_scatter(made(FreshMemory, AsyncScatter))


reach("reach_custom_collectives", set_up=scatter_asynchronously)
# Gradients in a narrower dtype than they are reduced in are copied out of the sum.
reach("reach_kept_gradients", mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))


# Gathers.


# Parameters travel by themselves, right into the memory where they are used.
reach("reach_copy_free", set_up=sets(copy_free_min_bytes=1))


class Detour(Stack):
    """Runs its blocks in another order now and then, so that what was prefetched is in vain."""

    is_straight = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks if self.is_straight else [self.blocks[0]]:
            x = block(x)
        return self.out(x)


@each_step(
    slow=True,
    may_wait="ranks tell each other what they do where the order changes",
    unsteady=8,
    make=lambda: Detour(count=3),
    steps=10,
    set_up=sets(copy_free_min_bytes=1),
)
def reach_gathers_in_vain(run: Training, step: int) -> None:
    """A prefetched unit does not run: its gather, into the memory of the whole, is dropped."""
    run.model.is_straight = step % 2 == 0
    with torch.no_grad():
        loss_of(run.model(run.inputs[step]))  # in memory that the dropped gather may have had
    run.model.is_straight = True
    run.train(step)


reach("reach_a_smaller_mesh", 4, reshard_after_forward=2)


@scenario(1, slow=True, tolerance=COARSE)
def reach_replaced_parameters(world: World) -> Values:
    """A parameter is replaced between the forwards of two blocks: it is adopted in a forward.

    On one rank: several write the number of the gather behind the shards, and the host waits once.
    """
    model = sharded(world, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    fresh = [world.tensor(Block().up.weight.shape[0], WIDTH, seed=s, by_rank=False) for s in (7, 8)]
    inputs = batches(world, 2)
    found = {}

    def replace(step: int, *_: Any) -> None:
        if step >= 0:  # its values are computed in the forward, as they are needed
            model.blocks[1].up.weight = nn.Parameter(fresh[step] / 4)

    for step in world.steps(2):
        handle = model.blocks[0].register_forward_hook(functools.partial(replace, step))
        learn(model, inputs[step])
        handle.remove()
        found[f"loss {step}"] = loss_of(model(inputs[step]))
    return world.values(model, **found)


@each_step(slow=True, make=STACK)
def reach_gathers_by_hand(run: Training, step: int) -> None:
    """Units are gathered right after the optimizer, before their forward."""
    run.train(step)
    for block in run.model.blocks:
        block.unshard(async_op=True)


@scenario(2, slow=True)
def reach_an_optimizer_on_a_stream(world: World) -> Values:
    return optimizer_elsewhere(world, own=False, make=STACK)


class Blocks(nn.Module):
    """Computes something before its first parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(2.0 * x)
        for block in self.blocks:
            x = block(x)
        return x


@scenario(2, slow=True)
def reach_an_optimizer_beside_a_root_of_none(world: World) -> Values:
    """A root without parameters: compute waits for no gather, and so not for the optimizer."""
    return optimizer_elsewhere(world, own=False, make=Blocks)


def learn_scaled(model: Any, x: Tensor, name: str = "blocks.0.up.weight") -> None:
    scaled = dict(model.named_parameters())[name] * 0.5
    loss_of(functional_call(model, {name: scaled}, (x,))).backward()


# A tensor stands in for a parameter during one forward, and is gathered by itself.
reach("reach_placeholders", set_up=sets(reduce_scatter_unused_params=True), each=learn_scaled)


def pre_all_gather(self: Tensor, mesh: Any) -> Any:
    return (self * 2.0,), None


def post_all_gather(
    self: Tensor, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
) -> Any:
    if out is not None:
        return None
    (whole,) = outputs
    return whole, (whole,)


def extend(model: nn.Module) -> None:
    """Let the shards of some weights say what is sent for them: twice their values."""
    for block in each_block(model):
        local = block.up.weight._local_tensor  # type: ignore[union-attr]  # a DTensor
        local.fsdp_pre_all_gather = MethodType(pre_all_gather, local)  # type: ignore[operator]
        local.fsdp_post_all_gather = MethodType(post_all_gather, local)  # type: ignore[operator]


# Methods are set on shards: the first gather moves these to memory of their own.
reach("reach_a_late_extension", 1, set_up=extend, steps=2)
reach("reach_an_extension", set_up=extend)


def learn_and_decay(model: Any, x: Tensor) -> None:
    decay = sum(param.square().mean() for param in model.parameters())
    (loss_of(model(x)) + decay.full_tensor()).backward()


# A term of the loss is of the shards: autograd adds to gradients that are being reduced.
reach("reach_gradients_from_outside", each=learn_and_decay)


# Offloading.


@scenario(2, slow=True)
def reach_offloaded_without_sync(world: World) -> Values:
    """Microbatches whose gradients only add up need no wait of the host while their graph lives."""
    model = sharded(world, offload_policy=CPUOffloadPolicy())
    optim = SGD(model.parameters(), lr=LR)
    inputs = batches(world, 8)
    for step in range(4):
        model.set_is_last_backward(False)
        model.set_requires_gradient_sync(False)
        with world.steady() if step >= 2 else contextlib.nullcontext():
            kept = model(inputs[step])
            loss_of(kept).backward()
        del kept
        model.set_is_last_backward(True)
        model.set_requires_gradient_sync(True)
        learn(model, inputs[4 + step])
        advance(optim)
    world.name_lanes()
    return world.values(model)


# Gradients that the host copies once more, because they travel by another dim first.
reach(
    "reach_offloaded_on_another_dim",
    may_wait=ON_HOST,
    offload_policy=CPUOffloadPolicy(),
    shard_placement_fn=lambda param: Shard(param.dim() - 1),
)


def overwritten(before: Callable[[Any, Tensor], None]) -> None:
    """Add a scenario: the host writes to offloaded shards right after what gathered them."""

    @functools.wraps(before)
    def program(world: World) -> Values:
        model = sharded(world, offload_policy=CPUOffloadPolicy())
        inputs = batches(world, 3)
        learn(model, inputs[0])
        for step in world.steps(3):
            before(model, inputs[step])
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.9)
        return world.values(model)

    scenario(2, slow=True, may_wait=WRITES)(program)


@overwritten
def reach_writes_after_an_evaluation(model: Any, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


@overwritten
def reach_writes_after_a_lost_graph(model: Any, x: Tensor) -> None:
    model(x)  # its graph is gone at once


@overwritten
def reach_writes_after_a_gather_by_hand(model: Any, x: Tensor) -> None:
    model.unshard()
    model.reshard()


@overwritten
def reach_writes_after_a_state(model: Any, x: Tensor) -> None:
    model.unshard()
    model.state_dict()


@overwritten
def reach_writes_without_sync(model: Any, x: Tensor) -> None:
    model.set_requires_gradient_sync(False)
    kept = vars(model).setdefault("kept", [])
    kept.append(model(x))  # its graph lives on
    loss_of(kept[-1]).backward()


# Ends of steps.


reach("reach_few_reductions", make=stack(count=4), set_up=sets(memory="low"))


class Fails(Stack):
    """Raises in the middle of a forward, or of a backward, when told to."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 0 and self.where == "forward":
                raise ArithmeticError
            if index == 0 and self.where == "backward":
                x.register_hook(self.stop)
        return self.out(x)

    def stop(self, grad: Tensor) -> None:
        raise ArithmeticError


@each_step(
    slow=True,
    may_wait="a step that failed leaves work in flight",
    make=lambda: Fails(count=3),
    steps=6,
)
def reach_recovery(run: Training, step: int) -> None:
    run.model.where = {1: "forward", 3: "backward"}.get(step, "")
    try:
        run.learn(step)
        run.optim.step()
    except ArithmeticError:
        pass
    run.optim.zero_grad()  # whatever was reduced before it failed


def learn_by_hand(model: Any, x: Tensor) -> None:
    learn(model, x)
    model.finalize_backward(async_op=True).wait()


# The caller ends backwards, and waits for the reductions later.
reach(
    "reach_finalization_by_hand",
    set_up=sets(manual_backward_finalization=True),
    each=learn_by_hand,
)


class Embedded(nn.Module):
    """Blocks between an embedding and a head that are large enough to be parts of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1024, 256)
        self.inp = nn.Linear(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.wide = nn.Linear(WIDTH, 256)
        self.head = nn.Linear(256, 1024)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.wide(x))


@scenario(2, slow=True)
def reach_parts_of_a_root(world: World) -> Values:
    """Large parts of a root are reduced early; after the first steps nobody tells of them."""
    model = sharded(world, Embedded)
    optim = SGD(model.parameters(), lr=LR)
    generator = torch.Generator("cpu").manual_seed(world.rank)
    inputs = [
        torch.randint(1024, (ROWS,), generator=generator, device="cpu").to(world.device)
        for _ in range(8)
    ]
    for step in world.steps(8, unsteady=7):
        loss_of(model(inputs[step])).backward()
        advance(optim)
    return {name: part[:8] for name, part in world.values(model).items()}


# Between steps.


def learn_little(model: Any, x: Tensor) -> None:
    learn(model, x)
    fsdp2.clip_grad_norm_(model.parameters(), 0.1)


reach("reach_clipping", each=learn_little)


@each_step(slow=True, make=STACK, steps=3)
def reach_whole_parameters(run: Training, step: int) -> Mapping[str, Tensor]:
    """Whole parameters are gathered in buckets right after the optimizer."""
    run.train(step)
    found = fsdp2.full_params(run.model, max_bytes=1 << 12)
    return {name: whole * 2.0 for name, whole in found}


# Runs of shards that lie side by side are stepped as one tensor.
reach(
    "reach_local_optimizers",
    steps=4,
    optimizer=functools.partial(fsdp2.optim.local, torch.optim.SGD, momentum=0.9),
)


@scenario(2, slow=True, tolerance=COUNTED)
def reach_a_loaded_optimizer(world: World) -> Values:
    run, taken = loads(world)
    return taken.values(run)

"""Scenarios for planted faults: each is as small as what it has to reach allows.

`tests.sim._faults` says which fault each one must find. Without a fault all of them are clean.
Where a line matters for one order of events only (the host writes right after an evaluation, a user
gathers right after the optimizer), the scenario makes just that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.func import functional_call

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy
from fsdp2._core.base import torch_comm
from tests.kit.models import WIDTH, Block, Stack, each_block, loss_of, stack
from tests.sim._world import Values, World, scenario

STACK = stack(count=2)
ROWS, LR = 3, 0.05
SGD = functools.partial(torch.optim.SGD, momentum=0.9)
ON_HOST = "the optimizer runs on the host"
WRITES = "the host writes to shards, and waits until nothing reads them"
COARSE = 2e-2  # for sums in bf16


def learn(model: Any, x: Tensor) -> None:
    loss_of(model(x)).backward()


def sharded(
    world: World,
    make: Callable[[], nn.Module] = STACK,
    units: Callable[[nn.Module], Any] = each_block,
    **kwargs: Any,
) -> Any:
    model = world.build(make)
    return world.shard(model, units(model), **kwargs)


def batches(world: World, count: int) -> list[Tensor]:
    return [world.tensor(ROWS, WIDTH, seed=step) for step in range(count)]


def train(
    world: World,
    model: Any,
    steps: int = 5,
    do: Callable[..., None] = learn,
) -> Values:
    optim = SGD(model.parameters(), lr=LR)
    inputs = batches(world, steps)
    for step in world.steps(steps):
        do(model, inputs[step])
        optim.step()
        optim.zero_grad()
    return world.values(model)


# Reductions.


@scenario(4, slow=True, tolerance=COARSE)
def reach_sums_kept_apart(world: World) -> Values:
    """HSDP with late sums in a dtype that no gradient is kept in: they lie in the wire's memory."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    model = sharded(world, mesh=world.mesh(2, 2), mp_policy=policy)

    def learn_twice(model: Any, x: Tensor) -> None:
        for is_last in (False, True):
            model.set_requires_all_reduce(is_last)
            learn(model, x)

    return train(world, model, do=learn_twice)


@scenario(2, slow=True)
def reach_a_hook_on_a_stream(world: World) -> Values:
    """An all-reduce hook in a stream of the user's, which computes a factor there."""
    model = sharded(world)
    stream = torch.Stream(world.device) if world.is_simulated else None
    factor = world.tensor(1, by_rank=False)

    def scale(reduced: Tensor) -> None:
        reduced.mul_(factor)

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

    return train(world, model, do=learn_by)


class Idle(Block):
    """A block with a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)


@scenario(2, slow=True)
def reach_unused_parameters_that_are_reduced(world: World) -> Values:
    """Zeros stand for gradients that miss; the host has nothing to look at."""
    model = sharded(world, stack(Idle, 2))
    model.set_reduce_scatter_unused_params(True)
    return train(world, model)


@scenario(2, slow=True, may_wait="the host looks whether anybody had a gradient")
def reach_unused_parameters(world: World) -> Values:
    """A parameter that nobody used has no gradient: weight decay would show one."""
    model = sharded(world, stack(Idle, 2))
    optim = torch.optim.SGD(model.parameters(), lr=LR, weight_decay=0.5)
    inputs = batches(world, 3)
    for step in world.steps(3):
        learn(model, inputs[step])
        optim.step()
        optim.zero_grad()
    return world.values(model)


class Transposed(nn.Module):
    """A linear layer whose weight lies in memory by columns, as its gradients then do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / 4)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight + self.bias)


@scenario(1, slow=True)
def reach_permuted_gradients(world: World) -> Values:
    """One rank, which packs each gradient whole."""
    return train(world, sharded(world, Transposed, units=lambda _: []))


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


@scenario(2, slow=True)
def reach_a_unit_that_gathers_nothing(world: World) -> Values:
    """One whose parameter every rank keeps, and one whose parameter has no elements."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Gain(), Empty(), nn.Linear(WIDTH, 3))

    return train(world, sharded(world, make, units=lambda model: [model[1], model[2]]))


@scenario(2, slow=True, tolerance=COARSE)
def reach_gradients_that_travel_narrow(world: World) -> Values:
    model = sharded(world)
    model.set_gradient_wire_dtype(torch.bfloat16)
    return train(world, model)


class Scatter(fsdp2.ReduceScatter):
    """A collective of the user's that is asynchronous, whatever it is asked for."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool
    ) -> Any:
        return torch_comm.reduce_scatter_single(output_tensor, input_tensor, op, group, True)


@scenario(2, slow=True)
def reach_custom_collectives(world: World) -> Values:
    model = sharded(world)
    for unit in (*model.blocks, model):
        unit.set_custom_reduce_scatter(Scatter())
    return train(world, model)


@scenario(2, slow=True)
def reach_kept_gradients(world: World) -> Values:
    """Gradients in a narrower dtype than they are reduced in are copied out of the sum."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    return train(world, sharded(world, mp_policy=policy))


# Gathers.


@scenario(2, slow=True)
def reach_copy_free(world: World) -> Values:
    """Parameters travel by themselves, right into the memory where they are used."""
    model = sharded(world)
    model.set_copy_free_min_bytes(1)
    return train(world, model)


class Detour(Stack):
    """Runs its blocks in another order now and then, so that what was prefetched is in vain."""

    is_straight = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks if self.is_straight else [self.blocks[0]]:
            x = block(x)
        return self.out(x)


@scenario(2, slow=True, may_wait="ranks tell each other what they do where the order changes")
def reach_gathers_in_vain(world: World) -> Values:
    """A prefetched unit does not run: its gather, into the memory of the whole, is dropped."""
    model = sharded(world, lambda: Detour(count=3))
    model.set_copy_free_min_bytes(1)
    optim = SGD(model.parameters(), lr=LR)
    inputs = batches(world, 10)
    for step in world.steps(10, unsteady=8):
        model.is_straight = step % 2 == 0
        with torch.no_grad():
            loss_of(model(inputs[step]))  # in memory that the dropped gather may have had
        model.is_straight = True
        learn(model, inputs[step])
        optim.step()
        optim.zero_grad()
    return world.values(model)


@scenario(4, slow=True)
def reach_a_smaller_mesh(world: World) -> Values:
    return train(world, sharded(world, reshard_after_forward=2))


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


@scenario(2, slow=True)
def reach_gathers_by_hand(world: World) -> Values:
    """Units are gathered right after the optimizer, before their forward."""
    model = sharded(world)
    optim = SGD(model.parameters(), lr=LR)
    inputs = batches(world, 4)
    for step in world.steps(4):
        learn(model, inputs[step])
        optim.step()
        optim.zero_grad()
        for block in model.blocks:
            block.unshard(async_op=True)
    return world.values(model)


def stepped_on_a_stream(world: World, model: Any) -> Values:
    """Train with an optimizer beside the compute; the next forward's gathers wait for its event."""
    optim = SGD(model.parameters(), lr=LR)
    inputs = batches(world, 4)
    beside = torch.Stream(world.device) if world.is_simulated else None
    for step in world.steps(4):
        learn(model, inputs[step])
        if beside is None:
            optim.step()
        else:
            beside.wait_stream(torch.accelerator.current_stream())
            with beside:
                optim.step()
            model.set_post_optim_event(beside.record_event())
        optim.zero_grad()
    if beside is not None:
        torch.accelerator.current_stream().wait_stream(beside)
    return world.values(model)


@scenario(2, slow=True)
def reach_an_optimizer_on_a_stream(world: World) -> Values:
    return stepped_on_a_stream(world, sharded(world))


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
    return stepped_on_a_stream(world, sharded(world, Blocks))


@scenario(2, slow=True)
def reach_stand_ins(world: World) -> Values:
    """A tensor stands in for a parameter during one forward, and is gathered by itself."""
    model = sharded(world)
    model.set_reduce_scatter_unused_params(True)
    optim = SGD(model.parameters(), lr=LR)
    inputs = batches(world, 5)
    name = "blocks.0.up.weight"
    for step in world.steps(5):
        scaled = dict(model.named_parameters())[name] * 0.5
        loss_of(functional_call(model, {name: scaled}, (inputs[step],))).backward()
        optim.step()
        optim.zero_grad()
    return world.values(model)


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


@scenario(1, slow=True)
def reach_a_late_extension(world: World) -> Values:
    """Methods are set on shards: the first gather moves these to memory of their own."""
    model = sharded(world)
    extend(model)
    return train(world, model, steps=2)


@scenario(2, slow=True)
def reach_an_extension(world: World) -> Values:
    model = sharded(world)
    extend(model)
    return train(world, model)


@scenario(2, slow=True)
def reach_gradients_from_outside(world: World) -> Values:
    """A term of the loss is of the shards: autograd adds to gradients that are being reduced."""
    model = sharded(world)

    def learn_and_decay(model: Any, x: Tensor) -> None:
        decay = sum(param.square().mean() for param in model.parameters())
        (loss_of(model(x)) + decay.full_tensor()).backward()

    return train(world, model, do=learn_and_decay)


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
        optim.step()
        optim.zero_grad()
    world.name_lanes()
    return world.values(model)


@scenario(2, slow=True, may_wait=ON_HOST)
def reach_offloaded_on_another_dim(world: World) -> Values:
    """Gradients that the host copies once more, because they travel by another dim first."""
    from torch.distributed.tensor import Shard

    def place(param: nn.Parameter) -> Shard:
        return Shard(param.dim() - 1)

    model = sharded(world, offload_policy=CPUOffloadPolicy(), shard_placement_fn=place)
    return train(world, model)


def overwritten(world: World, before: Callable[[Any, Tensor], None]) -> Values:
    """The host writes to offloaded shards right after something that gathered them."""
    model = sharded(world, offload_policy=CPUOffloadPolicy())
    inputs = batches(world, 3)
    learn(model, inputs[0])
    for step in world.steps(3):
        before(model, inputs[step])
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9)
    return world.values(model)


@scenario(2, slow=True, may_wait=WRITES)
def reach_writes_after_an_evaluation(world: World) -> Values:
    def evaluate(model: Any, x: Tensor) -> None:
        with torch.no_grad():
            model(x)

    return overwritten(world, evaluate)


@scenario(2, slow=True, may_wait=WRITES)
def reach_writes_after_a_lost_graph(world: World) -> Values:
    def run(model: Any, x: Tensor) -> None:
        model(x)  # its graph is gone at once

    return overwritten(world, run)


@scenario(2, slow=True, may_wait=WRITES)
def reach_writes_after_a_gather_by_hand(world: World) -> Values:
    def gather(model: Any, x: Tensor) -> None:
        model.unshard()
        model.reshard()

    return overwritten(world, gather)


@scenario(2, slow=True, may_wait=WRITES)
def reach_writes_after_a_state(world: World) -> Values:
    def look(model: Any, x: Tensor) -> None:
        model.unshard()
        model.state_dict()

    return overwritten(world, look)


@scenario(2, slow=True, may_wait=WRITES)
def reach_writes_without_sync(world: World) -> Values:
    kept = []

    def add_up(model: Any, x: Tensor) -> None:
        model.set_requires_gradient_sync(False)
        kept.append(model(x))  # its graph lives on
        loss_of(kept[-1]).backward()

    return overwritten(world, add_up)


# Ends of steps.


@scenario(2, slow=True)
def reach_few_reductions(world: World) -> Values:
    model = sharded(world, stack(count=4))
    model.set_memory("low")
    return train(world, model)


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


@scenario(2, slow=True, may_wait="a step that failed leaves work in flight")
def reach_recovery(world: World) -> Values:
    model = sharded(world, lambda: Fails(count=3))
    optim = SGD(model.parameters(), lr=LR)
    inputs = batches(world, 6)
    for step in world.steps(6):
        model.where = {1: "forward", 3: "backward"}.get(step, "")
        try:
            learn(model, inputs[step])
            optim.step()
        except ArithmeticError:
            pass
        optim.zero_grad()  # whatever was reduced before it failed
    return world.values(model)


@scenario(2, slow=True)
def reach_finalization_by_hand(world: World) -> Values:
    """The caller ends backwards, and waits for the reductions later."""
    model = sharded(world)
    model.set_manual_backward_finalization(True)

    def learn_by_hand(model: Any, x: Tensor) -> None:
        learn(model, x)
        model.finalize_backward(async_op=True).wait()

    return train(world, model, do=learn_by_hand)


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
        optim.step()
        optim.zero_grad()
    return {name: part[:8] for name, part in world.values(model).items()}


# Between steps.


@scenario(2, slow=True)
def reach_clipping(world: World) -> Values:
    model = sharded(world)

    def learn_little(model: Any, x: Tensor) -> None:
        learn(model, x)
        fsdp2.clip_grad_norm_(model.parameters(), 0.1)

    return train(world, model, do=learn_little)


@scenario(2, slow=True)
def reach_whole_parameters(world: World) -> Values:
    """Whole parameters are gathered in buckets right after the optimizer."""
    model = sharded(world)
    optim = SGD(model.parameters(), lr=LR)
    inputs = batches(world, 3)
    found = {}
    for step in world.steps(3, unsteady=3):
        learn(model, inputs[step])
        optim.step()
        optim.zero_grad()
        for name, whole in fsdp2.full_params(model, max_bytes=1 << 12):
            found[f"{step} {name}"] = whole * 2.0
    return {name: whole.to("cpu") for name, whole in found.items()}


@scenario(2, slow=True)
def reach_local_optimizers(world: World) -> Values:
    """Runs of shards that lie side by side are stepped as one tensor."""
    model = sharded(world)
    optim = fsdp2.optim.local(torch.optim.SGD, model.parameters(), lr=LR, momentum=0.9)
    inputs = batches(world, 4)
    for step in world.steps(4):
        learn(model, inputs[step])
        optim.step()
        optim.zero_grad()
    return world.values(model)

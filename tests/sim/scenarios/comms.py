"""Collectives and hooks of the user's, extensions of the all-gather, and other scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from fsdp2._core.base import torch_comm
from tests.behaviour.test_extension import Int8Weight
from tests.kit.in_turn import advance
from tests.kit.models import WIDTH, each_block, loss_of
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import sets, train, trained, training

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def all_units(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, fsdp2.FSDPModule)]


class OwnMemory:
    """Buffers that stay: a collective of the user's gives the same memory each time."""

    def __init__(self) -> None:
        self.kept: dict[Any, Tensor] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        key = (tuple(size), dtype)
        if key not in self.kept:
            self.kept[key] = torch.empty(size, dtype=dtype, device=device)
        return self.kept[key]


class FreshMemory:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class Gather(fsdp2.AllGather):
    """In the current stream, and nothing to wait for."""

    def __call__(self, output: Tensor, given: Tensor, group: Any, async_op: bool = False) -> None:
        dist.all_gather_into_tensor(output, given, group)


class AsyncGather(fsdp2.AllGather):
    """A work, whatever it is asked for: in a stream of the process group."""

    def __call__(self, output: Tensor, given: Tensor, group: Any, async_op: bool = False) -> Any:
        return torch_comm.all_gather_single(output, given, group, True)


class Scatter(fsdp2.ReduceScatter):
    def __call__(
        self, output: Tensor, given: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        dist.reduce_scatter_tensor(output, given, op, group)


class AsyncScatter(fsdp2.ReduceScatter):
    def __call__(
        self, output: Tensor, given: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        return torch_comm.reduce_scatter_single(output, given, op, group, True)


def made(*kinds: type) -> Any:
    return type("Custom", kinds, {})()


def custom(memory: type, gather: type, scatter: type) -> Callable[[Any], None]:
    def set_up(model: Any) -> None:
        for unit in all_units(model):
            unit.set_custom_all_gather(made(memory, gather))
            unit.set_custom_reduce_scatter(made(memory, scatter))

    return set_up


trained("custom_collectives", slow=True, set_up=custom(FreshMemory, Gather, Scatter))
trained("custom_collectives_with_works", set_up=custom(FreshMemory, AsyncGather, AsyncScatter))
# The same buffers in every step: who had them before must be done with them.
trained(
    "custom_collectives_on_memory_that_stays",
    set_up=custom(OwnMemory, AsyncGather, AsyncScatter),
    microbatches=2,
)
trained(
    "custom_collectives_and_replicas",
    4,
    slow=True,
    mesh=(2, 2),
    set_up=custom(OwnMemory, Gather, AsyncScatter),
    mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64),
)
trained("reduction_over_a_group_of_its_own", set_up=sets(separate_reduce_scatter_group=True))


# Hooks.


def summing(state: Any, packed: Tensor, reduced: Tensor, group: dist.ProcessGroup) -> None:
    total = packed.clone()
    dist.all_reduce(total, group=group)
    start = reduced.numel() * (group.rank() if reduced.numel() != packed.numel() else 0)
    reduced.copy_(total[start : start + reduced.numel()])


trained("comm_hook", set_up=lambda model: fsdp2.register_comm_hook(model, summing))
trained(
    "comm_hook_and_replicas",
    4,
    slow=True,
    mesh=(2, 2),
    set_up=lambda model: fsdp2.register_comm_hook(model, summing),
)


@scenario(2, slow=True)
def comm_hook_with_a_stream(world: World) -> Values:
    """The hook sends in a stream of its own, and is done when the current stream has waited."""
    side = world.stream()

    def hook(state: Any, packed: Tensor, reduced: Tensor, group: dist.ProcessGroup) -> None:
        with world.beside(side):
            summing(state, packed, reduced, group)

    return train(world, set_up=lambda model: fsdp2.register_comm_hook(model, hook))


@scenario(2, slow=True, tolerance=2e-2)
def compressed(world: World) -> Values:
    """bf16 on the wire; what is rounded off is added to the next gradients."""
    hook = fsdp2.Compress(torch.bfloat16, error_feedback=True)
    return train(world, set_up=lambda model: fsdp2.register_comm_hook(model, hook))


@scenario(2, slow=True, tolerance=2e-3)
def compressed_to_fp16(world: World) -> Values:
    hook = fsdp2.Compress(torch.float16)
    return train(world, set_up=lambda model: fsdp2.register_comm_hook(model, hook))


@scenario(2, slow=True, tolerance=2e-2)
def gradients_in_codes(world: World) -> Values:
    hook = fsdp2.Compress(torch.int8, error_feedback=True)
    return train(world, set_up=lambda model: fsdp2.register_comm_hook(model, hook))


@scenario(4, slow=True, tolerance=2e-2)
def gradients_in_codes_over_replicas(world: World) -> Values:
    hook = fsdp2.Compress(torch.int8, only_replicas=True)
    return train(
        world, mesh=world.mesh(2, 2), set_up=lambda model: fsdp2.register_comm_hook(model, hook)
    )


def halve(reduced: Tensor) -> None:
    reduced.mul_(0.5)


def all_reduce_hook(world: World, stream: Any, **kwargs: Any) -> Values:
    def set_up(model: Any) -> None:
        given = {"stream": stream} if world.is_simulated and stream is not None else {}
        for unit in all_units(model):
            unit.set_all_reduce_hook(halve, **given)

    return train(world, set_up=set_up, **kwargs)


@scenario(2)
def all_reduce_hook_in_our_stream(world: World) -> Values:
    return all_reduce_hook(world, None)


@scenario(2, slow=True)
def all_reduce_hook_in_a_plain_stream(world: World) -> Values:
    return all_reduce_hook(world, world.stream())


@scenario(2)
def all_reduce_hook_in_a_stream_of_the_devices_class(world: World) -> Values:
    return all_reduce_hook(world, world.stream(own=True))


@scenario(2)
def all_reduce_hook_on_wider_sums(world: World) -> Values:
    """Reduced gradients lie in memory of the reduce lane, and a stream of the user's reads them."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    return all_reduce_hook(world, world.stream(own=True), mp_policy=policy)


@scenario(4, slow=True)
def all_reduce_hook_after_replicas(world: World) -> Values:
    return all_reduce_hook(world, None, mesh=world.mesh(2, 2))


# Scales.


trained("gradients_summed", slow=True, set_up=sets(gradient_reduction="sum"), steps=3)


@scenario(2, slow=True)
def divided_by_hand(world: World) -> Values:
    def set_up(model: Any) -> None:
        for unit in all_units(model):
            unit.set_gradient_divide_factor(3.0)
            unit.set_force_sum_reduction_for_comms(True)

    return train(world, set_up=set_up)


@scenario(2, slow=True)
def divided_by_a_factor(world: World) -> Values:
    """NCCL multiplies before it adds: PREMUL_SUM."""

    def set_up(model: Any) -> None:
        for unit in all_units(model):
            unit.set_gradient_divide_factor(5.0)

    return train(world, set_up=set_up)


# Extensions of the all-gather.


class Adapted(nn.Module):
    """A frozen int8 weight, which says itself what is gathered, and trained ones beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False)
        self.a, self.b = nn.Linear(WIDTH, 3, bias=False), nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.frozen(x) + self.b(self.a(x)))


def extended(world: World, kind: type[Int8Weight], **kwargs: Any) -> Values:
    model: Any = world.build(lambda: nn.Sequential(*[Adapted() for _ in range(3)]))
    for block in model:
        weight = kind.quantize(block.frozen.weight)
        block.frozen.weight = nn.Parameter(weight, requires_grad=False)
    world.shard(model, list(model), **kwargs)
    trained = [p for p in model.parameters() if p.requires_grad]
    optim = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    inputs = [world.tensor(3, WIDTH, seed=step) for step in range(4)]
    outputs = {}
    for step in world.steps(4):
        output = model(inputs[step])
        outputs[f"output {step}"] = output.detach()
        loss_of(output).backward()
        advance(optim)
    adapters = nn.ModuleList([layer for block in model for layer in (block.a, block.b)])
    return world.values(adapters, **outputs)


class Apart(Int8Weight):
    """What is made of the gathered tensors lies elsewhere: these are freed at once."""

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        values = (outputs[0].float() * outputs[1][:, None]).to(param_dtype)
        if out is not None:
            out.copy_(values)
            return None
        return values, (values,)

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


@scenario(2)
def extension(world: World) -> Values:
    return extended(world, Int8Weight)


@scenario(2)
def extension_that_copies(world: World) -> Values:
    return extended(world, Apart)


@scenario(3, slow=True, tolerance=2e-2)
def extension_in_bf16_uneven(world: World) -> Values:
    return extended(world, Int8Weight, mp_policy=BF16)


# Looking on.


@scenario(2, slow=True)
def order_checked(world: World) -> Values:
    """`fsdp2.debug.check_order` compares ranks, over the host."""
    run = training(world)
    checker = fsdp2.debug.check_order(run.model)
    for step in run.steps(unsteady=99):
        run.train(step)
    checker.remove()
    assert each_block(run.model)
    return run.values()


@scenario(2, slow=True)
def without_communication(world: World) -> Values:
    run = training(world, steps=3)
    for step in run.steps():
        run.train(step)
    before = run.values()
    with fsdp2.debug.without_communication(run.model):
        run.learn(0)
    run.optim.zero_grad()
    return before

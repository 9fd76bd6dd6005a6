"""Promise: gradients add up and are reduced in the dtypes that users chose (torch 2.15)."""

from __future__ import annotations

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp2
from fsdp2 import ConfigError, MixedPrecisionPolicy
from tests.kit.grad_dtypes import (
    BF16,
    CHOICES,
    FIRST,
    FP16,
    FP32,
    Odd,
    batch_of,
    check_gradients,
    gradients_by_hand,
    is_of_a_norm,
    micro_batch,
)
from tests.kit.meshes import shared_mesh
from tests.kit.parity import make_mesh, whole
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

SCHEDULES = {"each": (True,), "last": (False, False, True)}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", with_slow(CHOICES, FIRST))
@ranks(slow(1), 2, slow(3))
def test_gradients_add_up_and_are_reduced_as_chosen(name: str, schedule: str) -> None:
    check_choice(name, schedule, make_mesh())


@pytest.mark.parametrize(
    ("name", "shape"),
    with_slow(itertools.product(CHOICES, [(2, 2), (4,)]), [("norms_whole", (2, 2))]),
)
@ranks(4)
def test_gradients_of_replicas(name: str, shape: tuple[int, ...]) -> None:
    check_choice(name, "last", make_mesh(*shape))


def check_choice(name: str, schedule: str, mesh: DeviceMesh) -> None:
    choice = CHOICES[name]
    build = functools.partial(Odd, scalar=True)
    model, reference = choice.make(build), choice.make(build)
    fsdp2.fully_shard(model, mesh=mesh, mp_policy=choice.policy())
    for first in (0, 10):
        syncs = SCHEDULES[schedule]
        for index, sync in enumerate(syncs):
            model.set_requires_gradient_sync(sync)
            micro_batch(model, first + index)
        check_gradients(
            model, gradients_by_hand(reference, choice, range(first, first + len(syncs)))
        )
        model.zero_grad(set_to_none=first == 0)


# What is promised one by one.


class Times(nn.Module):
    def __init__(self, dtype: torch.dtype = FP32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


@pytest.mark.parametrize(
    ("reduce_dtype", "expected"), [(None, 1.001953125), (FP32, 1.001953125), (BF16, 1.0)]
)
@ranks(2)
def test_two_micro_batches_keep_what_bf16_loses(
    reduce_dtype: torch.dtype | None, expected: float
) -> None:
    model = fsdp2.fully_shard(Times(), mp_policy=MixedPrecisionPolicy(BF16, reduce_dtype))
    for value in (1.0, 2.0**-9):
        model.set_requires_gradient_sync(value != 1.0)
        model(torch.full((3,), value)).sum().backward()
    assert whole(model.weight.grad).tolist() == [expected] * 3


@ranks(2)
def test_each_parameter_is_asked_once() -> None:
    asked: list[nn.Parameter] = []

    def choose(param: nn.Parameter) -> torch.dtype | None:
        asked.append(param)
        return FP32 if is_of_a_norm(param) else BF16

    model = Odd()
    params = list(model.parameters())
    seen: dict[str, torch.dtype] = {}
    policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=choose)
    fsdp2.fully_shard(model, mp_policy=policy)
    assert [id(p) for p in asked] == [id(p) for p in params]
    model.register_forward_pre_hook(
        lambda module, args: (
            seen.update({n: p.dtype for n, p in module.named_parameters()})
            or seen.update(x=args[0].dtype)
        )
    )
    micro_batch(model, 0)
    micro_batch(copy.deepcopy(model), 0)
    assert len(asked) == len(params)
    assert {n for n, dtype in seen.items() if dtype is FP32} == {
        "up.bias",
        "norm.weight",
        "norm.bias",
    }
    assert seen["x"] is BF16
    assert policy == MixedPrecisionPolicy(BF16, param_dtype_override_fn=choose)
    assert hash(policy) == hash(MixedPrecisionPolicy(BF16, param_dtype_override_fn=choose))
    assert policy != MixedPrecisionPolicy(BF16)
    with pytest.raises(TypeError):
        MixedPrecisionPolicy(BF16, None, None, True, choose)  # type: ignore[misc]  # a keyword


@pytest.mark.parametrize("answer", [FP16, "bf16", 1])
@ranks(2)
def test_a_wrong_answer_changes_nothing(answer: Any) -> None:
    model = Odd()
    policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda p: answer)
    with pytest.raises(ConfigError, match=r"param_dtype_override_fn returned .* for \w+\. Return"):
        fsdp2.fully_shard(model, mp_policy=policy)
    assert type(model) is Odd
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    fsdp2.fully_shard(model)
    micro_batch(model, 0)


@pytest.mark.parametrize(
    ("compiled", "reduce_dtype"),
    with_slow(
        itertools.product([False, True], [None, FP32, BF16]),
        [(False, None), (False, BF16), (True, None)],
    ),
)
@ranks(4)
def test_partial_gradients_are_summed_in_the_wider_dtype(
    compiled: bool, reduce_dtype: torch.dtype | None
) -> None:
    """Tensor-parallel ranks contribute 1 and 2**-9 to the gradient of a replicated parameter."""
    mesh = shared_mesh((2, 2), ("data", "tensor"))

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(
                distribute_tensor(torch.ones(4), mesh["tensor"], [Replicate()])
            )

        def forward(self, x: Tensor) -> Tensor:
            x = DTensor.from_local(x, mesh["tensor"], [Shard(0)], run_check=False)
            return (x * self.weight).to_local()

    model = Norm()
    policy = MixedPrecisionPolicy(BF16, reduce_dtype)
    fsdp2.fully_shard(model, mesh=mesh["data"], mp_policy=policy)
    step = fsdp2.compile(model, backend="aot_eager") if compiled else model
    x = torch.full((1, 4), (1.0, 2.0**-9)[mesh.get_local_rank("tensor")])
    step(x).sum().backward()
    expected = 1.0 if reduce_dtype is BF16 else 1.001953125
    assert whole(model.weight.grad.full_tensor()).tolist() == [expected] * 4


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("reduce_dtype", [None, BF16])
@ranks(4)
def test_uses_of_what_tensor_parallel_ranks_share_add_up_in_the_wider_dtype(
    reduce_dtype: torch.dtype | None, waits: bool
) -> None:
    """One use contributes 1 and another one 2**-9, on each rank, which is then summed over two."""
    mesh = shared_mesh((2, 2), ("data", "tensor"))

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(
                distribute_tensor(torch.ones(4), mesh["tensor"], [Replicate()])
            )

        def forward(self, x: Tensor) -> Tensor:
            x = DTensor.from_local(x, mesh["tensor"], [Shard(0)], run_check=False)
            return (x * self.weight + 2.0**-9 * x * self.weight).to_local()

    model = fsdp2.fully_shard(
        Twice(), mesh=mesh["data"], mp_policy=MixedPrecisionPolicy(BF16, reduce_dtype)
    )
    for sync in (not waits, True):
        model.set_requires_gradient_sync(sync)
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
    expected = 2.0 if reduce_dtype is BF16 else 2.00390625
    assert whole(model.weight.grad.full_tensor()).tolist() == [expected] * 4


@pytest.mark.parametrize("name", with_slow(["bf16", "grads_bf16", "any"], ["bf16"]))
@ranks(2)
def test_gradients_that_wait_are_where_the_parameters_are(name: str) -> None:
    choice = CHOICES[name]
    model, reference = choice.make(), choice.make()
    fsdp2.fully_shard(model, mp_policy=choice.policy())
    model.set_requires_gradient_sync(False)
    micro_batch(model, 0)
    assert all(p.grad is None for p in model.parameters())
    model.unshard()
    waiting = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    for param_name, grad in waiting.items():
        assert grad is not None
        assert grad.dtype is choice.adds_up(reference.get_parameter(param_name)), param_name
    model.reshard()
    model.zero_grad()  # these too
    model.set_requires_gradient_sync(True)
    micro_batch(model, 1)
    check_gradients(model, gradients_by_hand(reference, choice, [1]))
    model.zero_grad()
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    micro_batch(model, 2)
    model.set_requires_gradient_sync(True)
    micro_batch(model, 3)
    check_gradients(model, gradients_by_hand(reference, choice, [2, 3]))


@pytest.mark.parametrize("name", with_slow(["bf16", "bf16_in_bf16", "any"], ["bf16"]))
@ranks(2)
def test_a_group_unused_last_reduces_what_it_has(name: str) -> None:
    choice = CHOICES[name]
    layers = nn.ModuleList([choice.make(), choice.make()])
    model = nn.Module()
    model.layers = layers
    model.forward = lambda x, used: sum(layers[i](x) for i in used)  # type: ignore[method-assign]
    references = copy.deepcopy(layers)
    for layer in layers:
        fsdp2.fully_shard(layer, mp_policy=choice.policy())
    fsdp2.fully_shard(model, mp_policy=choice.policy())
    for step, used in enumerate([[0], [1]]):
        model.set_requires_gradient_sync(step == 1)
        model(batch_of(step), used).float().square().mean().backward()
    for step, (layer, reference) in enumerate(zip(layers, references, strict=True)):
        check_gradients(layer, gradients_by_hand(reference, choice, [step], waits=step == 0))


@ranks(2)
def test_a_parameter_that_one_rank_or_none_uses() -> None:
    choice = CHOICES["bf16"]
    model, reference = choice.make(), choice.make()
    fsdp2.fully_shard(model, mp_policy=choice.policy())
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        micro_batch(model, 0, use_one=False)
    assert model.one.grad is None
    model.zero_grad()
    for step, sync in enumerate((False, True)):
        model.set_requires_gradient_sync(sync)
        micro_batch(model, step, use_one=dist.get_rank() == 0 and step == 0)
    expected = gradients_by_hand(reference, choice, [0])["one"]  # of both ranks: its dtype
    assert model.one.grad.dtype is expected.dtype is FP32
    assert whole(model.one.grad).ne(0).all()

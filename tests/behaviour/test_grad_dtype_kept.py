"""Promise: chosen dtypes of gradients stay, and whoever reads gradients follows them."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import fsdp2
from fsdp2 import ConfigError, MixedPrecisionPolicy
from tests.kit.grad_dtypes import (
    BF16,
    CHOICES,
    FP32,
    FP64,
    Odd,
    assert_same_bits,
    assert_same_values,
    batch_of,
    check_gradients,
    gradients_by_hand,
    micro_batch,
)
from tests.kit.parity import assert_same, whole
from tests.kit.pool import ranks
from tests.kit.slow import with_slow


def kept_dtypes(model: nn.Module) -> dict[str, tuple[Any, Any]]:
    return {
        name: (param.grad_dtype, None if param.grad is None else param.grad.dtype)
        for name, param in model.named_parameters()
        if param.requires_grad
    }


def with_grad_dtypes(when: str) -> nn.Module:
    """Return sharded layers; the first one's gradients are bf16, the second one's may be any."""
    model = nn.Sequential(nn.Linear(13, 29), nn.Linear(29, 3), nn.Linear(3, 1))

    def choose() -> None:
        for layer, dtype in zip(model, (BF16, None), strict=False):
            for param in layer.parameters():
                param.grad_dtype = dtype

    if when == "before":
        choose()
    for layer in model:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(model)
    if when == "after":
        choose()
    return model


def assert_kept(model: nn.Module, stored: torch.dtype) -> None:
    for name, param in model.named_parameters():
        assert param.dtype is stored
        expected = (BF16, None, stored)[int(name[0])]
        assert param.grad_dtype is expected, f"{name}: {param.grad_dtype}"
        model.zero_grad()
    model(batch_of(0).to(stored)).sum().backward()
    for name, param in model.named_parameters():
        assert param.grad.dtype is (BF16, stored, stored)[int(name[0])], name


def move(model: nn.Module) -> None:
    model.to(FP64)


def assign(model: nn.Module) -> None:
    state = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


@pytest.mark.parametrize("change", [move, assign])
@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@ranks(2)
def test_grad_dtypes_survive(when: str, ran: bool, change: Callable[[nn.Module], None]) -> None:
    model = with_grad_dtypes(when)
    if ran:
        assert_kept(model, FP32)
        grads = {name: whole(param.grad).clone() for name, param in model.named_parameters()}
    change(model)
    if ran and change is move:  # a gradient whose dtype was chosen only moves
        for name, param in model.named_parameters():
            dtype = (BF16, FP32, FP64)[int(name[0])]
            assert_same(whole(param.grad), grads[name].to(dtype), name, 0.0)
    assert_kept(model, FP64)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("ran", [False, True])
@ranks(2)
def test_copies_keep_grad_dtypes(when: str, ran: bool) -> None:
    model = with_grad_dtypes(when)
    if ran:
        assert_kept(model, FP32)
        model.zero_grad()
    assert_kept(copy.deepcopy(model), FP32)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert_kept(torch.load(file, weights_only=False), FP32)
    assert_kept(model, FP32)


@ranks(2)
def test_a_copy_keeps_low_precision_gradients() -> None:
    choice = CHOICES["kept"]
    model = fsdp2.fully_shard(choice.make(), mp_policy=choice.policy())
    for each in (model, copy.deepcopy(model)):
        micro_batch(each, 0)
        assert {p.grad.dtype for p in each.parameters() if p.requires_grad} == {BF16}


@pytest.mark.parametrize("is_set_first", [True, False])
@ranks(2)
def test_zeros_of_no_dtype_are_refused_everywhere(is_set_first: bool) -> None:
    model = fsdp2.fully_shard(Odd())
    if is_set_first:
        model.set_reduce_scatter_unused_params(True)
    model.up.weight.grad_dtype = None
    if not is_set_first:
        micro_batch(model, 0)
    act = functools.partial(micro_batch, model, 0)
    if not is_set_first:
        act = functools.partial(model.set_reduce_scatter_unused_params, True)
    with pytest.raises(ConfigError, match=r"up\.weight: its grad_dtype is None"):
        act()
    named = Odd()
    named.up.weight.grad_dtype = None
    fsdp2.fully_shard(named, mp_policy=MixedPrecisionPolicy(reduce_dtype=FP32))
    named.set_reduce_scatter_unused_params(True)
    micro_batch(named, 0, use_one=False)
    assert whole(named.one.grad).eq(0).all()


@ranks(2)
def test_a_first_forward_that_is_refused_begins_nothing() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(13, 29), torch.nn.Linear(29, 3))
    fsdp2.fully_shard(model[0])
    fsdp2.fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    model[0].weight.grad_dtype = None
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"0\.weight: its grad_dtype is None"):
            model(torch.ones(2, 13))
    model.set_reduce_scatter_unused_params(False)
    model(torch.ones(2, 13)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# What else reads gradients.


@pytest.mark.parametrize(
    "name",
    with_slow(["bf16", "norms_whole", "norms_bf16", "any"], ["norms_whole"]),
)
@ranks(2)
def test_a_compiled_step_reduces_as_an_eager_one(name: str) -> None:
    choice = CHOICES[name]
    models = [fsdp2.fully_shard(choice.make(), mp_policy=choice.policy()) for _ in range(2)]
    compiled = fsdp2.compile(models[1], backend="aot_eager")
    for step in range(2):
        micro_batch(models[0], step)
        micro_batch(compiled, step)
        assert_same_bits(models)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad])
@ranks(2)
def test_a_step_on_local_shards(cls: type[torch.optim.Optimizer]) -> None:
    choice = CHOICES["norms_bf16"]
    models = [fsdp2.fully_shard(choice.make(), mp_policy=choice.policy()) for _ in range(2)]
    optimizers = [
        fsdp2.optim.local(cls, models[0].parameters(), lr=0.1),
        cls(models[1].parameters(), lr=0.1),
    ]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            micro_batch(model, step)
            optimizer.step()
            optimizer.zero_grad()
    for (param_name, ours), theirs in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        assert_same(ours, theirs, param_name)


@ranks(2)
def test_a_tie_follows_the_unit_that_takes_it() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    fsdp2.fully_shard(model[0], mp_policy=CHOICES["kept"].policy())
    fsdp2.fully_shard(model, mp_policy=CHOICES["bf16"].policy())
    model(torch.ones(2, 3)).float().sum().backward()
    dtypes = {name: param.grad.dtype for name, param in model.named_parameters()}
    assert dtypes == {"0.weight": FP32, "0.bias": BF16, "1.bias": FP32}


@pytest.mark.parametrize("name", ["norms_bf16", "any"])
@ranks(2)
def test_norms_and_offload(name: str) -> None:
    """Clipping, and shards in host memory, with gradients of two dtypes."""
    choice = CHOICES[name]
    model, reference = choice.make(), choice.make()
    fsdp2.fully_shard(
        model, mp_policy=choice.policy(), offload_policy=fsdp2.CPUOffloadPolicy(pin_memory=False)
    )
    micro_batch(model, 0)
    expected = gradients_by_hand(reference, choice, [0])
    norm = torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(grad.double()) for grad in expected.values()])
    )
    found = fsdp2.clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(found.double(), norm, rtol=1e-2, atol=0)
    fsdp2.clip_grad_norm_(model.parameters(), float(norm) / 2)
    for param_name, param in model.named_parameters():
        if param_name in expected:
            assert param.grad.dtype is expected[param_name].dtype
            half = expected[param_name] / 2
            torch.testing.assert_close(whole(param.grad), half, rtol=2e-2, atol=1e-5)


@pytest.mark.parametrize("name", ["norms_bf16", "any"])
@ranks(2)
def test_summoned_gradients_keep_their_dtypes(name: str) -> None:
    choice = CHOICES[name]
    model, reference = choice.make(), choice.make()
    fsdp2.fully_shard(model, mp_policy=choice.policy())
    micro_batch(model, 0)
    expected = gradients_by_hand(reference, choice, [0])
    with fsdp2.summon_full_params(model, with_grads=True):
        for param_name, param in model.named_parameters():
            if param_name in expected:
                assert_same_values(param.grad, expected[param_name], param_name)
                param.grad.mul_(2)
    check_gradients(model, {n: grad * 2 for n, grad in expected.items()})
    model.zero_grad()
    with fsdp2.summon_full_params(model, with_grads=True):  # others in their place
        for param_name, param in model.named_parameters():
            if param_name in expected:
                param.grad = expected[param_name].clone()
    check_gradients(model, expected)
    for _, tensor in fsdp2.full_params(model, max_bytes=2**20):
        assert tensor.dtype is FP32


@ranks(2)
def test_materialized_parameters_keep_grad_dtypes() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(13, 29), nn.Linear(29, 3), nn.Linear(3, 1))
    for layer in model:
        fsdp2.fully_shard(layer)
    fsdp2.fully_shard(model)
    for layer, dtype in zip(model, (BF16, None), strict=False):
        for param in layer.parameters():
            param.grad_dtype = dtype
    fsdp2.materialize(model, "cpu")
    assert_kept(model, FP32)

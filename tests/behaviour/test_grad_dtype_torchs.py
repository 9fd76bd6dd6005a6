"""Promise: gradients have the bits that torch's own `fully_shard` gives them (torch 2.15).

It gets the same batches, in the same process group, where it means the same: since 2.15.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from tests._grad_dtypes import (
    BF16,
    CHOICES,
    FIRST,
    FP32,
    IN_TORCH,
    assert_same_bits,
    micro_batch,
    twins,
)
from tests._models import TORCH_2_15
from tests._parity import make_mesh, whole
from tests._pool import ranks
from tests._slow import slow, with_slow

TORCHS_MEANING = pytest.mark.skipif(not TORCH_2_15, reason="torch means this since 2.15")


SCHEDULES = {"each": (True,), "last": (False, False, True)}


@TORCHS_MEANING
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", with_slow(IN_TORCH, [n for n in FIRST if n in IN_TORCH]))
@ranks(slow(1), 2, slow(3), slow(4))
def test_the_same_bits_as_torchs(name: str, schedule: str) -> None:
    check_twins(name, schedule, make_mesh())


@TORCHS_MEANING
@pytest.mark.parametrize("name", with_slow(IN_TORCH, ["any"]))
@ranks(4)
def test_the_same_bits_as_torchs_with_replicas(name: str) -> None:
    check_twins(name, "last", make_mesh(2, 2))


def check_twins(name: str, schedule: str, mesh: DeviceMesh) -> None:
    models = twins(CHOICES[name], mesh, reshard_after_forward=schedule == "each")
    for first in (0, 10):
        for index, sync in enumerate(SCHEDULES[schedule]):
            for model in models:
                model.set_requires_gradient_sync(sync)
                micro_batch(model, first + index)
        # Sums over more than two ranks of one axis depend on where a backend's rings cut a buffer.
        assert_same_bits(models, 0.0 if mesh.size(-1) <= 2 else 2e-2)
        for model in models:
            model.zero_grad()


@TORCHS_MEANING
@pytest.mark.parametrize("reshards", [True, False])
@ranks(2)
def test_units_of_several_policies(reshards: bool) -> None:
    names, models = ("grads_bf16", "any", "bf16"), []
    for library in (fsdp2, torch_fsdp):
        torch.manual_seed(0)
        layers = (nn.Linear(13, 29), nn.LayerNorm(29), nn.Linear(29, 1))
        model = nn.Sequential(
            *(
                CHOICES[n].make(lambda layer=layer: layer)
                for n, layer in zip(names, layers, strict=True)
            )
        )
        for name, layer in zip(names, model, strict=True):
            library.fully_shard(layer, mp_policy=CHOICES[name].policy(library))
        models.append(library.fully_shard(model))
    for step, sync in enumerate((False, True, False, False, True)):
        for model in models:
            model.set_requires_gradient_sync(sync)
            model.set_reshard_after_backward(reshards or sync)
            micro_batch(model, step)
        if sync:
            assert_same_bits(models)


@TORCHS_MEANING
@pytest.mark.parametrize("name", with_slow(["bf16", "all_bf16", "fp32_in_bf16", "any"], ["bf16"]))
@ranks(4)
def test_partial_sums_of_changing_sets_of_gradients(name: str) -> None:
    """Reduced over shards in one micro-batch, over replicas in another, with other gradients."""
    models = twins(CHOICES[name], make_mesh(2, 2))
    uses = [(False, False), (True, False), (False, True), (True, True)]
    for step, (use_one, is_last) in enumerate(uses):
        for model in models:
            model.set_requires_all_reduce(is_last)
            micro_batch(model, step, use_one=use_one)
    if (
        name != "any"
    ):  # torch's dtype then follows the gradients that there are, ours all parameters
        assert_same_bits(models)


class ComputedIn(torch.autograd.Function):
    """A product whose gradient backward computes in a dtype of its own."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x)
        ctx.dtype = dtype
        return weight * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return (grad.to(ctx.dtype) * x.to(ctx.dtype)), None, None


class AnyTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.weight.grad_dtype = None

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return ComputedIn.apply(self.weight, x, dtype)  # type: ignore[no-any-return, no-untyped-call]  # torch's own


@pytest.mark.parametrize("is_torchs", [False, pytest.param(True, marks=TORCHS_MEANING)])
@ranks(4)
def test_a_wide_partial_sum_widens_no_gradient_that_waits(is_torchs: bool) -> None:
    """What waits for a reduction over shards stays bf16, while fp32 waits for one over replicas."""
    library: Any = torch_fsdp if is_torchs else fsdp2
    model = AnyTimes()
    policy = library.MixedPrecisionPolicy(BF16)
    library.fully_shard(model, mesh=make_mesh(2, 2), mp_policy=policy)
    model.set_requires_all_reduce(False)
    steps = [(FP32, 2.0**-9, True), (BF16, 1.0, False), (BF16, 2.0**-9, False), (BF16, 0.0, True)]
    for index, (dtype, value, sync) in enumerate(steps):
        model.set_requires_gradient_sync(sync)
        model.set_requires_all_reduce(index == 3)
        model(torch.full((3,), value), dtype).sum().backward()
    grad = model.weight.grad
    assert grad.dtype is FP32
    assert whole(grad).tolist() == [1.001953125] * 3
    model.zero_grad()
    model(torch.full((3,), 1.0), BF16).sum().backward()  # nothing wide waits any more
    assert model.weight.grad.dtype is BF16

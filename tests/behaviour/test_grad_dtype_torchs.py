"""Promise: gradients have the bits that torch's own `fully_shard` gives them (torch 2.15).

It gets the same batches, in the same process group, where it means the same: since 2.15.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2._core.base import torch_comm
from tests.kit.grad_dtypes import (
    BF16,
    CHOICES,
    FIRST,
    FP16,
    FP32,
    IN_TORCH,
    assert_same_bits,
    micro_batch,
    twins,
)
from tests.kit.meshes import shared_mesh
from tests.kit.models import TORCH_2_15, seeded
from tests.kit.parity import make_mesh, whole
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

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
        # On more ranks than two of one axis parts are added in different orders, see below.
        assert_same_bits(models, 0.0 if mesh.size(-1) <= 2 else 2e-2)
        for model in models:
            model.zero_grad()


class Sent(ReduceScatter):  # type: ignore[misc]  # torch's own
    """What torch's own sends, for one reduction."""

    def __init__(self) -> None:
        self.sent = torch.empty(0)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.sent = input_tensor.clone()
        torch_comm.reduce_scatter_single(output_tensor, input_tensor, op, group, False)


def sums_in_any_order(parts: Sequence[Tensor]) -> Tensor:
    """Return every sum of parts of ranks ``[S]``, and the one that is rounded once ``[K, S]``."""
    orders = itertools.permutations(parts)
    sums = [functools.reduce(torch.add, order) for order in orders]
    if len(parts) == 4:
        sums += [(a + b) + (c + d) for a, b, c, d in itertools.permutations(parts)]
    return torch.stack([*sums, torch.stack(list(parts)).sum(0, dtype=FP32).to(parts[0].dtype)])


@TORCHS_MEANING
@pytest.mark.parametrize("dtype", with_slow([BF16, FP16, FP32], [BF16, FP16]))
@pytest.mark.parametrize("width", [13, 150])
@ranks(3, slow(4))
def test_on_more_ranks_only_the_order_of_a_sum_differs(width: int, dtype: torch.dtype) -> None:
    """Each element of both is a sum of what torch's own sends, in some order.

    A backend's ring begins each sum where it cuts the buffer, which is longer here; and a large
    buffer is added up in the order of ranks.
    """
    size, rank, models = dist.get_world_size(), dist.get_rank(), []
    x = torch.randn(6, width, generator=torch.Generator().manual_seed(rank))
    for library in (fsdp2, torch_fsdp):
        model = seeded(lambda: nn.Sequential(nn.Linear(width, 167), nn.Tanh(), nn.Linear(167, 3)))
        library.fully_shard(model, mp_policy=library.MixedPrecisionPolicy(dtype, dtype))
        models.append(model)
    own = Sent()
    models[1].set_custom_reduce_scatter(own)
    for model in models:
        model(x).float().square().sum().backward()
    parts = [torch.empty_like(own.sent) for _ in range(size)]
    dist.all_gather(parts, own.sent)
    sums = sums_in_any_order([part.view(size, -1)[rank] for part in parts])
    divided = 2 if dtype is FP16 else 1  # before they are sent
    sums = (sums / (size / divided)).float()
    for (name, ours), theirs in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        start = theirs.grad.to_local().storage_offset()
        for param in (ours, theirs):
            grad = param.grad.to_local().flatten()
            assert (sums[:, start : start + grad.numel()] == grad).any(0).all(), name


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


# Uses that add up in one backward.


class Inner(nn.Module):
    """Its norm is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(13, 29)
        self.norm = nn.LayerNorm(29)
        self.down = nn.Linear(29, 13)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(torch.tanh(self.norm(self.up(x)))))  # type: ignore[no-any-return]  # torch's own


class Recomputed(nn.Module):
    """Units of which some are recomputed in a backward inside of the backward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(3))
        self.scale = nn.Parameter(torch.full((13,), 1.25))
        self.first = nn.Linear(13, 13)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.scale
        if self.where == "each":
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x
        return self.blocks[2](checkpoint(self.front, x, use_reentrant=True))

    def front(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if self.where == "nested":
            return checkpoint(self.blocks[1], x, use_reentrant=True) * self.scale
        return self.blocks[1](x) * self.scale


@TORCHS_MEANING
@pytest.mark.parametrize("reduce_dtype", [None, FP32, BF16])
@pytest.mark.parametrize("where", ["each", "front", "nested"])
@ranks(2)
def test_reentrant_checkpoints_and_backwards_without_sync(
    where: str, reduce_dtype: torch.dtype | None
) -> None:
    models = []
    for library in (fsdp2, torch_fsdp):
        model = seeded(lambda: Recomputed(where))
        policy = library.MixedPrecisionPolicy(BF16, reduce_dtype)
        for unit in (*model.blocks, model):  # type: ignore[misc]  # a list
            library.fully_shard(unit, mp_policy=policy)
        models.append(model)
    for step, sync in enumerate((False, True, True, False, False, True)):
        for model in models:
            model.set_requires_gradient_sync(sync)
            micro_batch(model, step)
        if sync:
            assert_same_bits(models)


class Shared(nn.Module):
    """Parameters that tensor-parallel ranks have alike, with gradients that are Partial there."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        for name in ("weight", "bias"):
            whole = distribute_tensor(torch.randn(13), mesh, [Replicate()])
            self.register_parameter(name, nn.Parameter(whole))
        self.split = nn.Parameter(distribute_tensor(torch.randn(6, 13), mesh, [Shard(0)]))

    def forward(self, x: Tensor) -> Tensor:
        y = DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False)
        for _ in range(2):
            y = torch.tanh(F.layer_norm(y, (13,), self.weight, self.bias)) * self.weight
        return F.linear(y.redistribute(placements=[Replicate()]), self.split).to_local()


@TORCHS_MEANING
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype", "stored", "wide"),
    with_slow(
        [
            (BF16, None, FP32, ""),
            (BF16, FP32, FP32, ""),
            (BF16, BF16, FP32, ""),
            (None, None, FP32, ""),
            (None, None, BF16, ""),
            (None, None, BF16, "weight"),
        ],
        [(BF16, None, FP32, ""), (None, None, FP32, ""), (None, None, BF16, "weight")],
    ),
)
@ranks(4)
def test_what_tensor_parallel_ranks_share_is_used_twice(
    param_dtype: torch.dtype | None,
    reduce_dtype: torch.dtype | None,
    stored: torch.dtype,
    wide: str,
    schedule: str,
) -> None:
    """Uses add up, and are summed over ranks, in the dtype of each parameter's gradient."""
    mesh, models = shared_mesh((2, 2), ("data", "tensor")), []
    for library in (fsdp2, torch_fsdp):
        model = seeded(lambda: Shared(mesh["tensor"])).to(stored)
        if wide:
            getattr(model, wide).grad_dtype = FP32
        policy = library.MixedPrecisionPolicy(param_dtype, reduce_dtype)
        models.append(library.fully_shard(model, mesh=mesh["data"], mp_policy=policy))
    for step, sync in enumerate(SCHEDULES[schedule]):
        for model in models:
            model.set_requires_gradient_sync(sync)
            micro_batch(model, step)
    assert_same_bits(models)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 13, bias=False)
        self.blocks = nn.ModuleList(Inner() for _ in range(2))
        self.last = nn.Linear(13, 13, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]  # torch's own


@TORCHS_MEANING
@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype"), [(FP16, None), (FP16, FP16), (BF16, None), (None, None)]
)
@ranks(2)
def test_a_compiled_model_with_ties(
    param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> None:
    """Compiled, eager, and torch's eager one."""
    models: list[Any] = []
    for library in (fsdp2, torch_fsdp, fsdp2):
        model = seeded(Tied)
        policy = library.MixedPrecisionPolicy(param_dtype, reduce_dtype)
        for unit in (*model.blocks, model):  # type: ignore[misc]  # a list
            library.fully_shard(unit, mp_policy=policy)
        models.append(model)
    compiled = fsdp2.compile(models[2], backend="aot_eager")
    for step in range(3):
        for model in (*models[:2], compiled):
            micro_batch(model, step)
        assert_same_bits(models[:2])
        assert_same_bits(models[1:])

"""Promise: gradients add up and are reduced in the dtypes that users chose (torch 2.15)."""

from __future__ import annotations

import copy
import functools
import io
import itertools
from collections.abc import Callable, Sequence
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
from fsdp2 import ConfigError, MixedPrecisionPolicy
from fsdp2._core.base import torch_comm
from tests.kit.grad_dtypes import (
    BF16,
    CHOICES,
    FIRST,
    FP16,
    FP32,
    FP64,
    IN_TORCH,
    Choice,
    Odd,
    assert_same_bits,
    assert_same_values,
    batch_of,
    check_gradients,
    gradients_by_hand,
    is_of_a_norm,
    micro_batch,
    twins,
)
from tests.kit.in_turn import advance, shard_each
from tests.kit.meshes import shared_mesh
from tests.kit.models import TORCH_2_15, seeded
from tests.kit.parity import assert_same, make_mesh, whole
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


def accumulate(
    *models: Any, syncs: Sequence[bool], first: int = 0, rtol: float = 0.0, **kwargs: Any
) -> range:
    """Run micro-batches of all models, compare them after each that reduces; return the steps."""
    steps = range(first, first + len(syncs))
    for step, sync in zip(steps, syncs, strict=True):
        for model in models:
            model.set_requires_gradient_sync(sync)
            micro_batch(model, step, **kwargs)
        if sync and len(models) > 1:
            assert_same_bits(models, rtol)
    return steps


def check_choice(name: str, schedule: str, mesh: DeviceMesh) -> None:
    choice = CHOICES[name]
    build = functools.partial(Odd, scalar=True)
    model, reference = choice.make(build), choice.make(build)
    fsdp2.fully_shard(model, mesh=mesh, mp_policy=choice.policy())
    for first in (0, 10):
        steps = accumulate(model, syncs=SCHEDULES[schedule], first=first)
        check_gradients(model, gradients_by_hand(reference, choice, steps))
        model.zero_grad(set_to_none=first == 0)


def sharded(choice: Choice, **kwargs: Any) -> Any:
    return fsdp2.fully_shard(choice.make(), mp_policy=choice.policy(), **kwargs)


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


class ScaledRows(nn.Module):
    """Multiplies rows of tensor-parallel ranks with a replicated weight, once or more."""

    def __init__(
        self, mesh: DeviceMesh, policy: MixedPrecisionPolicy, more: tuple[float, ...] = ()
    ) -> None:
        super().__init__()
        self.mesh, self.more = mesh["tensor"], more
        self.weight = nn.Parameter(distribute_tensor(torch.ones(4), self.mesh, [Replicate()]))
        fsdp2.fully_shard(self, mesh=mesh["data"], mp_policy=policy)

    def forward(self, x: Tensor) -> Tensor:
        x = DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False)
        y = x * self.weight
        for factor in self.more:
            y = y + factor * x * self.weight
        return y.to_local()


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
    model = ScaledRows(mesh, MixedPrecisionPolicy(BF16, reduce_dtype))
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
    model = ScaledRows(mesh, MixedPrecisionPolicy(BF16, reduce_dtype), more=(2.0**-9,))
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
    model, reference = sharded(choice), choice.make()
    model.set_requires_gradient_sync(False)
    micro_batch(model, 0)
    assert all(p.grad is None for p in model.parameters())
    model.unshard()
    waiting = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    for param_name, grad in waiting.items():
        assert grad.dtype is choice.adds_up(reference.get_parameter(param_name)), param_name
    model.reshard()
    model.zero_grad()  # these too
    model.set_requires_gradient_sync(True)
    micro_batch(model, 1)
    check_gradients(model, gradients_by_hand(reference, choice, [1]))
    model.zero_grad()
    model.set_reshard_after_backward(False)
    steps = accumulate(model, syncs=(False, True), first=2)
    check_gradients(model, gradients_by_hand(reference, choice, steps))


@pytest.mark.parametrize("name", with_slow(["bf16", "bf16_in_bf16", "any"], ["bf16"]))
@ranks(2)
def test_a_group_unused_last_reduces_what_it_has(name: str) -> None:
    choice = CHOICES[name]
    layers = nn.ModuleList([choice.make(), choice.make()])
    model = nn.Module()
    model.layers = layers
    model.forward = lambda x, used: sum(layers[i](x) for i in used)  # type: ignore[method-assign]
    references = copy.deepcopy(layers)
    shard_each(*layers, model, mp_policy=choice.policy())
    for step, used in enumerate([[0], [1]]):
        model.set_requires_gradient_sync(step == 1)
        model(batch_of(step), used).float().square().mean().backward()
    for step, (layer, reference) in enumerate(zip(layers, references, strict=True)):
        check_gradients(layer, gradients_by_hand(reference, choice, [step], waits=step == 0))


@ranks(2)
def test_a_parameter_that_one_rank_or_none_uses() -> None:
    choice = CHOICES["bf16"]
    model, reference = sharded(choice), choice.make()
    accumulate(model, syncs=(False, True), use_one=False)
    assert model.one.grad is None
    model.zero_grad()
    for step, sync in enumerate((False, True)):
        model.set_requires_gradient_sync(sync)
        micro_batch(model, step, use_one=dist.get_rank() == 0 and step == 0)
    expected = gradients_by_hand(reference, choice, [0])["one"]  # of both ranks: its dtype
    assert model.one.grad.dtype is expected.dtype is FP32
    assert whole(model.one.grad).ne(0).all()


# --- gradients have the bits that torch's own `fully_shard` gives them (torch 2.15). ---


TORCHS_MEANING = pytest.mark.skipif(not TORCH_2_15, reason="torch means this since 2.15")


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
    # On more ranks than two of one axis parts are added in different orders, see below.
    rtol = 0.0 if mesh.size(-1) <= 2 else 2e-2
    for first in (0, 10):
        accumulate(*models, syncs=SCHEDULES[schedule], first=first, rtol=rtol)
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
        model = nn.Sequential()
        for name, layer in zip(names, layers, strict=True):
            model.append(CHOICES[name].make(lambda layer=layer: layer))
            library.fully_shard(model[-1], mp_policy=CHOICES[name].policy(library))
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
    if name != "any":  # torch's dtype follows the gradients that there are, ours all parameters
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


def in_blocks(library: Any, build: Callable[[], nn.Module], *dtypes: torch.dtype | None) -> Any:
    """Return a model whose blocks and root a library has sharded."""
    model: Any = seeded(build)
    policy = library.MixedPrecisionPolicy(*dtypes)
    return shard_each(*model.blocks, model, library=library, mp_policy=policy)


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
    build = functools.partial(Recomputed, where)
    models = [in_blocks(library, build, BF16, reduce_dtype) for library in (fsdp2, torch_fsdp)]
    accumulate(*models, syncs=(False, True, True, False, False, True))


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
    accumulate(*models, syncs=SCHEDULES[schedule])


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
    eager, theirs, model = (
        in_blocks(library, Tied, param_dtype, reduce_dtype)
        for library in (fsdp2, torch_fsdp, fsdp2)
    )
    compiled = fsdp2.compile(model, backend="aot_eager")
    for step in range(3):
        for each in (eager, theirs, compiled):
            micro_batch(each, step)
        assert_same_bits([eager, theirs])
        assert_same_bits([theirs, model])


# --- chosen dtypes of gradients stay, and whoever reads gradients follows them. ---


def with_grad_dtypes(when: str) -> nn.Module:
    """Return sharded layers; the first one's gradients are bf16, the second one's may be any."""
    model = nn.Sequential(nn.Linear(13, 29), nn.Linear(29, 3), nn.Linear(3, 1))
    if when == "after":
        shard_each(*model, model)
    for layer, dtype in zip(model, (BF16, None), strict=False):
        for param in layer.parameters():
            param.grad_dtype = dtype
    if when == "before":
        shard_each(*model, model)
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


@pytest.mark.parametrize("change", ["move", "assign"])
@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@ranks(2)
def test_grad_dtypes_survive(when: str, ran: bool, change: str) -> None:
    model = with_grad_dtypes(when)
    if ran:
        assert_kept(model, FP32)
        grads = {name: whole(param.grad).clone() for name, param in model.named_parameters()}
    if change == "move":
        model.to(FP64)
    else:
        state = {name: tensor.detach().double() for name, tensor in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    if ran and change == "move":  # a gradient whose dtype was chosen only moves
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
    model = sharded(CHOICES["kept"])
    for each in (model, copy.deepcopy(model)):
        micro_batch(each, 0)
        assert {p.grad.dtype for p in each.parameters() if p.requires_grad} == {BF16}


@pytest.mark.parametrize("is_set_first", [True, False])
@ranks(2)
def test_zeros_of_no_dtype_are_refused_everywhere(is_set_first: bool) -> None:
    model = fsdp2.fully_shard(Odd())
    run = functools.partial(micro_batch, model, 0)
    wants_zeros = functools.partial(model.set_reduce_scatter_unused_params, True)
    if is_set_first:
        wants_zeros()
    model.up.weight.grad_dtype = None
    if not is_set_first:
        run()
    with pytest.raises(ConfigError, match=r"up\.weight: its grad_dtype is None"):
        (run if is_set_first else wants_zeros)()
    named = Odd()
    named.up.weight.grad_dtype = None
    fsdp2.fully_shard(named, mp_policy=MixedPrecisionPolicy(reduce_dtype=FP32))
    named.set_reduce_scatter_unused_params(True)
    micro_batch(named, 0, use_one=False)
    assert whole(named.one.grad).eq(0).all()


@ranks(2)
def test_a_first_forward_that_is_refused_begins_nothing() -> None:
    layers = nn.Sequential(nn.Linear(13, 29), nn.Linear(29, 3))
    model = shard_each(layers[0], layers)
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
    models = [sharded(choice) for _ in range(2)]
    compiled = fsdp2.compile(models[1], backend="aot_eager")
    for step in range(2):
        micro_batch(models[0], step)
        micro_batch(compiled, step)
        assert_same_bits(models)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adagrad])
@ranks(2)
def test_a_step_on_local_shards(cls: type[torch.optim.Optimizer]) -> None:
    models = [sharded(CHOICES["norms_bf16"]) for _ in range(2)]
    optimizers = [
        fsdp2.optim.local(cls, models[0].parameters(), lr=0.1),
        cls(models[1].parameters(), lr=0.1),
    ]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            micro_batch(model, step)
            advance(optimizer)
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
    model = sharded(choice, offload_policy=fsdp2.CPUOffloadPolicy(pin_memory=False))
    micro_batch(model, 0)
    expected = gradients_by_hand(choice.make(), choice, [0])
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
    model = sharded(choice)
    micro_batch(model, 0)
    expected = gradients_by_hand(choice.make(), choice, [0])
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
        model = with_grad_dtypes("after")
    fsdp2.materialize(model, "cpu")
    assert_kept(model, FP32)

"""Promise: gradients add up, are reduced and are kept in the dtypes that users chose (torch 2.15).

The reference adds up by hand what plain models in the dtypes of compute leave, and takes the mean
over ranks; where torch means the same (since 2.15), its own `fully_shard` gets the same batches.
"""

from __future__ import annotations

import copy
import functools
import io
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp2
from fsdp2 import ConfigError, MixedPrecisionPolicy
from tests._meshes import shared_mesh
from tests._models import TORCH_2_15, seeded
from tests._parity import assert_same, make_mesh, whole
from tests._pool import ranks
from tests._slow import slow, with_slow

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TORCHS_MEANING = pytest.mark.skipif(not TORCH_2_15, reason="torch means this since 2.15")
UNSET = "unset"


class Odd(nn.Module):
    """Dims that no number of ranks divides, one row, one element, something frozen, a tie."""

    def __init__(self, scalar: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(13, 29)
        self.norm = nn.LayerNorm(29)
        self.down = nn.Linear(29, 1)
        self.one = nn.Parameter(torch.full(() if scalar else (1,), 1.25))
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.again = nn.Linear(29, 1, bias=False)
        self.again.weight = self.down.weight

    def forward(self, x: Tensor, use_one: bool = True) -> Tensor:
        y = F.linear(x, self.up.weight.to(x.dtype), self.up.bias.to(x.dtype))
        y = F.layer_norm(y, (29,), self.norm.weight.to(y.dtype), self.norm.bias.to(y.dtype))
        y = F.linear(torch.tanh(y), self.down.weight, self.down.bias) + self.again(y)
        return y * self.one.to(y.dtype) if use_one else y + self.frozen.to(y.dtype).sum()


def is_of_a_norm(param: nn.Parameter) -> bool:
    return param.dim() == 1 and param.numel() == 29


@dataclass(frozen=True)
class Choice:
    """What a user says about dtypes; `grad_dtype` is of the parameters that `sets` picks."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    stored: torch.dtype = FP32
    keeps: bool = False
    grad_dtype: torch.dtype | str | None = UNSET
    sets: Callable[[nn.Parameter], bool] = lambda param: True
    overrides: Callable[[nn.Parameter], torch.dtype | None] | None = None

    def make(self, build: Callable[[], nn.Module] = Odd) -> nn.Module:
        model = seeded(build).to(self.stored)
        if self.grad_dtype is not UNSET:
            for param in model.parameters():
                if self.sets(param) and param.requires_grad:
                    param.grad_dtype = self.grad_dtype
        return model

    def policy(self, library: Any = fsdp2) -> Any:
        mine = {"keep_low_precision_grads": True} if self.keeps else {}
        return library.MixedPrecisionPolicy(
            self.param_dtype,
            self.reduce_dtype,
            param_dtype_override_fn=self.overrides,
            **mine,
        )

    def computed(self, param: nn.Parameter) -> torch.dtype:
        chosen = self.overrides(param) if self.overrides is not None else None
        return chosen or self.param_dtype or self.stored

    def adds_up(self, param: nn.Parameter) -> torch.dtype:
        """Dtype in which gradients add up."""
        if self.reduce_dtype is not None:
            return self.reduce_dtype
        if self.keeps:
            return self.computed(param)
        if self.grad_dtype is not UNSET and self.sets(param):
            return self.computed(param) if self.grad_dtype is None else self.grad_dtype  # type: ignore[return-value]  # UNSET
        return self.stored

    def kept(self, param: nn.Parameter, reduced: torch.dtype) -> torch.dtype:
        """Dtype of the sharded gradient."""
        if self.keeps:
            return reduced
        if self.grad_dtype is not UNSET and self.sets(param):
            return reduced if self.grad_dtype is None else self.grad_dtype  # type: ignore[return-value]  # UNSET
        return self.stored


def keep_norms(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if is_of_a_norm(param) else None


CHOICES = {
    "nothing": Choice(),
    "bf16": Choice(BF16),
    "fp16": Choice(FP16),
    "bf16_in_bf16": Choice(BF16, BF16),
    "bf16_in_fp16": Choice(BF16, FP16),
    "fp32_in_bf16": Choice(None, BF16),
    "norms_whole": Choice(BF16, overrides=keep_norms),
    "norms_whole_in_bf16": Choice(BF16, BF16, overrides=keep_norms),
    "all_bf16": Choice(stored=BF16),
    "all_bf16_in_fp32": Choice(reduce_dtype=FP32, stored=BF16),
    "all_bf16_norms_add_in_fp32": Choice(stored=BF16, grad_dtype=FP32, sets=is_of_a_norm),
    "grads_bf16": Choice(grad_dtype=BF16),
    "norms_bf16": Choice(grad_dtype=BF16, sets=is_of_a_norm),
    "grads_bf16_in_fp32": Choice(BF16, FP32, grad_dtype=BF16),
    "any": Choice(BF16, grad_dtype=None),
    "norms_any": Choice(BF16, grad_dtype=None, sets=is_of_a_norm),
    "any_in_fp32": Choice(BF16, FP32, grad_dtype=None),
    "kept": Choice(BF16, keeps=True),
    "kept_fp32": Choice(BF16, FP32, keeps=True),
}
FIRST = ("bf16", "norms_whole", "all_bf16_norms_add_in_fp32", "norms_bf16", "any", "kept")
IN_TORCH = [name for name, choice in CHOICES.items() if not choice.keeps]


def batch_of(step: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(3, 13, generator=torch.Generator().manual_seed(1000 * step + rank))


def micro_batch(model: nn.Module, step: int, **kwargs: Any) -> None:
    x = batch_of(step).to(next(model.parameters()).dtype)
    model(x, **kwargs).float().square().mean().backward()


def gradients_by_hand(
    model: nn.Module, choice: Choice, steps: Sequence[int], waits: bool = False, **kwargs: Any
) -> dict[str, Tensor]:
    """Add up a plain model's gradients, and take the mean over ranks, in the dtypes of a choice.

    Uses in one backward add up in that dtype if it is no wider than that of compute, or if their
    sum `waits` for a later backward with sync.
    """
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}
    sums: dict[str, Tensor] = {}
    for step in steps:
        low = {
            name: param.detach().to(choice.computed(param)).requires_grad_()
            for name, param in params.items()
        }
        x = batch_of(step).to(choice.param_dtype or choice.stored)
        begins = step == steps[0] and (waits or len(steps) > 1)
        for name, leaf in low.items():
            dtype = choice.adds_up(params[name])
            leaf.grad_dtype = dtype if begins or dtype.itemsize <= leaf.itemsize else None
        low["again.weight"] = low["down.weight"]
        torch.func.functional_call(model, low, (x,), kwargs).float().square().mean().backward()
        del low["again.weight"]
        for name, leaf in low.items():
            dtype, grad = choice.adds_up(params[name]), leaf.grad
            if grad is None:
                continue
            if name not in sums:
                sums[name] = grad.to(dtype)
            elif grad.dtype.itemsize < dtype.itemsize:
                sums[name] += grad
            else:
                sums[name] += grad.to(dtype)
    reduced = functools.reduce(torch.promote_types, map(choice.adds_up, params.values()))
    return {
        name: mean_over_ranks(sums[name].to(reduced)).to(choice.kept(params[name], reduced))
        for name in params
        if name in sums
    }


def mean_over_ranks(value: Tensor) -> Tensor:
    """Return the mean, added up in the dtype of `value`."""
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, value.contiguous())
    return functools.reduce(torch.add, parts) / len(parts)


def assert_same_values(actual: Tensor, expected: Tensor, what: str, scale: float = 1.0) -> None:
    """Two ranks add in one order: bits are equal. More add in the backend's order."""
    assert actual.dtype is expected.dtype, f"{what}: {actual.dtype} is not {expected.dtype}"
    if dist.get_world_size() <= 2 and expected.dtype is not FP16:
        assert torch.equal(actual, expected), what
    else:
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2 * scale, msg=what)


def check_gradients(model: nn.Module, expected: dict[str, Tensor]) -> None:
    largest = max(grad.abs().max().item() for grad in expected.values())
    for name, param in model.named_parameters():
        assert (param.grad is not None) is (name in expected), name
        if param.grad is not None:
            assert isinstance(param.grad, DTensor)
            assert_same_values(whole(param.grad), expected[name], name, largest)


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


# Beside torch's own.


def twins(choice: Choice, mesh: DeviceMesh, **kwargs: Any) -> list[nn.Module]:
    """Return the same model sharded by this package and by torch's own."""
    models = []
    for library in (fsdp2, torch_fsdp):
        model = choice.make()
        library.fully_shard(model, mesh=mesh, mp_policy=choice.policy(library), **kwargs)
        models.append(model)
    return models


def assert_same_bits(models: Sequence[nn.Module], rtol: float = 0.0) -> None:
    ours, theirs = (dict(model.named_parameters()) for model in models)
    for name, param in ours.items():
        found, expected = param.grad, theirs[name].grad
        assert (found is None) is (expected is None), name
        if expected is not None:
            assert found.dtype is expected.dtype, f"{name}: {found.dtype}, not {expected.dtype}"
            torch.testing.assert_close(
                found.to_local(), expected.to_local(), rtol=rtol, atol=rtol / 50, msg=name
            )


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


# What else reads gradients.


@pytest.mark.parametrize(
    "name", with_slow(["bf16", "norms_whole", "norms_bf16", "any"], ["norms_bf16"])
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

"""Promise: a policy casts parameters, inputs, outputs and reductions, and nothing else."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from tests.kit.in_turn import advance
from tests.kit.models import CASES, WIDTH, Block, loss_of, seeded, tensors_in
from tests.kit.parity import (
    Pair,
    assert_same,
    assert_same_parameters,
    global_mean,
    make_mesh,
    shard,
    train_alike,
    whole,
)
from tests.kit.pool import ranks
from tests.kit.products import products
from tests.kit.slow import with_slow

BF16, FP32 = torch.bfloat16, torch.float32
BF16_REDUCE_FP32 = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)


def low_precision_gradients(master: nn.Module, batch: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the fp32 mean over ranks of the gradients of a plain copy in `dtype`."""
    low = copy.deepcopy(master).to(dtype)
    cast = batch.args[0].to(dtype)
    loss_of(low(cast)).backward()
    return {
        name: global_mean(parameter.grad.float())
        for name, parameter in low.named_parameters()
        if parameter.grad is not None
    }


@products([((), False), ((2, 2), True)], shape=[(), (2, 2)], reshard_after_forward=[True, False])
@ranks(2, 4)
def test_bf16_with_fp32_reduction(
    shape: tuple[int, ...], reshard_after_forward: bool, world_size: int
) -> None:
    """Gradients are the exact fp32 mean of the ranks' bf16 gradients."""
    if shape and world_size != 4:
        pytest.skip("another world size")
    case = CASES["stack"]
    master = seeded(case.build)
    model = shard(
        seeded(case.build),
        case,
        mesh=make_mesh(*shape),
        mp_policy=BF16_REDUCE_FP32,
        reshard_after_forward=reshard_after_forward,
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, master)]
    for _ in range(3):
        batch = case.batch(12).chunk(dist.get_rank(), dist.get_world_size())
        loss_of(model(*batch.args)).backward()
        expected = low_precision_gradients(master, batch, BF16)
        for name, parameter in model.named_parameters():
            assert parameter.dtype is FP32, name
            assert parameter.grad.dtype is FP32, name
            assert_same(parameter.grad, expected[name], name)
        for name, parameter in master.named_parameters():
            parameter.grad = expected[name]
        advance(*optimizers)
    assert_same_parameters(model, master)


@pytest.mark.parametrize(
    "name",
    with_slow(
        [n for n in ("stack", "partly_frozen", "containers", "untied_lm") if CASES[n].in_torch],
        ["partly_frozen", "untied_lm"],
    ),
)
@ranks(2)
def test_bf16_with_fp32_reduction_trains_like_torch(name: str) -> None:
    train_alike(CASES[name], mp_policy=BF16_REDUCE_FP32)


@pytest.mark.parametrize("name", ["stack", "one_row"])
@pytest.mark.parametrize(
    ("param_dtype", "reduce_dtype"), [(BF16, BF16), (BF16, None), (None, BF16)]
)
@ranks(2)
def test_the_dtype_of_a_reduction(
    name: str, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> None:
    """The dtype that the user says, else that of the parameters; the result is fp32."""
    case = CASES[name]
    master, model = seeded(case.build), seeded(case.build)
    shard(model, case, mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype))
    batch = case.batch(12).chunk(dist.get_rank(), 2)
    loss_of(model(*batch.args)).backward()
    expected = low_precision_gradients(master, batch, param_dtype or FP32)
    for fqn, parameter in model.named_parameters():
        gradient = whole(parameter.grad)
        assert gradient.dtype is FP32, fqn
        if reduce_dtype is None:
            assert torch.equal(gradient, expected[fqn]), fqn
            continue
        assert_same(gradient, expected[fqn], fqn, 2e-2)
        assert torch.equal(gradient, gradient.bfloat16().float()), f"{fqn} was not reduced in bf16"


@ranks(2)
def test_a_wider_reduction_than_the_parameters() -> None:
    """fp32 parameters reduced in fp64, and rounded once."""
    pair = Pair("stack", mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
    pair.train(steps=2)


class Probe(Block):
    """Notes the dtypes that its forward meets."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(WIDTH))
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: p.dtype for name, p in self.named_parameters()}
        self.seen |= {"input": x.dtype, "buffer": self.offset.dtype}
        return super().forward(x)


@ranks(2)
def test_forward_sees_the_parameter_dtype_and_the_optimizer_the_original() -> None:
    model = seeded(Probe)
    fsdp2.fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    output = model(torch.randn(4, WIDTH))
    assert output.dtype is FP32
    assert model.seen.pop("buffer") is FP32
    assert set(model.seen.values()) == {BF16}
    assert len(model.seen) == 9
    output.sum().backward()
    optimizer.step()
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.dtype is FP32
        assert parameter.grad.dtype is FP32
        assert optimizer.state[parameter]["exp_avg"].dtype is FP32


@ranks(2)
def test_each_unit_has_its_own_policy() -> None:
    """An fp32 unit between bf16 ones casts at its boundary."""
    model = nn.Sequential(Probe(), Probe(), Probe())
    low = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=BF16)
    high = MixedPrecisionPolicy(param_dtype=FP32, output_dtype=FP32)
    for unit, policy in zip(model, (low, high, low), strict=True):
        fsdp2.fully_shard(unit, mp_policy=policy)
    fsdp2.fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.float64))
    outputs: list[torch.dtype] = []
    for unit in model:
        unit.register_forward_hook(lambda m, args, out: outputs.append(out.dtype))
    output = model(torch.randn(4, WIDTH))
    assert [unit.seen["input"] for unit in model] == [BF16, FP32, BF16]
    assert [unit.seen["up.weight"] for unit in model] == [BF16, FP32, BF16]
    assert outputs == [BF16, FP32, BF16]
    assert output.dtype is torch.float64
    output.sum().backward()
    assert all(p.grad.dtype is FP32 for p in model.parameters())


Named = namedtuple("Named", ["x", "label"])


@dataclass
class Record:
    x: Tensor
    count: int
    inner: dict[str, Any]


class Taker(nn.Module):
    """Takes any inputs and gives them back, beside a use of its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.look: Callable[[Any, Any], None] = lambda args, kwargs: None

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.args, self.kwargs = args, kwargs
        self.look(args, kwargs)
        weight = self.linear.weight.sum().float()
        return {
            "named": Named(weight * 1.0, "label"),
            "record": Record(weight * 2.0, 7, {"list": [weight * 3.0, torch.arange(3)]}),
            "tuple": (weight * 4.0, None, "text"),
        }


def make_inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = torch.randn(4, WIDTH)
    args = (x, Named(x, "label"), Record(x, 3, {"deep": [x, (x, torch.arange(4))]}), 5, None)
    kwargs = {"x": x, "flag": torch.tensor([True]), "record": Record(x, 1, {}), "text": "text"}
    return args, kwargs


def dtypes_of(value: Any) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors_in(value)]


@ranks(2)
def test_inputs_are_cast_in_any_container() -> None:
    seen = []

    def look(args: Any, kwargs: Any) -> None:
        _, named, record, number, nothing = args
        seen.append(record)
        assert dtypes_of((args, kwargs)) == [*[BF16] * 5, torch.int64, BF16, torch.bool, BF16]
        assert isinstance(named, Named)
        assert named.label == "label"
        assert record.count == 3
        assert number == 5
        assert nothing is None
        assert kwargs["text"] == "text"

    model = fsdp2.fully_shard(Taker(), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    model.look = look
    args, kwargs = make_inputs()
    model(*args, **kwargs)
    assert seen[0] is args[2], "a unit gets the caller's own dataclass"
    unchanged = [*[FP32] * 5, torch.int64, FP32, torch.bool, FP32]
    assert dtypes_of((args, kwargs)) == unchanged, "in which nothing changes for the caller"


@ranks(2)
def test_outputs_are_cast_in_any_container() -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=torch.float64)
    model = fsdp2.fully_shard(Taker(), mp_policy=policy)
    output = model(torch.randn(4, WIDTH))
    assert dtypes_of(output) == [*[torch.float64] * 3, torch.int64, torch.float64]
    assert isinstance(output["named"], Named)
    record = output["record"]
    assert isinstance(record, Record)
    assert record.count == 7
    assert output["tuple"][1:] == (None, "text")
    (output["named"].x + record.inner["list"][0] + output["tuple"][0]).backward()
    gradient = whole(model.linear.weight.grad)
    assert torch.equal(gradient, torch.full_like(gradient, 8.0))


@ranks(2)
def test_inputs_are_left_alone_when_asked() -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
    model = fsdp2.fully_shard(Taker(), mp_policy=policy)
    args, kwargs = make_inputs()
    model(*args, **kwargs)
    assert model.args[0] is args[0]
    assert model.args[2].x is args[2].x
    assert model.kwargs["x"] is kwargs["x"]


@ranks(2)
def test_the_gradient_of_a_cast_input_comes_back_in_its_dtype() -> None:
    model = fsdp2.fully_shard(seeded(Block), mp_policy=BF16_REDUCE_FP32)
    x = torch.randn(4, WIDTH, requires_grad=True)
    low = copy.deepcopy(seeded(Block)).bfloat16()
    y = x.detach().bfloat16().requires_grad_()
    model(x).sum().backward()
    low(y).sum().backward()
    assert x.grad.dtype is FP32
    assert torch.equal(x.grad, y.grad.float())


@ranks(2)
def test_fp16_gradients_divide_before_they_can_overflow() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, 2))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sum()

    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    model = fsdp2.fully_shard(Scale(), mp_policy=policy)
    model(
        torch.full((3, 2), 40000.0)
    ).backward()  # the sum over ranks is out of range, the mean is not
    gradient = whole(model.weight.grad)
    assert gradient.dtype is FP32
    assert torch.equal(gradient, torch.full((3, 2), 40000.0))


@ranks(2)
def test_mixed_original_dtypes_and_frozen_integers_under_one_policy() -> None:
    model = seeded(CASES["mixed_dtypes"].build).blocks[0]
    model.int8 = nn.Parameter(torch.arange(15, dtype=torch.int8).reshape(5, 3), requires_grad=False)
    model.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
    original = {name: p.dtype for name, p in model.named_parameters()}
    seen: dict[str, torch.dtype] = {}

    def look(module: nn.Module, args: Any) -> None:
        seen.update({name: p.dtype for name, p in module.named_parameters()})

    fsdp2.fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=FP32, reduce_dtype=FP32))
    model.register_forward_pre_hook(look)
    model.forward = lambda x: sum(p.float().sum() for p in model.parameters()) * x  # type: ignore[method-assign]
    model(torch.ones(())).backward()
    assert seen.pop("int8") is torch.int8
    assert set(seen.values()) == {FP32}
    for name, parameter in model.named_parameters():
        assert parameter.dtype is original[name], name
        if parameter.requires_grad:
            assert parameter.grad.dtype is original[name], name
            assert torch.equal(
                whole(parameter.grad), torch.ones(parameter.shape, dtype=original[name])
            )


@ranks(2)
def test_eval_casts_like_training() -> None:
    model = fsdp2.fully_shard(seeded(Probe), mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
    x = torch.randn(4, WIDTH)
    expected = seeded(Probe).bfloat16()(x.bfloat16())
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    assert model.seen["up.weight"] is BF16
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)

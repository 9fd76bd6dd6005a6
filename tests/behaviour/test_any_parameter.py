"""Promise: a group holds any parameter: scalars, odd strides, any dtypes, frozen and raw ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

import fsdp2
from tests.kit.collectives import Scatter
from tests.kit.in_turn import advance
from tests.kit.models import CASES, WIDTH, Case, Quantised, floats, no_units, seeded, stack
from tests.kit.parity import Pair, assert_same, bits, make_mesh, names_of, shard, whole
from tests.kit.pool import ranks
from tests.kit.slow import slow


def record_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return a dict that each forward of `module` fills with copies of its whole parameters."""
    seen: dict[str, Tensor] = {}

    def look(module: nn.Module, args: Any, output: Any) -> None:
        for name, parameter in module.named_parameters():
            seen[name] = parameter.detach().clone(memory_format=torch.preserve_format)

    # a hook that runs before the unit's own after-forward hook, whatever that is
    module.register_forward_hook(look, prepend=True)
    return seen


@ranks(slow(1), 2)
def test_scalars_stay_scalars() -> None:
    pair = Pair("scalars", optimizer=torch.optim.AdamW)
    seen = record_parameters(pair.model.blocks[1])
    pair.backward()
    scale = pair.model.blocks[1].scale
    for tensor in (scale, scale.grad):
        assert isinstance(tensor, DTensor)
        assert tensor.shape == ()
    assert seen["scale"].shape == ()
    assert seen["scale"].item() == pytest.approx(0.7)
    advance(pair.optimizer, pair.reference_optimizer)
    assert_same(scale, pair.reference.blocks[1].scale, "scale", 1e-4)
    assert whole(scale).item() != pytest.approx(0.7)


@ranks(4)
def test_a_group_of_one_scalar_trains_on_many_ranks() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.7))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    Pair(Case(stack(Scale, 2), CASES["stack"].units, floats)).train(steps=2)


@ranks(2)
def test_non_contiguous_parameters_keep_their_strides_when_unsharded() -> None:
    pair = Pair("non_contiguous")
    original = dict(pair.reference.blocks[0].named_parameters())
    assert not original["transposed"].is_contiguous()
    assert original["conv.weight"].is_contiguous(memory_format=torch.channels_last)
    for _ in range(2):
        seen = record_parameters(pair.model.blocks[0])
        pair.backward()
        for name, parameter in original.items():
            strides = zip(parameter.shape, parameter.stride(), seen[name].stride(), strict=True)
            assert all(size == 1 or old == new for size, old, new in strides), name
            assert torch.equal(seen[name], parameter), name
        pair.zero_grad()


@ranks(2)
def test_each_parameter_keeps_its_dtype() -> None:
    pair = Pair("mixed_dtypes")
    seen = record_parameters(pair.model.blocks[0])
    pair.backward()
    dtypes = {name: p.dtype for name, p in names_of(pair.reference.blocks[0]).items()}
    assert set(dtypes.values()) == {torch.float32, torch.float64, torch.bfloat16}
    for name, parameter in names_of(pair.model.blocks[0]).items():
        assert isinstance(parameter, DTensor)
        assert parameter.dtype is dtypes[name], name
        assert parameter.grad.dtype is dtypes[name], name
        assert seen[name].dtype is dtypes[name], name


@ranks(2, 4)
def test_mixed_dtypes_in_one_root_group() -> None:
    Pair(Case(CASES["mixed_dtypes"].build, no_units, floats)).train(steps=2)


@ranks(2, 3)
def test_quantised_weights_keep_every_bit() -> None:
    every_byte = torch.arange(256, dtype=torch.uint8)

    def all_bit_patterns(model: nn.Module) -> None:
        """Put NaNs, infinities and both zeros into the float8 weight."""
        for block in model.blocks:
            block.every_byte = nn.Parameter(
                every_byte.view(torch.float8_e4m3fn).reshape(64, 4).clone(), requires_grad=False
            )

    pair = Pair("quantised", prepare=all_bit_patterns)
    seen = record_parameters(pair.model.blocks[1])
    pair.train(steps=2)
    original = seeded(stack(Quantised))
    for name in ("int8", "float8", "scale"):
        expected = getattr(original.blocks[1], name)
        assert seen[name].dtype is expected.dtype, name
        assert torch.equal(bits(seen[name]), bits(expected)), name
        parameter = getattr(pair.model.blocks[1], name)
        assert isinstance(parameter, DTensor)
        assert not parameter.requires_grad
        assert parameter.grad is None, name
        assert torch.equal(bits(whole(parameter)), bits(expected)), name
    assert torch.equal(bits(seen["every_byte"]).flatten(), every_byte)


NAMES = "uint8 int8 int16 int32 int64 bool float16 bfloat16 float64 complex64"
DTYPES = [getattr(torch, name) for name in f"{NAMES} float8_e4m3fn float8_e5m2".split()]


class Frozen(nn.Module):
    """One frozen parameter of every dtype beside a trainable one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        for index, dtype in enumerate(DTYPES):
            values = torch.randint(0, 2, (3 + index % 2, 5)).to(dtype)
            self.register_parameter(f"p{index}", nn.Parameter(values, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        total = sum(p.to(torch.float32).mean() for n, p in self.named_parameters(recurse=False))
        return self.linear(x) * total


@ranks(2)
def test_frozen_parameters_of_every_dtype_share_a_group() -> None:
    pair = Pair(Case(stack(Frozen, 2), CASES["stack"].units, floats))
    seen = record_parameters(pair.model.blocks[0])
    pair.train(steps=2)
    for index, dtype in enumerate(DTYPES):
        expected = getattr(pair.reference.blocks[0], f"p{index}")
        assert seen[f"p{index}"].dtype is dtype
        assert torch.equal(bits(seen[f"p{index}"]), bits(expected)), dtype


@ranks(2)
def test_a_parameter_without_elements() -> None:
    def add_empty(model: nn.Module) -> None:
        model.blocks[1].empty = nn.Parameter(torch.empty(0, 5))
        model.blocks[2].empty = nn.Parameter(torch.empty(5, 0), requires_grad=False)

    pair = Pair("stack", prepare=add_empty)
    seen = record_parameters(pair.model.blocks[1])
    pair.train(steps=2)
    assert seen["empty"].shape == (0, 5)
    assert whole(pair.model.blocks[2].empty).shape == (5, 0)


@ranks(2)
def test_a_root_whose_group_is_all_frozen() -> None:
    pair = Pair("all_frozen_blocks", prepare=lambda model: model.inp.requires_grad_(False))
    pair.train(steps=2)
    assert pair.model.inp.weight.grad is None


@ranks(2)
def test_parameter_attributes_survive() -> None:
    model = seeded(CASES["stack"].build)
    for index, parameter in enumerate(model.parameters()):
        parameter.weight_decay_class = index
    shard(model, CASES["stack"])
    found = [p.weight_decay_class for p in model.parameters()]
    assert found == list(range(len(found)))


@ranks(2)
def test_hooks_that_a_parameter_had_before_are_called() -> None:
    """`register_hook` before fully_shard: the hook sees the gradient of the sharded parameter."""
    seen: list[str] = []

    def watch(model: nn.Module) -> None:
        model.inp.weight.register_hook(lambda grad: seen.append("hook"))  # type: ignore[union-attr]
        model.inp.weight.register_post_accumulate_grad_hook(  # type: ignore[union-attr]
            lambda param: seen.append("after")
        )

    pair = Pair("stack", prepare=watch)
    seen.clear()
    pair.run(pair.model, pair.local(pair.batch())).backward()
    assert sorted(seen) == ["after", "hook"]


class Turning(nn.Module):
    """Complex and real parameters in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH, 3, dtype=torch.complex64))
        self.back = nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.back((x.to(torch.complex64) @ self.turn).abs())


@pytest.mark.parametrize("way", ["default", "custom", "replicas", "narrow", "compiled"])
@ranks(4)
def test_complex_gradients_travel_as_real_numbers(way: str) -> None:
    """Their parts are averaged alike: with a collective of the user's, replicas, and compiled."""
    torch.manual_seed(1)
    plain, model = Turning(), Turning()
    model.load_state_dict(plain.state_dict())
    fsdp2.fully_shard(model, mesh=make_mesh(2, 2) if way == "replicas" else make_mesh())
    scatter, call = Scatter(), model
    if way == "custom":
        model.set_custom_reduce_scatter(scatter)
    if way == "narrow":  # a dtype that has no imaginary part
        model.set_gradient_wire_dtype(torch.bfloat16)
    if way == "compiled":
        call = fsdp2.compile(model, backend="aot_eager", fullgraph=True)
    batches = torch.randn(4, 3, WIDTH)
    call(batches[dist.get_rank()]).square().mean().backward()
    plain(batches).square().mean().backward()
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(param.grad.full_tensor(), other.grad, atol=1e-6), name
    assert model.turn.grad.dtype == torch.complex64
    assert bool(scatter.given) == (way == "custom")
    assert not any(dtype.is_complex for _, dtype in scatter.given)  # NCCL's takes real numbers only

"""Promise: with `gather_dtype` matrices travel in 8 bits, and compute sees what these hold.

The reference is an unsharded model on the global batch, whose forward takes rounded weights, and
whose gradients go to the weights as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import Shard

import fsdp2
from fsdp2 import ConfigError, MixedPrecisionPolicy
from fsdp2._core.base import events, torch_dtensor
from tests.kit.in_turn import advance, shard_each
from tests.kit.models import CASES, loss_of, seeded
from tests.kit.parity import (
    ROWS,
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    global_mean,
    make_mesh,
    shard,
    values_of,
    whole,
)
from tests.kit.pool import ranks_that_share as ranks
from tests.kit.slow import slow, with_slow
from tests.kit.tensor_parallel import Transformer, mesh_of, sequence_parallel, tokens

FP8 = torch.float8_e4m3fn
MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def rounded(value: Tensor, dtype: torch.dtype = FP8, to: torch.dtype | None = None) -> Tensor:
    """Round a matrix as its rows' codes do: by a power of two, so that the largest fits."""
    if value.dim() < 2 or not value.numel():
        return value if to is None else value.to(to).to(value.dtype)
    largest = value.flatten(1).abs().amax(1).clamp(min=1e-30).double()
    scale = torch.exp2(torch.ceil(torch.log2(largest / MOST[dtype]))).to(value.dtype)
    scale = scale.view(-1, *(1,) * (value.dim() - 1))
    return (value / scale).to(dtype).to(value.dtype) * scale


def reference_step(model: nn.Module, batch: Any, to: torch.dtype | None = None) -> Tensor:
    """Run forward and backward with rounded weights; the gradients are those of the weights."""
    kept = {name: param.data for name, param in model.named_parameters()}
    for param in model.parameters():
        param.data = rounded(param.data, to=to)
    loss = loss_of(model(*batch.args, **batch.kwargs))
    loss.backward()
    for name, param in model.named_parameters():
        param.data = kept[name]
    return loss.detach()


SETTINGS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "kept": {"reshard_after_forward": False},
    "offload": {"offload_policy": fsdp2.CPUOffloadPolicy(pin_memory=False)},
}
HARD = ["few_rows", "non_contiguous", "tied_lm", "partly_frozen", "one_row", "stack", "scalars"]


@pytest.mark.parametrize("setting", with_slow(SETTINGS, ["as it is"]))
@pytest.mark.parametrize("case", with_slow(HARD, ["non_contiguous", "stack"]))
@ranks(slow(2), 3, slow(4))
def test_a_model_is_trained_on_rounded_weights(case: str, setting: str) -> None:
    """Losses, gradients and shards are those of one process with rounded weights, by rows."""
    kind = CASES[case]
    policy = MixedPrecisionPolicy(gather_dtype=FP8)
    model = shard(seeded(kind.build), kind, mp_policy=policy, **SETTINGS[setting])
    plain = seeded(kind.build)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (model, plain)]
    for _ in range(3):
        batch = kind.batch(ROWS)
        own = batch.chunk(dist.get_rank(), dist.get_world_size())
        loss = loss_of(model(*own.args, **own.kwargs))
        loss.backward()
        assert_same(global_mean(loss), reference_step(plain, batch), "loss", 1e-5)
        assert_same_gradients(model, plain, 1e-4)
        advance(*optimizers)
    assert_same_parameters(model, plain, 1e-5)


class Noted(torch.autograd.Function):
    """A product that notes the weight that forward has, and the one that was kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seen: list[Tensor]) -> Tensor:
        ctx.seen = seen
        ctx.save_for_backward(x, weight)
        seen.append(weight.detach().clone())
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]  # torch's own is vague
        x, weight = ctx.saved_tensors
        ctx.seen.append(weight.detach().clone())
        return grad @ weight, grad.T @ x, None


class Seen(nn.Linear):
    """Notes the weight that forward and backward have."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen: list[Tensor] = []
        product: Tensor = Noted.apply(x.to(self.weight.dtype), self.weight, self.seen)  # type: ignore[no-untyped-call]  # torch's own
        return product + self.bias


def make(width: int = 29, **kwargs: Any) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(Seen(width, 13), Seen(13, 24))
    with torch.no_grad():
        model[0].weight[2] *= 1000
        model[0].weight[3] = 0
        model[0].weight[4] *= 1e-9
    shard_each(*model, **kwargs)
    return fsdp2.fully_shard(model, **kwargs)


def run(model: nn.Module) -> list[list[Tensor]]:
    torch.manual_seed(7)
    model(torch.randn(4, model[0].in_features)).square().mean().backward()  # type: ignore[index]
    return [layer.seen for layer in model]  # type: ignore[union-attr, misc]


@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
@pytest.mark.parametrize("to", [None, torch.bfloat16, slow(torch.float16)])
@ranks(slow(2), 4)
def test_forward_and_backward_see_the_same_rounded_weights(
    dtype: torch.dtype, to: torch.dtype | None
) -> None:
    """Bit for bit, on replicas, over a smaller mesh and where shards divide no block, too."""
    policy = MixedPrecisionPolicy(param_dtype=to, gather_dtype=dtype)
    size = dist.get_world_size()
    ways: list[dict[str, Any]] = [
        {"mesh": make_mesh()},
        {"mesh": make_mesh(), "reshard_after_forward": size // 2},
        {"mesh": make_mesh(), "reshard_after_forward": False},
    ]
    if size == 4:
        ways.append({"mesh": make_mesh(2, 2)})
    if torch_dtensor.asks_subclasses():
        for choice in (fsdp2.Aligned(0, multiple_of=5), fsdp2.Whole()):
            ways.append({"mesh": make_mesh(), "shard_placement_fn": lambda _, c=choice: c})
    for way in ways:
        model = make(mp_policy=policy, **way)
        expected = [rounded(whole(layer.weight), dtype) for layer in model]  # type: ignore[union-attr, arg-type]
        for seen, value in zip(run(model), expected, strict=True):
            assert len(seen) == 2
            for found in seen:
                assert found.dtype is (to or torch.float32)
                assert torch.equal(found, value.to(found.dtype)), way


@ranks(4)
def test_one_scale_for_a_shard() -> None:
    """Rows of a shard share a scale; a smaller mesh after forward sends what forward had."""
    policy = MixedPrecisionPolicy(gather_dtype=FP8, gather_scale="tensor")
    for way in ({}, {"reshard_after_forward": 2}):
        model = make(mp_policy=policy, mesh=make_mesh(), **way)
        for layer, seen in zip(model, run(model), strict=True):
            parts = whole(layer.weight).chunk(4)  # type: ignore[arg-type]
            expected = torch.cat([rounded(p.reshape(1, -1)).view(p.shape) for p in parts])
            for found in seen:
                assert torch.equal(found, expected)


@ranks(3)
def test_columns_have_scales_of_each_ranks_part_of_a_row() -> None:
    policy = MixedPrecisionPolicy(gather_dtype=FP8)

    def columns(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.dim() > 1 else None

    model = make(mp_policy=policy, mesh=make_mesh(), shard_placement_fn=columns)
    for layer, seen in zip(model, run(model), strict=True):
        parts = whole(layer.weight).chunk(3, 1)  # type: ignore[arg-type]
        for found in seen:
            assert torch.equal(found, torch.cat([rounded(part) for part in parts], 1))


@ranks(2)
def test_rows_that_are_not_finite_stay_so_and_others_do_not_change() -> None:
    model = make(mp_policy=MixedPrecisionPolicy(gather_dtype=FP8), mesh=make_mesh())
    before = whole(model[0].weight).clone()  # type: ignore[index, arg-type]
    with torch.no_grad():
        local = model[0].weight.to_local()  # type: ignore[index, union-attr]
        local[1, 2] = math.nan if dist.get_rank() else math.inf
    seen = run(model)[0][0]
    bad = [1, 8]  # the second row of each rank, of seven and six
    assert seen[bad].isnan().all()
    good = [row for row in range(13) if row not in bad]
    assert torch.equal(seen[good], rounded(before)[good])


@ranks(2, slow(3))
def test_bytes_on_the_wire() -> None:
    """A matrix of 256 columns takes 258 bytes a row in place of 512; vectors stay as they are."""
    sent: dict[str, int] = {}
    for way in ("bf16", "fp8"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2)))
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, gather_dtype=FP8 if way == "fp8" else None
        )
        shard_each(*model, model, mp_policy=policy, mesh=make_mesh())
        seen: list[events.Event] = []
        with events.listen(seen.append):
            model(torch.randn(2, 256)).sum().backward()
        sent[way] = sum(event.nbytes for event in seen if event.kind == "unshard")
    assert sent["fp8"] / sent["bf16"] < 0.51


def assert_same_gradient_bits(model: nn.Module, other: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(whole(ours.grad), whole(theirs.grad)), name


@ranks(2)
def test_blocks_that_are_compiled_and_whole_models() -> None:
    """`compile()` of the blocks, and `fsdp2.compile` of the model, compute what eager ones do."""
    for to in (None, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=to, gather_dtype=FP8, output_dtype=torch.float32)

        def plain_model(policy: MixedPrecisionPolicy = policy) -> nn.Module:
            torch.manual_seed(3)
            model = nn.Sequential(nn.Linear(29, 13), nn.Tanh(), nn.Linear(13, 24))
            shard_each(model[0], model[2], mp_policy=policy, mesh=make_mesh())
            return fsdp2.fully_shard(model, mp_policy=policy, mesh=make_mesh())

        def in_blocks(model: nn.Module) -> Callable[..., Any]:
            model[0].compile(backend="aot_eager")  # type: ignore[index, operator]
            return model

        eager = plain_model()
        x = torch.randn(4, 29)
        expected = eager(x)
        expected.square().mean().backward()
        for make_one in (in_blocks, lambda model: fsdp2.compile(model, backend="aot_eager")):
            model = plain_model()
            compiled = make_one(model)
            found = compiled(x)
            found.square().mean().backward()
            assert torch.equal(found, expected)
            assert_same_gradient_bits(model, eager)


@ranks(4)
def test_tensor_parallel_parameters_and_accumulation() -> None:
    """Rows of a rank's part have scales; gradients add up as ever."""
    mesh = mesh_of(data=2, tensor=2)
    policy = MixedPrecisionPolicy(gather_dtype=FP8)
    models = []
    for chosen in (policy, None):
        torch.manual_seed(1)
        model = Transformer()
        sequence_parallel(model, mesh["tensor"])
        if chosen is None:  # rounded by hand, each rank's own rows
            with torch.no_grad():
                for param in model.parameters():
                    local = torch_dtensor.local_part(param)
                    local.copy_(rounded(local))
        fsdp2.fully_shard(model, mesh=mesh["data"], mp_policy=chosen or MixedPrecisionPolicy())
        models.append(model)
    for step in range(2):
        torch.manual_seed(step)
        batch = tokens()
        losses = []
        for model in models:
            model.set_requires_gradient_sync(step == 1)  # type: ignore[operator]
            loss = loss_of(model(batch))
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    assert_same_gradient_bits(*models)


@ranks(2)
def test_states_and_evaluation_have_full_precision() -> None:
    """Shards keep their values; in evaluation nothing is rounded, if the policy says so."""
    policy = MixedPrecisionPolicy(gather_dtype=FP8, full_precision_in_eval=True)
    model = make(mp_policy=policy, mesh=make_mesh())
    before = values_of(model)
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 29))
    assert torch.equal(model[0].seen[0], before["0.weight"])  # type: ignore[index, union-attr]
    model.train()
    assert torch.equal(run(model)[0][0], rounded(before["0.weight"]))
    for name, value in fsdp2.full_params(model, max_bytes=1 << 20):
        assert torch.equal(value, before[name])


@ranks(2)
def test_small_rows_in_fp16() -> None:
    """Scales are below what fp16 has; what codes and scales stand for is not."""
    for dtype in (FP8, torch.float8_e5m2):
        policy = MixedPrecisionPolicy(param_dtype=torch.float16, gather_dtype=dtype)
        model = nn.Linear(8, 6, bias=False)
        with torch.no_grad():
            model.weight.copy_(10.0 ** -torch.arange(6.0).unsqueeze(1))
        expected = rounded(model.weight.detach().clone(), dtype).to(torch.float16)
        fsdp2.fully_shard(model, mesh=make_mesh(), mp_policy=policy)
        model.unshard()
        assert torch.equal(model.weight, expected)
        assert model.weight.min() > 0
        model.reshard()


@ranks(3)
def test_placeholders_are_rounded_as_what_they_stand_for() -> None:
    """`functional_call` gathers them by themselves, and computes the same."""
    for to in (None, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=to, gather_dtype=FP8)
        model = make(mp_policy=policy, mesh=make_mesh())
        x = torch.randn(4, 29)
        scaled = {name: param * 1 for name, param in model.named_parameters()}
        found = torch.func.functional_call(model, scaled, (x,))
        assert torch.equal(found, model(x))


def test_what_is_no_code_is_told() -> None:
    for wrong in (torch.bfloat16, torch.int8, torch.float8_e8m0fnu, "fp8"):
        with pytest.raises(ConfigError, match="gather_dtype"):
            MixedPrecisionPolicy(gather_dtype=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gather_scale"):
        MixedPrecisionPolicy(gather_dtype=FP8, gather_scale="block")

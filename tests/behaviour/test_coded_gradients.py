"""Promise: gradients that travel in 8 bits are near the exact ones, and replicas stay equal."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import Replicate

import fsdp2
from fsdp2 import ConfigError
from fsdp2._core.comm.coded_sum import CodedSum
from tests.kit.in_turn import advance
from tests.kit.meshes import random_numbers
from tests.kit.models import CASES, loss_of, seeded
from tests.kit.parity import Pair, bits, global_mean, local_loss, make_mesh, names_of, shard, whole
from tests.kit.pool import ranks_that_share as ranks
from tests.kit.slow import slow, with_slow

INT8, E4M3, E5M2 = torch.int8, torch.float8_e4m3fn, torch.float8_e5m2
STEP = {INT8: 1 / 253, E4M3: 1 / 16, E5M2: 1 / 8}
"""Half a step of a code over what it is for: of the block's largest (int8), of itself (floats)."""


@pytest.mark.parametrize("dtype", [INT8, E4M3, slow(E5M2)])
@pytest.mark.parametrize("shape", [(3,), slow((2,)), slow((4,))])
@ranks(4)
def test_a_sum_is_as_near_as_its_codes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Over all ranks, to one of them and to all; exact columns are exact; replicas are equal."""
    del shape
    size, rank = dist.get_world_size(), dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    for numel, exact in ((700, ((690, 700),)), (37, ()), (9, ((0, 3), (5, 9))), (8, ((0, 8),))):
        every = [torch.randn(size * numel, generator=random_numbers(r)) for r in range(size)]
        total = torch.stack(every).sum(0)
        one = CodedSum(dtype, 16, None, exact, group)
        reduced = torch.empty(numel)
        one.reduce_scatter(every[rank].clone(), reduced)
        mine = slice(rank * numel, (rank + 1) * numel)
        near(reduced, total[mine], [e[mine] for e in every], exact, dtype)
        everywhere = torch.empty(numel)
        one.all_reduce(every[rank][:numel].clone(), everywhere)
        parts = [e[:numel] for e in every]
        near(everywhere, total[:numel], [*parts, total[:numel]], exact, dtype)
        copies = [torch.empty(numel) for _ in range(size)]
        dist.all_gather(copies, everywhere)
        assert all(torch.equal(bits(copy), bits(everywhere)) for copy in copies)


def near(
    found: Tensor, expected: Tensor, summands: list[Tensor], exact: Any, dtype: torch.dtype
) -> None:
    """Assert that each summand was rounded by half a step at most, and exact columns not."""
    bound = sum((part.abs().amax() * STEP[dtype] * 1.02 for part in summands), torch.tensor(1e-6))
    assert ((found - expected).abs() <= bound).all()
    for first, last in exact:
        torch.testing.assert_close(found[first:last], expected[first:last], rtol=1e-6, atol=1e-6)


def worst_of(found: Tensor, expected: Tensor) -> float:
    """Return the largest error over the largest element."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", [INT8, E4M3])
@pytest.mark.parametrize("shape", [(4,), (2, 2), slow((4, 1))])
@ranks(4)
def test_gradients_are_near_and_errors_are_fed_back(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """The sum over steps is nearer with feedback than without; what is missing is zero, or None."""
    grads = {}
    compress = functools.partial(fsdp2.Compress, dtype, block=16)
    hooks: dict[str, Any] = {"exact": None, "coded": compress()}
    hooks |= {"fed back": compress(error_feedback=True), "replicas": compress(only_replicas=True)}
    for way, hook in hooks.items():
        case = CASES["unused_parts"]
        model = shard(seeded(case.build), case, mesh=make_mesh(*shape))
        fsdp2.register_comm_hook(model, hook)
        torch.manual_seed(3)
        batch = case.batch(8).chunk(dist.get_rank(), 4)
        total: dict[str, Tensor] = {}
        for _ in range(8):
            loss_of(model(*batch.args, **batch.kwargs)).backward()
            for name, param in model.named_parameters():
                if param.grad is not None:
                    total[name] = total.get(name, torch.zeros(())) + whole(param.grad)
            model.zero_grad()
        grads[way] = total
    exact = grads["exact"]
    assert all(set(total) == set(exact) for total in grads.values())
    worst = {
        way: max(worst_of(total[name], grad) for name, grad in exact.items() if grad.any())
        for way, total in grads.items()
    }
    assert 0 < worst["coded"] < {INT8: 0.05, E4M3: 0.2}[dtype]
    assert worst["fed back"] < 0.5 * worst["coded"]
    if shape == (4,):
        assert worst["replicas"] < 1e-6  # there is no such axis


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@ranks(4)
def test_replicas_stay_equal_to_the_bit(shape: tuple[int, ...]) -> None:
    """Replicated parameters, and shards of replicas, after steps from coded gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 29), nn.LayerNorm(29), nn.Linear(29, 5))
    model.register_parameter("scalar", nn.Parameter(torch.tensor(1.0)))
    fsdp2.fully_shard(
        model,
        mesh=make_mesh(*shape),
        shard_placement_fn=lambda p: Replicate() if p.dim() == 1 else None,
    )
    fsdp2.register_comm_hook(model, fsdp2.Compress(INT8, block=8, error_feedback=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(5):
        x = torch.randn(3, 13, generator=random_numbers(dist.get_rank()))
        (model(x) * model.scalar).square().mean().backward()
        advance(optimizer)
    for name, param in model.named_parameters():
        is_cut = param.placements[-1].is_shard()  # type: ignore[attr-defined]
        found: list[Any] = [None] * 4
        dist.all_gather_object(found, param.to_local().detach().numpy().tobytes())  # type: ignore[attr-defined]
        if is_cut and shape == (2, 2):
            assert found[:2] == found[2:], name
        elif not is_cut:
            assert len(set(found)) == 1, name


@pytest.mark.parametrize("dtype", [INT8, E4M3])
@pytest.mark.parametrize("case", with_slow(["few_rows", "tied_lm", "mixed_dtypes"], ["tied_lm"]))
@ranks(3)
def test_a_model_trains(case: str, dtype: torch.dtype) -> None:
    """The loss falls as with exact gradients, to a few percent."""
    losses = {}
    for hook in (None, fsdp2.Compress(dtype, error_feedback=True)):
        pair = Pair(case, mesh=make_mesh())
        fsdp2.register_comm_hook(pair.model, hook)
        optimizer = torch.optim.SGD(pair.model.parameters(), lr=0.05)
        torch.manual_seed(1)
        batch = pair.batch()
        for _ in range(12):
            loss = pair.run(pair.model, pair.local(batch))
            loss.backward()
            advance(optimizer)
        losses[hook is not None] = float(global_mean(loss.float()))
    assert losses[True] == pytest.approx(losses[False], rel=0.05)


@ranks(2, slow(3))
def test_bytes_on_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte an element and two a block, of 256, in place of four an element."""
    sent: list[int] = []
    exchange = dist.all_to_all_single

    def counted(received: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(given.nbytes)
        return exchange(received, given, *args, **kwargs)

    monkeypatch.setattr(dist, "all_to_all_single", counted)
    torch.manual_seed(0)
    model = fsdp2.fully_shard(nn.Linear(512, 768, bias=False), mesh=make_mesh())
    fsdp2.register_comm_hook(model, fsdp2.Compress(INT8))
    model(torch.randn(2, 512)).sum().backward()
    assert 0.25 < sum(sent) / (4 * 512 * 768) < 0.255


@ranks(2)
def test_overflow_is_seen_and_errors_of_it_are_not_kept() -> None:
    """An infinity makes its block NaN, as a sum would; the next step is as if it had not been."""
    model = fsdp2.fully_shard(nn.Linear(16, 16, bias=False), mesh=make_mesh())
    fsdp2.register_comm_hook(model, fsdp2.Compress(INT8, block=8, error_feedback=True))
    x = torch.ones(2, 16)
    (model(x).sum() * (float("inf") if dist.get_rank() else 1.0)).backward()
    assert not whole(model.weight.grad).isfinite().any()
    model.zero_grad()
    model(x).sum().backward()
    assert model.weight.grad is not None
    expected = torch.full((16, 16), 2.0)
    torch.testing.assert_close(whole(model.weight.grad), expected, rtol=0.02, atol=0)


def check_near(model: nn.Module, plain: nn.Module, most: float) -> None:
    for name, param in plain.named_parameters():
        assert param.grad is not None
        assert worst_of(whole(names_of(model)[name].grad), param.grad) < most, name  # type: ignore[arg-type]


@ranks(4)
def test_small_gradients_in_fp16() -> None:
    """Their scales, and what is rounded off, are below what fp16 has; sums are kept in it."""
    for shape in ((4,), (2, 2)):
        for hook in (fsdp2.Compress(INT8, block=8), fsdp2.Compress(INT8, error_feedback=True)):
            model = seeded(lambda: nn.Linear(13, 29))
            policy = fsdp2.MixedPrecisionPolicy(reduce_dtype=torch.float16)
            plain = seeded(lambda: nn.Linear(13, 29))
            fsdp2.fully_shard(model, mesh=make_mesh(*shape), mp_policy=policy)
            fsdp2.register_comm_hook(model, hook)
            for _ in range(2):
                for one in (model, plain):
                    one.zero_grad()
                    (one(torch.ones(2, 13) / 7).square().mean() * 2e-2).backward()
            check_near(model, plain, 0.05)


@ranks(4)
def test_complex_gradients_are_summed_by_their_parts() -> None:
    """Over a shard axis and over replicas, by 8 bits and by 16."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(16, 16)
            self.weight = nn.Parameter(torch.randn(16, 16, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(x).to(torch.complex64) @ self.weight).abs().mean()

    for shape in ((4,), (2, 2)):
        for dtype in (INT8, torch.bfloat16):
            model, plain = seeded(Mixed), seeded(Mixed)
            fsdp2.fully_shard(model, mesh=make_mesh(*shape))
            fsdp2.register_comm_hook(model, fsdp2.Compress(dtype))
            for one in (model, plain):
                one(torch.ones(2, 16)).backward()
            check_near(model, plain, 0.1 if dtype is INT8 else 0.03)


@ranks(2)
def test_a_functional_call_leaves_exact_what_ranks_tell_each_other() -> None:
    """It reduces one parameter alone, in other columns."""
    model = fsdp2.fully_shard(nn.Linear(64, 64), mesh=make_mesh())
    fsdp2.register_comm_hook(model, fsdp2.Compress(INT8))
    args, found = (torch.randn(4, 64, generator=random_numbers(0)),), []
    for _ in range(2):
        model.zero_grad()
        model(*args).square().sum().backward()
        found.append(torch.cat([p.grad.full_tensor().view(-1) for p in model.parameters()]))
        given = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
        torch.func.functional_call(model, given, args).square().sum().backward()
    assert torch.equal(*found)


@ranks(2)
def test_ranks_that_differ_are_told_beside_codes() -> None:
    """What ranks tell each other behind the gradients is not rounded."""
    case = CASES["few_rows"]
    models = [shard(seeded(case.build, seed), case) for seed in (1, 2)]
    for model in models:
        fsdp2.register_comm_hook(model, fsdp2.Compress(INT8))

    def run(order: list[nn.Module]) -> None:
        for model in [*order, *order]:
            local_loss(model, case).backward()

    run(models)
    with pytest.raises(fsdp2.FSDPError):
        run(models if dist.get_rank() else models[::-1])


def test_what_is_refused() -> None:
    refusals: list[tuple[str, Any, dict[str, Any]]] = [
        ("Compress", torch.uint8, {}),
        ("block", INT8, {"block": 4}),
        ("only_replicas", INT8, {"only_replicas": 1}),
    ]
    for said, dtype, options in refusals:
        with pytest.raises(ConfigError, match=said):
            fsdp2.Compress(dtype, **options)
    with pytest.raises(ConfigError, match="16-bit"):
        fsdp2.Compress(INT8).narrow({}, torch.zeros(3), 2)

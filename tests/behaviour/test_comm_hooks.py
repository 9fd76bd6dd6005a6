"""Promise: a communication hook carries gradients and nothing else changes.

Also `fsdp2.debug`: orders that are compared over ranks, and steps that send nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2._core.engine.tree import unit_of
from tests.kit.collectives import Scatter
from tests.kit.meshes import random_numbers
from tests.kit.models import CASES, Stack, loss_of, seeded
from tests.kit.parity import Pair, assert_same, assert_same_gradients, make_mesh, shard, whole
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def summing(state: Any, packed: Tensor, reduced: Tensor, group: dist.ProcessGroup) -> None:
    """What the backend does, by hand and in another order."""
    if isinstance(state, dict):
        state["calls"] = state.get("calls", 0) + 1
    total = packed.clone()
    dist.all_reduce(total, group=group)
    start = reduced.numel() * (group.rank() if reduced.numel() != packed.numel() else 0)
    reduced.copy_(total[start : start + reduced.numel()])


@pytest.mark.parametrize(
    ("case", "shape"),
    [
        slow("one_row", (3,)),
        ("few_rows", (3, 1)),
        slow("partly_frozen", (1, 3)),
        slow("unused_parts", (3,)),
    ],
)
@ranks(3)
def test_a_hook_that_sums(case: str, shape: tuple[int, ...]) -> None:
    """Training as without a hook, on every kind of mesh; called once a unit, axis and step."""
    state: dict[str, int] = {}
    pair = Pair(case, mesh=make_mesh(*shape))
    fsdp2.register_comm_hook(pair.model, summing, state)
    pair.train(2)
    assert state["calls"] >= 2 * len(fsdp2.units(pair.model)) - 2
    fsdp2.register_comm_hook(pair.model, None)
    calls = state["calls"]
    pair.train(1)
    assert state["calls"] == calls


@ranks(4)
def test_a_hook_on_replicas_and_with_other_scales() -> None:
    """Both axes of a 2-D mesh; the engine divides as its settings say."""
    for setting in (lambda m: None, lambda m: m.set_gradient_reduction("sum")):
        grads = []
        for hooked in (False, True):
            model = shard(seeded(Stack), CASES["stack"], mesh=make_mesh(2, 2))
            setting(model)
            if hooked:
                fsdp2.register_comm_hook(model, summing)
            x = torch.randn(2, 13, generator=random_numbers(dist.get_rank()))
            for _ in range(2):
                loss_of(model(x)).backward()
            grads.append([whole(p.grad) for p in model.parameters()])  # type: ignore[arg-type]
        for plain, ours in zip(*grads, strict=True):
            torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [slow((4,)), (2, 2)])
@ranks(4)
def test_a_hook_carries_the_gradients_of_placeholders(shape: tuple[int, ...]) -> None:
    """What stands in for a shard in `functional_call` is reduced by the hook, and divided once."""
    pair = Pair("stack", mesh=make_mesh(*shape))
    state: dict[str, int] = {}
    fsdp2.register_comm_hook(pair.model, summing, state)
    for model, part in pair.each():
        scaled = {name: parameter * 0.5 for name, parameter in model.named_parameters()}
        torch.func.functional_call(model, scaled, part.args).square().mean().backward()
    assert_same_gradients(pair.model, pair.reference, 2e-6)
    assert state["calls"] >= len(list(pair.model.parameters()))


def one_gradient(hook: Any, scale: float, mesh: Any, steps: int = 1) -> list[Tensor]:
    model = shard(seeded(CASES["one_row"].build), CASES["one_row"], mesh=mesh)
    if hook is not None:
        fsdp2.register_comm_hook(model, hook)
    x = torch.randn(2, 13, generator=random_numbers(dist.get_rank()))
    total: list[Tensor] = []
    for _ in range(steps):
        (loss_of(model(x)) * scale).backward()
        grads = [whole(p.grad).clone() for p in model.parameters()]  # type: ignore[arg-type]
        total = [a + b for a, b in zip(total, grads, strict=True)] if total else grads
        model.zero_grad()
    return total


@pytest.mark.parametrize(
    ("shape", "dtype"),
    with_slow(itertools.product([(4,), (2, 2)], [BF16, FP16]), [((2, 2), FP16)]),
)
@ranks(4)
def test_compression(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Gradients are near the exact ones, are sent in the narrow dtype, and fp16 sums do not
    overflow; with error feedback the sum over steps is nearer than each step.
    """
    mesh = make_mesh(*shape)
    scale = 3e4 if dtype is FP16 else 1.0
    exact = one_gradient(None, scale, mesh)
    near = one_gradient(fsdp2.Compress(dtype), scale, mesh)
    rtol = 2e-2 if dtype is BF16 else 4e-3
    for ours, expected in zip(near, exact, strict=True):
        assert_same(ours, expected, "gradient", rtol)
    assert any(not torch.equal(a, b) for a, b in zip(near, exact, strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_errors_are_fed_back(dtype: torch.dtype) -> None:
    """Over many steps the sum of what is sent is the sum of the gradients, to one rounding."""
    packed = torch.randn(13, 29, generator=torch.Generator().manual_seed(0))
    errors = []
    for feedback in (False, True):
        hook, state = fsdp2.Compress(dtype, error_feedback=feedback), {}  # type: ignore[var-annotated]
        sent = torch.zeros_like(packed)
        for _ in range(64):
            narrow, factor = hook.narrow(state, packed, 4)
            assert narrow.dtype is dtype
            sent += narrow.float() * factor
        errors.append((sent / 64 - packed).abs().max().item())
    assert errors[1] < errors[0] / 16


@ranks(2)
def test_what_the_wire_carries() -> None:
    """Reductions are in bf16 while a hook compresses."""
    model = shard(seeded(Stack), CASES["stack"])
    seen: list[torch.dtype] = []

    class Watch(fsdp2.Compress):
        def narrow(self, state: Any, packed: Tensor, ranks: int) -> tuple[Tensor, float]:
            narrow, factor = super().narrow(state, packed, ranks)
            seen.append(narrow.dtype)
            return narrow, factor

    fsdp2.register_comm_hook(model, Watch(BF16))
    with CommDebugMode() as mode:
        model(torch.randn(4, 13)).sum().backward()
    assert seen == [BF16] * 4
    assert fsdp2.Compress(BF16).dtype is BF16
    assert mode.get_total_counts() >= 4
    assert all(p.grad.dtype is FP32 for p in model.parameters())  # type: ignore[union-attr]


@ranks(2)
def test_hooks_that_are_refused() -> None:
    model = shard(seeded(Stack), CASES["stack"])
    calls: list[tuple[str, Any, Any]] = [
        ("not applied to any module", nn.Linear(1, 1), [summing]),
        ("hook to be a function", model, [3]),
        ("Omit it", model, [fsdp2.Compress(BF16), {}]),
    ]
    for said, module, given in calls:
        with pytest.raises(fsdp2.ConfigError, match=said):
            fsdp2.register_comm_hook(module, *given)
    with pytest.raises(fsdp2.ConfigError, match=r"found torch\.float32"):
        fsdp2.Compress(FP32)
    model.blocks[0].set_custom_reduce_scatter(Scatter())
    with pytest.raises(fsdp2.ConfigError, match="has a custom reduce-scatter, Scatter"):
        fsdp2.register_comm_hook(model, summing)
    fsdp2.register_comm_hook(model, summing, recurse=False)


# --- fsdp2.debug ----------------------------------------------------------------------------------


class Ordered(Stack):
    """Runs its blocks in an order that can change."""

    def __init__(self) -> None:
        super().__init__()
        self.order = [0, 1, 2]
        self.checkpointed = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for index in self.order:
            block = self.blocks[index]
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.out(x)


@pytest.mark.parametrize("orders", [[[0, 1, 2], [0, 2, 1]], [[0, 1], [0, 1, 2]]])
@ranks(2)
def test_orders_that_differ_are_an_error_with_both(orders: list[list[int]], rank: int) -> None:
    """On every rank, before anything is sent; with equal orders training goes on."""
    model = shard(seeded(Ordered), CASES["stack"])
    check = fsdp2.debug.check_order(model, steps=3)
    model(torch.randn(2, 13)).sum().backward()
    assert check.order == ["<root>", "blocks.0", "blocks.1", "blocks.2"]
    model.order = orders[rank]
    x = torch.randn(2, 13)
    with pytest.raises(fsdp2.StateError, match="run different units") as caught:
        _ = [model(x), model(x)]  # a rank that did less is noticed when it goes on
    before = "<root> blocks.0 blocks.1 blocks.2 | <root> blocks.0"
    if orders[0] == [0, 1]:  # one is in its next forward
        shown = ["<root> blocks.0 blocks.1 | <root>", f"{before} blocks.1 blocks.2"]
    else:
        shown = [f"{before} blocks.1", f"{before} blocks.2"]
    for index, order in enumerate(shown):
        assert f"rank {index}: {order};" in str(caught.value)


@ranks(2)
def test_an_order_that_changes_later_is_a_warning() -> None:
    """Once for each unit, on all ranks alike; recomputation is no change."""
    model = shard(seeded(Ordered), CASES["stack"])
    model.checkpointed = True
    check = fsdp2.debug.check_order(model, steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model(torch.randn(2, 13)).sum().backward()
    model.order = [0, 2, 1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.randn(2, 13)).sum().backward()
    found = [str(w.message) for w in caught if "fsdp2" in str(w.message)]
    assert len(found) == 2
    assert "blocks.2 runs where blocks.1 ran before (forward 3, unit 3)" in found[0]
    check.remove()
    model.order = [2, 1, 0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(2, 13)).sum().backward()
    with pytest.raises(fsdp2.ConfigError, match="not applied to any module"):
        fsdp2.debug.check_order(nn.Linear(1, 1))


@pytest.mark.parametrize("shape", [slow((4,)), (2, 2)])
@ranks(4)
def test_steps_without_communication(shape: tuple[int, ...]) -> None:
    """Inside nothing is sent; afterwards everything is right again, and checked."""
    pair = Pair("stack", mesh=make_mesh(*shape))
    pair.train(2)
    before = [p.to_local().clone() for p in pair.model.parameters() if isinstance(p, DTensor)]
    state = unit_of(pair.model)
    stamps = [s for g in state.own_groups for s in g.ids.all]
    context = fsdp2.debug.without_communication(pair.model)
    with pytest.warns(UserWarning, match="results are wrong"):
        context.__enter__()
    for _ in range(2):
        with CommDebugMode() as mode:
            pair.model(torch.randn(2, 13)).sum().backward()
        assert mode.get_total_counts() == 0
    context.__exit__(None, None, None)
    assert all(stamp.is_checked for stamp in stamps)
    pair.model.zero_grad()
    after = [p.to_local() for p in pair.model.parameters() if isinstance(p, DTensor)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    pair.train(2)


@pytest.mark.parametrize("shape", [slow((4,)), (2, 2)])
@ranks(4)
def test_steps_without_one_sort_of_communication(shape: tuple[int, ...]) -> None:
    """Gathers alone are left out, or reductions alone; the other sort is as in any step."""
    pair = Pair("stack", mesh=make_mesh(*shape))
    pair.train(2)

    def counts(**flags: bool) -> tuple[int, int]:
        context = fsdp2.debug.without_communication(pair.model, **flags)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            context = context if flags else contextlib.nullcontext()
            with context, CommDebugMode() as mode:
                pair.model(torch.randn(2, 13)).sum().backward()
        pair.model.zero_grad()
        found = {str(op): count for op, count in mode.get_comm_counts().items()}
        gathers = sum(count for op, count in found.items() if "gather" in op)
        return gathers, sum(found.values()) - gathers

    gathers, reductions = counts()
    assert gathers > 0
    assert reductions > 0
    assert counts(gathers=False) == (gathers, 0)
    assert counts(reductions=False) == (0, reductions)
    with pytest.raises(fsdp2.ConfigError, match="nothing would be skipped"):
        counts(gathers=False, reductions=False)
    pair.train(2)

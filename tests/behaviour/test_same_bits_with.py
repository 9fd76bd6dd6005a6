"""Promise: what works with `fsdp2.reproducible` has the same bits on one, two and four ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.optim import AdamW, Muon, Optimizer

import fsdp2
from fsdp2._core.comm.tree_codes import RowCodes
from tests.behaviour.test_reproducible import compress, nothing
from tests.kit.in_turn import shard_each
from tests.kit.meshes import shared_mesh
from tests.kit.models import seeded
from tests.kit.parity import whole
from tests.kit.pool import ranks
from tests.kit.slots import SLOTS, Net, Plain, adamw, assert_same_bits, batch_of, loss_of

STEPS, BAD_STEP = 4, 1
Optimizers = Callable[[nn.Module], list[Optimizer]]


def compile_blocks(model: Any) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")


def plain(model: nn.Module) -> list[Optimizer]:
    return [adamw(model.parameters())]


def muon(model: nn.Module) -> list[Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    return [fsdp2.optim.whole(Muon, matrices, lr=1e-2), adamw(others)]


def local(model: nn.Module, **options: Any) -> list[Optimizer]:
    return [fsdp2.optim.local(AdamW, model.parameters(), lr=1e-2, **options)]


# blocks of 8: rows of 13 and of 41 elements have several, with odd ends
KINDS: dict[str, tuple[dict[str, Any], Callable[[Any], None], Optimizers]] = {
    "compiled blocks": ({}, compile_blocks, plain),
    "Muon": ({}, nothing, muon),
    "optim.local": ({}, nothing, local),
    "optim.local, foreach": ({}, nothing, partial(local, foreach=True)),
    "optim.local, fused": ({}, nothing, partial(local, fused=True)),
    "shard_outer": ({"shard_outer": "optimizer"}, nothing, plain),
    "Compress, int8": ({}, partial(compress, dtype=torch.int8, block=8), plain),
    "Compress, other dims": (
        {"shard_placement_fn": lambda param: Shard(param.dim() - 1) if param.dim() else None},
        partial(compress, dtype=torch.int8, block=8),
        plain,
    ),
    "Compress, fp8": ({}, partial(compress, dtype=torch.float8_e5m2, block=8), plain),
    "scaler": ({}, nothing, plain),
}


def run(kind: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Return losses, norms and parameters of a job of so many ranks; jobs run side by side."""
    options, prepare, optimizers_of = KINDS[kind]
    if len(shape) == 1:
        options = {name: value for name, value in options.items() if name != "shard_outer"}
    names = ("replicate", "shard")[-len(shape) :]
    jobs = dist.get_world_size() // math.prod(shape)
    mesh = shared_mesh((jobs, *shape), ("job", *names))[names if len(names) > 1 else names[0]]
    model: Any = seeded(Net)
    shard_each(*model.blocks, model, mesh=mesh, **options)
    prepare(model)
    mine = fsdp2.reproducible(model, slots=SLOTS)
    optimizers = optimizers_of(model)
    scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=2, enabled=kind == "scaler")
    found = {}
    for step in range(STEPS):
        losses = []
        for slot in mine:
            loss = loss_of(model, batch_of(step)[slot])
            is_bad = scaler.is_enabled() and (step, slot) == (BAD_STEP, SLOTS - 1)
            scaler.scale(loss * torch.inf if is_bad else loss).backward()
            losses.append(loss.detach())
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        found[f"norm {step}"] = fsdp2.clip_grad_norm_(model.parameters(), 0.3)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        found[f"loss {step}"] = fsdp2.mean_over_slots(model, losses)
        found[f"scale {step}"] = torch.tensor(scaler.get_scale())
    return found | {name: whole(param) for name, param in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
@ranks(4, limit_s=120)
def test_one_two_and_four_ranks_have_the_same_bits(kind: str) -> None:
    expected = run(kind, (1,))
    if kind == "scaler":
        assert not expected[f"norm {BAD_STEP}"].isfinite()
        assert [expected[f"scale {step}"] for step in range(4)] == [2**10, 2**9, 2**9, 2**10]
    if kind.startswith("Compress"):  # a few percent of rounding, but not none
        exact = Plain(seeded(Net), adamw).train(0.3)[1]
        assert 0 < (expected["norm 0"] - exact).abs() < 0.05 * exact
    for shape in ((2,), (4,), (2, 2)):
        for name, value in run(kind, shape).items():
            assert_same_bits(value, expected[name], f"{name} on {shape}")


@pytest.mark.parametrize(("width", "nbytes"), [(8, 10), (13, 16), (256, 258), (300, 304)])
def test_a_coded_row_is_as_long_as_its_elements_and_a_scale_for_each_block(
    width: int, nbytes: int
) -> None:
    codes = RowCodes(torch.int8, 256)
    assert codes.of(width)[1] == nbytes
    rows = torch.randn(5, width)
    rounded = codes.rounded(rows, torch.float32)
    most = rows.abs().amax(1, keepdim=True)
    assert ((rounded - rows).abs() <= most * 0.5 * (1 + 2.0**-6) / 127).all()
    assert_same_bits(codes.rounded(rows[3:], torch.float32), rounded[3:], "fewer rows")


@ranks(2)
def test_a_whole_compiled_model_is_refused() -> None:
    """At once, or in its first step if it was compiled before. Compiled blocks are allowed."""
    for is_first in (True, False):
        model: Any = fsdp2.fully_shard(seeded(Net), mesh=shared_mesh((2,), ("shard",)))
        compiled = fsdp2.compile(model, backend="aot_eager") if is_first else None
        mine = fsdp2.reproducible(model, slots=SLOTS)
        with pytest.raises(fsdp2.UnsupportedError, match="reproducible sums its grad") as error:
            run_compiled(model, compiled, mine)
        assert error.value.code == "FS802"


def run_compiled(model: nn.Module, compiled: Any, mine: range) -> None:
    compiled = compiled or fsdp2.compile(model, backend="aot_eager")
    loss_of(compiled, batch_of(0)[mine[0]])

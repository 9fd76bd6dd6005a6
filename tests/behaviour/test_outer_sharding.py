"""Promise: states lie over all ranks, parameters over the ranks of a node; training is the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

from fsdp2 import MixedPrecisionPolicy
from fsdp2._core.engine.between_steps import units_below
from tests.behaviour.test_sharding_modes import (
    KINDS,
    SGD,
    UNITS,
    bf16_run,
    counted,
    expected_output,
    micro_batches,
    train_with,
    written,
)
from tests.kit.models import CASES, loss_of
from tests.kit.parity import Pair, assert_same, make_mesh, sharded, whole
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

OUTER = {"shard_outer": "optimizer"}


def layered(case: str = "stack", **kwargs: Any) -> Pair:
    return Pair(case, mesh=make_mesh(2, dist.get_world_size() // 2), **OUTER, **kwargs)


def sent(model: nn.Module) -> list[list[Any]]:
    """Note the axis of every gather and of every reduction from now on: sizes of process groups."""
    gathers: list[Any] = []
    reductions: list[Any] = []
    for unit in units_below(model):
        for group in unit.own_groups:
            wire = group.wire

            def note(name: str, into: list[Any], wire: Any = wire) -> None:
                own = getattr(wire, name)

                def send(*args: Any) -> Any:
                    axis = next(a for a in args if hasattr(a, "global_ranks"))
                    into.append(axis.global_ranks)
                    return own(*args)

                setattr(wire, name, send)

            note("all_gather", gathers)
            note("reduce_scatter", reductions)
    return [gathers, reductions]


@ranks(4)
def test_the_outer_dim_carries_once_a_step(rank: int) -> None:
    """Gathers over all ranks, and reductions over the outer dim, come once in a step of three."""
    pair = layered(reshard_after_forward=True)
    pair.model.set_copy_free_min_bytes(None)  # type: ignore[operator]  # a collective for each unit
    inner, outer = ([0, 1], [2, 3])[rank // 2], ([0, 2], [1, 3])[rank % 2]
    gathers, reductions = sent(pair.model)
    for step in range(4):
        gathers.clear()
        reductions.clear()
        pair.accumulate(3, scale=1 / 3)
        if step < 2:  # ranks learn the order, and send more meanwhile
            pair.step()
            continue
        assert gathers.count([0, 1, 2, 3]) == UNITS
        assert gathers.count(inner) == 5 * UNITS
        assert len(gathers) == 6 * UNITS
        assert reductions.count(inner) == 3 * UNITS * 2  # for each rank of the outer dim
        assert reductions.count(outer) == UNITS
        assert len(reductions) == 7 * UNITS
        pair.step()
    pair.check()


@ranks(4)
def test_what_is_kept_between_steps_lies_over_all_ranks() -> None:
    pair = layered(optimizer=partial(torch.optim.AdamW, foreach=True))
    pair.backward()
    pair.optimizer.step()
    for param in pair.model.parameters():
        state = pair.optimizer.state[param]["exp_avg"]
        for tensor in (param, param.grad, state):
            assert tensor.device_mesh.size() == 4
            assert tensor.device_mesh.ndim == 1
            assert tensor.placements == (Shard(0),)


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("kind", with_slow([*KINDS, "SGD"], ["foreach", "fused", "SGD"]))
@ranks(4)
def test_parity_with_an_unsharded_model(kind: str, count: int) -> None:
    pair = layered()
    pair.first_rtol, pair.later_rtol = 1e-5, 1e-4
    train_with(pair, KINDS.get(kind, SGD), count, 1e-5 if kind == "SGD" else 1e-4)


NAMES = [
    *("few_rows", "one_row", "scalars", "non_contiguous", "mixed_dtypes", "partly_frozen"),
    *("tied_lm", "shared_block", "aux_output", "unused_parts", "nested_units", "one_group"),
]


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("name", NAMES)
@ranks(slow(4))
def test_any_parameter(name: str, reshard: bool | None) -> None:
    pair = layered(name, reshard_after_forward=reshard)
    for _ in range(2):
        pair.accumulate(3, scale=1 / 3)
        pair.step()
    for _ in range(2):
        pair.backward()
    pair.step()
    pair.check()


@pytest.mark.parametrize("min_bytes", [1, None])
@ranks(4)
def test_gradients_are_reduced_where_they_lie(min_bytes: int | None) -> None:
    """Without copies, too: what goes to a rank of the outer dim is one piece of each gradient."""
    pair = layered()
    pair.model.set_copy_free_min_bytes(min_bytes)  # type: ignore[operator]
    for _ in range(2):
        pair.accumulate(2, scale=1 / 2)
        pair.step()
    pair.check()


@pytest.mark.parametrize("count", [1, 4])
@ranks(4)
def test_bf16(count: int) -> None:
    """As on a mesh with replicas, up to the order of sums."""
    mesh = make_mesh(2, 2)
    for ours, theirs in zip(
        bf16_run(count, mesh=mesh, **OUTER), bf16_run(count, mesh=mesh), strict=True
    ):
        assert_same(ours, theirs, "bf16", 2e-2)


@ranks(4)
def test_fp16_is_scaled_in_two_steps() -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    pair = layered(mp_policy=policy)
    pair.first_rtol = pair.later_rtol = 4e-3
    pair.accumulate(2, scale=1 / 2)
    pair.step()


@pytest.mark.parametrize("puts_off", [True, False])
@ranks(4)
def test_hpz_composes_with_accumulation(puts_off: bool) -> None:
    """With an int of `reshard_after_forward`, too: gathers over all ranks come once a step."""
    pair = Pair("stack", reshard_after_forward=2)
    gathers, _ = sent(pair.model)
    for _ in range(2):
        gathers.clear()
        micro_batches(pair, 3, puts_off)
        assert gathers.count([0, 1, 2, 3]) == (UNITS if puts_off else 3 * UNITS)
        pair.step()
    pair.check()


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "in place": lambda m: [p.mul_(1.5) for p in m.parameters()],
    "data, zero_grad": lambda m: ([p.data.mul_(1.5) for p in m.parameters()], m.zero_grad()),
    "step": lambda m: torch.optim.AdamW(m.parameters(), lr=0.5, weight_decay=0.5).step(),
}


@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.filterwarnings("ignore:.*FS710")
@pytest.mark.parametrize("hpz", with_slow([True, False], [True]))
@ranks(4)
def test_no_write_is_missed(hpz: bool, kind: str) -> None:
    how: dict[str, Any] = (
        {"reshard_after_forward": 2} if hpz else {"mesh": make_mesh(2, 2), **OUTER}
    )
    model, x = written(**how)
    with counted() as seen:
        before = model(x).detach()
    assert seen["unshard"] == UNITS
    with torch.no_grad():
        WRITES[kind](model)
        after = model(x).detach()
    expected = expected_output(model, x)
    assert_same(model(x).detach(), expected, kind)
    assert_same(after, expected, kind)
    if kind != "step":  # its gradients wait, or there are none
        assert not torch.allclose(before, expected)


@ranks(4)
def test_copies_and_pickles_keep_the_layers() -> None:
    import copy
    import pickle

    case = CASES["stack"]
    model = sharded(case, mesh=make_mesh(2, 2), **OUTER)
    x = case.batch(4).args[0]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(twin(x)).backward()
        loss_of(model(x)).backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert_same(ours.grad, whole(theirs.grad), "a copy's gradient")  # type: ignore[arg-type]
        model.zero_grad()

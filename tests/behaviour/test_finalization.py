"""Promise: in manual mode a backward ends when the caller says so, and memory that stays, stays.

The reference is the plain model on the global batch, as everywhere; where torch has these methods
(since 2.15), its own `fully_shard` goes through the same calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2 import StateError
from fsdp2._core.engine.tree import unit_of
from tests.kit.in_turn import units_of
from tests.kit.models import CASES, TORCH_2_15, loss_of, seeded
from tests.kit.parity import Pair, assert_same_shards, make_mesh, shard
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

NEEDS_TORCHS_OWN = pytest.mark.skipif(not TORCH_2_15, reason="torch has them since 2.15")


def pair_of(name: str = "stack", **kwargs: Any) -> Pair:
    pair = Pair(name, **kwargs)
    pair.model.set_manual_backward_finalization(True)
    return pair


def finalize(model: nn.Module, async_op: bool) -> None:
    handle = model.finalize_backward(async_op=async_op)
    assert (handle is not None) is async_op
    if handle is not None:
        assert isinstance(handle, fsdp2.GradientReductionHandle)
        handle.wait()
        handle.wait()  # nothing more


# What comes out.


@pytest.mark.parametrize("name", with_slow(["stack", "nested_units", "partly_frozen", "tied_lm"]))
@pytest.mark.parametrize("async_op", [False, True])
@ranks(slow(1), 2, slow(3))
def test_several_backwards_and_one_reduction(name: str, async_op: bool) -> None:
    pair = pair_of(name)
    for _ in range(2):
        for _ in range(3):
            pair.model.set_requires_gradient_sync(False)
            pair.backward()
            assert all(p.grad is None for p in pair.model.parameters() if isinstance(p, DTensor))
        pair.model.set_requires_gradient_sync(True)
        finalize(pair.model, async_op)
        pair.step()
    pair.check()


@pytest.mark.parametrize(
    ("name", "reshard_after_forward"),
    with_slow(itertools.product(["stack", "nested_units"], [None, False]), [("stack", None)]),
)
@ranks(2)
def test_backwards_that_reduce_are_only_waited_for(
    name: str, reshard_after_forward: bool | None
) -> None:
    pair = pair_of(name, reshard_after_forward=reshard_after_forward)
    for _ in range(3):
        pair.backward()
        pair.model.finalize_backward()
        pair.step()
    pair.check()


@pytest.mark.parametrize("async_op", [False, True])
@ranks(4)
def test_over_replicas(async_op: bool) -> None:
    pair = pair_of("stack", mesh=make_mesh(2, 2))
    for _ in range(2):
        pair.accumulate(2)
        finalize(pair.model, async_op)
        pair.step()
    pair.check()


@ranks(2)
def test_units_without_a_post_backward_stay_whole_until_then() -> None:
    """The batch needs no gradient, so nothing tells where the first unit's backward ends."""
    model = built(manual=True)
    run(model).backward()
    assert all(isinstance(p, DTensor) for p in model.parameters())  # as ever between steps
    waiting = [p.grad is None for p in model.parameters()]
    assert any(waiting)
    assert not all(waiting)
    assert whole_nbytes(model) > 0
    model.finalize_backward()
    assert all(p.grad is not None for p in model.parameters())
    assert whole_nbytes(model) == 0


@ranks(2)
def test_whole_units_are_told_when_to_be_sharded() -> None:
    pair = pair_of("stack")
    pair.model.set_reshard_after_backward(False)
    pair.model.set_requires_gradient_sync(False)
    pair.backward()
    pair.model.set_reshard_after_backward(True)
    pair.model.set_requires_gradient_sync(True)
    pair.model.finalize_backward()
    assert whole_nbytes(pair.model) == 0
    pair.finish()


@NEEDS_TORCHS_OWN
@pytest.mark.parametrize(
    ("name", "sync", "async_op"),
    with_slow(
        itertools.product(["stack", "nested_units"], ["all", "last", "none"], [True, False]),
        [("stack", "last", True), ("nested_units", "all", False)],
    ),
)
@ranks(slow(1), 2, slow(4))
def test_the_same_calls_as_torchs_own(name: str, sync: str, async_op: bool) -> None:
    case = CASES[name]
    models = [shard(seeded(case.build), case, library) for library in (fsdp2, torch_fsdp)]
    for model in models:
        model.set_manual_backward_finalization(True)
    for _ in range(3):
        for micro in range(3):
            batch = case.batch(12).chunk(dist.get_rank(), dist.get_world_size())
            for model in models:
                model.set_requires_gradient_sync(sync == "all" or (sync == "last" and micro == 2))
                loss_of(model(*batch.args, **batch.kwargs)).backward()
        for model in models:
            model.set_requires_gradient_sync(True)
            handle = model.finalize_backward(async_op=async_op)
            if async_op:
                handle.wait()
        assert_same_shards(*models)
        for model in models:
            model.zero_grad()


# When it is refused.


def built(manual: bool = False, **kwargs: Any) -> nn.Module:
    model = shard(seeded(CASES["stack"].build), CASES["stack"], **kwargs)
    model.set_manual_backward_finalization(manual)
    return model


def run(model: nn.Module) -> Tensor:
    return loss_of(model(*CASES["stack"].batch(4).args))


@ranks(2)
def test_before_the_first_forward_there_is_nothing_to_do() -> None:
    model = built()
    assert model.finalize_backward() is None
    handle = model.finalize_backward(async_op=True)
    handle.wait()
    run(model).backward()


@ranks(2)
def test_only_the_root_is_asked() -> None:
    model = built()
    unit = units_of(model)[1]
    unit.set_manual_backward_finalization(True)
    with pytest.raises(StateError, match="is not the root"):
        run(model)
    unit.set_manual_backward_finalization(False)
    run(model).backward()
    calls: list[Callable[[], Any]] = [
        unit.finalize_backward,
        lambda: unit.set_manual_backward_finalization(True),
    ]
    for call in calls:
        with pytest.raises(StateError, match="not the root"):
            call()


@ranks(2)
def test_the_mode_belongs_to_a_whole_step() -> None:
    model = built()
    run(model).backward()
    with pytest.raises(StateError, match="is finalized automatically"):
        model.finalize_backward()
    model.set_manual_backward_finalization(True)
    run(model).backward()
    model.set_manual_backward_finalization(True)  # what it is already
    with pytest.raises(StateError, match="began in the other mode"):
        model.set_manual_backward_finalization(False)
    model.finalize_backward()
    model.set_manual_backward_finalization(False)
    run(model).backward()


@ranks(2)
def test_not_during_a_backward() -> None:
    model = built(manual=True)
    refused: list[str] = []

    def call(grad: Tensor) -> None:
        for method in (
            model.finalize_backward,
            lambda: model.set_manual_backward_finalization(False),
        ):
            with pytest.raises(StateError, match="during a backward") as caught:
                method()
            refused.append(str(caught.value))

    loss = run(model)
    loss.register_hook(call)
    loss.backward()
    model.finalize_backward()
    assert len(refused) == 2
    assert all(p.grad is not None for p in model.parameters())


@ranks(2)
def test_nothing_starts_before_somebody_has_waited() -> None:
    model, other = built(manual=True), built(manual=True)
    fsdp2.share_comm_ctx([model, other])
    for each in (model, other):
        run(each).backward()
    handle = model.finalize_backward(async_op=True)
    waiting, beside = "found a reduction that has not been waited for", "model with shared streams"
    calls: list[tuple[Callable[[], Any], str]] = [
        (model.finalize_backward, waiting),
        (lambda: run(model), waiting),
        (other.finalize_backward, beside),
        (lambda: run(other), beside),
        (other.reset_iter_state, beside),
    ]
    for call, said in calls:
        with pytest.raises(StateError, match=said):
            call()
    handle.wait()
    assert all(p.grad is not None for p in model.parameters())
    other.finalize_backward()
    for each in (model, other):
        run(each).backward()
        each.finalize_backward()


@ranks(2)
def test_a_reset_ends_the_wait_and_drops_every_gradient() -> None:
    pair = pair_of("stack")
    pair.backward()
    pair.model.finalize_backward()
    pair.model.set_requires_gradient_sync(False)
    run(pair.model).backward()
    pair.model.set_requires_gradient_sync(True)
    handle = pair.model.finalize_backward(async_op=True)
    pair.model.reset_iter_state()
    with pytest.raises(StateError, match="reset_iter_state"):
        handle.wait()
    assert all(p.grad is None for p in pair.model.parameters())
    pair.reference.zero_grad()
    pair.backward()
    pair.model.finalize_backward()
    pair.finish()


@ranks(4)
def test_partial_sums_over_replicas_are_refused() -> None:
    model = built(manual=True, mesh=make_mesh(2, 2))
    model.set_requires_all_reduce(False)
    run(model).backward()
    with pytest.raises(StateError, match="set_requires_all_reduce"):
        model.finalize_backward()
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    run(model).backward()
    model.finalize_backward()
    assert all(p.grad is not None for p in model.parameters())


@ranks(2)
def test_a_backward_that_fails_leaves_nothing_to_finalize() -> None:
    pair = pair_of("stack")
    unit = list(pair.model.modules())[1]
    handle = unit.register_full_backward_hook(mock.Mock(side_effect=ValueError("by intent")))
    loss = run(pair.model)
    with pytest.raises(ValueError, match="by intent"):
        loss.backward()
    handle.remove()
    pair.model.reset_iter_state()
    pair.backward()
    pair.model.finalize_backward()
    pair.finish()


# Memory that stays.


def addresses(model: nn.Module) -> list[int]:
    """Return where whole parameters lie, which they do after this."""
    found = []
    for unit in units_of(model):
        unit.unshard()
        found += [p.data_ptr() for p in unit.parameters() if not isinstance(p, DTensor)]
        unit.reshard()
    return found


def whole_nbytes(model: nn.Module) -> int:
    state = unit_of(model)
    return sum(
        group.buffers.full._storage.nbytes()
        for unit in state.runtime.units
        for group in unit.own_groups
        if group.buffers.full is not None
    )


@pytest.mark.parametrize("reshard_after_forward", with_slow([None, True, False], [True]))
@ranks(2)
def test_storage_that_stays(reshard_after_forward: bool | None) -> None:
    """Parameters keep their addresses over steps, shards are registered, and values are new."""
    pair = Pair("stack", reshard_after_forward=reshard_after_forward)
    pair.model.set_keep_unsharded_storage(True)
    pair.train(steps=1)
    before = addresses(pair.model)
    assert len(set(before)) == len(before)
    kept = whole_nbytes(pair.model)
    assert kept > 0
    pair.train(steps=2)
    assert addresses(pair.model) == before
    assert all(isinstance(p, DTensor) for p in pair.model.parameters())
    assert whole_nbytes(pair.model) == kept
    pair.model.set_keep_unsharded_storage(False)
    assert whole_nbytes(pair.model) == 0
    pair.train(steps=1)
    assert whole_nbytes(pair.model) == 0


@ranks(2)
def test_storage_of_one_unit_stays() -> None:
    model = built()
    unit = units_of(model)[1]
    unit.set_keep_unsharded_storage(True, recurse=False)
    run(model).backward()
    own = unit_of(unit).own_groups
    assert whole_nbytes(model) == sum(group.buffers.full._storage.nbytes() for group in own) > 0


@NEEDS_TORCHS_OWN
@ranks(2)
def test_torchs_own_keeps_the_same_promise() -> None:
    """What is tested above is what torch's method of that name does."""
    model = torch_fsdp.fully_shard(seeded(CASES["stack"].build))
    model.set_keep_unsharded_storage(True)
    found = []
    for _ in range(2):
        run(model).backward()
        model.unshard()
        found.append([p.data_ptr() for p in model.parameters()])
        model.reshard()
    assert found[0] == found[1]

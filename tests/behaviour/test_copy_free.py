"""Promise: large parameters travel without copies, every byte once; values are what they were."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from fsdp2._core.comm import gloo_p2p
from tests.behaviour import test_divergence as divergence
from tests.kit.collectives import Gather
from tests.kit.local_sgd import LocalSGD
from tests.kit.meshes import BACKEND
from tests.kit.models import CASES, Batch, Case, loss_of, no_units, seeded
from tests.kit.parity import Pair, assert_same, assert_same_gradients, make_mesh, names_of, whole
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@contextmanager
def large_from(nbytes: int, max_ranks: int = gloo_p2p.MAX_RANKS) -> Iterator[None]:
    """Send buffers of at least so many bytes directly, or in an all-to-all between more ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gloo_p2p, "LARGE_NBYTES", nbytes)
        patch.setattr(gloo_p2p, "MAX_RANKS", max_ranks)
        yield


def zero_copy(pair: Pair, nbytes: int | None = 1) -> Pair:
    pair.model.set_copy_free_min_bytes(nbytes)
    return pair


class Copies(TorchDispatchMode):
    """Counts elements that copying operations write."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.collectives: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.startswith("c10d::"):
            self.collectives.append(name)
        if name == "aten::_foreach_copy_":
            self.elements += sum(target.numel() for target in args[0])
        if name in ("aten::copy_", "aten::_chunk_cat", "aten::cat", "aten::clone"):
            written = args[0] if name == "aten::copy_" else result
            self.elements += written.numel()
        if name == "aten::split_with_sizes_copy":
            self.elements += sum(target.numel() for target in kwargs["out"])
        return result


class Wide(nn.Module):
    """A matrix of 256 KiB, and parameters of all the kinds that are packed."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8192, bias=False)
        self.down = nn.Linear(8192, 8)
        self.odd = nn.Parameter(torch.randn(13, 8))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(self.up(x).relu()) * self.scale
        return torch.cat([y, x @ self.odd.T], 1)


# --- values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", with_slow(CASES, ["mixed_dtypes"]))
@ranks(slow(2), 3, slow(4))
def test_trains_with_every_parameter_by_itself(name: str) -> None:
    """Rows that divide evenly and rows that do not, through the backend's collectives and ours."""
    zero_copy(Pair(name)).train(steps=2)
    with large_from(1):
        zero_copy(Pair(name)).train(steps=2)


@pytest.mark.parametrize("resharding", [slow(True), slow(False), 2])
@ranks(4)
def test_trains_on_more_ranks(resharding: bool | int) -> None:
    with large_from(1):
        zero_copy(Pair("stack", reshard_after_forward=resharding)).train(steps=2)
        zero_copy(Pair("nested_units", mesh=make_mesh(2, 2))).train(steps=2)


@ranks(4)
def test_many_ranks_exchange_in_one_operation() -> None:
    """What more ranks than send one by one do: an all-to-all."""
    with large_from(1, max_ranks=1):
        zero_copy(Pair("stack")).train(steps=2)
        Pair("few_rows").train(steps=2)


@ranks(2, 3)
def test_a_large_model_trains_by_default() -> None:
    pair = Pair(Case(Wide, no_units, lambda rows: Batch((torch.randn(rows, 8),), {})))
    pair.first_rtol = pair.later_rtol = 1e-5
    pair.train()


@ranks(2, 3)
def test_mixed_precision_and_accumulation() -> None:
    """Straight gathers in the compute dtype; casts and sums without sync are packed."""
    results = []
    for nbytes in (None, 1):
        with large_from(1 if nbytes else 1 << 40):
            model = fsdp2.fully_shard(seeded(Wide), mp_policy=BF16)
            model.set_copy_free_min_bytes(nbytes)
            torch.manual_seed(dist.get_rank())
            results.append([])
            for _ in range(2):  # the second time after a step: what is sent is cast anew
                for micro in range(3):
                    model.set_requires_gradient_sync(micro == 2)
                    loss_of(model(torch.randn(2, 8))).backward()
                results[-1] += [whole(parameter.grad) for parameter in model.parameters()]
                LocalSGD(model.parameters(), lr=0.5).step()
    for packed, alone in zip(*results, strict=True):
        assert_same(alone, packed, "gradient", rtol=1e-6)


@ranks(4)
def test_partly_reduced_gradients_survive_a_change_of_the_wire() -> None:
    """Sums over shards that wait for the replicas are put where the new plan expects them."""
    pair = zero_copy(Pair("stack", mesh=make_mesh(2, 2)))
    for micro in range(3):
        pair.model.set_requires_all_reduce(micro == 2)
        if micro == 1:
            pair.model.set_copy_free_min_bytes(None)
        pair.backward()
    assert_same_gradients(pair.model, pair.reference, pair.rtol)


@ranks(2, 3, 4)
def test_large_replicas_stay_equal_to_the_bit() -> None:
    model = seeded(Wide)
    fsdp2.fully_shard(model, shard_placement_fn=lambda _: torch.distributed.tensor.Replicate())
    torch.manual_seed(dist.get_rank())
    loss_of(model(torch.randn(2, 8))).backward()
    for name, parameter in names_of(model).items():
        mine = parameter.grad.to_local().clone()
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        assert all(torch.equal(mine, other) for other in everyone), name


# --- what travels ---------------------------------------------------------------------------------


@ranks(2)
def test_a_step_copies_next_to_nothing() -> None:
    """Only the small parameters are copied: less than a tenth of what there is."""
    model = fsdp2.fully_shard(seeded(Wide))
    numel = sum(parameter.numel() for parameter in model.parameters())
    found = {}
    for nbytes in (None, 1 << 16):
        model.set_copy_free_min_bytes(nbytes)
        for _ in range(2):
            with Copies() as copies:
                loss_of(model(torch.randn(2, 8))).backward()
            model.zero_grad()
        found[nbytes] = copies.elements / numel
    assert found[None] > 1.9
    assert found[1 << 16] < 0.1


@pytest.mark.skipif(BACKEND != "gloo", reason="counts what gloo does on the host")
@ranks(2)
def test_the_small_ones_still_share_a_collective() -> None:
    model = fsdp2.fully_shard(seeded(Wide))
    for _ in range(2):
        with Copies() as copies:
            loss_of(model(torch.randn(2, 8))).backward()
    packed = [name for name in copies.collectives if "send" not in name and "recv" not in name]
    assert len(packed) == 2
    assert len(copies.collectives) == 2 + 2 * 2 * 2  # two matrices, there and back, one other rank


@ranks(2)
def test_collectives_of_the_users_own_get_everything_in_one() -> None:
    pair, gather = zero_copy(Pair("stack")), Gather()
    pair.train(steps=1)
    pair.model.set_custom_all_gather(gather)
    pair.train(steps=1)
    assert len(gather.given) == 1  # the root's, kept between forward and backward


@ranks(4)
def test_collectives_of_the_users_own_get_everything_of_a_smaller_mesh_in_one() -> None:
    model = fsdp2.fully_shard(nn.Linear(64, 64, bias=False), reshard_after_forward=2)
    model.set_copy_free_min_bytes(1)
    gather = Gather()
    for _ in range(2):
        loss_of(model(torch.randn(2, 64))).backward()
        model.set_custom_all_gather(gather)
    loss_of(model(torch.randn(2, 64))).backward()
    assert len(gather.given) == 2 * 2  # in two steps, before forward and before backward


# --- a narrower wire ------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [None, 1])
@ranks(2, 3)
def test_gradients_travel_narrower_than_they_are_summed(nbytes: int | None) -> None:
    """The sum of what bf16 can hold of each rank's gradient, in fp32: one rounding a rank."""
    model = fsdp2.fully_shard(seeded(Wide))
    model.set_copy_free_min_bytes(nbytes)
    model.set_gradient_wire_dtype(torch.bfloat16)
    plain = seeded(Wide)
    torch.manual_seed(dist.get_rank())
    x = torch.randn(2, 8)
    loss_of(model(x)).backward()
    loss_of(plain(x)).backward()
    for (name, parameter), reference in zip(
        names_of(model).items(), plain.parameters(), strict=True
    ):
        expected = reference.grad.bfloat16().float()
        dist.all_reduce(expected)
        expected /= dist.get_world_size()
        assert parameter.grad.dtype == torch.float32
        assert_same(parameter.grad, expected, name, rtol=1e-6)


@ranks(2)
def test_a_narrow_wire_and_accumulation() -> None:
    """What accumulates without sync stays in the reduce dtype, and is rounded once."""
    model = fsdp2.fully_shard(seeded(Wide), mp_policy=BF16)
    model.set_gradient_wire_dtype(torch.bfloat16)
    other = fsdp2.fully_shard(seeded(Wide), mp_policy=BF16)
    torch.manual_seed(dist.get_rank())
    for micro in range(3):
        x = torch.randn(2, 8)
        for each in (model, other):
            each.set_requires_gradient_sync(micro == 2)
            loss_of(each(x)).backward()
    for parameter, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert_same(parameter.grad, expected.grad, "gradient", rtol=2**-7)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert not all(torch.equal(whole(a.grad), whole(b.grad)) for a, b in pairs), "nothing rounded"


@ranks(2)
def test_a_narrow_wire_and_a_reduction_of_the_users_own_are_refused() -> None:
    model = fsdp2.fully_shard(seeded(Wide))
    model.set_gradient_wire_dtype(torch.bfloat16)
    with pytest.raises(fsdp2.ConfigError, match="set_gradient_wire_dtype"):
        model.set_custom_reduce_scatter(fsdp2._core.comm.wire.DefaultAllGather())
    model.set_gradient_wire_dtype(None)
    model.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(fsdp2.ConfigError, match="either this reduce-scatter or a wire dtype"):
        model.set_gradient_wire_dtype(torch.bfloat16)


# --- ranks that differ ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "steps"),
    with_slow(
        itertools.product(["swap", "skip", "skip_last"], [0, 3]), [("swap", 3), ("skip_last", 3)]
    ),
)
@ranks(2, slow(3), limit_s=30)
def test_ranks_that_run_different_units_are_told(way: str, steps: int, rank: int) -> None:
    """Whoever stands in for another operation issues all of its collectives."""
    with large_from(1):
        model = divergence.sharded(alike=False)
        model.set_copy_free_min_bytes(1)
        divergence.train(model, steps)
        divergence.assert_out_of_step(model, divergence.WAYS[way] if rank == 1 else "abc")

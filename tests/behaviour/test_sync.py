"""Promise: `sync_from_rank0` makes every rank's model rank 0's, bit for bit, before sharding."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import fsdp2
from tests.behaviour.test_full_params import Odd
from tests.kit.in_turn import assert_tensors
from tests.kit.meshes import DEVICE
from tests.kit.parity import bits, make_mesh
from tests.kit.pool import ranks


def build(rank: int) -> nn.Module:
    """Values of this rank: every dtype, a transposed one, a tie, none, buffers."""
    torch.manual_seed(rank)
    model = nn.Sequential(Odd(), nn.BatchNorm1d(13))
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.copy_(torch.randn(tensor.shape).mul(9).to(tensor.dtype))
    return model


@ranks(1, 2, 3)
def test_values_are_those_of_rank_0(rank: int) -> None:
    model, expected = build(rank), build(0)
    before = list(model.parameters())
    assert fsdp2.sync_from_rank0(model) is model
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    for (name, own), other in zip(
        model.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        assert own.stride() == other.stride()
        assert torch.equal(bits(own), bits(other)), name


@ranks(2, 3)
def test_then_sharded_it_is_rank_0s_model(rank: int) -> None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(13, 29), nn.Linear(29, 1))
    fsdp2.fully_shard(fsdp2.sync_from_rank0(model))
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(13, 29), nn.Linear(29, 1)).state_dict()
    assert_tensors(fsdp2.full_params(model, max_bytes=10**6), expected)


@ranks(2)
def test_what_cannot_be_made_right_is_refused(rank: int) -> None:
    """Sharded from each rank's values, no rank has the rest of the rows."""
    model = fsdp2.fully_shard(nn.Sequential(nn.Linear(13, 29)))
    shards = [p.to_local().clone() for p in model.parameters()]
    message = r"0\.weight was already sharded.*before fully_shard"
    with pytest.raises(fsdp2.ConfigError, match=message):
        fsdp2.sync_from_rank0(model)
    with pytest.raises(fsdp2.ConfigError, match=message):
        fsdp2.materialize(model, DEVICE, sync_from_rank0=True)
    for parameter, shard in zip(model.parameters(), shards, strict=True):
        assert torch.equal(parameter.to_local(), shard)
    with pytest.raises(fsdp2.ConfigError, match=r"ranks have different models.*bias"):
        fsdp2.sync_from_rank0(nn.Linear(3, 3, bias=rank == 0))
    meta = nn.Linear(3, 3, device="meta" if rank else "cpu")
    with pytest.raises(fsdp2.ConfigError, match="weight on the meta device"):
        fsdp2.sync_from_rank0(meta)
    dist.barrier()


@ranks(2)
def test_replicas_that_are_sharded_over_one_rank_are_made_equal(rank: int) -> None:
    torch.manual_seed(rank)
    model = fsdp2.fully_shard(nn.Sequential(nn.Linear(13, 29)), mesh=make_mesh(2, 1))
    fsdp2.materialize(model, DEVICE, sync_from_rank0=True)
    torch.manual_seed(0)
    expected = nn.Linear(13, 29)
    assert torch.equal(model[0].weight.to_local(), expected.weight)

"""Promise: process groups that we make are right whatever other groups a program has made, and
wait as long as the default one.
"""

from __future__ import annotations

import copy
import warnings
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2._core.base.torch_comm import group_of, timeout_of
from fsdp2._core.comm.mesh import default_mesh
from fsdp2._core.engine.tree import unit_of
from tests.kit.meshes import DEVICE
from tests.kit.models import CASES
from tests.kit.parity import Pair
from tests.kit.pool import ranks

CASE = CASES["stack"]


def asked() -> timedelta:
    """Return the time-out of the default group, which the pool gives it."""
    found = timeout_of(dist.group.WORLD)
    assert found < timedelta(minutes=30)  # that of torch
    return found


def groups_of(model: nn.Module) -> list[dist.ProcessGroup]:
    """Return the process groups over which a model reduces, and gathers for backward."""
    units = [unit_of(m) for m in model.modules() if isinstance(m, fsdp2.FSDPModule)]
    found: list[Any] = []
    for group in (group for unit in units for group in unit.own_groups):
        found.append(group.wire.scatter_group)
        if group.buffers.post_forward.mesh is not None:
            found.append(group.buffers.post_forward.mesh.shard.pg)
    return [group for group in found if group is not None]


@pytest.mark.parametrize("uneven", [[[0, 1]], [[0], [1, 3], [0, 1, 2]]], ids=["one", "three"])
@ranks(4)
def test_ranks_may_be_in_different_numbers_of_groups(uneven: list[list[int]]) -> None:
    """Before `fully_shard` and after it: a smaller mesh, and a group for reductions."""
    for members in uneven:
        dist.new_group(members)
    pair = Pair(CASE, reshard_after_forward=2)
    dist.new_group([2])
    pair.model.set_separate_reduce_scatter_group()
    pair.train(steps=2)
    assert len(groups_of(pair.model)) >= 8
    assert {timeout_of(group) for group in groups_of(pair.model)} == {asked()}


@ranks(4)
def test_copies_make_their_groups_too() -> None:
    """A copy meets the smaller mesh and the separate group of its original again."""
    model: Any = fsdp2.fully_shard(nn.Linear(4, 4), reshard_after_forward=2)
    model.set_separate_reduce_scatter_group()
    dist.new_group([0, 1])
    twin = copy.deepcopy(model)
    for one in (model, twin):
        one(torch.ones(2, 4)).sum().backward()
    assert torch.equal(model.weight.grad.full_tensor(), twin.weight.grad.full_tensor())


@ranks(4)
def test_slices_make_groups_on_their_own(rank: int) -> None:
    """Ranks of one slice of a mesh make a group that those of the other never make."""
    dist.new_group([0, 2])
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("stage", "data"))["data"]
    if rank >= 2:
        model: Any = fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh)
        model.set_separate_reduce_scatter_group()
        model(torch.ones(2, 4)).sum().backward()
    again: Any = fsdp2.fully_shard(nn.Linear(4, 4))
    again.set_separate_reduce_scatter_group()
    again(torch.ones(2, 4)).sum().backward()
    assert torch.equal(again.bias.grad.full_tensor(), torch.full((4,), 2.0))


@ranks(4)
def test_groups_of_the_same_ranks_are_different_ones() -> None:
    """Two groups of the same ranks do not meet each other's messages."""
    first, second = (group_of([0, 1, 2, 3], "a test") for _ in range(2))
    assert first is not second
    for group, value in ((second, 1.0), (first, 2.0)):
        tensor = torch.full((1,), value, device=DEVICE)
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == 4 * value


@ranks(4)
def test_a_world_that_is_bound_to_a_device_is_not_split(rank: int) -> None:
    """torch would split the world's communicator, in which all of its ranks must join.

    So a group of ours is made without: here by two of four ranks alone. The world stays bound.
    """
    world, device = dist.group.WORLD, torch.device("cuda", 0)
    world.bound_device_id = device
    try:
        if rank < 2:
            group = group_of([0, 1], "a test")
            assert group.bound_device_id is None
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == 2
        with pytest.raises(ValueError, match="duplicate"):
            group_of([rank, rank], "a test")
        assert world.bound_device_id == device
    finally:
        world.bound_device_id = None


# --- time-outs ------------------------------------------------------------------------------------


@ranks(4)
def test_groups_of_ours_wait_as_the_default_one() -> None:
    """Joined dims, and the meshes that helpers make; torch gives its own default to a mesh."""
    full = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("a", "b"))
    assert timeout_of(full.get_group("a")) == timedelta(minutes=30)
    model = nn.Linear(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fsdp2.fully_shard(model, mesh=full, dp_mesh_dims=fsdp2.DataParallelMeshDims(("a", "b")))
    (group,) = unit_of(model).own_groups
    assert timeout_of(group.data.shard.pg) == asked()
    for mesh in (
        fsdp2.wrap.hybrid_mesh(DEVICE, ranks_per_node=2),
        fsdp2.wrap.strategy("NO_SHARD", device_type=DEVICE)["mesh"],
        default_mesh(),
    ):
        assert {timeout_of(mesh.get_group(dim)) for dim in range(mesh.ndim)} == {asked()}


@ranks(4)
def test_a_mesh_that_waits_longer_is_told_of_once() -> None:
    """With its dim, both time-outs, and the call that mends it."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh)
    (text,) = (str(one.message) for one in seen if "FS231" in str(one.message))
    assert "'shard' has a timeout of 1800 s" in text
    assert f"that of the default group is {asked().total_seconds():g} s" in text


@ranks(4)
def test_a_mesh_that_was_told_is_not_told_of() -> None:
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    for name in ("replicate", "shard"):
        mesh.get_group(name).set_timeout(asked())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fsdp2.fully_shard(nn.Linear(4, 4), mesh=mesh)

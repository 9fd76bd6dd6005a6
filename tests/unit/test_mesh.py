from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2._core.base.errors import ConfigError
from fsdp2._core.base.policy import DataParallelMeshDims
from fsdp2._core.comm.mesh import ABSENT_AXIS, DataMesh, check_mesh, default_mesh
from tests.unit._loopback import fake_process_group

WORLD, RANK = 6, 4


@pytest.fixture(autouse=True, scope="module")
def _meshes() -> Iterator[None]:
    with fake_process_group(WORLD, RANK):
        yield


def test_one_dim_shards() -> None:
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    data = DataMesh.of(mesh)
    assert (data.shard.name, data.shard.size, data.shard.rank) == ("dp", WORLD, RANK)
    assert data.shard.pg is mesh.get_group()
    assert data.replicate == ABSENT_AXIS
    assert data.replicate.size == 1
    assert data.size == WORLD


def test_two_dims_replicate_and_shard() -> None:
    mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("outer", "inner"))
    data = DataMesh.of(mesh)
    assert (data.replicate.name, data.replicate.size, data.replicate.rank) == ("outer", 2, 1)
    assert (data.shard.name, data.shard.size, data.shard.rank) == ("inner", 3, 1)
    assert data.shard.pg is mesh.get_group("inner")
    assert data.replicate.pg is mesh.get_group("outer")
    assert data.size == WORLD
    assert data.device == torch.device("cpu")


def test_an_axis_without_a_name_has_one_to_show() -> None:
    assert DataMesh.of(DeviceMesh("cpu", list(range(WORLD)))).shard.name == "axis 0"


def test_split_joins_neighbours_and_is_made_once() -> None:
    data = DataMesh.of(init_device_mesh("cpu", (WORLD,)))
    smaller = data.split(2)
    assert smaller.mesh.mesh.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert (smaller.shard.size, smaller.shard.rank) == (2, 0)
    assert (smaller.replicate.size, smaller.replicate.rank) == (3, 2)
    assert data.split(2) is smaller
    assert DataMesh.of(data.mesh).split(2) is smaller, "every group of the mesh must share it"
    assert data.split(3) is not smaller


def test_split_of_two_dims_stays_within_a_replica() -> None:
    data = DataMesh.of(init_device_mesh("cpu", (1, 6), mesh_dim_names=("r", "s")))
    assert data.split(3).mesh.mesh.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_split_stays_within_this_ranks_slice() -> None:
    root = init_device_mesh("cpu", (3, 2), mesh_dim_names=("data", "tensor"))
    for data in (
        DataMesh.of(root["data"]),
        DataMesh.named(root, DataParallelMeshDims(shard="data")),
    ):
        assert data.split(3).mesh.mesh.tolist() == [[0, 2, 4]]


@pytest.mark.parametrize(
    ("dims", "names", "roles", "sizes"),
    [
        (DataParallelMeshDims("b"), "abc", ("own", "shard", "own"), (3, 1)),
        (DataParallelMeshDims("c", "a"), "abc", ("replicate", "own", "shard"), (1, 2)),
        (DataParallelMeshDims(None, "b"), "abc", ("own", "replicate", "own"), (1, 3)),
        (DataParallelMeshDims(("b", "a"), "c"), ("a_b", "c"), ("shard", "replicate"), (6, 1)),
        (DataParallelMeshDims(("b", "c")), ("a", "b_c"), ("own", "shard"), (3, 1)),
        (
            DataParallelMeshDims("b", ("a", "c")),
            "abc",
            ("replicate", "shard", "replicate"),
            (3, 2),
        ),
        (DataParallelMeshDims(("a", "b", "c")), ("a_b_c",), ("shard",), (6, 1)),
    ],
)
def test_named_dims_have_roles(
    dims: DataParallelMeshDims, names: Any, roles: tuple[str, ...], sizes: tuple[int, int]
) -> None:
    full = init_device_mesh("cpu", (2, 3, 1), mesh_dim_names=("a", "b", "c"))
    data = DataMesh.named(full, dims)
    assert data.mesh.mesh_dim_names == tuple(names)
    assert data.roles == roles
    assert (data.shard.size, data.replicate.size) == sizes
    assert data.size == sizes[0] * sizes[1]
    assert data == DataMesh.named(full, dims), "units of one mesh must compare equal"
    assert copy.deepcopy(data) is data
    assert pickle.loads(pickle.dumps(data)).roles == roles


def test_copies_share_the_mesh_and_pickles_find_it_again() -> None:
    data = DataMesh.of(init_device_mesh("cpu", (2, 3), mesh_dim_names=("outer", "inner")))
    assert copy.deepcopy(data) is data
    restored = pickle.loads(pickle.dumps(data))
    assert restored.mesh == data.mesh
    assert (restored.shard.size, restored.shard.rank) == (3, 1)
    assert restored.replicate.size == 2


def test_the_default_is_all_ranks() -> None:
    mesh = default_mesh()
    assert mesh.mesh.tolist() == list(range(WORLD))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: "cpu", "expected mesh to be a DeviceMesh or None, found 'cpu'"),
        (lambda: (2, 3), "found a tuple"),
        (
            lambda: init_device_mesh("cpu", (1, 2, 3), mesh_dim_names=("a", "b", "c")),
            "found 3 dims",
        ),
        (lambda: init_device_mesh("cpu", (2, 3)), "expected a 2-D mesh with dim names"),
    ],
    ids=["a string", "a tuple", "three dims", "no names"],
)
def test_other_meshes_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_mesh(make())


def test_good_meshes_are_returned() -> None:
    for mesh in (
        init_device_mesh("cpu", (WORLD,)),
        init_device_mesh("cpu", (3, 2), mesh_dim_names=("r", "s")),
    ):
        assert check_mesh(mesh) is mesh

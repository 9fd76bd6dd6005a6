"""From a parameter and a mesh to specs: plain and tensor-parallel ones by one rule."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from fsdp2._core.base.errors import ConfigError
from fsdp2._core.comm.mesh import ABSENT_AXIS, DataMesh, MeshAxis
from fsdp2._core.params.layout import contiguous_stride
from fsdp2._core.params.placement import place, shard_dim, shrink
from tests.unit._loopback import chunk_of, fake_process_group

WORLD = 8


@pytest.fixture(autouse=True, scope="module")
def _meshes() -> Iterator[None]:
    with fake_process_group(WORLD):
        yield


@pytest.fixture(scope="module")
def root(_meshes: None) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))


@pytest.fixture(scope="module")
def line(_meshes: None) -> DataMesh:
    return DataMesh.of(init_device_mesh("cpu", (WORLD,)))


# --- plain parameters -----------------------------------------------------------------------------


def test_a_plain_parameter(line: DataMesh) -> None:
    placement = place(torch.empty(13, 29), "weight", line, 0)
    assert placement.layout.shape == placement.global_shape == (13, 29)
    assert placement.layout.size == WORLD
    spec = placement.sharded_spec(torch.bfloat16)
    assert spec.mesh == line.mesh
    assert spec.placements == (Shard(0),)
    assert spec.tensor_meta is not None
    assert spec.tensor_meta.dtype is torch.bfloat16
    assert tuple(spec.tensor_meta.shape) == (13, 29)
    assert placement.unsharded_spec(torch.bfloat16) is None


def test_parameters_that_are_alike_share_their_placement_on_one_mesh(line: DataMesh) -> None:
    """Not on an equal mesh: that may be of process groups that were destroyed."""
    one = place(torch.empty(13, 29), "weight", line, 0)
    assert place(torch.empty(13, 29), "other", line, 0) is one
    assert one.sharded_spec(torch.float32) is one.sharded_spec(torch.float32)
    assert one.sharded_spec(torch.float32) is not one.sharded_spec(torch.bfloat16)
    for other in (torch.empty(29, 13), torch.empty(29, 13).T):
        assert place(other, "weight", line, 0) is not one
    assert place(torch.empty(13, 29), "weight", line, 1) is not one
    again = DataMesh.of(init_device_mesh("cpu", (WORLD,)))
    assert again.mesh == line.mesh
    there = place(torch.empty(13, 29), "weight", again, 0)
    assert there.mesh is there.sharded_spec(torch.float32).mesh is again.mesh


@pytest.mark.parametrize(("dim", "split"), [(0, Shard(0)), (1, Shard(1)), (None, Replicate())])
def test_a_second_axis_replicates(root: DeviceMesh, dim: int | None, split: Placement) -> None:
    data = DataMesh.of(root["replicate", "shard"])
    placement = place(torch.empty(6, 4), "weight", data, dim)
    assert placement.placements == (Replicate(), split)
    assert placement.layout.dim == dim
    assert placement.layout.size == 2


@pytest.mark.parametrize(
    ("tensor", "stride"),
    [
        (torch.empty(5, 7), (7, 1)),
        (torch.empty(5, 7).t(), (1, 7)),
        (torch.empty(2, 3, 4).permute(2, 0, 1), (1, 12, 4)),
        (torch.empty(4, 2, 3, 3).to(memory_format=torch.channels_last), (18, 1, 6, 2)),
        (torch.empty(5, 14)[:, ::2], (7, 1)),  # gaps are not kept
        (torch.empty(1, 7).expand(5, 7), (7, 1)),  # overlaps neither
        (torch.empty(7)[2:], (1,)),
        (torch.empty(()), ()),
        (torch.empty(3, 0, 2), (2, 2, 1)),
        (torch.empty(1, 9).as_strided((1, 9), (1, 1)), (9, 1)),
    ],
)
def test_dense_strides_are_kept(line: DataMesh, tensor: torch.Tensor, stride: Any) -> None:
    dim = 0 if tensor.dim() else None
    placement = place(tensor, "weight", line, dim)
    assert placement.layout.stride == stride
    assert placement.global_stride == stride


@given(st.lists(st.integers(0, 5), max_size=4), st.randoms(use_true_random=False))
def test_any_permuted_tensor_keeps_a_stride_of_the_same_memory(
    shape: list[int], random: Any
) -> None:
    dims = list(range(len(shape)))
    random.shuffle(dims)
    tensor = torch.empty(shape).permute(dims)
    axis = MeshAxis("shard", 2, 0, None)
    mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("a", "b"))["a"]
    data = DataMesh(mesh, axis, ABSENT_AXIS, ("shard",))
    layout = place(tensor, "weight", data, 0 if shape else None).layout
    assert layout.shape == tuple(tensor.shape)
    if tensor.numel():
        offsets = torch.arange(tensor.numel()).as_strided(layout.shape, layout.stride)
        expected = torch.arange(tensor.numel()).as_strided(tensor.shape, tensor.stride())
        assert torch.equal(offsets, expected)
    else:
        assert layout.stride == contiguous_stride(layout.shape)


def test_a_placement_is_shared_by_copies(line: DataMesh) -> None:
    placement = place(torch.empty(4), "weight", line, 0)
    assert copy.deepcopy(placement) is placement
    assert copy.deepcopy(line) is line
    restored = pickle.loads(pickle.dumps(placement))
    assert restored == placement


# --- tensor-parallel parameters -------------------------------------------------------------------


def tensor_parallel(root: DeviceMesh, shape: tuple[int, ...], split: Placement) -> DTensor:
    return distribute_tensor(torch.zeros(shape), root["tp"], [split])


@pytest.mark.parametrize("names", [("shard",), ("replicate", "shard")])
def test_tensor_parallel_axes_follow_the_data_axes(
    root: DeviceMesh, names: tuple[str, ...]
) -> None:
    param = tensor_parallel(root, (6, 4), Shard(1))
    placement = place(param, "weight", DataMesh.of(root[names]), 0)
    assert placement.mesh == root[(*names, "tp")]
    assert placement.placements == (*[Replicate()] * (len(names) - 1), Shard(0), Shard(1))
    assert placement.global_shape == (6, 4)
    assert placement.layout.shape == (6, 2)
    unsharded = placement.unsharded_spec(torch.float64)
    assert unsharded is not None
    assert unsharded.mesh == root["tp"]
    assert unsharded.placements == (Shard(1),)
    assert unsharded.tensor_meta is not None
    assert tuple(unsharded.tensor_meta.shape) == (6, 4)


@pytest.mark.parametrize("rows", [8, 7, 5, 1])
def test_both_on_one_dim_is_a_shard_of_a_shard(root: DeviceMesh, rows: int) -> None:
    """The data axis splits what the tensor-parallel axis split first, uneven or not."""
    param = tensor_parallel(root, (rows, 4), Shard(0))
    placement = place(param, "weight", DataMesh.of(root["shard"]), 0)
    split, own = placement.placements
    assert type(split).__name__ == "_StridedShard"
    assert split.split_factor == 2
    assert own == Shard(0)
    local = chunk_of(torch.arange(rows), 0, 0, 2)
    assert placement.layout.shape == (len(local), 4)
    assert placement.global_shape == (rows, 4)
    assert placement.layout.rows(0) == len(chunk_of(local, 0, 0, 2))


@pytest.mark.parametrize("split", [Replicate(), Shard(1), Partial()])
def test_what_does_not_split_the_dim_needs_no_strided_shard(
    root: DeviceMesh, split: Placement
) -> None:
    local = torch.zeros(6, 4)
    param = DTensor.from_local(local, root["tp"], [split])
    placement = place(param, "weight", DataMesh.of(root["shard"]), 0)
    assert placement.placements == (Shard(0), split)


def test_two_tensor_parallel_axes_on_the_dim_multiply(root: DeviceMesh) -> None:
    deep = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("data", "sequence", "tensor"))
    param = distribute_tensor(torch.zeros(16, 2), deep["sequence", "tensor"], [Shard(0), Shard(0)])
    placement = place(param, "weight", DataMesh.of(deep["data"]), 0)
    assert placement.placements[0].split_factor == 4
    assert placement.layout.shape == (4, 2)


@pytest.mark.parametrize("names", [("dp", "x"), ("x", "dp")])
def test_meshes_that_overlap_are_refused_and_named(
    root: DeviceMesh, names: tuple[str, str]
) -> None:
    """Axes that share ranks with the parameter's own, whatever their names."""
    param = tensor_parallel(root, (6, 4), Shard(0))
    shape = (1, WORLD) if names[1] == "dp" else (WORLD, 1)
    stranger = DataMesh.of(init_device_mesh("cpu", shape, mesh_dim_names=names)["dp"])
    with pytest.raises(ConfigError, match=r"block\.weight: .*Slice both from one"):
        place(param, "block.weight", stranger, 0)


def test_a_tensor_parallel_mesh_of_all_ranks_is_refused(root: DeviceMesh) -> None:
    everyone = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    param = distribute_tensor(torch.zeros(8, 2), everyone, [Shard(0)])
    with pytest.raises(ConfigError, match="Slice both from one init_device_mesh"):
        place(param, "weight", DataMesh.of(root["shard"]), 0)


def test_a_mesh_without_names_is_refused(line: DataMesh) -> None:
    param = distribute_tensor(torch.zeros(8, 2), line.mesh, [Shard(0)])
    with pytest.raises(ConfigError, match=r"weight: .*mesh_dim_names="):
        place(param, "weight", line, 0)


def test_an_equal_mesh_of_another_root_is_as_good(root: DeviceMesh) -> None:
    """DTensor's caches return equal meshes of earlier roots; the axes are what counts."""
    other = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    param = tensor_parallel(other, (6, 4), Shard(0))
    placement = place(param, "weight", DataMesh.of(root["shard"]), 0)
    assert placement.mesh == root["shard", "tp"]


@pytest.mark.parametrize("order", list(itertools.permutations(("data", "expert", "tensor"))))
def test_data_axes_come_first_wherever_they_lie(root: DeviceMesh, order: tuple[str, ...]) -> None:
    """The order of axes in the mesh that the user made does not matter, nor which are inside."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=order)
    inner = tuple(name for name in order if name != "data")
    param = distribute_tensor(torch.zeros(16, 2), mesh[inner], [Shard(0), Shard(1)])
    placement = place(param, "weight", DataMesh.of(mesh["data"]), 0)
    assert placement.mesh.mesh_dim_names == ("data", *inner)
    assert placement.placements[1:] == (Shard(0), Shard(1))
    for name in order:
        assert placement.mesh[name] == mesh[name]


def test_flattened_axes_are_axes(root: DeviceMesh) -> None:
    """Data and context parallel ranks that share parameters are one axis to shard over."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    param = distribute_tensor(torch.zeros(16, 2), mesh["tp"], [Shard(0)])
    placement = place(param, "weight", DataMesh.of(flat), 0)
    assert placement.mesh.mesh_dim_names == ("dp_cp", "tp")
    assert tuple(placement.mesh.mesh.shape) == (4, 2)
    assert placement.layout.size == 4


# --- the smaller mesh -----------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, None])
def test_shrink_splits_over_the_neighbours(line: DataMesh, dim: int | None) -> None:
    placement = place(torch.empty(5, 7).t(), "weight", line, dim)
    smaller = line.split(2)
    shrunk = shrink(placement, smaller)
    assert shrunk.layout.size == 2
    assert shrunk.layout.dim == dim
    assert shrunk.layout.stride == placement.layout.stride
    assert shrunk.placements == (Replicate(), Replicate() if dim is None else Shard(dim))
    assert shrunk.mesh == smaller.mesh


# --- what shard_placement_fn returns --------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "shape", "dim"),
    [
        (None, (3, 4), 0),
        (None, (), None),
        (Shard(1), (3, 4), 1),
        (Shard(-1), (3, 4), 1),
        (Shard(-2), (3, 4), 0),
        (Replicate(), (3, 4), None),
        (Replicate(), (), None),
    ],
)
def test_shard_dim(choice: Any, shape: tuple[int, ...], dim: int | None) -> None:
    assert shard_dim(choice, torch.empty(shape), "weight") == dim


@pytest.mark.parametrize(
    ("choice", "shape", "message"),
    [
        (Shard(2), (3, 4), r"block\.weight: .*Shard\(2\) for a parameter of 2 dims.*\(3, 4\)"),
        (Shard(-3), (3, 4), r"Shard\(-3\)"),
        (Shard(0), (), r"parameter of 0 dims.*Replicate\(\)"),
        (0, (3, 4), r"block\.weight: shard_placement_fn returned 0\. Return None, Shard"),
        (Partial(), (3, 4), "Partial"),
        ("Shard(0)", (3, 4), "returned 'Shard"),
    ],
)
def test_shard_dim_refuses(choice: Any, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shard_dim(choice, torch.empty(shape), "block.weight")

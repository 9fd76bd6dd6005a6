"""Promise: parameters annotated with `spmd_types` are stored as the DTensors that this says."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from fsdp2 import DataParallelMeshDims
from tests.behaviour.test_mesh_dims import Setup, my_rows
from tests.kit.in_turn import advance, shard_each
from tests.kit.meshes import random_numbers, shared_mesh
from tests.kit.pool import ranks
from tests.kit.slow import with_slow

spmd: Any = pytest.importorskip("spmd_types", reason="the package spmd-types is not installed")

WIDTH, MIDDLE = 5, 6
OF_TORCH = hasattr(FSDPParam, "_restore_spmd_types")  # this torch reads annotations too


class Block(nn.Module):
    """Two matrices split over `tensor`, a gain used there by halves, a shift used by all alike."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(WIDTH))
        self.up = nn.Parameter(torch.randn(MIDDLE, WIDTH))
        self.bias = nn.Parameter(torch.randn(MIDDLE))
        self.down = nn.Parameter(torch.randn(WIDTH, MIDDLE))
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.axis: Any = None  # of a mesh; None: of one process
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        for name, param in self.named_parameters():
            self.seen[name] = (type(param.data), tuple(param.shape), types_of(param))
        inner = x if self.axis is None else spmd.convert(x, self.axis, src=spmd.I, dst=spmd.R)
        made = F.relu(F.linear(inner * self.gain, self.up, self.bias))
        made = F.linear(made, self.down)
        if self.axis is not None:
            if dist.get_world_size(self.axis) > 1:
                made = spmd.reinterpret(made, self.axis, src=spmd.V, dst=spmd.P)
            made = spmd.all_reduce(made, self.axis, src=spmd.P, dst=spmd.I)
        return x + made + self.shift


TYPES = {
    "gain": spmd.R,
    "up": spmd.S(0),
    "bias": spmd.S(0),
    "down": spmd.S(1),
    "shift": spmd.I,
}


def types_of(tensor: Tensor) -> tuple[Any, Any]:
    return dict(spmd.get_local_type(tensor)), spmd.get_partition_spec(tensor)


SETUPS = {
    "data": Setup((4,), ("data",), DataParallelMeshDims(shard="data")),
    "data_tensor": Setup((2, 2), ("data", "tensor"), DataParallelMeshDims(shard="data")),
    "tensor_data": Setup((2, 2), ("tensor", "data"), DataParallelMeshDims(shard="data")),
    "replicate": Setup((2, 2), ("data", "tensor"), DataParallelMeshDims(replicate="data")),
    "two_data": Setup((2, 1, 2), ("a", "b", "tensor"), DataParallelMeshDims(shard=("a", "b"))),
    "both": Setup(
        (2, 2, 1), ("out", "in", "tensor"), DataParallelMeshDims(shard="in", replicate="out")
    ),
}


def build() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).double()


def annotate(model: Any, mesh: DeviceMesh, setup: Setup, types: Any = None) -> None:
    """Cut the parameters to this rank's part, and say so; data dims are left out."""
    if "tensor" not in setup.names:
        return
    group = mesh.get_group("tensor")
    rank, size = mesh.get_local_rank("tensor"), group.size()
    for block in model:
        block.axis = group
        for name, kind in (types or TYPES).items():
            whole = getattr(block, name).detach()
            own = whole.chunk(size, kind.dim)[rank] if isinstance(kind, spmd.S) else whole
            param = nn.Parameter(own.contiguous())
            spmd.assert_type(param, {group: kind})
            setattr(block, name, param)


def with_data_dims(model: Any, mesh: DeviceMesh, setup: Setup) -> None:
    """Say of every parameter that it is R on the data dims."""
    for param in model.parameters():
        spmd.assert_type(param, {mesh.get_group(name): spmd.R for name in setup.data_names})


def make(setup: Setup, library: Any = fsdp2, **kwargs: Any) -> tuple[Any, DeviceMesh]:
    model, mesh = build(), setup.mesh()
    annotate(model, mesh, setup)
    with_data_dims(model, mesh, setup)
    dims = library.DataParallelMeshDims(setup.dims.shard, setup.dims.replicate)
    shard_each(*model, model, library=library, mesh=mesh, dp_mesh_dims=dims, **kwargs)
    return model, mesh


def batch_of(step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=random_numbers(step), dtype=torch.float64)


def backward(model: Any, batch: Tensor, mesh: DeviceMesh, setup: Setup, checks: bool) -> None:
    """Run a backward on this rank's rows, inside of the checker of types or not."""
    rows = my_rows(batch, mesh, setup).clone()
    axes = {name: mesh.get_group(name) for name in setup.names}
    with spmd.set_current_mesh(mesh), checker() if checks else nullcontext():
        types = {a: spmd.I if n == "tensor" else spmd.V for n, a in axes.items()}
        spmd.assert_type(rows, types)
        loss = model(rows).square().mean()
        for name in setup.data_names:
            if checks and axes[name].size() > 1:
                loss = spmd.reinterpret(loss, axes[name], src=spmd.V, dst=spmd.P)
        loss.backward()


def checker() -> Any:
    from spmd_types.checker import typecheck

    return typecheck("strict")


def train(
    model: Any, mesh: DeviceMesh, setup: Setup, look: Callable[[int], None], checks: bool = False
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        backward(model, batch_of(step), mesh, setup, checks)
        look(step)
        advance(optimizer)


@contextmanager
def refused(*words: str) -> Iterator[None]:
    with pytest.raises(fsdp2.ConfigError) as found:
        yield
    for word in words:
        assert word in str(found.value), f"{word!r} is not in {found.value}"


def train_beside(model: Any, mesh: DeviceMesh, setup: Setup, checks: bool = False) -> None:
    """Train beside one process on the whole batch; compare every gradient and weight."""
    reference = build()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)

    def look(step: int) -> None:
        reference(batch_of(step)).square().mean().backward()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert mine.grad.placements == mine.placements
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad)
            torch.testing.assert_close(mine.full_tensor(), theirs.data)
        advance(optimizer)

    train(model, mesh, setup, look, checks)


@pytest.mark.parametrize("checks", with_slow([False, True], [True]))
@pytest.mark.parametrize("name", with_slow(SETUPS, ["data_tensor", "both"]))
@ranks(4)
def test_training_is_that_of_the_plain_model(name: str, checks: bool) -> None:
    """Gradients and weights are those of one process, with the checker of types and without."""
    setup = SETUPS[name]
    train_beside(*make(setup), setup, checks)


@pytest.mark.skipif(not OF_TORCH, reason="torch reads annotations since 2.15")
@pytest.mark.parametrize("name", ["data", "data_tensor", "replicate"])
@ranks(4)
def test_torchs_own_does_the_same(name: str) -> None:
    """Placements, shards, annotations, and gradients of every step.

    Not of every setup: torch takes no other dim of one rank, and if data dims are not the first
    ones, it gives the placements of some dims to others.
    """
    setup = SETUPS[name]
    seen: dict[Any, list[Any]] = {}
    for library in (fsdp2, torch_fsdp):
        model, mesh = make(setup, library)
        found = seen.setdefault(library, [])

        def look(step: int, model: Any = model, found: Any = found) -> None:
            for param in model.parameters():
                found.append((param.placements, param.device_mesh, param._local_tensor.clone()))
                found.append((param.grad.placements, param.device_mesh, param.grad._local_tensor))
            found.append(copy.deepcopy([block.seen for block in model]))

        train(model, mesh, setup, look, checks=True)
    assert len(seen[fsdp2]) == len(seen[torch_fsdp])
    for mine, theirs in zip(seen[fsdp2], seen[torch_fsdp], strict=True):
        if isinstance(mine, list):
            assert mine == theirs, "types, shapes and annotations in forward"
            continue
        assert mine[:2] == theirs[:2]
        torch.testing.assert_close(mine[2], theirs[2], rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", [1, 2])
@ranks(1, 2)
def test_fewer_ranks(size: int, world_size: int) -> None:
    """On one rank nothing is kept of an annotation, and plain parameters are taken as they are."""
    if size > world_size:
        return
    names = ("data", "tensor") if size == 1 else ("tensor", "data")
    setup = Setup((world_size, 1), names, DataParallelMeshDims(shard="data"))
    if world_size == 1:
        setup = Setup((1,), ("data",), DataParallelMeshDims(shard="data"))
    train_beside(*make(setup), setup)


@ranks(4)
def test_what_is_stored_and_what_is_computed_with() -> None:
    """Shards are DTensors without annotation; whole parameters are plain, with all of it."""
    setup = SETUPS["data_tensor"]
    model, mesh = make(setup)
    backward(model, batch_of(0), mesh, setup, checks=False)
    data, tensor = (spmd.MeshAxis.of(mesh.get_group(name)) for name in setup.names)
    for block in model:
        for name, param in block.named_parameters():
            assert isinstance(param, DTensor)
            assert types_of(param) == ({}, None)
            kind = TYPES[name]
            is_split = isinstance(kind, spmd.S)
            spec = [tensor if is_split and kind.dim == d else None for d in range(param.ndim)]
            shape = [s // 2 if part else s for s, part in zip(param.shape, spec, strict=True)]
            expected = {data: spmd.R, tensor: spmd.V if is_split else kind}
            assert block.seen[name] == (
                Tensor,
                tuple(shape),
                (expected, spmd.types.PartitionSpec(*spec) if is_split else None),
            )
    assert model[0].down.placements == (Shard(0), Shard(1))
    assert model[0].shift.placements == (Shard(0), Replicate())


@ranks(4)
def test_a_part_of_the_annotation_is_enough_on_the_current_mesh() -> None:
    """Data dims may be left out inside of `set_current_mesh`; they are R in forward."""
    setup = SETUPS["data_tensor"]
    mesh, model = setup.mesh(), build()
    annotate(model, mesh, setup)
    with refused("gain", "set_current_mesh"):
        fsdp2.fully_shard(model[0], mesh=mesh, dp_mesh_dims=setup.dims)
    assert type(model[0]) is Block
    with spmd.set_current_mesh(mesh):
        shard_each(*model, model, mesh=mesh, dp_mesh_dims=setup.dims)
    backward(model, batch_of(0), mesh, setup, checks=True)
    data = spmd.MeshAxis.of(mesh.get_group("data"))
    assert all(seen[2][0][data] is spmd.R for seen in model[0].seen.values())


def one(mesh: DeviceMesh, types: dict[str, Any]) -> nn.Module:
    module = nn.Linear(4, 4, bias=False)
    if types:
        spmd.assert_type(module.weight, {mesh.get_group(n): kind for n, kind in types.items()})
    return module


@ranks(4)
def test_what_is_refused() -> None:
    """By name, before anything is changed."""
    setup = SETUPS["data_tensor"]
    mesh = setup.mesh()
    for types, words in (
        ({"data": spmd.I, "tensor": spmd.R}, ("expected R", "data")),
        ({"data": spmd.S(0), "tensor": spmd.R}, ("expected R", "S(0)")),
        ({"data": spmd.R, "tensor": spmd.V}, ("'tensor'", "found V")),
        ({"data": spmd.R, "tensor": spmd.P}, ("'tensor'", "found P")),
        ({"tensor": spmd.R}, ("set_current_mesh",)),
        ({}, ("plain tensor",)),
    ):
        module = one(mesh, types)
        with refused("weight", *words):
            fsdp2.fully_shard(module, mesh=mesh, dp_mesh_dims=setup.dims)
        assert type(module) is nn.Linear
    with refused("weight", "'tensor'", "found nothing"), spmd.set_current_mesh(mesh):
        fsdp2.fully_shard(one(mesh, {"data": spmd.R}), mesh=mesh, dp_mesh_dims=setup.dims)
    with refused("weight", "dp_mesh_dims"):
        fsdp2.fully_shard(one(mesh, {"data": spmd.R, "tensor": spmd.R}), mesh=mesh["data"])
    line = shared_mesh((4,), ("all",))
    with refused("weight", "ranks"), spmd.set_current_mesh(mesh["tensor"]):
        module = one(mesh, {"tensor": spmd.R})
        fsdp2.fully_shard(module, mesh=line, dp_mesh_dims=DataParallelMeshDims(shard="all"))
    cube = shared_mesh((1, 2, 2), ("data", "a", "b"))
    a, b = (spmd.MeshAxis.of(cube.get_group(name)) for name in "ab")
    dims = DataParallelMeshDims(shard="data")
    with refused("weight", "order"):
        turned = nn.Linear(4, 4, bias=False)
        spec = spmd.types.PartitionSpec((b, a), None)
        spmd.assert_type(turned.weight, {a: spmd.V, b: spmd.V}, partition_spec=spec)
        fsdp2.fully_shard(turned, mesh=cube, dp_mesh_dims=dims)


@pytest.mark.parametrize("choice", [True, 2])
@ranks(4)
def test_resharding_copies_pickles_and_placeholders(choice: bool | int) -> None:
    """What works for other parameters works for annotated ones."""
    setup = SETUPS["data_tensor"]
    model, mesh = make(setup, reshard_after_forward=choice)
    backward(model, batch_of(0), mesh, setup, checks=False)
    expected = [param.grad.full_tensor() for param in model.parameters()]
    whole = dict(build().named_parameters())
    for name, value in fsdp2.full_params(model, max_bytes=1 << 20):
        assert torch.equal(value, whole[name]), name
    model.zero_grad()
    for block in model:
        block.axis, block.seen = None, {}
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for twin in twins:
        for block in (*model, *twin):
            block.axis = mesh.get_group("tensor")
        backward(twin, batch_of(0), mesh, setup, checks=False)
        for param, grad in zip(twin.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), grad)
    given = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    rows = my_rows(batch_of(0), mesh, setup).clone()
    torch.func.functional_call(model, given, rows).square().mean().backward()
    for param, grad in zip(given.values(), expected, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), grad)


@ranks(4)
def test_from_the_meta_device_and_parameters_that_are_replaced() -> None:
    """Shards get memory and values later; a plain parameter as this rank has it may come then."""
    setup = SETUPS["data_tensor"]
    mesh, source = setup.mesh(), make(setup)[0]
    with torch.device("meta"):
        model = build()
    annotate(model, mesh, setup)
    with_data_dims(model, mesh, setup)
    shard_each(*model, model, mesh=mesh, dp_mesh_dims=setup.dims)
    model.to_empty(device="cpu")
    model.load_state_dict(source.state_dict())
    whole = build()
    annotate(whole, mesh, setup)
    backward(source, batch_of(0), mesh, setup, checks=True)
    for kept in (None, whole[1].up):
        if kept is not None:
            model[1].up = kept
        backward(model, batch_of(0), mesh, setup, checks=True)
        for mine, other in zip(model.parameters(), source.parameters(), strict=True):
            assert mine.placements == other.placements
            assert torch.equal(mine.grad.full_tensor(), other.grad.full_tensor())
        model.zero_grad()


@ranks(4)
def test_gradients_that_wait_and_mixed_precision() -> None:
    """Backwards without sync add up; a sum over `tensor` is taken in the reduce dtype."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
    setup = SETUPS["data_tensor"]
    model, mesh = make(setup, mp_policy=policy)
    reference = build()
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        backward(model, batch_of(step), mesh, setup, checks=False)
        reference(batch_of(step)).square().mean().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-4)


@ranks(4)
def test_a_package_without_a_list_of_unchecked_functions() -> None:
    """Before 0.3 there is none: parameters are stored and train the same, without the checker."""
    setup = SETUPS["data_tensor"]
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(spmd, "register_no_typecheck", raising=False)
        model, mesh = make(setup)
    train_beside(model, mesh, setup)


@ranks(4)
def test_the_checker_sees_the_forward_and_nothing_of_ours() -> None:
    """Other annotations are found wrong in forward; what unshards and reduces is left alone."""
    setup = SETUPS["data_tensor"]
    mesh, model = setup.mesh(), build()
    annotate(model, mesh, setup, {**TYPES, "shift": spmd.R})
    with_data_dims(model, mesh, setup)
    shard_each(*model, model, mesh=mesh, dp_mesh_dims=setup.dims)
    for _ in range(2):
        with pytest.raises(spmd.SpmdTypeError, match="add"):
            backward(model, batch_of(0), mesh, setup, checks=True)
    backward(model, batch_of(0), mesh, setup, checks=False)
    with spmd.set_current_mesh(mesh), checker():
        model.unshard()
        model.reshard()
        model.zero_grad()
    assert isinstance(model[0].up, DTensor)


@ranks(1)
def test_annotations_are_the_packages_own() -> None:
    """The attributes that are not carried over as the user's are those that the package sets."""
    from fsdp2._core.base import torch_dtensor

    param = nn.Parameter(torch.zeros(4, 4))
    spmd.assert_type(param, {spmd.MeshAxis.of(2, 1): spmd.S(0)})
    assert set(vars(param)) == torch_dtensor.ATTRIBUTES

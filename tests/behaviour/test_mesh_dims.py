"""Promise: `dp_mesh_dims` says which dims of one full mesh data parallelism uses."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode

import fsdp2
from fsdp2 import DataParallelMeshDims
from fsdp2._core.comm.mesh import DataMesh
from fsdp2._core.engine.tree import unit_of
from tests.kit.in_turn import advance, shard_each
from tests.kit.local_sgd import LocalSGD
from tests.kit.meshes import DEVICE, random_numbers, shared_mesh
from tests.kit.parity import assert_same, names_of
from tests.kit.pool import ranks_that_share as ranks
from tests.kit.slow import slow, with_slow
from tests.kit.tensor_parallel import RTOL, check_gradients

ROWS = 8


class Block(nn.Module):
    """Odd sizes, one row, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(13, 29)
        self.down = nn.Linear(29, 13, bias=False)
        self.gate = nn.Linear(13, 1, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        """Compute on DTensors if `x` is one; else with what this rank has of each parameter."""
        up, bias, down, gate, scale = (
            p if isinstance(x, DTensor) else mine(p)
            for p in (self.up.weight, self.up.bias, self.down.weight, self.gate.weight, self.scale)
        )
        return x + scale * F.linear(x, gate) * F.linear(F.relu(F.linear(x, up, bias)), down)


def mine(parameter: Tensor) -> Tensor:
    """Return the local part; what arrives as its gradient is this rank's share of a sum."""
    if not isinstance(parameter, DTensor):
        return parameter
    share = [Partial() if isinstance(p, Replicate) else p for p in parameter.placements]
    return parameter.to_local(grad_placements=share)


SPLIT = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}


@dataclass(frozen=True)
class Setup:
    """A full mesh, and which of its dims are data-parallel; `tensor` is the other one."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    dims: DataParallelMeshDims

    @property
    def data_names(self) -> list[str]:
        return [n for n in self.names if n in (*self.dims.shard_names, *self.dims.replicate_names)]

    def mesh(self) -> DeviceMesh:
        return shared_mesh(self.shape, self.names)

    def placements(self, name: str) -> list[Placement]:
        split = next((s for end, s in SPLIT.items() if name.endswith(end)), Replicate())
        return [Replicate() if n in self.data_names else split for n in self.names]

    def batch_placements(self) -> list[Placement]:
        return [Shard(0) if n in self.data_names else Replicate() for n in self.names]


SETUPS = {
    "shard": Setup((2, 2), ("data", "tensor"), DataParallelMeshDims(shard="data")),
    "shard_right": Setup((2, 2), ("tensor", "data"), DataParallelMeshDims(shard="data")),
    "shard_all": Setup((4,), ("data",), DataParallelMeshDims(shard="data")),
    "replicate": Setup((2, 2), ("data", "tensor"), DataParallelMeshDims(replicate="data")),
    "both": Setup((2, 2), ("out", "in"), DataParallelMeshDims(shard="in", replicate="out")),
    "both_turned": Setup((2, 2), ("in", "out"), DataParallelMeshDims(shard="in", replicate="out")),
    "both_apart": Setup(
        (2, 1, 2),
        ("out", "tensor", "in"),
        DataParallelMeshDims(shard="in", replicate="out"),
    ),
    "two_shard": Setup((2, 2, 1), ("a", "b", "tensor"), DataParallelMeshDims(shard=("a", "b"))),
    "two_shard_all": Setup((2, 2), ("a", "b"), DataParallelMeshDims(shard=("b", "a"))),
    "two_shard_right": Setup(
        (2, 1, 2), ("tensor", "a", "b"), DataParallelMeshDims(shard=("a", "b"))
    ),
    "two_replicate": Setup(
        (2, 1, 2),
        ("a", "tensor", "b"),
        DataParallelMeshDims(replicate=("a", "b")),
    ),
    "three": Setup(
        (2, 1, 2, 1),
        ("out", "a", "b", "tensor"),
        DataParallelMeshDims(shard=("a", "b"), replicate="out"),
    ),
}


class OnMesh(nn.Module):
    """Takes this rank's rows, runs its body on the full mesh, returns the rows."""

    def __init__(self, body: nn.Module, mesh: DeviceMesh, setup: Setup) -> None:
        super().__init__()
        self.body = body
        self.mesh = mesh
        self.placements = setup.batch_placements()
        # torch plans each operation anew on each mesh, for seconds if it has more than two dims
        self.is_local = mesh.ndim > 2 and all(
            mesh.size(dim) == 1 for dim, name in enumerate(setup.names) if name == "tensor"
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.is_local:
            return self.body(x)
        out = self.body(DTensor.from_local(x, self.mesh, self.placements))
        return out.redistribute(placements=self.placements).to_local()


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).double()


def distribute(model: nn.Module, mesh: DeviceMesh, setup: Setup) -> None:
    """Make every parameter a DTensor on the full mesh, whole on its data dims."""
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(prefix, recurse=False):
            placements = setup.placements(name)
            spread = distribute_tensor(param.detach(), mesh, placements, src_data_rank=None)
            trainable = nn.Parameter(spread, requires_grad=param.requires_grad)
            module.register_parameter(name.rpartition(".")[2], trainable)


def make(setup: Setup, library: Any = fsdp2, **kwargs: Any) -> tuple[nn.Module, DeviceMesh]:
    model, mesh = build(), setup.mesh()
    distribute(model, mesh, setup)
    dims = library.DataParallelMeshDims(setup.dims.shard, setup.dims.replicate)
    shard_each(*model, model, library=library, mesh=mesh, dp_mesh_dims=dims, **kwargs)
    return model, mesh


def my_rows(batch: Tensor, mesh: DeviceMesh, setup: Setup) -> Tensor:
    """Cut the batch as `batch_placements` says."""
    for dim, name in enumerate(setup.names):
        if name in setup.data_names:
            batch = batch.chunk(mesh.size(dim))[mesh.get_local_rank(dim)]
    return batch


def batch_of(step: int) -> Tensor:
    generator = random_numbers(step)
    return torch.randn(ROWS, 13, generator=generator, dtype=torch.float64)


def train(
    model: nn.Module,
    reference: nn.Module,
    run: Callable[[Tensor], Tensor],
    mine: Callable[[Tensor], Tensor],
    steps: int = 3,
    rtol: float = RTOL,
) -> None:
    """Train on this rank's rows and on the whole batch; compare every gradient and weight."""
    optimizers = [
        kind([p for p in m.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        for kind, m in ((LocalSGD, model), (torch.optim.SGD, reference))
    ]
    for step in range(steps):
        batch = batch_of(step)
        run(mine(batch)).square().mean().backward()
        reference(batch).square().mean().backward()
        check_gradients(model, reference, rtol)
        advance(*optimizers)
    for name, param in names_of(model).items():
        assert_same(param, names_of(reference)[name], name, rtol)


def train_setup(setup: Setup, rtol: float = RTOL, **kwargs: Any) -> nn.Module:
    model, mesh = make(setup, **kwargs)
    train(
        model,
        build(),
        OnMesh(model, mesh, setup),
        lambda batch: my_rows(batch, mesh, setup),
        rtol=rtol,
    )
    return model


@pytest.mark.parametrize(
    "name",
    with_slow(SETUPS, ("both_turned", "three")),
)
@ranks(4)
def test_training_is_that_of_the_plain_model(name: str) -> None:
    """Whatever the dims are, gradients and weights are those of the whole batch on one process."""
    train_setup(SETUPS[name])


@pytest.mark.parametrize(
    "name",
    with_slow(SETUPS, ["shard_right", "both_apart", "two_shard_right", "two_replicate", "three"]),
)
@ranks(4)
def test_shards_lie_as_in_torch(name: str) -> None:
    """Meshes, placements and local shards are those of torch's own `dp_mesh_dims`.

    `full_tensor()` of every sharded parameter is the original, for shapes that nothing divides.
    """
    setup = SETUPS[name]
    if len(setup.dims.shard_names) > 1:  # torch takes them in the order of the mesh only
        shard = tuple(n for n in setup.names if n in setup.dims.shard_names)
        setup = Setup(setup.shape, setup.names, DataParallelMeshDims(shard, setup.dims.replicate))
    ours, mesh = make(setup)
    for fqn, original in names_of(build()).items():
        param = names_of(ours)[fqn]
        assert torch.equal(param.full_tensor(), original), fqn
    if not hasattr(torch_fsdp, "DataParallelMeshDims"):
        return  # this torch has nothing to compare with
    theirs = build()
    for block in theirs:
        del block.scale  # torch refuses scalars
    distribute(theirs, mesh, setup)
    dims = torch_fsdp.DataParallelMeshDims(setup.dims.shard, setup.dims.replicate)
    shard_each(*theirs, theirs, library=torch_fsdp, mesh=mesh, dp_mesh_dims=dims)
    for fqn, expected in names_of(theirs).items():
        param = names_of(ours)[fqn]
        assert param.device_mesh == expected.device_mesh, fqn
        assert param.device_mesh.mesh_dim_names == expected.device_mesh.mesh_dim_names, fqn
        assert param.placements == expected.placements, fqn
        assert param.shape == expected.shape, fqn
        assert torch.equal(param.to_local(), expected.to_local()), fqn


@ranks(4)
def test_parameters_are_on_the_full_mesh_during_forward() -> None:
    """The unsharded parameter is a DTensor on the mesh passed, placed as before sharding."""
    setup = SETUPS["shard"]
    model, mesh = make(setup)
    seen: dict[str, tuple[DeviceMesh, tuple[Placement, ...], torch.Size]] = {}

    def look(block: nn.Module, _: Any) -> None:
        for fqn, param in block.named_parameters():
            seen[fqn] = (param.device_mesh, param.placements, param.to_local().shape)

    model[0].register_forward_pre_hook(look)
    OnMesh(model, mesh, setup)(my_rows(batch_of(0), mesh, setup))
    rows = len(torch.arange(29).chunk(2)[mesh.get_local_rank("tensor")])
    assert seen["up.weight"] == (mesh, (Replicate(), Shard(0)), torch.Size([rows, 13]))
    assert seen["gate.weight"] == (mesh, (Replicate(), Replicate()), torch.Size([1, 13]))
    assert seen["scale"] == (mesh, (Replicate(), Replicate()), torch.Size([]))


@ranks(4)
def test_replicate_alone_sends_gradients_only() -> None:
    """Plain data parallelism: whole parameters, one all-reduce a unit, no gather."""
    mesh = init_device_mesh(DEVICE, (4,), mesh_dim_names=("data",))
    model, original = build(), build()
    dims = DataParallelMeshDims(replicate="data")
    shard_each(*model, model, mesh=mesh, dp_mesh_dims=dims)
    for fqn, param in names_of(model).items():
        assert param.placements == (Replicate(),)
        assert torch.equal(param.to_local(), names_of(original)[fqn])
    rows = batch_of(0).chunk(4)[mesh.get_local_rank()]
    for _ in range(3):  # afterwards the ranks know what to expect of each other
        model(rows).square().mean().backward()
    with CommDebugMode() as seen:
        model(rows).square().mean().backward()
    counts = {str(op).rpartition(".")[2]: n for op, n in seen.get_comm_counts().items() if n}
    assert sum(counts.values()) == 2, counts
    assert all("reduce" in name and "scatter" not in name for name in counts), counts


PLAIN = {
    "shard": (4, DataParallelMeshDims(shard="a"), (Shard(0),)),
    "replicate": (4, DataParallelMeshDims(replicate="a"), (Replicate(),)),
    "both": ((2, 2), DataParallelMeshDims(shard="b", replicate="a"), (Replicate(), Shard(0))),
    "turned": ((2, 2), DataParallelMeshDims(shard="a", replicate="b"), (Shard(0), Replicate())),
    "flat": ((2, 2), DataParallelMeshDims(shard=("a", "b")), (Shard(0),)),
}


@pytest.mark.parametrize("name", with_slow(PLAIN, ["turned", "flat"]))
@ranks(4)
def test_plain_parameters_are_taken_where_every_dim_is_data(rank: int, name: str) -> None:
    """Where no dim is left over, plain parameters are sharded and stay plain in forward."""
    shape, dims, placements = PLAIN[name]
    shape = (shape,) if isinstance(shape, int) else shape
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("a", "b")[: len(shape)])
    model, reference = build(), build()
    shard_each(*model, model, mesh=mesh, dp_mesh_dims=dims)
    kinds = set()
    model[1].register_forward_pre_hook(lambda m, _: kinds.add(isinstance(m.up.weight, DTensor)))
    assert model[0].up.weight.placements == placements
    assert torch.equal(model[0].up.weight.full_tensor(), reference[0].up.weight)
    train(model, reference, model, lambda batch: batch.chunk(4)[rank])
    assert kinds == {False}


@pytest.mark.parametrize("name", with_slow(["shard", "replicate", "both_turned"], ["both_turned"]))
@ranks(4)
def test_a_loss_over_the_data_dims_needs_no_mean(name: str) -> None:
    """A loss that is a DTensor over all ranks is whole already: sums of gradients are right."""
    setup = SETUPS[name]
    model, mesh = make(setup)
    reference = build()
    for module in model.modules():
        if isinstance(module, fsdp2.FSDPModule):
            unit_of(module).configure(divide_by=1.0)
    batch = batch_of(0)
    rows = DTensor.from_local(my_rows(batch, mesh, setup), mesh, setup.batch_placements())
    loss = model(rows).square().mean()
    loss.backward()
    expected = reference(batch).square().mean()
    expected.backward()
    assert_same(loss.full_tensor(), expected, "loss", RTOL)
    check_gradients(model, reference)


@ranks(4)
def test_an_int_leaves_larger_shards_after_forward() -> None:
    """After a forward with 2, a rank holds what two neighbours of the flat shard axis hold.

    Training stays the same.
    """
    setup = SETUPS["two_shard"]
    train_setup(setup, reshard_after_forward=2)
    model, mesh = make(setup, reshard_after_forward=2)
    output = OnMesh(model, mesh, setup)(my_rows(batch_of(0), mesh, setup))
    weight = model[0].up.weight
    assert output.requires_grad  # a backward may come
    inner = weight.device_mesh.get_local_rank("inner")
    assert torch.equal(weight.to_local(), build()[0].up.weight.chunk(2)[inner])


IN_FP32 = fsdp2.MixedPrecisionPolicy(
    param_dtype=torch.float32, reduce_dtype=torch.float64, output_dtype=torch.float64
)


@pytest.mark.parametrize("name", with_slow(["shard_all", "replicate"], ["shard_all"]))
@ranks(4)
def test_mixed_precision(name: str) -> None:
    """Compute in float32 with float64 weights: gradients arrive in float64, right to 1e-5."""
    setup = SETUPS[name]
    model, mesh = make(setup, mp_policy=IN_FP32)
    reference = build()
    run = OnMesh(model, mesh, setup)
    batch = batch_of(0)
    run(my_rows(batch, mesh, setup)).square().mean().backward()
    reference(batch).square().mean().backward()
    for param in model.parameters():
        assert param.grad.dtype is torch.float64
    check_gradients(model, reference, 1e-5)


@pytest.mark.parametrize(
    ("name", "reduce_dtype"),
    [
        slow("shard", None),
        slow("replicate", torch.float32),
        slow("both", torch.float32),
        ("three", torch.float32),
    ],
)
@ranks(4)
def test_accumulation_without_sync(name: str, reduce_dtype: torch.dtype | None) -> None:
    """Three backwards, of which the last syncs, give the sum of three global gradients."""
    setup = SETUPS[name]
    model, mesh = make(setup, mp_policy=fsdp2.MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    run, reference = OnMesh(model, mesh, setup), build()
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        run(my_rows(batch_of(step), mesh, setup)).square().mean().backward()
        reference(batch_of(step)).square().mean().backward()
        if step < 2:
            model.reshard()
            assert all(param.grad is None for param in model.parameters())
    check_gradients(model, reference, RTOL if reduce_dtype is None else 1e-6)


@pytest.mark.parametrize("name", with_slow(["shard", "replicate", "both_turned"], ["both_turned"]))
@ranks(4)
def test_frozen_and_tied_parameters(name: str) -> None:
    """A frozen parameter gets no gradient; a tied one stays one object and gets the sum."""
    setup = SETUPS[name]
    mesh = setup.mesh()

    def prepared() -> nn.Sequential:
        model = build()
        model[0].down.weight.requires_grad_(False)
        return model

    model, reference = prepared(), prepared()
    distribute(model, mesh, setup)
    for m in (model, reference):
        m[1].up.weight = m[0].up.weight
    shard_each(*model, model, mesh=mesh, dp_mesh_dims=setup.dims)
    train(model, reference, OnMesh(model, mesh, setup), lambda b: my_rows(b, mesh, setup))
    assert model[1].up.weight is model[0].up.weight
    assert model[0].down.weight.grad is None


def load_a_whole_state(model: nn.Module, reference: nn.Module) -> None:
    """Give both other values; those of the model come as its parameters lie, and are assigned."""
    with torch.no_grad():
        for param in reference.parameters():
            param.mul_(1.5)
    whole = reference.state_dict()
    assert list(model.state_dict()) == list(whole)
    for assign in (False, True):
        state = {
            fqn: distribute_tensor(whole[fqn], p.device_mesh, p.placements, src_data_rank=None)
            for fqn, p in model.state_dict().items()
        }
        model.load_state_dict(state, assign=assign)
        for fqn, param in names_of(model).items():
            assert_same(param, whole[fqn], fqn, 0.0)


@pytest.mark.parametrize("name", with_slow(["shard", "replicate", "two_shard"], ["two_shard"]))
@ranks(4)
def test_states_load_through_distribute_tensor(name: str) -> None:
    """A whole state, distributed as each parameter is, loads; the next steps train on it."""
    setup = SETUPS[name]
    model, mesh = make(setup)
    reference = build()
    load_a_whole_state(model, reference)
    train(model, reference, OnMesh(model, mesh, setup), lambda b: my_rows(b, mesh, setup))


@ranks(4)
def test_copies_train_alike() -> None:
    """A deep copy of a model on a full mesh is a model of its own that trains the same."""
    setup = SETUPS["two_shard"]
    model, mesh = make(setup)
    twin = copy.deepcopy(model)
    for m in (twin, model):
        train(m, build(), OnMesh(m, mesh, setup), lambda b: my_rows(b, mesh, setup), steps=2)


@ranks(4)
def test_smaller_meshes_of_different_slices_do_not_mix(rank: int) -> None:
    """Ranks beside each other on a dim that is not data-parallel gather from their own slice."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "tensor"))
    for data in (
        DataMesh.of(mesh["data"]),
        DataMesh.named(mesh, DataParallelMeshDims(shard="data")),
    ):
        assert data.split(1).shard.size == 1
        smaller = data.split(2)
        assert smaller.mesh.mesh.tolist() == [[rank % 2, rank % 2 + 2]]
        seen = [torch.empty(1) for _ in range(2)]
        dist.all_gather(seen, torch.tensor([float(rank)]), smaller.shard.pg)
        assert torch.cat(seen).tolist() == [rank % 2, rank % 2 + 2]
        assert smaller.shard.global_ranks == [rank % 2, rank % 2 + 2]


def refused(
    match: str, *, mesh: DeviceMesh | None, model: nn.Module | None = None, **kw: Any
) -> None:
    model = model or build()
    before = names_of(model)
    with pytest.raises(fsdp2.ConfigError, match=match) as raised:
        fsdp2.fully_shard(model, mesh=mesh, **kw)
    assert isinstance(raised.value, ValueError)
    assert type(model) is nn.Sequential
    assert all(names_of(model)[name] is param for name, param in before.items())


@ranks(2)
def test_what_cannot_be_is_said_at_once() -> None:
    """Wrong names, meshes and placements raise ConfigError in fully_shard, and change nothing."""
    named = init_device_mesh(DEVICE, (2, 1), mesh_dim_names=("data", "tensor"))
    long = init_device_mesh(DEVICE, (1, 2, 1), mesh_dim_names=("a", "tensor", "b"))
    bare = init_device_mesh(DEVICE, (2, 1))
    data = DataParallelMeshDims(shard="data")
    refused("'dta'.*Use names from", mesh=named, dp_mesh_dims=DataParallelMeshDims(shard="dta"))
    refused("with dim names", mesh=bare, dp_mesh_dims=data)
    refused("DataParallelMeshDims or None, found 'data'", mesh=named, dp_mesh_dims="data")
    refused("expected mesh to be a DeviceMesh", mesh=None, dp_mesh_dims=data)
    refused("adjacent", mesh=long, dp_mesh_dims=DataParallelMeshDims(shard=("a", "b")))
    refused(r"0\.scale is a plain tensor.*distribute_module", mesh=named, dp_mesh_dims=data)
    both = DataParallelMeshDims(shard="data", replicate="tensor")
    refused("reshard_after_forward=3", mesh=named, dp_mesh_dims=both, reshard_after_forward=3)
    model = build()
    distribute(model, named, Setup((2, 1), ("data", "tensor"), data))
    refused(
        "0.scale: expected a DTensor on the mesh", mesh=long, model=model,
        dp_mesh_dims=DataParallelMeshDims(shard="a"),
    )  # fmt: skip
    refused(
        r"0\.up\.weight: expected Replicate\(\) on the data-parallel dim 'tensor'",
        mesh=named, model=model, dp_mesh_dims=DataParallelMeshDims(replicate="tensor"),
    )  # fmt: skip
    with pytest.raises(fsdp2.ConfigError, match="neither shard nor replicate"):
        DataParallelMeshDims()
    with pytest.raises(fsdp2.ConfigError, match="in both"):
        DataParallelMeshDims(shard="a", replicate=("a", "b"))


DIMS, CHOICES = (0, 1, -1), (None, True, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dim", "choice"),
    [slow(name, dim, choice) for name in SETUPS for dim in DIMS for choice in CHOICES],
)
@ranks(4)
def test_every_setup_with_every_dim(name: str, dim: int, choice: bool | None) -> None:
    """Any dim of a parameter may be sharded beside its own axes, and training stays the same."""
    model = train_setup(
        SETUPS[name],
        shard_placement_fn=lambda p: Shard(dim) if p.dim() > 1 else None,
        reshard_after_forward=choice,
    )
    assert math.isfinite(model[0].up.weight.full_tensor().sum().item())


@ranks(4)
def test_every_rank_is_told_of_a_slice_whose_ranks_do_not_ascend(rank: int) -> None:
    """The slice of ranks 0 and 1 would be right; they work with the others along other dims."""
    mesh = DeviceMesh(DEVICE, [[0, 1], [3, 2]], mesh_dim_names=("tensor", "data"))
    with pytest.raises(fsdp2.ConfigError, match=r"do not ascend .*\[FS230\]"):
        fsdp2.fully_shard(nn.Linear(5, 13), mesh=mesh["data"])
    fsdp2.fully_shard(nn.Linear(5, 13), mesh=mesh["tensor"])

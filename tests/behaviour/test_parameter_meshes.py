"""Promise: parameters of one call may lie on different meshes, each with its own collectives."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import fsdp2
from fsdp2 import ShardPlacementResult
from fsdp2._core.engine.tree import unit_of
from tests.behaviour.test_mesh_dims import IN_FP32, batch_of, load_a_whole_state
from tests.behaviour.test_mesh_dims import train as train_beside
from tests.kit.meshes import DEVICE
from tests.kit.parity import assert_same, names_of
from tests.kit.pool import ranks
from tests.kit.products import products
from tests.kit.slow import slow, with_slow
from tests.kit.tensor_parallel import RTOL, check_gradients

EXPERTS = 3


class FromAll(torch.autograd.Function):
    """All ranks' rows; backward sums what every rank's use of these rows gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size())[ctx.group.rank()], None


class ToAll(torch.autograd.Function):
    """This rank's rows of the sum over ranks; backward gives every rank all gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x.chunk(group.size())[group.rank()]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        parts = [torch.empty_like(grad) for _ in range(ctx.group.size())]
        dist.all_gather(parts, grad.contiguous(), ctx.group)
        return torch.cat(parts), None


class Experts(nn.Module):
    """Odd sizes, three experts: two expert-parallel ranks own two and one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 29, 13) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, 13, 29) / 4)

    def forward(self, x: Tensor, gates: Tensor) -> Tensor:
        up, down, group = self.up, self.down, None
        if isinstance(up, DTensor):
            mesh = up.device_mesh
            group = mesh.get_group()
            up, down = up.to_local(), down.to_local()
            x, gates = FromAll.apply(x, group), FromAll.apply(gates, group)
            gates = gates.split([2, 1], dim=1)[mesh.get_local_rank()]
        hidden = torch.einsum("bi,eoi->beo", x, up).relu()
        out = torch.einsum("beo,eio,be->bi", hidden, down, gates)
        return out if group is None else ToAll.apply(out, group)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(13)
        self.router = nn.Linear(13, EXPERTS)
        self.experts = Experts()
        self.row = nn.Linear(13, 1, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(self.norm(x)).softmax(-1)
        return x + self.scale * self.experts(x, gates) * self.row(x)


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Layer(), Layer()).double()


def of_experts(model: nn.Module) -> set[nn.Parameter]:
    return {p for m in model.modules() if isinstance(m, Experts) for p in m.parameters()}


def choose(model: nn.Module, info: Any, placement: Any = None) -> Callable[..., Any]:
    """Give the experts of the model `info`, and leave the rest."""
    chosen = of_experts(model)
    return lambda p: ShardPlacementResult(placement, info) if p in chosen else None


def my_rows(batch: Tensor) -> Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def train(model: nn.Module, reference: nn.Module | None = None, steps: int = 3) -> None:
    """Train on this rank's rows and on the whole batch; compare every gradient and weight."""
    train_beside(model, reference or build(), model, my_rows, steps)


def spread(experts: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank of a mesh other experts."""
    for name, param in list(experts.named_parameters()):
        placed = distribute_tensor(param.detach(), mesh, [Shard(0)], src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(placed))


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh of all four ranks, and a mesh of two by two for the experts."""
    pairs = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(DEVICE, (4,), mesh_dim_names=("data",)), pairs


def make(how: str = "one_unit", **kwargs: Any) -> nn.Module:
    """Shard experts over two ranks, replicated over the other two; the rest over all four."""
    model = build()
    data, pairs = meshes()
    for layer in model:
        if how == "nested":
            fsdp2.fully_shard(layer.experts, mesh=pairs, **kwargs)
            fsdp2.fully_shard(layer, mesh=data, **kwargs)
        else:
            fsdp2.fully_shard(layer, mesh=data, shard_placement_fn=choose(layer, pairs), **kwargs)
    return fsdp2.fully_shard(model, mesh=data, **kwargs)


@products([("nested", 2)], how=["one_unit", "nested"], choice=[None, True, False, 2])
@ranks(4)
def test_experts_on_a_mesh_of_their_own(rank: int, how: str, choice: bool | int | None) -> None:
    """Experts sharded over two ranks and the rest over four train as on one process."""
    model = make(how, reshard_after_forward=choice)
    experts, row = model[0].experts.up, model[0].row.weight
    assert experts.placements == (Replicate(), Shard(0))
    assert row.placements == (Shard(0),)
    assert experts.device_mesh.shape == (2, 2)
    assert row.device_mesh.shape == (4,)
    assert torch.equal(experts.to_local(), build()[0].experts.up.chunk(2)[rank % 2])
    assert len(unit_of(model[0]).groups) == (2 if how == "one_unit" else 1)
    train(model)


@products([("nested", 1)], how=["one_unit", "nested"], dim=[0, 1])
@ranks(4)
def test_expert_parallel(rank: int, how: str, dim: int) -> None:
    """Each expert-parallel rank owns other experts; dividing by all ranks gives the global mean."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "experts"))
    everybody = mesh._flatten("all")
    model = build()
    for layer in model:
        spread(layer.experts, mesh["experts"])
        if how == "nested":
            fsdp2.fully_shard(
                layer.experts, mesh=mesh["data"], shard_placement_fn=lambda _: Shard(dim)
            )
            fsdp2.fully_shard(layer, mesh=everybody)
            unit_of(layer.experts).configure(divide_by=4.0)
        else:
            fn = choose(layer, mesh["data"], Shard(dim))
            fsdp2.fully_shard(layer, mesh=everybody, shard_placement_fn=fn)
            assert [group.data.size for group in unit_of(layer).groups] == [4, 2]
            unit_of(layer).configure(divide_by=4.0)
    fsdp2.fully_shard(model, mesh=everybody)
    up = model[0].experts.up
    assert up.device_mesh == mesh
    rows = build()[0].experts.up.chunk(2)[rank % 2].chunk(2, dim)
    assert up.to_local().numel() == (rows[rank // 2].numel() if rank // 2 < len(rows) else 0)
    train(model)


@ranks(4)
def test_a_group_averages_over_its_own_ranks() -> None:
    """Without a divide factor, the mean is over the ranks of the parameter's mesh, not the unit's.

    Two expert-parallel ranks feed each expert, so its gradient is twice the global mean.
    """
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "experts"))
    model, reference = build()[0], build()[0]
    spread(model.experts, mesh["experts"])
    fn = choose(model, mesh["data"])
    fsdp2.fully_shard(model, mesh=mesh._flatten("all"), shard_placement_fn=fn)
    model(my_rows(batch_of(0))).square().mean().backward()
    reference(batch_of(0)).square().mean().backward()
    assert_same(model.experts.up.grad, 2 * reference.experts.up.grad, "experts", RTOL)
    assert_same(model.row.weight.grad, reference.row.weight.grad, "row", RTOL)


def described(how: str, pairs: DeviceMesh) -> Any:
    if how.startswith("torch"):
        common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
        if how == "torch_1d":
            return common.FSDPMeshInfo(pairs["shard"], shard_mesh_dim=0)
        if how == "torch_2d":
            return common.HSDPMeshInfo(pairs, shard_mesh_dim=1, replicate_mesh_dim=0)
        return common.DDPMeshInfo(pairs["replicate"], replicate_mesh_dim=0)
    if how == "turned":
        return SimpleNamespace(mesh=pairs, shard_mesh_dim=0, replicate_mesh_dim=1)
    return SimpleNamespace(mesh=pairs) if how == "only_mesh" else None


@pytest.mark.parametrize(
    ("how", "placements"),
    [
        ("torch_1d", (Shard(1),)),
        slow("torch_2d", (Replicate(), Shard(1))),
        ("torch_replicate", (Replicate(),)),
        slow("turned", (Shard(1), Replicate())),
        ("only_mesh", (Replicate(), Shard(1))),
        slow("nothing", (Shard(1),)),
    ],
)
@ranks(4)
def test_any_object_with_a_mesh_describes_one(how: str, placements: tuple[Any, ...]) -> None:
    """torch's own mesh infos, and look-alikes, are read by their attributes."""
    data, pairs = meshes()
    model = build()
    info = described(how, pairs)
    fn = choose(model, info, Shard(1))
    fsdp2.fully_shard(model, mesh=data, shard_placement_fn=fn)
    assert model[0].experts.up.placements == placements
    if "1d" in how or how == "torch_replicate":
        return  # its mean is over two ranks of four: not the global one
    train(model)


@ranks(4)
def test_each_mesh_has_its_own_collectives() -> None:
    """A unit with two meshes gathers twice, scatters twice, and all-reduces for one of them."""
    data, pairs = meshes()
    model = build()[0]
    fn = choose(model, pairs)
    fsdp2.fully_shard(model, mesh=data, shard_placement_fn=fn, reshard_after_forward=True)
    rows = my_rows(batch_of(0))
    for _ in range(3):  # afterwards the ranks know what to expect of each other
        model(rows).square().mean().backward()
    with CommDebugMode() as seen:
        model(rows).square().mean().backward()
    counts = {"gather": 0, "scatter": 0, "allreduce": 0}
    for op, count in seen.get_comm_counts().items():
        name = str(op).replace("_", "")
        kind = next(k for k in ("scatter", "allreduce", "gather") if k in name)
        counts[kind] += count
    assert counts == {"gather": 4, "scatter": 2, "allreduce": 1}, seen.get_comm_counts()


@ranks(4)
def test_an_int_must_divide_the_size_of_every_mesh() -> None:
    """4 fits the mesh of the call and not that of the experts: ConfigError names it."""
    data, pairs = meshes()
    model = build()
    before = names_of(model)
    with pytest.raises(fsdp2.ConfigError, match=r"reshard_after_forward=4 for 2 shard ranks.*=2"):
        fsdp2.fully_shard(
            model, mesh=data, shard_placement_fn=choose(model, pairs), reshard_after_forward=4
        )
    assert type(model) is nn.Sequential
    assert all(names_of(model)[name] is param for name, param in before.items())


@ranks(4)
def test_ties_within_a_unit_and_across_units() -> None:
    """A tied expert stays one object on its mesh, in one unit or taken over by the parent."""
    data, pairs = meshes()
    for nested in (False, True):
        model, reference = build(), build()
        for m in (model, reference):
            m[1].experts.up = m[0].experts.up
            m[1].row.weight = m[0].row.weight
        if nested:
            for layer in model:
                fn = choose(layer, pairs)
                fsdp2.fully_shard(layer, mesh=data, shard_placement_fn=fn)
        extra = nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)
        model.register_parameter("extra", extra)
        reference.register_parameter("extra", nn.Parameter(extra.detach(), requires_grad=False))
        experts = of_experts(model) | {extra}
        fsdp2.fully_shard(
            model,
            mesh=data,
            shard_placement_fn=lambda p, chosen=experts: (
                ShardPlacementResult(None, pairs) if p in chosen else None
            ),
        )
        assert model[1].experts.up is model[0].experts.up
        assert model[0].experts.up.placements == (Replicate(), Shard(0))
        assert {tuple(g.data.mesh.shape) for g in unit_of(model).groups} == {(4,), (2, 2)}
        train(model, reference)


@ranks(4)
def test_a_tie_into_a_unit_that_does_not_use_the_mesh_is_refused() -> None:
    """The parent would have to take over a parameter of a mesh that it was not given."""
    data, pairs = meshes()
    model = build()
    model[1].experts.up = model[0].experts.up
    for layer in model:
        fsdp2.fully_shard(layer, mesh=data, shard_placement_fn=choose(layer, pairs))
    with pytest.raises(fsdp2.ConfigError, match=r"experts\.up is tied across units"):
        fsdp2.fully_shard(model, mesh=data)


@ranks(4)
def test_copies_and_pickles_train_alike() -> None:
    """A deep copy and an unpickled model have both groups, and train the same."""
    model = make()
    model(my_rows(batch_of(9))).sum().backward()
    model.zero_grad()
    stream = io.BytesIO()
    pickle.dump(model, stream)
    for twin in (copy.deepcopy(model), pickle.loads(stream.getvalue()), model):
        assert len(unit_of(twin[0]).groups) == 2
        train(twin, steps=2)


@ranks(4)
def test_states_load_through_distribute_tensor() -> None:
    """A whole state, distributed as each parameter is, loads into parameters of both meshes."""
    model, reference = make(), build()
    load_a_whole_state(model, reference)
    train(model, reference)


@pytest.mark.parametrize("reduce_dtype", with_slow([None, torch.float32], [torch.float32]))
@ranks(4)
def test_accumulation_without_sync(reduce_dtype: torch.dtype | None) -> None:
    """Three backwards, of which the last syncs, give the sum of three global gradients."""
    model, reference = (
        make(mp_policy=fsdp2.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)),
        build(),
    )
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        model(my_rows(batch_of(step))).square().mean().backward()
        reference(batch_of(step)).square().mean().backward()
    check_gradients(model, reference, RTOL if reduce_dtype is None else 1e-6)


@ranks(4)
def test_mixed_precision() -> None:
    """Compute in float32 with float64 weights on both meshes: gradients are right to 1e-5."""
    model, reference = make(mp_policy=IN_FP32), build()
    model(my_rows(batch_of(0))).square().mean().backward()
    reference(batch_of(0)).square().mean().backward()
    check_gradients(model, reference, 1e-5)


@ranks(2)
def test_what_is_no_mesh_is_said_at_once() -> None:
    """A wrong mesh_info raises ConfigError that names the parameter, and changes nothing."""
    long = init_device_mesh(DEVICE, (1, 2, 1), mesh_dim_names=("a", "b", "c"))
    data = init_device_mesh(DEVICE, (2,), mesh_dim_names=("data",))
    cases: list[tuple[Any, str]] = [
        ("edp", r"0\.experts\.up: .*mesh_info='edp'"),
        (long, r"0\.experts\.up: .*mesh of 3 dims"),
        (SimpleNamespace(mesh=long, shard_mesh_dim=1), r"0\.experts\.up: .*Return a slice"),
        (SimpleNamespace(mesh=None), r"0\.experts\.up: .*Return a 1-D mesh"),
    ]
    for info, match in cases:
        model = build()
        with pytest.raises(fsdp2.ConfigError, match=match):
            fsdp2.fully_shard(model, mesh=data, shard_placement_fn=choose(model, info))
        assert type(model) is nn.Sequential
        assert not any(isinstance(p, DTensor) for p in model.parameters())

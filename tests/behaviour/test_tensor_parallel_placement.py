"""Promise: a tensor-parallel parameter is split again, and full_tensor() undoes both."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp2
from tests.behaviour.test_tensor_parallel import in_short
from tests.kit.in_turn import shard_each
from tests.kit.pool import ranks_that_share as ranks
from tests.kit.slow import with_slow
from tests.kit.tensor_parallel import Transformer, mesh_of, sequence_parallel

SHAPES = [(16, 8), (30, 13), (13, 29), (1, 5), (3, 1), (0, 4)]
CHOICES: list[Placement] = [Shard(0), Shard(1), Replicate()]


class Holder(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def sharded(
    values: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], dim: int, *outer: str
) -> Any:
    """Place ``values`` over all axes of a mesh but ``outer``, then shard them over ``outer``."""
    inner = tuple(name for name in mesh.mesh_dim_names or () if name not in outer)
    module = Holder(distribute_tensor(values, mesh[inner], placements))
    fsdp2.fully_shard(module, mesh=mesh[outer], shard_placement_fn=lambda param: Shard(dim))
    return module.weight


def chunk(tensor: Tensor, dim: int, index: int, count: int) -> Tensor:
    chunks = torch.chunk(tensor, count, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def expected_shard(
    values: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], dim: int
) -> Tensor:
    """Return this rank's rows: the inner axes split first, from the left, then ``data``."""
    inner = [name for name in mesh.mesh_dim_names or () if name not in ("data", "replicate")]
    for name, placement in zip(inner, placements, strict=True):
        if isinstance(placement, Shard):
            values = chunk(values, placement.dim, mesh.get_local_rank(name), mesh[name].size())
    return chunk(values, dim, mesh.get_local_rank("data"), mesh["data"].size())


def numbered(shape: Sequence[int]) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(*shape)


AXES: list[dict[str, int]] = [
    {"data": 2, "tensor": 2},
    {"data": 2, "expert": 1, "tensor": 2},
    {"data": 1, "expert": 2, "tensor": 2},
    {"data": 2, "expert": 2, "tensor": 1},
    {"replicate": 2, "data": 1, "tensor": 2},
    {"replicate": 1, "data": 2, "tensor": 2},
]


@pytest.mark.parametrize("axes", with_slow(AXES, [*AXES[:2], *AXES[4:]]), ids=in_short)
@ranks(4)
def test_a_shard_of_a_shard(axes: dict[str, int]) -> None:
    """Data-parallel ranks chunk what a tensor-parallel rank has; full_tensor() is the original.

    Two inner axes may split one dim or two, evenly or not. A replicate axis stands before both
    others in the placements.
    """
    mesh = mesh_of(**axes)
    outer = [name for name in axes if name in ("replicate", "data")]
    for shape, own, dim in itertools.product(
        SHAPES if len(axes) == 2 else [(30, 13), (3, 1)],
        itertools.product(CHOICES, repeat=len(axes) - len(outer)),
        (0, 1),
    ):
        values = numbered(shape)
        weight = sharded(values, mesh, own, dim, *outer)
        case = f"{shape} {own} dim {dim}"
        assert torch.equal(weight.to_local(), expected_shard(values, mesh, own, dim)), case
        assert weight.shape == values.shape, case
        assert weight.stride() == values.stride(), case
        assert weight.placements[len(outer) :] == own, case
        assert weight.placements[0] == Replicate() or "replicate" not in axes, case
        assert torch.equal(weight.full_tensor(), values), case


@pytest.mark.parametrize("dim", with_slow([0, 1], [1]))
@ranks(4)
def test_whole_values_are_distributed_to_a_parameters_placements(dim: int) -> None:
    """A full state dict loads by distributing each tensor as its parameter lies.

    torch's distribute_tensor scatters equal shards of a strided placement only, and says so by an
    AssertionError. Going over a replicated DTensor works for every shape.
    """
    mesh = mesh_of(data=2, tensor=2)
    for shape, own in itertools.product(SHAPES, CHOICES):
        weight, values = sharded(torch.zeros(shape), mesh, [own], dim, "data"), numbered(shape)
        whole = distribute_tensor(values, weight.device_mesh, [Replicate(), Replicate()])
        loaded = whole.redistribute(placements=weight.placements)
        with torch.no_grad():
            weight.copy_(loaded)
        case = f"{shape} {own} dim {dim}"
        assert torch.equal(weight.to_local(), expected_shard(values, mesh, [own], dim)), case
        assert torch.equal(weight.full_tensor(), values), case
        if shape == (16, 8):
            scattered = distribute_tensor(values, weight.device_mesh, weight.placements)
            assert torch.equal(scattered.to_local(), weight.to_local()), case


@pytest.mark.parametrize("own", with_slow(CHOICES, [Shard(1)]), ids=str)
@ranks(4)
def test_optimizer_state_and_norms_are_of_the_whole(own: Placement) -> None:
    """A norm over a shard of a shard is that of the tensor; Adam's moments lie as the parameter."""
    mesh = mesh_of(data=2, tensor=2)
    for shape in SHAPES[:5]:
        values = numbered(shape)
        weight = sharded(values, mesh, [own], 0, "data")
        torch.testing.assert_close(weight.norm().full_tensor(), values.norm())
        weight.grad = weight.detach().clone()
        optimizer = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0)
        optimizer.step()
        state = optimizer.state[weight]
        assert state["exp_avg"].placements == weight.placements
        torch.testing.assert_close(state["exp_avg"].full_tensor(), 0.1 * values)
        torch.testing.assert_close(weight.full_tensor(), values - 0.5 * values.sign())


# --- eight ranks of which one is real -------------------------------------------------------------


def eight(rank: int) -> None:
    """Be one rank of eight whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)


@pytest.mark.parametrize("names", [("data",), ("replicate", "data")])
@pytest.mark.parametrize("global_rank", with_slow([0, 3, 6], [3]))
@ranks(1, with_process_group=False)
def test_shards_and_specs_are_torchs(names: tuple[str, ...], global_rank: int) -> None:
    """Names, specs (placements, mesh, shape, stride) and local shapes are those of torch's."""
    eight(global_rank)
    sizes = (
        {"replicate": 2, "data": 2, "tensor": 2} if len(names) == 2 else {"data": 4, "tensor": 2}
    )
    mesh, found = mesh_of(**sizes), []
    for library in (fsdp2, torch_fsdp):
        model = Transformer()
        sequence_parallel(model, mesh["tensor"])
        shard_each(*model.blocks, model, library=library, mesh=mesh[names])
        found.append(dict(model.named_parameters()))
    assert list(found[0]) == list(found[1])
    for name, ours in found[0].items():
        theirs = found[1][name]
        assert ours.placements == theirs.placements, name
        assert ours.device_mesh == theirs.device_mesh, name
        assert ours._spec == theirs._spec, name
        assert ours.stride() == theirs.stride(), name
        assert ours.to_local().shape == theirs.to_local().shape, name
        assert ours.to_local().stride() == theirs.to_local().stride(), name


@pytest.mark.parametrize("order", list(itertools.permutations(("data", "expert", "tensor"))))
@ranks(1, with_process_group=False)
def test_two_inner_axes_as_torch_places_them(order: tuple[str, ...]) -> None:
    """Specs are torch's wherever the data axis lies in the user's mesh."""
    eight(5)
    mesh = mesh_of(**dict.fromkeys(order, 2))
    inner = tuple(name for name in order if name != "data")
    for own, dim in itertools.product(itertools.product(CHOICES, CHOICES), (0, 1)):
        found = []
        for library in (fsdp2, torch_fsdp):
            module = Holder(distribute_tensor(torch.zeros(16, 8), mesh[inner], own))
            library.fully_shard(
                module, mesh=mesh["data"], shard_placement_fn=lambda param, dim=dim: Shard(dim)
            )
            found.append(module.weight)
        ours, theirs = found
        assert ours._spec == theirs._spec, f"{own} dim {dim}"
        assert ours.to_local().shape == theirs.to_local().shape, f"{own} dim {dim}"


@ranks(1, with_process_group=False)
def test_more_inner_axes_than_torch_takes() -> None:
    """Three inner axes and a replicate axis make a spec over five, with one rule."""
    eight(7)
    mesh = mesh_of(replicate=2, data=2, context=1, expert=2, tensor=1)
    own: list[Placement] = [Shard(0), Shard(0), Shard(1)]
    weight = sharded(torch.zeros(13, 4), mesh, own, 0, "replicate", "data")
    assert weight.device_mesh.mesh_dim_names == (
        "replicate",
        "data",
        "context",
        "expert",
        "tensor",
    )
    assert weight.placements[0] == Replicate()
    assert weight.placements[1].split_factor == 2
    assert weight.placements[2:] == tuple(own)
    assert weight.to_local().shape == (3, 4)


@ranks(1, with_process_group=False)
def test_flattened_and_unflattened_axes() -> None:
    """Axes that the user merged or split again are axes like others."""
    eight(6)
    mesh = mesh_of(data=2, context=2, tensor=2)
    flat = mesh["data", "context"]._flatten("both")
    module = Holder(distribute_tensor(torch.zeros(30, 2), mesh["tensor"], [Shard(0)]))
    fsdp2.fully_shard(module, mesh=flat)
    assert module.weight.device_mesh.mesh_dim_names == ("both", "tensor")  # type: ignore[attr-defined]
    assert module.weight.to_local().shape == (3, 2)  # type: ignore[attr-defined]  # 15 in 4, 4, 4, 3
    world = mesh_of(world=8)
    split = world._unflatten(0, (4, 2), ("data", "tensor"))
    module = Holder(distribute_tensor(torch.zeros(30, 2), split["tensor"], [Shard(0)]))
    fsdp2.fully_shard(module, mesh=split["data"])
    assert module.weight.device_mesh.mesh_dim_names == ("data", "tensor")  # type: ignore[attr-defined]
    assert module.weight.to_local().shape == (3, 2)  # type: ignore[attr-defined]

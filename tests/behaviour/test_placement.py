"""Promise: sharded parameters are DTensors placed as asked, holding `torch.chunk` chunks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

import fsdp2
from tests.kit.models import CASES, Case, floats, seeded, stack
from tests.kit.parity import Pair, assert_same, make_mesh, names_of, shard, train_alike
from tests.kit.pool import ranks
from tests.kit.slow import with_slow

PlacementFn = Callable[[nn.Parameter], Placement | None]


class Odd(nn.Module):
    """Parameters of one to four dims, none of them even."""

    def __init__(self) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.randn(13) / 4)
        self.matrix = nn.Parameter(torch.randn(29, 13) / 4)
        self.cube = nn.Parameter(torch.randn(3, 29, 5) / 4)
        self.four = nn.Parameter(torch.randn(1, 5, 7, 3) / 4)
        self.down = nn.Linear(21, 13)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh((x + self.vector) @ self.matrix.t())
        hidden = torch.einsum("bh,chd,ndef->bnef", hidden, self.cube, self.four)
        return x + self.down(torch.tanh(hidden).flatten(1))


ODD = Case(stack(Odd, 2), CASES["stack"].units, floats)


def last_dim(parameter: nn.Parameter) -> Placement | None:
    return Shard(parameter.dim() - 1)


def negative_dim(parameter: nn.Parameter) -> Placement | None:
    return Shard(-1)


def largest_dim(parameter: nn.Parameter) -> Placement | None:
    return Shard(max(range(parameter.dim()), key=lambda dim: parameter.shape[dim]))


def mixed(parameter: nn.Parameter) -> Placement | None:
    """Vectors whole on every rank, matrices on dim 1, the rest by default."""
    return Replicate() if parameter.dim() == 1 else Shard(1) if parameter.dim() == 2 else None


FUNCTIONS: dict[str, PlacementFn] = {
    f.__name__: f for f in (last_dim, negative_dim, largest_dim, mixed)
}


def chunk(tensor: Tensor, placement: Placement, index: int, count: int) -> Tensor:
    """Return what `index` of `count` ranks should hold, empty if the rows run out before."""
    if not isinstance(placement, Shard):
        return tensor
    chunks = torch.chunk(tensor, count, placement.dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(placement.dim, 0, 0)


def expected_placement(function: PlacementFn | None, parameter: nn.Parameter) -> Placement:
    placement = (function(parameter) if function is not None else None) or Shard(0)
    if isinstance(placement, Shard):
        return Shard(placement.dim % max(1, parameter.dim()))
    return placement


@ranks(2, 3, 4)
def test_rows_are_chunked_by_default(rank: int, world_size: int) -> None:
    """And a replicate axis repeats the chunks."""
    for name, replicas in itertools.product(("stack", "one_row", "few_rows"), (1, 2)):
        count = world_size // replicas
        if count * replicas != world_size:
            continue
        mesh = make_mesh(*([replicas] if replicas > 1 else []), count)
        case = CASES[name]
        whole, model = names_of(seeded(case.build)), shard(seeded(case.build), case, mesh=mesh)
        for fqn, parameter in names_of(model).items():
            assert isinstance(parameter, nn.Parameter), fqn
            assert parameter.placements == (Replicate(),) * (replicas - 1) + (Shard(0),), fqn
            assert parameter.device_mesh == mesh, fqn
            assert parameter.shape == whole[fqn].shape, fqn
            assert parameter.stride() == whole[fqn].stride(), fqn
            expected = chunk(whole[fqn], Shard(0), rank % count, count)
            assert torch.equal(parameter.to_local(), expected), fqn


@pytest.mark.parametrize("function", FUNCTIONS)
@ranks(2, 3)
def test_any_dim_is_chunked_like_rows(function: str, rank: int, world_size: int) -> None:
    place = FUNCTIONS[function]
    whole = names_of(seeded(ODD.build))
    model = shard(seeded(ODD.build), ODD, shard_placement_fn=place)
    for fqn, parameter in names_of(model).items():
        placement = expected_placement(place, whole[fqn])
        assert isinstance(parameter, DTensor), fqn
        assert parameter.placements == (placement,), fqn
        expected = chunk(whole[fqn], placement, rank, world_size)
        assert torch.equal(parameter.to_local(), expected), fqn


@pytest.mark.parametrize("function", with_slow(FUNCTIONS, ["largest_dim", "mixed"]))
@ranks(2, 3, 4)
def test_any_dim_trains_right(function: str, world_size: int) -> None:
    """On four ranks with a replicate axis."""
    axes = (2, 2) if world_size == 4 else ()
    pair = Pair(ODD, shard_placement_fn=FUNCTIONS[function], mesh=make_mesh(*axes))
    pair.train(steps=2)
    for fqn, parameter in names_of(pair.model).items():
        placement = expected_placement(FUNCTIONS[function], names_of(pair.reference)[fqn])
        assert parameter.placements == (*[Replicate()] * (len(axes) // 2), placement), fqn


@pytest.mark.parametrize("reshard_after_forward", with_slow([True, False, 2], [2]))
@ranks(4)
def test_any_dim_trains_right_with_each_way_to_reshard(reshard_after_forward: bool | int) -> None:
    Pair(ODD, shard_placement_fn=last_dim, reshard_after_forward=reshard_after_forward).train(
        steps=2
    )


class Even(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(13, 8)
        self.down = nn.Linear(8, 13, bias=False)
        self.back = nn.Parameter(torch.randn(13, 2, 6) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return (
            x
            + self.down(self.up(x).tanh())
            + torch.einsum("bi,ijk->bijk", x, self.back).mean((2, 3))
        )


def up_by_columns(parameter: nn.Parameter) -> Placement | None:
    """Pick an even dim other than the first where there is one, which torch's own can do too."""
    if parameter.dim() == 3:
        return Shard(2)
    return Shard(1) if parameter.shape == (13, 8) else None


@ranks(2)
def test_an_even_dim_trains_like_torch() -> None:
    case = Case(stack(Even), CASES["stack"].units, floats)
    train_alike(case, shard_placement_fn=up_by_columns)


@ranks(2)
def test_replicated_parameters_have_whole_gradients() -> None:
    pair = Pair("stack", shard_placement_fn=lambda p: Replicate() if p.dim() == 1 else None)
    pair.backward()
    for fqn, parameter in names_of(pair.model).items():
        gradient = parameter.grad
        assert gradient.placements == parameter.placements, fqn
        if parameter.dim() == 1:
            assert gradient.placements == (Replicate(),), fqn
            assert_same(gradient.to_local(), names_of(pair.reference)[fqn].grad, fqn)


@ranks(2)
def test_optimizer_states_are_placed_like_parameters() -> None:
    pair = Pair(ODD, optimizer=torch.optim.AdamW, shard_placement_fn=last_dim)
    pair.backward()
    pair.optimizer.step()
    for parameter in pair.model.parameters():
        state = pair.optimizer.state[parameter]["exp_avg"]
        assert state.placements == parameter.placements


@ranks(2)
def test_buffers_and_ignored_parameters_stay_plain() -> None:
    case = CASES["untied_lm"]
    model = seeded(case.build)
    ignored, buffer = model.embed.weight, model.position
    for unit in case.units(model):
        fsdp2.fully_shard(unit)
    fsdp2.fully_shard(model, ignored_params={ignored})
    assert model.embed.weight is ignored
    assert model.position is buffer
    others = {n: p for n, p in names_of(model).items() if p is not ignored}
    assert others
    assert all(isinstance(p, DTensor) for p in others.values())
    batch = case.batch(4)
    model(*batch.args).mean().backward()
    assert model.embed.weight is ignored
    assert type(ignored.grad) is Tensor


@ranks(2, with_process_group=False)
def test_mesh_none_shards_over_the_default_group(rank: int, world_size: int) -> None:
    model = fsdp2.fully_shard(seeded(CASES["stack"].build))
    parameter = model.inp.weight
    assert dist.is_initialized()
    assert dist.get_world_size() == world_size
    assert parameter.device_mesh.size() == world_size
    assert torch.equal(parameter.to_local(), seeded(CASES["stack"].build).inp.weight.chunk(2)[rank])

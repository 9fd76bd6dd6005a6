"""Owners for optimizers that users write: the plan, and whole tensors there and back.

Owns ``plan_owners``, ``to_owners`` and ``from_owners``. ``whole`` uses the same pieces of
``_core.transfer``, in rounds that it steps between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._core.base import torch_dtensor
from fsdp2._core.base.arguments import check_count, check_function, wrong_type, wrong_value
from fsdp2._core.comm.process_mesh import operation
from fsdp2._core.params.deals import newton_schulz_flops
from fsdp2._core.transfer.chunk_plan import Blocks, CutOf
from fsdp2._core.transfer.crew import Crew, part_of, stream
from fsdp2._core.transfer.owners import Cargo, Cut, assign

MAX_BYTES = 256 << 20
"""Default cap on the buffers of the rounds that are in memory at a time."""

MOST_RANKS = 1 << 20

Cost = Callable[[tuple[int, ...]], float]


def cost_of(who: str, cost: Cost, shape: tuple[int, ...]) -> float:
    """Return what a matrix costs.

    Raises:
        ConfigError: the function returned no number, or a negative one.
    """
    found = cost(shape)
    if not isinstance(found, int | float) or not 0 <= found < math.inf:
        raise wrong_value(who, f"the cost of {shape}", "a number of at least 0", found)
    return float(found)


@dataclass(frozen=True)
class Owners:
    """Who owns which tensor: the same on every rank.

    Attributes:
        owners: for each tensor, the rank that owns it: a global rank, or one of ``ranks`` that were
            imagined.
        costs: for each rank, the cost of what it owns (FLOPs, unless a cost was given).
        nbytes: for each rank, the bytes of what it owns.
    """

    owners: tuple[int, ...]
    costs: tuple[float, ...]
    nbytes: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """The cost of the busiest rank over the mean of all: 1 is best.

        It cannot be less than the costliest tensor over the mean.
        """
        mean = sum(self.costs) / len(self.costs)
        return max(self.costs) / mean if mean else 1.0


def plan_owners(
    tensors: Sequence[Tensor | Sequence[int]],
    *,
    ranks: int | None = None,
    cost: Cost | None = None,
    itemsize: int = 4,
) -> Owners:
    """Choose an owner for each tensor, so that all ranks have as much to do.

    Args:
        tensors: tensors on any meshes, or, with ``ranks``, shapes.
        ranks: of an imagined mesh, over which each shape's first dim is sharded.
        cost: of a tensor, by its shape; None: FLOPs of five Newton-Schulz steps.
        itemsize: bytes of an element of a shape.

    Raises:
        ConfigError: not tensors, or shapes without ``ranks``.
    """
    _listed("plan_owners", "tensors", tensors)
    check_function("plan_owners", "cost", cost, "a function of a shape or None")
    measure = cost or newton_schulz_flops
    if ranks is not None:
        check_count("plan_owners", "ranks", ranks)
        check_count("plan_owners", "itemsize", itemsize)
        if ranks > MOST_RANKS:
            raise wrong_value("plan_owners", "ranks", f"at most {MOST_RANKS:,}", ranks)
        shapes = [_shape_of(one) for one in tensors]
        places = tuple((rank,) for rank in range(ranks))
        cuts = [Cut(Blocks(s, (ranks,), (CutOf(0, 0),) if s else ()), places) for s in shapes]
        return _plan(cuts, measure, [itemsize] * len(cuts), range(ranks))
    fleets = _fleets(tensors)
    if len(fleets) == 1:
        (crew, indices), *_ = fleets
        cuts = [crew.cut(f"tensor {i}", _checked(tensors[i])) for i in indices]
        sizes = [_checked(tensors[i]).dtype.itemsize for i in indices]
        return _plan(cuts, measure, sizes, crew.ranks)
    world = dist.get_world_size() if dist.is_initialized() else 1
    owners, costs, nbytes = [0] * len(tensors), [0.0] * world, [0] * world
    for crew, indices in fleets:
        part = plan_owners([tensors[i] for i in indices], cost=cost)
        for index, owner in zip(indices, part.owners, strict=True):
            owners[index] = owner
        for rank, one, size in zip(crew.ranks, part.costs, part.nbytes, strict=True):
            costs[rank] += one
            nbytes[rank] += size
    return Owners(tuple(owners), tuple(costs), tuple(nbytes))


def _plan(
    cuts: Sequence[Cut], cost: Cost, itemsizes: Sequence[int], ranks: Sequence[int]
) -> Owners:
    costs = [cost_of("plan_owners", cost, cut.shape) for cut in cuts]
    sizes = [cut.numel * itemsize for cut, itemsize in zip(cuts, itemsizes, strict=True)]
    chosen = assign(cuts, costs, sizes)
    loads, held = [0.0] * len(ranks), [0] * len(ranks)
    for owner, one, size in zip(chosen, costs, sizes, strict=True):
        loads[owner] += one
        held[owner] += size
    return Owners(tuple(ranks[owner] for owner in chosen), tuple(loads), tuple(held))


def _listed(who: str, name: str, given: object) -> None:
    if not isinstance(given, list | tuple):
        raise wrong_type(who, name, "a list of tensors", given)


def _shape_of(given: object) -> tuple[int, ...]:
    if isinstance(given, Tensor):
        return tuple(given.shape)
    sizes = tuple(given) if isinstance(given, list | tuple) else (None,)
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        expected = "tensors, or shapes of sizes of at least 0"
        raise wrong_type("plan_owners", "tensors", expected, given)
    return sizes


def _checked(tensor: object) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise wrong_type("plan_owners", "tensors", "tensors, or shapes with ranks=", tensor)
    return tensor


def _fleets(tensors: Sequence[object]) -> list[tuple[Crew, list[int]]]:
    """Return the crews of some tensors, with the places of theirs. Collective, the first time."""
    found: dict[tuple[int, ...], tuple[Crew, list[int]]] = {}
    for index, one in enumerate(tensors):
        tensor = _checked(one)
        crew = Crew.of(tensor.device_mesh) if isinstance(tensor, DTensor) else Crew.alone()
        found.setdefault(crew.ranks, (crew, []))[1].append(index)
    return list(found.values())


def _cargos(
    what: str, crew: Crew, tensors: Sequence[Tensor], indices: Sequence[int], owners: Owners
) -> list[Cargo]:
    if not isinstance(owners, Owners):
        raise wrong_type(what, "owners", "what plan_owners returned", owners)
    if len(owners.owners) != len(tensors):
        raise wrong_value(
            what, "owners", f"a plan of {len(tensors)} tensors", f"{len(owners.owners)} owners"
        )
    foreign = [index for index in indices if owners.owners[index] not in crew.ranks]
    if foreign:
        raise wrong_value(
            what,
            "owners",
            f"an owner of tensor {foreign[0]} among its ranks, {list(crew.ranks)}",
            owners.owners[foreign[0]],
            "Pass what plan_owners returned for these tensors.",
        )
    return [
        Cargo(
            crew.cut(f"tensor {index}", tensors[index]),
            crew.ranks.index(owners.owners[index]),
            tensors[index].dtype.itemsize,
        )
        for index in indices
    ]


@torch.no_grad()
def to_owners(
    tensors: Sequence[Tensor], owners: Owners, *, max_bytes: int = MAX_BYTES
) -> list[Tensor | None]:
    """Return each tensor whole on its owner, and None on the other ranks.

    Collective over the tensors' meshes. Parts travel in rounds, one all-to-all each, and no rank
    has more than ``max_bytes`` of them beside what it owns; nothing is padded.

    Args:
        tensors: DTensors that shard or replicate any dims; plain ones are owned by every rank.
        owners: what ``plan_owners`` returned for tensors of these shapes.

    Raises:
        UnsupportedError: a partial sum, or a tensor that wraps others.
        ConfigError: a plan of other tensors.
    """
    _listed("to_owners", "tensors", tensors)
    check_count("to_owners", "max_bytes", max_bytes)
    found: list[Tensor | None] = [None] * len(tensors)
    with operation("to_owners"):
        for crew, indices in _fleets(tensors):
            cargos = _cargos("to_owners", crew, tensors, indices, owners)
            own = [tensors[index] for index in indices]
            for place, (tensor, cargo) in enumerate(zip(own, cargos, strict=True)):
                if cargo.owner == crew.me:
                    local = torch_dtensor.local_part(tensor)
                    found[indices[place]] = torch.empty_strided(
                        tuple(tensor.shape), tensor.stride(), dtype=local.dtype, device=local.device
                    )

            def part(
                place: int,
                crew: Crew = crew,
                own: Sequence[Tensor] = own,
                cargos: Sequence[Cargo] = cargos,
            ) -> Tensor:
                return part_of(cargos[place].cut, own[place], crew.me)

            dtypes = [tensor.dtype for tensor in own]
            device = torch_dtensor.local_part(own[0]).device
            flights = stream(crew, cargos, dtypes, part, device, max_bytes, to_owners=True)
            for _, parts in flights:
                for place, piece, value in parts:
                    room = found[indices[place]]
                    assert room is not None
                    room[piece.region.slices].copy_(value)
    return found


@torch.no_grad()
def from_owners(
    whole: Sequence[Tensor | None],
    tensors: Sequence[Tensor],
    owners: Owners,
    *,
    max_bytes: int = MAX_BYTES,
) -> None:
    """Write what owners have to the shards of ``tensors``, in place.

    Collective over the tensors' meshes, as ``to_owners``, replicas included.

    Args:
        whole: for each tensor, its new value on its owner; on other ranks it is not looked at.
        tensors: DTensors (or plain tensors) to write to.

    Raises:
        ConfigError: an owner has no value, or one of another shape; a plan of other tensors.
    """
    _listed("from_owners", "tensors", tensors)
    _listed("from_owners", "whole", whole)
    check_count("from_owners", "max_bytes", max_bytes)
    with operation("from_owners"):
        for crew, indices in _fleets(tensors):
            cargos = _cargos("from_owners", crew, tensors, indices, owners)
            own = [tensors[index] for index in indices]
            with crew.grid.together("from_owners"):
                if len(whole) != len(tensors):
                    expected = f"{len(tensors)} values, one a tensor"
                    raise wrong_value("from_owners", "whole", expected, len(whole))
                for index, cargo in zip(indices, cargos, strict=True):
                    value = whole[index]
                    if cargo.owner == crew.me and (
                        value is None or tuple(value.shape) != tuple(tensors[index].shape)
                    ):
                        raise wrong_value(
                            "from_owners",
                            f"whole[{index}]",
                            f"a tensor of shape {tuple(tensors[index].shape)} on its owner",
                            None if value is None else tuple(value.shape),
                        )

            def value_of(place: int, indices: Sequence[int] = indices) -> Tensor:
                value = whole[indices[place]]
                assert value is not None
                return value

            dtypes = [tensor.dtype for tensor in own]
            device = torch_dtensor.local_part(own[0]).device
            for _, parts in stream(
                crew, cargos, dtypes, value_of, device, max_bytes, to_owners=False
            ):
                for place, _, value in parts:
                    part_of(cargos[place].cut, own[place], crew.me).copy_(value)

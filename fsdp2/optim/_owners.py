"""Owners for user-written optimizers: ``plan_owners``, ``to_owners`` and ``from_owners``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._core.base import torch_dtensor
from fsdp2._core.base.errors import check_count, check_function, wrong_type, wrong_value
from fsdp2._core.comm.process_mesh import operation
from fsdp2._core.params.deals import newton_schulz_flops
from fsdp2._core.transfer.chunk_plan import Blocks, CutOf
from fsdp2._core.transfer.owners import Cargo, Cut, assign
from fsdp2._core.transfer.peers import Freight, Peers

MAX_BYTES = 256 << 20
"""Default upper bound on the bytes of buffers in memory, for all rounds in flight together."""

MOST_RANKS = 1 << 20

Cost = Callable[[tuple[int, ...]], float]


def cost_of(who: str, cost: Cost, shape: tuple[int, ...]) -> float:
    """Return the cost of a matrix. Raise ConfigError unless it is a non-negative number."""
    found = cost(shape)
    if not isinstance(found, int | float) or not 0 <= found < math.inf:
        raise wrong_value(who, f"the cost of {shape}", "a non-negative number", found)
    return float(found)


@dataclass(frozen=True)
class Owners:
    """The owner of each tensor. The plan is the same on all ranks.

    Attributes:
        owners: for each tensor, the global rank that owns it, or one of the simulated ``ranks``.
        costs: for each rank, the total cost of its tensors (FLOPs, unless a cost was given).
        nbytes: for each rank, the total bytes of its tensors.
    """

    owners: tuple[int, ...]
    costs: tuple[float, ...]
    nbytes: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """The busiest rank's cost divided by the mean cost per rank: 1 is optimal.

        The imbalance is at least the costliest tensor's cost divided by the mean cost per rank.
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
    """Choose an owner for each tensor, so that the load is balanced over ranks.

    Args:
        tensors: tensors on any meshes; if ``ranks`` is given, shapes.
        ranks: size of a simulated mesh, over which each shape's first dim is sharded.
        cost: function from a tensor's shape to its cost; None: FLOPs of five Newton-Schulz steps.
        itemsize: bytes per element, for shapes.

    Raises:
        ConfigError: ``tensors`` is not a list of tensors, or has shapes although ``ranks`` is None.
    """
    _listed("plan_owners", "tensors", tensors)
    check_function("plan_owners", "cost", cost, "a function of a shape or None")
    if ranks is not None:
        check_count("plan_owners", "ranks", ranks)
        check_count("plan_owners", "itemsize", itemsize)
        if ranks > MOST_RANKS:
            raise wrong_value("plan_owners", "ranks", f"at most {MOST_RANKS:,}", ranks)
        places = tuple((rank,) for rank in range(ranks))
        shapes = map(_shape_of, tensors)
        cuts = [Cut(Blocks(s, (ranks,), (CutOf(0, 0),) if s else ()), places) for s in shapes]
        parts = [(tuple(range(ranks)), [*range(len(cuts))], cuts)]
        itemsizes = [itemsize] * len(cuts)
    else:
        given = cast(Sequence[Tensor], tensors)
        parts = [
            (peers.ranks, indices, [peers.cut(f"tensor {i}", given[i]) for i in indices])
            for peers, indices in _fleets(given)
        ]
        itemsizes = [tensor.dtype.itemsize for tensor in given]
    world = dist.get_world_size() if dist.is_initialized() else 1
    count = len(parts[0][0]) if len(parts) == 1 else world
    owners, loads, held = [0] * len(tensors), [0.0] * count, [0] * count
    for of_part, indices, cuts in parts:
        costs = [cost_of("plan_owners", cost or newton_schulz_flops, cut.shape) for cut in cuts]
        sizes = [cut.numel * itemsizes[i] for i, cut in zip(indices, cuts, strict=True)]
        chosen = assign(cuts, costs, sizes)
        for index, owner, one, size in zip(indices, chosen, costs, sizes, strict=True):
            owners[index] = of_part[owner]
            place = owner if len(parts) == 1 else owners[index]
            loads[place] += one
            held[place] += size
    return Owners(tuple(owners), tuple(loads), tuple(held))


def _listed(who: str, name: str, given: object) -> None:
    if not isinstance(given, list | tuple):
        raise wrong_type(who, name, "a list of tensors", given)


def _shape_of(given: object) -> tuple[int, ...]:
    if isinstance(given, Tensor):
        return tuple(given.shape)
    sizes = tuple(given) if isinstance(given, list | tuple) else (None,)
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        expected = "tensors, or shapes with sizes of at least 0"
        raise wrong_type("plan_owners", "tensors", expected, given)
    return sizes


def _checked(tensor: object) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise wrong_type("plan_owners", "tensors", "tensors, or shapes with ranks=", tensor)
    return tensor


def _fleets(tensors: Sequence[object]) -> list[tuple[Peers, list[int]]]:
    """Group the indices of tensors by the tensors' peers. Collective on first use."""
    found: dict[tuple[int, ...], tuple[Peers, list[int]]] = {}
    for index, one in enumerate(tensors):
        tensor = _checked(one)
        peers = Peers.of(tensor.device_mesh) if isinstance(tensor, DTensor) else Peers.alone()
        found.setdefault(peers.ranks, (peers, []))[1].append(index)
    return list(found.values())


def _freights(
    what: str, tensors: Sequence[Tensor], owners: Owners, max_bytes: int
) -> Iterator[tuple[list[int], Freight]]:
    """Yield the transfers among each group of peers, after the indices of their tensors."""
    fleets = _fleets(tensors)
    if not isinstance(owners, Owners):
        raise wrong_type(what, "owners", "a result of plan_owners", owners)
    if len(owners.owners) != len(tensors):
        raise wrong_value(
            what, "owners", f"a plan of {len(tensors)} tensors", f"{len(owners.owners)} owners"
        )
    for peers, indices in fleets:
        foreign = [index for index in indices if owners.owners[index] not in peers.ranks]
        if foreign:
            raise wrong_value(
                what,
                "owners",
                f"an owner of tensor {foreign[0]} among its ranks, {list(peers.ranks)}",
                owners.owners[foreign[0]],
                "Pass the result of plan_owners for these tensors.",
            )
        cargos = [
            Cargo(
                peers.cut(f"tensor {index}", tensors[index]),
                peers.ranks.index(owners.owners[index]),
                tensors[index].dtype,
            )
            for index in indices
        ]
        own = [tensors[index] for index in indices]
        yield indices, Freight(peers, own, cargos, max_bytes)


def _of_owners(wholes: Sequence[Tensor | None], indices: Sequence[int]) -> Callable[[int], Tensor]:
    return lambda place: cast(Tensor, wholes[indices[place]])


@torch.no_grad()
def to_owners(
    tensors: Sequence[Tensor], owners: Owners, *, max_bytes: int = MAX_BYTES
) -> list[Tensor | None]:
    """Return each tensor unsharded on its owner, and None on the other ranks.

    Collective over the tensors' meshes. Parts are sent in rounds, without padding. Each round is
    one all-to-all. Each rank uses at most ``max_bytes`` for buffers, besides the tensors it owns.

    Args:
        tensors: DTensors with any dims sharded or replicated; every rank owns plain tensors.
        owners: the result of ``plan_owners`` for tensors of these shapes.

    Raises:
        UnsupportedError: a tensor is a partial sum, or wraps other tensors.
        ConfigError: ``owners`` was planned for other tensors.
    """
    _listed("to_owners", "tensors", tensors)
    check_count("to_owners", "max_bytes", max_bytes)
    found: list[Tensor | None] = [None] * len(tensors)
    with operation("to_owners"):
        for indices, freight in _freights("to_owners", tensors, owners, max_bytes):
            for index, cargo in zip(indices, freight.cargos, strict=True):
                if cargo.owner == freight.peers.me:
                    tensor = tensors[index]
                    local = torch_dtensor.local_part(tensor)
                    found[index] = torch.empty_strided(
                        tuple(tensor.shape), tensor.stride(), dtype=local.dtype, device=local.device
                    )
            freight.to_owners(_of_owners(found, indices))
    return found


@torch.no_grad()
def from_owners(
    whole: Sequence[Tensor | None],
    tensors: Sequence[Tensor],
    owners: Owners,
    *,
    max_bytes: int = MAX_BYTES,
) -> None:
    """Write the owners' values to the shards of ``tensors``, in place.

    Collective over the tensors' meshes, like ``to_owners``; replicas are written too.

    Args:
        whole: for each tensor, its new value on its owner; ignored on other ranks.
        tensors: DTensors (or plain tensors) to write to.

    Raises:
        ConfigError: an owner's value is missing or has the wrong shape; ``owners`` was planned for
            other tensors.
    """
    _listed("from_owners", "tensors", tensors)
    _listed("from_owners", "whole", whole)
    check_count("from_owners", "max_bytes", max_bytes)
    with operation("from_owners"):
        for indices, freight in _freights("from_owners", tensors, owners, max_bytes):
            peers = freight.peers
            with peers.grid.together("from_owners"):
                if len(whole) != len(tensors):
                    expected = f"{len(tensors)} values, one per tensor"
                    raise wrong_value("from_owners", "whole", expected, len(whole))
                for index, cargo in zip(indices, freight.cargos, strict=True):
                    value, shape = whole[index], tuple(tensors[index].shape)
                    if cargo.owner == peers.me and (value is None or tuple(value.shape) != shape):
                        raise wrong_value(
                            "from_owners",
                            f"whole[{index}]",
                            f"a tensor of shape {shape} on its owner",
                            None if value is None else tuple(value.shape),
                        )
            freight.from_owners(_of_owners(whole, indices))

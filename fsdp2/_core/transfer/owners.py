"""Assign matrices to owners, and plan the traffic between shards and owners.

Works on integers only: independent of tensors, meshes and process groups. A *cargo* is the transfer
of one matrix. For each cargo, ``route`` intersects the *box* (region) from which one rank sends and
the box into which another rank receives. The first rank sends the overlap to the second.

[Note: owners]
Each *matrix* has one *owner* among the peers, which holds the full matrix. Each of the other peers
holds a *part* (a block, see [Note: chunks] in ``chunk_plan``). Replicas hold equal parts. Each part
is sent to the owner once, by the replica with the owner's coordinates on the replica axes. The
owner later sends the part back to all replicas. In a *round*, every rank sends one buffer to every
other rank. The buffer has the total size of its parts: it is not padded to the largest buffer's.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from fsdp2._core.params.layout import align
from fsdp2._core.transfer.chunk_plan import Blocks, Region, overlap, whole_region


@dataclass(frozen=True, eq=False)
class Cut:
    """Sharding of one matrix: ``blocks``, the peers' ``places``, and its batch index ``lead``."""

    blocks: Blocks
    places: tuple[tuple[int, ...], ...]
    lead: int | None = None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return self.blocks.shape if self.lead is None else self.blocks.shape[1:]

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    def part(self, rank: int) -> Region | None:
        """Return a rank's part, relative to the matrix; None if it is empty."""
        block = self.blocks.block(self.places[rank])
        if not block.numel:
            return None
        if self.lead is None:
            return block
        if not 0 <= self.lead - block.starts[0] < block.sizes[0]:
            return None
        return Region(block.starts[1:], block.sizes[1:])

    def sends(self, rank: int, owner: int) -> bool:
        """Return True if ``rank`` is the replica that sends its part to ``owner``."""
        own, there = self.places[rank], self.places[owner]
        cut = self.blocks.axes
        return all(axis in cut or own[axis] == there[axis] for axis in range(len(own)))

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """The ranks that hold the full matrix before any transfer."""
        parts = enumerate(map(self.part, range(len(self.places))))
        return tuple(rank for rank, part in parts if part and part.numel == self.numel)


def assign(cuts: Sequence[Cut], costs: Sequence[float], nbytes: Sequence[int]) -> list[int]:
    """Return the owner of each matrix. The result is the same on every rank. Matrices are assigned
    in decreasing order of cost, each to the rank with the least load or, if several have the same
    load, to the one with the fewest bytes. A rank that already holds the full matrix becomes its
    owner if the rank's load stays within an equal share; the matrix is then not sent. The owner of
    a matrix that is stored on one rank (``fsdp2.Whole``) is that rank, in one of the replicas.
    """
    if not cuts:
        return []
    ranks = len(cuts[0].places)
    share = sum(costs) / ranks
    loads, held = [0.0] * ranks, [0] * ranks
    owners = [0] * len(cuts)
    for index in sorted(range(len(cuts)), key=lambda i: (-costs[i], -nbytes[i], i)):
        cut, among = cuts[index], list(range(ranks))
        if cut.holders and any(part.owner is not None for part in cut.blocks.cuts):
            among = list(cut.holders)
        elif cut.holders and cut.blocks.axes:
            first = cut.holders[0]
            among = [first] if loads[first] + costs[index] <= share * 1.0001 else among
        owner = min(among, key=lambda rank: (loads[rank], held[rank], rank))
        owners[index] = owner
        loads[owner] += costs[index]
        held[owner] += nbytes[index]
    return owners


@dataclass(frozen=True, eq=False)
class Cargo:
    """The transfer of one matrix, in ``dtype``, to its owner or, if ``from_owner``, back."""

    cut: Cut
    owner: int
    dtype: torch.dtype
    from_owner: bool = False

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.cut.numel * self.itemsize

    @cached_property
    def back(self) -> Cargo:
        return replace(self, from_owner=True)

    def source(self, rank: int) -> Region | None:
        if self.from_owner:
            return self._of_owner(rank)
        return self.cut.part(rank) if self.cut.sends(rank, self.owner) else None

    def target(self, rank: int) -> Region | None:
        return self.cut.part(rank) if self.from_owner else self._of_owner(rank)

    def _of_owner(self, rank: int) -> Region | None:
        return whole_region(self.cut.shape) if rank == self.owner else None

    def travels(self, ranks: int) -> bool:
        box = self.target if self.from_owner else self.source
        return any(box(rank) is not None for rank in range(ranks) if rank != self.owner)


@dataclass(frozen=True)
class Part:
    """A part of a cargo at byte ``start`` of a buffer, and at slices ``at`` of a rank's box."""

    index: int
    start: int
    region: Region
    at: tuple[slice, ...]


@dataclass
class Route:
    """One rank's traffic in a round. ``is_local``: no rank sends anything to another rank."""

    sent_nbytes: list[int] = field(default_factory=list)
    received_nbytes: list[int] = field(default_factory=list)
    sent: list[Part] = field(default_factory=list)
    received: list[Part] = field(default_factory=list)
    is_local: bool = False


@functools.lru_cache(maxsize=256)  # every step repeats the same rounds
def route(me: int, ranks: int, cargos: tuple[Cargo, ...]) -> Route:
    """Plan one rank's traffic in a round that fills each target from all sources."""
    found = Route(is_local=not any(cargo.travels(ranks) for cargo in cargos))
    # widest elements first, so that each part starts at a multiple of its element size
    order = sorted(range(len(cargos)), key=lambda index: (-cargos[index].itemsize, index))
    for kept, sizes, is_sent in (
        (found.sent, found.sent_nbytes, True),
        (found.received, found.received_nbytes, False),
    ):
        boxes = ((i, cargos[i].source(me) if is_sent else cargos[i].target(me)) for i in order)
        own = [(index, box) for index, box in boxes if box is not None]
        end = 0
        for other in range(ranks):
            start = end
            for index, box in own:
                cargo = cargos[index]
                region = overlap(box, cargo.target(other) if is_sent else cargo.source(other))
                if region is not None:
                    kept.append(Part(index, end, region, region.inside(box)))
                    end += region.numel * cargo.itemsize
            end = start + align(end - start)
            sizes.append(end - start)
    return found


def rounds(cargos: Sequence[Cargo], ranks: int, max_nbytes: int) -> Iterator[list[int]]:
    """Yield the indices of each round's cargos. A round needs at most ``max_nbytes`` per rank for
    sent data, received data and results, unless it consists of a single larger cargo. The largest
    cargos of each owner come first, so that all owners have work until near the end.
    """
    queues: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(cargos)), key=lambda i: -cargos[i].nbytes):
        queues[cargos[index].owner].append(index)
    layers = itertools.zip_longest(*queues)
    order = [index for layer in layers for index in layer if index is not None]
    used, batch = [0] * ranks, list[int]()
    for index in order:
        cargo = cargos[index]
        sources = map(cargo.source, range(ranks))
        added = [0 if box is None else box.numel * cargo.itemsize for box in sources]
        added[cargo.owner] += 2 * cargo.nbytes
        total = [one + more for one, more in zip(used, added, strict=True)]
        if batch and max(total) > max_nbytes:
            yield batch
            batch, total = [], added
        batch.append(index)
        used = total
    if batch:
        yield batch

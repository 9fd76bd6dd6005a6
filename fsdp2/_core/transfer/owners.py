"""Who owns which matrix, and what travels between shards and owners: integers only.

Owns the choice of owners, the rounds in which matrices travel, and where each part lies in a buffer
of bytes. It must not know tensors, meshes or process groups.

[Note: owners]
A *matrix* has one *owner* among the ranks of its crew, who has all of it where the others have a
*part* each (a block, see [Note: chunks] in ``chunk_plan``). Replicas have equal parts: to the owner
each part travels once, from the replica whose place on the axes of replicas is the owner's; back it
travels to all of them. In a *round* every rank sends one buffer to every other rank, which has as
many bytes as the parts for it: nothing is padded to the largest.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fsdp2._core.params.layout import align
from fsdp2._core.transfer.chunk_plan import Blocks, Region


@dataclass(frozen=True, eq=False)
class Cut:
    """How one matrix lies on the ranks of its crew.

    ``blocks`` are those of its tensor, and ``places`` the places of the crew's ranks on the axes
    of these. ``lead``: it is one of the batch that the tensor's first dim counts.
    """

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
        """Return what a rank has, counted from the matrix' start; None if it has no element."""
        block = self.blocks.block(self.places[rank])
        if not block.numel:
            return None
        if self.lead is None:
            return block
        if not 0 <= self.lead - block.starts[0] < block.sizes[0]:
            return None
        return Region(block.starts[1:], block.sizes[1:])

    def row_of(self, rank: int) -> int:
        """Return which row of a rank's tensor is the matrix, if that has it."""
        assert self.lead is not None
        return self.lead - self.blocks.block(self.places[rank]).starts[0]

    def sends(self, rank: int, owner: int) -> bool:
        """True if a rank's part travels to the owner, and not an equal one of another replica."""
        own, there = self.places[rank], self.places[owner]
        cut = self.blocks.axes
        return all(axis in cut or own[axis] == there[axis] for axis in range(len(own)))

    @property
    def is_owned(self) -> bool:
        """True if the tensor lies whole on one rank of an axis."""
        return any(cut.owner is not None for cut in self.blocks.cuts)

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """The ranks that have all of it; (): it is divided."""
        parts = enumerate(map(self.part, range(len(self.places))))
        return tuple(rank for rank, part in parts if part and part.numel == self.numel)


def assign(cuts: Sequence[Cut], costs: Sequence[float], nbytes: Sequence[int]) -> list[int]:
    """Return the owner of each matrix: the same on every rank, the costliest matrices first.

    The rank with the least to do gets the next one, and of several such ranks the one with the
    fewest bytes. Who has all of a matrix that is divided over nobody keeps it, as long as that rank
    has no more than its share: then nothing travels. Who owns its shard (``fsdp2.Whole``) keeps it,
    or the same rank of another replica.
    """
    if not cuts:
        return []
    ranks = len(cuts[0].places)
    share = sum(costs) / ranks
    loads, held = [0.0] * ranks, [0] * ranks
    owners = [0] * len(cuts)
    for index in sorted(range(len(cuts)), key=lambda i: (-costs[i], -nbytes[i], i)):
        cut, among = cuts[index], list(range(ranks))
        if cut.holders and cut.is_owned:
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
    """One matrix that travels: ``itemsize`` bytes an element, from or to its owner."""

    cut: Cut
    owner: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.cut.numel * self.itemsize


@dataclass(frozen=True)
class Part:
    """A part of the cargo ``index``, at ``start`` bytes of a buffer: that which ``holder`` has."""

    index: int
    holder: int
    start: int
    region: Region


@dataclass
class Route:
    """What one rank sends and receives in a round: bytes for each rank, and what lies where.

    ``is_local``: no rank has anything for another one.
    """

    sent_nbytes: list[int] = field(default_factory=list)
    received_nbytes: list[int] = field(default_factory=list)
    sent: list[Part] = field(default_factory=list)
    received: list[Part] = field(default_factory=list)
    is_local: bool = False


@functools.lru_cache(maxsize=256)  # of the rounds of a step, which is like the one before
def route(me: int, ranks: int, cargos: tuple[Cargo, ...], to_owners: bool) -> Route:
    """Say what a rank sends and receives so that owners get their matrices, or give them back."""
    found = Route()
    # wide elements first, so that each part begins at a multiple of its own element
    order = sorted(range(len(cargos)), key=lambda index: (-cargos[index].itemsize, index))
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for index in order:
        owned[cargos[index].owner].append(index)
    for kept, sizes, is_sent in (
        (found.sent, found.sent_nbytes, True),
        (found.received, found.received_nbytes, False),
    ):
        end = 0
        for other in range(ranks):
            start = end
            # a part lies at its holder, who is the sender on the way to owners
            holder = me if is_sent is to_owners else other
            owner = other if is_sent is to_owners else me
            for index in owned[owner]:
                cargo = cargos[index]
                if to_owners and not cargo.cut.sends(holder, owner):
                    continue
                region = cargo.cut.part(holder)
                if region is not None:
                    kept.append(Part(index, holder, end, region))
                    end += region.numel * cargo.itemsize
            end = start + align(end - start)
            sizes.append(end - start)
    found.is_local = not any(_travels(cargo, ranks, to_owners) for cargo in cargos)
    return found


def _travels(cargo: Cargo, ranks: int, to_owner: bool) -> bool:
    """True if some other rank than the owner sends, or gets, a part."""
    return any(
        cargo.cut.part(rank) is not None
        for rank in range(ranks)
        if rank != cargo.owner and (not to_owner or cargo.cut.sends(rank, cargo.owner))
    )


def rounds(cargos: Sequence[Cargo], ranks: int, max_nbytes: int) -> Iterator[list[int]]:
    """Yield which cargos travel together, so that no rank has more than ``max_nbytes`` of a round.

    That is what it sends, what it receives, and what that becomes; one cargo goes in any case.
    Every round has something for each rank, as long as there is: the large ones of all come first.
    """
    queues: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(cargos)), key=lambda i: -cargos[i].nbytes):
        queues[cargos[index].owner].append(index)
    layers = max((len(queue) for queue in queues), default=0)
    order = [queue[layer] for layer in range(layers) for queue in queues if layer < len(queue)]
    used, batch = [0] * ranks, list[int]()
    for index in order:
        cargo = cargos[index]
        added = [0] * ranks
        for rank in range(ranks):
            if cargo.cut.sends(rank, cargo.owner):
                region = cargo.cut.part(rank)
                added[rank] += 0 if region is None else region.numel * cargo.itemsize
        added[cargo.owner] += 2 * cargo.nbytes
        total = [one + more for one, more in zip(used, added, strict=True)]
        if batch and max(total) > max_nbytes:
            yield batch
            batch, total = [], added
        batch.append(index)
        used = total
    if batch:
        yield batch

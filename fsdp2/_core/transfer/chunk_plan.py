"""Block arithmetic for distributed tensors, and plans that stream them in bounded memory.

Works on integers only: independent of tensors, meshes and process groups.

[Note: chunks]
A tensor is sharded dim by dim, so a rank's shard is a *block*: a range on every dim. A *chunk* is a
region of the largest block. Its position is relative to the start of each rank's block, so that all
ranks send equal amounts at a time. A rank with a smaller block has a smaller or empty part of the
chunk. A *bucket* contains the chunks of one collective, each at the same offset in every rank's
buffer. A *batch* contains the buckets that are in memory at the same time. On an axis where one
rank owns all elements, only that rank sends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from fsdp2._core.base.rows import Deal, most_rows, rows_of
from fsdp2._core.params.layout import align


@dataclass(frozen=True)
class Region:
    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(s, s + n) for s, n in zip(self.starts, self.sizes, strict=True))

    def inside(self, box: Region) -> tuple[slice, ...]:
        """Return the slices of this region in a tensor that covers ``box``, a containing region."""
        starts = [start - first for start, first in zip(self.starts, box.starts, strict=True)]
        return Region(tuple(starts), self.sizes).slices


def overlap(one: Region | None, other: Region | None) -> Region | None:
    if one is None or other is None:
        return None
    starts = tuple(map(max, one.starts, other.starts))
    ends = (
        min(a + n, b + m)
        for a, n, b, m in zip(one.starts, one.sizes, other.starts, other.sizes, strict=True)
    )
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return None if any(size <= 0 for size in sizes) else Region(starts, sizes)


class CutOf(NamedTuple):
    """A dim sharded over an axis: in chunks (``chunk_of``), or as a ``deal`` assigns the rows."""

    axis: int
    dim: int
    deal: Deal | None = None

    @property
    def owner(self) -> int | None:
        return None if self.deal is None else self.deal.owner


Owners = tuple[tuple[int, int], ...]  # pairs: an axis, and the only rank on it that has elements


@dataclass(frozen=True)
class Blocks:
    """The sharding of a tensor over a grid's axes (of sizes ``counts``): each cut divides the
    blocks of the previous cuts.
    """

    shape: tuple[int, ...]
    counts: tuple[int, ...]
    cuts: tuple[CutOf, ...]

    @cached_property
    def axes(self) -> tuple[int, ...]:
        """Axes over which ranks hold different elements."""
        return tuple(sorted({cut.axis for cut in self.cuts if self.counts[cut.axis] > 1}))

    @cached_property
    def owners(self) -> Owners:
        """Axes on which a single rank has all elements, each paired with that rank."""
        owned = {c.axis: c.owner for c in self.cuts if c.owner is not None and c.axis in self.axes}
        return tuple(sorted(owned.items()))

    @cached_property
    def count(self) -> int:
        owned = dict(self.owners)
        return math.prod(self.counts[axis] for axis in self.axes if axis not in owned)

    def block(self, place: Sequence[int]) -> Region:
        """Return the block of the rank at ``place`` (a coordinate for each axis)."""
        starts, sizes = [0] * len(self.shape), list(self.shape)
        for axis, dim, deal in self.cuts:
            first, sizes[dim] = rows_of(sizes[dim], self.counts[axis], place[axis], deal)
            starts[dim] += first
        return Region(tuple(starts), tuple(sizes))

    @cached_property
    def holders(self) -> dict[Region, list[int]]:
        """The nonempty blocks, each with the row-major positions in the grid that hold it."""
        found: dict[Region, list[int]] = {}
        for number, place in enumerate(itertools.product(*map(range, self.counts))):
            found.setdefault(self.block(place), []).append(number)
        return {block: numbers for block, numbers in found.items() if block.numel}

    @cached_property
    def largest(self) -> tuple[int, ...]:
        sizes = list(self.shape)
        for axis, dim, deal in self.cuts:
            sizes[dim] = most_rows(sizes[dim], self.counts[axis], deal)
        return tuple(sizes)

    def places(self) -> list[tuple[int, ...]]:
        """Return one place per distinct block; the coordinate on the last axis varies fastest."""
        numbers = [range(n if axis in self.axes else 1) for axis, n in enumerate(self.counts)]
        for axis, owner in self.owners:
            numbers[axis] = range(owner, owner + 1)
        return list(itertools.product(*numbers))


def part_of(block: Region, chunk: Region) -> Region:
    starts = tuple(min(s, n) for s, n in zip(chunk.starts, block.sizes, strict=True))
    ends = [start + size for start, size in zip(chunk.starts, chunk.sizes, strict=True)]
    sizes = [min(e, n) - s for e, n, s in zip(ends, block.sizes, starts, strict=True)]
    return Region(starts, tuple(sizes))


def within(block: Region, part: Region) -> Region:
    starts = tuple(a + b for a, b in zip(block.starts, part.starts, strict=True))
    return Region(starts, part.sizes)


def split(sizes: Sequence[int], most: int) -> Iterator[Region]:
    """Split a block, along dim 0 first, into chunks of 1 to ``most`` elements."""
    if math.prod(sizes) <= most or not sizes:
        yield whole_region(sizes)
        return
    row = math.prod(sizes[1:])
    rows = max(1, most // max(row, 1))
    for start in range(0, sizes[0], rows):
        count = min(rows, sizes[0] - start)
        for rest in split(sizes[1:], most) if count == 1 else [whole_region(sizes[1:])]:
            yield Region((start, *rest.starts), (count, *rest.sizes))


def whole_region(sizes: Sequence[int]) -> Region:
    return Region((0,) * len(sizes), tuple(sizes))


@dataclass(frozen=True)
class Item:
    """A tensor on the mesh ``grid``, for the planner. While a chunk is sent, a rank holds
    ``copies`` times the chunk's bytes. A receiver also holds ``kept_nbytes`` of the full tensor
    until the batch is complete.
    """

    blocks: Blocks
    grid: Hashable
    itemsize: int
    copies: int
    kept_nbytes: int = 0


@dataclass(frozen=True)
class Chunk:
    """A chunk of the tensor ``index``, at byte ``offset`` of every rank's buffer."""

    index: int
    region: Region
    offset: int


@dataclass
class Bucket:
    """Chunks that are sent together, with ``nbytes`` per rank; ``axes`` as in ``Blocks``."""

    axes: tuple[int, ...]
    owners: dict[int, int]
    chunks: list[Chunk] = field(default_factory=list)
    nbytes: int = 0

    @cached_property
    def cut(self) -> tuple[int, ...]:
        """Axes over which several ranks have elements."""
        return tuple(axis for axis in self.axes if axis not in self.owners)


@dataclass
class Batch:
    """Buckets in memory at the same time, and the tensors that are complete afterwards."""

    buckets: dict[tuple[Hashable, tuple[int, ...], Owners], Bucket] = field(default_factory=dict)
    finished: list[int] = field(default_factory=list)
    nbytes: int = 0

    def add(self, index: int, item: Item, region: Region) -> None:
        axes, owners = item.blocks.axes, item.blocks.owners
        bucket = self.buckets.setdefault((item.grid, axes, owners), Bucket(axes, dict(owners)))
        bucket.chunks.append(Chunk(index, region, bucket.nbytes))
        nbytes = align(region.numel * item.itemsize)
        bucket.nbytes += nbytes
        self.nbytes += item.copies * nbytes


def plan(items: Sequence[Item], max_nbytes: int) -> list[Batch]:
    """Plan batches of at most ``max_nbytes``, in the order of ``items``. A tensor that needs
    more gets separate batches: its chunks respect the limit, but ``kept_nbytes`` is not counted.
    """
    batches = [Batch()]

    def room_for(nbytes: int) -> Batch:
        last = batches[-1]
        if (last.buckets or last.finished) and last.nbytes + nbytes > max_nbytes:
            batches.append(Batch())
        return batches[-1]

    for index, item in enumerate(items):
        sizes = item.blocks.largest
        sent = item.copies * align(math.prod(sizes) * item.itemsize)
        if item.kept_nbytes + sent <= max_nbytes:
            batch = room_for(item.kept_nbytes + sent)
            batch.add(index, item, whole_region(sizes))
            batch.nbytes += item.kept_nbytes
            batch.finished.append(index)
            continue
        room_for(max_nbytes)
        most = max(1, max_nbytes // max(item.copies, 1) // item.itemsize)
        for region in split(sizes, most if item.copies else math.prod(sizes)):
            room_for(item.copies * align(region.numel * item.itemsize)).add(index, item, region)
        batches[-1].finished.append(index)
        if item.kept_nbytes:
            batches.append(Batch())
    return [batch for batch in batches if batch.buckets or batch.finished]

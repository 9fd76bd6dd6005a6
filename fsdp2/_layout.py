"""Where every parameter lives: ints only.

Owns the arithmetic of shards and of flat buffers. It must not know tensors, ranks' process groups
or modules, so every rule here is tested in one process for any rank count.

Map: ``ShardLayout`` (one parameter), ``GatherLayout`` (the flat buffers of an all-gather),
``ReduceLayout`` (the flat buffer of a reduce-scatter).

Legend: W = ranks of the shard axis; a *shard* is what one rank holds; a *piece* is a shard padded
to the size of the largest one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

ALIGN_NBYTES = 16
"""Start of a dtype segment, and of every unsharded parameter, in its flat buffer."""

MAX_SLOTTED_NUMEL = 16384
"""Elements that a replicated parameter may take in a row, with a slot for each rank."""

NUMBER_BITS, DIGEST_BITS = 16, 12
STAMP_BITS = NUMBER_BITS + DIGEST_BITS
STAMP_NUMEL = 2 * STAMP_BITS
"""Elements that say which operation a buffer belongs to: bits and their complements."""


def align(nbytes: int, to: int = ALIGN_NBYTES) -> int:
    """Round up to a multiple of ``to``."""
    return -(-nbytes // to) * to


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major stride of a shape."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


@dataclass(frozen=True)
class ShardLayout:
    """How one tensor of ``shape`` splits over ``size`` ranks along ``dim``.

    Shards are the chunks of ``torch.chunk`` (which is what DTensor's ``Shard(dim)`` means), so the
    last ranks may hold fewer rows, or none. ``dim=None`` replicates: every rank holds all of it.
    ``stride`` is the unsharded tensor's; shards are contiguous.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dim: int | None
    size: int

    @cached_property
    def chunk(self) -> int:
        """Rows of a piece."""
        return 0 if self.dim is None else -(-self.shape[self.dim] // self.size)

    @cached_property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of a piece, which is the same on every rank."""
        return self._with_rows(self.chunk)

    @cached_property
    def piece_numel(self) -> int:
        return math.prod(self.piece_shape)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_replicated(self) -> bool:
        return self.dim is None

    @cached_property
    def is_rank_major(self) -> bool:
        """True if all pieces, one after another, are the tensor followed by padding."""
        return self.dim == 0 and self.stride == contiguous_stride(self.shape)

    def start(self, rank: int) -> int:
        """First row of a rank's shard."""
        return 0 if self.dim is None else min(rank * self.chunk, self.shape[self.dim])

    def rows(self, rank: int) -> int:
        """Rows of a rank's shard; 0 for the ranks behind the last row."""
        if self.dim is None:
            return 0
        return max(0, min(self.chunk, self.shape[self.dim] - rank * self.chunk))

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        return self.shape if self.dim is None else self._with_rows(self.rows(rank))

    def _with_rows(self, rows: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])


@dataclass(frozen=True)
class GatherItem:
    """One parameter as the gather layout needs it."""

    shard: ShardLayout
    storage_dtype: torch.dtype
    compute_dtype: torch.dtype


@dataclass(frozen=True)
class CastSegment:
    """A run of pieces with one (storage dtype, compute dtype): one kernel casts it. In bytes."""

    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    shard_start: int
    send_start: int
    numel: int


@dataclass(frozen=True)
class GatherLayout:
    """Flat buffers of a group, in bytes.

    - *shard buffer*: what a rank keeps, pieces in storage dtype, replicated parameters last;
    - *send buffer*: the same in compute dtype; its first ``gather_nbytes`` are the all-gather's
      input. Where no dtype differs the two layouts are equal, and the shard buffer is sent;
    - *full buffer*: unsharded parameters, each behind the other, with room for the padding.
    """

    size: int
    items: tuple[GatherItem, ...]
    order: tuple[int, ...]
    segments: tuple[CastSegment, ...]
    shard_offsets: tuple[int, ...]
    send_offsets: tuple[int, ...]
    full_offsets: tuple[int, ...]
    shard_nbytes: int
    send_nbytes: int
    gather_nbytes: int
    full_nbytes: int

    @staticmethod
    def plan(
        items: Sequence[GatherItem], size: int, full_sizes: Sequence[int] = ()
    ) -> GatherLayout:
        """Place every item: sharded before replicated, equal dtypes side by side.

        ``full_sizes`` are the sizes of other axes over which the same parameters are gathered into
        the same full buffer: room is left for the padding of each.
        """

        def sort_key(index: int) -> tuple[bool, int, str, str]:
            item = items[index]
            compute, storage = item.compute_dtype, item.storage_dtype
            return item.shard.is_replicated, -compute.itemsize, str(compute), str(storage)

        order = sorted(range(len(items)), key=sort_key)
        runs = [list(run) for _, run in itertools.groupby(order, key=sort_key)]
        offsets_in_shard, offsets_in_send = [0] * len(items), [0] * len(items)
        segments: list[CastSegment] = []
        shard_end = send_end = gather_nbytes = 0
        for run in runs:
            first = items[run[0]]
            shard_end, send_end = align(shard_end), align(send_end)
            shard_start, send_start, numel = shard_end, send_end, 0
            for index in run:
                offsets_in_shard[index], offsets_in_send[index] = shard_end, send_end
                shard_end += items[index].shard.piece_numel * first.storage_dtype.itemsize
                send_end += items[index].shard.piece_numel * first.compute_dtype.itemsize
                numel += items[index].shard.piece_numel
            segments.append(
                CastSegment(
                    first.storage_dtype, first.compute_dtype, shard_start, send_start, numel
                )
            )
            if not first.shard.is_replicated:
                gather_nbytes = send_end
        if len({item.compute_dtype for item in items if not item.shard.is_replicated}) > 1:
            gather_nbytes = align(gather_nbytes)
        full_ends = [0, *itertools.accumulate(align(full_nbytes(i, full_sizes)) for i in items)]
        return GatherLayout(
            size=size,
            items=tuple(items),
            order=tuple(order),
            segments=tuple(segments),
            shard_offsets=tuple(offsets_in_shard),
            send_offsets=tuple(offsets_in_send),
            full_offsets=tuple(full_ends[:-1]),
            shard_nbytes=max(shard_end, gather_nbytes),
            send_nbytes=max(send_end, gather_nbytes),
            gather_nbytes=gather_nbytes,
            full_nbytes=full_ends[-1],
        )

    @cached_property
    def casts(self) -> bool:
        """True if some parameter is computed in another dtype than it is kept in."""
        return any(item.storage_dtype != item.compute_dtype for item in self.items)

    @cached_property
    def wire_dtype(self) -> torch.dtype:
        """Dtype of the all-gather: the parameters' own where there is one, else bytes."""
        dtypes = {item.compute_dtype for item in self.items if not item.shard.is_replicated}
        if len(dtypes) == 1:
            (dtype,) = dtypes
            if dtype.is_floating_point and dtype.itemsize > 1:
                return dtype
        return torch.uint8

    @cached_property
    def is_rank_major(self) -> bool:
        """True if one split copies the whole gathered buffer: no gap, only rank-major items."""
        used = sum(self.piece_nbytes(index) for index in self.order)
        return used == self.gather_nbytes and all(i.shard.is_rank_major for i in self.items)

    @cached_property
    def wire_sizes(self) -> list[int]:
        """Wire elements of every piece in the gathered buffer's order."""
        return [self.piece_nbytes(index) // self.wire_dtype.itemsize for index in self.order]

    @cached_property
    def stamp_item(self) -> GatherItem | None:
        """A piece of ``STAMP_NUMEL`` elements beside the widest sharded ones; None without any."""
        if self.gather_nbytes == 0 or self.size == 1:
            return None
        first = self.items[self.order[0]]
        shard = ShardLayout((self.size * STAMP_NUMEL,), (1,), 0, self.size)
        return GatherItem(shard, first.storage_dtype, first.compute_dtype)

    def has_full_of(self, other: GatherLayout) -> bool:
        """True if unsharded parameters lie in the full buffer as they do in another layout's."""
        mine = [item.compute_dtype for item in self.items]
        return (
            mine == [item.compute_dtype for item in other.items]
            and self.full_offsets == other.full_offsets
            and self.full_nbytes == other.full_nbytes
        )

    def piece_nbytes(self, index: int) -> int:
        """Bytes of a parameter's piece in the send buffer."""
        item = self.items[index]
        return item.shard.piece_numel * item.compute_dtype.itemsize


def full_nbytes(item: GatherItem, full_sizes: Sequence[int] = ()) -> int:
    """Bytes that an unsharded parameter needs, padding included where pieces land in it."""
    shard = item.shard
    numel = shard.numel
    if shard.is_rank_major:
        row_numel = math.prod(shard.shape[1:])
        for size in (shard.size, *full_sizes):
            numel = max(numel, size * -(-shard.shape[0] // size) * row_numel)
    return numel * item.compute_dtype.itemsize


@dataclass(frozen=True)
class ReduceLayout:
    """The reduce-scatter of a group: the same on every rank, whatever took part.

    The input is ``[W, numel]``, the output ``[numel]`` elements of ``dtype``. A parameter sharded
    on ``dim`` travels with that dim first. A replicated one travels whole in each rank's row; a
    small one in a *slot* for each rank, so that all ranks add up the same values in the same order,
    and replicas stay equal to the bit. Then come ``len(members)`` elements that count, for each
    member, how many ranks had a gradient for it, and a stamp for each process group that the buffer
    crosses.
    """

    size: int
    dtype: torch.dtype
    members: tuple[int, ...]
    shards: tuple[ShardLayout, ...]
    offsets: tuple[int, ...]
    slotted: tuple[bool, ...]
    tail_start: int
    numel: int

    @staticmethod
    def plan(
        members: Sequence[int],
        shards: Sequence[ShardLayout],
        size: int,
        dtype: torch.dtype,
        stamps: int = 0,
    ) -> ReduceLayout:
        """Place the trainable parameters ``members`` (indices into the group) in one buffer."""
        offsets, slotted, end = [], [], 0
        for shard in shards:
            offsets.append(end)
            slotted.append(
                shard.is_replicated and 1 < size <= MAX_SLOTTED_NUMEL // (shard.numel or 1)
            )
            end += shard.piece_numel * (size if slotted[-1] else 1)
        return ReduceLayout(
            size=size,
            dtype=dtype,
            members=tuple(members),
            shards=tuple(shards),
            offsets=tuple(offsets),
            slotted=tuple(slotted),
            tail_start=end,
            numel=end + len(members) + stamps * STAMP_NUMEL,
        )

    def width(self, position: int) -> int:
        """Elements of a member in a row."""
        return self.shards[position].piece_numel * (self.size if self.slotted[position] else 1)

    @property
    def stamp_start(self) -> int:
        """Offset of the first stamp, behind the participation counts."""
        return self.tail_start + len(self.members)

    @property
    def nbytes(self) -> int:
        """Bytes of the input."""
        return self.size * self.numel * self.dtype.itemsize

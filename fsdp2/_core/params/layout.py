"""Where every parameter lives: ints only.

Owns the arithmetic of shards and of flat buffers. It must not know tensors, ranks' process groups
or modules, so every rule here is tested in one process for any rank count.

Map: ``ShardLayout`` (one parameter), ``GatherLayout`` (the flat buffers of an all-gather),
``ReduceLayout`` (the flat buffer of a reduce-scatter).

Legend: W = ranks of the shard axis; a *shard* is what one rank holds; a *padded shard* has the size
of the largest one. A parameter that is *zero-copy* travels in a collective of its own, between the
memory where it is kept and that where it is used; all others are *packed* in one. A *dealt* one
lies in whole blocks of rows (see ``Deal``); an *owned* one is one block, whole on one rank.

[Note: dealt parameters]
With dealt parameters what ranks send has different lengths. Each sends a *piece*: the *even* part,
which is as long on every rank, and its rows of each dealt parameter. So a layout is that of one
rank, and knows the pieces of the others. Nothing is padded to the longest piece. Ranks side by side
that have as many rows of each dealt parameter are a *run*: their pieces are alike, so what they
have of a parameter is unpacked in one copy. If all dealt parameters are owned, pieces are gathered
right into the full buffer, one behind the other, and there an owned parameter is used; the even
parts between them are unpacked as if they had come alone. In what is reduced the dealt gradients
come first, so that stamps stay at its end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import torch

from fsdp2._core.base.capabilities import ROW_NBYTES, ZeroCopy
from fsdp2._core.base.rows import Deal, chunk_of, rows_of

ALIGN_NBYTES = 16
"""Start of a dtype segment, and of every unsharded parameter, in its flat buffer."""


MAX_SLOTTED_NUMEL = 16384
"""Elements that a replicated parameter may take in a row, with a slot for each rank."""


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


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return a stride if a tensor with it has no holes and no overlaps, else a row-major one."""
    row_major, expected = contiguous_stride(shape), 1
    for size, step in sorted(zip(shape, stride, strict=True), key=itemgetter(1)):
        if size != 1 and step != expected:
            return row_major
        expected *= max(size, 1)
    # of a dim of one row any stride will do, and of a tensor without elements all of them
    pairs = zip(shape, stride, row_major, strict=True)
    if 0 in shape or all(size == 1 or step == other for size, step, other in pairs):
        return row_major
    return tuple(stride)


@dataclass(frozen=True)
class ShardLayout:
    """How one tensor of ``shape`` splits over ``size`` ranks along ``dim``.

    Shards are chunks (see ``chunk_of``), or what a ``deal`` says. ``dim=None`` replicates: every
    rank holds all of it. ``stride`` is the unsharded tensor's; shards are contiguous.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dim: int | None
    size: int
    deal: Deal | None = None

    @cached_property
    def chunk(self) -> int:
        """Rows of a padded shard."""
        return self.rows(0)

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        """Shape of a padded shard, which is the same on every rank."""
        return self.shard_shape(0)

    @cached_property
    def padded_numel(self) -> int:
        return math.prod(self.padded_shape)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def signature(self) -> object:
        """What ranks must agree on for their shards to fit together."""
        cut: tuple[object, ...] = (self.shape, self.dim)
        return cut if self.deal is None else (*cut, *astuple(self.deal))

    @property
    def is_replicated(self) -> bool:
        return self.dim is None

    @property
    def is_dealt(self) -> bool:
        return self.deal is not None

    @property
    def owner(self) -> int | None:
        """The rank that holds all of it alone; None: there is none."""
        return None if self.deal is None else self.deal.owner

    @property
    def is_even(self) -> bool:
        """True if every rank sends as much of it."""
        return self.dim is not None and self.deal is None

    @cached_property
    def is_rank_major(self) -> bool:
        """True if all padded shards, one after another, are the tensor followed by padding."""
        return self.is_even and self.dim == 0 and self.stride == contiguous_stride(self.shape)

    @property
    def stays_where_it_lands(self) -> bool:
        """True if what an owner sends is the unsharded tensor."""
        return self.owner is not None and self.stride == contiguous_stride(self.shape)

    def kept_numel(self, rank: int) -> int:
        """Elements that a rank has room for: of its padded shard, or of what it is dealt."""
        return self.padded_numel if self.deal is None else math.prod(self.shard_shape(rank))

    def goes_alone(self, dtype: torch.dtype, rule: ZeroCopy | None) -> bool:
        """True if it is rank-major and large enough to be zero-copy; None: never."""
        if rule is None or self.size == 1 or not self.is_rank_major:
            return False
        if self.padded_numel * dtype.itemsize % rule.row_nbytes:
            return False  # rows that lie where they are used cannot be filled up
        return self.numel * dtype.itemsize >= max(1, rule.nbytes)

    def start(self, rank: int) -> int:
        """First row of a rank's shard."""
        return 0 if self.dim is None else self.span(rank)[0]

    def rows(self, rank: int) -> int:
        """Rows of a rank's shard; 0 for the ranks behind the last row."""
        return 0 if self.dim is None else self.span(rank)[1]

    def span(self, rank: int) -> tuple[int, int]:
        """Return the first row of a rank's shard, and how many it has."""
        assert self.dim is not None
        return rows_of(self.shape[self.dim], self.size, rank, self.deal)

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.rows(rank), *self.shape[self.dim + 1 :])


SCALE_DTYPE = torch.bfloat16
"""Dtype of scales, which are powers of two."""


@dataclass(frozen=True)
class Coding:
    """How a shard travels in codes of 8 bits: codes of ``dtype``, and behind them their scales.

    A scale is for a row (an index of dim 0) of the shard, or for all of it.
    """

    dtype: torch.dtype
    by_row: bool

    def scale_count(self, shape: Sequence[int]) -> int:
        return shape[0] if self.by_row else 1

    def scales_start(self, shape: Sequence[int]) -> int:
        """Bytes before the scales of a shard of a shape."""
        return align(math.prod(shape) * self.dtype.itemsize, SCALE_DTYPE.itemsize)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes that a shard of a shape travels in."""
        if not math.prod(shape):
            return 0
        return align(self.scales_start(shape) + self.scale_count(shape) * SCALE_DTYPE.itemsize)


@dataclass(frozen=True)
class GatherItem:
    """One parameter, or a tail behind them all, as the gather layout needs it.

    ``coding``: it travels in codes; None: in its compute dtype.
    """

    shard: ShardLayout
    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    is_tail: bool = False
    coding: Coding | None = None

    @property
    def lands_as_it_is(self) -> bool:
        """True if all padded shards, one after another, are the tensor followed by padding."""
        return self.shard.is_rank_major and self.coding is None

    @property
    def sent_as(self) -> object:
        """In what it travels: what ranks must agree on."""
        return self.compute_dtype if self.coding is None else (self.compute_dtype, self.coding)

    def room(self, rank: int) -> tuple[int, ...]:
        """Shape of what a rank has room for: of a padded shard, or of what it is dealt."""
        return self.shard.shard_shape(rank) if self.shard.is_dealt else self.shard.padded_shape

    def sent_nbytes(self, rank: int) -> int:
        """Bytes of a rank's shard in the send buffer."""
        if self.coding is not None:
            return self.coding.nbytes(self.room(rank))
        return self.shard.kept_numel(rank) * self.compute_dtype.itemsize


@dataclass(frozen=True)
class Packed:
    """What one all-gather carries: the first padded shards of the send buffer, in its order.

    ``sizes`` are in wire elements, and ``shapes`` those of what is unpacked: of the ranks that have
    rows. ``is_dense``: no gap, only rank-major items, and anything at all. With
    ``is_one_split`` one kernel unpacks everything that was gathered (CUDA's kernel ends the process
    where there is nothing to split: torch 2.11.0).
    """

    order: tuple[int, ...]
    nbytes: int
    sizes: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    is_dense: bool
    is_one_split: bool


@dataclass(frozen=True)
class CastSegment:
    """A run of padded shards with one (storage dtype, compute dtype), for one kernel.

    It starts at bytes of the shard buffer and of the send buffer, and has no gap. One that
    ``is_coded`` is one item's.
    """

    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    is_replicated: bool
    shard_start: int
    send_start: int
    numel: int
    indices: tuple[int, ...]
    is_coded: bool = False


class Run(NamedTuple):
    """Ranks side by side whose pieces are alike: the first one, and how many."""

    first: int
    ranks: int


class Landed(NamedTuple):
    """What a run of ranks has of a dealt item: in the first one's piece it begins at ``start``.

    That is in bytes behind the start of the first piece of all.
    """

    item: int
    run: Run
    start: int


@dataclass(frozen=True)
class GatherLayout:
    """Flat buffers of a group, in bytes.

    - *shard buffer*: what a rank keeps, padded shards in storage dtype, replicated parameters last;
    - *send buffer*: the same in compute dtype; its first ``gather_nbytes`` are sent: what is packed
      in its first ``packed_nbytes``, each zero-copy shard behind them by itself. Where no dtype
      differs the two layouts are equal, and the shard buffer is sent;
    - *full buffer*: unsharded parameters, each behind the other, with room for the padding, so
      that a zero-copy one is gathered right there. With ``trims``, on a host, the padding of a
      packed one is left out: of many ranks most may have no row of a small parameter.

    ``pieces``: bytes that each rank sends, if some parameter is dealt. Each begins with what is
    packed. They land in the full buffer from ``landing_start`` on, or, if that is None, in memory
    of their own. The shard and the send buffer are those of rank ``rank`` then. ``runs`` are the
    runs of ranks, and ``copied`` says which dealt parameters are copied from where they land. See
    [Note: dealt parameters].
    """

    size: int
    items: tuple[GatherItem, ...]
    order: tuple[int, ...]
    segments: tuple[CastSegment, ...]
    shard_offsets: tuple[int, ...]
    send_offsets: tuple[int, ...]
    full_offsets: tuple[int, ...]
    zero_copy: tuple[int, ...]
    shard_nbytes: int
    send_nbytes: int
    packed_nbytes: int
    gather_nbytes: int
    full_nbytes: int
    rank: int = 0
    pieces: tuple[int, ...] = ()
    landing_start: int | None = None
    runs: tuple[Run, ...] = ()
    copied: tuple[Landed, ...] = ()
    trims: bool = False

    @staticmethod
    def plan(
        items: Sequence[GatherItem],
        size: int,
        full_sizes: Sequence[int] = (),
        zero_copy: ZeroCopy | None = None,
        rank: int = 0,
        trims: bool = False,
    ) -> GatherLayout:
        """Place every item: packed, zero-copy, dealt, replicated; equal dtypes side by side.

        ``full_sizes`` are the sizes of other axes over which the same parameters are gathered into
        the same full buffer: room is left for the padding of each. Rank-major parameters that
        fit ``zero_copy`` travel alone; None: none does.
        """
        is_mixed = len({i.compute_dtype for i in items if not i.shard.is_replicated}) > 1
        has_dealt = any(item.shard.is_dealt for item in items)
        has_coded = any(item.coding is not None for item in items)
        if has_dealt:  # one collective carries everything
            zero_copy = None

        is_zero_copy = [
            not item.is_tail
            and item.coding is None
            and item.shard.goes_alone(item.compute_dtype, zero_copy)
            for item in items
        ]

        def sort_key(index: int) -> tuple[bool, bool, bool, int, str, str]:
            item = items[index]
            compute, storage = item.compute_dtype, item.storage_dtype
            kind = item.shard.is_replicated, item.shard.is_dealt, is_zero_copy[index]
            return *kind, -compute.itemsize, str(compute), str(storage)

        def segment_key(index: int) -> tuple[object, ...]:
            """Zero-copy ones right behind packed ones are one kernel with them.

            Dealt and coded ones are not.
            """
            is_replicated, is_dealt, goes_alone, *dtypes = sort_key(index)
            place = index if is_dealt or items[index].coding is not None else -1
            return is_replicated, place, goes_alone and is_mixed, *dtypes

        order = sorted(range(len(items)), key=sort_key)
        offsets_in_shard, offsets_in_send = [0] * len(items), [0] * len(items)
        segments: list[CastSegment] = []
        shard_end = send_end = 0

        def end_in_send(indices: Sequence[int]) -> int:
            if not indices:
                return 0
            end = offsets_in_send[indices[-1]] + items[indices[-1]].sent_nbytes(rank)
            return align(end) if is_mixed or has_dealt or has_coded else end

        def end_of_packed() -> int:
            end = end_in_send(packed)
            kinds = {(items[index].storage_dtype, items[index].compute_dtype) for index in packed}
            if len(kinds) > 1 and any(item.is_tail for item in items):
                return align(end, ROW_NBYTES)  # a tail fills up one segment only
            return end

        sharded = [index for index in order if not items[index].shard.is_replicated]
        packed = [
            index for index in sharded if items[index].shard.is_even and not is_zero_copy[index]
        ]
        is_behind_even = False
        for _, run in itertools.groupby(order, key=segment_key):
            indices = tuple(run)
            first = items[indices[0]]
            storage, compute = first.storage_dtype, first.compute_dtype
            if first.shard.is_dealt and not is_behind_even:
                gap = end_of_packed() - send_end  # the even part is as long on every rank
                shard_end, send_end, is_behind_even = shard_end + gap, send_end + gap, True
            shard_start = shard_end = align(shard_end)
            send_start = send_end = align(send_end)
            for index in indices:
                offsets_in_shard[index], offsets_in_send[index] = shard_end, send_end
                shard_end += items[index].shard.kept_numel(rank) * storage.itemsize
                send_end += items[index].sent_nbytes(rank)
            numel = sum(items[index].shard.kept_numel(rank) for index in indices)
            kind = storage, compute, first.shard.is_replicated
            segment = CastSegment(*kind, shard_start, send_start, numel, indices)
            segments.append(replace(segment, is_coded=first.coding is not None))

        packed_nbytes = end_of_packed()
        gather_nbytes = max(packed_nbytes, end_in_send(sharded))
        # where all dealt ones are owned, they may be used where they land
        lands_in_full = has_dealt and all(
            item.shard.owner is not None for item in items if item.shard.is_dealt
        )
        stay = {
            index
            for index, one in enumerate(items)
            if lands_in_full and one.shard.stays_where_it_lands and one.coding is None
        }
        lands = zero_copy if trims else ZeroCopy(0)
        rooms = [
            0 if i in stay else full_nbytes(one, (size, *full_sizes), lands)
            for i, one in enumerate(items)
        ]
        full_ends = [0, *itertools.accumulate(map(align, rooms))]
        full_offsets, full_end = full_ends[:-1], full_ends[-1]
        pieces: list[int] = []
        runs: list[Run] = []
        landed: list[Landed] = []
        if has_dealt:
            dealt = [index for index in order if items[index].shard.is_dealt]
            runs = runs_of([items[index].shard for index in dealt], size)
            pieces, landed = _land(items, dealt, runs, packed_nbytes)
        for one in landed:
            if one.item in stay:
                full_offsets[one.item] = full_end + one.start
        return GatherLayout(
            size=size,
            items=tuple(items),
            order=tuple(order),
            segments=tuple(segments),
            shard_offsets=tuple(offsets_in_shard),
            send_offsets=tuple(offsets_in_send),
            full_offsets=tuple(full_offsets),
            zero_copy=tuple(i for i in sharded if is_zero_copy[i]),
            shard_nbytes=max(shard_end, gather_nbytes),
            send_nbytes=max(send_end, gather_nbytes),
            packed_nbytes=packed_nbytes,
            gather_nbytes=gather_nbytes,
            full_nbytes=full_end + (sum(pieces) if lands_in_full else 0),
            rank=rank if has_dealt else 0,
            pieces=tuple(pieces),
            landing_start=full_end if lands_in_full else None,
            runs=tuple(runs),
            copied=tuple(one for one in landed if one.item not in stay),
            trims=trims,
        )

    @staticmethod
    def plan_with_tail(
        items: Sequence[GatherItem],
        size: int,
        numel: int,
        full_sizes: Sequence[int] = (),
        zero_copy: ZeroCopy | None = None,
        rank: int = 0,
        trims: bool = False,
    ) -> GatherLayout:
        """The same with a tail of at least ``numel`` elements, which fills rows up.

        No tail where nothing is sent.
        """
        how = size, full_sizes, zero_copy, rank, trims
        layout = GatherLayout.plan(items, *how)
        tail = layout.tail_item(numel)
        if tail is None:
            return layout
        found = GatherLayout.plan([*items, tail], *how)
        missing = -found.packed_nbytes % ROW_NBYTES
        if not missing:  # of several segments, too: these end with a gap
            return found
        longer = layout.tail_item(numel + missing // tail.compute_dtype.itemsize)
        assert longer is not None
        return GatherLayout.plan([*items, longer], *how)

    @cached_property
    def casts(self) -> bool:
        """True if some parameter is computed in another dtype than it is kept in, or coded."""
        return self.has_codes or any(i.storage_dtype != i.compute_dtype for i in self.items)

    @cached_property
    def codings(self) -> tuple[Coding, ...]:
        """In what codes parameters travel."""
        return tuple(dict.fromkeys(i.coding for i in self.items if i.coding is not None))

    @property
    def has_codes(self) -> bool:
        """True if some parameter travels in codes."""
        return bool(self.codings)

    @cached_property
    def wire_dtype(self) -> torch.dtype:
        """Dtype of the all-gather: the parameters' own where there is one, else bytes."""
        dtypes = {item.compute_dtype for item in self.items if not item.shard.is_replicated}
        if len(dtypes) == 1 and not self.has_codes:
            (dtype,) = dtypes
            if dtype.is_floating_point and dtype.itemsize > 1:
                return dtype
        return torch.uint8

    @cached_property
    def wire_numel(self) -> int:
        """Elements in wire dtype that a rank sends, without an open tail."""
        return self.gather_nbytes // self.wire_dtype.itemsize

    @cached_property
    def landing_numel(self) -> int:
        """Elements in wire dtype of the pieces of all ranks."""
        return sum(self.pieces) // self.wire_dtype.itemsize

    @cached_property
    def is_one_cast(self) -> bool:
        """True if one kernel casts everything that is sent."""
        segments = self.segments
        is_sent = self.items[0].shard.is_even
        is_plain = not self.pieces and not self.has_codes
        return self.casts and len(segments) == 1 and is_sent and is_plain

    @cached_property
    def packed(self) -> Packed:
        """What is sent in one collective where zero-copy shards go by themselves."""
        even = [i for i in self.order if self.items[i].shard.is_even]
        return self._pack(even[: len(even) - len(self.zero_copy)], self.packed_nbytes)

    @cached_property
    def whole(self) -> Packed:
        """What is sent where one collective carries everything; dealt parameters not counted."""
        if not self.zero_copy:
            return self.packed
        even = [i for i in self.order if self.items[i].shard.is_even]
        return self._pack(even, self.gather_nbytes)

    def _pack(self, indices: list[int], nbytes: int) -> Packed:
        padded = [self.padded_nbytes(index) for index in indices]
        rank_major = all(self.items[index].lands_as_it_is for index in indices)
        sizes = tuple(one // self.wire_dtype.itemsize for one in padded)
        is_dense = rank_major and sum(padded) == nbytes > 0
        shapes = tuple(zip(map(self.ranks_of, indices), sizes, strict=True))
        is_one_split = is_dense and all(ranks == self.size for ranks, _ in shapes)
        return Packed(tuple(indices), nbytes, sizes, shapes, is_dense, is_one_split)

    def ranks_of(self, index: int) -> int:
        """Return how many ranks have rows of an item that are unpacked; of a zero-copy one, all."""
        item = self.items[index]
        if not self.trims or item.is_tail or index in self.zero_copy or not item.lands_as_it_is:
            return self.size
        return -(-item.shard.shape[0] // max(item.shard.chunk, 1))

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """What is not sent at all."""
        return tuple(i for i in self.order if self.items[i].shard.is_replicated)

    def tail_item(self, numel: int) -> GatherItem | None:
        """A tail of so many elements, beside the widest sharded items; None without any of these.

        Without any item at all (parameters are extended) it is one of bytes.
        """
        if self.size == 1 or (self.items and self.gather_nbytes == 0 and not self.pieces):
            return None
        dtypes = torch.uint8, torch.uint8
        if self.items:
            first = self.items[self.order[0]]
            dtypes = first.storage_dtype, first.compute_dtype
        shard = ShardLayout((self.size * numel,), (1,), 0, self.size)
        return GatherItem(shard, *dtypes, is_tail=True)

    def has_full_of(self, other: GatherLayout) -> bool:
        """True if unsharded parameters lie in another layout's full buffer as in this one's."""
        mine = [item.compute_dtype for item in self.items]
        return (
            mine == [item.compute_dtype for item in other.items]
            and self.full_offsets == other.full_offsets
            and self.full_nbytes == other.full_nbytes
        )

    def padded_nbytes(self, index: int) -> int:
        """Bytes of a parameter's padded shard in the send buffer."""
        return self.items[index].sent_nbytes(self.rank)


def runs_of(shards: Sequence[ShardLayout], size: int) -> list[Run]:
    """Return the runs of ranks. See [Note: dealt parameters]."""
    runs: list[Run] = []
    last: list[int] | None = None
    for rank in range(size):
        rows = [shard.rows(rank) for shard in shards]
        if rows == last:
            runs[-1] = Run(runs[-1].first, runs[-1].ranks + 1)
        else:
            runs.append(Run(rank, 1))
        last = rows
    return runs


def _land(
    items: Sequence[GatherItem], dealt: Sequence[int], runs: Sequence[Run], even_nbytes: int
) -> tuple[list[int], list[Landed]]:
    """Return the bytes of each rank's piece, and where dealt parameters lie in all of them.

    In a piece they lie as in the send buffer of its rank.
    """
    pieces: list[int] = []
    landed: list[Landed] = []
    for run in runs:
        start, end = sum(pieces), even_nbytes
        for index in dealt:
            nbytes = items[index].sent_nbytes(run.first)
            if nbytes:
                landed.append(Landed(index, run, start + end))
            end += align(nbytes)
        pieces += [end] * run.ranks
    return pieces, landed


def full_nbytes(item: GatherItem, sizes: Sequence[int], lands: ZeroCopy | None) -> int:
    """Bytes that an unsharded parameter needs, gathered over axes of some sizes: a tail, none.

    Of one that fits ``lands`` the padded shards of all ranks have room, else of those with rows.
    """
    shard, itemsize = item.shard, item.compute_dtype.itemsize
    if item.is_tail:
        return 0
    rows = shard.shape[0] if shard.is_rank_major else 0
    if not rows:
        return shard.numel * itemsize
    chunks = [chunk_of(rows, size, 0)[1] for size in sizes]
    if lands is not None and shard.numel * itemsize >= lands.nbytes:
        rows = max(size * chunk for size, chunk in zip(sizes, chunks, strict=True))
    else:
        rows = max(align(rows, chunk) for chunk in chunks)
    return rows * math.prod(shard.shape[1:]) * itemsize


@dataclass(frozen=True)
class ReduceLayout:
    """The reduce-scatter of a group: the same, whatever took part.

    It is the same on every rank, but for dealt members: ``pieces`` are the elements that are
    reduced for each rank, and what rank ``rank`` is dealt comes before all others. See
    [Note: dealt parameters].

    The output is ``[numel]`` elements of ``dtype``: the shards of *zero-copy* members, each reduced
    by itself from its gradient, and from ``packed_start`` on what one more collective reduces from
    a packed input ``[W, packed_numel]`` of ``wire_dtype``. In that a parameter sharded on ``dim``
    travels with that dim first. A replicated one travels whole in each rank's row; a small one in a
    *slot* for each rank, so that all ranks add up the same values in the same order, and replicas
    stay equal to the bit. Behind them comes a tail, of which a layout knows where it starts.
    """

    size: int
    dtype: torch.dtype
    wire_dtype: torch.dtype
    members: tuple[int, ...]
    shards: tuple[ShardLayout, ...]
    offsets: tuple[int, ...]
    slotted: tuple[bool, ...]
    zero_copy: tuple[int, ...]
    packed_start: int
    tail_start: int
    tail_gap: int  # elements before the tail that nobody uses: they fill the row up
    numel: int
    rank: int = 0
    dealt_numels: tuple[int, ...] = ()  # elements that each rank is dealt; (): nothing is dealt
    runs: tuple[Run, ...] = ()

    @staticmethod
    def plan(
        members: Sequence[int],
        shards: Sequence[ShardLayout],
        size: int,
        dtype: torch.dtype,
        tail_numel: int = 0,
        wire_dtype: torch.dtype | None = None,
        zero_copy: ZeroCopy | None = None,
        row_nbytes: int = 1,
        rank: int = 0,
    ) -> ReduceLayout:
        """Place the trainable parameters ``members`` (indices into the group).

        A row of the packed input is a multiple of ``row_nbytes``. Rank-major ones that fit
        ``zero_copy``, and whose rows divide evenly, travel alone; None: none does.
        """
        sent_as = wire_dtype or dtype
        dealt = [shard for shard in shards if shard.is_dealt]
        if dealt:  # one collective carries everything
            zero_copy = None
        unit = _dealt_unit(dtype, sent_as)
        runs = runs_of(dealt, size) if dealt else []
        dealt_numels: list[int] = []
        for run in runs:
            kept = sum(align(shard.kept_numel(run.first), unit) for shard in dealt)
            dealt_numels += [kept] * run.ranks

        alone = [
            position
            for position, shard in enumerate(shards)
            if shard.goes_alone(sent_as, zero_copy) and shard.shape[0] % size == 0
        ]
        offsets, slotted, end = [0] * len(shards), [False] * len(shards), 0
        for position in alone:
            offsets[position] = end
            end += shards[position].padded_numel
        for position, shard in enumerate(shards):
            if shard.is_dealt:
                offsets[position] = end
                end += align(shard.kept_numel(rank), unit)
        packed_start = end
        for position, shard in enumerate(shards):
            if position in alone or shard.is_dealt:
                continue
            offsets[position] = end
            slotted[position] = shard.is_replicated and 1 < size <= MAX_SLOTTED_NUMEL // (
                shard.numel or 1
            )
            end += shard.padded_numel * (size if slotted[position] else 1)
        layout = ReduceLayout(
            size=size,
            dtype=dtype,
            wire_dtype=sent_as,
            members=tuple(members),
            shards=tuple(shards),
            offsets=tuple(offsets),
            slotted=tuple(slotted),
            zero_copy=tuple(alone),
            packed_start=packed_start,
            tail_start=end,
            tail_gap=0,
            numel=end,
            rank=rank if dealt else 0,
            dealt_numels=tuple(dealt_numels),
            runs=tuple(runs),
        )
        return layout.with_tail(tail_numel, row_nbytes)

    def with_tail(self, numel: int, row_nbytes: int = 1) -> ReduceLayout:
        """Return the layout with another tail."""
        end, itemsize = self.tail_start - self.tail_gap, self.wire_dtype.itemsize
        nbytes = (end - self.packed_start + numel) * itemsize
        gap = 0 if self.size == 1 else -nbytes % row_nbytes // itemsize
        start = end + gap
        return replace(self, tail_start=start, tail_gap=gap, numel=start + numel)

    def width(self, position: int) -> int:
        """Elements of a member in a row of this rank."""
        kept = self.shards[position].kept_numel(self.rank)
        return kept * (self.size if self.slotted[position] else 1)

    def room_for(self, position: int, rank: int) -> int:
        """Elements that a dealt member takes in what is reduced for a rank."""
        kept = self.shards[position].kept_numel(rank)
        return align(kept, _dealt_unit(self.dtype, self.wire_dtype))

    @cached_property
    def exact(self) -> tuple[tuple[int, int], ...]:
        """Columns of a row that nothing may round: replicated members, and from the tail on.

        Replicas add up the same values, and must get the same sum; a tail holds whole numbers.
        """
        spans = [
            (self.offsets[position], self.offsets[position] + self.width(position))
            for position, shard in enumerate(self.shards)
            if shard.is_replicated
        ]
        spans.append((self.tail_start - self.tail_gap, self.numel))
        return tuple((first, last) for first, last in spans if first < last)

    @cached_property
    def dealt(self) -> tuple[int, ...]:
        """Positions of the dealt members, in the order in which they lie on each rank."""
        return tuple(p for p, shard in enumerate(self.shards) if shard.is_dealt and shard.numel)

    @cached_property
    def pieces(self) -> tuple[int, ...]:
        """Elements that are reduced for each rank; () if that is as much for every rank."""
        return tuple(dealt + self.packed_numel for dealt in self.dealt_numels)

    @cached_property
    def packed(self) -> tuple[int, ...]:
        """Positions of the members that are packed, and have elements."""
        positions = set(range(len(self.shards))) - set(self.zero_copy) - set(self.dealt)
        return tuple(p for p in sorted(positions) if self.shards[p].padded_numel)

    @cached_property
    def rearranged(self) -> tuple[int, ...]:
        """Indices into ``packed`` of those whose gradients are no rows of the input as they are."""
        packed = enumerate(self.packed)
        return tuple(i for i, p in packed if self.slotted[p] or self.shards[p].dim != 0)

    @cached_property
    def cut(self) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]] | None:
        """Widths of the packed columns, the tail last, and the shapes of the rows in them.

        None if less than half of it is padding, or if the last rank with rows has fewer.
        """
        shapes: list[tuple[int, ...]] = []
        widths, numel, room = list(map(self.width, self.packed)), 0, 0
        for width, shard in zip(widths, map(self.shards.__getitem__, self.packed), strict=True):
            if not shard.is_even:
                shapes.append((self.size, width))
                continue
            dim = shard.dim or 0
            rows, rest = shard.shape[dim], (*shard.shape[:dim], *shard.shape[dim + 1 :])
            if rows % shard.chunk:
                return None
            shapes.append((rows, *rest) if shard.chunk == 1 else (rows // shard.chunk, width))
            numel, room = numel + shard.numel, room + width * self.size
        if 2 * numel > room or not room or self.dealt:
            return None
        tail = self.numel - self.tail_start + self.tail_gap
        return (*widths, tail), (*shapes, (self.size, tail))

    @cached_property
    def output_sizes(self) -> list[int]:
        """Elements of each output, in the order in which they lie: zero-copy ones, the packed."""
        sizes = [self.shards[position].padded_numel for position in self.zero_copy]
        return [*sizes, self.packed_numel]

    @cached_property
    def packed_numel(self) -> int:
        """Elements of a row of the packed input."""
        return self.numel - self.packed_start

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all inputs."""
        numel = sum(self.pieces) if self.pieces else self.size * self.numel
        return numel * self.wire_dtype.itemsize


def _dealt_unit(dtype: torch.dtype, wire_dtype: torch.dtype) -> int:
    """Elements that a dealt gradient takes a multiple of, so that each begins aligned."""
    return ALIGN_NBYTES // min(ALIGN_NBYTES, dtype.itemsize, wire_dtype.itemsize)

"""Layout arithmetic for shards and flat buffers, on integers only.

Independent of tensors, process groups and modules, so every rule can be tested in one process for
any number of ranks. ``ShardLayout``: one parameter; ``GatherLayout``: the flat buffers of an
all-gather; ``ReduceLayout``: the flat buffer of a reduce-scatter.

Legend: W is the size of the shard axis; a *shard* is one rank's part of a parameter; a *padded
shard* has the size of the largest shard. A *zero-copy* parameter is sent in a separate collective,
directly from its shards to the unsharded parameter's memory. Other parameters are *packed* into one
collective. A *dealt* parameter is stored in whole blocks of rows (``Deal``). An *owned* parameter
is a dealt parameter that consists of a single block.

[Note: dealt parameters]
If a parameter is dealt, each rank sends one *piece*: the *even* part, which has the same size on
every rank, followed by the rank's rows of each dealt parameter. Pieces are not padded to a common
size. A layout therefore describes one rank, and includes the sizes of all pieces. Adjacent ranks
with the same number of rows of each dealt parameter form a *run*. All pieces of a run have the same
structure, so one copy unpacks the rows that the run has of a parameter. If all dealt parameters are
owned, pieces are gathered consecutively into the full buffer. Owned parameters are then used in
place, and the even parts between them are unpacked like the result of a separate all-gather. In a
reduction, dealt gradients come first, so that stamps stay at the end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import torch

from fsdp2._core.base.capabilities import ROW_NBYTES, ZeroCopy
from fsdp2._core.base.rows import Deal, chunk_of, rows_of

ALIGN_NBYTES = 16
"""Alignment of each dtype segment, and of each unsharded parameter, in its flat buffer."""
MAX_SLOTTED_NUMEL = 16384
"""Maximum number of elements of one replicated parameter's slots in a row of the packed input."""


def align(nbytes: int, to: int = ALIGN_NBYTES) -> int:
    return -(-nbytes // to) * to


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def dense_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return ``stride`` if it has no gaps and no overlaps, else the row-major stride."""
    row_major, expected = contiguous_stride(shape), 1
    for size, step in sorted(zip(shape, stride, strict=True), key=itemgetter(1)):
        if size != 1 and step != expected:
            return row_major
        expected *= max(size, 1)
    # the stride of a dim of size 1 is arbitrary, and so are all strides of an empty tensor
    pairs = zip(shape, stride, row_major, strict=True)
    if 0 in shape or all(size == 1 or step == other for size, step, other in pairs):
        return row_major
    return tuple(stride)


@dataclass(frozen=True)
class ShardLayout:
    """The split of a tensor of ``shape`` and ``stride`` over ``size`` ranks along ``dim`` (None:
    replicated). A shard is contiguous: a chunk (see ``chunk_of``), or the rows of a ``deal``."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dim: int | None
    size: int
    deal: Deal | None = None

    @cached_property
    def padded_shape(self) -> tuple[int, ...]:
        return self.shard_shape(0)

    @cached_property
    def padded_numel(self) -> int:
        return math.prod(self.padded_shape)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def signature(self) -> object:
        """The properties that must be equal on all ranks for their shards to match."""
        return self.shape, self.dim, self.deal

    @property
    def owner(self) -> int | None:
        """The rank that holds the full tensor; None if several ranks hold parts."""
        return None if self.deal is None else self.deal.owner

    @property
    def is_even(self) -> bool:
        """Return True if every rank sends the same number of elements."""
        return self.dim is not None and self.deal is None

    @cached_property
    def is_rank_major(self) -> bool:
        """Return True if the concatenated padded shards equal the tensor followed by padding."""
        return self.is_even and self.dim == 0 and self.stride == contiguous_stride(self.shape)

    def kept_numel(self, rank: int) -> int:
        """Number of elements stored on a rank: its padded shard, or its dealt rows."""
        return self.padded_numel if self.deal is None else math.prod(self.shard_shape(rank))

    def goes_alone(self, dtype: torch.dtype, rule: ZeroCopy | None) -> bool:
        """Return True if the tensor is rank-major and large enough for zero-copy by ``rule``."""
        if rule is None or self.size == 1 or not self.is_rank_major:
            return False
        if self.padded_numel * dtype.itemsize % rule.row_nbytes:
            return False  # rows that are used in place cannot be padded
        return self.numel * dtype.itemsize >= max(1, rule.nbytes)

    def start(self, rank: int) -> int:
        return 0 if self.dim is None else self.span(rank)[0]

    def rows(self, rank: int) -> int:
        """Number of rows of a rank's shard; 0 for a rank without rows or a replicated tensor."""
        return 0 if self.dim is None else self.span(rank)[1]

    def span(self, rank: int) -> tuple[int, int]:
        assert self.dim is not None
        return rows_of(self.shape[self.dim], self.size, rank, self.deal)

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.span(rank)[1], *self.shape[self.dim + 1 :])


SCALE_DTYPE = torch.bfloat16  # dtype of scales, which are powers of two


@dataclass(frozen=True)
class Coding:
    """Encoding of a shard as codes of an 8-bit ``dtype``, followed by scales: one scale per row
    (index of dim 0) of the shard, or one scale for the entire shard."""

    dtype: torch.dtype
    by_row: bool

    def scale_count(self, shape: Sequence[int]) -> int:
        return shape[0] if self.by_row else 1

    def scales_start(self, shape: Sequence[int]) -> int:
        return align(math.prod(shape) * self.dtype.itemsize, SCALE_DTYPE.itemsize)

    def nbytes(self, shape: Sequence[int]) -> int:
        if not math.prod(shape):
            return 0
        return align(self.scales_start(shape) + self.scale_count(shape) * SCALE_DTYPE.itemsize)


@dataclass(frozen=True)
class GatherItem:
    """A parameter, or the tail after all parameters. Uncoded items are sent in compute dtype."""

    shard: ShardLayout
    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    is_tail: bool = False
    coding: Coding | None = None

    @property
    def lands_as_it_is(self) -> bool:
        return self.shard.is_rank_major and self.coding is None

    @property
    def sent_as(self) -> object:
        """The wire format, which must be the same on all ranks."""
        return self.compute_dtype if self.coding is None else (self.compute_dtype, self.coding)

    def room(self, rank: int) -> tuple[int, ...]:
        """Shape of the data stored on a rank: its padded shard, or its dealt rows."""
        return self.shard.shard_shape(0 if self.shard.deal is None else rank)

    def sent_nbytes(self, rank: int) -> int:
        if self.coding is not None:
            return self.coding.nbytes(self.room(rank))
        return self.shard.kept_numel(rank) * self.compute_dtype.itemsize


@dataclass(frozen=True)
class Packed:
    """Content of one all-gather: the padded shards at the start of the send buffer, in order.

    ``sizes`` and ``shapes`` count elements of the wire dtype. ``shapes`` describe the unpacked
    data, and exclude ranks without rows. ``is_dense``: the content is not empty, has no gaps, and
    consists only of rank-major items. ``is_one_split``: one kernel unpacks the content (CUDA's
    kernel aborts on empty data in torch 2.11.0)."""

    order: tuple[int, ...]
    nbytes: int
    sizes: tuple[int, ...]
    shapes: tuple[tuple[int, int], ...]
    is_dense: bool
    is_one_split: bool


@dataclass(frozen=True)
class CastSegment:
    """Adjacent padded shards with the same storage and compute dtypes, so one kernel casts them.
    Starts are byte offsets in the shard and send buffers. ``is_coded``: a single encoded item."""

    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    is_replicated: bool
    shard_start: int
    send_start: int
    numel: int
    indices: tuple[int, ...]
    is_coded: bool = False


class Run(NamedTuple):
    """Adjacent ranks whose pieces have the same structure: the first rank, and the rank count."""

    first: int
    ranks: int


class Landed(NamedTuple):
    """Rows of a dealt item in a run's pieces. They begin at byte ``start`` of the joined pieces."""

    item: int
    run: Run
    start: int


@dataclass(frozen=True)
class Landing:
    """The gathered pieces, if any parameter is dealt. See [Note: dealt parameters]."""

    pieces: tuple[int, ...] = ()  # bytes that each rank sends
    start: int | None = None  # offset of the pieces in the full buffer; None: separate memory
    runs: tuple[Run, ...] = ()
    copied: tuple[Landed, ...] = ()  # dealt parameters that are copied out of the pieces


@dataclass(frozen=True)
class GatherLayout:
    """Layout of a group's flat buffers, in bytes.

    - *shard buffer*: this rank's padded shards in storage dtype, replicated parameters last;
    - *send buffer*: the same shards in compute dtype. Its first ``gather_nbytes`` are sent: the
      packed shards in the first ``packed_nbytes``, then each zero-copy shard in a separate
      collective. Without casts, both buffers have the same layout, and the shard buffer is sent;
    - *full buffer*: consecutive unsharded parameters with room for padding, so that zero-copy
      parameters are gathered in place. With ``trims``, on a host, a packed parameter has no room
      for ranks without rows: of many ranks, most may have no row of a small parameter.

    ``landing``: the pieces, if any parameter is dealt. The layout is then specific to ``rank``.
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
    landing: Landing = Landing()
    trims: bool = False

    @staticmethod
    def plan(
        items: Sequence[GatherItem],
        size: int,
        full_sizes: Sequence[int] = (),
        zero_copy: ZeroCopy | None = None,
        rank: int = 0,
        trims: bool = False,
        tail_numel: int = 0,
    ) -> GatherLayout:
        """Place packed items first, then zero-copy, dealt and replicated items, each kind by dtype.

        If the layout sends data, a tail of ``tail_numel`` or more elements is added, which pads the
        row. It has the dtypes of the widest sharded items, or bytes if all parameters are extended
        (no items). ``full_sizes``: sizes of other axes over which the same parameters are gathered
        into the full buffer, which has room for the padding of each axis. Rank-major parameters
        that match the rule ``zero_copy`` are sent separately; None disables zero-copy."""
        items = list(items)
        dealt = [index for index, item in enumerate(items) if item.shard.deal is not None]
        if dealt:  # one collective sends everything
            zero_copy = None

        def key_of(item: GatherItem) -> tuple[bool, bool, bool, int, str, str]:
            compute, shard = item.compute_dtype, item.shard
            is_plain = not item.is_tail and item.coding is None
            is_alone = is_plain and shard.goes_alone(compute, zero_copy)
            dtypes = -compute.itemsize, str(compute), str(item.storage_dtype)
            return shard.dim is None, shard.deal is not None, is_alone, *dtypes

        keys = [key_of(item) for item in items]
        sends = any(i.sent_nbytes(rank) for i in items if i.shard.dim is not None)
        if tail_numel and size > 1 and (sends or dealt or not items):
            dtypes = torch.uint8, torch.uint8
            if items:
                first = items[keys.index(min(keys))]
                dtypes = first.storage_dtype, first.compute_dtype
            items.append(GatherItem(_tail_shard(tail_numel, size), *dtypes, is_tail=True))
            keys.append(key_of(items[-1]))
        is_mixed = len({i.compute_dtype for i in items if i.shard.dim is not None}) > 1
        is_aligned = is_mixed or bool(dealt) or any(item.coding is not None for item in items)
        unit = ALIGN_NBYTES if is_aligned else 1
        alone = {index for index, key in enumerate(keys) if key[2]}
        packed_kinds = {key[3:] for key in keys if not any(key[:3])}

        def segment_of(index: int) -> tuple[object, ...]:
            is_replicated, is_dealt, is_alone, *dtypes = keys[index]
            # Packed and zero-copy items may share a segment; each dealt or coded item has its own.
            place = -1 if items[index].coding is None and not is_dealt else index
            return is_replicated, place, is_alone and is_mixed, *dtypes

        order = sorted(range(len(items)), key=keys.__getitem__)
        has_tail = any(item.is_tail for item in items)
        # a tail can pad only one segment
        packed_unit = ROW_NBYTES if len(packed_kinds) > 1 and has_tail else unit
        shard_offsets, send_offsets = [0] * len(items), [0] * len(items)
        segments: list[CastSegment] = []
        shard_end = send_end = packed_nbytes = gather_nbytes = 0
        is_behind_even = False
        for _, run in itertools.groupby(order, key=segment_of):
            indices = tuple(run)
            first = items[indices[0]]
            if first.shard.deal is not None and not is_behind_even:
                gap = packed_nbytes - send_end  # the even part has the same length on every rank
                shard_end, send_end, is_behind_even = shard_end + gap, send_end + gap, True
            shard_start = shard_end = align(shard_end)
            send_start = send_end = align(send_end)
            for index in indices:
                item = items[index]
                if item.is_tail and len(packed_kinds) == 1:  # nothing that is packed follows
                    missing = -align(send_end + item.sent_nbytes(rank), unit) % ROW_NBYTES
                    numel = item.shard.padded_numel + missing // item.compute_dtype.itemsize
                    items[index] = item = replace(item, shard=_tail_shard(numel, size))
                shard_offsets[index], send_offsets[index] = shard_end, send_end
                shard_end += item.shard.kept_numel(rank) * first.storage_dtype.itemsize
                send_end += item.sent_nbytes(rank)
                if not any(keys[index][:3]):
                    packed_nbytes = align(send_end, packed_unit)
                if item.shard.dim is not None:
                    gather_nbytes = max(packed_nbytes, align(send_end, unit))
            numel = sum(items[index].shard.kept_numel(rank) for index in indices)
            kind = first.storage_dtype, first.compute_dtype, first.shard.dim is None
            is_coded = first.coding is not None
            segments.append(CastSegment(*kind, shard_start, send_start, numel, indices, is_coded))

        # if all dealt parameters are owned, those that are row-major are used in place
        lands_in_full = bool(dealt) and all(items[i].shard.owner is not None for i in dealt)
        plain = [i for i in dealt if lands_in_full and items[i].coding is None]
        stay = {
            i for i in plain if items[i].shard.stride == contiguous_stride(items[i].shard.shape)
        }
        lands = zero_copy if trims else ZeroCopy(0)
        rooms = [
            0 if i in stay else full_nbytes(one, (size, *full_sizes), lands)
            for i, one in enumerate(items)
        ]
        full_ends = [0, *itertools.accumulate(map(align, rooms))]
        full_offsets, full_end = full_ends[:-1], full_ends[-1]
        dealt.sort(key=keys.__getitem__)  # in the order of the send buffer
        runs = runs_of([items[index].shard for index in dealt], size) if dealt else []
        pieces, landed = _land(items, dealt, runs, packed_nbytes)
        for one in landed:
            if one.item in stay:
                full_offsets[one.item] = full_end + one.start
        return GatherLayout(
            size=size,
            items=tuple(items),
            order=tuple(order),
            segments=tuple(segments),
            shard_offsets=tuple(shard_offsets),
            send_offsets=tuple(send_offsets),
            full_offsets=tuple(full_offsets),
            zero_copy=tuple(i for i in order if i in alone),
            shard_nbytes=max(shard_end, gather_nbytes),
            send_nbytes=max(send_end, gather_nbytes),
            packed_nbytes=packed_nbytes,
            gather_nbytes=gather_nbytes,
            full_nbytes=full_end + (sum(pieces) if lands_in_full else 0),
            rank=rank if dealt else 0,
            landing=Landing(
                pieces=tuple(pieces),
                start=full_end if lands_in_full else None,
                runs=tuple(runs),
                copied=tuple(one for one in landed if one.item not in stay),
            ),
            trims=trims,
        )

    @cached_property
    def casts(self) -> bool:
        """Return True if a parameter is coded, or its compute and storage dtypes differ."""
        if self.coding is not None:
            return True
        return any(item.storage_dtype != item.compute_dtype for item in self.items)

    @cached_property
    def coding(self) -> Coding | None:
        """The coding of all items that have one: that of their group's policy."""
        return next((item.coding for item in self.items if item.coding is not None), None)

    @cached_property
    def wire_dtype(self) -> torch.dtype:
        """Dtype of the all-gather: the parameters' dtype if they share one, else bytes."""
        dtypes = {item.compute_dtype for item in self.items if item.shard.dim is not None}
        if len(dtypes) == 1 and self.coding is None:
            (dtype,) = dtypes
            if dtype.is_floating_point and dtype.itemsize > 1:
                return dtype
        return torch.uint8

    @cached_property
    def landing_numel(self) -> int:
        return sum(self.landing.pieces) // self.wire_dtype.itemsize

    @cached_property
    def packed(self) -> Packed:
        """Content of the packed collective, without zero-copy and dealt shards."""
        even = [i for i in self.order if self.items[i].shard.is_even]
        indices = tuple(even[: len(even) - len(self.zero_copy)])
        padded = [self.items[index].sent_nbytes(self.rank) for index in indices]
        rank_major = all(self.items[index].lands_as_it_is for index in indices)
        sizes = tuple(one // self.wire_dtype.itemsize for one in padded)
        is_dense = rank_major and sum(padded) == self.packed_nbytes > 0
        shapes = tuple(zip(map(self.ranks_of, indices), sizes, strict=True))
        is_one_split = is_dense and all(ranks == self.size for ranks, _ in shapes)
        return Packed(indices, self.packed_nbytes, sizes, shapes, is_dense, is_one_split)

    def ranks_of(self, index: int) -> int:
        """Return the number of ranks whose rows are unpacked; all ranks for a zero-copy item."""
        item = self.items[index]
        if not self.trims or item.is_tail or index in self.zero_copy or not item.lands_as_it_is:
            return self.size
        return -(-item.shard.shape[0] // max(item.shard.padded_shape[0], 1))

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        return tuple(i for i in self.order if self.items[i].shard.dim is None)

    def has_full_of(self, other: GatherLayout) -> bool:
        """Return True if both layouts place unsharded parameters identically in the full buffer."""
        mine, theirs = (
            ([item.compute_dtype for item in one.items], one.full_offsets, one.full_nbytes)
            for one in (self, other)
        )
        return mine == theirs

    def padded_nbytes(self, index: int) -> int:
        return self.items[index].sent_nbytes(self.rank)


def _tail_shard(numel: int, size: int) -> ShardLayout:
    return ShardLayout((size * numel,), (1,), 0, size)


def runs_of(shards: Sequence[ShardLayout], size: int) -> list[Run]:
    """Return the runs of ranks. See [Note: dealt parameters]."""
    rows = [[shard.rows(rank) for shard in shards] for rank in range(size)]
    groups = [list(run) for _, run in itertools.groupby(range(size), key=rows.__getitem__)]
    return [Run(ranks[0], len(ranks)) for ranks in groups]


def _land(
    items: Sequence[GatherItem],
    dealt: Sequence[int],
    runs: Sequence[Run],
    even_nbytes: int,
) -> tuple[list[int], list[Landed]]:
    """Return the size of each piece in bytes, and the positions of dealt items in the pieces."""
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
    """Return the bytes to reserve for a parameter gathered over axes of ``sizes``; 0 for a tail. If
    it matches ``lands``, the padded shards of all ranks fit, else only those of ranks with rows."""
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
    """Layout of a group's reduce-scatter, independent of which members have gradients. It is the
    same on every rank, unless a member is dealt: [Note: dealt parameters].

    The output has ``numel`` elements of ``dtype``. The shards of *zero-copy* members are first,
    each reduced from its gradient in a separate collective. The result of one collective on a
    packed input ``[W, packed_numel]`` of ``wire_dtype`` begins at ``packed_start``. In the packed
    input, a parameter sharded on ``dim`` has that dim first, and each rank's row contains
    all replicated parameters in full. A small replicated parameter has a *slot* per rank: all ranks
    add the same values in the same order, so replicas stay bitwise equal. The tail is last."""

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
    tail_gap: int  # unused elements before the tail, which pad the row
    numel: int
    rank: int = 0
    dealt_numels: tuple[int, ...] = ()  # dealt elements per rank; (): nothing is dealt
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
        adds_alike: bool = False,
    ) -> ReduceLayout:
        """Place the trainable parameters ``members`` (indices into the group).

        Row sizes of the packed input are multiples of ``row_nbytes``. Rank-major members that match
        the rule ``zero_copy`` and divide evenly are sent separately; None disables zero-copy. If
        all ranks add rows in the same order (``adds_alike``), replicated members need no slots."""
        sent_as = wire_dtype or dtype
        dealt = [shard for shard in shards if shard.deal is not None]
        if dealt:  # one collective sends everything
            zero_copy = None
        unit = _dealt_unit(dtype, sent_as)
        runs = runs_of(dealt, size) if dealt else []
        dealt_numels = [
            sum(align(shard.kept_numel(each), unit) for shard in dealt)
            for each in range(size if dealt else 0)
        ]
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
            if shard.deal is not None:
                offsets[position] = end
                end += align(shard.kept_numel(rank), unit)
        packed_start = end
        for position, shard in enumerate(shards):
            if position in alone or shard.deal is not None:
                continue
            offsets[position] = end
            most = 0 if adds_alike else MAX_SLOTTED_NUMEL // (shard.numel or 1)
            slotted[position] = shard.dim is None and 1 < size <= most
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
        end, itemsize = self.tail_start - self.tail_gap, self.wire_dtype.itemsize
        nbytes = (end - self.packed_start + numel) * itemsize
        gap = 0 if self.size == 1 else -nbytes % row_nbytes // itemsize
        start = end + gap
        return replace(self, tail_start=start, tail_gap=gap, numel=start + numel)

    def width(self, position: int) -> int:
        kept = self.shards[position].kept_numel(self.rank)
        return kept * (self.size if self.slotted[position] else 1)

    def room_for(self, position: int, rank: int) -> int:
        """Number of elements of a dealt member in the piece that is reduced for a rank."""
        kept = self.shards[position].kept_numel(rank)
        return align(kept, _dealt_unit(self.dtype, self.wire_dtype))

    @cached_property
    def exact(self) -> tuple[tuple[int, int], ...]:
        """Ranges of columns that must not be rounded: replicated members, whose sums must be equal
        on all replicas, and the tail, which contains integers."""
        spans = [
            (self.offsets[position], self.offsets[position] + self.width(position))
            for position, shard in enumerate(self.shards)
            if shard.dim is None
        ]
        spans.append((self.tail_start - self.tail_gap, self.numel))
        return tuple((first, last) for first, last in spans if first < last)

    @cached_property
    def dealt(self) -> tuple[int, ...]:
        """Positions of the dealt members, in their order in each piece."""
        return tuple(p for p, shard in enumerate(self.shards) if shard.deal and shard.numel)

    @cached_property
    def pieces(self) -> tuple[int, ...]:
        """Number of elements that are reduced for each rank; () if no member is dealt."""
        return tuple(dealt + self.packed_numel for dealt in self.dealt_numels)

    @cached_property
    def packed(self) -> tuple[int, ...]:
        """Positions of the packed members that have elements."""
        positions = set(range(len(self.shards))) - set(self.zero_copy) - set(self.dealt)
        return tuple(p for p in sorted(positions) if self.shards[p].padded_numel)

    @cached_property
    def rearranged(self) -> tuple[int, ...]:
        """Indices into ``packed`` of members whose gradients must be rearranged into rows."""
        packed = enumerate(self.packed)
        return tuple(i for i, p in packed if self.slotted[p] or self.shards[p].dim != 0)

    @cached_property
    def cut(self) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]] | None:
        """Widths of the packed columns (tail last), and shapes of the rows without padding. None if
        padding is under half of the data, or if a rank has some rows, but fewer than rank 0."""
        shapes: list[tuple[int, ...]] = []
        widths, numel, room = list(map(self.width, self.packed)), 0, 0
        for width, shard in zip(widths, map(self.shards.__getitem__, self.packed), strict=True):
            if not shard.is_even:
                shapes.append((self.size, width))
                continue
            dim = shard.dim or 0
            rows, rest = shard.shape[dim], (*shard.shape[:dim], *shard.shape[dim + 1 :])
            most = shard.rows(0)
            if rows % most:
                return None
            shapes.append((rows, *rest) if most == 1 else (rows // most, width))
            numel, room = numel + shard.numel, room + width * self.size
        if 2 * numel > room or not room or self.dealt:
            return None
        tail = self.numel - self.tail_start + self.tail_gap
        return (*widths, tail), (*shapes, (self.size, tail))

    @cached_property
    def output_sizes(self) -> list[int]:
        """Number of elements of each output: zero-copy members, then the packed collective."""
        sizes = [self.shards[position].padded_numel for position in self.zero_copy]
        return [*sizes, self.packed_numel]

    @cached_property
    def packed_numel(self) -> int:
        return self.numel - self.packed_start

    @cached_property
    def nbytes(self) -> int:
        numel = sum(self.pieces) if self.pieces else self.size * self.numel
        return numel * self.wire_dtype.itemsize


def _dealt_unit(dtype: torch.dtype, wire_dtype: torch.dtype) -> int:
    """Return the alignment of dealt gradients, in elements."""
    return ALIGN_NBYTES // min(ALIGN_NBYTES, dtype.itemsize, wire_dtype.itemsize)

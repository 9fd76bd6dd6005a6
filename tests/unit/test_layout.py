"""Ints only: shards are the chunks of `torch.chunk`, and nothing overlaps in a flat buffer."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp2._core.base.capabilities import ROW_NBYTES, ZeroCopy
from fsdp2._core.params.layout import (
    ALIGN_NBYTES,
    MAX_SLOTTED_NUMEL,
    GatherItem,
    GatherLayout,
    ReduceLayout,
    ShardLayout,
    align,
    contiguous_stride,
    full_nbytes,
)
from tests.unit._loopback import chunk_of
from tests.unit._strategies import Spec, groups_of_specs, rank_counts, specs, zero_copy_rules


def plain(shape: tuple[int, ...], size: int, dim: int | None = 0) -> ShardLayout:
    return ShardLayout(shape, contiguous_stride(shape), dim, size)


def fp32(shape: tuple[int, ...], size: int, dim: int | None = 0) -> GatherItem:
    return GatherItem(plain(shape, size, dim), torch.float32, torch.float32)


# --- one parameter --------------------------------------------------------------------------------


@given(specs(), rank_counts)
def test_shards_are_torchs_chunks(spec: Spec, size: int) -> None:
    layout = spec.over(size)
    whole = torch.arange(math.prod(spec.shape)).reshape(spec.shape)
    for rank in range(size):
        expected = chunk_of(whole, spec.dim, rank, size)
        assert layout.shard_shape(rank) == tuple(expected.shape)
        if spec.dim is not None:
            assert layout.rows(rank) == expected.shape[spec.dim]
            mine = whole.narrow(spec.dim, layout.start(rank), layout.rows(rank))
            assert torch.equal(mine, expected)


@given(specs(), rank_counts)
def test_a_piece_holds_any_shard_and_the_largest_exactly(spec: Spec, size: int) -> None:
    layout = spec.over(size)
    shards = [math.prod(layout.shard_shape(rank)) for rank in range(size)]
    assert layout.padded_numel == max(shards) == math.prod(layout.padded_shape)
    assert sum(shards) == layout.numel * (size if spec.dim is None else 1)


@pytest.mark.parametrize(
    ("shape", "size", "rows"),
    [
        ((13, 29), 4, [4, 4, 4, 1]),
        ((1, 5), 3, [1, 0, 0]),
        ((6,), 4, [2, 2, 2, 0]),
        ((0,), 2, [0, 0]),
    ],
)
def test_rows_by_example(shape: tuple[int, ...], size: int, rows: list[int]) -> None:
    layout = plain(shape, size)
    assert [layout.rows(rank) for rank in range(size)] == rows
    assert layout.padded_shape == (rows[0], *shape[1:])


@given(st.lists(st.integers(0, 13), max_size=4))
def test_contiguous_stride_is_torchs(shape: list[int]) -> None:
    assert contiguous_stride(shape) == torch.empty(shape).stride()


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_align(nbytes: int, to: int) -> None:
    aligned = align(nbytes, to)
    assert aligned % to == 0
    assert 0 <= aligned - nbytes < to


@given(specs(), rank_counts)
def test_rank_major_means_that_pieces_in_a_row_are_the_tensor(spec: Spec, size: int) -> None:
    layout = spec.over(size)
    memory_order = torch.empty_strided(spec.shape, layout.stride)
    assert layout.is_rank_major == (spec.dim == 0 and memory_order.is_contiguous())


# --- the flat buffers of an all-gather ------------------------------------------------------------


def assert_disjoint(ranges: list[tuple[int, int]], nbytes: int) -> None:
    end = 0
    for start, stop in sorted(r for r in ranges if r[0] < r[1]):
        assert start >= end, "two parameters overlap"
        end = stop
    assert end <= nbytes, "a parameter ends behind the buffer"


@given(groups_of_specs, rank_counts, st.sampled_from([16, ROW_NBYTES]))
def test_rows_that_travel_alone_are_multiples_where_asked(
    group: list[Spec], size: int, row_nbytes: int
) -> None:
    """They cannot be filled up, so a parameter whose rows are none travels with others."""
    items = [spec.item(size) for spec in group]
    any_rows = GatherLayout.plan(items, size, (), ZeroCopy(1))
    layout = GatherLayout.plan(items, size, (), ZeroCopy(1, row_nbytes))
    fitting = {i for i in any_rows.zero_copy if any_rows.padded_nbytes(i) % row_nbytes == 0}
    assert set(layout.zero_copy) == fitting
    shards, dtype = [spec.over(size) for spec in group], torch.float32
    reduced = ReduceLayout.plan(
        range(len(group)), shards, size, dtype, 0, None, ZeroCopy(1, row_nbytes)
    )
    assert all(shards[p].padded_numel * 4 % row_nbytes == 0 for p in reduced.zero_copy)


@given(groups_of_specs, rank_counts, zero_copy_rules, st.booleans())
def test_offsets_are_aligned_disjoint_and_inside(
    group: list[Spec], size: int, zero_copy: ZeroCopy | None, trims: bool
) -> None:
    items = [spec.item(size) for spec in group]
    layout = GatherLayout.plan(items, size, (), zero_copy, trims=trims)
    shard, send, full = [], [], []
    for index, item in enumerate(items):
        numel = item.shard.padded_numel
        start = layout.shard_offsets[index]
        assert start % item.storage_dtype.itemsize == 0
        shard.append((start, start + numel * item.storage_dtype.itemsize))
        start = layout.send_offsets[index]
        assert start % item.compute_dtype.itemsize == 0
        assert layout.padded_nbytes(index) == numel * item.compute_dtype.itemsize
        send.append((start, start + layout.padded_nbytes(index)))
        if item.shard.dim is not None:
            assert send[-1][1] <= layout.gather_nbytes, "a sharded piece is not sent"
            is_inside = send[-1][1] <= layout.packed_nbytes
            assert is_inside != (index in layout.zero_copy) or not numel
        start = layout.full_offsets[index]
        assert start % ALIGN_NBYTES == 0
        landed = layout.ranks_of(index) * layout.padded_nbytes(index)
        exact = item.shard.numel * item.compute_dtype.itemsize
        full.append((start, start + (landed if item.shard.is_rank_major else exact)))
        if trims and index not in layout.zero_copy and item.shard.is_rank_major:
            assert exact <= landed < exact + max(layout.padded_nbytes(index), 1)
    assert_disjoint(shard, layout.shard_nbytes)
    assert_disjoint(send, layout.send_nbytes)
    assert_disjoint(full, layout.full_nbytes)


@given(groups_of_specs, rank_counts, zero_copy_rules)
def test_what_is_sent_divides_into_the_wires_elements(
    group: list[Spec], size: int, zero_copy: ZeroCopy | None
) -> None:
    items = [spec.item(size) for spec in group]
    layout = GatherLayout.plan(items, size, (), zero_copy)
    wire = layout.wire_dtype
    assert layout.gather_nbytes % wire.itemsize == 0
    sharded = {i.compute_dtype for i in items if i.shard.dim is not None}
    assert wire is torch.uint8 or sharded == {wire}
    assert layout.casts == any(i.storage_dtype != i.compute_dtype for i in items)
    if not layout.casts:
        assert layout.shard_offsets == layout.send_offsets
        assert layout.shard_nbytes == layout.send_nbytes
    if not sharded:
        assert layout.gather_nbytes == 0


@given(groups_of_specs, rank_counts, zero_copy_rules)
def test_segments_cover_every_piece_once(
    group: list[Spec], size: int, zero_copy: ZeroCopy | None
) -> None:
    items = [spec.item(size) for spec in group]
    layout = GatherLayout.plan(items, size, (), zero_copy)
    assert sorted(layout.order) == list(range(len(items)))
    assert sum(s.numel for s in layout.segments) == sum(i.shard.padded_numel for i in items)
    for segment in layout.segments:
        assert segment.shard_start % ALIGN_NBYTES == 0
        assert segment.send_start % ALIGN_NBYTES == 0
    for index, item in enumerate(items):
        dtypes = (item.storage_dtype, item.compute_dtype)
        inside = [
            s
            for s in layout.segments
            if (s.storage_dtype, s.compute_dtype) == dtypes
            and s.shard_start <= layout.shard_offsets[index]
            and layout.shard_offsets[index] + item.shard.padded_numel * dtypes[0].itemsize
            <= s.shard_start + s.numel * dtypes[0].itemsize
        ]
        assert inside, f"no segment casts item {index}"
        first = inside[0]
        position = (layout.shard_offsets[index] - first.shard_start) // dtypes[0].itemsize
        assert layout.send_offsets[index] == first.send_start + position * dtypes[1].itemsize


@given(groups_of_specs, rank_counts)
def test_full_buffer_has_room_for_the_padding(group: list[Spec], size: int) -> None:
    for spec in group:
        item = spec.item(size)
        room = full_nbytes(item, (size,), ZeroCopy(0)) // item.compute_dtype.itemsize
        assert room >= item.shard.numel
        if item.shard.is_rank_major:
            assert room >= size * item.shard.padded_numel
        assert room <= item.shard.numel + size * math.prod(item.shard.shape[1:])


@given(
    groups_of_specs,
    st.sampled_from([(8, 4), (8, 2), (6, 3), (6, 2), (4, 2), (4, 1)]),
    zero_copy_rules,
    st.booleans(),
    st.integers(1, 40),
)
def test_two_axes_place_unsharded_parameters_alike(
    group: list[Spec], sizes: tuple[int, int], rule: ZeroCopy | None, trims: bool, numel: int
) -> None:
    """What `reshard_after_forward=<int>` needs: one full buffer that both gathers fill.

    The smaller mesh gathers parameters as they are computed. Tails have no room in the buffer.
    """
    large, small = sizes
    items = [spec.item(large) for spec in group]
    home = GatherLayout.plan(items, large, (small,), rule, 0, trims, numel)
    items = [spec.item(small) for spec in group]
    items = [replace(item, storage_dtype=item.compute_dtype) for item in items]
    waiting = GatherLayout.plan(items, small, (large,), rule, 0, trims, numel)
    count = len(group)
    assert home.full_offsets[:count] == waiting.full_offsets[:count]
    assert home.full_nbytes == waiting.full_nbytes
    for layout in (home, waiting):
        ends = [
            start + layout.ranks_of(index) * layout.padded_nbytes(index)
            for index, start in enumerate(layout.full_offsets[:count])
            if layout.items[index].shard.is_rank_major
        ]
        assert max(ends, default=0) <= home.full_nbytes


def test_a_plan_by_example() -> None:
    """Wide dtypes first, replicated ones last, a gap only where a dtype begins."""
    items = [
        GatherItem(plain((3,), 2), torch.bfloat16, torch.bfloat16),
        fp32((5, 2), 2),
        fp32((), 2, None),
        fp32((4,), 2),
    ]
    layout = GatherLayout.plan(items, 2)
    assert layout.order == (1, 3, 0, 2)
    assert layout.shard_offsets == (32, 0, 48, 24)
    assert layout.gather_nbytes == 48
    assert layout.shard_nbytes == 52
    assert layout.full_offsets == (0, 16, 64, 80)
    assert layout.wire_dtype is torch.uint8
    assert not layout.packed.is_one_split


def test_a_plan_of_one_dtype_has_no_gap_and_one_split_unpacks_it() -> None:
    layout = GatherLayout.plan([fp32((13, 29), 3), fp32((7,), 3), fp32((1, 5), 3)], 3)
    assert layout.packed.is_one_split
    assert layout.wire_dtype is torch.float32
    assert layout.gather_nbytes == 4 * (5 * 29 + 3 + 5)


def test_a_plan_of_nothing_is_not_split() -> None:
    """CUDA's kernel divides by what there is to split, and ends the process."""
    assert not GatherLayout.plan([fp32((0, 29), 3), fp32((0,), 3)], 3).packed.is_one_split


def test_a_cast_halves_what_is_sent() -> None:
    item = GatherItem(plain((8, 4), 2), torch.float32, torch.bfloat16)
    layout = GatherLayout.plan([item], 2)
    assert (layout.shard_nbytes, layout.gather_nbytes) == (64, 32)
    assert layout.casts
    assert layout.wire_dtype is torch.bfloat16


# --- the flat buffer of a reduce-scatter ----------------------------------------------------------


@given(groups_of_specs, rank_counts)
def test_reduce_layout_places_members_behind_each_other(group: list[Spec], size: int) -> None:
    shards = [spec.over(size) for spec in group]
    members = [2 * position for position in range(len(group))]
    layout = ReduceLayout.plan(members, shards, size, torch.float32, len(members))
    end = 0
    for position, (shard, start) in enumerate(zip(layout.shards, layout.offsets, strict=True)):
        assert start == end
        is_small = shard.numel * size <= MAX_SLOTTED_NUMEL
        assert layout.slotted[position] == (shard.dim is None and size > 1 and is_small)
        end += shard.padded_numel * (size if layout.slotted[position] else 1)
        assert layout.width(position) == end - start
    assert layout.tail_start == end
    assert layout.numel == end + len(members)
    assert layout.members == tuple(members)
    assert layout.nbytes == size * layout.numel * 4


# --- rows of what is sent -------------------------------------------------------------------------


@given(groups_of_specs, rank_counts, zero_copy_rules, st.integers(1, 40))
def test_packed_rows_of_a_gather_begin_at_cache_lines(
    group: list[Spec], size: int, zero_copy: ZeroCopy | None, numel: int
) -> None:
    items = [spec.item(size) for spec in group]
    layout = GatherLayout.plan(items, size, (), zero_copy, tail_numel=numel)
    if len(layout.items) == len(items):  # no tail: one rank, or nothing that is sent
        assert size == 1 or layout.gather_nbytes == 0
        return
    assert layout.packed_nbytes % ROW_NBYTES == 0
    tail = layout.items[-1]
    assert tail.is_tail
    without = GatherLayout.plan(items, size, (), zero_copy)
    least = without.packed_nbytes + numel * tail.compute_dtype.itemsize
    assert tail.shard.padded_numel >= numel
    assert layout.packed_nbytes < least + 2 * ROW_NBYTES


def test_rows_of_one_dtype_that_is_stored_as_two() -> None:
    """The segment that ends the row has no tail that could fill it up."""
    stored = [torch.float32, torch.bfloat16]
    items = [GatherItem(plain((13, 5), 4), dtype, torch.bfloat16) for dtype in stored]
    layout = GatherLayout.plan(items, 4, tail_numel=12)
    assert layout.packed_nbytes % ROW_NBYTES == 0
    assert layout.send_nbytes >= layout.packed_nbytes


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]


@given(groups_of_specs, rank_counts, st.sampled_from(DTYPES), zero_copy_rules, st.integers(0, 40))
def test_packed_rows_of_a_reduction_begin_at_cache_lines(
    group: list[Spec], size: int, dtype: torch.dtype, zero_copy: ZeroCopy | None, tail: int
) -> None:
    shards = [spec.over(size) for spec in group]
    plain = ReduceLayout.plan(range(len(group)), shards, size, dtype, tail, None, zero_copy)
    layout = ReduceLayout.plan(
        range(len(group)), shards, size, dtype, tail, None, zero_copy, ROW_NBYTES
    )
    assert layout.offsets == plain.offsets
    assert layout.numel - layout.tail_start == tail
    assert layout.tail_start - layout.tail_gap == plain.tail_start
    if size == 1:  # nothing is sent
        assert layout == plain
    else:
        assert layout.packed_numel * dtype.itemsize % ROW_NBYTES == 0
        assert layout.tail_gap * dtype.itemsize < ROW_NBYTES
    assert layout.with_tail(tail) == plain

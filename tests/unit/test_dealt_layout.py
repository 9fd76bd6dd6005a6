"""Promise: what ranks of dealt parameters send in pieces, joined by hand, is what was there."""

from __future__ import annotations

import dataclasses
import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fsdp2._core.base.rows import EVERYTHING, Deal, rows_of
from fsdp2._core.params import gradient_packing, packing
from fsdp2._core.params.deals import (
    Claim,
    Loads,
    deal_blocks,
    newton_schulz_flops,
)
from fsdp2._core.params.layout import (
    ALIGN_NBYTES,
    GatherItem,
    GatherLayout,
    ReduceLayout,
    ShardLayout,
    align,
)
from tests.unit._loopback import same_bits
from tests.unit._packed import garbage, gathered, sent_by_all
from tests.unit._strategies import Spec, specs, whole_numbers

CPU = torch.device("cpu")


@st.composite
def dealt_groups(
    draw: st.DrawFn, *, differentiable: bool = False
) -> tuple[int, list[Spec], list[ShardLayout]]:
    """Draw ranks, parameters, and how they lie: some in blocks, or whole on one rank."""
    size = draw(st.integers(2, 5))
    group = draw(st.lists(specs(differentiable=differentiable), min_size=1, max_size=5))
    only_owned = draw(st.booleans())
    shards = []
    for spec in group:
        shard = spec.over(size)
        if shard.numel and shard.shape and draw(st.integers(0, 2)):
            block = EVERYTHING if only_owned else draw(st.sampled_from([1, 2, 3, EVERYTHING]))
            dim = 0 if block == EVERYTHING else draw(st.integers(0, len(shard.shape) - 1))
            deal = Deal(block, draw(st.integers(0, size - 1)))
            shard = dataclasses.replace(shard, dim=dim, deal=deal)
        shards.append(shard)
    return size, group, shards


def layouts_of(
    size: int, group: list[Spec], shards: list[ShardLayout], tail: int
) -> list[GatherLayout]:
    items = [
        GatherItem(shard, spec.dtype, spec.compute_dtype)
        for spec, shard in zip(group, shards, strict=True)
    ]
    return [GatherLayout.plan(items, size, rank=rank, tail_numel=tail) for rank in range(size)]


@given(dealt_groups(), st.integers(0, 40), st.integers(0, 99))
def test_gathered_parameters_are_the_original_ones(
    drawn: tuple[int, list[Spec], list[ShardLayout]], tail: int, seed: int
) -> None:
    """Each rank sends its piece, and gets all of them: bits, dtypes and strides are as they were.

    A piece is the even part and what its rank is dealt: it is padded to no other rank's.
    """
    size, group, shards = drawn
    layouts = layouts_of(size, group, shards, tail)
    wholes = [spec.make(seed + index) for index, spec in enumerate(group)]
    if not layouts[0].landing.pieces:
        return
    sent = sent_by_all(wholes, layouts)
    for rank, layout in enumerate(layouts):
        dealt = [
            wholes[index].narrow(shard.dim or 0, *shard.span(rank)).numel()
            * spec.compute_dtype.itemsize
            for index, (spec, shard) in enumerate(zip(group, shards, strict=True))
            if shard.deal is not None
        ]
        assert layout.landing.pieces[rank] == layout.packed_nbytes + sum(map(align, dealt))
        assert layout.landing.pieces[rank] == layout.gather_nbytes
        assert layout.landing.pieces == layouts[0].landing.pieces
        assert layout.full_offsets == layouts[0].full_offsets
        assert layout.packed_nbytes == layouts[0].packed_nbytes
        assert layout.wire_dtype is layouts[0].wire_dtype
    for rank in (0, size - 1):
        layout = layouts[rank]
        full = garbage(layout.full_nbytes)
        are_owned = all(s.deal is None or s.deal.owner is not None for s in shards)
        assert (packing.landing_in(full, layout) is not None) == are_owned
        tensors = gathered(full, sent, layout, rank)[: len(group)]
        for tensor, whole, spec, shard in zip(tensors, wholes, group, shards, strict=True):
            assert same_bits(tensor, whole.to(spec.compute_dtype))
            assert tensor.stride() == shard.stride
        assert all(start % ALIGN_NBYTES == 0 for start in layout.full_offsets)


@given(dealt_groups(differentiable=True), st.sampled_from([1, 128]), st.data())
def test_reduced_gradients_are_the_dealt_rows_of_the_sum(
    drawn: tuple[int, list[Spec], list[ShardLayout]], row_nbytes: int, data: st.DataObject
) -> None:
    """Every rank sends each other one a piece, padded to no other rank's; missing ones are zero."""
    size, group, shards = drawn
    dtype = torch.complex64 if any(s.dtype.is_complex for s in group) else torch.float64
    members = list(range(len(group)))
    layouts = [
        ReduceLayout.plan(
            members, shards, size, dtype, len(group), row_nbytes=row_nbytes, rank=rank
        )
        for rank in range(size)
    ]
    if not layouts[0].pieces:
        return
    missing = data.draw(st.sets(st.sampled_from(range(size)), max_size=2))
    totals = [torch.zeros(shard.shape, dtype=dtype) for shard in shards]
    pieces: list[list[Tensor]] = []
    for rank, layout in enumerate(layouts):
        grads: list[Tensor | None] = []
        for index, shard in enumerate(shards):
            grad = whole_numbers(shard.shape, dtype, rank * 7 + index)
            is_missing = rank in missing and index == 0
            grads.append(None if is_missing else grad)
            totals[index] += 0 if is_missing else grad
        behind = gradient_packing.tail((), layout, dtype, CPU)
        absent = [index for index, grad in enumerate(grads) if grad is None]
        if absent:
            behind = gradient_packing.tail_without(behind, absent, layout)
        (flat,) = gradient_packing.pack_gradients(
            grads,
            layout,
            rank,
            behind,
            lambda shape, dtype, device: torch.full(tuple(shape), 7, dtype=dtype, device=device),
        )
        assert flat.numel() == sum(layout.pieces) == layout.nbytes // dtype.itemsize
        pieces.append(list(flat.split(list(layout.pieces))))
    for rank, layout in enumerate(layouts):
        reduced = torch.stack([own[rank] for own in pieces]).sum(0)
        assert reduced.numel() == layout.numel == layouts[0].pieces[rank]
        for position, shard in enumerate(shards):
            expected = packing.shard_of(totals[position], shard, rank)
            if layout.slotted[position]:
                found = gradient_packing.sum_of_slots(reduced, layout, position)
            else:
                found = gradient_packing.gradient_view(reduced, layout, position, rank)
            assert torch.equal(found, expected)
        counts = reduced[layout.tail_start :][: len(group)].real
        assert counts.tolist() == [size - len(missing) * (index == 0) for index in members]


LLAMA_8B = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
LLAMA_8B += [(14336, 4096), (14336, 4096), (4096, 14336)]


def test_owners_over_the_blocks_of_a_model_have_like_amounts() -> None:
    """Bytes and FLOPs of the busiest rank over the mean, block by block, as calls come."""
    for ranks, limit in ((8, 1.03), (64, 1.27)):
        loads = Loads.of(ranks)
        for _ in range(32):
            deal_blocks([Claim(shape, 4) for shape in LLAMA_8B], loads)
        assert max(loads.nbytes) / (sum(loads.nbytes) / ranks) <= limit
        assert max(loads.flops) / (sum(loads.flops) / ranks) <= limit
    # one matrix cannot be divided: with more ranks than matrices it is the bound
    loads = Loads.of(512)
    for _ in range(32):
        deal_blocks([Claim(shape, 4) for shape in LLAMA_8B], loads)
    assert max(loads.flops) == max(newton_schulz_flops(shape) for shape in LLAMA_8B)


def test_who_is_named_is_the_owner() -> None:
    loads = Loads.of(3)
    claims = [Claim((5, 5), 4, owner=2), Claim((9, 9), 4), Claim((5, 5), 4, owner=2)]
    assert [deal.owner for deal in deal_blocks(claims, loads)] == [2, 0, 2]
    assert [*itertools.accumulate(loads.nbytes)][-1] == 4 * (25 + 81 + 25)


def test_blocks_that_are_left_over_go_to_who_has_least() -> None:
    """Blocks of 128 rows on more ranks than a matrix has blocks: the busiest rank over the mean."""
    for ranks, limit in ((8, 1.0), (64, 1.02), (512, 1.32)):
        loads, held = Loads.of(ranks), [0] * ranks
        for _ in range(32):
            deals = deal_blocks([Claim(shape, 4, 0, 128) for shape in LLAMA_8B], loads)
            for deal, shape in zip(deals, LLAMA_8B, strict=True):
                for rank in range(ranks):
                    held[rank] += rows_of(shape[0], ranks, rank, deal)[1] * shape[1]
        assert max(held) / (sum(held) / ranks) <= limit

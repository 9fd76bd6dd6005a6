"""Round trips without processes: what every rank packs, joined by hand, is what was there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fsdp2._core.base.capabilities import ZeroCopy
from fsdp2._core.comm.wire import Kept
from fsdp2._core.params import gradient_packing, packing
from fsdp2._core.params.layout import GatherLayout, ReduceLayout
from tests.unit._loopback import chunk_of, same_bits
from tests.unit._packed import garbage, send_buffer, shard_buffer
from tests.unit._strategies import (
    Spec,
    groups_of_specs,
    rank_counts,
    specs,
    whole_numbers,
    zero_copy_rules,
)

CPU = torch.device("cpu")


def shard_buffers(wholes: list[Tensor], layout: GatherLayout) -> list[Tensor]:
    """Return every rank's shard buffer."""
    return [shard_buffer(wholes, layout, rank) for rank in range(layout.size)]


def send_buffers(buffers: list[Tensor], layout: GatherLayout) -> list[Tensor]:
    return [send_buffer(buffer, layout, rank) for rank, buffer in enumerate(buffers)]


def fill(full: Tensor, sends: list[Tensor], rank: int, layout: GatherLayout) -> None:
    """Do what a gather does: one collective, and one for each zero-copy piece."""
    packed = layout.packed
    targets = packing.gather_targets(full, layout, packed.order)
    parts = [send[: packed.nbytes].view(layout.wire_dtype) for send in sends]
    packing.unpack(torch.stack(parts), layout, targets)
    landing = packing.gather_targets(full, layout, layout.zero_copy)
    for index, target in zip(layout.zero_copy, landing, strict=True):
        start, nbytes = layout.send_offsets[index], layout.padded_nbytes(index)
        pieces = [send[start : start + nbytes].view(layout.wire_dtype) for send in sends]
        target.copy_(torch.stack(pieces))
    replicated = packing.gather_targets(full, layout, layout.replicated)
    packing.unpack_replicated(sends[rank], layout, replicated)


# --- gather ---------------------------------------------------------------------------------------


@given(
    groups_of_specs,
    rank_counts,
    st.integers(0, 99),
    zero_copy_rules,
    st.booleans(),
)
def test_gathered_parameters_are_the_original_ones(
    group: list[Spec], size: int, seed: int, zero_copy: ZeroCopy | None, trims: bool
) -> None:
    """Values bit for bit, dtypes as computed, strides as they were, on every rank."""
    wholes = [spec.make(seed + index) for index, spec in enumerate(group)]
    items = [spec.item(size) for spec in group]
    layout = GatherLayout.plan(items, size, (), zero_copy, trims=trims)
    sends = send_buffers(shard_buffers(wholes, layout), layout)
    for rank in {0, size - 1}:
        full = garbage(layout.full_nbytes)
        tensors = packing.full_tensors(full, layout)
        versions = [tensor._version for tensor in tensors]
        fill(full, sends, rank, layout)
        for tensor, whole, spec in zip(tensors, wholes, group, strict=True):
            assert same_bits(tensor, whole.to(spec.compute_dtype))
            assert tensor.stride() == spec.over(size).stride
        assert [tensor._version for tensor in tensors] == versions, "autograd would see a write"


@given(groups_of_specs, st.sampled_from([(8, 4), (6, 3), (6, 2), (4, 2), (2, 1)]))
def test_both_meshes_fill_one_full_buffer(group: list[Spec], sizes: tuple[int, int]) -> None:
    """What `reshard_after_forward=<int>` does, in compute dtype on the smaller axis."""
    large, small = sizes
    wholes = [spec.make(index) for index, spec in enumerate(group)]
    home = GatherLayout.plan([spec.item(large) for spec in group], large, (small,))
    items = [
        type(item)(spec.over(small), item.compute_dtype, item.compute_dtype)
        for item, spec in zip(home.items, group, strict=True)
    ]
    waiting = GatherLayout.plan(items, small, (large,))
    computed = [whole.to(item.compute_dtype) for whole, item in zip(wholes, items, strict=True)]
    full = torch.empty(0, dtype=torch.uint8)
    for layout, values in ((home, wholes), (waiting, computed)):
        full = garbage(home.full_nbytes)
        sends = send_buffers(shard_buffers(values, layout), layout)
        fill(full, sends, 0, layout)
        for tensor, expected in zip(packing.full_tensors(full, home), computed, strict=True):
            assert same_bits(tensor, expected)


@given(groups_of_specs, rank_counts)
def test_shards_are_chunks_on_memory_of_the_buffer(group: list[Spec], size: int) -> None:
    wholes = [spec.make(index) for index, spec in enumerate(group)]
    layout = GatherLayout.plan([spec.item(size) for spec in group], size)
    for rank, buffer in enumerate(shard_buffers(wholes, layout)):
        begin, end = buffer.data_ptr(), buffer.data_ptr() + layout.shard_nbytes
        for index, (whole, spec) in enumerate(zip(wholes, group, strict=True)):
            own = packing.own_shard(buffer, layout, index, rank)
            assert same_bits(own, chunk_of(whole, spec.dim, rank, size))
            assert own.is_contiguous()
            assert own.storage_offset() == 0
            view = packing.shard_view(buffer, layout, index, rank)
            assert same_bits(view, own)
            if own.numel():
                assert begin <= own.data_ptr() < end
                assert own.data_ptr() == view.data_ptr()
                assert own.untyped_storage().nbytes() == own.numel() * own.element_size()
                assert view._base is not None


def test_writing_a_shard_writes_what_is_sent() -> None:
    layout = GatherLayout.plan([Spec((4, 3), (0, 1), 0, torch.float32, torch.float32).item(2)], 2)
    buffer = torch.zeros(layout.shard_nbytes, dtype=torch.uint8)
    packing.own_shard(buffer, layout, 0, 0).fill_(2.5)
    assert buffer.view(torch.float32).tolist() == [2.5] * 6


def test_shards_of_a_meta_buffer_are_meta() -> None:
    layout = GatherLayout.plan([Spec((4, 3), (0, 1), 0, torch.float32, torch.float32).item(3)], 3)
    buffer = torch.zeros(layout.shard_nbytes, dtype=torch.uint8, device="meta")
    shard = packing.own_shard(buffer, layout, 0, 1)
    assert shard.is_meta
    assert shard.shape == (2, 3)
    assert packing.own_shard(buffer, layout, 0, 2).shape == (0, 3)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_replicated_matrix_beside_a_sharded_one_of_its_dtype(size: int) -> None:
    group = [
        Spec((4, 4), (0, 1), 0, torch.float32, torch.float32),
        Spec((2, 3), (0, 1), None, torch.float32, torch.float32),
    ]
    wholes = [spec.make(index) for index, spec in enumerate(group)]
    layout = GatherLayout.plan([spec.item(size) for spec in group], size)
    sends = shard_buffers(wholes, layout)
    full = garbage(layout.full_nbytes)
    fill(full, sends, 0, layout)
    for tensor, whole in zip(packing.full_tensors(full, layout), wholes, strict=True):
        assert same_bits(tensor, whole)


def test_the_cast_rounds_as_torch_does() -> None:
    spec = Spec((13, 29), (0, 1), 0, torch.float32, torch.bfloat16)
    whole = spec.make(3) * 1e30
    layout = GatherLayout.plan([spec.item(3)], 3)
    sends = send_buffers(shard_buffers([whole], layout), layout)
    full = garbage(layout.full_nbytes)
    fill(full, sends, 0, layout)
    (tensor,) = packing.full_tensors(full, layout)
    assert same_bits(tensor, whole.bfloat16())
    assert not torch.equal(tensor.float(), whole)


# --- reduce ---------------------------------------------------------------------------------------


def pack(
    grads: list[Tensor | None], layout: ReduceLayout, dtype: torch.dtype, rank: int = 0
) -> Tensor:
    """Return one rank's inputs of the reduce-scatters, side by side as `[W, numel]`."""
    counts = gradient_packing.tail((), layout, dtype, CPU)
    absent = [position for position, grad in enumerate(grads) if grad is None]
    if absent:
        counts = gradient_packing.tail_without(counts, absent, layout)

    def filled(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(tuple(shape), math.nan, dtype=dtype, device=device)

    args = grads, layout, rank, counts, filled
    packed, *zero_copy = gradient_packing.pack_gradients(*args)
    if layout.cut is not None:  # a host writes rows only, and leaves the padding as it was
        kept = Kept((layout.size, layout.packed_numel), layout.dtype, layout.cut)
        gradient_packing.pack_gradients(*args, kept=kept)
        assert same_bits(kept.memory, packed)
    return torch.cat([*(grad.view(layout.size, -1) for grad in zero_copy), packed], 1)


@st.composite
def reductions(
    draw: st.DrawFn,
) -> tuple[list[Spec], torch.dtype, torch.dtype, int, list[list[bool]]]:
    """Draw a group, a gradient dtype, a reduce dtype, a rank count, and who has which gradient."""
    group = draw(st.lists(specs(differentiable=True), min_size=1, max_size=4))
    grad_dtype = draw(
        st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
    )
    reduce_dtype = draw(st.sampled_from([grad_dtype, torch.float32, torch.bfloat16]))
    if draw(st.integers(0, 5)) == 0:
        grad_dtype = reduce_dtype = torch.complex64
    size = draw(rank_counts)
    flags = st.lists(st.booleans(), min_size=len(group), max_size=len(group))
    everything = st.just([True] * len(group))
    present = [draw(st.one_of(everything, flags)) for _ in range(size)]
    return group, grad_dtype, reduce_dtype, size, present


@given(reductions(), zero_copy_rules)
def test_reduced_gradients_are_chunks_of_the_sum(
    drawn: tuple[list[Spec], torch.dtype, torch.dtype, int, list[list[bool]]],
    zero_copy: ZeroCopy | None,
) -> None:
    group, grad_dtype, reduce_dtype, size, present = drawn
    shards = [spec.over(size) for spec in group]
    members = range(len(group))
    zero_copy = zero_copy if grad_dtype == reduce_dtype else None
    layout = ReduceLayout.plan(
        members, shards, size, reduce_dtype, len(members), zero_copy=zero_copy
    )
    grads = [
        [whole_numbers(spec.shape, grad_dtype, 100 * rank + i) for i, spec in enumerate(group)]
        for rank in range(size)
    ]
    packed = [
        pack([g if t else None for g, t in zip(*row, strict=True)], layout, grad_dtype, rank)
        for rank, row in enumerate(zip(grads, present, strict=True))
    ]
    summed = sum(packed[1:], packed[0])
    for rank in range(size):
        reduced = summed[rank].clone()
        counts = [sum(row[index] for row in present) for index in range(len(group))]
        assert reduced[layout.tail_start :].tolist() == counts
        for index, spec in enumerate(group):
            total = torch.zeros(spec.shape, dtype=reduce_dtype)
            for other in range(size):
                if present[other][index]:
                    total += grads[other][index].to(reduce_dtype)
            if layout.slotted[index]:
                mine = gradient_packing.sum_of_slots(reduced, layout, index)
            else:
                mine = gradient_packing.gradient_view(reduced, layout, index, rank)
            expected = chunk_of(total, spec.dim, rank, size)
            assert mine.shape == expected.shape
            assert torch.equal(mine, expected)


@given(specs(differentiable=True), rank_counts)
def test_gradient_views_share_the_buffers_memory(spec: Spec, size: int) -> None:
    layout = ReduceLayout.plan([0], [spec.over(size)], size, torch.float32, 1)
    for rank in range(size):
        reduced = torch.zeros(layout.numel)
        gradient_packing.gradient_view(reduced, layout, 0, rank).fill_(1.0)
        assert reduced.sum() == math.prod(spec.over(size).shard_shape(rank))
        assert reduced[layout.tail_start :].sum() == 0


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gradients_of_any_stride_are_packed_alike(dim: int) -> None:
    spec = Spec((5, 7, 3), (2, 0, 1), dim, torch.float32, torch.float32)
    layout = ReduceLayout.plan([0], [spec.over(4)], 4, torch.float32, 1)
    grad = whole_numbers(spec.shape, torch.float32, 1)
    strided = torch.empty_strided(grad.shape, spec.over(4).stride).copy_(grad)
    assert not strided.is_contiguous()
    expected = pack([grad], layout, torch.float32)
    for other in (strided, grad.flip(0).flip(0)):
        assert torch.equal(pack([other], layout, torch.float32).nan_to_num(), expected.nan_to_num())
    assert torch.equal(
        pack([grad.new_ones(()).expand(5, 7, 3)], layout, torch.float32),
        pack([torch.ones(5, 7, 3)], layout, torch.float32),
    )


@pytest.mark.parametrize("rows", [1, 3, 5, 9, 13])
def test_half_of_padding_or_more_is_not_written(rows: int) -> None:
    specs = [Spec((n, 3), (0, 1), 0, torch.float32, torch.float32) for n in (rows, 1)]
    layout = ReduceLayout.plan([0, 1], [spec.over(8) for spec in specs], 8, torch.float32, 2)
    pack([torch.ones(rows, 3), None], layout, torch.float32)  # compares both ways
    shapes = (rows, 3), (1, 3), (8, 2)
    assert layout.cut == (((3, 3, 2), shapes) if rows < 8 else None)


def test_packing_leaves_nothing_unwritten_and_pads_with_zeros() -> None:
    """Padding is summed and scaled too: garbage there could overflow."""
    spec = Spec((13, 3), (0, 1), 0, torch.float32, torch.float32)
    layout = ReduceLayout.plan([0], [spec.over(4)], 4, torch.float32, 1)
    packed = pack([torch.ones(13, 3)], layout, torch.float32)
    assert packed.sum() == 13 * 3 + 4
    assert packed[3].tolist() == [1.0] * 3 + [0.0] * 9 + [1.0]

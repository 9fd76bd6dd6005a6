"""Promise: what travels in codes is rounded by its rows' scales, and anything else not at all."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fsdp2._core.base.rows import EVERYTHING, Deal
from fsdp2._core.params import packing
from fsdp2._core.params.layout import (
    ALIGN_NBYTES,
    Coding,
    GatherItem,
    GatherLayout,
    ShardLayout,
)
from tests.unit._loopback import same_bits
from tests.unit._packed import garbage, gathered, sent_by_all
from tests.unit._strategies import Spec, specs

DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_the_nearest_and_codes_of_codes_change_nothing(dtype: torch.dtype) -> None:
    """Within half a step of the code, of any size; the largest of a row never overflows."""
    torch.manual_seed(0)
    values = torch.randn(64, 33) * torch.exp2(torch.randint(-60, 60, (64, 1)).float())
    values[3] = 0
    values[4, 0] = torch.finfo(dtype).max * 2.0**7  # right at the end of the range
    how = Coding(dtype, by_row=True)
    found = decoded(values, how)
    steps = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}[dtype]
    largest = values.abs().amax(1, keepdim=True)
    # below the smallest normal code steps do not become smaller
    least = largest * 2 * torch.finfo(dtype).smallest_normal / torch.finfo(dtype).max
    assert ((found - values).abs() <= steps * torch.maximum(values.abs(), least)).all()
    assert same_bits(decoded(found, how), found)
    assert found.isfinite().all()


def decoded(values: Tensor, how: Coding) -> Tensor:
    (steps,), (scales,) = packing.encode([values.view(how.scale_count(values.shape), -1)], how)
    codes = steps.to(how.dtype).view(1, *values.shape)
    target = torch.empty(1, *values.shape)
    packing.decode([target], [packing.Codes(codes, scales.unsqueeze(0))])
    return target[0]


@st.composite
def coded_groups(draw: st.DrawFn) -> tuple[int, list[Spec], list[GatherItem]]:
    """Draw ranks and parameters, some of which travel in codes, and some in blocks or whole."""
    size = draw(st.integers(1, 5))
    group = draw(st.lists(specs(), min_size=1, max_size=5))
    coding = Coding(draw(st.sampled_from(DTYPES)), draw(st.booleans()))
    items = []
    for spec in group:
        shard, dtype = spec.over(size), spec.compute_dtype
        if size > 1 and shard.numel and shard.shape and draw(st.integers(0, 3)) == 0:
            deal = Deal(draw(st.sampled_from([1, 3, EVERYTHING])), draw(st.integers(0, size - 1)))
            shard = dataclasses.replace(shard, dim=0, deal=deal)
        may_be = len(shard.shape) > 1 and shard.dim is not None and shard.numel
        is_real = dtype.is_floating_point and dtype.itemsize > 1
        how = None
        if may_be and is_real and spec.dtype.is_floating_point and draw(st.booleans()):
            how = coding
        items.append(GatherItem(shard, spec.dtype, dtype, coding=how))
    return size, group, items


@given(coded_groups(), st.integers(0, 40), st.integers(0, 99))
def test_gathered_parameters_are_rounded_and_lie_as_they_did(
    drawn: tuple[int, list[Spec], list[GatherItem]], tail: int, seed: int
) -> None:
    """Beside them others keep every bit; strides are as they were, and starts are aligned."""
    size, group, items = drawn
    layouts = [GatherLayout.plan(items, size, rank=rank, tail_numel=tail) for rank in range(size)]
    wholes = [spec.make(seed + index) for index, spec in enumerate(group)]
    sent = sent_by_all(wholes, layouts)
    layout = layouts[-1]
    tensors = gathered(garbage(layout.full_nbytes), sent, layout, size - 1)[: len(group)]
    for tensor, whole, item in zip(tensors, wholes, items, strict=True):
        assert same_bits(tensor, expected(whole, item))
        assert tensor.stride() == item.shard.stride
    assert all(start % ALIGN_NBYTES == 0 for start in layout.full_offsets)


def expected(whole: Tensor, item: GatherItem) -> Tensor:
    """Round each rank's shard by itself, and join them."""
    shard: ShardLayout = item.shard
    if item.coding is None:
        return whole.to(item.compute_dtype)
    assert shard.dim is not None
    parts = []
    for rank in range(shard.size):
        part = packing.shard_of(whole, shard, rank)
        if not part.numel():
            parts.append(part.to(item.compute_dtype))
            continue
        rows = part.reshape(item.coding.scale_count(part.shape), -1)
        (steps,), (scales,) = packing.encode([rows], item.coding)
        codes = steps.to(item.coding.dtype).to(item.compute_dtype).view(part.shape)
        scales = scales.to(item.compute_dtype).view(-1, *(1,) * (part.dim() - 1))
        parts.append(codes * scales)
    return torch.cat(parts, shard.dim)

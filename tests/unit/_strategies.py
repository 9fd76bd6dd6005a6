"""Random tensors and layouts for the property tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from fsdp2._core.base.capabilities import ZeroCopy
from fsdp2._core.params.layout import GatherItem, ShardLayout, contiguous_stride

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
RAW = [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]

rank_counts = st.integers(1, 8)


@dataclass(frozen=True)
class Spec:
    """One parameter: its tensor is made by `make`, its layout over any number of ranks by `over`.

    `order` lists the dims from slowest to fastest in memory.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dim: int | None
    dtype: torch.dtype
    compute_dtype: torch.dtype

    def make(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        memory_shape = [self.shape[dim] for dim in self.order]
        back = [self.order.index(dim) for dim in range(len(self.shape))]
        return _values(memory_shape, self.dtype, generator).permute(back)

    def over(self, size: int) -> ShardLayout:
        tensor = self.make(0)
        dense = tensor.numel() > 0 and not tensor.is_contiguous()
        stride = tuple(tensor.stride()) if dense else contiguous_stride(self.shape)
        return ShardLayout(self.shape, stride, self.dim, size)

    def item(self, size: int) -> GatherItem:
        return GatherItem(self.over(size), self.dtype, self.compute_dtype)


def _values(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype in (torch.int8, torch.int64):
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, shape, dtype=dtype, generator=generator)
    if dtype is torch.complex64:
        return torch.randn(shape, dtype=dtype, generator=generator)
    return torch.randn(shape, generator=generator).to(dtype)


def whole_numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return small whole numbers: their sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-4, 5, shape, generator=generator).to(dtype)
    if dtype.is_complex:
        values = values + 1j * torch.randint(-4, 5, shape, generator=generator)
    return values.to(dtype)


@st.composite
def specs(draw: st.DrawFn, *, differentiable: bool = False) -> Spec:
    """Draw 0 to 4 dims of 0 to 13, any memory order, any shard dim or none, any dtype."""
    shape = tuple(draw(st.lists(st.integers(0, 13), max_size=4)))
    dims = range(len(shape))
    order = tuple(draw(st.one_of(st.just(list(dims)), st.permutations(dims))))
    dim = draw(st.one_of(st.none(), st.sampled_from(dims))) if shape else None
    if len(shape) and draw(st.integers(0, 3)):  # mostly what users have
        dim = 0 if draw(st.booleans()) else draw(st.sampled_from(dims))
    dtype = draw(st.sampled_from([*FLOATS, torch.complex64] if differentiable else FLOATS + RAW))
    compute = draw(st.sampled_from(FLOATS)) if dtype in FLOATS and draw(st.booleans()) else dtype
    return Spec(shape, order, dim, dtype, compute)


groups_of_specs = st.lists(specs(), min_size=1, max_size=5)

zero_copy_rules = st.sampled_from(
    [None, ZeroCopy(1), ZeroCopy(40), ZeroCopy(400), ZeroCopy(40, 16), ZeroCopy(1, 128)]
)
"""Bytes from which a parameter travels by itself; None: none does."""

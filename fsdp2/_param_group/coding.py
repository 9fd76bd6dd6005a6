"""Tensors in, tensors out: values as codes of 8 bits with scales, and back. See ``Coding``.

A scale is a power of two. Codes are floating-point numbers, so their precision is the same
whatever the scale is, and to multiply by a power of two is exact: what is decoded is a code times a
scale in any dtype, and to encode that again by the same rows gives the same values.

Legend: n = ranks, S = scales of a shard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp2._base import torch_tensors
from fsdp2._param_group.layout import SCALE_DTYPE, Coding, contiguous_stride

EXPONENTS = (-120, 120)  # of scales: bf16 has them as normal numbers


class Codes(NamedTuple):
    """Codes of a shard's shape, and its scales ``[S]``."""

    codes: Tensor
    scales: Tensor


class Views:
    """A buffer of bytes, of which codes and scales are cut by strides: one call for each."""

    def __init__(self, buffer: Tensor, coding: Coding) -> None:
        self._coding = coding
        whole = buffer.shape[-1] - buffer.shape[-1] % SCALE_DTYPE.itemsize  # an odd end is no scale
        self._codes = buffer.view(coding.dtype)
        self._scales = buffer[..., :whole].view(SCALE_DTYPE)
        self._start = buffer.storage_offset()

    def at(
        self, start: int, shape: Sequence[int], room: Sequence[int], count: int = 1, step: int = 0
    ) -> Codes:
        """View shards of a shape, from byte ``start`` on, ``count`` of them ``step`` bytes apart.

        Codes are ``[n, *shape]`` and scales ``[n, S]``. ``room`` is what was left for a shard.
        """
        begin, size = self._start + start, SCALE_DTYPE.itemsize
        stride = (step, *contiguous_stride(shape))
        codes = self._codes.as_strided((count, *shape), stride, begin)
        begin = (begin + self._coding.scales_start(room)) // size
        scales = (count, self._coding.scale_count(shape)), (step // size, 1)
        return Codes(codes, self._scales.as_strided(*scales, begin))


def encode(rows: Sequence[Tensor], coding: Coding) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Return values in steps of their rows' scales, and these: what the nearest codes stand for.

    ``rows`` are ``[S, elements]`` of each shard; so are the values, which a copy to codes rounds. A
    row that is not finite is NaN. Few calls do it for all shards.
    """
    most = torch.finfo(coding.dtype).max
    rows = [one.to(torch.float32) for one in rows]
    counts = [len(one) for one in rows]
    largest = torch.empty(sum(counts), dtype=torch.float32, device=rows[0].device)
    for one, out in zip(rows, largest.split(counts), strict=True):
        torch.linalg.vector_norm(one, math.inf, 1, out=out)
    exponents = torch.frexp(largest / most).exponent.clamp(*EXPONENTS)
    scales = torch.ldexp(torch.ones_like(largest), exponents)
    scales = torch.where(largest.isfinite(), scales, math.nan)
    values = torch_tensors.clamped_quotients(rows, scales.unsqueeze(1).split(counts), most)
    return values, list(scales.to(SCALE_DTYPE).split(counts))


def decode(targets: Sequence[Tensor], made: Sequence[Codes]) -> None:
    """Fill each target ``[n, *shape]`` from codes of the same shape and scales ``[n, S]``."""
    codes = [one.codes for one in made]
    # fp16 has no scales as small as those of its own small values
    is_half = any(target.dtype is torch.float16 for target in targets)
    values = [one.to(torch.float32) for one in codes] if is_half else list(targets)
    if not is_half:
        torch_tensors.copy_all(targets, codes)
    factors = []
    for value, (_, scales) in zip(values, made, strict=True):
        ones = (1,) * (value.dim() - 2)
        factors.append(scales.to(value.dtype).view(*scales.shape, *ones))
    torch_tensors.scale_all_(values, factors)
    if is_half:
        torch_tensors.copy_all(targets, values)


def parts(rows: Tensor, coding: Coding, room: Sequence[int]) -> Codes:
    """View codes ``[n, *room]`` and scales ``[n, S]`` in bytes ``[n, nbytes]``."""
    numel = math.prod(room)
    start = coding.scales_start(room)
    end = start + coding.scale_count(room) * SCALE_DTYPE.itemsize
    codes = rows[:, :numel].view(coding.dtype).unflatten(1, tuple(room))
    return Codes(codes, rows[:, start:end].view(SCALE_DTYPE))

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

from fsdp2._param_group.layout import SCALE_DTYPE, Coding

EXPONENTS = (-120, 120)  # of scales: bf16 has them as normal numbers


class Codes(NamedTuple):
    """Codes of a shard's shape, and its scales ``[S]``."""

    codes: Tensor
    scales: Tensor


def encode(values: Tensor, coding: Coding) -> Codes:
    """Return codes of a shard, each the nearest that there is. A row that is not finite is NaN."""
    most = torch.finfo(coding.dtype).max
    rows = values.reshape(coding.scale_count(values.shape), -1).to(torch.float32)
    largest = rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(len(rows))
    exponents = torch.frexp(largest / most).exponent.clamp(*EXPONENTS)
    scales = torch.ldexp(torch.ones_like(largest), exponents)
    scales = torch.where(largest.isfinite(), scales, math.nan)
    codes = (rows / scales.unsqueeze(1)).clamp(-most, most).to(coding.dtype)
    return Codes(codes.view(values.shape), scales.to(SCALE_DTYPE))


def decode(target: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Fill ``target`` ``[n, *shape]`` from codes of the same shape and scales ``[n, S]``."""
    target.copy_(codes)
    ones = (1,) * (target.dim() - 2)
    target.mul_(scales.to(target.dtype).view(*scales.shape, *ones))


def write(values: Tensor, coding: Coding, room: Sequence[int], out: Tensor) -> None:
    """Write codes and scales of a shard into the bytes for one of shape ``room``, a padded one."""
    made = encode(values, coding)
    codes, scales = parts(out.unsqueeze(0), coding, room)
    codes.view(-1)[: values.numel()].copy_(made.codes.view(-1))
    scales[0, : len(made.scales)].copy_(made.scales)


def parts(rows: Tensor, coding: Coding, room: Sequence[int]) -> Codes:
    """View codes ``[n, *room]`` and scales ``[n, S]`` in bytes ``[n, nbytes]``."""
    numel = math.prod(room)
    start = coding.scales_start(room)
    end = start + coding.scale_count(room) * SCALE_DTYPE.itemsize
    codes = rows[:, :numel].view(coding.dtype).unflatten(1, tuple(room))
    return Codes(codes, rows[:, start:end].view(SCALE_DTYPE))

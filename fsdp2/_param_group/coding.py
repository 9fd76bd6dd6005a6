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
from fsdp2._param_group.layout import SCALE_DTYPE, Coding

EXPONENTS = (-120, 120)  # of scales: bf16 has them as normal numbers


class Codes(NamedTuple):
    """Codes of a shard's shape, and its scales ``[S]``."""

    codes: Tensor
    scales: Tensor


def encode(values: Sequence[Tensor], coding: Coding) -> list[Codes]:
    """Return codes of shards, each the nearest that there is. A row that is not finite is NaN.

    Few calls do it for all of them.
    """
    most = torch.finfo(coding.dtype).max
    rows = [v.reshape(coding.scale_count(v.shape), -1).to(torch.float32) for v in values]
    counts = [len(one) for one in rows]
    largest = torch.empty(sum(counts), dtype=torch.float32, device=rows[0].device)
    for one, out in zip(rows, largest.split(counts), strict=True):
        torch.linalg.vector_norm(one, math.inf, 1, out=out)
    exponents = torch.frexp(largest / most).exponent.clamp(*EXPONENTS)
    scales = torch.ldexp(torch.ones_like(largest), exponents)
    scales = torch.where(largest.isfinite(), scales, math.nan)
    each = [one.unsqueeze(1) for one in scales.split(counts)]
    codes = torch_tensors.clamped_quotients(rows, each, most)
    kept = scales.to(SCALE_DTYPE).split(counts)
    return [
        Codes(code.to(coding.dtype).view(value.shape), scale)
        for code, value, scale in zip(codes, values, kept, strict=True)
    ]


def decode(targets: Sequence[Tensor], made: Sequence[Codes]) -> None:
    """Fill each target ``[n, *shape]`` from codes of the same shape and scales ``[n, S]``."""
    torch_tensors.copy_all(targets, [one.codes for one in made])
    factors = []
    for target, (_, scales) in zip(targets, made, strict=True):
        ones = (1,) * (target.dim() - 2)
        factors.append(scales.to(target.dtype).view(*scales.shape, *ones))
    torch_tensors.scale_all_(targets, factors)


def write(
    values: Sequence[Tensor], coding: Coding, rooms: Sequence[Sequence[int]], outs: Sequence[Tensor]
) -> None:
    """Write codes and scales of shards into bytes for those of shapes ``rooms``, padded ones."""
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    for made, room, out in zip(encode(values, coding), rooms, outs, strict=True):
        codes, scales = parts(out.unsqueeze(0), coding, room)
        targets += [codes.view(-1)[: made.codes.numel()], scales[0, : len(made.scales)]]
        sources += [made.codes.view(-1), made.scales]
    torch_tensors.copy_all(targets, sources)


def parts(rows: Tensor, coding: Coding, room: Sequence[int]) -> Codes:
    """View codes ``[n, *room]`` and scales ``[n, S]`` in bytes ``[n, nbytes]``."""
    numel = math.prod(room)
    start = coding.scales_start(room)
    end = start + coding.scale_count(room) * SCALE_DTYPE.itemsize
    codes = rows[:, :numel].view(coding.dtype).unflatten(1, tuple(room))
    return Codes(codes, rows[:, start:end].view(SCALE_DTYPE))

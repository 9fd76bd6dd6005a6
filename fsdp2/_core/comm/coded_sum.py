"""Sums over ranks, with values sent as 8-bit codes. Contains no code for layouts or units.

A message consists of codes, a scale per block, and a tail of columns that are not rounded.
Legend: W = number of ranks in the group, S = number of elements in a rank's part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2._core.base import torch_comm

CODES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)

SCALE_DTYPE = torch.bfloat16
ROUNDED_UP = 1.0 + 2.0**-8  # so that a scale rounded to bf16 still covers the largest element

Exact = Sequence[tuple[int, int]]  # ranges of columns that are not rounded


@dataclass(frozen=True)
class Codes:
    """Encodes rows as 8-bit codes. ``errors``: rounding errors to add to later rows, or None."""

    dtype: torch.dtype
    block: int
    errors: dict[Any, Tensor] | None

    def encode(self, rows: Tensor, what: str) -> Tensor:
        """Return rows ``[n, k]`` encoded as bytes, and keep the rounding errors. Computes in fp32
        or wider, because scales and errors of small gradients would underflow in fp16."""
        key, rows = (what, rows.shape), rows.to(_wide(rows.dtype))
        if self.errors is not None and key in self.errors:
            rows = rows + self.errors[key]
        blocks = -(-rows.shape[1] // self.block)
        values = _padded(rows, blocks * self.block).view(len(rows), blocks, self.block)
        scales = (values.abs().amax(2) * (ROUNDED_UP / self._most)).clamp(min=1e-30)
        scales = scales.to(SCALE_DTYPE)
        codes = values / scales.to(values.dtype).unsqueeze(2)
        if self.dtype is torch.int8:
            codes = codes.round()
        codes = codes.clamp(-self._most, self._most).nan_to_num(0.0).to(self.dtype)
        sent = torch.cat([codes.flatten(1).view(torch.uint8), scales.view(torch.uint8)], 1)
        if self.errors is not None:
            there = self.decode(sent, rows.shape[1], rows.dtype)
            self.errors[key] = (rows - there).nan_to_num_(0.0, 0.0, 0.0)
        return sent

    def decode(self, sent: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        if not width:
            return sent.new_empty((len(sent), 0), dtype=dtype)
        blocks = -(-width // self.block)
        codes = sent[:, : blocks * self.block].view(self.dtype).unflatten(1, (blocks, self.block))
        start = blocks * self.block
        scales = sent[:, start : start + blocks * SCALE_DTYPE.itemsize].view(SCALE_DTYPE)
        wide = _wide(dtype)
        values: Tensor = codes.to(wide) * scales.to(wide).unsqueeze(2)
        return values.flatten(1)[:, :width].to(dtype)

    @property
    def _most(self) -> float:
        return 127.0 if self.dtype is torch.int8 else torch.finfo(self.dtype).max


@dataclass(frozen=True)
class CodedSum(Codes):
    """Sums gradients over ranks."""

    exact: Exact
    group: dist.ProcessGroup

    def reduce_scatter(self, packed: Tensor, reduced: Tensor) -> None:
        """Fill ``reduced`` ``[S]`` with this rank's part of the sum of ``packed`` ``[W * S]``."""
        rows = packed.view(self.group.size(), -1)
        self._put(reduced.view(1, -1), *self._sums(*self._columns(rows)))

    def all_reduce(self, packed: Tensor, reduced: Tensor) -> None:
        """Fill ``reduced`` ``[S]`` with the sum of all ranks' ``packed`` ``[S]``; the two tensors
        may share memory. Each rank sums one part and sends the result as codes. All ranks use the
        decoded results."""
        size = self.group.size()
        coded, kept = self._columns(packed.view(1, -1))
        numel = coded.shape[1]
        width = -(-numel // (size * self.block)) * self.block
        parts = _padded(coded, size * width).view(size, width)
        part, exact = self._sums(parts, kept.expand(size, -1))
        own = self.encode(part.to(packed.dtype), "summed")
        gathered = own.new_empty((size, own.shape[1]))
        torch_comm.all_gather_single(gathered.view(-1), own.view(-1), self.group)
        sums = self.decode(gathered, width, packed.dtype).view(1, -1)[:, :numel]
        self._put(reduced.view(1, -1), sums, exact)

    def _spans(self, width: int) -> list[tuple[int, int]]:
        """Return the ranges of columns to round: all columns outside the exact ranges."""
        spans, end = [], 0
        for first, last in (*sorted(self.exact), (width, width)):
            if first > end:
                spans.append((end, first))
            end = max(end, last)
        return spans

    def _columns(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns to round, and the exact columns."""
        return _columns(rows, self._spans(rows.shape[1])), _columns(rows, sorted(self.exact))

    def _put(self, rows: Tensor, coded: Tensor, kept: Tensor) -> None:
        for spans, source in ((self._spans(rows.shape[1]), coded), (sorted(self.exact), kept)):
            start = 0
            for first, last in spans:
                rows[:, first:last].copy_(source[:, start : start + last - first])
                start += last - first

    def _sums(self, coded: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Send each rank its row of both. Return the sums of the rows received from all ranks,
        which are added in rank order, so that a sum is the same on every rank."""
        codes, wide = self.encode(coded, "sent"), _wide(kept.dtype)
        codes = _padded(codes, codes.shape[1] + -codes.shape[1] % kept.dtype.itemsize)
        sent = torch.cat([codes, kept.contiguous().view(torch.uint8)], 1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received.view(-1), sent.view(-1), group=self.group)
        total = kept.new_zeros((1, coded.shape[1]), dtype=wide)
        for row in received:
            total += self.decode(row.unsqueeze(0), coded.shape[1], wide)
        exact = received[:, codes.shape[1] :].contiguous().view(-1).view(kept.dtype)
        return total, exact.view(kept.shape).sum(0, keepdim=True)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _columns(rows: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    if len(spans) < 2:
        first, last = spans[0] if spans else (0, 0)
        return rows[:, first:last]
    return torch.cat([rows[:, first:last] for first, last in spans], 1)


def _padded(rows: Tensor, width: int) -> Tensor:
    missing = width - rows.shape[1]
    return torch.nn.functional.pad(rows, (0, missing)) if missing else rows

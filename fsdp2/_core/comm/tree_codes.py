"""Sums as in [Note: one tree] in ``tree_sum``, but with nodes sent as 8-bit codes.

Owns the message format: coded columns, which hold parameter rows, and exact columns. Contains no
code for layouts; ``params.slot_sums`` rounds the sums within a rank with the same codes.

[Note: rounded nodes]
The number of ranks determines which sums of the tree are sent, but must not affect the result.
Every sum except the final one is therefore rounded before it is added to its neighbour, even if it
is not sent. A block of codes lies in one row of a parameter, and rows are not split between ranks,
so blocks do not depend on the number of ranks. Rows of fewer than ``LEAST_WIDTH`` elements, such as
biases, are sent unrounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2._core.base import torch_comm
from fsdp2._core.comm.coded_sum import SCALE_DTYPE, Codes
from fsdp2._core.comm.mesh import MeshAxis
from fsdp2._core.comm.tree_sum import TreeWire
from fsdp2._core.comm.wire import Wire

LEAST_WIDTH = 8

Spans = Sequence[tuple[int, int, int]]
"""Coded columns of a rank's part: first column, end column, and the width of a row."""


@dataclass(frozen=True)
class RowCodes:
    """Encodes rows of any width in blocks of equal size."""

    dtype: torch.dtype
    block: int  # maximum number of elements that share a scale

    def of(self, width: int) -> tuple[Codes, int]:
        """Return the ``Codes`` for rows of ``width`` elements, and the bytes per encoded row."""
        blocks = -(-width // self.block)
        block = -(-width // (2 * blocks)) * 2  # even, so that scales are aligned
        return Codes(self.dtype, block, None), blocks * (block + SCALE_DTYPE.itemsize)

    def rounded(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the values that a receiver decodes for rows ``[n, width]``."""
        codes, _ = self.of(rows.shape[1])
        return codes.decode(codes.encode(rows, ""), rows.shape[1], dtype)


class CodedTreeWire(TreeWire):
    """A wire that sums as in [Note: rounded nodes]. ``spans_of`` returns the coded columns."""

    def __init__(
        self,
        plain: Wire,
        slots: int,
        codes: RowCodes,
        spans_of: Callable[[], Spans],
    ) -> None:
        super().__init__(plain, slots, None)
        self.codes = codes
        self._spans_of = spans_of

    @property
    def scatters_zero_copy(self) -> bool:
        return False

    def reduce_scatter(
        self,
        output: Tensor,
        sent: Tensor,
        op: Any,
        axis: MeshAxis,
        async_op: bool,
    ) -> None:
        group = self.scatter_group or axis.pg
        packed = self._pack(sent.view(axis.size, -1))
        received = torch.empty_like(packed)
        dist.all_to_all_single(received.view(-1), packed.view(-1), group=group)
        output.copy_(self._add_up(self._unpack(received, sent.dtype, output.numel())))

    def all_reduce(
        self,
        tensor: Tensor,
        op: Any,
        axis: MeshAxis,
        async_op: bool,
    ) -> None:
        """All-gather coded inputs and sum them locally: the unrounded sum would take more bytes."""
        packed = self._pack(tensor.view(1, -1))
        gathered = packed.new_empty((axis.size, packed.shape[1]))
        torch_comm.all_gather_single(gathered.view(-1), packed.view(-1), group=axis.pg)
        tensor.copy_(self._add_up(self._unpack(gathered, tensor.dtype, tensor.numel())))

    def _add_up(self, rows: Tensor) -> Tensor:
        while len(rows) > 1:
            rows = rows[::2] + rows[1::2]
            if len(rows) > 1:
                rows = self._unpack(self._pack(rows), rows.dtype, rows.shape[1])
        return rows[0]

    def _parts(self, numel: int) -> Iterator[tuple[int, int, int]]:
        """Yield spans that cover all columns, in order. Exact columns have width 0."""
        end = 0
        for first, last, width in (*self._spans_of(), (numel, numel, 0)):
            if first > end:
                yield end, first, 0
            if width:
                yield first, last, width
            end = last

    def _pack(self, rows: Tensor) -> Tensor:
        """Encode rows ``[n, S]`` as messages: one row of bytes ``[n, nbytes]`` for each row."""
        parts = []
        for first, last, width in self._parts(rows.shape[1]):
            part = rows[:, first:last]
            if width:
                sent = self.codes.of(width)[0].encode(part.reshape(-1, width), "")
            else:
                sent = part.contiguous().view(torch.uint8)
            parts.append(sent.view(len(rows), -1))
        return torch.cat(parts, 1)

    def _unpack(self, packed: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
        rows = packed.new_empty((len(packed), numel), dtype=dtype)
        start = 0
        for first, last, width in self._parts(numel):
            codes, row_nbytes = self.codes.of(width or 1)
            nbytes = (
                (last - first) // width * row_nbytes if width else (last - first) * dtype.itemsize
            )
            part = packed[:, start : start + nbytes].clone(memory_format=torch.contiguous_format)
            if width:
                part = codes.decode(part.view(-1, row_nbytes), width, dtype)
            else:
                part = part.view(dtype)
            rows[:, first:last] = part.reshape(len(rows), -1)
            start += nbytes
        return rows

"""Pack gradients into the input of a reduction, and view gradient shards in its output.

Pure tensor functions that launch a few kernels each. Independent of process groups, streams and
modules. W: size of the shard axis; P: number of parameters; S: number of stamp elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor

from fsdp2._core.base import torch_tensors
from fsdp2._core.comm.wire import Kept
from fsdp2._core.params.layout import ReduceLayout, contiguous_stride


def pack_gradients(
    grads: Sequence[Tensor | None],
    layout: ReduceLayout,
    rank: int,
    behind: Tensor,
    allocate: Callable[[Sequence[int], torch.dtype, torch.device], Tensor],
    is_mixed: bool = False,
    kept: Kept | None = None,
) -> list[Tensor]:
    """Return the inputs of a reduction: packed gradients ``[W, packed_numel]``, then zero-copy
    gradients. With dealt members, return one flat buffer of all ranks' pieces.

    A packed row ends with ``behind``, the result of ``tail``. A gradient of ``None`` is written as
    zeros. Inputs are cast to the wire dtype; unless ``is_mixed``, they all have the same dtype.
    ``allocate`` returns buffers; ``kept`` is an existing packed buffer, which is zero outside of
    its columns (``ReduceLayout.cut``). Filling these replaces ``chunk_cat``, which on a host first
    pads each gradient to W rows.

    On a device, columns are first made contiguous. Otherwise CUDA runs one kernel per column (a
    test counts the kernels for torch 2.11), or a kernel correct only for contiguous columns."""
    dtype, device = layout.wire_dtype, behind.device
    columns: list[Any] = [grads[position] for position in layout.packed]
    if not all(map(is_not, columns, repeat(None))):
        columns = _with_zeros(columns, layout, behind)
    for index in layout.rearranged:
        columns[index] = _as_rows(columns[index], layout, layout.packed[index], rank)
    if not behind.is_cpu:
        columns = [c.contiguous() for c in columns]
    columns.append(behind)
    if kept is not None:
        packed = kept.memory
        pairs = zip(columns, kept.parts, strict=True)
        rows = [c if c.shape == p.shape else c.reshape_as(p) for c, p in pairs]
        torch_tensors.copy_all(kept.parts, rows)
    else:
        packed = allocate((layout.size, layout.packed_numel), dtype, device)
        if is_mixed:
            _chunk_cat_mixed(columns, layout.size, packed)
        else:
            torch_tensors.chunk_cat(columns, 0, layout.size, out=packed)
    if layout.pieces:
        flat = allocate((sum(layout.pieces),), dtype, device)
        _pack_pieces(grads, layout, packed, flat)
        return [flat]
    if not layout.zero_copy:
        return [packed]
    return [packed, *zero_copy_gradients(grads, layout, device)]


def _with_zeros(
    columns: Sequence[Tensor | None], layout: ReduceLayout, behind: Tensor
) -> list[Tensor]:
    """Replace missing gradients by zeros. All zeros share memory."""
    shapes = [layout.shards[position].shape for position in layout.packed]
    absent = [math.prod(s) for c, s in zip(columns, shapes, strict=True) if c is None]
    is_cpu = behind.is_cpu  # device kernels require dense memory
    zeros = behind.new_zeros(() if is_cpu else max(absent))
    return [
        (zeros.expand(s) if is_cpu else zeros[: math.prod(s)].view(s)) if c is None else c
        for c, s in zip(columns, shapes, strict=True)
    ]


def _as_rows(grad: Tensor, layout: ReduceLayout, position: int, rank: int) -> Tensor:
    """Rearrange a gradient so that chunk ``r`` of the W chunks of dim 0 is sent to rank ``r``."""
    shard = layout.shards[position]
    if layout.slotted[position]:
        slots = grad.new_zeros((layout.size, shard.numel))
        slots[rank] = grad.reshape(-1)
        return slots.view(1, -1).expand(layout.size, -1)
    if shard.dim is None:
        return grad.reshape(1, -1).expand(layout.size, -1)
    return grad.movedim(shard.dim, 0)


def _chunk_cat_mixed(columns: Sequence[Tensor], size: int, out: Tensor) -> None:
    """Write columns of several dtypes. (One ``chunk_cat`` supports only a single dtype.)"""
    widths = [-(-len(c) // size) * (c.numel() // max(len(c), 1)) for c in columns]
    if not out.is_cpu:
        _chunk_cat_few(columns, widths, size, out)
        return
    runs = [list(run) for _, run in itertools.groupby(columns, key=attrgetter("dtype"))]
    lengths = iter(widths)
    of_runs = [sum(itertools.islice(lengths, len(run))) for run in runs]
    for run, part in zip(runs, out.split(of_runs, dim=1), strict=True):
        torch_tensors.chunk_cat(run, 0, size, out=part)


def _chunk_cat_few(
    columns: Sequence[Tensor],
    widths: Sequence[int],
    size: int,
    out: Tensor,
) -> None:
    """Write columns of several dtypes on a device. One kernel fills the entire buffer from the
    columns of the dtype with the most bytes; the other columns, usually small (an fp32 norm), are
    written afterwards. Casting all columns instead would read and write all data twice."""
    nbytes: dict[torch.dtype, int] = {}
    for column in columns:
        nbytes[column.dtype] = nbytes.get(column.dtype, 0) + column.nbytes
    dtype = max(nbytes, key=nbytes.__getitem__)
    fitting = [c if c.dtype is dtype else c.new_empty(c.shape, dtype=dtype) for c in columns]
    torch_tensors.chunk_cat(fitting, 0, size, out=out)
    for column, part in zip(columns, out.split(list(widths), dim=1), strict=True):
        if column.dtype is not dtype:
            alone = column.new_empty(part.shape, dtype=out.dtype)
            torch_tensors.chunk_cat([column], 0, size, out=alone)
            part.copy_(alone)


def zero_copy_gradients(
    grads: Sequence[Tensor | None], layout: ReduceLayout, device: torch.device
) -> list[Tensor]:
    """Return the local gradients of zero-copy members, flat and contiguous, in the wire dtype."""
    dtype = layout.wire_dtype
    sent = []
    for position in layout.zero_copy:
        grad = grads[position]
        if grad is None:
            grad = torch.zeros(layout.shards[position].shape, dtype=dtype, device=device)
        elif not grad.is_contiguous():
            grad = grad.contiguous()
        sent.append(grad.view(-1).to(dtype))
    return sent


def _pack_pieces(
    grads: Sequence[Tensor | None],
    layout: ReduceLayout,
    even: Tensor,
    out: Tensor,
) -> None:
    """Write each rank's piece to ``out``, which is flat and has any dtype: the rank's dealt rows,
    then its row of ``even`` ``[W, packed_numel]``. A gradient of ``None`` is written as zeros."""
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    start = out.storage_offset()
    for first, count in layout.runs:
        end, step = start, layout.pieces[first]
        for position in layout.dealt:
            shard, grad = layout.shards[position], grads[position]
            assert shard.dim is not None
            row, rows = shard.span(first)
            rest = (*shard.shape[: shard.dim], *shard.shape[shard.dim + 1 :])
            target = out.as_strided((count, rows * math.prod(rest)), (step, 1), end)
            end += layout.room_for(position, first)
            if grad is None:
                target.zero_()
            elif rows:
                part = grad.movedim(shard.dim, 0)[row : row + count * rows]
                sources.append(part.unflatten(0, (count, rows)))
                targets.append(target.view(count, rows, *rest))
        sources.append(even[first : first + count])
        targets.append(out.as_strided((count, layout.packed_numel), (step, 1), end))
        start += count * step
    torch_tensors.copy_all(targets, sources)


def tail(
    stamps: Sequence[float],
    layout: ReduceLayout,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return the tail of a rank that has every gradient: ``[W, gap + P + S]``."""
    row = torch.ones(layout.tail_gap + len(layout.members), dtype=dtype, device=device)
    row[: layout.tail_gap] = 0
    if stamps:  # copying values to a device blocks the host
        row = torch.cat([row, torch.tensor(stamps, dtype=dtype, device=device)])
    return _for_each_rank(row, layout)


def tail_without(complete: Tensor, absent: Sequence[int], layout: ReduceLayout) -> Tensor:
    """Return a tail with 0 for members without a gradient on this rank. It is derived from
    ``complete``, the result of ``tail``, as copying values to a device would block the host."""
    row = complete[0].clone()
    for _, run in itertools.groupby(enumerate(absent), lambda pair: pair[1] - pair[0]):
        positions = [layout.tail_gap + position for _, position in run]
        row[positions[0] : positions[-1] + 1] = 0
    return _for_each_rank(row, layout)


def _for_each_rank(row: Tensor, layout: ReduceLayout) -> Tensor:
    """Repeat ``row`` as ``[W, n]``: a view on a host, and a contiguous copy on a device."""
    rows = row.expand(layout.size, -1)
    return rows if row.is_cpu else rows.contiguous()


def sum_of_slots(reduced: Tensor, layout: ReduceLayout, position: int) -> Tensor:
    """Sum the slots of a replicated member, in the same order on every rank."""
    shard, start = layout.shards[position], layout.offsets[position] + reduced.storage_offset()
    slots = reduced.as_strided((layout.size, shard.numel), (shard.numel, 1), start)
    return slots.sum(0).view(shard.shape)


def gradient_view(
    reduced: Tensor,
    layout: ReduceLayout,
    position: int,
    rank: int,
) -> Tensor:
    """View a member's gradient shard in a reduced buffer ``[numel]``. If the sharded dim is not
    0, the view is not contiguous, because that dim comes first in the buffer."""
    shard, start = layout.shards[position], layout.offsets[position] + reduced.storage_offset()
    shape = shard.shard_shape(rank)
    if not shard.dim:
        return reduced.as_strided(shape, contiguous_stride(shape), start)
    moved = (shape[shard.dim], *shape[: shard.dim], *shape[shard.dim + 1 :])
    return reduced.as_strided(moved, contiguous_stride(moved), start).movedim(0, shard.dim)

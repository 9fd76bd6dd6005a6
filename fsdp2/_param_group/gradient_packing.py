"""Tensors in, tensors out: how gradients lie in what is reduced, and where shards lie in the sum.

No process group, no stream, no module; every function is a few kernels on a plan.

Legend: W = ranks of the shard axis, P = parameters, S = elements of stamps.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor

from fsdp2._base import torch_tensors
from fsdp2._param_group.layout import ReduceLayout, contiguous_stride


def pack_gradients(
    grads: Sequence[Tensor | None],
    layout: ReduceLayout,
    rank: int,
    behind: Tensor,
    out: Tensor,
    is_mixed: bool = False,
) -> None:
    """Write the packed ones of local gradients, and ``behind``, into ``out`` ``[W, packed_numel]``.

    ``behind`` is what ``tail`` made. A gradient that is ``None`` counts as zero. All are cast to
    the dtype of ``out``. Gradients and ``behind`` have one dtype, unless they are ``is_mixed``.

    On a device columns are made contiguous: CUDA has one kernel for all of them then, and else one
    for each (torch 2.11; a test counts them), or one that is right for contiguous columns only.
    """
    columns: list[Any] = [grads[position] for position in layout.packed]
    if not all(map(is_not, columns, repeat(None))):
        zeros = behind.new_zeros(()).expand if out.is_cpu else behind.new_zeros
        shapes = [layout.shards[position].shape for position in layout.packed]
        pairs = zip(columns, shapes, strict=True)
        columns = [zeros(shape) if c is None else c for c, shape in pairs]
    for index in layout.rearranged:
        columns[index] = _as_rows(columns[index], layout, layout.packed[index], rank)
    if not out.is_cpu:
        columns = [c.contiguous() for c in columns]
    columns.append(behind)
    if is_mixed:
        _chunk_cat_mixed(columns, layout.size, out)
    else:
        torch_tensors.chunk_cat(columns, 0, layout.size, out=out)


def _as_rows(grad: Tensor, layout: ReduceLayout, position: int, rank: int) -> Tensor:
    """Return a gradient so that the rows of rank ``r`` are the ``r``-th of W chunks of dim 0."""
    shard = layout.shards[position]
    if layout.slotted[position]:
        slots = grad.new_zeros((layout.size, shard.numel))
        slots[rank] = grad.reshape(-1)
        return slots.view(1, -1).expand(layout.size, -1)
    if shard.dim is None:
        return grad.reshape(1, -1).expand(layout.size, -1)
    return grad.movedim(shard.dim, 0)


def _chunk_cat_mixed(columns: Sequence[Tensor], size: int, out: Tensor) -> None:
    """Write columns of several dtypes: a kernel takes one, so there is one for each run."""
    if not out.is_cpu:  # a kernel of a device takes the whole of a buffer
        torch_tensors.chunk_cat([c.to(out.dtype) for c in columns], 0, size, out=out)
        return
    runs = [list(run) for _, run in itertools.groupby(columns, key=attrgetter("dtype"))]
    widths = [sum(-(-len(c) // size) * (c.numel() // len(c)) for c in run) for run in runs]
    for run, part in zip(runs, out.split(widths, dim=1), strict=True):
        torch_tensors.chunk_cat(run, 0, size, out=part)


def zero_copy_gradients(
    grads: Sequence[Tensor | None], layout: ReduceLayout, device: torch.device
) -> list[Tensor]:
    """Return the zero-copy ones of local gradients as a collective takes them, flat."""
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


def tail(
    stamps: Sequence[float], layout: ReduceLayout, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return what a rank that has every gradient adds behind them: ``[W, gap + P + S]``."""
    row = torch.ones(layout.tail_gap + len(layout.members), dtype=dtype, device=device)
    row[: layout.tail_gap] = 0
    if stamps:  # values from the host, for which a device waits
        row = torch.cat([row, torch.tensor(stamps, dtype=dtype, device=device)])
    return _for_each_rank(row, layout)


def tail_without(complete: Tensor, absent: Sequence[int], layout: ReduceLayout) -> Tensor:
    """Return what a rank adds that has no gradient for some members: 0 for these.

    Made of what ``tail`` returned, and not of values from the host, for which a device would wait.
    """
    row = complete[0].clone()
    for _, run in itertools.groupby(enumerate(absent), lambda pair: pair[1] - pair[0]):
        positions = [layout.tail_gap + position for _, position in run]
        row[positions[0] : positions[-1] + 1] = 0
    return _for_each_rank(row, layout)


def _for_each_rank(row: Tensor, layout: ReduceLayout) -> Tensor:
    """Return ``[W, n]``, each row of which is ``row``; on a device with memory of its own."""
    rows = row.expand(layout.size, -1)
    return rows if row.is_cpu else rows.contiguous()


def sum_of_slots(reduced: Tensor, layout: ReduceLayout, position: int) -> Tensor:
    """Add up the slots of a replicated member, in the same order on every rank."""
    shard, start = layout.shards[position], layout.offsets[position] + reduced.storage_offset()
    slots = reduced.as_strided((layout.size, shard.numel), (shard.numel, 1), start)
    return slots.sum(0).view(shard.shape)


def gradient_view(reduced: Tensor, layout: ReduceLayout, position: int, rank: int) -> Tensor:
    """View a member's shard of the gradient in a reduced buffer ``[numel]``.

    Not contiguous for a parameter sharded off dim 0, whose gradient travels with that dim first.
    """
    shard, start = layout.shards[position], layout.offsets[position] + reduced.storage_offset()
    shape = shard.shard_shape(rank)
    if not shard.dim:
        return reduced.as_strided(shape, contiguous_stride(shape), start)
    moved = (shape[shard.dim], *shape[: shard.dim], *shape[shard.dim + 1 :])
    return reduced.as_strided(moved, contiguous_stride(moved), start).movedim(0, shard.dim)

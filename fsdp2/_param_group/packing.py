"""Tensors in, tensors out: views of flat buffers, casting shards, unpacking, packing gradients.

No process group, no stream, no module; every function is a few kernels on a plan.

Legend: W = ranks of the shard axis, C = bytes (or wire elements) that a rank contributes, P =
parameters, S = elements of stamps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import Tensor

from fsdp2._base import torch_tensors
from fsdp2._param_group.layout import (
    GatherLayout,
    Packed,
    ReduceLayout,
    ShardLayout,
    chunk_of,
    contiguous_stride,
)


def typed(buffer: Tensor, start: int, numel: int, dtype: torch.dtype) -> Tensor:
    """View ``numel`` elements of a byte buffer from byte ``start``."""
    return buffer[start : start + numel * dtype.itemsize].view(dtype)


def own_shard(shards: Tensor, layout: GatherLayout, index: int, rank: int) -> Tensor:
    """Return a rank's shard of a parameter, unpadded, on memory of the shard buffer.

    The tensor starts a storage of its own there: saving or copying it touches no other parameter,
    and a DTensor around it has offset 0, without which torch can neither copy nor pickle it.
    """
    item, start = layout.items[index], layout.shard_offsets[index]
    shape = item.shard.shard_shape(rank)
    numel = math.prod(shape)
    if shards.untyped_storage().device.type == "meta" or numel == 0:
        return torch.empty(shape, dtype=item.storage_dtype, device=shards.device)
    end = start + numel * item.storage_dtype.itemsize
    tensor = torch.empty(0, dtype=item.storage_dtype, device=shards.device)
    return tensor.set_(shards.untyped_storage()[start:end], 0, shape, contiguous_stride(shape))


def shard_view(shards: Tensor, layout: GatherLayout, index: int, rank: int) -> Tensor:
    """View a rank's shard of a parameter, unpadded, in a shard buffer that may be freed."""
    item = layout.items[index]
    shape = item.shard.shard_shape(rank)
    return typed(shards, layout.shard_offsets[index], math.prod(shape), item.storage_dtype).view(
        shape
    )


def shard_of(tensor: Tensor, shard: ShardLayout, rank: int) -> Tensor:
    """View a rank's rows of an unsharded tensor."""
    if shard.dim is None:
        return tensor
    return tensor.narrow(shard.dim, *chunk_of(shard.shape[shard.dim], shard.size, rank))


def cast_shards(shards: Tensor, send: Tensor, layout: GatherLayout) -> None:
    """Fill the send buffer from the shard buffer: one kernel for each dtype pair."""
    for segment in layout.segments:
        source = typed(shards, segment.shard_start, segment.numel, segment.storage_dtype)
        typed(send, segment.send_start, segment.numel, segment.compute_dtype).copy_(source)


def full_tensors(full: Tensor, layout: GatherLayout) -> list[Tensor]:
    """View the unsharded tensors, with their own strides, in the full buffer.

    Each has a version counter of its own, which writes through the full buffer do not touch:
    autograd must not take an all-gather for a modification of saved parameters.
    """
    views = []
    for item, start in zip(layout.items, layout.full_offsets, strict=True):
        flat = typed(full, start, item.shard.numel, item.compute_dtype)
        views.append(flat.as_strided(item.shard.shape, item.shard.stride).data)
    return views


def gather_targets(full: Tensor, layout: GatherLayout, indices: Sequence[int]) -> list[Tensor]:
    """View where shards land: ``[W, C_i]`` in wire dtype where one copy does, else the tensor."""
    targets = []
    for index in indices:
        item, start = layout.items[index], layout.full_offsets[index]
        if item.shard.is_replicated or not item.shard.is_rank_major:
            flat = typed(full, start, item.shard.numel, item.compute_dtype)
            targets.append(flat.as_strided(item.shard.shape, item.shard.stride))
        else:
            numel = layout.padded_nbytes(index) // layout.wire_dtype.itemsize
            flat = typed(full, start, layout.size * numel, layout.wire_dtype)
            targets.append(flat.view(layout.size, numel))
    return targets


def unpack(gathered: Tensor, layout: GatherLayout, packed: Packed, targets: list[Tensor]) -> None:
    """Copy what one collective gathered, ``[W, C]``, into ``targets`` (of ``gather_targets``)."""
    if packed.is_one_split:
        torch.split_with_sizes_copy(gathered, packed.sizes, dim=1, out=targets)
        return
    for target, index in zip(targets, packed.order, strict=True):
        item, start = layout.items[index], layout.send_offsets[index]
        if item.shard.numel == 0:
            continue
        if item.shard.is_rank_major:
            begin = start // gathered.dtype.itemsize
            target.copy_(gathered[:, begin : begin + target.shape[1]])
        else:
            rows = gathered.view(torch.uint8)[:, start : start + layout.padded_nbytes(index)]
            _unpack_strided(target, rows.view(item.compute_dtype), item.shard)


def unpack_replicated(send: Tensor, layout: GatherLayout, targets: list[Tensor]) -> None:
    """Copy replicated parameters out of this rank's send buffer."""
    for target, index in zip(targets, layout.replicated, strict=True):
        item, start = layout.items[index], layout.send_offsets[index]
        own = typed(send, start, item.shard.numel, item.compute_dtype)
        target.copy_(own.view(item.shard.shape))


def _unpack_strided(target: Tensor, padded: Tensor, shard: ShardLayout) -> None:
    """Copy padded shards ``[W, padded_numel]`` into a tensor of any stride, sharded on any dim."""
    assert shard.dim is not None
    dim, chunk = shard.dim, shard.chunk
    padded = padded.unflatten(1, shard.padded_shape)
    whole, rest = divmod(shard.shape[dim], chunk)
    head = target.narrow(dim, 0, whole * chunk).unflatten(dim, (whole, chunk)).movedim(dim, 0)
    head.copy_(padded[:whole])
    if rest:
        tail = target.narrow(dim, whole * chunk, rest)
        tail.copy_(padded[whole].flatten()[: tail.numel()].view(tail.shape))


# --- Gradients.


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
    as_it_is = out.is_cpu
    columns = []
    for position in layout.packed:
        grad, shard = grads[position], layout.shards[position]
        if shard.padded_numel == 0:
            continue
        if grad is None:
            grad = (
                behind.new_zeros(()).expand(shard.shape)
                if as_it_is
                else behind.new_zeros(shard.shape)
            )
        if layout.slotted[position]:
            slots = grad.new_zeros((layout.size, shard.numel))
            slots[rank] = grad.reshape(-1)
            grad = slots.view(1, -1).expand(layout.size, -1)
        elif shard.dim is None:
            grad = grad.reshape(1, -1).expand(layout.size, -1)
        elif shard.dim:
            grad = grad.movedim(shard.dim, 0)
        columns.append(grad if as_it_is else grad.contiguous())
    columns.append(behind)
    if is_mixed:
        _chunk_cat_mixed(columns, layout.size, out)
    else:
        torch_tensors.chunk_cat(columns, 0, layout.size, out=out)


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
    """Return what a rank that has every gradient adds behind them: ``[W, P + S]``."""
    row = torch.ones(len(layout.members), dtype=dtype, device=device)
    if stamps:  # values from the host, for which a device waits
        row = torch.cat([row, torch.tensor(stamps, dtype=dtype, device=device)])
    return _for_each_rank(row, layout)


def tail_without(complete: Tensor, absent: Sequence[int], layout: ReduceLayout) -> Tensor:
    """Return what a rank adds that has no gradient for some members: 0 for these.

    Made of what ``tail`` returned, and not of values from the host, for which a device would wait.
    """
    row = complete[0].clone()
    for _, run in itertools.groupby(enumerate(absent), lambda pair: pair[1] - pair[0]):
        positions = [position for _, position in run]
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

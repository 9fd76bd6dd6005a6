"""The computations of a group inside a graph: unshard and reduce, as functions of tensors.

Owns the two operations that graphs call, ``fsdp2::unshard`` and ``fsdp2::outer_gather``. Compilers
decompose these operations into functional collectives. Outside of a graph, the operations run
eagerly. Independent of groups, units and modules.

[Note: the gradient of unshard]
``unshard`` takes views of the group's shard buffer, which do not require grad, and *sinks*. Each
sink is an expanded zero with the shape of one reduced piece. Forward ignores the sinks; their
gradients are defined to be the reduced pieces. This keeps DTensors and meshes out of the graph. An
extra, empty sink gets a gradient if some parameter had no gradient when the graph was traced (even
if the graph was later loaded from a cache). In that case, the counts are read to find the
parameters that had a gradient on at least one rank.

[Note: operations, not functions]
Caches of compiled graphs accept custom operations with a CompositeImplicitAutograd kernel, but not
Python functions marked with ``allow_in_graph``.

Legend: W = number of ranks of the shard axis; see ``plan`` for pieces.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._compiled.plan import GatherPiece, TracedPlan, plans
from fsdp2._core.base import torch_comm
from fsdp2._core.params import packing
from fsdp2._core.params.layout import GatherItem, ReduceLayout, ShardLayout, contiguous_stride

_GATHER = "all_gather_into_tensor"

_library = torch.library.Library("fsdp2", "FRAGMENT")
_library.define(
    "unshard(str key, Tensor[] sinks, Tensor[] waiting, Tensor[] added, Tensor[] flats) -> Tensor[]"
)
_library.define("outer_gather(str key, Tensor[] flats) -> Tensor[]")

unshard = torch.ops.fsdp2.unshard
"""Return the unsharded parameters of a group, without the DTensor wrappers for their own axes.

Args: ``sinks``, which receive the reduced gradients (empty if none are needed); ``waiting``,
the result of ``outer_gather``, if the group reshards to a smaller mesh; ``added``, the unreduced
gradient of each member that has one; ``flats``, one tensor for each segment of the layout."""

outer_gather = torch.ops.fsdp2.outer_gather
"""Gather the rows that this rank keeps from forward to backward: one flat tensor for each piece."""


def _outer_gather(key: str, flats: Sequence[Tensor]) -> list[Tensor]:
    plan = plans[key]
    neighbours = plan.neighbours
    assert neighbours is not None
    rows = plan.size // neighbours.size
    if neighbours.outer_group:
        return _each(plan, _GATHER, _to_send(plan, flats), rows, neighbours.outer_group)
    return [
        gathered.view(rows, neighbours.size, -1)[:, neighbours.rank].reshape(-1)
        for gathered in _each(plan, _GATHER, _to_send(plan, flats), plan.size, plan.shard_group)
    ]


def _composed_unshard(
    key: str,
    sinks: Sequence[Tensor],
    waiting: Sequence[Tensor],
    added: Sequence[Tensor],
    flats: Sequence[Tensor],
) -> list[Tensor]:
    plan = plans[key]
    if not sinks:
        return list(_unshard(plan, waiting, flats))
    counts = len(sinks), len(waiting), len(added)
    return list(_Unshard.apply(plan, counts, *sinks, *waiting, *added, *flats))  # type: ignore[no-untyped-call]  # torch's own


_library.impl("unshard", _composed_unshard, "CompositeImplicitAutograd")
_library.impl("outer_gather", _outer_gather, "CompositeImplicitAutograd")


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: TracedPlan, counts: tuple[int, int, int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ends = list(itertools.accumulate(counts))
        waiting, added = tensors[ends[0] : ends[1]], tensors[ends[1] : ends[2]]
        ctx.plan, ctx.counts, ctx.inputs = plan, counts, len(tensors)
        ctx.save_for_backward(*added)
        ctx.set_materialize_grads(False)
        wholes = _unshard(plan, waiting, tensors[ends[2] :])
        pairs = zip(plan.trainable, wholes, strict=True)
        frozen = [whole for is_trained, whole in pairs if not is_trained]
        ctx.mark_non_differentiable(*frozen)
        return wholes

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan: TracedPlan = ctx.plan
        found = [grads[index] for index in plan.members]
        # after the first backward, reading saved_tensors raises even if none were saved
        added = ctx.saved_tensors if plan.added else ()
        given = reduce(plan, found, added)
        return None, None, *given, *(None,) * (ctx.inputs - len(given))


def _to_send(plan: TracedPlan, flats: Sequence[Tensor]) -> list[Tensor]:
    """Return the flat data that this rank sends for each piece, in the wire dtype."""
    found = []
    for piece in plan.gathers:
        if piece.coded is not None:
            (run,) = piece.runs
            found.append(_encoded(flats[run.segment], piece, plan.rank, plan.device))
            continue
        parts = [
            flats[run.segment][run.start : run.start + run.numel].to(plan.device, piece.dtype)
            for run in piece.runs
        ]
        if piece.gap:
            parts.append(parts[0].new_zeros(piece.gap))
        sent = parts[0] if len(parts) == 1 else torch.cat(parts)
        found.append(sent if sent.dtype == piece.wire_dtype else sent.view(piece.wire_dtype))
    return found


def _encoded(flat: Tensor, piece: GatherPiece, rank: int, device: str) -> Tensor:
    """Return a shard encoded as bytes, in the layout of ``coding.write``."""
    item = piece.coded
    assert item is not None
    assert item.coding is not None
    shape, start = item.shard.shard_shape(rank), item.coding.scales_start(item.room(rank))
    values = flat[: math.prod(shape)].to(device).view(item.coding.scale_count(shape), -1)
    if not values.numel():
        empty = flat.new_zeros(item.sent_nbytes(rank) + piece.gap, dtype=torch.uint8)
        return empty.to(device)
    (rows,), (scales,) = packing.encode([values], item.coding)
    codes = rows.to(item.coding.dtype).view(-1).view(torch.uint8)
    rest = item.sent_nbytes(rank) + piece.gap - start - scales.nbytes
    filled = codes.new_zeros(start - codes.numel())
    return torch.cat([codes, filled, scales.view(torch.uint8), codes.new_zeros(rest)])


def _decoded(gathered: Tensor, item: GatherItem) -> Tensor:
    """Decode a parameter from the bytes ``[W, nbytes]`` that the ranks sent."""
    assert item.coding is not None
    whole = gathered.new_empty(item.shard.shape, dtype=item.compute_dtype)
    packing.decode_padded(whole, gathered, item.shard, item.coding)
    return _with_stride(whole.view(-1), item.shard)


def _unshard(
    plan: TracedPlan, waiting: Sequence[Tensor], flats: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    layout = plan.layout
    wholes: list[Tensor | None] = [None] * len(layout.items)
    for piece, gathered in zip(plan.gathers, _gather(plan, waiting, flats), strict=True):
        if piece.coded is not None:
            wholes[piece.indices[0]] = _decoded(gathered, piece.coded)
            continue
        end = 0
        for index in piece.indices:
            item = layout.items[index]
            width = item.shard.padded_numel * item.compute_dtype.itemsize // gathered.itemsize
            start, end = end, end + width
            padded = gathered[:, start:end]
            if padded.dtype != item.compute_dtype:
                padded = padded.contiguous().view(item.compute_dtype)
            wholes[index] = _join(padded, item.shard)
    for segment, flat in zip(layout.segments, flats, strict=True):
        end = 0
        for index in segment.indices:
            item = layout.items[index]
            start, end = end, end + item.shard.padded_numel
            if segment.is_replicated:
                own = flat[start:end].to(plan.device, item.compute_dtype, copy=True)
                wholes[index] = _with_stride(own, item.shard)
            elif item.shard.numel == 0:  # ranks send no data for an empty parameter
                none = flat.new_empty(0, dtype=item.compute_dtype, device=plan.device)
                wholes[index] = _with_stride(none, item.shard)
    made = wholes[: len(plan.trainable)]  # exclude the tail, which graphs do not send
    return tuple(
        whole if dtype is None else whole.to(dtype)
        for whole, dtype in zip(made, plan.widened, strict=True)
        if whole is not None
    )


def _gather(plan: TracedPlan, waiting: Sequence[Tensor], flats: Sequence[Tensor]) -> list[Tensor]:
    """Return every rank's part of each piece, ``[W, n]`` in the wire dtype."""
    if waiting:
        assert plan.neighbours is not None
        inner = plan.neighbours
        rows = plan.size // inner.size
        return [
            one.view(inner.size, rows, -1).transpose(0, 1).reshape(plan.size, -1)
            for one in _each(plan, _GATHER, waiting, inner.size, inner.inner_group)
        ]
    sent = _to_send(plan, flats)
    if plan.size == 1:
        return [one.clone().view(1, -1) for one in sent]
    gathered = _each(plan, _GATHER, sent, plan.size, plan.shard_group)
    return [one.view(plan.size, -1) for one in gathered]


def _join(padded: Tensor, shard: ShardLayout) -> Tensor:
    """Join padded shards ``[W, padded_numel]``, as ``packing`` does."""
    dim = shard.dim
    assert dim is not None
    if dim == 0 or shard.numel == 0:
        return _with_stride(padded.reshape(-1)[: shard.numel], shard)
    shapes = [shard.shard_shape(rank) for rank in range(shard.size) if shard.rows(rank)]
    parts = [padded[rank, : math.prod(shape)].view(shape) for rank, shape in enumerate(shapes)]
    return _with_stride(torch.cat(parts, dim).view(-1), shard)


def _with_stride(flat: Tensor, shard: ShardLayout) -> Tensor:
    """Return row-major values with the shape and stride of the unsharded parameter."""
    whole = flat.view(shard.shape)
    if shard.stride == contiguous_stride(shard.shape) or shard.numel == 0:
        return whole
    order = sorted(range(len(shard.shape)), key=lambda dim: -shard.stride[dim])
    back = [order.index(dim) for dim in range(len(order))]
    return whole.permute(order).contiguous().permute(back)


def reduce(
    plan: TracedPlan, grads: Sequence[Tensor | None], added: Sequence[Tensor]
) -> list[Tensor | None]:
    """Reduce the members' local gradients. Return one row per piece, and the gradient of the empty
    sink. Without sync, return the local gradients (None if missing) instead of rows."""
    like = next(grad for grad in grads if grad is not None)
    missing = [like.new_empty(0, dtype=plan.reduction.dtype) if None in grads else None]
    dense = [_in_its_dtype(grad, plan, place) for place, grad in enumerate(grads)]
    if not plan.syncs:
        return [*dense, *missing]
    waiting = iter(added)
    for place, has_one in enumerate(plan.added):
        if has_one:
            one, grad = next(waiting), dense[place]
            dense[place] = one if grad is None else one + grad
    packed = [_pack(plan, piece, dense, like) for piece in plan.reduces]
    return [*_reduce_packed(plan, packed), *missing]


def _in_its_dtype(grad: Tensor | None, plan: TracedPlan, place: int) -> Tensor | None:
    """Return the gradient, made dense, in the dtype that it would have after an eager backward."""
    if grad is None:
        return None
    dense = grad if grad.layout is torch.strided else grad.to_dense()
    return dense.to(plan.grad_dtypes[place])


def _pack(
    plan: TracedPlan, piece: ReduceLayout, grads: Sequence[Tensor | None], like: Tensor
) -> Tensor:
    """Return the flat data that this rank sends for a piece: one row per receiving rank."""
    columns = [
        _column(grads[place], plan, piece, position, like)
        for position, place in enumerate(piece.members)
    ]
    columns = [column for column in columns if column.shape[1]]
    if piece.tail_gap:  # padding between the gradients and the tail of a row
        gap = plan.size, piece.tail_gap
        columns.append(like.new_zeros(gap, dtype=plan.reduction.dtype))
    if piece.numel > piece.tail_start:
        extra = _nothing(like) if not plan.bucketed and not piece.members else None
        columns += _counts([grad is not None for grad in grads], plan, like, extra)
    if not columns:
        return like.new_empty(0, dtype=plan.reduction.dtype)
    rows = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
    return rows.reshape(-1).contiguous()  # zeros for a missing gradient are expanded


def _column(
    grad: Tensor | None,
    plan: TracedPlan,
    layout: ReduceLayout,
    position: int,
    like: Tensor,
) -> Tensor:
    """Return the data that this rank sends to each rank for one member, ``[W, width]``."""
    shard, size = layout.shards[position], layout.size
    if grad is None:
        return like.new_zeros((), dtype=layout.dtype).expand(size, layout.width(position))
    grad = grad.to(layout.dtype)
    if shard.dim is None:
        row = grad.reshape(-1)
        if layout.slotted[position]:
            before = plan.rank * shard.numel
            row = nn.functional.pad(row, (before, (size - 1) * shard.numel - before))
        return row.expand(size, -1)
    row = grad.movedim(shard.dim, 0).reshape(-1)
    missing = size * shard.padded_numel - row.numel()
    padded = nn.functional.pad(row, (0, missing)) if missing else row
    return padded.view(size, shard.padded_numel)


def _counts(
    present: list[bool], plan: TracedPlan, like: Tensor, extra: Tensor | None
) -> list[Tensor]:
    """Return the members' counts as columns ``[W, n]``. Add ``extra`` to nonzero counts."""
    columns = []
    for flag, run in itertools.groupby(present):
        count = like.new_full((plan.size, len(list(run))), float(flag), dtype=plan.reduction.dtype)
        columns.append(count + extra if flag and extra is not None else count)
    return columns


def _nothing(like: Tensor) -> Tensor:
    """Return False (zero), computed from a gradient, or True if its first element is NaN. If counts
    were constant, a compiler would move their collective to forward and merge it with that of an
    equal group, which inductor's bucketing does not support. (A compiler would also replace a
    product with 0 by a constant.)"""
    return like.reshape(-1)[:1].isnan().any()


def _reduce_packed(plan: TracedPlan, packed: list[Tensor]) -> list[Tensor]:
    """Return this rank's part of the sum or mean of all ranks' packed data."""
    before, after = plan.reduction.scale
    reduced = [one * before for one in packed] if before != 1.0 else packed
    if plan.size > 1 and plan.reduction.wire_dtype != plan.reduction.dtype:
        reduced = [_exchange(plan, one) for one in reduced]
    elif plan.size > 1:
        reduced = _each(
            plan, "reduce_scatter_tensor", reduced, plan.reduction.op, plan.size, plan.shard_group
        )
    if plan.replicate_group:
        reduced = _each(plan, "all_reduce", reduced, plan.reduction.op, plan.replicate_group)
    return [one * after for one in reduced] if after != 1.0 else reduced


def _exchange(plan: TracedPlan, packed: Tensor) -> Tensor:
    """Send every rank its row in the wire dtype, and sum the received rows in the reduce dtype."""
    size, sent = plan.size, packed.to(plan.reduction.wire_dtype)
    rows = [packed.numel() // size] * size
    came = torch_comm.functional("all_to_all_single", sent, rows, rows, plan.shard_group)
    total = came.view(size, -1).to(plan.reduction.dtype).sum(0)
    return total / size if plan.reduction.op == "avg" else total


def _each(
    plan: TracedPlan,
    name: str,
    sent: Sequence[Tensor],
    *args: Any,
) -> list[Tensor]:
    """Run a collective on each piece, coalesced unless the compiler does the bucketing."""
    if plan.bucketed and len(sent) > 1:
        return torch_comm.functional_coalesced(name, sent, *args)
    return [torch_comm.functional(name, one, *args) for one in sent]

"""What a group computes inside a graph: unshard and reduce, as functions of tensors.

Owns ``TracedPlan`` (integers, made once) and the functions that apply it, which a compiler can
trace and which run outside of one too. It must not know groups, units or modules.

[Note: the gradient of unshard]
``unshard`` takes views of the group's shard buffer, without gradients, and a *sink*: a leaf of the
size of a reduced gradient buffer, and without memory. The sink takes no part in forward; the
gradient of ``unshard`` with respect to it is defined to be the reduced gradients of the group. So
one tensor leaves the graph for a group, and neither a DTensor nor a mesh enters it.

Legend: W = ranks of the shard axis, C = elements that a rank sends, S = elements of a reduced row.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._base import torch_comm
from fsdp2._param_group.layout import (
    GatherLayout,
    ReduceLayout,
    ShardLayout,
    contiguous_stride,
)


@dataclass(frozen=True)
class Neighbours:
    """Where a group waits between forward and backward: whole on ``size`` neighbouring ranks."""

    size: int
    rank: int
    outer_group: str  # ranks that hold the same part; empty: the shard axis itself is gathered
    inner_group: str


@dataclass(frozen=True)
class TracedPlan:
    """Everything that the functions below know about a group. Equal plans have one key."""

    layout: GatherLayout
    rank: int
    shard_group: str
    replicate_group: str
    neighbours: Neighbours | None
    recompute: bool
    trainable: tuple[bool, ...]
    reduce: ReduceLayout
    widened: tuple[torch.dtype | None, ...]  # what parameters leave the function in, so that
    # gradients arrive in it: summed over the parameters' own axes before they are reduced
    grad_dtypes: tuple[torch.dtype, ...]  # of members, as one backward leaves them in eager mode
    scale: tuple[float, float]
    op: str
    bucketed: bool = True

    @property
    def size(self) -> int:
        return self.layout.size

    @property
    def sends_each(self) -> bool:
        """True if every parameter has collectives of its own."""
        return not self.bucketed and self.size > 1 and self.neighbours is None


plans: dict[str, TracedPlan] = {}
"""By the keys by which graphs refer to them."""

_keys: dict[TracedPlan, str] = {}

incomplete: set[str] = set()
"""Keys of plans of which some graph, when it was traced, had no gradient for some parameter.

Then somebody has to look which parameters had any.
"""


def key_of(plan: TracedPlan, fqn: str) -> str:
    """Return the name by which a graph refers to a plan: a string, which no compiler makes dynamic.

    It follows from what the plan says, so a compiler that keeps graphs on disk finds no other one
    under it. A plan that comes back (a setting changed there and back) has its old graph.
    """
    if plan not in _keys:
        digest = hashlib.sha256(repr(plan).encode()).hexdigest()[:16]
        _keys[plan] = f"{fqn or '<root>'}#{digest}"
        plans[_keys[plan]] = plan
    return _keys[plan]


# In the graph.


def outer_gather(key: str, *flats: Tensor) -> Tensor:
    """Gather what waits between forward and backward: this rank's rows, ``[W / size, C]``."""
    plan = plans[key]
    neighbours = plan.neighbours
    assert neighbours is not None
    sent = _to_send(plan, flats)
    rows = plan.size // neighbours.size
    if neighbours.outer_group:
        return _all_gather(sent, rows, neighbours.outer_group)
    gathered = _all_gather(sent, plan.size, plan.shard_group)
    return gathered.view(rows, neighbours.size, -1)[:, neighbours.rank].contiguous()


def unshard(
    key: str, sink: Tensor | None, waiting: Tensor | None, *flats: Tensor
) -> tuple[Tensor, ...]:
    """Return the unsharded parameters of a group, local ones over their own axes.

    Args:
        sink: the leaf that takes the reduced gradients; None if no parameter is trainable.
        waiting: what ``outer_gather`` returned, if the group waits on a smaller mesh.
        flats: one tensor for each segment of the layout.
    """
    plan = plans[key]
    if sink is None:
        return _unshard(plan, waiting, flats)
    return _Unshard.apply(plan, sink, waiting, *flats)  # type: ignore[no-any-return, no-untyped-call]  # torch's own


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: TracedPlan, sink: Tensor, waiting: Tensor | None, *flats: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.plan, ctx.inputs = plan, len(flats)
        ctx.set_materialize_grads(False)
        wholes = _unshard(plan, waiting, flats)
        frozen = [w for w, trains in zip(wholes, plan.trainable, strict=True) if not trains]
        ctx.mark_non_differentiable(*frozen)
        return wholes

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, reduce(ctx.plan, grads), None, *(None,) * ctx.inputs


def _to_send(plan: TracedPlan, flats: Sequence[Tensor]) -> Tensor:
    """Return what the send buffer of the layout has to send, ``[C]``."""
    layout, parts = plan.layout, []
    pairs = zip(layout.segments, flats, strict=True)
    sharded = [(segment, flat) for segment, flat in pairs if not segment.is_replicated]
    ends = [*(segment.send_start for segment, _ in sharded[1:]), layout.gather_nbytes]
    for (segment, flat), end in zip(sharded, ends, strict=True):
        part = flat.to(segment.compute_dtype)
        if layout.wire_dtype == torch.uint8:
            part = part.view(torch.uint8)
        parts.append(_padded(part, (end - segment.send_start) // part.itemsize))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _unshard(
    plan: TracedPlan, waiting: Tensor | None, flats: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    layout = plan.layout
    wholes: list[Tensor | None] = [None] * len(layout.items)
    gathered = None if plan.sends_each else _gather(plan, waiting, flats)
    for segment, flat in zip(layout.segments, flats, strict=True):
        own = flat.to(segment.compute_dtype, copy=True) if segment.is_replicated else None
        end = 0
        for index in segment.indices:
            item = layout.items[index]
            shard = item.shard
            start, end = end, end + shard.padded_numel
            if item.is_stamp:
                continue
            if own is not None:
                wholes[index] = _with_stride(own[start:end], shard)
                continue
            if gathered is None:
                padded = _gather_one(plan, flat[start:end], item.compute_dtype)
            else:
                at, width = layout.send_offsets[index], layout.wire_dtype.itemsize
                padded = gathered[:, at // width : (at + layout.padded_nbytes(index)) // width]
            if layout.wire_dtype != item.compute_dtype:
                padded = padded.contiguous().view(item.compute_dtype)
            wholes[index] = _join(padded, shard)
    made = (whole for whole in wholes if whole is not None)
    return tuple(
        whole if dtype is None else whole.to(dtype)
        for whole, dtype in zip(made, plan.widened, strict=True)
    )


def _gather(plan: TracedPlan, waiting: Tensor | None, flats: Sequence[Tensor]) -> Tensor:
    """Return every rank's padded shards, ``[W, C]``."""
    if waiting is not None:
        assert plan.neighbours is not None
        inner = plan.neighbours
        rows = _all_gather(waiting.view(-1), inner.size, inner.inner_group)
        rows = rows.view(inner.size, plan.size // inner.size, -1)
        return rows.transpose(0, 1).reshape(plan.size, -1)
    if plan.layout.gather_nbytes == 0:
        return flats[0].new_empty((plan.size, 0), dtype=plan.layout.wire_dtype)
    sent = _to_send(plan, flats)
    if plan.size == 1:
        return sent.clone().view(1, -1)
    return _all_gather(sent, plan.size, plan.shard_group)


def _gather_one(plan: TracedPlan, one: Tensor, dtype: torch.dtype) -> Tensor:
    """Return every rank's padded shard of one parameter, in wire dtype."""
    sent = one.to(dtype, copy=True)  # of its own: compilers bucket such ones
    if plan.layout.wire_dtype == torch.uint8:
        sent = sent.view(torch.uint8)
    return _all_gather(sent, plan.size, plan.shard_group) if sent.numel() else sent.view(1, 0)


def _join(padded: Tensor, shard: ShardLayout) -> Tensor:
    """Join padded shards ``[W, padded_numel]``, by the rule of ``packing``."""
    dim = shard.dim
    assert dim is not None
    if dim == 0 or shard.numel == 0:
        return _with_stride(padded.reshape(-1)[: shard.numel], shard)
    shapes = [shard.shard_shape(rank) for rank in range(shard.size) if shard.rows(rank)]
    parts = [padded[rank, : math.prod(shape)].view(shape) for rank, shape in enumerate(shapes)]
    return _with_stride(torch.cat(parts, dim).view(-1), shard)


def _with_stride(flat: Tensor, shard: ShardLayout) -> Tensor:
    """Give values in row-major order the shape and the stride of the unsharded parameter."""
    whole = flat.view(shard.shape)
    if shard.stride == contiguous_stride(shard.shape) or shard.numel == 0:
        return whole
    order = sorted(range(len(shard.shape)), key=lambda dim: -shard.stride[dim])
    back = [order.index(dim) for dim in range(len(order))]
    return whole.permute(order).contiguous().permute(back)


def reduce(plan: TracedPlan, grads: Sequence[Tensor | None]) -> Tensor:
    """Reduce the local gradients of a group's parameters; return this rank's row, ``[S]``."""
    layout = plan.reduce
    found = [grads[index] for index in layout.members]
    if any(grad is None for grad in found):
        incomplete.add(_keys[plan])
    like = next(grad for grad in grads if grad is not None)
    columns = [
        _column(found[position], plan, position, like)
        for position in sorted(range(len(found)), key=layout.offsets.__getitem__)
        if layout.shards[position].padded_numel
    ]
    columns.append(_tail([grad is not None for grad in found], layout, like))
    if plan.sends_each:
        return torch.cat([_reduce_packed(plan, column.reshape(-1)) for column in columns])
    return _reduce_packed(plan, torch.cat(columns, dim=1).view(-1))


def _reduce_packed(plan: TracedPlan, packed: Tensor) -> Tensor:
    """Return this rank's part of the sum or mean of what all ranks packed, ``[W * n]``."""
    layout, (before, after) = plan.reduce, plan.scale
    reduced = packed * before if before != 1.0 else packed
    if layout.size > 1:
        reduced = torch_comm.functional(
            "reduce_scatter_tensor", reduced, plan.op, layout.size, plan.shard_group
        )
    if plan.replicate_group:
        reduced = torch_comm.functional("all_reduce", reduced, plan.op, plan.replicate_group)
    return reduced * after if after != 1.0 else reduced


def _column(grad: Tensor | None, plan: TracedPlan, position: int, like: Tensor) -> Tensor:
    """Return what a member sends to every rank, ``[W, width]``."""
    layout = plan.reduce
    shard, size = layout.shards[position], layout.size
    if grad is None:
        return like.new_zeros((), dtype=layout.dtype).expand(size, layout.width(position))
    if grad.layout is not torch.strided:
        grad = grad.to_dense()
    grad = grad.to(plan.grad_dtypes[position]).to(layout.dtype)
    if shard.dim is None:
        row = grad.reshape(-1)
        if layout.slotted[position]:
            before = plan.rank * shard.numel
            row = nn.functional.pad(row, (before, (size - 1) * shard.numel - before))
        return row.expand(size, -1)
    row = grad.movedim(shard.dim, 0).reshape(-1)
    return _padded(row, size * shard.padded_numel).view(size, shard.padded_numel)


def _tail(present: list[bool], layout: ReduceLayout, like: Tensor) -> Tensor:
    """Return who had a gradient, and zeros for the stamps, ``[W, P + S]``."""
    flags = [*present, *(False,) * (layout.numel - layout.stamp_start)]
    parts = [
        like.new_full((layout.size, len(list(run))), float(flag), dtype=layout.dtype)
        for flag, run in itertools.groupby(flags)
    ]
    return torch.cat(parts, dim=1)


def _padded(row: Tensor, numel: int) -> Tensor:
    missing = numel - row.numel()
    return nn.functional.pad(row, (0, missing)) if missing else row


def _all_gather(sent: Tensor, size: int, group: str) -> Tensor:
    return torch_comm.functional("all_gather_into_tensor", sent, size, group).view(size, -1)

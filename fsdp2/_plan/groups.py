"""What a group will keep, gather and reduce, read from the layouts that the engine runs on.

Owns that reading. Only the room for the numbers that real ranks send along is added here.
"""

from __future__ import annotations

from fsdp2._agreement.operation_ids import GATHER_STAMP_NUMEL, STAMP_NUMEL
from fsdp2._base import torch_dtensor
from fsdp2._base.capabilities import ROW_NBYTES
from fsdp2._param_group.buffers import ShardBuffer
from fsdp2._param_group.group import ParamGroup
from fsdp2._param_group.layout import GatherItem, GatherLayout
from fsdp2._param_group.param import FSDPParam
from fsdp2._plan.values import GroupPlan, ParamPlan


def _as_sent(group: ParamGroup, buffer: ShardBuffer) -> GatherLayout:
    """Return the layout of a buffer with the numbers that real ranks send along."""
    layout, smaller = buffer.layout, group.buffers.post_forward.mesh
    if buffer.tail is not None:
        return layout
    others = () if smaller is None else (smaller.shard.size,)
    zero_copy = group.wire.zero_copy
    return GatherLayout.plan_with_tail(
        layout.items, layout.size, GATHER_STAMP_NUMEL, others, zero_copy, layout.rank
    )


def describe(group: ParamGroup) -> GroupPlan:
    """Read a group's own layouts, with room for what ranks tell each other."""
    buffer = group.buffers.home
    assert buffer is not None  # it was looked at
    layout = buffer.layout
    sent, again = (
        _as_sent(group, buffer),
        _as_sent(group, group.buffers.post_forward.buffer or buffer),
    )
    axes = [axis for axis in (group.data.scattered, group.data.summed) if axis.size > 1]
    planned = group.reducer.plan()
    tail_numel = len(planned.members) + len(axes) * STAMP_NUMEL
    reduced = planned.layout.with_tail(tail_numel, ROW_NBYTES)
    items = layout.items[: len(group.params)]  # behind them may be what ranks tell each other
    params = tuple(map(_describe_param, group.params, items))
    has_members = bool(planned.members)
    return GroupPlan(
        name=group.fqn,
        parameters=len(group.params),
        numel=sum(one.shard.numel for one in items),
        dtypes=tuple(dict.fromkeys(one.storage_dtype for one in items)),
        shard_nbytes=sum(
            one.shard.kept_numel(layout.rank) * one.storage_dtype.itemsize for one in items
        ),
        padding_nbytes=sum(param.padding_nbytes for param in params),
        whole_nbytes=sent.full_nbytes,
        gather_nbytes=_gathered(sent),
        regather_nbytes=_gathered(again),
        reduce_nbytes=reduced.nbytes if has_members else 0,
        all_reduce_nbytes=(
            reduced.numel * reduced.dtype.itemsize
            if has_members and group.data.replicate.size > 1
            else 0
        ),
        outer_nbytes=(
            group.data.rows_between * reduced.numel * reduced.dtype.itemsize
            if has_members and group.data.layers is not None
            else 0
        ),
        grad_nbytes=sum(
            torch_dtensor.local_part(param.sharded).numel()
            * param.kept_dtype(reduced.dtype).itemsize
            for param in group.params
            if param.trainable
        ),
        alone=tuple(group.params[index].fqn for index in layout.zero_copy),
        params=params,
    )


def _gathered(layout: GatherLayout) -> int:
    """Return the bytes that all ranks send."""
    if layout.size == 1:
        return 0
    return sum(layout.pieces) or layout.gather_nbytes * layout.size


def _describe_param(param: FSDPParam, item: GatherItem) -> ParamPlan:
    shard, itemsize = item.shard, item.storage_dtype.itemsize
    padded = shard.padded_numel * shard.size if shard.is_even else 0
    return ParamPlan(
        name=param.fqn,
        shape=shard.shape,
        dtype=item.storage_dtype,
        dim=shard.dim,
        nbytes=shard.numel * itemsize,
        padding_nbytes=max(padded - shard.numel, 0) * itemsize,
        owner=shard.owner,
    )

"""Tensors that stand in for parameters during one forward, as ``torch.func.functional_call`` does.

Owns a differentiable gather of one shard: forward all-gathers it, backward reduces its gradient as
the group would. It is slower than a group (a collective for each tensor), and it keeps the whole
tensor for backward: a stand-in has no storage of ours to free.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2 import _packing
from fsdp2._comm import GradientScale, Wire
from fsdp2._errors import UnsupportedError
from fsdp2._layout import GatherItem, GatherLayout, ReduceLayout
from fsdp2._mesh import DataMesh
from fsdp2._param import FSDPParam
from fsdp2._policy import Settings
from fsdp2._shards import ShardBuffer


def whole_tensor(
    stand_in: Tensor, param: FSDPParam, data: DataMesh, wire: Wire, settings: Settings
) -> Tensor:
    """Return the unsharded form of a tensor that is registered in the place of ``param``.

    Args:
        stand_in: a DTensor placed as the parameter is, or a plain tensor of its whole shape.

    Raises:
        UnsupportedError: anything else.
    """
    placement = param.placement
    if isinstance(stand_in, DTensor):
        fits = (
            placement.tensor_parallel is None
            and stand_in.device_mesh == placement.mesh
            and tuple(stand_in.placements) == placement.placements
            and tuple(stand_in.shape) == placement.global_shape
        )
        if fits:
            local = stand_in.to_local()
            whole: Tensor = _GatherShard.apply(local, param, data, wire, settings)  # type: ignore[no-untyped-call]  # torch's own
            return whole.to(param.compute_dtype)
    elif tuple(stand_in.shape) == placement.global_shape and placement.tensor_parallel is None:
        return stand_in.to(param.compute_dtype)
    raise UnsupportedError(
        f"{param.fqn}: a {type(stand_in).__name__} of shape {tuple(stand_in.shape)} stands in for "
        f"it. Pass a DTensor of shape {placement.global_shape} with placements "
        f"{placement.placements}, or a plain tensor of the whole shape."
    )


class _GatherShard(torch.autograd.Function):
    """All-gather of one shard; its backward is the mean reduction over data-parallel ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        param: FSDPParam,
        data: DataMesh,
        wire: Wire,
        settings: Settings,
    ) -> Tensor:
        ctx.call = (param, data, wire, settings)
        item = GatherItem(param.placement.layout, local.dtype, local.dtype)
        layout = GatherLayout.plan([item], data.shard.size)
        buffer = ShardBuffer(layout, data.shard, local.device)
        buffer.shards[0].copy_(local)
        gathered, send = buffer.gather(wire, async_op=False).buffers
        full = torch.empty(layout.full_nbytes, dtype=torch.uint8, device=local.device)
        _packing.unpack(gathered, send, layout, _packing.gather_targets(full, layout))
        return _packing.full_tensors(full, layout)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        param, data, wire, settings = ctx.call
        layout = ReduceLayout.plan([0], [param.placement.layout], data.shard.size, grad.dtype)
        scale = GradientScale.choose(data.size, grad.dtype, settings.divide_by, settings.only_sums)
        packed = wire.allocate((layout.size, layout.numel), grad.dtype, grad.device)
        behind = _packing.tail([True], (), layout, grad.dtype, grad.device)
        _packing.pack_gradients([grad], layout, behind, packed)
        packed.mul_(scale.before)
        reduced = packed.view(-1)
        if data.shard.size > 1:
            reduced = wire.allocate((layout.numel,), grad.dtype, grad.device)
            wire.reduce_scatter(reduced, packed.view(-1), scale.op, data.shard, async_op=False)
        if data.replicate.size > 1:
            wire.all_reduce(reduced, scale.op, data.replicate, async_op=False)
        reduced.mul_(scale.after)
        local = _packing.gradient_view(reduced, layout, 0, data.shard.rank)
        local = local.clone(memory_format=torch.contiguous_format)  # not in the wire's memory
        return local, None, None, None, None

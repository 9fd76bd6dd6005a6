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

from fsdp2._core.base import torch_dtensor, torch_modes
from fsdp2._core.base.errors import UnsupportedError
from fsdp2._core.base.policy import Settings
from fsdp2._core.params import gradient_packing, packing
from fsdp2._core.params.buffers import ShardBuffer
from fsdp2._core.params.gradients import local_gradient
from fsdp2._core.params.layout import GatherItem, GatherLayout, ReduceLayout
from fsdp2._core.params.param import FSDPParam
from fsdp2._core.params.reduce import Reducer


def whole_tensor(
    stand_in: Tensor, param: FSDPParam, reducer: Reducer, settings: Settings
) -> Tensor:
    """Return the unsharded form of a tensor that is registered in the place of ``param``.

    Args:
        stand_in: a tensor that lies as the sharded parameter does, or as the unsharded one.

    Raises:
        UnsupportedError: anything else.
    """
    placement = param.placement
    if isinstance(stand_in, DTensor) and placement.is_sharded(stand_in):
        if param.is_extended:
            raise UnsupportedError(
                "FS318",
                f"{param.fqn}: a shard stands in for a parameter with an all-gather extension. "
                "Pass a tensor of the whole shape, or change the parameter itself.",
            )
        local = stand_in.to_local()
        if local.device.type != reducer.device.type and not local.is_meta:  # it is offloaded
            if torch.is_grad_enabled() and local.requires_grad:
                raise UnsupportedError(
                    "FS318",
                    f"{param.fqn}: a shard on {local.device} that requires gradients stands in for "
                    f"it, which is computed on {reducer.device}. Pass a tensor of the whole shape "
                    "there, or call it without gradients.",
                )
            local = local.to(reducer.device)
        whole: Tensor = _GatherShard.apply(local, param, reducer, settings)  # type: ignore[no-untyped-call]  # torch's own
        whole = whole.to(param.compute_dtype)
        if placement.tensor_parallel is None:
            return whole
        wrapped: Tensor = _WrapUnsharded.apply(whole, param)  # type: ignore[no-untyped-call]  # torch's own
        return wrapped
    if placement.is_unsharded(stand_in):
        if torch_modes.is_under_transforms():
            _check_transformed(stand_in, param)
        dtype = param.compute_dtype
        return stand_in if stand_in.dtype == dtype else stand_in.to(dtype)
    raise UnsupportedError(
        "FS318",
        f"{param.fqn}: a {type(stand_in).__name__} of shape {tuple(stand_in.shape)} stands in for "
        f"it. Pass a tensor {placement.describe()}.",
    )


def _check_transformed(stand_in: Tensor, param: FSDPParam) -> None:
    """Raise UnsupportedError if a torch.func transform would lose track of a stand-in."""
    if any(isinstance(layer, DTensor) for layer in torch_modes.layers_of(stand_in)):
        raise UnsupportedError(
            "FS318",
            f"{param.fqn}: a DTensor stands in for it inside a torch.func transform, and DTensors "
            "know nothing of transforms. Pass whole tensors (full_tensor()), or call backward().",
        )
    if stand_in.dtype != param.compute_dtype:
        raise UnsupportedError(
            "FS318",
            f"{param.fqn}: a {stand_in.dtype} tensor stands in for it inside a torch.func "
            f"transform, where none is cast. Pass it as {param.compute_dtype}.",
        )


class _WrapUnsharded(torch.autograd.Function):
    """The unsharded form over its own axes; its gradient comes back as a group takes it."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, param: FSDPParam) -> Tensor:
        ctx.param = param
        spec, annotation = param.placement.unsharded_spec(local.dtype), param.placement.annotation
        if annotation is not None:
            whole = local.view_as(local)
            annotation.restore(whole)
            return whole
        assert spec is not None
        return torch_dtensor.new_dtensor(local.view_as(local), spec)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return local_gradient(grad, ctx.param, ctx.param.storage_dtype), None


class _GatherShard(torch.autograd.Function):
    """All-gather of one shard; its backward is the mean reduction over data-parallel ranks."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, param: FSDPParam, reducer: Reducer, settings: Settings
    ) -> Tensor:
        ctx.call, axis = (param, reducer, settings), reducer.data.shard
        how = param.coding_of(param.placement.layout)
        item = GatherItem(param.placement.layout, local.dtype, local.dtype, coding=how)
        if item.shard.numel == 0:  # nor would CUDA's kernels take nothing at all
            return local.new_empty(item.shard.shape)
        layout = GatherLayout.plan([item], axis.size, rank=axis.rank)
        buffer = ShardBuffer(layout, axis, local.device)
        buffer.shards[0].copy_(local)
        full = torch.empty(layout.full_nbytes, dtype=torch.uint8, device=local.device)
        buffer.bind(full)
        buffer.unpack(*buffer.gather(reducer.wire, async_op=False).buffers)
        return packing.full_tensors(full, layout)[0]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        param, reducer, settings = ctx.call
        data, wire = reducer.data, reducer.wire
        if grad.numel() == 0:
            empty = grad.new_empty(param.placement.layout.shard_shape(data.shard.rank))
            return empty, None, None, None
        rank, shards = data.shard.rank, [param.placement.layout]
        layout = ReduceLayout.plan([0], shards, data.shard.size, grad.dtype, 1, rank=rank)
        scale = reducer.planner.scale_for(grad.dtype, settings, wire)
        behind = gradient_packing.tail((), layout, grad.dtype, grad.device)
        (packed,) = gradient_packing.inputs_of(
            [grad], layout, rank, behind, wire.allocate, grad.device
        )
        packed.mul_(scale.before)
        reduced = packed.view(-1)
        wire.exact = layout.exact  # the next reduction of the group tells its own
        if data.shard.size > 1:
            reduced = wire.allocate((layout.numel,), grad.dtype, grad.device)
            if layout.pieces:
                sizes = layout.pieces
                wire.reduce_scatter_uneven(reduced, packed, sizes, scale.op, data.shard, False)
            else:
                wire.reduce_scatter(reduced, packed.view(-1), scale.op, data.shard, False)
        if data.replicate.size > 1:
            wire.all_reduce(reduced, scale.op, data.replicate, async_op=False)
        reduced.mul_(scale.after)
        if layout.slotted[0]:
            return gradient_packing.sum_of_slots(reduced, layout, 0), None, None, None
        local = gradient_packing.gradient_view(reduced, layout, 0, data.shard.rank)
        local = local.clone(memory_format=torch.contiguous_format)  # not in the wire's memory
        return local, None, None, None

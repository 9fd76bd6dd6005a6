"""Placeholders for parameters during one forward, as in ``torch.func.functional_call``.

A placeholder that is a shard is gathered differentiably, and its gradient is reduced like the
group's gradients. This is slower than the group's gather, because it needs one collective per
tensor. The unsharded tensor stays in memory until backward: its storage must not be freed.
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
    placeholder: Tensor,
    param: FSDPParam,
    reducer: Reducer,
    settings: Settings,
) -> Tensor:
    """Return the unsharded form of ``placeholder``, which is registered in place of ``param``.
    UnsupportedError: ``placeholder`` is neither a shard nor an unsharded tensor of ``param``."""
    placement = param.placement
    if isinstance(placeholder, DTensor) and placement.is_sharded(placeholder):
        if param.wrapped.is_extended:
            raise UnsupportedError(
                "FS318",
                f"{param.fqn}: found a shard in place of a parameter with an all-gather extension. "
                "Pass a tensor of the full shape, or change the parameter itself.",
            )
        local = placeholder.to_local()
        if local.device.type != reducer.device.type and not local.is_meta:  # offloaded
            if torch.is_grad_enabled() and local.requires_grad:
                raise UnsupportedError(
                    "FS318",
                    f"{param.fqn}: found in its place a shard that requires grad and is on "
                    f"{local.device}, but the unit computes on {reducer.device}. Pass a full "
                    "tensor on that device, or run the forward under torch.no_grad().",
                )
            local = local.to(reducer.device)
        whole: Tensor = _GatherShard.apply(local, param, reducer, settings)  # type: ignore[no-untyped-call]  # torch's own
        return whole
    if placement.is_unsharded(placeholder):
        if torch_modes.is_under_transforms():
            _check_transformed(placeholder, param)
        dtype = param.compute_dtype
        return placeholder if placeholder.dtype == dtype else placeholder.to(dtype)
    raise UnsupportedError(
        "FS318",
        f"{param.fqn}: found a {type(placeholder).__name__} of shape {tuple(placeholder.shape)} "
        f"in its place. Pass a tensor {placement.describe()}.",
    )


def _check_transformed(placeholder: Tensor, param: FSDPParam) -> None:
    """Raise UnsupportedError for a placeholder that a torch.func transform does not support."""
    if any(isinstance(layer, DTensor) for layer in torch_modes.layers_of(placeholder)):
        raise UnsupportedError(
            "FS318",
            f"{param.fqn}: found a DTensor in its place inside a torch.func transform, which "
            "DTensors do not support. Pass full tensors (full_tensor()), or call backward().",
        )
    if placeholder.dtype != param.compute_dtype:
        raise UnsupportedError(
            "FS318",
            f"{param.fqn}: found a {placeholder.dtype} tensor in its place inside a torch.func "
            f"transform, where tensors are not cast. Pass it as {param.compute_dtype}.",
        )


class _GatherShard(torch.autograd.Function):
    """All-gathers one shard, and returns the unsharded parameter. Backward reduces the gradient
    over the parameter's own axes and over data-parallel ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        param: FSDPParam,
        reducer: Reducer,
        settings: Settings,
    ) -> Tensor:
        ctx.call, axis = (param, reducer, settings), reducer.data.shard
        ctx.dtype, placement = local.dtype, param.placement
        how = param.coding_of(placement.layout)
        item = GatherItem(placement.layout, local.dtype, local.dtype, coding=how)
        if item.shard.numel == 0:  # CUDA kernels do not accept empty inputs
            whole = local.new_empty(item.shard.shape)
        else:
            layout = GatherLayout.plan([item], axis.size, rank=axis.rank)
            buffer = ShardBuffer(layout, axis, local.device)
            buffer.shards[0].copy_(local)
            full = torch.empty(layout.full_nbytes, dtype=torch.uint8, device=local.device)
            buffer.bind(full)
            buffer.unpack(*buffer.gather(reducer.wire, async_op=False).buffers)
            whole = packing.full_tensors(full, layout)[0]
        whole = whole.to(param.compute_dtype)
        if placement.annotation is not None:
            placement.annotation.restore(whole)
        spec = placement.unsharded_spec(whole.dtype)
        return whole if spec is None else torch_dtensor.new_dtensor(whole, spec)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        param, reducer, settings = ctx.call
        data, wire = reducer.data, reducer.wire
        grad = local_gradient(grad, param, param.storage_dtype).to(ctx.dtype)
        if grad.numel() == 0:
            empty = grad.new_empty(param.placement.layout.shard_shape(data.shard.rank))
            return empty, None, None, None
        rank, shards = data.shard.rank, [param.placement.layout]
        layout = ReduceLayout.plan([0], shards, data.shard.size, grad.dtype, 1, rank=rank)
        scale = reducer.scale_for(grad.dtype, settings)
        behind = gradient_packing.tail((), layout, grad.dtype, grad.device)
        (packed,) = gradient_packing.pack_gradients([grad], layout, rank, behind, wire.allocate)
        packed.mul_(scale.before)
        reduced = packed.view(-1)
        exact, wire.exact = wire.exact, layout.exact
        if data.shard.size > 1:
            reduced = wire.allocate((layout.numel,), grad.dtype, grad.device)
            if layout.pieces:
                sizes = layout.pieces
                wire.reduce_scatter_uneven(reduced, packed, sizes, scale.op, data.shard, False)
            else:
                wire.reduce_scatter(reduced, packed.view(-1), scale.op, data.shard, False)
        if data.replicate.size > 1:
            wire.all_reduce(reduced, scale.op, data.replicate, async_op=False)
        wire.exact = exact  # the columns of the group's own plan
        reduced.mul_(scale.after)
        if layout.slotted[0]:
            return gradient_packing.sum_of_slots(reduced, layout, 0), None, None, None
        local = gradient_packing.gradient_view(reduced, layout, 0, data.shard.rank)
        local = local.clone(memory_format=torch.contiguous_format)  # do not alias the wire's memory
        return local, None, None, None

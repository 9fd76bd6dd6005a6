"""Process gradients that are DTensors, belong to annotated parameters, or were set by the user.

Steady-state steps with plain gradients do not call these functions.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._core.base import torch_dealt, torch_dtensor
from fsdp2._core.params.param import FSDPParam, OwnerMark


def as_gradient(local: Tensor, param: FSDPParam) -> DTensor:
    """Return a gradient shard of any dtype as a DTensor with its parameter's placements."""
    spec, like = param.spec, param.like
    if local.dtype is not param.storage_dtype:
        spec = param.placement.sharded_spec(local.dtype)
        like = torch.empty(local.shape, dtype=local.dtype, device=local.device)
    return torch_dtensor.new_dtensor(local, spec, like=like)


def local_gradient(grad: Tensor, param: FSDPParam, dtype: torch.dtype) -> Tensor:
    """Redistribute a gradient like its parameter on the parameter's own axes, and return its local
    part. A plain gradient is returned as is, unless its parameter is annotated. Sums over own axes
    are computed in ``dtype`` if it is wider than the gradient's. The group reduces over the data
    axes later."""
    spec, annotation = param.placement.tensor_parallel, param.placement.annotation
    if not isinstance(grad, DTensor):
        if annotation is None or not annotation.sums:
            return grad
        grad = annotation.placed_gradient(grad)
    assert spec is not None
    placements = list(spec.placements)
    for axis in param.placement.data_axes:
        if not grad.placements[axis].is_shard():
            placements[axis] = grad.placements[axis]
    if tuple(grad.placements) != tuple(placements):
        if any(placement.is_partial() for placement in grad.placements):
            grad = cast(DTensor, grad.to(torch.promote_types(grad.dtype, dtype)))
        grad = grad.redistribute(placements=placements)
    return grad.to_local()


def add_to(param: torch.nn.Parameter, existing: Tensor, grad: DTensor) -> None:
    """Add ``grad`` to the existing gradient, which an earlier backward or the user set. An existing
    gradient that is a full tensor or has other placements is redistributed like ``grad`` first."""
    is_placed = isinstance(existing, DTensor) and torch_dealt.are_same(
        existing.placements, grad.placements
    )
    if not is_placed:
        mesh, placements = grad.device_mesh, grad.placements
        if isinstance(existing, DTensor):
            existing = torch_dealt.redistribute(existing, mesh, placements)
        else:
            existing = torch_dealt.distribute(existing, mesh, placements)
        param.grad = existing
    own, new = torch_dtensor.local_tensor(existing), torch_dtensor.local_tensor(grad)
    if own.shape != new.shape:  # broadcasting would hide the mismatch
        raise RuntimeError(f"local shapes {tuple(own.shape)} and {tuple(new.shape)}")
    own.add_(new)


def mismatch(param: torch.nn.Parameter, grad: Tensor) -> str:
    """Describe why a gradient does not fit its parameter or its existing gradient."""
    owner = OwnerMark.owner_of(param)
    name = "a parameter" if owner is None else owner.fqn
    return (
        f"{name}: its gradient, {_describe(grad)}, cannot be set or accumulated. The parameter is "
        f"now {_describe(param)}, its grad {_describe(param.grad)}. Replace a sharded parameter or "
        "gradient only with one of the same shape, dtype, device and mesh, or with None."
    )


def _describe(tensor: Tensor | None) -> str:
    if tensor is None:
        return "None"
    text = f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}, {tensor.dtype}"
    if isinstance(tensor, DTensor):
        local = torch_dtensor.local_tensor(tensor)
        text += f" ({tuple(local.shape)} here, on {local.device}, {tensor.placements})"
    return text

"""``clip_grad_norm_`` over plain, sharded, replicated and tensor-parallel parameters on any meshes.

Owns the question over which process groups a gradient's elements are spread. It must not know units
or groups: a parameter's placements say everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._core.base import torch_comm, torch_compiler, torch_dtensor, torch_tensors
from fsdp2._core.base.arguments import check_flag, check_number, wrong_type
from fsdp2._core.base.errors import ConfigTypeError, StateError
from fsdp2._core.comm.process_mesh import carrying, operation, wire_device
from fsdp2.optim._runs import placed_part

Spread = tuple[dist.ProcessGroup, ...]
"""Process groups whose ranks hold different elements of a tensor. Empty: every rank has all."""


@torch_compiler.always_eager
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``; return the norm.

    The norm is that of all whole gradients as one vector, before scaling. An element that several
    ranks hold (a replicate axis, a tensor-parallel parameter that is whole) counts once, and so
    does a parameter that is passed twice. Plain parameters are taken to have the same gradient on
    every rank. Parameters whose ``grad`` is None count nothing.

    Local norms travel, not gradients: one all-gather for each process group over which some
    parameter is split. Collective: every rank passes the same parameters in the same order, and
    whether one of them has a gradient may differ.

    Args:
        parameters: one tensor, or an iterable (it may be a generator) of plain parameters and of
            DTensors on any meshes, of any floating or complex dtypes.
        norm_type: any number; ``inf`` is the largest magnitude, ``-inf`` the smallest, 0 the number
            of elements that are not zero.
        error_if_nonfinite: raise if the total is nan or infinite, instead of scaling by it.
        foreach: False runs a kernel for each gradient; None and True one for many.

    Returns:
        A plain 0-dim tensor, the same on every rank, on the device of the first gradient; float32,
        or float64 if some gradient has 64-bit floats.

    Raises:
        ConfigError: not tensors; a negative ``max_norm``; nan.
        StateError: the total is not finite and ``error_if_nonfinite`` is set; gradients are as they
            were.

    Source: the public ``torch.nn.utils.clip_grad_norm_``, which takes DTensors of one mesh.
    """
    with torch.no_grad(), operation("clip_grad_norm_"):
        return _clip(parameters, max_norm, norm_type, error_if_nonfinite, foreach)


def _clip(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    unique = _unique(parameters)
    max_norm = check_number("clip_grad_norm_", "max_norm", max_norm, "a number of at least 0", 0.0)
    given: Any = norm_type  # torch's documentation has the word too
    order = (
        float(given)
        if isinstance(given, str) and given in ("inf", "-inf")
        else check_number("clip_grad_norm_", "norm_type", given)
    )
    check_flag("clip_grad_norm_", "error_if_nonfinite", error_if_nonfinite)
    if foreach is not None:
        check_flag("clip_grad_norm_", "foreach", foreach)
    loop = foreach is False
    parts: dict[Spread, list[Tensor]] = {}  # local gradients, placed as their parameters are
    local_grads: list[Tensor] = []
    dtype = torch.float32
    for param in unique:
        grad = param.grad
        if grad is None and not param.requires_grad:
            continue
        part = parts.setdefault(_spread(param), [])
        if param.dtype in (torch.float64, torch.complex128):
            dtype = torch.float64
        if grad is not None:
            part.append(placed_part(param, grad, "clip_grad_norm_: a gradient placed otherwise"))
            local_grads.append(torch_dtensor.local_part(grad))
    device = local_grads[0].device if local_grads else torch.device("cpu")
    norms = {spread: _norm(part, order, dtype, loop, device) for spread, part in parts.items()}
    for group in dict.fromkeys(group for spread in parts for group in spread):
        mine = [spread for spread in parts if group in spread]
        with carrying():
            joined = _over_ranks(torch.stack([norms[spread] for spread in mine]), group, order)
        norms.update(zip(mine, joined.unbind(), strict=True))
    total = torch.zeros((), dtype=dtype, device=device)
    if norms:
        total = _joined(torch.stack([norm.to(device) for norm in norms.values()]), order)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise StateError(
            "FS705",
            f"clip_grad_norm_: the total norm of order {order:g} of {len(unique)} parameters is "
            f"{total.item()}, and error_if_nonfinite is set. Look for the gradient that is not "
            "finite, or leave error_if_nonfinite out to scale anyway.",
        )
    _scale_(local_grads, (max_norm / (total + 1e-6)).clamp(max=1.0), loop)
    return total


def _unique(parameters: object) -> list[Tensor]:
    """Return every parameter once."""
    expected = "a tensor or an iterable of tensors"
    hint = "Pass model.parameters()."
    if isinstance(parameters, Tensor):
        return [parameters]
    if not isinstance(parameters, Iterable) or isinstance(parameters, str | bytes):
        raise wrong_type("clip_grad_norm_", "parameters", expected, parameters, hint)
    unique = {id(param): param for param in parameters}
    for kind in set(map(type, unique.values())):  # one look at each class, not at each parameter
        if not issubclass(kind, Tensor):
            raise ConfigTypeError(
                "FS101",
                f"clip_grad_norm_: expected parameters to be {expected}, found one of class "
                f"{kind.__name__} in it. {hint}",
            )
    return list(unique.values())


def _spread(param: Tensor) -> Spread:
    """Return the process groups over which a parameter is split, in the order of its mesh."""
    if not isinstance(param, DTensor):
        return ()
    mesh, placements = param.device_mesh, param.placements
    if mesh.get_coordinate() is None:
        return ()
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(placements)
        if mesh.size(axis) > 1
        and any(torch_dtensor.shards_dim(placement, dim) for dim in range(param.dim()))
    )


def _norm(
    grads: Sequence[Tensor], order: float, dtype: torch.dtype, loop: bool, device: torch.device
) -> Tensor:
    """Return the norm of local tensors as one vector, 0-dim on ``device``."""
    grads = [grad for grad in grads if grad.numel()]
    wide = [grad if grad.dtype in _WIDE else grad.to(torch.float32) for grad in grads]
    norms: list[Tensor] = []
    kinds = torch_tensors.by_kind(wide)
    for kind in sorted(kinds, key=str):
        alike = kinds[kind]
        if loop or order < 1 or alike[0].is_complex():
            norms += [torch.linalg.vector_norm(grad, order) for grad in alike]
        else:
            norms += torch_tensors.norms_of(alike, order)
    joined = [norm.to(device=device, dtype=dtype) for norm in norms]
    none = torch.full((), _identity(order), dtype=dtype, device=device)
    return _joined(torch.stack(joined or [none]), order)


_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def _identity(order: float) -> float:
    """Return the norm of no elements, which changes no total."""
    return math.inf if order < 0 else 0.0


def _joined(norms: Tensor, order: float) -> Tensor:
    """Join norms of the parts of vectors, along dim 0."""
    if order == 0:
        return norms.sum(0)
    total: Tensor = torch.linalg.vector_norm(norms, order, dim=0)
    return total


def _over_ranks(norms: Tensor, group: dist.ProcessGroup, order: float) -> Tensor:
    """Join each of several norms with the other ranks': one all-gather of a number for each."""
    sent = norms.to(wire_device(group, norms.device))
    size = dist.get_world_size(group)
    gathered = torch.empty((size * len(norms),), dtype=sent.dtype, device=sent.device)
    torch_comm.all_gather_single(gathered, sent, group=group)
    return _joined(gathered.view(size, len(norms)), order).to(norms.device)


def _scale_(grads: Sequence[Tensor], factor: Tensor, loop: bool) -> None:
    """Multiply tensors of any devices and dtypes in place."""
    for (device, _), alike in torch_tensors.by_kind(grads).items():
        own = factor.to(device)
        if loop:
            for grad in alike:
                grad.mul_(own)
        else:
            torch_tensors.scale_all_(alike, own)

"""``clip_grad_norm_`` over plain, sharded, replicated and tensor-parallel parameters on any meshes.

The process groups over which a gradient is split depend only on its parameter's placements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._core.base import torch_comm, torch_compiler, torch_dtensor, torch_tensors
from fsdp2._core.base.errors import (
    ConfigTypeError,
    StateError,
    carrying,
    check_flag,
    check_number,
    wrong_type,
    wrong_value,
)
from fsdp2._core.base.slot_clock import clocks
from fsdp2._core.comm.process_mesh import operation, wire_device
from fsdp2.optim._exact_norm import integers_of, norm_of, unit_of
from fsdp2.optim._runs import placed_part

Spread = tuple[dist.ProcessGroup, ...]
"""Process groups whose ranks have different elements of a tensor. Empty for a replicated tensor."""


@torch_compiler.always_eager
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``; return the norm.

    The norm is computed before scaling, over all unsharded gradients as one vector. An element that
    several ranks have (along a replicate axis, or unsharded under tensor parallelism) counts once,
    and so does a parameter that is passed twice. Plain parameters are assumed to have the same
    gradient on every rank. Parameters whose ``grad`` is None do not contribute.

    Only local norms are communicated: one all-gather per process group over which a parameter is
    split. Collective: every rank must pass the same parameters in the same order, but ranks may
    have gradients for different parameters.

    Args:
        parameters: a tensor, or an iterable (which may be a generator) of plain parameters and of
            DTensors on any meshes, of any floating-point or complex dtypes.
        norm_type: any number. The norm is the largest magnitude for ``inf``, the smallest magnitude
            for ``-inf``, and the number of nonzero elements for 0.
        error_if_nonfinite: raise if the total norm is NaN or infinite, instead of scaling by it.
        foreach: False runs one kernel per gradient; None and True run one for many gradients.

    Returns:
        A plain 0-dim tensor, equal on all ranks, on the device of the first gradient. Its dtype is
        float32, or float64 if any parameter has 64-bit floats.

    Raises:
        ConfigError: a parameter that is not a tensor; a negative ``max_norm``; a NaN argument.
        StateError: the total is not finite and ``error_if_nonfinite`` is set; gradients are
            unchanged.

    Source: the public ``torch.nn.utils.clip_grad_norm_``, which accepts DTensors on one mesh only.
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
    max_norm = check_number("clip_grad_norm_", "max_norm", max_norm, "a non-negative number", 0.0)
    given: Any = norm_type  # torch also accepts strings
    order = (
        float(given)
        if isinstance(given, str) and given in ("inf", "-inf")
        else check_number("clip_grad_norm_", "norm_type", given)
    )
    check_flag("clip_grad_norm_", "error_if_nonfinite", error_if_nonfinite)
    if foreach is not None:
        check_flag("clip_grad_norm_", "foreach", foreach)
    loop = foreach is False
    parts: dict[Spread, list[Tensor]] = {}  # local gradients, in their parameters' placements
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
            part.append(placed_part(param, grad, "clip_grad_norm_: a gradient placed differently"))
            local_grads.append(torch_dtensor.local_part(grad))
    device = local_grads[0].device if local_grads else torch.device("cpu")
    total = (_exact_total if clocks else _total)(parts, order, dtype, loop, device)
    if error_if_nonfinite and not bool(torch.isfinite(total)):
        raise StateError(
            "FS705",
            f"clip_grad_norm_: the total norm of order {order:g} of {len(unique)} parameters is "
            f"{total.item()}, and error_if_nonfinite is set. Find the non-finite gradient, "
            "or omit error_if_nonfinite to scale anyway.",
        )
    _scale_(local_grads, (max_norm / (total + 1e-6)).clamp(max=1.0), loop)
    return total


def _total(
    parts: Mapping[Spread, Sequence[Tensor]],
    order: float,
    dtype: torch.dtype,
    loop: bool,
    device: torch.device,
) -> Tensor:
    """Return the norm of all ranks' tensors. ``parts`` is keyed by the groups that split them."""
    norms = {spread: _norm(part, order, dtype, loop, device) for spread, part in parts.items()}
    _join_over_ranks(norms, order)
    if not norms:
        return torch.zeros((), dtype=dtype, device=device)
    return _joined(torch.stack([norm.to(device) for norm in norms.values()]), order)


def _exact_total(
    parts: Mapping[Spread, Sequence[Tensor]],
    order: float,
    dtype: torch.dtype,
    loop: bool,
    device: torch.device,
) -> Tensor:
    """Return a norm that does not depend on the number of ranks, for ``reproducible`` models."""
    if order not in (1.0, 2.0):
        if math.isinf(order) or order == 0:  # extrema and counts are exact in any order
            return _total(parts, order, torch.float64, loop, device).to(dtype)
        hint = "Pass one of these values, or call reproducible(model, None) first."
        expected = "0, 1, 2, inf or -inf while a model is reproducible"
        raise wrong_value("clip_grad_norm_", "norm_type", expected, order, hint)
    largest = _total(parts, math.inf, torch.float64, loop, device)
    unit = unit_of(largest, order)
    sums = {spread: integers_of(part, order, unit) for spread, part in parts.items()}
    _join_over_ranks(sums, order)
    integers = torch.stack([*sums.values(), torch.zeros(2, dtype=torch.int64, device=device)])
    total = norm_of(integers.sum(0), order, unit)
    return torch.where(torch.isfinite(largest), total, largest).to(dtype)


def _join_over_ranks(norms: dict[Spread, Tensor], order: float) -> None:
    """Combine the values of all ranks in place: each value over the process groups in its key."""
    for group in dict.fromkeys(group for spread in norms for group in spread):
        mine = [spread for spread in norms if group in spread]
        with carrying():
            joined = _over_ranks(torch.stack([norms[spread] for spread in mine]), group, order)
        norms.update(zip(mine, joined.unbind(), strict=True))


def _unique(parameters: object) -> list[Tensor]:
    expected = "a tensor or an iterable of tensors"
    hint = "Pass model.parameters()."
    if isinstance(parameters, Tensor):
        return [parameters]
    if not isinstance(parameters, Iterable) or isinstance(parameters, str | bytes):
        raise wrong_type("clip_grad_norm_", "parameters", expected, parameters, hint)
    unique = {id(param): param for param in parameters}
    for kind in set(map(type, unique.values())):  # check each class, not each parameter
        if not issubclass(kind, Tensor):
            raise ConfigTypeError(
                "FS101",
                f"clip_grad_norm_: expected parameters to be {expected}, found an element of class "
                f"{kind.__name__}. {hint}",
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
    grads: Sequence[Tensor],
    order: float,
    dtype: torch.dtype,
    loop: bool,
    device: torch.device,
) -> Tensor:
    """Return the norm of local tensors, taken as one vector, as a 0-dim tensor on ``device``."""
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
    # the norm of an empty tensor, which is the neutral element of ``_joined``
    none = torch.full((), math.inf if order < 0 else 0.0, dtype=dtype, device=device)
    return _joined(torch.stack(joined or [none]), order)


_WIDE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def _joined(norms: Tensor, order: float) -> Tensor:
    """Combine the norms of parts along dim 0; integers are summed."""
    if order == 0 or not norms.is_floating_point():
        return norms.sum(0)
    total: Tensor = torch.linalg.vector_norm(norms, order, dim=0)
    return total


def _over_ranks(norms: Tensor, group: dist.ProcessGroup, order: float) -> Tensor:
    """Combine norms, or integer sums, with those of the other ranks, in one all-gather."""
    sent = norms.to(wire_device(group, norms.device))
    size = dist.get_world_size(group)
    gathered = torch.empty((size * norms.numel(),), dtype=sent.dtype, device=sent.device)
    torch_comm.all_gather_single(gathered, sent.view(-1), group=group)
    return _joined(gathered.view(size, *norms.shape), order).to(norms.device)


def _scale_(grads: Sequence[Tensor], factor: Tensor, loop: bool) -> None:
    for (device, _), alike in torch_tensors.by_kind(grads).items():
        own = factor.to(device)
        if loop:
            for grad in alike:
                grad.mul_(own)
        else:
            torch_tensors.scale_all_(alike, own)

"""Frozen tensors that wrap others: each inner tensor is divided by rows, separately.

Owns the conversions between shards and full tensors. Contains no group, state or collective code.

[Note: parts of wrapped parameters]
A quantised weight wraps other tensors: codes, scales of groups, zero points. Some classes define an
all-gather extension. For other frozen ones that can be taken apart and put together
(``__tensor_flatten__`` and ``__tensor_unflatten__``), each inner tensor that has a dim as long as
the number of rows is divided along it, and every rank has the others. The class does not confirm
this meaning, so a shard must ``dequantize()`` to the rows of the full tensor, bit for bit.

For any wrapped parameter, with the extension of its class or ours, a checkpoint contains the inner
tensors. Those that are shorter in a shard than in the full tensor are divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp2._core.base import torch_dtensor
from fsdp2._core.params.layout import contiguous_stride


@dataclass(frozen=True)
class Part:
    """The dim along which an inner tensor is divided (None: it is not), and that dim's length."""

    name: str
    dim: int | None
    length: int = 0


def can_be_taken_apart(tensor: Tensor) -> bool:
    """Return True if the class lists the tensors that it wraps, and can be rebuilt from others."""
    kind = type(tensor)
    has_both = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
    return has_both and torch_dtensor.is_wrapper_subclass(tensor)


def inside(tensor: Tensor) -> dict[str, Tensor]:
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}  # type: ignore[attr-defined]


def parts_by_rows(whole: Tensor) -> tuple[Part, ...]:
    """Return the division of a full tensor's inner ones: along a dim as long as its rows."""
    found = []
    for name, inner in inside(whole).items():
        dims = [dim for dim, size in enumerate(inner.shape) if size == whole.shape[0]]
        found.append(Part(name, dims[0], whole.shape[0]) if dims else Part(name, None))
    return tuple(found)


def parts_seen(whole: Tensor, shard: Tensor) -> tuple[Part, ...] | None:
    """Return the division of inner tensors, from a shard's; None if that is ambiguous."""
    found = []
    of_whole, of_shard = inside(whole), inside(shard)
    if of_whole.keys() != of_shard.keys():
        return None
    for name, inner in of_whole.items():
        other = of_shard[name]
        if inner.dim() != other.dim() or type(inner) is not Tensor:
            return None
        differ = [dim for dim in range(inner.dim()) if inner.shape[dim] != other.shape[dim]]
        if len(differ) > 1:
            return None
        found.append(Part(name, differ[0], inner.shape[differ[0]]) if differ else Part(name, None))
    return tuple(found)


def put_together(like: Tensor, tensors: dict[str, Tensor], shape: Sequence[int]) -> Tensor:
    """Make a tensor like ``like`` from other inner tensors, with the new shape in its context."""
    _, context = like.__tensor_flatten__()  # type: ignore[attr-defined]
    size, stride = torch.Size(shape), contiguous_stride(shape)
    told = _with_shape(context, tuple(like.shape), size)
    made: Tensor = type(like).__tensor_unflatten__(tensors, told, size, stride)  # type: ignore[attr-defined]
    return made


def _with_shape(context: Any, old: tuple[int, ...], new: torch.Size) -> Any:
    if isinstance(context, torch.Size | tuple | list) and tuple(context) == old:
        return type(context)(new)
    if isinstance(context, dict):
        return {key: _with_shape(value, old, new) for key, value in context.items()}
    if type(context) in (list, tuple):
        return type(context)(_with_shape(value, old, new) for value in context)
    return context


def shard_by_rows(whole: Tensor, start: int, rows: int) -> Tensor:
    """Copy a full tensor's rows into a shard. ValueError: it does not dequantize to these rows."""
    tensors = {}
    for part, inner in zip(parts_by_rows(whole), inside(whole).values(), strict=True):
        own = inner if part.dim is None else inner.narrow(part.dim, start, rows)
        tensors[part.name] = own.clone(memory_format=torch.contiguous_format)
    shape = (rows, *whole.shape[1:])
    shard = put_together(whole, tensors, shape)
    if tuple(shard.shape) != shape:
        raise ValueError(f"__tensor_unflatten__ made shape {tuple(shard.shape)}, not {shape}")
    if not hasattr(whole, "dequantize"):
        raise ValueError("it has no dequantize(), which compares a shard with the full tensor")
    if rows:
        expected, found = whole.dequantize()[start : start + rows], shard.dequantize()
        if expected.shape != found.shape or not torch.equal(expected, found):
            raise ValueError("a shard of inner tensors does not dequantize() to its own rows")
    return shard


def to_send(shard: Tensor, parts: Sequence[Part]) -> tuple[Tensor, ...]:
    """Return the divided tensors of a shard, rows first."""
    tensors = inside(shard)
    return tuple(tensors[p.name].movedim(p.dim, 0) for p in parts if p.dim is not None)


def whole_of(
    shard: Tensor, parts: Sequence[Part], gathered: Sequence[Tensor], shape: Sequence[int]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the full tensor, made from all ranks' data with rows first, and its inner tensors."""
    tensors, rows = inside(shard), iter(gathered)
    for part in parts:
        if part.dim is not None:
            one = next(rows).movedim(0, part.dim)
            tensors[part.name] = one.contiguous()
    divided = tuple(tensors[part.name] for part in parts if part.dim is not None)
    return put_together(shard, tensors, shape), divided


def fill_again(whole: Tensor, parts: Sequence[Part], gathered: Sequence[Tensor]) -> None:
    """Refill the inner tensors of a full one, whose memory was freed, with the same values."""
    tensors, rows = inside(whole), iter(gathered)
    for part in parts:
        if part.dim is not None:
            source, target = next(rows).movedim(0, part.dim), tensors[part.name]
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)

"""Frozen wrapper tensors: each inner tensor is sharded separately, along the dim of the rows.

Converts between shards and full tensors. Contains no group, state or collective code.

[Note: parts of wrapped parameters]
A quantised weight wraps other tensors: codes, scales of groups, zero points. Some classes define an
all-gather extension. For frozen tensors of other classes that define ``__tensor_flatten__`` and
``__tensor_unflatten__``, we shard each inner tensor along the dim whose size is the number of rows,
and replicate inner tensors without such a dim. The class does not declare which dims are rows, so
we check that ``dequantize()`` of a shard is bitwise equal to the same rows of ``dequantize()`` of
the full tensor.

A checkpoint contains the inner tensors of a wrapper parameter, whether an extension or our code
gathers it. An inner tensor counts as sharded if it is smaller in a shard than in the full tensor.
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
    """The dim along which an inner tensor is sharded (None: replicated), and that dim's size."""

    name: str
    dim: int | None
    length: int = 0


def can_be_taken_apart(tensor: Tensor) -> bool:
    """Return True if the tensor can be flattened to its inner tensors and rebuilt from new ones."""
    kind = type(tensor)
    has_both = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
    return has_both and torch_dtensor.is_wrapper_subclass(tensor)


def inside(tensor: Tensor) -> dict[str, Tensor]:
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}  # type: ignore[attr-defined]


def parts_by_rows(whole: Tensor) -> tuple[Part, ...]:
    """Return how to shard the inner tensors: along the first dim whose size is ``len(whole)``."""
    found = []
    for name, inner in inside(whole).items():
        dims = [dim for dim, size in enumerate(inner.shape) if size == whole.shape[0]]
        found.append(Part(name, dims[0], whole.shape[0]) if dims else Part(name, None))
    return tuple(found)


def parts_seen(whole: Tensor, shard: Tensor) -> tuple[Part, ...] | None:
    """Infer from the shapes in a shard how inner tensors are sharded; None if ambiguous."""
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
    """Build a tensor like ``like`` from other inner tensors, with ``shape`` in its context."""
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
    """Copy rows of a full tensor to a new shard. ValueError: ``dequantize()`` differs."""
    tensors = {}
    for part, inner in zip(parts_by_rows(whole), inside(whole).values(), strict=True):
        own = inner if part.dim is None else inner.narrow(part.dim, start, rows)
        tensors[part.name] = own.clone(memory_format=torch.contiguous_format)
    shape = (rows, *whole.shape[1:])
    shard = put_together(whole, tensors, shape)
    if tuple(shard.shape) != shape:
        raise ValueError(f"__tensor_unflatten__ returned {tuple(shard.shape)}, expected {shape}")
    if not hasattr(whole, "dequantize"):
        raise ValueError("it has no dequantize(), which is needed to check a shard's values")
    if rows:
        expected, found = whole.dequantize()[start : start + rows], shard.dequantize()
        if expected.shape != found.shape or not torch.equal(expected, found):
            raise ValueError("dequantize() of a shard does not return its rows of the full tensor")
    return shard


def to_send(shard: Tensor, parts: Sequence[Part]) -> tuple[Tensor, ...]:
    """Return the sharded inner tensors of a shard, with the sharded dim moved to dim 0."""
    tensors = inside(shard)
    return tuple(tensors[p.name].movedim(p.dim, 0) for p in parts if p.dim is not None)


def rebuild(
    shard: Tensor,
    parts: Sequence[Part],
    shape: Sequence[int],
    gathered: Sequence[Tensor],
    _metadata: Any,
    _dtype: torch.dtype,
    out: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Do what the post-gather method of an extension does. ``gathered``: sharded dim first. Return
    a full tensor and its sharded inner tensors, or refill those of ``out`` (memory was freed)."""
    divided = [part for part in parts if part.dim is not None]
    moved = {p.name: one.movedim(0, p.dim) for p, one in zip(divided, gathered, strict=True)}  # type: ignore[arg-type]  # not None
    if out is None:
        made = {name: source.contiguous() for name, source in moved.items()}
        return put_together(shard, inside(shard) | made, shape), tuple(made.values())
    for name, source in moved.items():
        target = getattr(torch_dtensor.local_part(out), name)
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)
    return None

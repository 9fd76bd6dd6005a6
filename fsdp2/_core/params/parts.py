"""Frozen tensors that wrap others, divided by rows: each tensor inside by itself.

Owns how the tensors inside one follow its rows, shards made of them, and wholes made of shards. It
must not know groups, states or collectives.

[Note: parts of wrapped parameters]
A quantised weight is a tensor that wraps others: codes, scales of groups, zero points. Some classes
bring an all-gather extension. For others that are frozen, and can be taken apart and put together
(``__tensor_flatten__`` and ``__tensor_unflatten__``), each tensor inside that has a dim of as many
rows as the whole is divided along it, and others are on every rank. Nobody else says that this is
what the class means. So the shard is compared with the whole: it must ``dequantize()`` to the
whole's rows, bit for bit.

Of any wrapped parameter, extended by its class or by us, a checkpoint holds the tensors inside.
How these are divided is seen where the whole is: what becomes shorter in a shard is divided.
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
    """A tensor inside a wrapped one: along which dim it is divided, and how long that is whole.

    ``dim`` is None for one that every rank has.
    """

    name: str
    dim: int | None
    length: int = 0


def can_be_taken_apart(tensor: Tensor) -> bool:
    """True for a class that says which tensors it wraps, and makes one of other ones."""
    kind = type(tensor)
    has_both = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
    return has_both and torch_dtensor.is_wrapper_subclass(tensor)


def inside(tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a wrapped one is made of, by name."""
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}  # type: ignore[attr-defined]


def parts_by_rows(whole: Tensor) -> tuple[Part, ...]:
    """Return how tensors inside follow the rows of a whole one: by a dim that is as long."""
    found = []
    for name, inner in inside(whole).items():
        dims = [dim for dim, size in enumerate(inner.shape) if size == whole.shape[0]]
        found.append(Part(name, dims[0], whole.shape[0]) if dims else Part(name, None))
    return tuple(found)


def parts_seen(whole: Tensor, shard: Tensor) -> tuple[Part, ...] | None:
    """Return how the tensors inside a shard differ from the whole's; None: that cannot be told."""
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
    """Make a tensor of another shape of a class, of other tensors inside.

    What names the old shape in the class's own description of it names the new one.
    """
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
    """Make a shard of a whole tensor's rows, on memory of its own.

    Raises:
        ValueError: it does not dequantize to the whole's rows; it says which method is missing.
    """
    tensors = {}
    for part, inner in zip(parts_by_rows(whole), inside(whole).values(), strict=True):
        own = inner if part.dim is None else inner.narrow(part.dim, start, rows)
        tensors[part.name] = own.clone(memory_format=torch.contiguous_format)
    shape = (rows, *whole.shape[1:])
    shard = put_together(whole, tensors, shape)
    if tuple(shard.shape) != shape:
        raise ValueError(f"__tensor_unflatten__ made a shape {tuple(shard.shape)}, not {shape}")
    if not hasattr(whole, "dequantize"):
        raise ValueError("it has no dequantize(), by which a shard is compared with the whole")
    if rows:
        expected, found = whole.dequantize()[start : start + rows], shard.dequantize()
        if expected.shape != found.shape or not torch.equal(expected, found):
            raise ValueError("a shard of its tensors' rows does not dequantize() to its rows")
    return shard


def to_send(shard: Tensor, parts: Sequence[Part]) -> tuple[Tensor, ...]:
    """Return the divided tensors of a shard, rows first."""
    tensors = inside(shard)
    return tuple(tensors[p.name].movedim(p.dim, 0) for p in parts if p.dim is not None)


def whole_of(
    shard: Tensor, parts: Sequence[Part], gathered: Sequence[Tensor], shape: Sequence[int]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Make the whole of what all ranks sent, rows first; return it, and the tensors inside."""
    tensors, rows = inside(shard), iter(gathered)
    for part in parts:
        if part.dim is not None:
            one = next(rows).movedim(0, part.dim)
            tensors[part.name] = one.contiguous()
    return put_together(shard, tensors, shape), tuple(
        tensors[part.name] for part in parts if part.dim is not None
    )


def fill_again(whole: Tensor, parts: Sequence[Part], gathered: Sequence[Tensor]) -> None:
    """Fill the tensors inside a whole one, whose memory was given back, with the same values."""
    tensors, rows = inside(whole), iter(gathered)
    for part in parts:
        if part.dim is not None:
            source, target = next(rows).movedim(0, part.dim), tensors[part.name]
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)

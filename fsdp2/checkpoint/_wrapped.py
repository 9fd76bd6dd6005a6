"""Frozen parameters that wrap other tensors, in a checkpoint: the tensors inside.

Owns the names and placements of these. How they follow a parameter's rows is known since it was
sharded ([Note: parts of wrapped parameters] in ``_core.params.parts``).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp2._core.base import torch_dealt, torch_dtensor
from fsdp2._core.base.errors import UnsupportedError
from fsdp2._core.base.names import named_parameters
from fsdp2._core.base.rows import Deal, chunk_of, rows_of
from fsdp2._core.params.layout import contiguous_stride
from fsdp2._core.params.param import FSDPParam, OwnerMark
from fsdp2._core.params.parts import Part, can_be_taken_apart, inside


def opened(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by name, with those inside a wrapped one in its place: ``name.inner``.

    They share memory with the model, and so can be loaded into. One object under several names
    stays one. A wrapped tensor that is trained, or of which nothing is known, stays as it is.

    Raises:
        UnsupportedError: ranks' rows do not end where rows of a tensor inside do.
    """
    found: dict[str, Tensor] = {}
    known: dict[int, dict[str, Tensor]] = {}
    params: dict[str, nn.Parameter] = {}
    for name, value in tensors.items():
        local = torch_dtensor.local_part(value) if isinstance(value, Tensor) else value
        if not isinstance(local, Tensor) or not can_be_taken_apart(local):
            found[name] = value
            continue
        params = params or named_parameters(model)
        param = params.get(name)
        if (value if param is None else param).requires_grad:
            found[name] = value
            continue
        owner = None if param is None else OwnerMark.owner_of(param)
        key = id(value if param is None else param)
        if key not in known:
            known[key] = _inside(name, value, local, owner)
        found |= {f"{name}.{inner}" if inner else name: t for inner, t in known[key].items()}
    return found


def _inside(name: str, value: Tensor, local: Tensor, owner: FSDPParam | None) -> dict[str, Tensor]:
    """Return the tensors inside one value; itself, without a name, if that is not known."""
    tensors = inside(local)
    if not isinstance(value, DTensor):
        return tensors
    is_divided = any(value.device_mesh.size(axis) > 1 and not p.is_replicate()
                     for axis, p in enumerate(value.placements))  # fmt: skip
    parts = None if owner is None else owner.parts
    if not is_divided:
        parts = tuple(Part(inner, None) for inner in tensors)
    if parts is None:
        return {"": value}
    return {part.name: _placed(name, value, tensors[part.name], part) for part in parts}


def _placed(name: str, value: DTensor, local: Tensor, part: Part) -> DTensor:
    """Return a tensor inside as one of the whole: its rows follow those of the parameter."""
    mesh, shape = value.device_mesh, list(local.shape)
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for axis, placement in enumerate(value.placements):
        if placement.is_replicate() or part.dim is None or mesh.size(axis) == 1:
            continue
        shape[part.dim] = part.length
        placements[axis] = _along(name, value, part, mesh.size(axis), placement)
    whole = tuple(shape)
    spec = torch_dtensor.make_spec(mesh, placements, whole, contiguous_stride(whole), local.dtype)
    return torch_dtensor.new_dtensor(local.detach(), spec)


def _along(name: str, value: DTensor, part: Part, size: int, placement: Placement) -> Placement:
    assert part.dim is not None
    rows, deal = value.shape[0], torch_dealt.deal_in(placement)
    counts = [rows_of(rows, size, place, deal)[1] * part.length for place in range(size)]
    if not torch_dtensor.shards_dim(placement, 0) or any(count % rows for count in counts):
        raise UnsupportedError(
            "FS624",
            f"{name}: holds {part.name}, whose {part.length} rows cannot be divided as its {rows} "
            f"rows are, by {placement} over {size} ranks. Save it under fewer ranks, or leave it "
            "out and load the base again.",
        )
    counts = [count // rows for count in counts]
    if counts == [chunk_of(part.length, size, place)[1] for place in range(size)]:
        return Shard(part.dim)
    return torch_dealt.Dealt(part.dim, Deal(1, 0, tuple(itertools.accumulate(counts))))

"""What ranks pack, send and unpack, without processes: for tests of layouts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp2._core.params import packing
from fsdp2._core.params.layout import GatherLayout


def garbage(nbytes: int) -> Tensor:
    return torch.full((nbytes,), 0xA5, dtype=torch.uint8)


def shard_buffer(wholes: Sequence[Tensor], layout: GatherLayout, rank: int) -> Tensor:
    """Return a rank's shards, in one buffer."""
    buffer = torch.zeros(layout.shard_nbytes, dtype=torch.uint8)
    for index, whole in enumerate(wholes):
        mine = packing.shard_of(whole, layout.items[index].shard, rank)
        packing.own_shard(buffer, layout, index, rank).copy_(mine)
    return buffer


def send_buffer(shards: Tensor, layout: GatherLayout, rank: int) -> Tensor:
    """Return what a rank sends of its shards."""
    if not layout.casts:
        return shards
    send = garbage(layout.send_nbytes)
    packing.cast_shards(shards, send, layout, rank)
    return send


def sent_by_all(wholes: Sequence[Tensor], layouts: Sequence[GatherLayout]) -> list[Tensor]:
    """Return what each rank sends, by the layout that it has."""
    return [
        send_buffer(shard_buffer(wholes, layout, rank), layout, rank)
        for rank, layout in enumerate(layouts)
    ]


def gathered(full: Tensor, sent: Sequence[Tensor], layout: GatherLayout, rank: int) -> list[Tensor]:
    """Do what a gather does on a rank, of pieces or of rows; return the full tensors."""
    behind = torch.empty(
        layout.size * layout.padded_nbytes(len(layout.items) - 1), dtype=torch.uint8
    )
    targets = packing.gather_targets(full, layout, layout.packed.order, behind)
    if layout.landing.pieces:
        landing = packing.landing_in(full, layout)
        if landing is None:
            landing = torch.empty(layout.landing_numel, dtype=layout.wire_dtype)
        for piece, send in zip(packing.pieces_of(landing, layout), sent, strict=True):
            piece.view(torch.uint8).copy_(send[: piece.nbytes])
        even = torch.cat(packing.even_parts(landing, layout))
        packing.unpack_dealt(landing, layout, packing.dealt_targets(full, layout))
    else:
        rows = torch.stack([send[: layout.gather_nbytes] for send in sent])
        even = rows.view(layout.wire_dtype) if rows.numel() else rows
    if targets and even.numel():
        packing.unpack(even, layout, targets)
    replicated = packing.gather_targets(full, layout, layout.replicated)
    packing.unpack_replicated(sent[rank], layout, replicated)
    return packing.full_tensors(full, layout)

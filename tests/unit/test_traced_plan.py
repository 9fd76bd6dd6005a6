"""What a graph sends together, on a host and on a device: integers, without a graph."""

from __future__ import annotations

import pytest
import torch

from fsdp2._base.policy import Overlap
from fsdp2._compiled.plan import TracedPlan
from fsdp2._param_group.layout import GatherItem, GatherLayout, ShardLayout, contiguous_stride

BLOCK = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14336, 4096)] * 3, (4096,)]
"""Shapes of a Llama 8B block; one of its two norms."""
COUNT = len(BLOCK)


def plan(device: str, size: int) -> TracedPlan:
    shards = [ShardLayout(shape, contiguous_stride(shape), 0, size) for shape in BLOCK]
    items = [GatherItem(shard, torch.float32, torch.bfloat16) for shard in shards]
    return TracedPlan(
        layout=GatherLayout.plan(items, size),
        rank=0,
        device=device,
        shard_group="",
        replicate_group="",
        neighbours=None,
        recompute=False,
        trainable=(True,) * COUNT,
        widened=(None,) * COUNT,
        reduce_dtype=torch.float32,
        gradient_wire_dtype=torch.float32,
        grad_dtypes=(torch.bfloat16,) * COUNT,
        scale=(1.0, 1.0),
        op="avg",
        counts_used=False,
        overlap=Overlap(),
    )


@pytest.mark.parametrize(
    ("device", "size", "pieces"),
    [("cpu", 8, 8), ("cpu", 512, 8), ("cuda", 8, 8), ("cuda", 64, 6), ("cuda", 512, 1)],
)
def test_pieces_of_a_block(device: str, size: int, pieces: int) -> None:
    """On a device a piece is what each rank has 512 KiB of; smaller ones travel together."""
    found = plan(device, size)
    assert len(found.gathers) == len(found.reduces) == pieces
    assert sorted(i for piece in found.gathers for i in piece.indices) == list(range(COUNT))
    assert sorted(p for piece in found.reduces for p in piece.positions) == list(range(COUNT))

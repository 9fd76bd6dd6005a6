"""What a graph sends together, on a host and on a device: integers, without a graph."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fsdp2._compiled.plan import Joining, TracedPlan
from fsdp2._core.base.capabilities import ROW_NBYTES
from fsdp2._core.base.policy import Overlap
from fsdp2._core.params.layout import GatherItem, GatherLayout, ShardLayout, contiguous_stride

BLOCK = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14336, 4096)] * 3, (4096,)]
"""Shapes of a Llama 8B block; one of its two norms."""
COUNT = len(BLOCK)


def plan(
    device: str, size: int, shapes: Sequence[tuple[int, ...]] = BLOCK, counts_used: bool = False
) -> TracedPlan:
    shards = [ShardLayout(shape, contiguous_stride(shape), 0, size) for shape in shapes]
    count = len(shapes)
    items = [GatherItem(shard, torch.float32, torch.bfloat16) for shard in shards]
    return TracedPlan(
        layout=GatherLayout.plan(items, size),
        rank=0,
        device=device,
        shard_group="",
        replicate_group="",
        neighbours=None,
        recompute=False,
        trainable=(True,) * count,
        widened=(None,) * count,
        reduction=Joining(torch.float32, torch.float32, (1.0, 1.0), "avg"),
        grad_dtypes=(torch.bfloat16,) * count,
        counts_used=counts_used,
        overlap=Overlap(),
    )


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("counts_used", [False, True])
def test_rows_of_a_device_are_filled_up(size: int, counts_used: bool) -> None:
    """Of odd shapes and two dtypes, alone or together; on a host no byte is added."""
    shapes = [(13, 29), (1,), (7, 5), (4096, 1024), (4099, 1031)]
    for device, row_nbytes in (("cuda", ROW_NBYTES), ("cpu", 1)):
        found = plan(device, size, shapes, counts_used)
        for piece in found.gathers:
            sent = sum(run.numel for run in piece.runs)
            assert (sent + piece.gap) * piece.dtype.itemsize % row_nbytes == 0
            assert piece.gap * piece.dtype.itemsize < row_nbytes
        for reduced in found.reduces:
            assert reduced.numel * 4 % row_nbytes == 0
            assert reduced.numel - reduced.tail_start in (0, len(shapes))
        assert sorted(i for piece in found.gathers for i in piece.indices) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("device", "size", "pieces"),
    [("cpu", 8, 8), ("cpu", 512, 8), ("cuda", 8, 8), ("cuda", 64, 6), ("cuda", 512, 6)],
)
def test_pieces_of_a_block(device: str, size: int, pieces: int) -> None:
    """On a device a piece has 512 KiB a rank or 32 MiB; smaller ones travel together."""
    found = plan(device, size)
    assert len(found.gathers) == len(found.reduces) == pieces
    assert sorted(i for piece in found.gathers for i in piece.indices) == list(range(COUNT))
    assert sorted(p for piece in found.reduces for p in piece.members) == list(range(COUNT))

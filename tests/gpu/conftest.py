"""Meshes of the tests on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.unit._loopback import fake_process_group


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Return a mesh of one rank on NCCL."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cuda", (1,))
    finally:
        dist.destroy_process_group()


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """Let meshes of four simulated ranks exist."""
    with fake_process_group(4):
        yield

"""What the tests on a GPU share: the device, work that keeps it busy, models on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from fsdp2._core.base.containers import map_tensors
from fsdp2._core.base.policy import MixedPrecisionPolicy
from tests.kit.models import Case

ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
BUSY_CYCLES = 50_000_000  # tens of milliseconds: what is not ordered behind it runs before it
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def keep_compute_busy() -> None:
    """Delay the current stream, to widen the window of a missing order between streams."""
    torch.cuda._sleep(BUSY_CYCLES)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Turn every wait of the host for the device into an error."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def shard(model: nn.Module, case: Case, mesh: DeviceMesh, **kwargs: Any) -> nn.Module:
    for unit in case.units(model):
        fsdp2.fully_shard(unit, mesh=mesh, **kwargs)
    return fsdp2.fully_shard(model, mesh=mesh, **kwargs)


def batch_of(case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch = case.batch(8)

    def move(tensor: Tensor) -> Tensor:
        return tensor.to(here())

    return map_tensors(move, batch.args), map_tensors(move, batch.kwargs)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)

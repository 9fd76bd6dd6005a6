"""Models compiled whole, on one GPU: the losses of the same model that runs eagerly.

One process, one rank, NCCL: graphs have no collectives that do anything.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from tests.gpu._device import BF16, ON_A_GPU, batch_of, here, optimizer_of, shard
from tests.kit.models import CASES, loss_of, seeded
from tests.kit.parity import assert_same

pytestmark = ON_A_GPU


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("how", [{}, {"mp_policy": BF16}], ids=["fp32", "bf16"])
def test_a_model_compiled_whole(mesh: DeviceMesh, how: dict[str, Any], overlap: bool) -> None:
    case = CASES["stack"]
    models = [shard(seeded(case.build).to(here()), case, mesh, **how) for _ in range(2)]
    optimizers = [optimizer_of(model) for model in models]
    compiled = fsdp2.compile(models[0], overlap=overlap)
    torch.manual_seed(3)
    for step in range(4):
        args, kwargs = batch_of(case)
        losses = [loss_of(m(*args, **kwargs)) for m in (compiled, models[1])]
        assert_same(losses[0], losses[1], f"loss {step}", 2e-2 if how else 1e-4)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

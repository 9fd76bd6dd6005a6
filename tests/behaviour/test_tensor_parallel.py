"""Tensor parallelism inside, sharding outside: gradients and weights of the whole model."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fsdp2
from tests._pool import ranks


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


@pytest.mark.parametrize("reshard_after_forward", [None, True])
@pytest.mark.parametrize(("width", "hidden"), [(8, 16), (13, 30), (1, 2)])
@ranks(4)
def test_training_is_that_of_the_plain_model(
    rank: int, width: int, hidden: int, reshard_after_forward: bool | None
) -> None:
    """30 rows over two tensor-parallel ranks leave 15 rows to shard over two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model = nn.Sequential(FeedForward(width, hidden), FeedForward(width, hidden))
    reference = copy.deepcopy(model)
    for block in model:
        parallelize_module(
            block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    for module in (*model, model):
        fsdp2.fully_shard(module, mesh=mesh["data"], reshard_after_forward=reshard_after_forward)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
    row = mesh["data"].get_local_rank()
    for step in range(3):
        batch = torch.randn(8, width, generator=torch.Generator().manual_seed(step))
        model(batch[4 * row : 4 * row + 4]).square().mean().backward()
        reference(batch).square().mean().backward()
        for (name, param), expected in zip(
            model.named_parameters(), reference.parameters(), strict=True
        ):
            assert isinstance(param, DTensor)
            assert isinstance(param.grad, DTensor)
            assert param.grad.placements == param.placements
            torch.testing.assert_close(
                param.grad.full_tensor(), expected.grad, rtol=1e-5, atol=1e-6, msg=name
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), expected, rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]


@ranks(2)
def test_a_mesh_of_another_root_is_refused(rank: int) -> None:
    data = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    model = FeedForward(8, 16)
    parallelize_module(model, other, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with pytest.raises(fsdp2.ConfigError, match=r"up\.weight.*init_device_mesh"):
        fsdp2.fully_shard(model, mesh=data)
    assert type(model) is FeedForward

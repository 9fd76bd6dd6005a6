"""CPU offload on a CPU mesh: everything is where it should be already. GPU cases: tests/gpu."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

import fsdp2
from tests.kit.parity import Pair
from tests.kit.pool import ranks
from tests.kit.products import products

MODELS = ["stack", "tied_lm", "scalars", "partly_frozen"]


@products(
    [("stack", True), ("tied_lm", False), ("scalars", True), ("partly_frozen", False)],
    name=MODELS,
    pin_memory=[True, False],
)
@ranks(2)
def test_an_offloaded_model_trains_like_the_plain_one(name: str, pin_memory: bool) -> None:
    """Pinning is skipped where there is no accelerator, instead of an error."""
    offload = fsdp2.CPUOffloadPolicy(pin_memory=pin_memory)
    Pair(name, offload_policy=offload).train()


@ranks(2)
def test_offloaded_state_is_on_the_cpu() -> None:
    """Parameters, gradients, optimizer state and state dict are DTensors in host memory."""
    model = torch.nn.Linear(13, 29)
    fsdp2.fully_shard(model, offload_policy=fsdp2.CPUOffloadPolicy())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 13)).sum().backward()
    optimizer.step()
    tensors = [*model.parameters(), *[p.grad for p in model.parameters()]]
    tensors += [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    tensors += list(model.state_dict().values())
    for tensor in tensors:
        assert isinstance(tensor, DTensor)
        assert tensor.to_local().device.type == "cpu"


@ranks(2)
def test_another_policy_is_refused() -> None:
    """An offload policy of the wrong type is named before anything is changed."""
    model = torch.nn.Linear(13, 29)
    with pytest.raises(fsdp2.ConfigError, match=r"offload_policy.*found '"):
        fsdp2.fully_shard(model, offload_policy="cpu")  # type: ignore[arg-type]
    assert type(model) is torch.nn.Linear

"""Promise: parameters that nobody averages over ranks are a warning, and only these.

Most ways to the warning, and its remedies, are in `tests/kit/error_ways/optimizers.py`.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn as nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import DeviceMesh

import fsdp2
from tests.kit.meshes import DEVICE
from tests.kit.parity import make_mesh
from tests.kit.pool import ranks


def warned(model: nn.Module) -> list[str]:
    """Step an optimizer of the model's parameters; return what is said with FS709."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [str(each.message) for each in told if "[FS709]" in str(each.message)]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))


@ranks(2)
def test_a_forgotten_outermost_module() -> None:
    model = layers()
    fsdp2.fully_shard(model[0], mesh=make_mesh())
    (text,) = warned(model)
    assert text.startswith(
        "SGD: 2 of its parameters belong to no unit (the first has shape (5, 5))"
    )


@ranks(2)
def test_frozen_and_replicated_ones_are_not_forgotten() -> None:
    frozen = layers()
    frozen[1].requires_grad_(False)
    fsdp2.fully_shard(frozen[0], mesh=make_mesh())
    assert not warned(frozen)
    replicated = layers()
    replicate(replicated[1])
    fsdp2.fully_shard(replicated[0], mesh=make_mesh())
    fsdp2.fully_shard(replicated, mesh=make_mesh())
    assert not warned(replicated)


@ranks(2)
def test_a_rank_alone_forgets_nothing(rank: int) -> None:
    model = layers()
    fsdp2.fully_shard(model[0], mesh=DeviceMesh(DEVICE, [rank]))
    assert not warned(model)


@ranks(2)
def test_a_model_that_is_sharded_whole() -> None:
    model = layers()
    fsdp2.fully_shard(model, mesh=make_mesh())
    assert not warned(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fsdp2.optim.local(torch.optim.SGD, model.parameters(), lr=0.1).step()

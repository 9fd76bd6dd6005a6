"""Promise: ranks that run different units get an error at once, or, if they said so, train right."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

import fsdp2
from tests._models import seeded
from tests._parity import assert_same_gradients, make_mesh
from tests._pool import ranks

QUICK_S = 10.0
WAYS = {
    "swap": "bac",
    "skip": "ac",
    "skip_first": "bc",
    "skip_last": "ab",
    "twice": "abbc",
    "none": "",
}


class Paths(nn.Module):
    """Three blocks, of which a call names those to run, and a head in the root."""

    def __init__(self, alike: bool = True) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        wide = nn.Sequential(nn.Linear(8, 13), nn.Linear(13, 8))
        self.b = nn.Linear(8, 8) if alike else wide
        self.c = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, path: str = "abc", used: str = "abc") -> Tensor:
        for name in path:
            y = getattr(self, name)(x)
            x = y if name in used else x + 0 * y.detach()
        return self.head(x)


def sharded(alike: bool = True, mesh: Any = None, **kwargs: Any) -> nn.Module:
    model = seeded(lambda: Paths(alike))
    for unit in (model.a, model.b, model.c, model):
        fsdp2.fully_shard(unit, mesh=make_mesh() if mesh is None else mesh, **kwargs)
    return model


def train(model: nn.Module, steps: int, *args: Any) -> None:
    for _ in range(steps):
        model(torch.randn(2, 8), *args).square().sum().backward()
        model.zero_grad()


def assert_out_of_step(model: nn.Module, *args: Any, grad: bool = True) -> str:
    """Run a step in which ranks differ: expect the error, soon, and again at once afterwards."""
    shards = list(model.parameters())
    begin = time.monotonic()
    with torch.set_grad_enabled(grad), pytest.raises(fsdp2.StateError) as caught:
        for _ in range(2):  # a rank that did less has to do something to be noticed
            output = model(torch.randn(2, 8), *args)
            if grad:
                output.square().sum().backward()
    assert time.monotonic() - begin < QUICK_S
    message = str(caught.value)
    assert "conditional=True" in message
    for rank in range(dist.get_world_size()):
        assert f"rank {rank}: " in message, message
    assert all(p.grad is None for p in shards), "a gradient was stored"
    begin = time.monotonic()
    for _ in range(2):
        with pytest.raises(fsdp2.StateError):
            model(torch.randn(2, 8))
    assert time.monotonic() - begin < 1.0
    assert all(isinstance(p, DTensor) and p.grad is None for p in model.parameters())
    return message


# --- undeclared -----------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("way", list(WAYS))
@ranks(2, limit_s=30)
def test_one_of_two_ranks_takes_another_way(way: str, steps: int, rank: int) -> None:
    """In the first step, or once every order is known: both are told who did what."""
    model = sharded()
    train(model, steps)
    message = assert_out_of_step(model, WAYS[way] if rank == 1 else "abc")
    assert "(all-gather)" in message or "(reduce-scatter)" in message


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("way", ["swap", "skip"])
@ranks(3, 4, limit_s=30)
def test_one_of_many_ranks_takes_another_way(way: str, steps: int, rank: int) -> None:
    """The ranks that agree with each other learn of the one that does not."""
    model = sharded()
    train(model, steps)
    assert_out_of_step(model, WAYS[way] if rank == 1 else "abc")


@ranks(3, limit_s=30)
def test_every_rank_takes_a_way_of_its_own(rank: int) -> None:
    """Each rank is told of all the others."""
    assert_out_of_step(sharded(), ("abc", "bca", "cab")[rank])


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("way", ["swap", "skip", "skip_last"])
@ranks(2, limit_s=30)
def test_blocks_of_different_sizes(way: str, steps: int, rank: int) -> None:
    """Collectives of different sizes never meet: on gloo that would end the process."""
    model = sharded(alike=False)
    train(model, steps)
    assert_out_of_step(model, WAYS[way] if rank == 1 else "abc")


@pytest.mark.parametrize(
    ("way", "steps"), [("swap", 0), ("swap", 3), ("skip", 0), ("skip", 3), ("skip_last", 0)]
)
@ranks(2, limit_s=30)
def test_evaluation(way: str, steps: int, rank: int) -> None:
    """Without gradients too; a rank that did less is noticed when it goes on."""
    model = sharded()
    with torch.no_grad():
        for _ in range(steps):
            model(torch.randn(2, 8))
    assert_out_of_step(model, WAYS[way] if rank == 1 else "abc", grad=False)


@ranks(2, limit_s=30)
def test_a_rank_may_not_need_what_all_prefetched(rank: int) -> None:
    """Ranks that issue the same collectives are in step, whatever they compute."""
    model, reference = sharded(), seeded(Paths)
    x = torch.randn(2, 8)
    with torch.no_grad():
        for path in ("abc", "abc", "ab" if rank == 1 else "abc", "abc"):
            torch.testing.assert_close(model(x, path), reference(x, path))


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("steps", [0, 3])
@ranks(2, 3, limit_s=30)
def test_one_rank_does_not_use_an_output(
    steps: int, reshard_after_forward: bool, rank: int
) -> None:
    """Forward is alike, and backward does not reach a unit of one rank."""
    model = sharded(reshard_after_forward=reshard_after_forward)
    train(model, steps)
    assert_out_of_step(model, "abc", "ab" if rank == 1 else "abc")


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@ranks(2, limit_s=30)
def test_an_unused_output_that_changes_no_order(reshard_after_forward: bool, rank: int) -> None:
    """The collectives of backward are alike by luck, and the gradients are right."""
    model, reference = sharded(reshard_after_forward=reshard_after_forward), seeded(Paths)
    for _ in range(3):
        x = torch.randn(4, 8)
        model(x.chunk(2)[rank], "abc", "ac" if rank == 1 else "abc").square().mean().backward()
        losses = [
            reference(part, "abc", used).square().mean()
            for part, used in zip(x.chunk(2), ("abc", "ac"), strict=True)
        ]
        (sum(losses) / 2).backward()
        assert_same_gradients(model, reference, 4e-6)
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("steps", [0, 2])
@ranks(4, limit_s=30)
def test_one_rank_of_replicas(steps: int, rank: int) -> None:
    """The replicas of its shards wait for it in another collective, and are told as well."""
    model = sharded(mesh=make_mesh(2, 2))
    train(model, steps)
    begin = time.monotonic()
    with pytest.raises(fsdp2.StateError):
        model(torch.randn(2, 8), "acb" if rank == 1 else "abc").sum().backward()
        model(torch.randn(2, 8))
    assert time.monotonic() - begin < QUICK_S

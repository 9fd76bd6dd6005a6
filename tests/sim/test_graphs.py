"""`fsdp2.graphed` on the simulated device: what is refused, and ranks that go different ways."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp2
from fsdp2 import ConfigError, StateError, UnsupportedError
from tests.kit.models import WIDTH, each_block, loss_of, stack
from tests.kit.pool import ranks
from tests.sim._world import World

sim_ranks = functools.partial(ranks, device="sim", limit_s=60.0)
ROWS = 3


def loss(model: Any, x: Tensor) -> Tensor:
    return loss_of(model(x))


def sharded(rank: int, size: int, **kwargs: Any) -> Any:
    world = World("sim", rank, size)
    model = world.build(stack())
    return world.shard(model, each_block(model), **kwargs)


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@sim_ranks(1)
def test_what_is_refused(rank: int, world_size: int) -> None:
    model, cpu = sharded(rank, world_size), stack()().to("cpu")
    wrong: list[tuple[str, Callable[[], Any]]] = [
        ("FS718", lambda: fsdp2.optim.local(torch.optim.AdamW, model.parameters(), lr=0.1)),
        ("FS718", lambda: torch.optim.Adagrad(model.parameters(), lr=0.1)),
        ("FS718", lambda: torch.optim.LBFGS([torch.zeros(1)])),
    ]
    for code, make in wrong:
        with pytest.raises(UnsupportedError, match=code):
            fsdp2.graphed(model, make())
    with pytest.raises(UnsupportedError, match="FS327"):
        fsdp2.graphed(sharded(rank, world_size, offload_policy=fsdp2.CPUOffloadPolicy()))
    with pytest.raises(ConfigError, match="FS503"):
        fsdp2.graphed(cpu)
    with pytest.raises(ConfigError, match="max_norm"):
        fsdp2.graphed(model, max_norm=1.0)
    for given in ({"warmup": 0}, {"max_captures": -1}, {"loss": 3}, {"max_norm": "a"}):
        with pytest.raises(ConfigError):
            fsdp2.graphed(model, adamw(model), **given)  # type: ignore[arg-type]
    step = fsdp2.graphed(model, adamw(model))
    with pytest.raises(ConfigError, match="the loss function returns"):
        step(torch.ones(ROWS, WIDTH))


@sim_ranks(1)
def test_a_step_is_captured_a_few_times_and_then_stays_eager(rank: int, world_size: int) -> None:
    model = sharded(rank, world_size)
    step = fsdp2.graphed(model, adamw(model), loss=loss, warmup=1, max_captures=2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for rows in (1, 1, 2, 2, 3, 3, 1):
            step(torch.ones(rows, WIDTH))
    assert (step.captures, step.why_eager) == (2, "")  # the first shape has its graph
    assert [str(one.message) for one in found if "FS328" in str(one.message)]


@sim_ranks(1)
def test_several_tensors_may_come_back_and_batches_come_from_the_host(
    rank: int, world_size: int
) -> None:
    """A result stays valid although later replays write to the same memory."""
    model = sharded(rank, world_size)

    def both(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        out = model(batch["x"])
        return loss_of(out), {"mean": out.mean()}

    step = fsdp2.graphed(model, adamw(model), loss=both, max_norm=1.0)
    kept = [step({"x": torch.full((ROWS, WIDTH), float(i), device="cpu")}) for i in range(8)]
    assert step.replays == 5
    losses = [float(value) for value, _ in kept]
    assert len(set(losses)) == 8
    assert all(not value.requires_grad for value, _ in kept)
    assert step.grad_norm is not None
    assert step.grad_norm.item() > 0


@sim_ranks(2)
def test_ranks_that_replay_and_run_eagerly_take_one_step(rank: int, world_size: int) -> None:
    """One rank alone has a shorter last batch: the others' replays send what it sends."""
    finals = []
    for is_graphed in (False, True):
        model = sharded(rank, world_size)
        optim = torch.optim.SGD(model.parameters(), lr=0.05)
        step: Any = fsdp2.graphed(model, optim, loss=loss, warmup=3 if is_graphed else 10**6)
        for index in range(9):
            rows = 2 if index in (5, 7) and rank == 1 else ROWS
            step(torch.full((rows, WIDTH), 0.1 * index + rank))
        finals.append([param.to_local().clone() for param in model.parameters()])
        assert step.replays == (0, 6 - 2 * rank)[is_graphed]
    for eager, replayed in zip(*finals, strict=True):
        assert eager.tolist() == replayed.tolist()


@sim_ranks(2)
def test_a_rank_that_goes_astray_is_found_by_replays(rank: int, world_size: int) -> None:
    """Stamps of replays are compared behind the step: each rank gets an error."""
    model = sharded(rank, world_size)
    step = fsdp2.graphed(model, torch.optim.SGD(model.parameters(), lr=0.05), loss=loss)
    for index in range(6):
        step(torch.full((ROWS, WIDTH), 0.1 * index))
    assert step.replays == 3

    def go_on() -> None:
        for _ in range(6):
            if rank == 1:
                model.blocks[1](torch.zeros(ROWS, WIDTH))
            step(torch.ones(ROWS, WIDTH))

    with pytest.raises(StateError, match="FS401"):
        go_on()

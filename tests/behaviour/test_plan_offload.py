"""Promise: a plan knows what activations and states on the host take there, and what they free."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn

import fsdp2
from tests.behaviour.test_plan import Block

WIDTH, ROWS, LENGTH, BLOCKS = 256, 32, 64, 10


def step_of(hardware: str | None = "h100-nvlink-ib", **changes: Any) -> Any:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(101, WIDTH), *[Block(WIDTH) for _ in range(BLOCKS)])
    return fsdp2.plan(
        model,
        mesh=2,
        policy={Block},
        batch=torch.zeros(ROWS, LENGTH, dtype=torch.long),
        optimizer=torch.optim.AdamW,
        hardware=hardware,
        **changes,
    ).step


def test_activations_leave_the_device() -> None:
    kept, away = step_of(), step_of(offload_activations=True)
    assert kept.host_nbytes == 0
    tokens = ROWS * LENGTH * 4  # bytes of a column of activations
    of_a_block = (WIDTH + WIDTH + 3 * WIDTH + 1) * tokens  # input, norm, what relu made
    others = BLOCKS - 1
    assert others * of_a_block <= away.host_nbytes <= others * of_a_block * 9 / 8
    assert kept.peak_nbytes - away.peak_nbytes > (others - 4) * of_a_block
    assert away.start_nbytes == kept.start_nbytes
    assert away.seconds >= kept.seconds


def test_inputs_of_blocks_leave_if_these_are_computed_again() -> None:
    away = step_of(offload_activations=True, activation_checkpointing=True)
    assert away.host_nbytes == (BLOCKS - 1) * ROWS * LENGTH * WIDTH * 4


def test_states_leave_the_device() -> None:
    kept, away = step_of(), step_of(offload_states=True)
    assert away.host_nbytes == kept.optimizer_nbytes
    assert kept.start_nbytes - away.start_nbytes == kept.optimizer_nbytes
    assert away.optimizer_peak_nbytes <= kept.optimizer_peak_nbytes
    assert away.seconds > kept.seconds


def test_states_stay_where_shards_are_on_the_host() -> None:
    """The host runs the optimizer's step, so nothing of it takes memory or time of the device."""
    offload = fsdp2.CPUOffloadPolicy()
    one, both = (step_of(offload_policy=offload, offload_states=on) for on in (False, True))
    assert both.host_nbytes == both.optimizer_nbytes == one.optimizer_nbytes
    assert (both.seconds, both.memory) == (one.seconds, one.memory)


def test_on_a_cpu_all_stays() -> None:
    both = {"offload_activations": True, "offload_states": True}
    assert step_of(None, **both) == step_of(None)


def test_they_are_proposed_where_nothing_else_fits() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(12)])
    plan = fsdp2.plan(
        model,
        mesh=1,
        policy={nn.Linear},
        batch=torch.zeros(1, 4096, 512),  # there is no smaller one
        optimizer=torch.optim.AdamW,
        hardware="h100-nvlink-ib",
    )
    again = plan.changed(activation_checkpointing=True, memory="low").step
    found = plan.suggest(again.highest_nbytes - (1 << 20))
    assert found[0].fits
    assert found[0].changes["offload_activations"]
    assert "fsdp2.offload_activations" in found[0].code

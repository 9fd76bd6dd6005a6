"""Promise: a changed plan says what a plan made anew says, and is one step of a model that ran."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import fsdp2
from fsdp2 import ConfigError
from fsdp2._tools.plan import shapes
from fsdp2._tools.plan.hardware import hardware_for
from tests.behaviour.test_plan import TOKENS, Block, Model, same_plan
from tests.kit.meshes import shared_mesh
from tests.kit.models import seeded
from tests.kit.pool import ranks
from tests.kit.slow import with_slow

LAYERS = {shapes.Layer}
TINY = shapes.Shape(64, 3, 4, 2, 128, 1009, is_tied=True)
BF16 = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
CHANGES: list[dict[str, Any]] = [
    {"memory": "fast"},
    {"memory": "low", "rows": 1},
    {"rows": 5},
    {"activation_checkpointing": True},
    {"activation_checkpointing": True, "loss_chunks": 4, "rows": 5},
    {"loss_chunks": 4},
    {"memory": 1 << 24},
    {"offload_states": True, "memory": "fast"},
    {"offload_policy": fsdp2.CPUOffloadPolicy(), "rows": 3},
    {"activation_checkpointing": True, "offload_activations": True},
    {"activation_checkpointing": True, "memory": "fast"},
    {"micro_batches": 2},
    {"micro_batches": 2, "memory": "low"},
    {"optimizer": torch.optim.SGD},
    {"mesh": 6},
    {},
]


def machine(name: str) -> Any:
    h100 = hardware_for("h100")
    of_a_host = dataclasses.replace(h100, name="host", device_type="cpu")
    return {"h100": h100, "host": of_a_host, "none": None}[name]


def asked(rows: int = 2, **given: Any) -> dict[str, Any]:
    return {"batch": torch.zeros(rows, 29, dtype=torch.long), **given}


def plan(policy: Any = LAYERS, **given: Any) -> fsdp2.plans.Plan:
    with torch.device("meta"):
        model = shapes.Decoder(TINY)
    usual = {"mesh": (2, 3), "mp_policy": BF16, "optimizer": torch.optim.AdamW}
    return fsdp2.plan(model, policy=policy, **{**usual, **asked(**given)})


@pytest.mark.parametrize("name", with_slow(["h100", "host", "none"]))
def test_a_changed_plan_is_that_of_a_fresh_one(name: str) -> None:
    """All of a step: events, memory at each, spans; there through the changes, and back."""
    hardware = machine(name)
    fresh = [plan(hardware=hardware, **changes) for changes in CHANGES]
    first = plan(hardware=hardware)
    for changes, found in zip(CHANGES, fresh, strict=True):
        same_plan(first.changed(**asked(**changes)), found)
    second = plan(hardware=hardware, **CHANGES[3])
    for changes, found in reversed(list(zip(CHANGES, fresh, strict=True))):
        back = {"activation_checkpointing": False, **changes}
        same_plan(second.changed(**asked(**back)), found)


def test_a_changed_plan_is_one_step() -> None:
    """What a variant of a large model costs; suggestions and pages are made of variants."""
    calls = []

    def loss(output: Tensor) -> Tensor:
        calls.append(1)
        return output.float().mean()

    first = plan(hardware="h100", loss=loss, optimizer=None)
    assert len(calls) == 2
    for changes in CHANGES[:4]:
        calls.clear()
        first.changed(**asked(**changes))
        assert len(calls) == 1


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    first = plan(hardware="h100")
    with pytest.raises(ConfigError, match="a step of the model failed"):
        first.changed(batch=torch.zeros(2, 29))
    with pytest.raises(ConfigError, match="bytes are not enough"):
        first.changed(memory=1)
    same_plan(first.changed(**asked(rows=3)), plan(hardware="h100", rows=3))


@pytest.mark.parametrize("name", ["h100", "none"])
def test_checkpoints_around_units_that_hold_units(name: str) -> None:
    """A checkpoint counts what is saved in it, and finds the same when it runs again."""
    units = {shapes.Layer, shapes.FeedForward}
    found = plan(units, hardware=machine(name), activation_checkpointing=True)
    flat = plan(hardware=machine(name), activation_checkpointing=True)
    assert found.step.product_seconds == pytest.approx(flat.step.product_seconds)
    assert found.step.highest_nbytes < plan(units, hardware=machine(name)).step.highest_nbytes


@ranks(2)
def test_a_sharded_model_keeps_the_setting_that_it_came_with() -> None:
    model = seeded(Model)
    fsdp2.wrap.shard_model(model, {Block}, mesh=shared_mesh((2,), ("shard",)))
    balanced = fsdp2.plan(model, batch=TOKENS, hardware="h100")
    model.set_memory("low")
    found = fsdp2.plan(model, batch=TOKENS, hardware="h100")
    assert found.step != balanced.step
    same_plan(found.changed(memory="balanced"), balanced)
    same_plan(found.changed(memory="low"), found)
    same_plan(found.changed(batch=TOKENS), found)

"""Promise: `offload_activations` picks what its policy says, and changes no number.

On a CPU all stays where it is. What is copied on a device, and when: ``tests/sim/test_activations``
and ``tests/sim/scenarios/activations``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import fsdp2
from fsdp2 import ConfigError
from fsdp2._core.api.activations import ATTRIBUTE
from tests.kit.in_turn import shard_each
from tests.kit.models import WIDTH, Block, Stack, each_block, seeded, stack
from tests.kit.pool import ranks


@ranks(2)
def test_training_on_a_cpu_is_the_same(rank: int, world_size: int) -> None:
    models: list[Any] = [seeded(stack(), 1) for _ in range(2)]
    for offloads, model in enumerate(models):
        shard_each(*each_block(model))
        fsdp2.fully_shard(model)
        if offloads:
            found = fsdp2.offload_activations(model, {Block}, min_bytes=1)
            assert found == ["blocks.0", "blocks.1", "blocks.2"]
        for step in range(3):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank + 10 * step))
            model(x).square().mean().backward()
    for left, right in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(left.grad.to_local(), right.grad.to_local())
    assert vars(models[1])[ATTRIBUTE].memory.nbytes == 0


def test_policies_pick_as_for_units() -> None:
    names = ["blocks.0", "blocks.1", "blocks.2"]
    for policy in (
        {Block},
        [Block],
        ModuleWrapPolicy({Block}),
        lambda module: isinstance(module, Block),
        lambda module: isinstance(module, nn.ModuleList),  # has no forward: what is in it
    ):
        assert fsdp2.offload_activations(Stack(), policy) == names


def test_a_module_is_picked_with_its_wrappers() -> None:
    model: Any = Stack()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    model.blocks[1] = torch.compile(model.blocks[1])
    model.blocks[2] = torch.compile(checkpoint_wrapper(model.blocks[2]))
    assert fsdp2.offload_activations(model, {Block}) == ["blocks.0", "blocks.1", "blocks.2"]
    assert list(vars(model)[ATTRIBUTE].chosen) == list(model.blocks)


def test_the_last_ones_stay() -> None:
    model = Stack()
    for keep_last in (0, 1, 2, 5):
        fsdp2.offload_activations(model, {Block}, keep_last=keep_last)
        stays = list(vars(model)[ATTRIBUTE].chosen.values())
        assert stays == [place >= 3 - keep_last for place in range(3)]


def test_classes_that_pick_nothing_are_a_warning() -> None:
    with pytest.warns(UserWarning, match="nothing is offloaded"):
        assert fsdp2.offload_activations(Stack(), {nn.Conv2d}) == []


@pytest.mark.parametrize("wrong", [{"keep_last": -1}, {"keep_last": True}, {"min_bytes": 0}])
def test_wrong_numbers_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="offload_activations"):
        fsdp2.offload_activations(Stack(), {Block}, **wrong)


@pytest.mark.parametrize("wrong", [None, "blocks", [], {Stack()}])
def test_what_is_no_policy_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="offload_activations"):
        fsdp2.offload_activations(Stack(), wrong)

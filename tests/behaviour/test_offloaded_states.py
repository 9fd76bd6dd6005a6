"""Promise: `offload_states` takes the optimizers that it can, and on a CPU changes nothing.

What travels on a device: ``tests/sim/test_states`` and ``tests/sim/scenarios/states``.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn as nn

import fsdp2
from fsdp2 import ConfigError, UnsupportedError
from tests.kit.in_turn import advance, shard_each
from tests.kit.models import WIDTH, each_block, seeded, stack
from tests.kit.pool import ranks_that_share


@ranks_that_share(2)
def test_a_step_on_a_cpu_is_the_same(rank: int, world_size: int) -> None:
    make = functools.partial(fsdp2.optim.local, torch.optim.AdamW, lr=0.1)
    models: list[Any] = [seeded(stack(), 1) for _ in range(2)]
    for offloads, model in enumerate(models):
        shard_each(*each_block(model), model)
        optim = make(model.parameters())
        if offloads:
            fsdp2.optim.offload_states(optim)
        for step in range(3):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank + 10 * step))
            model(x).square().mean().backward()
            advance(optim)
    for left, right in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(left.to_local(), right.to_local())


def test_it_stays_the_same_object_and_an_instance_of_its_class() -> None:
    optim = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    assert fsdp2.optim.offload_states(optim) is optim
    assert fsdp2.optim.offload_states(optim) is optim  # twice is once
    assert isinstance(optim, torch.optim.AdamW)
    assert type(optim).__name__ == "OffloadedAdamW"


class Counts(torch.optim.SGD):
    """Counts its steps in the param group, as some classes do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        super().step()


def test_a_counter_in_a_param_group_counts_steps_and_not_units(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("fsdp2.optim._offload.LEAST_NBYTES", 1)
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)])
    optim = Counts([{"params": layer.parameters()} for layer in model], lr=0.1)
    with pytest.raises(ConfigError, match="by_itself"):
        fsdp2.optim.offload_states(optim)
    assert type(optim) is Counts
    fsdp2.optim.offload_states(optim, by_itself=True)
    for _ in range(3):
        model(torch.ones(1, 3)).sum().backward()
        optim.step()
    assert len(optim._batches) > 2
    assert [group["count"] for group in optim.param_groups] == [3] * 4


def test_what_cannot_be_cut_is_refused() -> None:
    params = list(nn.Linear(2, 2).parameters())
    with pytest.raises(UnsupportedError, match="closure"):
        fsdp2.optim.offload_states(torch.optim.LBFGS(params))
    with pytest.raises(ConfigError):
        fsdp2.optim.offload_states(params)  # type: ignore[arg-type]

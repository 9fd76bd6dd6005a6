"""The questions of `scripts/gpu --only graph`, asked of the simulated device."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch

from benchmarks.gpu import _machine, graph
from tests.kit import sim
from tests.kit.pool import ranks

sim_ranks = functools.partial(ranks, device="sim", limit_s=120.0)
OF_CUDA = ("fused",)  # kernels that the simulated device has not


def ask(names: dict[str, object]) -> None:
    device = torch.device("sim", 0)
    values = {"REHEARSES": False, "KIND": "sim", "BACKEND": "sim", "device": lambda: device}
    with mock.patch.multiple(_machine, wait=torch.accelerator.synchronize, **values):
        for name in names:
            if name in OF_CUDA:
                continue
            found = graph.told(names[name])  # type: ignore[arg-type]
            assert "failed" not in found, f"{name}: {found['failed']}"
            print(name, found)
    sim.finish()
    assert not sim.reports(), "\n\n".join(map(str, sim.reports()))


@pytest.mark.slow
@sim_ranks(1)
def test_one_rank(rank: int, world_size: int) -> None:
    ask(graph.VALUES)


@pytest.mark.slow
@sim_ranks(2)
def test_two_ranks(rank: int, world_size: int) -> None:
    ask(graph.TWO)

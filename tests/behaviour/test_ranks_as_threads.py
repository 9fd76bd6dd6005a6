"""Promise: ranks may be threads of one process, as in torch's multi-threaded test harness.

If a thread holds something that all threads share while it waits for another rank, all ranks hang.
"""

from __future__ import annotations

import copy
import unittest

import pytest
import torch
import torch.nn as nn
from torch.testing._internal.common_distributed import MultiThreadedTestCase

import fsdp2
from tests.fuzz._refusals import refusals
from tests.fuzz._search import draw
from tests.fuzz._threads import LACKING, run_on_threads_here
from tests.kit.in_turn import advance

WORLD = 4
MODEL = nn.Sequential(nn.Linear(3, 13), nn.ReLU(), nn.Linear(13, 29), nn.Linear(29, 1))
BATCH = torch.randn(2 * WORLD, 3)


class Threads(MultiThreadedTestCase):
    """Runs ``train`` on four threads at once, and fails if it fails in one of them."""

    __test__ = False  # pytest runs it below
    world_size = WORLD

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def train(self) -> None:
        for reshard in (2, None):
            self._train(reshard)

    def _train(self, reshard: int | None) -> None:
        model, twin = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
        fsdp2.fully_shard([model[0], model[2]], reshard_after_forward=reshard)
        fsdp2.fully_shard(model, reshard_after_forward=reshard)
        ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
        for _ in range(2):
            model(BATCH.chunk(WORLD)[self.rank]).mean().backward()
            twin(BATCH).mean().backward()
            for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(one.grad.full_tensor(), other.grad)
            advance(ours, theirs)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_random_programs(count: int) -> None:
    """A slice of `scripts/fuzz --threads`."""
    ran = 0
    for program in draw(count, seed=0, count=10):
        told = set(run_on_threads_here(program))
        assert told <= {"", LACKING, *refusals(program)}, program
        ran += "" in told
    assert ran >= 5


def test_training_equals_an_unsharded_model() -> None:
    result = unittest.TestResult()
    Threads("train").run(result)
    assert result.testsRun == 1
    assert not result.errors + result.failures, str(result.errors + result.failures)

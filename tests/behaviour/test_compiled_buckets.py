"""Others' buckets: inductor's own bucketing and reordering of a model that leaves buckets to it."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.compiled.buckets import fx_buckets, scheduled
from benchmarks.kit.models import Size
from tests.kit.compiled_pair import CompiledPair
from tests.kit.emitted import Step, emitted_step, known_bandwidth
from tests.kit.models import CASES, TORCH_2_13, first_blocks
from tests.kit.pool import ranks

SIZE = Size(depth=2, width=32, hidden=32, vocabulary=256)  # the root's are larger than a block
RECIPES = {"fx buckets": fx_buckets, "scheduled": scheduled}
BLOCK_MB = 1.05 * 4 * SIZE.block_numel / 2**20


def counts(step: Step) -> Counter[str]:
    return Counter(f"{one.graph} {one.event.name}" for one in step.collectives)


@pytest.mark.skipif(not TORCH_2_13, reason="inductor of torch 2.11 buckets no gather of these")
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fx buckets", "scheduled"])
def test_inductor_buckets_what_is_gathered_and_reduced_by_blocks(recipe: str) -> None:
    options = RECIPES[recipe](BLOCK_MB, BLOCK_MB)
    step = emitted_step(4, size=SIZE, bucket=False, overlap=False, options=options)
    assert counts(step) == {
        "forward all_gather": 4,  # two blocks, an embedding, a head
        "backward all_gather": 2,
        "backward reduce_scatter": 5,  # and who had gradients
    }
    assert step.overlapped_share > 0.4
    assert all(one.awaited for one in step.collectives)
    assert step.unknown == []


@pytest.mark.slow
def test_without_buckets_each_parameter_has_its_collectives() -> None:
    step = emitted_step(4, size=SIZE, bucket=False, overlap=False)
    parameters = 2 * 9 + 2
    assert counts(step) == {
        "forward all_gather": parameters,
        "backward all_gather": parameters - 2,  # the root's are kept
        "backward reduce_scatter": parameters + 2,  # who had gradients, for each of the root's
    }


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
@ranks(2, limit_s=400)
def test_steps_with_inductors_buckets_equal_eager_ones(recipe: str) -> None:
    choices = {"bucket": False, "overlap": False, "options": RECIPES[recipe](BLOCK_MB, BLOCK_MB)}
    with known_bandwidth():
        case = first_blocks(CASES["stack"], 2)
        pair = CompiledPair(case, backend="inductor", compiling=choices)
        pair.train(steps=3)

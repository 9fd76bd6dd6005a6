"""Promise: a sharded model trains like the unsharded one, and like torch's own."""

from __future__ import annotations

import pytest
import torch

from tests.kit.models import CASES, WIDTH, Batch
from tests.kit.parity import ROWS, Pair, assert_same, global_mean, make_mesh, train_alike
from tests.kit.pool import ranks_that_share as ranks
from tests.kit.products import products
from tests.kit.slow import slow, with_slow

EVERYWHERE = [
    "stack",
    "few_rows",
    "tied_lm",
]  # on 3 ranks in the default suite, on 4 in the pool
MET_BELOW = {*EVERYWHERE, "untied_lm", "sequential", "root_only"}
"""On two ranks these repeat what the next tests do."""
IN_TORCH = [name for name, case in CASES.items() if case.in_torch]


@pytest.mark.parametrize("name", with_slow(CASES, [n for n in CASES if n not in MET_BELOW]))
@ranks(2)
def test_trains_like_the_unsharded_model(name: str) -> None:
    Pair(name).train()


@pytest.mark.parametrize("name", EVERYWHERE)
@ranks(1, 3, slow(4))
def test_trains_like_the_unsharded_model_on_other_counts(name: str) -> None:
    Pair(name).train(steps=2)


@ranks(slow(2), 3)
def test_trains_like_one_forward_over_the_global_batch_in_fp64() -> None:
    pair = Pair("stack", prepare=lambda model: model.double())
    for _ in range(3):
        batch = Batch((torch.randn(ROWS, WIDTH, dtype=torch.float64),), {})
        loss, expected = pair.run(pair.model, pair.local(batch)), pair.run(pair.reference, batch)
        assert_same(global_mean(loss), expected, "loss")
        loss.backward()
        expected.backward()
        pair.step()
    pair.check()


@pytest.mark.parametrize("name", with_slow(IN_TORCH, ["partly_frozen", "untied_lm"]))
@ranks(slow(1), 2, slow(3), slow(4))
def test_trains_like_torch(name: str) -> None:
    train_alike(CASES[name])


@ranks(4)
def test_trains_like_torch_with_a_replicate_axis() -> None:
    train_alike(CASES["stack"], mesh=make_mesh(2, 2))


@pytest.mark.parametrize("reshard_after_forward", [None, True, False])
@pytest.mark.parametrize("name", CASES)
@ranks(slow(1), slow(2), slow(3), slow(4))
def test_every_case_everywhere(name: str, reshard_after_forward: bool | None) -> None:
    Pair(name, reshard_after_forward=reshard_after_forward).train()


@products(
    [("scalars", (2, 2), None)],
    name=CASES,
    shape=[(2, 2), (4, 1), (1, 4)],
    reshard_after_forward=[None, True, False],
)
@ranks(4)
def test_every_case_on_every_mesh(
    name: str, shape: tuple[int, int], reshard_after_forward: bool | None
) -> None:
    Pair(name, mesh=make_mesh(*shape), reshard_after_forward=reshard_after_forward).train(steps=2)


@pytest.mark.parametrize("name", with_slow(CASES, ["nested_units"]))
@ranks(4)
def test_every_case_on_a_smaller_mesh_after_forward(name: str) -> None:
    Pair(name, reshard_after_forward=2).train(steps=2)

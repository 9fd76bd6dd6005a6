"""Promise: a sharded model compiled whole trains like the unsharded one, in one graph each way."""

from __future__ import annotations

import pytest

from tests._models import CASES
from tests._traced import TracedPair
from tests._pool import ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@ranks(1, 2, 3, limit_s=200)
def test_every_case(name: str) -> None:
    pair = TracedPair(name)
    pair.train(steps=3)
    assert pair.graphs.counts == "1 forward, 1 backward"

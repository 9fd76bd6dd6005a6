"""The fixtures of the whole suite: the pool of rank processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests._pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """The one pool of rank processes of this run; `tests._pool.ranks` is how a test uses it."""
    pool = RankPool()
    yield pool
    pool.close()

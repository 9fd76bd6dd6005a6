"""The ring from which CI draws: one fixed order, a place for each commit, and what that covers."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from tests.lab.ring import ring_order, runs_until_all, runs_until_one, touched_first

TESTS = [f"tests/test_{n % 7}.py::test_{n}[{v}]" for n in range(150) for v in range(n % 15 + 1)]


def test_a_commit_begins_at_its_place_and_keeps_the_order() -> None:
    one, other = ring_order(TESTS, "ce5f91f"), ring_order(TESTS, "12fb150")
    assert one == ring_order(TESTS, "ce5f91f")
    assert sorted(one) == sorted(TESTS)
    at = other.index(one[0])
    assert at > 0
    assert [*other[at:], *other[:at]] == one


def test_a_test_that_is_added_moves_no_other() -> None:
    before = ring_order(TESTS, "ce5f91f")
    after = ring_order([*TESTS, "tests/test_new.py::test_new"], "ce5f91f")
    after.remove("tests/test_new.py::test_new")
    assert after == before


def test_variants_of_a_function_lie_side_by_side() -> None:
    """Up to twelve: a function with hundreds must not fill a run alone."""
    names = [f"tests/test_a.py::test_a[{n}]" for n in range(30)] + TESTS
    order = ring_order(names, "ce5f91f")
    places = [n for n, name in enumerate(order) if name.startswith("tests/test_a.py::test_a[")]
    gaps = [b - a for a, b in itertools.pairwise(places)]
    assert sorted(gaps)[:-2] == [1] * 27
    assert max(gaps) > 1


def test_what_a_change_touches_comes_first() -> None:
    order = touched_first(["c", "a", "d", "b"], {"d", "a", "unknown"})
    assert order == ["a", "d", "c", "b"]


@pytest.mark.parametrize("share", [0.9, 0.6, 0.5, 0.37, 0.2])
def test_runs_until_the_ring_is_covered(share: float) -> None:
    """Beside arcs that are thrown until no test is left."""
    draw = random.Random(0)

    def throw() -> int:
        starts: list[float] = []
        while True:
            starts = sorted([*starts, draw.random()])
            gaps = [b - a for a, b in zip(starts, [*starts[1:], starts[0] + 1], strict=True)]
            if max(gaps) <= share:
                return len(starts)

    mean = sum(throw() for _ in range(2000)) / 2000
    assert runs_until_all(share) == pytest.approx(mean, rel=0.05)


def test_shares_at_the_ends() -> None:
    assert runs_until_all(1.0) == runs_until_one(1.0) == 1.0
    assert runs_until_one(0.25) == 4.0
    assert runs_until_all(0.0) == runs_until_one(0.0) == math.inf
    assert 500 < runs_until_all(0.01) < 1000

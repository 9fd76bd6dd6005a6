"""The order in which CI draws tests of the pool: a ring, and the place where a commit begins.

Numbers and names only: `tests.lab.draw` is the plugin that runs what is drawn.

Every test has a fixed place on a ring, by a hash of its name. A commit's hash says where a run
begins; the run goes on along the ring until its time is over. So two commits see two arcs, tests
that are added move no others, and a few runs cover the ring sooner than random draws of as many
tests would: those meet some tests again and again before they meet the last one.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction

from tests.lab.suite import function_of

TOGETHER = 12
"""How many variants of a function lie side by side: they share compiled graphs and plans."""


def place(text: str) -> float:
    """Return where a text lies on the ring, from 0 to 1."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") / 256**7


def ring_order(tests: Iterable[str], commit: str) -> list[str]:
    """Return the tests as they lie on the ring, from the commit's place on."""
    start = place(commit)
    seen: Counter[str] = Counter()
    places = []
    for test in tests:
        function = function_of(test)
        piece = seen[function] // TOGETHER
        places.append(((place(f"{function} {piece}") - start) % 1.0, len(places), test))
        seen[function] += 1
    return [test for _, _, test in sorted(places)]


def touched_first(order: Sequence[str], touched: Iterable[str]) -> list[str]:
    """Return the order with the tests that a change touches at its head."""
    first = set(touched)
    return [t for t in order if t in first] + [t for t in order if t not in first]


def runs_until_one(share: float) -> float:
    """Return how many runs are expected until a given test has run, if each runs this share."""
    return 1 / share if share else math.inf


def runs_until_all(share: float) -> float:
    """Return how many runs are expected until every test has run, if each runs this share.

    Source: the mean number of random arcs of equal length that cover a circle (L. Flatto and
    A. G. Konheim, "The random division of an interval and the random covering of a circle", 1962).
    """
    if share < 0.001:
        return math.inf
    if share >= 1:
        return 1.0
    a = Fraction(share).limit_denominator(1000)  # floats would cancel each other out
    terms = [(1 - k * a) ** (k - 1) / (k * a) ** (k + 1) for k in range(1, math.floor(1 / a) + 1)]
    return float(1 + sum(terms[::2]) - sum(terms[1::2]))

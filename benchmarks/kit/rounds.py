"""Paired times on a noisy machine: every variant in every round, order rotated, ratios by round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple


class Spread(NamedTuple):
    """Median and quartiles, in the order of `Figure`'s last fields. Times are never gated."""

    value: float
    is_gated: bool
    low: float
    high: float


def rotate(rounds: int, measure: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Call every function once a round, each round beginning with another one."""
    names = list(measure)
    values: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            values[name].append(measure[name]())
    return values


def spread(values: Sequence[float], over: Sequence[float] | None = None) -> Spread:
    """Return median and quartiles of values, or of their ratios to those of the same rounds."""
    if over is not None:
        values = [value / base for value, base in zip(values, over, strict=True)]
    if len(values) < 2:
        return Spread(values[0], False, values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, False, low, high)

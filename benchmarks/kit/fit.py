"""What a block costs, and what is left for the root: a line through two depths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """A linear fit through two depths: `per_block * depth + root`."""

    per_block: float
    root: float

    @staticmethod
    def fit(depths: Sequence[int], values: Sequence[float]) -> Cost:
        shallow, deep = depths
        per_block = (values[1] - values[0]) / (deep - shallow)
        return Cost(per_block, values[0] - per_block * shallow)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.per_block - other.per_block, self.root - other.root)

"""Assignment of parameter blocks to ranks, for ``fsdp2.Whole`` and ``fsdp2.Aligned``.

Computes the cost of a matrix, assigns blocks, and records each rank's load. Has no tensor code.

[Note: deals of a mesh]
Each ``fully_shard`` call assigns its blocks before the model is complete. A call may have fewer
blocks than there are ranks. To balance all calls together, each call starts from the loads of
earlier calls, which are recorded per process group. All ranks make the same calls in the same
order, so they compute the same loads. Blocks of a failed call are not recorded. The first forward
resets the loads, because the model is then complete; a model that is built later starts from zero.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdp2._core.base.rows import EVERYTHING, Deal, deal_of_long_blocks

NEWTON_SCHULZ_STEPS = 5


def newton_schulz_flops(shape: Sequence[int]) -> float:
    """Return the FLOPs to orthogonalise a tensor of this shape once, plus one per element.

    Counts five quintic Newton-Schulz steps on ``[m, n]`` with ``m <= n``. Each step has the matmuls
    ``[m, n] [n, m]``, ``[m, m] [m, m]`` and ``[m, m] [m, n]``, at 2 FLOPs per multiply-add. Dims
    before the last two are batch dims; a vector costs 1 FLOP per element.

    Source: the iteration of Keller Jordan's Muon, as in ``torch.optim.Muon``.
    """
    numel = math.prod(shape)
    if len(shape) < 2 or not numel:
        return float(numel)
    rows, columns = sorted(shape[-2:])
    batch = numel // (rows * columns)
    once = 4 * rows * rows * columns + 2 * rows**3
    return float(NEWTON_SCHULZ_STEPS * batch * once + numel)


@dataclass
class Loads:
    """Load of each rank of an axis: bytes stored, and FLOPs of an optimizer step on its blocks."""

    nbytes: list[float]
    flops: list[float]

    @staticmethod
    def of(size: int) -> Loads:
        return Loads([0.0] * size, [0.0] * size)

    def add(
        self,
        deal: Deal,
        count: int,
        shape: Sequence[int],
        itemsize: int,
    ) -> None:
        """Add the load of ``count`` blocks, one per rank, starting at the first rank of a deal."""
        for index in range(count):
            rank = (deal.first + index) % len(self.nbytes)
            self.nbytes[rank] += math.prod(shape) * itemsize
            self.flops[rank] += newton_schulz_flops(shape)

    def least(self, totals: tuple[float, float]) -> int:
        """Return the least loaded rank. A rank's load is the larger of its shares of ``totals``."""

        def share(rank: int) -> tuple[float, float, int]:
            of_bytes = self.nbytes[rank] / max(totals[0], 1.0)
            of_flops = self.flops[rank] / max(totals[1], 1.0)
            return max(of_bytes, of_flops), of_bytes + of_flops, rank

        return min(range(len(self.nbytes)), key=share)


@dataclass(frozen=True)
class Claim:
    """A parameter to be dealt along ``dim`` in blocks of ``block`` rows. ``owner``: the rank that
    the user chose for its only block. ``is_long``: no block may be shorter than ``block``."""

    shape: tuple[int, ...]
    itemsize: int
    dim: int = 0
    block: int = EVERYTHING
    owner: int | None = None
    is_long: bool = False

    @property
    def shape_of_block(self) -> tuple[int, ...]:
        rows = min(self.block, self.shape[self.dim])
        return (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])

    def blocks_over(self, size: int) -> int:
        """Return the number of blocks left over after each rank gets an equal number of blocks."""
        length = self.shape[self.dim]
        return (length // self.block if self.is_long else -(-length // self.block)) % size


def deal_blocks(claims: Sequence[Claim], loads: Loads) -> list[Deal]:
    """Deal the claims, costliest first, and add their leftover blocks to ``loads``."""
    size = len(loads.nbytes)
    deals = [Deal(claim.block) for claim in claims]
    costs = [newton_schulz_flops(claim.shape_of_block) for claim in claims]
    sizes = [math.prod(claim.shape_of_block) * claim.itemsize for claim in claims]
    totals = sum(loads.nbytes) + sum(sizes), sum(loads.flops) + sum(costs)

    def order(index: int) -> tuple[bool, float, int, int]:
        return claims[index].owner is None, -costs[index], -sizes[index], index

    for index in sorted(range(len(claims)), key=order):
        claim = claims[index]
        first = loads.least(totals) if claim.owner is None else claim.owner
        if claim.is_long:
            deals[index] = deal_of_long_blocks(claim.shape[claim.dim], size, claim.block, first)
        else:
            deals[index] = Deal(claim.block, first)
        loads.add(deals[index], claim.blocks_over(size), claim.shape_of_block, claim.itemsize)
    return deals


_given: weakref.WeakKeyDictionary[Any, Loads] = weakref.WeakKeyDictionary()
"""Loads so far, by process group. See [Note: deals of a mesh]."""


def given_so_far(group: Any, size: int) -> Loads:
    """Return a copy of a process group's loads so far. The caller may modify it."""
    return copy.deepcopy(_given.get(group)) or Loads.of(size)


def start_anew(group: Any) -> None:
    """Reset the loads of a process group whose model is complete."""
    if group is not None:
        _given.pop(group, None)


def give(group: Any, claim: Claim, deal: Deal, size: int) -> None:
    loads = _given.setdefault(group, Loads.of(size))
    loads.add(deal, claim.blocks_over(size), claim.shape_of_block, claim.itemsize)

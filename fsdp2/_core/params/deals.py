"""Which rank is dealt which blocks of a parameter: ``fsdp2.Whole`` and ``fsdp2.Aligned``.

Owns what a matrix costs, the choice of ranks, and what was given to each of them so far. It must
not know tensors or collectives.

[Note: deals of a mesh]
Blocks are dealt call by call, bottom up, before a model is whole. A call has fewer blocks than a
mesh has ranks; so each call goes on where the calls before it, over the same ranks, left off: what
each rank was given is counted for each process group. Calls come in the same order on all ranks, so
all of them count the same. What a call did not take in the end counts for nothing. The first
forward ends the count: the model is whole then, and the blocks of one that is made after it are
dealt as if it were the first.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fsdp2._core.base.rows import EVERYTHING, Deal, deal_of_long_blocks

NEWTON_SCHULZ_STEPS = 5


def newton_schulz_flops(shape: Sequence[int]) -> float:
    """FLOPs to orthogonalise a tensor of a shape once, and one for each element besides.

    Five Newton-Schulz steps of the quintic iteration on ``[m, n]`` with ``m <= n``: products of
    ``[m, n] [n, m]``, ``[m, m] [m, m]`` and ``[m, m] [m, n]``, 2 FLOPs a multiplication. Dims
    before the last two count a batch; a vector costs its elements.

    Source: the iteration of Keller Jordan's Muon, which ``torch.optim.Muon`` computes.
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
    """What each rank of an axis was given: bytes, and FLOPs of an optimizer of whole matrices."""

    nbytes: list[float]
    flops: list[float]

    @staticmethod
    def of(size: int) -> Loads:
        return Loads([0.0] * size, [0.0] * size)

    def copy(self) -> Loads:
        return Loads(list(self.nbytes), list(self.flops))

    def add(self, deal: Deal, count: int, shape: Sequence[int], itemsize: int) -> None:
        """Count so many blocks of a shape, from the first rank of a deal on."""
        for index in range(count):
            rank = (deal.first + index) % len(self.nbytes)
            self.nbytes[rank] += math.prod(shape) * itemsize
            self.flops[rank] += newton_schulz_flops(shape)

    def least(self, totals: tuple[float, float]) -> int:
        """Return the rank with the least: the larger one of its shares of bytes and FLOPs counts.

        ``totals``: the bytes and the FLOPs of all ranks.
        """

        def share(rank: int) -> tuple[float, float, int]:
            of_bytes = self.nbytes[rank] / max(totals[0], 1.0)
            of_flops = self.flops[rank] / max(totals[1], 1.0)
            return max(of_bytes, of_flops), of_bytes + of_flops, rank

        return min(range(len(self.nbytes)), key=share)


@dataclass(frozen=True)
class Claim:
    """A parameter whose rows on ``dim`` are to be dealt in blocks of so many rows.

    ``owner``: the rank that is to have a single block, if the user says which. ``is_long``: no
    block may be shorter.
    """

    shape: tuple[int, ...]
    itemsize: int
    dim: int = 0
    block: int = EVERYTHING
    owner: int | None = None
    is_long: bool = False

    @property
    def shape_of_block(self) -> tuple[int, ...]:
        """Shape of a block, and so of all if it is one."""
        rows = min(self.block, self.shape[self.dim])
        return (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])

    def blocks_over(self, size: int) -> int:
        """Blocks that are left over when all ranks have as many."""
        length = self.shape[self.dim]
        return (length // self.block if self.is_long else -(-length // self.block)) % size


def deal_blocks(claims: Sequence[Claim], loads: Loads) -> list[Deal]:
    """Return the deal of each, and add what is left over to ``loads``: the costliest first."""
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
"""See [Note: deals of a mesh]; by process group."""


def given_so_far(group: Any, size: int) -> Loads:
    """Return what the ranks of a process group were given: a copy, to plan with."""
    loads = _given.get(group)
    return Loads.of(size) if loads is None else loads.copy()


def start_anew(group: Any) -> None:
    """End the count: a model over the ranks of a process group is whole."""
    if group is not None:
        _given.pop(group, None)


def give(group: Any, claim: Claim, deal: Deal, size: int) -> None:
    """Count a parameter that a call took."""
    loads = _given.setdefault(group, Loads.of(size))
    loads.add(deal, claim.blocks_over(size), claim.shape_of_block, claim.itemsize)

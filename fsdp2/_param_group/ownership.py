"""Which rank owns which parameter: ``fsdp2.Whole``.

Owns what a matrix costs, the choice of owners, and what was given to each rank so far. It must not
know tensors or collectives.

[Note: owners of a mesh]
Owners are chosen call by call, bottom up, before a model is whole. A block has fewer matrices than
a mesh has ranks; so each call goes on where the calls before it, over the same ranks, left off:
what each rank was given is counted for each process group. Calls come in the same order on all
ranks, so all of them count the same. What a call did not take in the end counts for nothing. The
first forward ends the count: the model is whole then, and one that is made after it has the same
owners as if it were the first.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

    def add(self, owner: int, shape: Sequence[int], itemsize: int) -> None:
        self.nbytes[owner] += math.prod(shape) * itemsize
        self.flops[owner] += newton_schulz_flops(shape)

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
    """A parameter that one rank is to have whole; ``owner`` if the user says which."""

    shape: tuple[int, ...]
    itemsize: int
    owner: int | None = None


def choose_owners(claims: Sequence[Claim], loads: Loads) -> list[int]:
    """Return the owner of each, and add them to ``loads``: the costliest first."""
    owners = [0] * len(claims)
    costs = [newton_schulz_flops(claim.shape) for claim in claims]
    sizes = [math.prod(claim.shape) * claim.itemsize for claim in claims]
    totals = sum(loads.nbytes) + sum(sizes), sum(loads.flops) + sum(costs)

    def order(index: int) -> tuple[bool, float, int, int]:
        return claims[index].owner is None, -costs[index], -sizes[index], index

    for index in sorted(range(len(claims)), key=order):
        claim = claims[index]
        owner = loads.least(totals) if claim.owner is None else claim.owner
        owners[index] = owner
        loads.add(owner, claim.shape, claim.itemsize)
    return owners


_given: weakref.WeakKeyDictionary[Any, Loads] = weakref.WeakKeyDictionary()
"""See [Note: owners of a mesh]; by process group."""


def given_so_far(group: Any, size: int) -> Loads:
    """Return what the ranks of a process group were given: a copy, to plan with."""
    loads = _given.get(group)
    return Loads.of(size) if loads is None else loads.copy()


def start_anew(group: Any) -> None:
    """End the count: a model over the ranks of a process group is whole."""
    if group is not None:
        _given.pop(group, None)


def give(group: Any, size: int, owner: int, shape: Sequence[int], itemsize: int) -> None:
    """Count a parameter that a call took."""
    loads = _given.setdefault(group, Loads.of(size))
    loads.add(owner, shape, itemsize)

"""Norms that do not depend on how gradients are sharded, from order-independent integer sums.

Converts local tensors to integers, which ``_clip`` sums over ranks. Independent of parameters.

[Note: exact sums]
Given the largest magnitude of all elements, each power |g|^p is represented by two integers of 30
bits: one in units of 2^-30 of a bound, and the remainder in units of 2^-60 of the bound. Integer
sums are exact, so neither the number of ranks nor the order of additions matters. The error of each
power is below 2^-60 of the bound, so the error of the sum over 2^33 elements is smaller than the
rounding error of a norm in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BITS = 30
PIECE_NUMEL = 1 << 22
"""Maximum number of elements processed at a time. Sums of this many integers are exact in fp64."""


def unit_of(largest: Tensor, order: float) -> Tensor:
    """Return a power of two above the largest |g|^p, as a 0-dim fp64 tensor."""
    bound = largest.to(torch.float64) ** int(order)
    mantissa = torch.frexp(bound).mantissa
    return torch.where(bound > 0, bound / mantissa, 1.0)


def integers_of(grads: Sequence[Tensor], order: float, unit: Tensor) -> Tensor:
    """Return the two integer sums ``[2]`` of local tensors. See [Note: exact sums]."""
    found = torch.zeros(2, dtype=torch.int64, device=unit.device)
    for grad in grads:
        real = torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad
        for piece in real.reshape(-1).split(PIECE_NUMEL):
            powers = piece.to(torch.float64, copy=True)
            powers = powers.square_() if order == 2 else powers.abs_()
            powers.mul_(2.0**BITS / unit.to(powers.device))
            high = powers.floor()
            low = powers.sub_(high).mul_(2.0**BITS).floor_()
            found += torch.stack([high.sum(), low.sum()]).to(found)
    return found


def norm_of(integers: Tensor, order: float, unit: Tensor) -> Tensor:
    """Return the norm as a 0-dim fp64 tensor, from the total of all ranks' integers."""
    high, low = integers.to(torch.float64).unbind()
    total = (high + low * 2.0**-BITS) * 2.0**-BITS * unit
    return total.sqrt() if order == 2 else total

"""The wire: allocation and the three collectives, as one object that can be swapped.

Owns what is sent, not when. A test swaps ``Comm`` for one that joins several ranks in a process.
Gradient scaling is a pure function here, because it depends on what the wire can carry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from fsdp2 import _torch
from fsdp2._mesh import MeshAxis


class Comm:
    """Collectives of torch.distributed on the axis' process group."""

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an uninitialised buffer for a collective."""
        return torch.empty(shape, dtype=dtype, device=device)

    def all_gather(
        self, output: torch.Tensor, sent: torch.Tensor, axis: MeshAxis, async_op: bool
    ) -> dist.Work | None:
        """Fill ``output`` ``[W * C]`` with every rank's ``sent`` ``[C]``, in rank order."""
        work: dist.Work | None = _torch.all_gather_single(output, sent, axis.pg, async_op)
        return work

    def reduce_scatter(
        self, output: torch.Tensor, sent: torch.Tensor, axis: MeshAxis, async_op: bool
    ) -> dist.Work | None:
        """Fill ``output`` ``[S]`` with the sum of this rank's part of all ``sent`` ``[W * S]``."""
        work: dist.Work | None = _torch.reduce_scatter_single(
            output, sent, dist.ReduceOp.SUM, axis.pg, async_op
        )
        return work

    def all_reduce(self, tensor: torch.Tensor, axis: MeshAxis, async_op: bool) -> dist.Work | None:
        """Replace ``tensor`` by its sum over the axis."""
        work: dist.Work | None = dist.all_reduce(
            tensor, dist.ReduceOp.SUM, group=axis.pg, async_op=async_op
        )
        return work


@dataclass(frozen=True)
class GradientScale:
    """Factors by which gradients are multiplied before and after the sum over ranks."""

    before: float
    after: float

    @staticmethod
    def mean(ranks: int, dtype: torch.dtype) -> GradientScale:
        """Average over ``ranks``. fp16 divides in two steps of about the square root each.

        fp16 ends at 65504: a sum before the division could overflow, a division before the sum
        underflow. Wider exponents (bf16, fp32) divide once, after the sum, on the shard alone.

        Source: the rule of torch's FSDP and DDP communication hooks.
        """
        if dtype != torch.float16:
            return GradientScale(1.0, 1.0 / ranks)
        before = 1
        while ranks % before == 0 and ranks / before > before:
            before *= 2
        return GradientScale(1.0 / before, before / ranks)

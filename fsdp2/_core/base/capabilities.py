"""What kinds of devices can do: the one table that decisions about a device are read from.

A new kind of device is a row here. It must not know tensors or groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

ZERO_COPY_NBYTES = 131072
"""Bytes of an unsharded parameter from which a collective of its own costs less than a copy.

Measured on gloo (docs/decisions/0013).
"""
ZERO_COPY_PIECE_NBYTES = 512 * 1024
"""The same for a device with up to 64 ranks: bytes of a parameter on each rank.

With more ranks the whole parameter's size counts, 32 MiB, because the copy that is saved takes 23
us on any number of ranks. But each rank has to hold at least ``LEAST_PIECE_NBYTES`` of it. Not
measured: docs/decisions/0013 has the clock's figures.
"""
LEAST_PIECE_NBYTES = 64 * 1024


class ZeroCopy(NamedTuple):
    """Which parameters travel alone: of so many bytes, of which a rank has a multiple of some."""

    nbytes: int
    row_nbytes: int = 1


ROW_NBYTES = 128
"""What each rank sends is a multiple of it, so that the rows of all ranks begin at one too.

NCCL reads and writes 16 bytes at a time only where every pointer of a collective allows that; a
GPU's cache lines have 128 (horovod#3727, NVIDIA/nccl#413).
"""


@dataclass(frozen=True)
class Capabilities:
    """Of one kind of device. The defaults are those of CUDA, and of kinds that are not listed."""

    is_host: bool = False  # the host reads its memory as soon as a collective is over
    has_lanes: bool = True  # streams beside the compute; else collectives are asynchronous works
    lane_priority: int = -1  # of these streams, to be before compute; 0 where there is one only
    pins: bool = True  # it copies from pinned host memory beside the compute
    coalesces: bool = True  # its backend takes several collectives as one
    # zero-copy from here on, whatever the ranks, or in bytes a rank; neither: only if users say so
    zero_copy_nbytes: int | None = None
    zero_copy_piece_nbytes: int | None = ZERO_COPY_PIECE_NBYTES

    def zero_copy(self, ranks: int) -> ZeroCopy | None:
        """Return which unsharded parameters travel alone unless users choose; None: none does."""
        if self.zero_copy_nbytes is not None:
            return ZeroCopy(self.zero_copy_nbytes)
        piece = self.zero_copy_piece_nbytes
        if piece is None:
            return None
        return ZeroCopy(max(LEAST_PIECE_NBYTES * ranks, piece * min(ranks, 64)), ROW_NBYTES)


_KINDS = {
    "cpu": Capabilities(True, False, 0, False, False, ZERO_COPY_NBYTES),
    # ATen/mps/MPSGuardImpl.h: one stream, which is what every lane is
    "mps": Capabilities(lane_priority=0, coalesces=False, zero_copy_piece_nbytes=None),
    "meta": Capabilities(False, False, 0, False, False, None, None),
}
_OTHERS = Capabilities()


def capabilities(device: torch.device) -> Capabilities:
    """Return what a device can do."""
    return _KINDS.get(device.type, _OTHERS)

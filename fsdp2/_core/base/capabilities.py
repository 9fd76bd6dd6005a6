"""The table of device types behind all device-dependent decisions. Contains no tensor code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

ZERO_COPY_NBYTES = 131072
"""Minimum unsharded bytes for a separate collective, measured on gloo (docs/decisions/0013)."""
ZERO_COPY_PIECE_NBYTES = 512 * 1024
"""The same for a device with up to 64 ranks, in bytes of a parameter per rank. With more ranks it
is 32 MiB for the full parameter, because the saved copy takes 23 us on any number of ranks, but at
least ``LEAST_PIECE_NBYTES`` per rank: calculated from the figures in docs/decisions/0013."""
LEAST_PIECE_NBYTES = 64 * 1024


class ZeroCopy(NamedTuple):
    """Limits for sending parameters separately: minimum size, and a factor of bytes per rank."""

    nbytes: int
    row_nbytes: int = 1


ROW_NBYTES = 128
"""Each rank sends a multiple of this, so that all ranks' rows are aligned. NCCL accesses 16 bytes
at a time only if every pointer of a collective is aligned for it; cache lines of a GPU have 128
(horovod#3727, NVIDIA/nccl#413)."""


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a device type. The defaults are those of CUDA and of unlisted types."""

    is_host: bool = False  # the host reads its memory once a collective is complete
    has_lanes: bool = True  # has side streams; else collectives return asynchronous works
    lane_priority: int = -1  # of side streams, above compute; 0 if all are equal
    pins: bool = True  # copies from pinned host memory overlap compute
    coalesces: bool = True  # its backend batches several collectives into one
    # zero-copy threshold, for any number of ranks or in bytes per rank; neither: opt in only
    zero_copy_nbytes: int | None = None
    zero_copy_piece_nbytes: int | None = ZERO_COPY_PIECE_NBYTES

    def zero_copy(self, ranks: int) -> ZeroCopy | None:
        """Return the default threshold for sending a parameter separately; None: never."""
        if self.zero_copy_nbytes is not None:
            return ZeroCopy(self.zero_copy_nbytes)
        piece = self.zero_copy_piece_nbytes
        if piece is None:
            return None
        return ZeroCopy(max(LEAST_PIECE_NBYTES * ranks, piece * min(ranks, 64)), ROW_NBYTES)


_KINDS = {
    "cpu": Capabilities(True, False, 0, False, False, ZERO_COPY_NBYTES),
    # ATen/mps/MPSGuardImpl.h: one stream, which serves as every lane
    "mps": Capabilities(lane_priority=0, coalesces=False, zero_copy_piece_nbytes=None),
    "meta": Capabilities(False, False, 0, False, False, None, None),
}
_OTHERS = Capabilities()


def capabilities(device: torch.device) -> Capabilities:
    return _KINDS.get(device.type, _OTHERS)

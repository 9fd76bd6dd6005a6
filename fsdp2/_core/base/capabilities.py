"""The table of device types on which all device-dependent decisions are based. No tensor code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

ZERO_COPY_NBYTES = 131072
"""Minimum unsharded size, in bytes, of parameters sent separately on gloo (docs/decisions/0013)."""
ZERO_COPY_PIECE_NBYTES = 512 * 1024
"""The same minimum on devices, in bytes per rank, for up to 64 ranks. For more ranks, it is 32 MiB
for the full parameter (the avoided copy takes 23 us on any number of ranks), but at least
``LEAST_PIECE_NBYTES`` per rank. Calculated from the figures in docs/decisions/0013."""
LEAST_PIECE_NBYTES = 64 * 1024


class ZeroCopy(NamedTuple):
    """Limits for sending a parameter separately: minimum size, and divisor of each rank's bytes."""

    nbytes: int
    row_nbytes: int = 1


ROW_NBYTES = 128
"""Each rank sends a multiple of this size, so that the rows of all ranks are aligned. NCCL uses
16-byte accesses only if every pointer of a collective is aligned to 16 bytes; a GPU's cache lines
have 128 bytes (horovod#3727, NVIDIA/nccl#413)."""


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a device type. The defaults apply to CUDA and to unlisted types."""

    is_host: bool = False  # the host can read device memory once a collective is complete
    has_lanes: bool = True  # has side streams; otherwise collectives return a ``Work``
    lane_priority: int = -1  # priority of side streams; -1: above compute; 0: no priorities
    pins: bool = True  # copies from pinned host memory overlap compute
    coalesces: bool = True  # its backend can batch several collectives into one
    # default zero-copy thresholds, in total and per rank; both None: opt-in only
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
    # ATen/mps/MPSGuardImpl.h: a single stream, used for every lane
    "mps": Capabilities(lane_priority=0, coalesces=False, zero_copy_piece_nbytes=None),
    "meta": Capabilities(False, False, 0, False, False, None, None),
}
_OTHERS = Capabilities()


def capabilities(device: torch.device) -> Capabilities:
    return _KINDS.get(device.type, _OTHERS)

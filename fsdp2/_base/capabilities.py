"""What kinds of devices can do: the one table that decisions about a device are read from.

A new kind of device is a row here. It must not know tensors or groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ZERO_COPY_NBYTES = 131072
"""Bytes of an unsharded parameter from which a collective of its own costs less than a copy.

Measured on gloo (docs/decisions/0013).
"""


@dataclass(frozen=True)
class Capabilities:
    """Of one kind of device. The defaults are those of CUDA, and of kinds that are not listed."""

    is_host: bool = False  # the host reads its memory as soon as a collective is over
    has_lanes: bool = True  # streams beside the compute; else collectives are asynchronous works
    lane_priority: int = -1  # of these streams, to be before compute; 0 where there is one only
    pins: bool = True  # it copies from pinned host memory beside the compute
    coalesces: bool = True  # its backend takes several collectives as one
    zero_copy_nbytes: int | None = None  # zero-copy from here on; None: only if the user says so


_KINDS = {
    "cpu": Capabilities(True, False, 0, False, False, ZERO_COPY_NBYTES),
    # ATen/mps/MPSGuardImpl.h: one stream, which is what every lane is
    "mps": Capabilities(lane_priority=0, coalesces=False),
    "meta": Capabilities(False, False, 0, False, False, None),
}
_OTHERS = Capabilities()


def capabilities(device: torch.device) -> Capabilities:
    """Return what a device can do."""
    return _KINDS.get(device.type, _OTHERS)

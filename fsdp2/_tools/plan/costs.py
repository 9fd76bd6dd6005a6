"""Costs of device and host operations, each with its source or the word "assumed".

Figures that ``Hardware`` lacks are from one H100 (or from the cited machine). They are meant for
comparisons, not for predicting the speed of a cluster, which ``scripts/gpu`` measures.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsdp2._tools.plan.hardware import Hardware, seconds_of, seconds_of_kernel

SHORTEST_KERNEL = 2e-6
"""Minimum duration of a kernel in seconds. Assumed; we measured 1.15e-6 in a replayed CUDA graph.
Measurements here and below are from one H200 (benchmarks/results/gpu/h200-2026-11-27.md)."""
SHARE_OF_PRODUCTS = 0.70
"""Share of the data sheet's peak that large matmuls reach. Assumed; we measured 0.69 to 0.80."""
SHARE_OF_MEMORY = 0.867
"""Share of the data sheet's bandwidth that copies reach: 2,903 of 3,350 GB/s on an H100.
Source: aigatech/vpbenchmarking, "GPU D2D (HBM3)", 4 nodes of 8 H100, NCCL 2.24.3."""
SHARE_OF_LINKS = 0.80
"""Share of a link's bandwidth that large collectives reach. Assumed."""
HOST_LINK = 50e9
"""Bytes per second between the host's pinned memory and a device: PCIe 5.0 x16.
The source of ``SHARE_OF_MEMORY`` reports 54.8 GB/s to the device and 46.8 GB/s from it; we measured
55 GB/s in both directions."""
MISALIGNED = 2.0
"""Slowdown of a collective whose rows are not aligned to 16 bytes. NCCL moves packs of 16 bytes
only if rows are aligned (nccl#413). In Horovod, an all-gather of 6.3 MB took 7 ms instead of 2 ms;
reduce-scatters slowed less (horovod#3727). pytorch#195450 reports a slowdown on 1 and 2 nodes."""
ALIGNMENT_NBYTES = 16
CHANNELS = 16
"""Channels per communicator. One kernel spreads the collectives of an NCCL group call over them.
NCCL 2.28's cost model counts a ring's latency once per operation of a channel: ``divUp(operations,
channels)`` times (src/enqueue.cc, ncclPrepareTasks; src/graph/tuning.cc, ncclTopoGetAlgoTime). NCCL
logs on 8 GPUs per node list 16 or 24 "coll channels". Not measured.
In a test of two ranks on one GPU (sockets, two channels), each pair of pieces took one latency."""

LAUNCH = 4e-6
"""Host time per operation in seconds: dispatch, autograd node, kernel launch. Assumed.
Two hosts with H200s took 8e-6 and 12e-6 (a collective: 22e-6 and 35e-6; an event: 0.9e-6 and
1.7e-6). Both hosts are virtual machines, and took up to three times the assumed figures."""
LAUNCH_COLLECTIVE = 15e-6
"""Host time per collective in seconds: c10d's checks and records, NCCL's own launch. Assumed."""
EVENT = 0.7e-6
"""Host time in seconds to record an event, or to make a stream wait for one. Assumed."""
CALL = 0.12e-6
"""Host time in seconds to call a Python or C function from Python. Assumed."""


@dataclass(frozen=True)
class Costs:
    """Durations of operations on a machine, in seconds. The rates of ``machine`` are used unscaled;
    ``sustained`` scales peaks to realistic rates. ``straggler``: number of seconds by
    which the other ranks start a collective late."""

    machine: Hardware
    straggler: float = 0.0

    def kernel(
        self, nbytes: float, operations: float = 0.0, dtype: torch.dtype = torch.float32
    ) -> float:
        took, _ = seconds_of_kernel(self.machine, nbytes, operations, dtype)
        return max(took, SHORTEST_KERNEL)

    def copy(self, nbytes: float) -> float:
        return max(nbytes / HOST_LINK, SHORTEST_KERNEL)

    def collective(
        self,
        kind: str,
        nbytes: int,
        ranks: int,
        stride: int,
        alignment: int = ALIGNMENT_NBYTES,
        pieces: int = 1,
    ) -> float:
        """Return the time of a collective that runs alone, given the size of its larger buffer.
        Several ``pieces`` of one group call run in parallel, on ``CHANNELS`` channels."""
        took = seconds_of(self.machine, kind, nbytes, ranks, stride)
        took += (pieces - 1) // CHANNELS * seconds_of(self.machine, kind, 1, ranks, stride)
        if alignment < ALIGNMENT_NBYTES:
            took *= MISALIGNED
        return max(took, SHORTEST_KERNEL)


def sustained(machine: Hardware) -> Hardware:
    """Scale a machine's peak rates to the rates that a real step reaches."""
    return machine.scaled(compute=SHARE_OF_PRODUCTS, memory=SHARE_OF_MEMORY, links=SHARE_OF_LINKS)

"""What each thing that a device or its host does costs: the one table that clocks read.

Owns figures, each with its source or the word "assumed", and the time of one kernel, copy,
collective or call. It must not know what happens when: ``device_clock`` does.

Figures are of one H100 (or of what its sources measured) where a machine's description has none.
They say how things compare, not what a cluster takes: measure that (``scripts/gpu``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fsdp2._tools.plan.hardware import Hardware, flops_of, seconds_of

SHORTEST_KERNEL = 2e-6
"""Seconds that a kernel takes at least, to start and to end. Assumed; 1.15e-6 in a replayed graph.

What is measured here and below is of one H200 (benchmarks/results/gpu/h200-2026-11-27.md).
"""
SHARE_OF_PRODUCTS = 0.70
"""What large products of matrices reach of a data sheet's peak. Assumed; 0.69 to 0.80 measured."""
SHARE_OF_MEMORY = 0.867
"""What copies reach of a data sheet's bandwidth: 2,903 of 3,350 GB/s on an H100.

Source: aigatech/vpbenchmarking, "GPU D2D (HBM3)", 4 nodes of 8 H100, NCCL 2.24.3.
"""
SHARE_OF_LINKS = 0.80
"""What large collectives reach of a link. Assumed."""
HOST_LINK = 50e9
"""Bytes a second between the host's pinned memory and a device: PCIe 5.0 x16.

54.8 GB/s to the device and 46.8 from it, same source; 55 each way measured.
"""
MISALIGNED = 2.0
"""How much longer a collective takes whose rows are not aligned to 16 bytes.

NCCL moves packs of 16 bytes only then (nccl#413). Horovod saw 2 ms become 7 for an all-gather of
6.3 MB, and less for reduce-scatters (horovod#3727); pytorch#195450 has it on one and on two nodes.
"""
ALIGNMENT_NBYTES = 16
CHANNELS = 16
"""Channels of a communicator: collectives of one group are spread over them, in one kernel.

NCCL 2.28 itself counts a ring's latency once per channel's operation: ``divUp(operations,
channels)`` times (src/enqueue.cc, ncclPrepareTasks; src/graph/tuning.cc, ncclTopoGetAlgoTime). Its
logs on 8 GPUs a node name 16 or 24 "coll channels". Not measured.
Two ranks on one GPU, over sockets with two channels, took a latency for each two pieces.
"""

LAUNCH = 4e-6
"""Host seconds of one operation: dispatch, autograd's node, the launch. Assumed.

The hosts of two H200 took 8e-6 and 12e-6, 22e-6 and 35e-6 for a collective, 0.9e-6 and 1.7e-6 for
an event. They were virtual machines, up to three times as slow as assumed in all of these alike.
"""
LAUNCH_COLLECTIVE = 15e-6
"""Host seconds of one collective: c10d's checks and records, and NCCL's own launch. Assumed."""
EVENT = 0.7e-6
"""Host seconds of recording an event, or of letting a stream wait for one. Assumed."""
CALL = 0.12e-6
"""Host seconds of one call that Python makes, of its own or of C functions. Assumed."""


@dataclass(frozen=True)
class Costs:
    """A machine's times, in seconds.

    The figures of ``machine`` are taken as they are: ``sustained`` says what steps reach of peaks.
    ``straggler``: seconds by which other ranks are late in every collective.
    """

    machine: Hardware
    straggler: float = 0.0

    def kernel(
        self, nbytes: float, operations: float = 0.0, dtype: torch.dtype | None = None
    ) -> float:
        """Return the longer of computing and of moving what is read and written."""
        moving = nbytes / self.machine.memory_bandwidth
        if operations and dtype is not None:
            moving = max(moving, operations / flops_of(self.machine, dtype))
        return max(moving, SHORTEST_KERNEL)

    def copy(self, nbytes: float) -> float:
        """Return how long bytes take between the host's pinned memory and the device."""
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
        """Return how long a collective takes alone: bytes of its larger buffer.

        Several ``pieces`` that are issued as one run beside each other, on ``CHANNELS`` channels.
        """
        took = seconds_of(self.machine, kind, nbytes, ranks, stride)
        took += (pieces - 1) // CHANNELS * seconds_of(self.machine, kind, 1, ranks, stride)
        if alignment < ALIGNMENT_NBYTES:
            took *= MISALIGNED
        return max(took, SHORTEST_KERNEL)


def sustained(machine: Hardware) -> Hardware:
    """Return what a real step reaches of a machine's peaks."""
    return machine.scaled(compute=SHARE_OF_PRODUCTS, memory=SHARE_OF_MEMORY, links=SHARE_OF_LINKS)

"""Pinned memory of the host that is used again, and the two lanes in which copies to it run.

Owns the buffers, the streams, and the order of copies among themselves. It must not know what the
bytes mean, nor when they are needed.

[Note: who may use a host buffer]
The host itself never reads or writes one. Copies do, in two lanes: ``out`` (from the device) and
``back`` (to it). A buffer keeps the event of its last copy, and the next copy waits for that in its
lane. So a buffer may be given back and taken again while a copy of it is still to run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

STEPS = 8
"""Sizes are rounded up to one of so many between two powers of two, so that batches of nearly the
same length need the same."""
SMALLEST = 4096


class HostBuffer:
    """Bytes of pinned memory. ``event``: of the last copy from or to it."""

    __slots__ = ("data", "event", "nbytes")

    def __init__(self, nbytes: int, data: Tensor) -> None:
        self.nbytes = nbytes
        self.data = data
        self.event: torch.Event | None = None


class HostMemory:
    """Buffers that are taken and given back, for as long as this lives.

    Where lengths of batches vary, what a longer one needed serves the shorter ones; and what a
    longer one outgrows goes. ``nbytes``: how much is pinned.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._free: dict[int, list[HostBuffer]] = {}

    def take(self, nbytes: int) -> HostBuffer:
        """Return a buffer of at least so many bytes: the smallest that is free, or a new one."""
        size = rounded(nbytes)
        sizes = [found for found, free in self._free.items() if free]
        fitting = min((found for found in sizes if found >= size), default=None)
        if fitting is not None:
            return self._free[fitting].pop()
        if sizes:
            outgrown = max(sizes)
            self._free[outgrown].pop()
            self.nbytes -= outgrown
        self.nbytes += size
        return HostBuffer(size, self._allocate(size))

    def _allocate(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def give(self, buffer: HostBuffer) -> None:
        """Take a buffer back; see [Note: who may use a host buffer]."""
        self._free.setdefault(buffer.nbytes, []).append(buffer)


def rounded(nbytes: int) -> int:
    """Return the size of the buffer that is taken for so many bytes."""
    step = max(1 << (max(nbytes - 1, 1).bit_length() - 1), SMALLEST) // STEPS
    return -(-nbytes // step) * step


class CopyLanes:
    """Two streams of a device beside its compute: a link carries both directions at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.Stream(device)
        self._back = torch.Stream(device)

    @property
    def compute(self) -> Any:
        """The stream that computes now on the device."""
        return torch.accelerator.current_stream(self._device)

    def send_out(self, source: Tensor, buffer: HostBuffer) -> torch.Event:
        """Copy bytes to the host, behind what compute was given so far; return when it is over.

        Somebody holds ``source`` until compute has waited for the event.
        """
        self._out.wait_stream(self.compute)
        return self._copy(self._out, buffer, buffer.data[: source.numel()], source)

    def send_storage(self, tensor: Tensor, buffer: HostBuffer) -> torch.Event:
        """Copy all bytes of a tensor's storage to the host; see ``send_out``."""
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return self.send_out(source.set_(tensor.untyped_storage()), buffer)

    def view(
        self,
        held: Tensor,
        dtype: torch.dtype,
        size: torch.Size,
        stride: tuple[int, ...],
        offset: int,
    ) -> Tensor:
        """Return a tensor in the storage of another one, which is no view of that."""
        found = torch.empty(0, dtype=dtype, device=held.device)
        return found.set_(held.untyped_storage(), offset, size, stride)

    def bring_back(self, buffer: HostBuffer, target: Tensor) -> torch.Event:
        """Copy bytes to the device, into memory that compute allocated; return when it is over.

        What used that memory before is over then: compute freed it, and the lane waits for compute.
        """
        self._back.wait_stream(self.compute)
        return self._copy(self._back, buffer, target, buffer.data[: target.numel()])

    def free_behind(self, source: Tensor) -> None:
        """Let the allocator have memory that is dropped now when copies to the host are over.

        Compute need not wait for them then. When that is, the allocator finds out by itself.
        """
        source.record_stream(self._out)

    def _copy(
        self, lane: torch.Stream, buffer: HostBuffer, target: Tensor, source: Tensor
    ) -> torch.Event:
        if buffer.event is not None:
            lane.wait_event(buffer.event)
        with lane:
            target.copy_(source, non_blocking=True)
            buffer.event = lane.record_event()
        return buffer.event

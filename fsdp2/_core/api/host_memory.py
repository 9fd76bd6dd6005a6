"""A pool of pinned host memory, and the two lanes for copies to and from it.

[Note: who may use a host buffer]
The host itself never reads or writes a buffer; only device copies do, in two lanes: ``out`` (from
the device) and ``back`` (to the device). Before each copy, the lane waits for the event of the
buffer's previous copy. Therefore a buffer may be released and reused while a copy is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Look = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
"""Dtype, size, stride and offset of a tensor in its storage."""

STEPS = 8  # size classes per power of two, so that batches of similar lengths share classes
SMALLEST = 4096


@dataclass(eq=False, slots=True)
class HostBuffer:
    """A pinned host buffer. ``event`` is recorded after the most recent copy from or to it."""

    nbytes: int
    data: Tensor
    event: torch.Event | None = None


class HostMemory:
    """A pool of pinned buffers, ``nbytes`` in all. If none fits, ``take`` replaces the largest."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._free: dict[int, list[HostBuffer]] = {}

    def take(self, nbytes: int) -> HostBuffer:
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

    def _allocate(self, nbytes: int) -> Tensor:  # plans override it
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def give(self, buffer: HostBuffer) -> None:
        """Return a buffer to the pool; see [Note: who may use a host buffer]."""
        self._free.setdefault(buffer.nbytes, []).append(buffer)


def rounded(nbytes: int) -> int:
    step = max(1 << (max(nbytes - 1, 1).bit_length() - 1), SMALLEST) // STEPS
    return -(-nbytes // step) * step


class CopyLanes:
    """Two copy streams of a device, one per direction, because the link is full-duplex."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.Stream(device)
        self._back = torch.Stream(device)

    @property
    def compute(self) -> Any:
        return torch.accelerator.current_stream(self._device)

    def send_out(self, source: Tensor, buffer: HostBuffer) -> torch.Event:
        """Copy after pending compute; keep ``source`` alive until the returned event completes."""
        self._out.wait_stream(self.compute)
        return self._copy(self._out, buffer, buffer.data[: source.numel()], source)

    def send_storage(self, tensor: Tensor, buffer: HostBuffer) -> torch.Event:
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return self.send_out(source.set_(tensor.untyped_storage()), buffer)

    def view(self, held: Tensor, look: Look) -> Tensor:
        """Return a tensor that uses the storage of ``held``, but is not a view for autograd."""
        dtype, size, stride, offset = look
        found = torch.empty(0, dtype=dtype, device=held.device)
        return found.set_(held.untyped_storage(), offset, size, stride)

    def bring_back(self, buffer: HostBuffer, target: Tensor) -> torch.Event:
        """Copy to ``target``, which was allocated on the compute stream, after pending compute.
        Return the event of the copy."""
        self._back.wait_stream(self.compute)
        return self._copy(self._back, buffer, target, buffer.data[: target.numel()])

    def free_behind(self, source: Tensor) -> None:
        """Defer the reuse of the source's memory until pending copies from it are complete."""
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

"""Copies of what a rank saves, in host memory.

Owns the memory, which is used again for the next save of the same model, and the stream on which a
device copies. It must not know what the values are.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from dataclasses import replace

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._base.capabilities import capabilities
from fsdp2._base.pending_copies import note_copies
from fsdp2.checkpoint._contents import Piece

LARGE_NBYTES = 4 << 20


class Room:
    """Host memory that states are copied to, kept for the next save of the same model."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def copies(self, pieces: list[Piece]) -> tuple[list[Piece], torch.Event | None]:
        """Return the pieces with copies of their tensors; and what tells when a device made them.

        See [Note: a copy of the moment] in ``_base.pending_copies``.
        """
        sources = [piece.value.detach() for piece in pieces if isinstance(piece.value, Tensor)]
        device = next((t.device for t in sources if t.device.type != "cpu"), None)
        pins = device is not None and capabilities(device).pins
        self._fit(sources, pins)
        event = None
        with torch.no_grad():
            if device is None or not capabilities(device).has_lanes:
                for kept, source in zip(self._kept, sources, strict=True):
                    kept.copy_(source)
            else:
                event = _copy_beside(self._kept, sources, device)
        kept_ones = iter(self._kept)
        copied = [
            replace(p, value=next(kept_ones)) if isinstance(p.value, Tensor) else p for p in pieces
        ]
        return copied, event

    def _fit(self, sources: list[Tensor], pins: bool) -> None:
        """Keep what has the form of what comes, and make the rest anew."""
        kept, self._kept = self._kept, []
        for index, source in enumerate(sources):
            before = kept[index] if index < len(kept) else None
            if before is None or (before.shape, before.dtype) != (source.shape, source.dtype):
                before = _made(source.shape, source.dtype, pins)
            self._kept.append(before)


def _made(shape: torch.Size, dtype: torch.dtype, pins: bool) -> Tensor:
    """Return host memory that nobody has written to: pinned, or in large pages if it is large.

    The first copy into small pages costs a fault of the processor for each of 4 KiB, and those of a
    gigabyte take longer than to write it to a disk.
    """
    nbytes = shape.numel() * dtype.itemsize
    if pins or nbytes < LARGE_NBYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pins)
    memory = mmap.mmap(-1, nbytes)
    with contextlib.suppress(OSError):  # a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=shape.numel()).view(shape)


def _copy_beside(targets: list[Tensor], sources: list[Tensor], device: torch.device) -> torch.Event:
    """Copy on a stream of its own, behind what the current stream was given."""
    lane = _lane_of(device)
    lane.wait_stream(torch.accelerator.current_stream())
    with lane:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
            if source.device.type != "cpu":
                source.record_stream(lane)
        event = lane.record_event()
    note_copies(event)
    return event


_lanes: dict[torch.device, torch.Stream] = {}
_rooms: weakref.WeakKeyDictionary[nn.Module, Room] = weakref.WeakKeyDictionary()


def _lane_of(device: torch.device) -> torch.Stream:
    if device not in _lanes:
        _lanes[device] = torch.Stream(device)
    return _lanes[device]


def room_of(model: nn.Module) -> Room:
    """Return the host memory for copies of a model's state, which goes when the model does."""
    return _rooms.setdefault(model, Room())

"""Bytes that groups hold, step by step, and what the system says about the process.

Owns the counts. They are read from buffers where these may have changed, group by group, so that a
look at all of a model costs no walk through it. It must not know rows or times.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable

import torch

from fsdp2._core.base.capabilities import capabilities
from fsdp2._core.base.events import Event
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.reduce import Reduction
from fsdp2._core.params.registration import GATHERING

SHARE = 100
"""The allocator of a device is asked so rarely that its answers take a hundredth of the time."""


class Entry:
    """A group of the recorded model: what it is called, and what it holds."""

    __slots__ = (
        "full_nbytes",
        "gather_nbytes",
        "group",
        "name",
        "needs",
        "reduce_event",
        "unshard_event",
    )

    def __init__(self, group: ParamGroup, name: str) -> None:
        self.group = group
        self.name = name
        self.full_nbytes = 0  # of whole parameters, or of shards over a smaller mesh
        self.gather_nbytes = 0  # of what the all-gather in flight works on
        self.unshard_event: Event | None = None  # until what it tells of is launched
        self.reduce_event: Event | None = None
        self.needs = False  # somebody waits to compute with its parameters


class Memory:
    """What all groups hold."""

    def __init__(self, shard_nbytes: int) -> None:
        self._shards = shard_nbytes
        self.gathered = 0
        self._gathers = 0
        self._reductions: list[tuple[weakref.ref[Reduction], int]] = []
        self.peak = shard_nbytes

    def look(self, entry: Entry) -> None:
        """See what a group holds now."""
        group = entry.group
        full, waiting = group.buffers.full, group.buffers.post_forward.buffer
        held = full.nbytes if full is not None and full.has_memory else 0
        if waiting is not None:
            held += waiting.flat.untyped_storage().nbytes()
        self.gathered += held - entry.full_nbytes
        entry.full_nbytes = held
        if group.state is not GATHERING and entry.gather_nbytes:
            self._gathers -= entry.gather_nbytes
            entry.gather_nbytes = 0

    def begin_gather(self, entry: Entry, buffers: tuple[torch.Tensor, ...]) -> None:
        """An all-gather was issued: its output and what it sends, unless these are the shards."""
        home = entry.group.buffers.home
        kept = None if home is None else home.flat.untyped_storage().data_ptr()
        sizes = {
            storage.data_ptr(): storage.nbytes()
            for storage in [buffer.untyped_storage() for buffer in buffers]
        }
        entry.gather_nbytes = sum(size for start, size in sizes.items() if start != kept)
        self._gathers += entry.gather_nbytes

    def begin_reduction(self, reduction: Reduction) -> None:
        nbytes = sum(tensor.nbytes for tensor in reduction._inputs)
        self._reductions.append((weakref.ref(reduction), nbytes))

    @property
    def communication(self) -> int:
        """Bytes of buffers of collectives."""
        total = self._gathers
        for item in tuple(self._reductions):
            reduction = item[0]()
            if reduction is None or not reduction._inputs:
                self._reductions.remove(item)
            else:
                total += item[1]
        return total

    def as_text(self) -> str:
        """Return the columns of a row, and keep the peak."""
        communication = self.communication if self._reductions else self._gathers
        total = self._shards + self.gathered + communication
        if total > self.peak:  # inline: this runs for every row
            self.peak = total
        return f'"gathered_nbytes":{self.gathered},"communication_nbytes":{communication}'

    def begin_step(self) -> None:
        self.peak = self._shards + self.gathered + self.communication


class Allocator:
    """The allocator of a device; that of a CPU says nothing."""

    def __init__(self, device: torch.device) -> None:
        self._ask: Callable[[torch.device], int] | None = None
        self._device = device
        if not capabilities(device).is_host and device.type != "meta":
            self._ask = getattr(torch.get_device_module(device.type), "memory_allocated", None)
        self._next = 0

    @property
    def nbytes(self) -> int:
        """Ask now."""
        return 0 if self._ask is None else self._ask(self._device)

    def as_text(self) -> str:
        """Return a column of a row, or nothing if it was asked a moment ago."""
        if self._ask is None or (begin := time.perf_counter_ns()) < self._next:
            return ""
        nbytes = self.nbytes
        end = time.perf_counter_ns()
        self._next = end + SHARE * (end - begin)
        return f',"allocated_nbytes":{nbytes}'


def resident_nbytes() -> int:
    """Return the process' memory, 0 where the system has no such file."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0

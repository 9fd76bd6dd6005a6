"""Memory of groups over a step, and the memory that the system reports for the process. Counts are
updated when a group's buffers change, so reading them does not iterate over the model."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fsdp2._core.base.capabilities import capabilities
from fsdp2._core.base.events import Event
from fsdp2._core.engine.tree import Unit
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.reduce import Reduction
from fsdp2._core.params.registration import GATHERING

SHARE = 100
"""Queries of a device's allocator take at most 1 / ``SHARE`` of the time."""


@dataclass(eq=False)
class Entry:
    """A group of the recorded model: its name and its memory."""

    unit: Unit
    group: ParamGroup
    name: str
    full_nbytes: int = 0  # unsharded parameters, or shards over a smaller mesh
    gather_nbytes: int = 0  # buffers of the all-gather in flight
    # the events of an unshard and of a reduction, until the collective is launched
    events: dict[str, Event] = field(default_factory=dict)
    needs: bool = False  # True while computation waits for the parameters


class Memory:
    def __init__(self, shard_nbytes: int) -> None:
        self._shards = shard_nbytes
        self.gathered = 0
        self._gathers = 0
        self._reductions: list[tuple[weakref.ref[Reduction], int]] = []
        self.peak = shard_nbytes

    def look(self, entry: Entry) -> None:
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
        """Count the buffers of a launched all-gather, except the shards themselves."""
        home = entry.group.buffers.home
        kept = None if home is None else home.flat.untyped_storage().data_ptr()
        storages = [buffer.untyped_storage() for buffer in buffers]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        entry.gather_nbytes = sum(size for start, size in sizes.items() if start != kept)
        self._gathers += entry.gather_nbytes

    def begin_reduction(self, reduction: Reduction) -> None:
        nbytes = sum(tensor.nbytes for tensor in reduction._inputs)
        self._reductions.append((weakref.ref(reduction), nbytes))

    @property
    def communication(self) -> int:
        total = self._gathers
        for item in tuple(self._reductions):
            reduction = item[0]()
            if reduction is None or not reduction._inputs:
                self._reductions.remove(item)
            else:
                total += item[1]
        return total

    def as_text(self) -> str:
        """Return the memory columns of a row, and update the peak."""
        communication = self.communication if self._reductions else self._gathers
        total = self._shards + self.gathered + communication
        if total > self.peak:  # inline: this runs for every row
            self.peak = total
        return f'"gathered_nbytes":{self.gathered},"communication_nbytes":{communication}'

    def begin_step(self) -> None:
        self.peak = self._shards + self.gathered + self.communication


class Allocator:
    """The allocator of a device. On a CPU, 0 bytes are reported."""

    def __init__(self, device: torch.device) -> None:
        self._ask: Callable[[torch.device], int] | None = None
        self._device = device
        if not capabilities(device).is_host and device.type != "meta":
            self._ask = getattr(torch.get_device_module(device.type), "memory_allocated", None)
        self._next = 0

    @property
    def nbytes(self) -> int:
        return 0 if self._ask is None else self._ask(self._device)

    def as_text(self) -> str:
        """Return the allocator's column of a row, or "" if the last query was too recent."""
        if self._ask is None or (begin := time.perf_counter_ns()) < self._next:
            return ""
        nbytes = self.nbytes
        end = time.perf_counter_ns()
        self._next = end + SHARE * (end - begin)
        return f',"allocated_nbytes":{nbytes}'


def resident_nbytes() -> int:
    """Return the process's memory in bytes, or 0 on systems without ``/proc``."""
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0

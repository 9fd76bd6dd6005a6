"""Copies received stamps (operation numbers) from the device to the host asynchronously.

Owns these copies, and decides when to check them; ``Stamp`` compares the values. See
[Note: agreement] in ``_core.agreement.agreement``.
"""

from __future__ import annotations

import weakref
from ctypes import string_at
from typing import ClassVar, Protocol

import torch
from torch import Tensor


class Seen(Protocol):
    """A stamp. Gathers write the stamps of all ranks to the tensor ``seen``, ``[W, n]``."""

    seen: Tensor | None

    def check(self, seen: Tensor) -> None:
        """Compare the copied stamps."""

    def check_sum(self, seen: Tensor, number: int) -> None:
        """Compare the sum of a reduction's stamps with the code of ``number``."""


class LateLook:
    """The stamps received in gathers over one process group of a device. Each step starts one copy
    to the host, and polls the previous copy. Stamps are thus usually checked one step later."""

    count: ClassVar[int] = 0  # number of instances created, so that caches detect new instances

    def __init__(self) -> None:
        # for each stamp: the row expected from every rank, and the number of ranks
        self._expected = weakref.WeakKeyDictionary[Seen, tuple[bytes, int]]()
        self._parts: list[tuple[weakref.ref[Seen], bytes, int]] = []  # contents of ``_copied``
        self._slots: list[Tensor] = []  # their device memory, as bytes
        self._copied: Tensor | None = None  # in pinned memory; None if the lists are outdated
        self._event: torch.Event | None = None  # recorded after a copy that is not yet checked
        self._sum: tuple[Seen, int, Tensor] | None = None  # from the last reduction's buffer
        self._copied_sum: tuple[Seen, int, Tensor] | None = None
        LateLook.count += 1

    def add(self, stamp: Seen, row: bytes, ranks: int) -> None:
        """Start checking that ``stamp.seen`` contains ``row`` for each rank."""
        self._expected[stamp] = row, ranks
        self._copied = self._event = None

    def see_sum(self, stamp: Seen, number: int, total: Tensor) -> None:
        """Also check the sum of a reduction's stamps ``[n]``: a rank that gives up changes it."""
        self._sum = stamp, number, total

    @torch.inference_mode(False)  # the tensors are reused outside inference mode
    @torch.no_grad()
    def note(self) -> None:
        total, self._sum = self._sum, None
        if self._event is not None:
            return
        if self._copied is None or len(self._slots) != len(self._expected):
            self._parts = [(weakref.ref(stamp), *part) for stamp, part in self._expected.items()]
            slots = [stamp.seen for stamp in self._expected]
            self._slots = [slot.view(-1).view(torch.uint8) for slot in slots if slot is not None]
            nbytes = sum(len(row) * ranks for _, row, ranks in self._parts)
            self._copied = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        if self._slots:
            self._copied.copy_(torch.cat(self._slots), non_blocking=True)
        if total is not None:
            stamp, number, seen = total
            copied = None if self._copied_sum is None else self._copied_sum[2]
            if copied is None or copied.dtype is not seen.dtype:
                copied = torch.empty(seen.shape, dtype=seen.dtype, device="cpu", pin_memory=True)
            self._copied_sum = stamp, number, copied.copy_(seen, non_blocking=True)
        if self._slots or total is not None:
            self._event = torch.accelerator.current_stream().record_event()

    def look(self) -> None:
        """Compare the copied stamps, if the copy is complete."""
        event, copied = self._event, self._copied
        if event is None or copied is None or not event.query():
            return
        self._event = None
        if self._copied_sum is not None:
            reduced, number, total = self._copied_sum
            reduced.check_sum(total, number)
        begin, address = 0, copied.data_ptr()
        for known, row, ranks in self._parts:
            nbytes = len(row) * ranks
            at, begin = begin, begin + nbytes
            if string_at(address + at, nbytes) == row * ranks:  # too large to cache
                continue
            stamp = known()
            if stamp is not None and stamp.seen is not None:
                rows = copied[at:begin]
                stamp.check(rows.view(stamp.seen.dtype).view(stamp.seen.shape))

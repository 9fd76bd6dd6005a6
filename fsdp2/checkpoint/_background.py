"""Saves in the background: what was copied is written by a thread, while training goes on.

Owns the copy of a state, the thread, what it waits for, and how its failure is told. It must not
know how a state is made, nor the form of files.

[Note: no collective]
The thread sends nothing to other ranks, so it cannot meet training, and goes on when process groups
are gone. Ranks wait for each other by the files of the save: each has a file that it holds locked;
a report says that a rank is done (see ``_writing``). The first rank waits for all reports, and
gives the checkpoint its name; the others wait until the workspace has lost its own. A rank that
failed removes its file, one that has ended leaves a lock that is free, and then the first rank
removes the workspace. So nobody waits for a rank that is gone. Where locks cannot tell (another
host, a file system without locks), a rank counts as gone when nothing was written for an hour. A
process that hangs, or that was stopped, keeps its lock: it counts as gone after ten minutes without
a byte, and much sooner for a process that ends because of an error.

A failure ends no training. ``SaveHandle.wait`` raises it, on the rank that asks; the next save
warns of it on every rank, after the ranks have told each other.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._core.base.arguments import check_number
from fsdp2._core.base.capabilities import capabilities
from fsdp2._core.base.errors import StateError
from fsdp2._core.base.pending_copies import note_copies, wait_for_copies
from fsdp2._core.base.warn import warn
from fsdp2._core.comm.process_mesh import Grid
from fsdp2.checkpoint._checksums import said
from fsdp2.checkpoint._contents import Contents, Piece
from fsdp2.checkpoint._place import LATEST, SERIES, give_name, keep_newest, require_written
from fsdp2.checkpoint._publish import ABANDONED_AFTER_S, OWNER, Workspace, is_dead, is_old, own
from fsdp2.checkpoint._saved import METADATA
from fsdp2.checkpoint._writing import RANK, REPORT, Progress, write_metadata, write_part

# Copies of what a rank saves, in host memory.

LARGE_NBYTES = 4 << 20


class Room:
    """Host memory that states are copied to, kept for the next save of the same model."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def copies(self, pieces: list[Piece]) -> tuple[list[Piece], torch.Event | None]:
        """Return the pieces with copies of their tensors; and what tells when a device made them.

        See [Note: a copy of the moment] in ``_core.base.pending_copies``.
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


# One save on one rank: what it copies and writes, and on the first rank how it ends.


@dataclass
class Saving:
    """A save as one rank does it.

    Attributes:
        place: the folder that the checkpoint takes.
        workspace: the folder that it is written to.
        keep_last: how many of its series stay; None: it belongs to none.
        copied: tells when a device has made the copies that are written.
    """

    place: Path
    workspace: Workspace
    contents: Contents
    pieces: list[Piece]
    keep_last: int | None
    progress: Progress = field(default_factory=Progress)
    copied: torch.Event | None = None

    def __post_init__(self) -> None:
        self.progress.nbytes = sum(piece.nbytes for piece in self.pieces)

    def copy(self, room: Room) -> None:
        """Let what is written be a copy of what is there now."""
        self.pieces, self.copied = room.copies(self.pieces)

    def write(self) -> None:
        """Write this rank's part."""
        if self.copied is not None:
            self.copied.synchronize()
        write_part(self.workspace.path, self.contents, self.pieces, self.progress)
        self.pieces = []

    def finish(self) -> None:
        """On the first rank, when all have written: give the checkpoint its name."""
        folder = self.workspace.path
        sizes = write_metadata(folder, len(self.contents.ranks), self.contents.writers())
        require_written(folder, sizes)
        for entry in folder.iterdir():  # reports, and what ranks hold locked
            if entry.name.startswith((REPORT, RANK)):
                entry.unlink()
        if self.keep_last is not None:
            (folder / SERIES).touch()
        give_name(self.workspace, self.place)
        if self.keep_last is not None:
            keep_newest(self.place, self.keep_last, self.workspace.token)

    def give_up(self) -> None:
        """On the first rank: leave nothing of the save.

        The metadata goes first: who sees it in a workspace that lost its name takes it for named.
        """
        with contextlib.suppress(OSError):
            (self.workspace.path / METADATA).unlink(missing_ok=True)
        with contextlib.suppress(Exception):
            self.workspace.remove()


WhenBusy = Literal["wait", "refuse"]

FAILED = ".failed-"
"""What the names of files begin with in which a rank says why it gave up."""

LOOK_EVERY_S = 0.02
LOOK_FOR_THE_DEAD_EVERY_S = 0.5
LEFT_AFTER_S = 30.0
"""For how long a process that ends waits for a rank of which nothing is known and seen."""
LINK_S = 5.0
"""For how long another rank waits for the link to a checkpoint that has its name."""
HANGS_AFTER_S = 600.0
"""For how long a rank may live and write nothing: one that syncs a large file does so, too."""


# The handle.


class SaveHandle:
    """A save that is written in the background. See ``fsdp2.checkpoint.save``.

    Attributes:
        path: the folder that the checkpoint takes.

    No method is collective: any rank may call any of them at any time.
    """

    def __init__(self, saving: Saving) -> None:
        self.path = saving.place
        self._saving = saving
        self._workspace = saving.workspace.path
        self._ranks = saving.contents.ranks
        self._number = saving.contents.number
        self._error: StateError | None = None
        self._is_told = False
        self._is_leaving = False
        self._done = threading.Event()
        self._lock = own(self._workspace / f"{RANK}{self._number}")
        self._seen = _open_folder(self._workspace)

    def done(self) -> bool:
        """Return True once it has ended: the checkpoint has its name, or the save has failed."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint has its name, on all ranks.

        Args:
            timeout: seconds; None waits as long as it takes.

        Raises:
            StateError: the save failed. The checkpoint before, if there is one, is as it was.
            TimeoutError: it is still being written.
        """
        if timeout is not None:
            check_number("wait", "timeout", timeout, "seconds, or None", low=0)
            timeout = min(timeout, threading.TIMEOUT_MAX)
        if not self._done.wait(timeout):
            raise TimeoutError(f"save: {self.path} is still being written after {timeout} s")
        if self._error is not None:
            self._is_told = True
            raise StateError(self._error.code, self._error.text) from self._error.__cause__

    def exception(self) -> StateError | None:
        """Return the error of a save that has failed; None while it goes on, and if it is there."""
        return self._error

    def wait_for_copies(self) -> None:
        """Let what the device is given next come after the copies of the state.

        Steps of optimizers, and functions of fsdp2 that write to parameters, do so by themselves.
        """
        wait_for_copies()

    @property
    def progress(self) -> float:
        """The part of this rank's bytes that are written, from 0 to 1; the names come after."""
        told = self._saving.progress
        return told.written_nbytes / told.nbytes if told.nbytes else float(self.done())

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.done() else f"{self.progress:.0%}"
        return f"SaveHandle({str(self.path)!r}, {state})"

    # The thread.

    def _start(self) -> None:
        threading.Thread(target=self._run, name="fsdp2 save", daemon=True).start()

    def _run(self) -> None:
        try:
            with contextlib.suppress(OSError, AttributeError):  # training goes first, on Linux
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
            self._saving.write()
            if self._number == 0:
                self._wait_for_others()
                self._saving.finish()
            else:
                self._wait_for_the_first()
        except BaseException as error:
            self._error = self._told_of(error)
            self._leave_word(self._error)
        finally:
            for descriptor in (self._lock, self._seen):
                with contextlib.suppress(OSError):
                    os.close(descriptor)
            self._done.set()

    def _told_of(self, error: BaseException) -> StateError:
        if isinstance(error, StateError):
            return error
        what = f"{said(error)}: {error.filename}" if isinstance(error, OSError) else said(error)
        gone = self._number != 0 and not self._workspace.exists()
        failed = self._removed() if gone else self._failed(self._number, what)
        failed.__cause__ = error
        return failed

    def _failed(self, number: int, what: str) -> StateError:
        return StateError(
            "FS627",
            f"save: {self.path} was not written in the background: rank {self._ranks[number]}: "
            f"{what}. The checkpoint before, if there is one, is as it was.",
        )

    def _removed(self) -> StateError:
        return StateError(
            "FS627",
            f"save: {self.path} was not written in the background: {self._workspace} was removed "
            f"before rank {self._ranks[0]} had named it, by that rank if another one could not "
            "write. The checkpoint before, if there is one, is as it was.",
        )

    def _leave_word(self, error: StateError) -> None:
        """Let the first rank know, which removes what was written."""
        if self._number == 0:
            self._saving.give_up()
            return
        with contextlib.suppress(OSError):
            (self._workspace / f"{FAILED}{self._number}").write_text(error.text)
        with contextlib.suppress(OSError):
            (self._workspace / f"{RANK}{self._number}").unlink()

    def _looks(self) -> Iterator[bool]:
        """Yield again and again; True when it is time to look for the dead, too."""
        due = time.monotonic() + LOOK_FOR_THE_DEAD_EVERY_S
        pause = threading.Event()
        while True:
            is_due = time.monotonic() > due
            if is_due:
                due = time.monotonic() + LOOK_FOR_THE_DEAD_EVERY_S
            yield is_due
            pause.wait(LOOK_EVERY_S)

    def _why_gone(self, owned: str) -> str:
        """Return why a rank is not to be waited for; nothing if it is."""
        found = is_dead(self._workspace / owned)
        if found:
            return "it has ended"
        limit = ABANDONED_AFTER_S if found is None else HANGS_AFTER_S
        if self._is_leaving and (found is None or _ends_by_error()):
            limit = LEFT_AFTER_S
        return f"nothing was written for {limit:.0f} s" if is_old(self._workspace, limit) else ""

    def _wait_for_others(self) -> None:
        """Wait for the reports of all ranks.

        Raises:
            StateError: one failed, or has ended.
        """
        missing = set(range(1, len(self._ranks)))
        for is_due in self._looks():
            names = set(os.listdir(self._workspace))
            missing = {number for number in missing if f"{REPORT}{number}" not in names}
            if not missing:
                return
            for number in missing:
                if f"{RANK}{number}" not in names:
                    text = "it failed, and could not say why"
                    with contextlib.suppress(OSError):
                        text = (self._workspace / f"{FAILED}{number}").read_text()
                        raise StateError("FS627", text)
                    raise self._failed(number, text)
                why = is_due and self._why_gone(f"{RANK}{number}")
                if why:
                    raise self._failed(number, f"{why} before its part was there")

    def _wait_for_the_first(self) -> None:
        """Wait until the workspace has another name, and see that it was not removed."""
        for is_due in self._looks():
            if not self._workspace.exists():
                break
            why = is_due and self._why_gone(OWNER)
            if why:
                raise self._failed(0, f"{why} before the checkpoint had its name")
        try:
            written = os.stat(METADATA, dir_fd=self._seen).st_mtime_ns
        except OSError as error:
            raise self._removed() from error
        if self._saving.keep_last is not None:
            self._wait_for_the_link(written)

    def _wait_for_the_link(self, written_ns: int) -> None:
        """Wait until ``latest`` leads here, or to what is newer still: the first rank sees to it.

        Not for long: it may have ended in between, and the checkpoint is there.
        """
        link = self.path.parent / LATEST
        due = time.monotonic() + LINK_S
        while time.monotonic() < due:
            with contextlib.suppress(OSError):
                if os.lstat(link).st_mtime_ns >= written_ns:
                    return
            time.sleep(LOOK_EVERY_S)


def _ends_by_error() -> bool:
    """True in a process whose main program has raised an error."""
    return getattr(sys, "last_value", None) is not None


def _open_folder(path: Path) -> int:
    """Return a descriptor of a folder, which stays when the folder is renamed."""
    return os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))


# One at a time.


class _Process:
    """The save that this process does, or did last."""

    handle: SaveHandle | None = None
    finishes_at_exit = False


def start(handle: SaveHandle) -> SaveHandle:
    """Let a save go on in the background."""
    _Process.handle = handle
    if not _Process.finishes_at_exit:
        atexit.register(_finish)
        _Process.finishes_at_exit = True
    handle._start()
    return handle


def settle(what: str, main: Grid, when_busy: WhenBusy) -> None:
    """Wait for the save before on all ranks, or refuse; and warn on all if it failed. Collective.

    Raises:
        StateError: it goes on, and is not to be waited for.
    """
    before = _Process.handle
    (is_busy,) = main.highest(int(before is not None and not before.done()))
    if is_busy and when_busy == "refuse":
        raise StateError(
            "FS628",
            f"{what}: a save in the background has not ended. Wait for it with its handle's "
            "wait(), save less often, or pass when_busy='wait'.",
        )
    if before is not None:
        before._done.wait()
    failed = None if before is None or before._is_told else before.exception()
    if not main.any_is(failed is not None):
        return
    texts = [text for text in main.collect(None if failed is None else failed.text) if text]
    if before is not None:
        before._is_told = True
    for each in dict.fromkeys(texts):
        warn("FS627", f"{each}")


def _finish() -> None:
    """Let a process end when what it saves is written; say so if that failed unseen."""
    handle = _Process.handle
    if handle is None:
        return
    handle._is_leaving = True
    handle._done.wait()
    if handle._error is not None and not handle._is_told:
        warn("FS627", handle._error.text)

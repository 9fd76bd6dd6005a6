"""Write a sharded checkpoint, immediately or in the background.

``_files`` defines the formats, ``_contents`` assigns writers, and ``_place`` renames folders.

[Note: no collective]
The background thread uses no collectives: it cannot interfere with training, and continues after
process groups are destroyed. Ranks synchronise through files in the workspace: each rank locks a
file, and writes a report when it is done. The first rank waits for all reports and renames the
workspace to the checkpoint's path; the other ranks wait for the rename. A rank that fails removes
its locked file, and the lock of a rank that exits is released. In both cases the first rank removes
the workspace. If locks are inconclusive (another host, a file system without locks), a rank is
considered dead after an hour without a write. A process that hangs or is stopped keeps its lock: it
is considered dead after ten minutes without a write, or after 30 s if a waiting process exits with
an error. A failed save does not stop training. ``SaveHandle.wait`` raises the error on the calling
rank. The next save exchanges the errors of all ranks, and warns about them on every rank.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import mmap
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, overload

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from fsdp2._core.base.capabilities import capabilities
from fsdp2._core.base.errors import StateError, check_count, check_number, check_path, wrong_value
from fsdp2._core.base.pending_copies import note_copies, wait_for_copies
from fsdp2._core.base.warn import warn
from fsdp2._core.comm.process_mesh import Grid, operation
from fsdp2.checkpoint._checksums import said
from fsdp2.checkpoint._contents import Contents, Piece, agree, main_of, state_of
from fsdp2.checkpoint._files import RANK, REPORT, Progress, write_metadata, write_part
from fsdp2.checkpoint._place import (
    ABANDONED_AFTER_S,
    LATEST,
    METADATA,
    OWNER,
    SERIES,
    Workspace,
    give_name,
    is_dead,
    is_old,
    keep_newest,
    own,
    require_room,
    require_series,
    require_written,
)
from fsdp2.checkpoint._state import checked

LARGE_NBYTES = 4 << 20


class Room:
    """Host buffers for copies of a state, reused by the next save of the same model."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def copies(self, pieces: list[Piece]) -> tuple[list[Piece], torch.Event | None]:
        """Return pieces whose tensors are host copies, and the event recorded after the copies."""
        kept, event = self.copies_of([p.value for p in pieces if isinstance(p.value, Tensor)])
        kept_ones = iter(kept)
        copied = [
            replace(p, value=next(kept_ones)) if isinstance(p.value, Tensor) else p for p in pieces
        ]
        return copied, event

    def copies_of(self, tensors: list[Tensor]) -> tuple[list[Tensor], torch.Event | None]:
        sources = [tensor.detach() for tensor in tensors]
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
        return self._kept, event

    def _fit(self, sources: list[Tensor], pins: bool) -> None:
        kept, self._kept = self._kept, []
        for index, source in enumerate(sources):
            before = kept[index] if index < len(kept) else None
            if before is None or (before.shape, before.dtype) != (source.shape, source.dtype):
                before = _made(source.shape, source.dtype, pins)
            self._kept.append(before)


def _made(shape: torch.Size, dtype: torch.dtype, pins: bool) -> Tensor:
    """Return uninitialised host memory: pinned, or in huge pages if it is large."""
    nbytes = shape.numel() * dtype.itemsize
    if pins or nbytes < LARGE_NBYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pins)
    # page faults for normal pages (4 KiB) take longer than writing the data to a disk
    memory = mmap.mmap(-1, nbytes)
    with contextlib.suppress(OSError):  # the kernel may not support huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=shape.numel()).view(shape)


def _copy_beside(targets: list[Tensor], sources: list[Tensor], device: torch.device) -> torch.Event:
    """Copy on a separate stream, after the work already queued on the current stream."""
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


_rooms: weakref.WeakKeyDictionary[nn.Module, Room] = weakref.WeakKeyDictionary()


@functools.cache
def _lane_of(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


@dataclass
class Saving:
    """One rank's part of a save: the copies, the writes and, on the first rank, the renames."""

    place: Path
    workspace: Workspace
    contents: Contents
    pieces: list[Piece]
    keep_last: int | None  # number of checkpoints that the series keeps
    progress: Progress = field(default_factory=Progress)
    copied: torch.Event | None = None  # recorded after copies from a device

    def __post_init__(self) -> None:
        self.progress.nbytes = sum(piece.nbytes for piece in self.pieces)

    def copy(self, room: Room) -> None:
        self.pieces, self.copied = room.copies(self.pieces)

    def write(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()
        write_part(self.workspace.path, self.contents, self.pieces, self.progress)
        self.pieces = []

    def finish(self) -> None:
        """Complete and rename the checkpoint, on the first rank, after all ranks have written."""
        folder = self.workspace.path
        sizes = write_metadata(folder, len(self.contents.ranks), self.contents.writers())
        require_written(folder, sizes)
        for entry in folder.iterdir():  # reports, and the ranks' locked files
            if entry.name.startswith((REPORT, RANK)):
                entry.unlink()
        if self.keep_last is not None:
            (folder / SERIES).touch()
        give_name(self.workspace, self.place)
        if self.keep_last is not None:
            keep_newest(self.place, self.keep_last, self.workspace.token)

    def give_up(self) -> None:
        """Remove all files, the metadata first: it would indicate success to other ranks."""
        with contextlib.suppress(OSError):
            (self.workspace.path / METADATA).unlink(missing_ok=True)
        with contextlib.suppress(Exception):
            self.workspace.remove()


def checked_timeout(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    check_number("wait", "timeout", timeout, "seconds, or None", low=0)
    return min(timeout, threading.TIMEOUT_MAX)


WhenBusy = Literal["wait", "refuse"]

FAILED = ".failed-"  # file name prefix of error reports
LOOK_EVERY_S = 0.02
LOOK_FOR_THE_DEAD_EVERY_S = 0.5
LEFT_AFTER_S = 30.0  # an exiting process waits this long while no rank writes
LINK_S = 5.0  # the other ranks wait this long for ``latest`` after the checkpoint's rename
HANGS_AFTER_S = 600.0  # a live rank may write nothing for this long, e.g. to sync a large file


class SaveHandle:
    """A save in the background. See ``fsdp2.checkpoint.save``.

    Attributes:
        path: the final folder of the checkpoint.

    No method is collective: any rank may call any method at any time.
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
        # this descriptor remains valid when the folder is renamed
        self._seen = os.open(self._workspace, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))

    def done(self) -> bool:
        """Return True once the checkpoint has its final name, or the save has failed."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all ranks have written and the checkpoint has its final name.

        Args:
            timeout: seconds; None waits indefinitely.

        Raises:
            StateError: the save failed. The previous checkpoint, if any, is unchanged.
            TimeoutError: the save has not finished within ``timeout`` seconds.
        """
        if not self._done.wait(checked_timeout(timeout)):
            raise TimeoutError(f"save: {self.path} is still being written after {timeout} s")
        if self._error is not None:
            self._is_told = True
            raise StateError(self._error.code, self._error.text) from self._error.__cause__

    def exception(self) -> StateError | None:
        """Return the error of a failed save, or None if the save is running or has succeeded."""
        return self._error

    def wait_for_copies(self) -> None:
        """Make all later device work wait for the copies of the state.

        Optimizer steps, and fsdp2 functions that write to parameters, call this automatically.
        """
        wait_for_copies()

    @property
    def progress(self) -> float:
        """The fraction of this rank's bytes written so far, from 0 to 1, not counting renames."""
        told = self._saving.progress
        return told.written_nbytes / told.nbytes if told.nbytes else float(self.done())

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.done() else f"{self.progress:.0%}"
        return f"SaveHandle({str(self.path)!r}, {state})"

    def _run(self) -> None:
        """Write the checkpoint. Runs in a thread."""
        try:
            with contextlib.suppress(OSError, AttributeError):  # lower thread priority (Linux)
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
        failed = self._removed() if gone else self._failed_on(self._number, what)
        failed.__cause__ = error
        return failed

    def _failed(self, what: str) -> StateError:
        return StateError(
            "FS627",
            f"save: writing {self.path} in the background failed: {what}. The previous "
            "checkpoint, if any, is unchanged.",
        )

    def _failed_on(self, number: int, what: str) -> StateError:
        return self._failed(f"rank {self._ranks[number]}: {what}")

    def _removed(self) -> StateError:
        return self._failed(
            f"{self._workspace} was removed before rank {self._ranks[0]} renamed it, which happens "
            "if another rank could not write"
        )

    def _leave_word(self, error: StateError) -> None:
        """Report an error to the first rank, which removes the written files."""
        if self._number == 0:
            self._saving.give_up()
            return
        with contextlib.suppress(OSError):
            (self._workspace / f"{FAILED}{self._number}").write_text(error.text)
        with contextlib.suppress(OSError):
            (self._workspace / f"{RANK}{self._number}").unlink()

    def _looks(self) -> Iterator[bool]:
        """Yield once per polling interval: True if it is time to check for dead ranks."""
        due = time.monotonic() + LOOK_FOR_THE_DEAD_EVERY_S
        while True:
            is_due = time.monotonic() > due
            if is_due:
                due = time.monotonic() + LOOK_FOR_THE_DEAD_EVERY_S
            yield is_due
            time.sleep(LOOK_EVERY_S)

    def _why_gone(self, owned: str) -> str:
        """Return why a rank is considered dead, or "" if it is not."""
        found = is_dead(self._workspace / owned)
        if found:
            return "it has exited"
        limit = ABANDONED_AFTER_S if found is None else HANGS_AFTER_S
        is_ended_by_error = getattr(sys, "last_value", None) is not None
        if self._is_leaving and (found is None or is_ended_by_error):
            limit = LEFT_AFTER_S
        return f"nothing was written for {limit:.0f} s" if is_old(self._workspace, limit) else ""

    def _wait_for_others(self) -> None:
        missing = set(range(1, len(self._ranks)))
        for is_due in self._looks():
            names = set(os.listdir(self._workspace))
            missing = {number for number in missing if f"{REPORT}{number}" not in names}
            if not missing:
                return
            for number in missing:
                if f"{RANK}{number}" not in names:
                    text = "it failed, but could not report why"
                    with contextlib.suppress(OSError):
                        text = (self._workspace / f"{FAILED}{number}").read_text()
                        raise StateError("FS627", text)
                    raise self._failed_on(number, text)
                if is_due and (why := self._why_gone(f"{RANK}{number}")):
                    raise self._failed_on(number, f"{why}, and its part is missing")

    def _wait_for_the_first(self) -> None:
        """Wait until the workspace is renamed, and check that it was not removed instead."""
        for is_due in self._looks():
            if not self._workspace.exists():
                break
            if is_due and (why := self._why_gone(OWNER)):
                raise self._failed_on(0, f"{why}, and the checkpoint was not renamed")
        try:
            written = os.stat(METADATA, dir_fd=self._seen).st_mtime_ns
        except OSError as error:
            raise self._removed() from error
        if self._saving.keep_last is not None:
            self._wait_for_the_link(written)

    def _wait_for_the_link(self, written_ns: int) -> None:
        """Wait, up to ``LINK_S``, until ``latest`` points to this checkpoint or a newer one."""
        link = self.path.parent / LATEST
        due = time.monotonic() + LINK_S
        while time.monotonic() < due:
            with contextlib.suppress(OSError):
                if os.lstat(link).st_mtime_ns >= written_ns:
                    return
            time.sleep(LOOK_EVERY_S)


class _Process:
    """The current or last background save of this process, which runs one save at a time."""

    handle: SaveHandle | None = None


def start(handle: SaveHandle) -> SaveHandle:
    if _Process.handle is None:
        atexit.register(_finish)
    _Process.handle = handle
    threading.Thread(target=handle._run, name="fsdp2 save", daemon=True).start()
    return handle


def settle(what: str, main: Grid, when_busy: WhenBusy) -> None:
    """Wait for the previous save, or raise if it is still running (``when_busy``). Warn on all
    ranks if it failed. Collective."""
    before = _Process.handle
    (is_busy,) = main.highest(int(before is not None and not before.done()))
    if is_busy and when_busy == "refuse":
        raise StateError(
            "FS628",
            f"{what}: a save in the background is still running. Call wait() on its handle, save "
            "less often, or pass when_busy='wait'.",
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
        warn("FS627", each)


def _finish() -> None:
    """At exit, wait for the save; warn if it failed and the error was not reported."""
    handle = _Process.handle
    if handle is None:
        return
    handle._is_leaving = True
    handle._done.wait()
    if handle._error is not None and not handle._is_told:
        warn("FS627", handle._error.text)


@overload
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    background: Literal[False] = False,
    keep_last: int | None = None,
    when_busy: WhenBusy = "wait",
) -> None: ...
@overload
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    background: Literal[True],
    keep_last: int | None = None,
    when_busy: WhenBusy = "wait",
) -> SaveHandle: ...
@operation("save")
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Any = None,
    background: bool = False,
    keep_last: int | None = None,
    when_busy: WhenBusy = "wait",
) -> SaveHandle | None:
    """Write a sharded checkpoint atomically, in the format of ``torch.distributed.checkpoint``.

    The checkpoint is written to a temporary folder, which is renamed to ``path`` once every rank
    has finished. Therefore a save that fails or is interrupted leaves the previous checkpoint
    intact. If the program ends during the renames, ``load`` finds the previous checkpoint under its
    temporary name. All ranks of the model's mesh must see the same file system. Pipeline stages
    have separate meshes: save each stage to a separate folder. If two jobs save to the same path,
    the complete checkpoint of the job that finished last remains.

    With ``background=True``, the call only copies the state to host memory; a thread then writes
    the copy. The checkpoint contains the state at the time of the call, regardless of later changes
    to the model and the optimizer. The thread uses no collectives. For a model on a device, the
    call only starts the copies, which overlap with later device work until the next optimizer step.
    Before other writes to parameters, call ``handle.wait_for_copies``. A failure does not stop
    training: ``handle.wait()`` raises it, and the next save warns about it on every rank. At exit,
    the program waits for the save. The host buffers, which are as large as the rank's part, are
    kept for the next save.

    Args:
        path: a folder that is empty, contains a checkpoint, or does not exist. An existing
            checkpoint is replaced; other files in the folder are kept.
        model: a sharded model, or any other module. Unsharded tensors (buffers, ignored parameters)
            are saved from the first rank.
        optimizer: an optimizer over the model's parameters.
        extra: any picklable object (a step count, a scheduler's state), saved from the first rank.
            ``load`` returns it, with tensors on the CPU. DTensors in it (from an ``EMA``) are saved
            as shards and loaded unsharded. Data that is not plain needs ``trust=True`` in ``load``.
        background: write while the program continues.
        keep_last: add the checkpoint to the series of checkpoints that were saved to the parent
            folder of ``path`` with ``keep_last``, and keep only the newest ``keep_last`` of them.
            The link ``latest`` in that folder points to the last complete checkpoint.
        when_busy: what to do if a save in the background is still running: ``"wait"`` for it, or
            ``"refuse"`` to save. A rank writes one save at a time.

    Returns:
        A ``SaveHandle`` if ``background``, else None.

    Raises:
        ConfigError: ``path`` is a file, the working directory, or a folder with other files but no
            checkpoint; with ``keep_last``, ``latest`` exists and is not a link.
        UnsupportedError: a tensor wraps other tensors, as torchao's optimizer states do, so
            ``load`` could not read it.
        StateError: a rank could not write, or does not share the first rank's file system; the
            message names the rank and the reason. With ``"refuse"``: a save is still running.
    """
    with checked("save", model, optimizer, background=background) as same:
        check_path("save", "path", path)
        if keep_last is not None:
            check_count("save", "keep_last", keep_last)
        if when_busy not in ("wait", "refuse"):
            raise wrong_value("save", "when_busy", "'wait' or 'refuse'", when_busy)
        state = state_of(model)  # a state-dict hook may raise
        same.update(keep_last=keep_last, when_busy=when_busy)
    place = Path(path).resolve()

    def require_place() -> None:
        require_room(place)
        if keep_last is not None:
            require_series(place)

    settle("save", main_of(state), when_busy)
    number = secrets.randbits(32)
    main, contents, number = agree("save", model, optimizer, extra, state, number, require_place)
    workspace = Workspace(place, f"{number:08x}")
    try:
        with main.together("save"):
            if main.is_first:
                workspace.make()
        with main.together("save"):
            if not workspace.path.is_dir():
                raise StateError(
                    "FS613",
                    f"save: this rank does not see {workspace.path}, which the first rank created. "
                    "Save to the same path on every rank, on a file system that all ranks share.",
                )
            saving = Saving(place, workspace, contents, [*contents.pieces()], keep_last)
            if background:
                saving.copy(_rooms.setdefault(model, Room()))
                handle = SaveHandle(saving)
        if background:
            return start(handle)
        with main.together("save"):
            saving.write()
        with main.together("save"):
            if main.is_first:
                saving.finish()
    except BaseException as error:
        if main.is_first or isinstance(error, Exception):
            workspace.remove()
        raise
    return None

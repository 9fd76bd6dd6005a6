"""The file of one rank: JSON lines, a header and then what happened; how they are written and read.

Owns the format and the file. It must not know who makes rows, nor what they are read for.

[Note: what is on disk when a rank dies]
Lines are gathered and written when a step ends, when there are many, and before the host blocks in
a wait, which costs nothing then: that time is lost anyway. The last thing written there is a line
of the kind ``waiting``. So the file of a rank that hangs ends with what it waits for. A line that a
crash tore is the last one, and is left out by whoever reads.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2._core.base.errors import ConfigError
from fsdp2._core.base.names import printable
from fsdp2._core.base.regular_files import is_hollow, open_regular
from fsdp2._core.base.warn import warn
from fsdp2._tools.pages.page import write_whole
from fsdp2._tools.record.format import FORMAT, check_header, check_row

LINE_NBYTES = 64 << 20
"""Most bytes of a line: a header names all units."""

MANY = 1024
"""Lines that are kept at most until they are written."""

EVENTS = (
    "unshard",
    "wait_for_unshard",
    "reshard",
    "reduce",
    "wait_for_reduce",
    "prefetch",
    "adopt",
    "recover",
)
"""Kinds of rows that are events of the engine, in its own words and numbers."""


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


class Writer:
    """Appends lines to a new file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[str] = []
        self._lock = threading.Lock()  # a device's backward has a thread of its own
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # No buffer of Python's: a forked process (a loader's worker) would write it again.
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        except FileExistsError as error:
            raise ConfigError(
                "FS913",
                f"record: expected path to be a folder without a recording of this rank, found "
                f"{path.name} in {path.parent}. Pass a new folder, or move that file away.",
            ) from error
        except OSError as error:
            raise ConfigError(
                "FS913",
                f"record: {path} cannot be made ({error}). Pass a folder that can be written to.",
            ) from error
        self.is_broken = False

    def add(self, line: str) -> None:
        self._lines.append(line)
        if len(self._lines) >= MANY:
            self.flush()

    def flush(self) -> None:
        """Give all lines to the system: they outlive this process."""
        with self._lock:
            lines, self._lines = self._lines, []
            if not lines or self.is_broken:
                return
            data = memoryview("".join(lines).encode())
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError as error:  # of this rank alone: raising would leave others waiting
                self.is_broken = True
                warn(
                    "FS919",
                    f"fsdp2.record: {self.path} cannot be written any more ({error}); what "
                    "follows is not recorded. The run goes on.",
                    RuntimeWarning,
                )

    def close(self) -> None:
        self.flush()
        os.close(self._file)


@dataclass(frozen=True)
class RankFile:
    """One rank's file, read: its header and its rows, each a dict, in the order of their ``n``."""

    path: Path
    header: dict[str, Any]
    rows: tuple[dict[str, Any], ...]

    @property
    def rank(self) -> int:
        return int(self.header["rank"])


def read_file(path: Path) -> RankFile:
    """Read a rank's file, also of a run that goes on or died.

    Raises:
        ConfigError: it is no recording.
    """
    rows: list[dict[str, Any]] = []
    try:
        for line in _lines(path):
            row = json.loads(line)
            (check_row if rows else check_header)(row)
            rows.append(row)
        if not rows:
            raise ValueError("it is empty")
    except OSError as error:
        raise ConfigError(
            "FS914",
            f"read_recordings: {printable(path)} cannot be read ({error.strerror}). Pass folders "
            "that fsdp2.record wrote.",
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            "FS914",
            f"read_recordings: expected {printable(path)} to be a recording of format {FORMAT}, "
            f"found something else in line {len(rows) + 1} ({printable(error)}). Pass folders that "
            "this version of fsdp2.record wrote.",
        ) from error
    header, *rows = rows
    ended = {row["n"] for row in rows if row["kind"] == "wait"}
    rows = [row for row in rows if row["kind"] != "waiting" or row["n"] not in ended]
    rows.sort(key=lambda row: row["n"])
    return RankFile(path, header, tuple(rows))


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file; what is behind the last newline is nothing, or half a line.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: a line never ends.
    """
    with open_regular(path) as file:
        if is_hollow(os.fstat(file.fileno())):
            raise ValueError("it is mostly holes")
        while (line := file.readline(LINE_NBYTES)).endswith(b"\n"):
            yield line
        if len(line) == LINE_NBYTES:
            raise ValueError("a line never ends")


def files_in(folders: Sequence[Path]) -> list[Path]:
    """Return the ranks' files in folders, or those that are named themselves.

    Raises:
        ConfigError: there is none.
    """
    found: list[Path] = []
    for folder in folders:
        inside = sorted(folder.glob("rank*.jsonl")) if folder.is_dir() else [folder]
        if not inside:
            raise ConfigError(
                "FS914",
                f"read_recordings: found no rank*.jsonl in {folder}. Pass the folder that "
                "fsdp2.record was given.",
            )
        found += inside
    return list(dict.fromkeys(found))


def write_beside(path: Path, text: str, inputs: Sequence[Path], who: str) -> None:
    """Write a file, whole or not at all, and never in the place of a recording.

    Raises:
        ConfigError: it is one of the recordings, or cannot be written.
    """
    if any(path.exists() and path.samefile(one) for one in inputs):
        raise ConfigError(
            "FS915",
            f"{who}: expected path to be a new file, found {path}, which is what was recorded. "
            "Pass another name.",
        )
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(
            "FS915",
            f"{who}: {path} cannot be written ({error}). Pass a name in a folder that is there.",
        ) from error

"""Format, writing and reading of a rank's file of JSON lines: a header, then rows.

[Note: file contents after a crash]
Lines are buffered. They are written when a step ends, when the buffer is full, and before the host
blocks in a wait, because writing costs no time at that point. The last line before a wait is of
kind ``waiting``, so the file of a hanging rank ends with the collective that the rank waits for. A
crash can truncate only the last line. Readers skip a truncated line.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from fsdp2._core.base.errors import ConfigError
from fsdp2._core.base.names import printable
from fsdp2._core.base.regular_files import is_hollow, open_regular
from fsdp2._core.base.warn import warn
from fsdp2._tools.pages.page import write_whole
from fsdp2._tools.record.steps import COLLECTIVES, RecordedStep

LINE_NBYTES = 64 << 20
"""Maximum size of a line in bytes. Headers are long, because they name all units."""
MANY = 1024
"""Maximum number of buffered lines."""
WAITS_FOR = ("wait_for_unshard", "wait_for_reduce")
EVENTS = ("unshard", "reshard", "reduce", "prefetch", "adopt", "recover", *WAITS_FOR)
"""Kinds of rows that record engine events; ``kind`` and ``nbytes`` are those of the event."""

FORMAT = 1
MOST = 1 << 62
"""Upper bound on every number in a recording, so that sums stay finite."""
MOST_RANKS = 1 << 20

# The format of headers and rows. A file is validated once, before its values are used.

Check = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < MOST


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_time(value: Any) -> bool:
    return value is None or _is_int(value)


def _within(low: int, high: int) -> Check:
    return lambda value: type(value) is int and low <= value < high


def _one_of(*values: Any) -> Check:
    return lambda value: type(value) is type(values[0]) and value in values


def _list_of(check: Check) -> Check:
    return lambda value: type(value) is list and all(map(check, value))


_is_int, _is_count, _is_rank = _within(1 - MOST, MOST), _within(0, MOST), _within(0, MOST_RANKS)
HEADER: Mapping[str, Check] = {
    "kind": _one_of("header"),
    "format": _one_of(FORMAT),
    "rank": _is_rank,
    "world_size": _is_count,
    **dict.fromkeys(("host", "fsdp2", "torch", "model"), _is_text),
    "epoch_ns": _is_int,
    "axes": _list_of(_list_of(_is_rank)),
    "groups": _list_of(lambda value: type(value) is dict),
}
GROUP: Mapping[str, Check] = {
    "name": _is_text,
    "dtypes": _list_of(_is_text),
    "mesh": lambda value: _list_of(_is_count)(value) and len(value) == 2,
    **dict.fromkeys(("parameters", "numel", "shard_axis", "replicate_axis"), _is_count),
    **dict.fromkeys(("whole_nbytes", "shard_nbytes", "padding_nbytes"), _is_count),
}
ROW: Mapping[str, Check] = {
    "n": _is_int,
    **dict.fromkeys(("kind", "unit", "phase"), _is_text),
    "step": _is_count,
    **dict.fromkeys(("begin_ns", "end_ns"), _is_time),
}
EVENT: Mapping[str, Check] = {"nbytes": _is_count, "round": _is_count}
STEP: Mapping[str, Check] = {
    "failed": _one_of(True, False),
    "begin_ns": _is_int,
    "end_ns": _is_int,
    **{one.name: _is_number for one in fields(RecordedStep) if one.name != "number"},
}
WAIT: Mapping[str, Check] = {"for": _one_of(*COLLECTIVES), "by": _is_text}
MEMORY: Mapping[str, Check] = {"gathered_nbytes": _is_int, "communication_nbytes": _is_int}
IF_THERE: Mapping[str, Check] = {
    "allocated_nbytes": _is_int,
    "host_ns": _is_int,
    "prefetch": _one_of("hit", "late", "none"),
    "collective": _is_text,
}


def check_header(header: Any) -> None:
    _require(header, HEADER)
    for group in header["groups"]:
        _require(group, GROUP)
        if max(group["shard_axis"], group["replicate_axis"]) >= len(header["axes"]):
            raise ValueError("a group is on an axis that does not exist")


def check_row(row: Any) -> None:
    _require(row, ROW)
    if row["kind"] == "step":
        _require(row, STEP)
        return
    _require(row, EVENT)
    if row["kind"] in ("wait", "waiting"):
        _require(row, WAIT)
    if "communication_nbytes" in row:
        _require(row, MEMORY)
    _require(row, {name: check for name, check in IF_THERE.items() if name in row})


def _require(found: Any, form: Mapping[str, Check]) -> None:
    if type(found) is not dict:
        raise ValueError("a line is not a JSON object")
    for name, check in form.items():
        if name not in found:
            raise ValueError(f"{name} is missing")
        if not check(found[name]):
            raise ValueError(f"{name} is invalid")


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


class Writer:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[str] = []
        self._lock = threading.Lock()  # on a device, backward runs in a separate thread
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # unbuffered: a forked process (a data loader) would write Python's buffer again
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        except FileExistsError as error:
            raise ConfigError(
                "FS913",
                "record: expected path to be a folder without a recording of this rank, found "
                f"{path.name} in {path.parent}. Pass a new folder, or move that file away.",
            ) from error
        except OSError as error:
            raise ConfigError(
                "FS913",
                f"record: {path} cannot be created ({error}). Pass a writable folder.",
            ) from error
        self.is_broken = False

    def add(self, line: str) -> None:
        self._lines.append(line)
        if len(self._lines) >= MANY:
            self.flush()

    def flush(self) -> None:
        """Pass all lines to the operating system, so that they outlive this process."""
        with self._lock:
            lines, self._lines = self._lines, []
            if not lines or self.is_broken:
                return
            data = memoryview("".join(lines).encode())
            try:
                while data:
                    data = data[os.write(self._file, data) :]
            except OSError as error:  # do not raise on one rank: other ranks would wait
                self.is_broken = True
                warn(
                    "FS919",
                    f"fsdp2.record: {self.path} can no longer be written to ({error}); later "
                    "rows are not recorded. The run continues.",
                    RuntimeWarning,
                )

    def close(self) -> None:
        self.flush()
        os.close(self._file)


@dataclass(frozen=True)
class RankFile:
    """One rank's parsed file: its header and its rows, each a dict, in the order of their ``n``."""

    path: Path
    header: dict[str, Any]
    rows: tuple[dict[str, Any], ...]

    @property
    def rank(self) -> int:
        return int(self.header["rank"])

    @cached_property
    def steps(self) -> tuple[dict[str, Any], ...]:
        return tuple(row for row in self.rows if row["kind"] == "step" and not row["failed"])


def read_file(path: Path) -> RankFile:
    """Read the file of a running, ended or dead rank. Raise ConfigError for other files."""
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
    """Yield the lines of a file, except a truncated last line. Raise OSError if the file cannot be
    read or is not a regular file, and ValueError if a line is too long."""
    with open_regular(path) as file:
        if is_hollow(os.fstat(file.fileno())):
            raise ValueError("it is a sparse file")
        while (line := file.readline(LINE_NBYTES)).endswith(b"\n"):
            yield line
        if len(line) == LINE_NBYTES:
            raise ValueError("a line is too long")


def files_in(folders: Sequence[Path]) -> list[Path]:
    """Return the given files and the files in folders. Raise ConfigError if a folder has none."""
    found: list[Path] = []
    for folder in folders:
        inside = sorted(folder.glob("rank*.jsonl")) if folder.is_dir() else [folder]
        if not inside:
            raise ConfigError(
                "FS914",
                f"read_recordings: found no rank*.jsonl in {folder}. Pass the folder that was "
                "passed to fsdp2.record.",
            )
        found += inside
    return list(dict.fromkeys(found))


def write_beside(path: Path, text: str, inputs: Sequence[Path], who: str) -> None:
    """Write a file atomically. Raise ConfigError if the file is an input or cannot be written."""
    if any(path.exists() and path.samefile(one) for one in inputs):
        raise ConfigError(
            "FS915",
            f"{who}: expected path to be a new file, found {path}, which is one of the recorded "
            "files. Pass another name.",
        )
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(
            "FS915",
            f"{who}: {path} cannot be written ({error}). Pass a name in an existing folder.",
        ) from error

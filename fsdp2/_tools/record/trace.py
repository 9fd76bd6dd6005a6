"""Traces for Perfetto and chrome://tracing, from recordings and torch.profiler's traces.

A rank is shown as a process, with a memory counter and one thread each for steps, compute, waits,
gathers, reductions and engine (events without duration). A profiler's processes follow all ranks.

Source: "Trace Event Format", the document that Perfetto's importer follows;
``baseTimeNanoseconds``, which torch.profiler writes, is the origin of ``ts`` (microseconds).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fsdp2._core.base.errors import ConfigError
from fsdp2._core.base.names import printable
from fsdp2._core.base.regular_files import read_regular
from fsdp2._tools.pages.content import COMPUTE, GATHER, REDUCE, Span
from fsdp2._tools.record.rows import EVENTS, MOST, MOST_RANKS, RankFile
from fsdp2._tools.record.time_line import has_times, pieces_of, shown

Time = Callable[[int, int], float]
"""Maps a rank and a time (ns since the epoch, on the rank's clock) to microseconds of the trace."""
At = Callable[[float], float]
"""Maps nanoseconds in the rows of one rank to microseconds of the trace."""

STEPS, ENGINE, WAITS = "steps", "engine", "waits"
THREADS = (STEPS, COMPUTE, WAITS, GATHER, REDUCE, ENGINE)
LANES_OF_ONE = 100
"""Number of threads reserved for each lane: spans in a lane may overlap."""
PROFILE_NBYTES = 4 << 30
TIMES = 200
"""Maximum growth factor of a decompressed profile; a trace grows by a factor of about 30."""
FOREIGN = MOST_RANKS
"""The lowest process number for profilers; the process number of a rank is lower."""


def events_of(file: RankFile, time: Time) -> Iterator[dict[str, Any]]:
    rank, epoch = file.rank, file.header["epoch_ns"]

    def at(time_ns: float) -> float:
        return time(rank, epoch + int(time_ns))

    yield _named("process_name", rank, 0, f"rank {rank}: fsdp2")
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    used = {}
    for piece, thread in _threads(pieces_of(file.rows)):
        used[thread] = piece.lane if not piece.cause else WAITS
        about = {"bytes": piece.nbytes, "cause": piece.cause, "note": piece.note}
        about = {name: value for name, value in about.items() if value}
        yield _complete(piece.name, rank, thread, at(piece.begin), at(piece.end), about)
    for row in file.rows:
        yield from _others(row, rank, at)
    for thread, name in {**used, _thread(STEPS): STEPS, _thread(ENGINE): ENGINE}.items():
        yield _named("thread_name", rank, thread, name)


def _thread(lane: str) -> int:
    return LANES_OF_ONE * (THREADS.index(lane) + 1)


def _threads(pieces: list[Span]) -> Iterator[tuple[Span, int]]:
    """Yield each span with a thread index; spans with the same index do not overlap."""
    ends: dict[str, list[float]] = {}
    for piece in sorted(pieces, key=lambda one: one.begin):
        lane = WAITS if piece.cause else piece.lane
        taken = ends.setdefault(lane, [])
        place = next((i for i, end in enumerate(taken) if end <= piece.begin), len(taken))
        taken[place : place + 1] = [piece.end]
        yield piece, _thread(lane) + place


def _others(row: dict[str, Any], rank: int, at: At) -> Iterator[dict[str, Any]]:
    """Yield events for rows that are not pieces of a lane: steps, events, memory."""
    kind, when = row["kind"], row.get("host_ns", row["begin_ns"])
    if kind in ("step", "pass") and has_times(row):
        name = f"step {row['step']}" if kind == "step" else f"{row['phase']} {shown(row['unit'])}"
        yield _complete(name, rank, _thread(STEPS), at(row["begin_ns"]), at(row["end_ns"]), {})
    elif kind in EVENTS and has_times(row):
        name, about = (
            f"{kind} {shown(row['unit'])}",
            {"bytes": row["nbytes"], "phase": row["phase"]},
        )
        event = _event("i", name, rank, _thread(ENGINE), about)
        yield {**event, "s": "t", "cat": "fsdp2", "ts": at(when)}
    if "communication_nbytes" in row and row["begin_ns"] is not None:
        memory = {"gathered": row["gathered_nbytes"], "communication": row["communication_nbytes"]}
        if "allocated_nbytes" in row:
            memory["allocated"] = row["allocated_nbytes"]
        yield {**_event("C", "memory", rank, 0, memory), "ts": at(when)}


def _event(
    kind: str,
    name: str,
    pid: int,
    thread: int,
    about: dict[str, Any],
) -> dict[str, Any]:
    return {"ph": kind, "name": name, "pid": pid, "tid": thread, "args": about}


def _named(what: str, pid: int, thread: int, name: str) -> dict[str, Any]:
    return _event("M", what, pid, thread, {"name": name})


def _complete(
    name: str,
    pid: int,
    thread: int,
    begin: float,
    end: float,
    about: dict[str, Any],
) -> dict[str, Any]:
    event = _event("X", name, pid, thread, about)
    return {**event, "cat": "fsdp2", "ts": begin, "dur": max(end - begin, 0.0)}


def read_profile(path: Path) -> dict[str, Any]:
    """Read a trace that torch.profiler exported, compressed or not. Raise ConfigError for any other
    file, and for a trace of a torch version that does not record the base time."""
    try:
        data = read_regular(path, PROFILE_NBYTES)
        found = json.loads(_unpacked(data) if data[:2] == b"\x1f\x8b" else data)
        _check(found)
    except (OSError, ValueError, KeyError, RecursionError, OverflowError, zlib.error) as error:
        raise ConfigError(
            "FS917",
            f"trace: expected profiles exported by torch.profiler, found {printable(path)} "
            f"({type(error).__name__}: {printable(error)}). Pass files written by "
            "export_chrome_trace.",
        ) from error
    return found  # type: ignore[no-any-return]  # a dict, or the check above raised


def _unpacked(data: bytes) -> bytes:
    """Decompress gzip data to at most ``TIMES`` times its size plus 64 MiB."""
    machine = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    most = TIMES * len(data) + (64 << 20)
    found = machine.decompress(data, most)
    if machine.unconsumed_tail:
        raise ValueError(f"it decompresses to more than {most} bytes")
    if not machine.eof:
        raise ValueError("it is truncated")
    return found


def _check(profile: Any) -> None:
    """Raise ValueError if this is not a profile, or has an event that ``merged`` cannot handle."""
    if type(profile) is not dict or type(profile.get("traceEvents")) is not list:
        raise ValueError("traceEvents is not a list")
    base = profile.get("baseTimeNanoseconds")
    if not isinstance(base, int | str) or abs(int(base)) >= MOST:
        raise ValueError("baseTimeNanoseconds is not a time")
    info = profile.get("distributedInfo")
    if isinstance(info, dict) and type(info.get("rank", 0)) is not int:
        raise ValueError("rank is not a number")
    for event in profile["traceEvents"]:
        if not isinstance(event, dict) or "ph" not in event:
            continue
        if isinstance(event.get("pid"), list | dict) or isinstance(event.get("id"), list | dict):
            raise ValueError("an event has no process")
        if not isinstance(event.get("args", {}), dict):
            raise ValueError("an event has invalid args")
        time = event.get("ts", 0)
        if not isinstance(time, str | int | float) or not abs(float(time)) < MOST / 1e3:
            raise ValueError("an event has no time")


def rank_of_profile(profile: Mapping[str, Any]) -> int | None:
    info = profile.get("distributedInfo")
    return int(info["rank"]) if isinstance(info, Mapping) and "rank" in info else None


def merged(profile: Mapping[str, Any], rank: int, time: Time) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank's profile, with new process numbers and times of the trace."""
    base = int(profile["baseTimeNanoseconds"])
    numbers: dict[Any, int] = {}
    for event in profile["traceEvents"]:
        if not isinstance(event, dict) or "ph" not in event:
            continue
        changed = dict(event)
        pid = event.get("pid")
        changed["pid"] = numbers.setdefault(pid, FOREIGN * (rank + 1) + len(numbers))
        if "ts" in event:
            changed["ts"] = time(rank, base + round(float(event["ts"]) * 1e3))
        if "id" in event:
            changed["id"] = _own_id(event["id"], rank)
        if event["ph"] == "M" and event.get("name") == "process_name":
            name = event.get("args", {}).get("name", pid)
            changed["args"] = {"name": f"rank {rank}: {name} (torch.profiler)"}
        if event["ph"] == "M" and event.get("name") == "process_sort_index":
            changed["args"] = {"sort_index": FOREIGN * (rank + 1)}
        yield changed


def _own_id(given: Any, rank: int) -> Any:
    """Return a flow id that no other rank has; numeric ids remain numbers."""
    return given + ((rank + 1) << 40) if isinstance(given, int) else f"{rank}.{given}"

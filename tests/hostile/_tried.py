"""One load in a process of its own: what came of it, in which time, with how much memory.

The process is forked from one that has imported torch, gets a limit of memory above what it has,
and is killed when its time is up. So a load may hang, crash or take all memory, and is reported.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import fsdp2

LIMIT_S = 20.0
ROOM_NBYTES = 1 << 30

REFUSED, BARE, HANGS, CRASHES = "refused", "bare error", "hangs", "crashes"


@dataclass(frozen=True)
class Outcome:
    """``what``: what the function returned, or one of the four above. ``nbytes``: how much more
    memory the process had at its peak than before."""

    what: str
    text: str
    seconds: float
    nbytes: int


def tried(
    load: Callable[[], str], *, limit_s: float = LIMIT_S, room_nbytes: int = ROOM_NBYTES
) -> Outcome:
    """Call a function that loads something, and says what came of it."""
    reads, writes = os.pipe()
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reads)
        with contextlib.suppress(BaseException):
            os.write(writes, json.dumps(_in_child(load, room_nbytes)).encode())
        os._exit(0)
    os.close(writes)
    try:
        told = _read_until(reads, begin + limit_s)
        if told is None:
            os.kill(child, signal.SIGKILL)
    finally:
        os.close(reads)
        _, status = os.waitpid(child, 0)
    seconds = time.monotonic() - begin
    if told is None:
        return Outcome(HANGS, f"after {limit_s:.0f} s", seconds, 0)
    if not told:
        return Outcome(CRASHES, f"status {status}", seconds, 0)
    return Outcome(**json.loads(told))


def _read_until(reads: int, deadline: float) -> bytes | None:
    found = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reads], [], [], left)[0]:
            return None
        part = os.read(reads, 1 << 16)
        if not part:
            return found
        found += part


def _in_child(load: Callable[[], str], room_nbytes: int) -> dict[str, object]:
    limit_memory(room_nbytes)
    return outcome_of(load)


def limit_memory(room_nbytes: int) -> None:
    """Let this process have no more than so much above what it has; it prints nothing any more."""
    torch.set_num_threads(1)  # threads of the parent are not in this process
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    most = _of_status("VmSize") + room_nbytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def outcome_of(load: Callable[[], str]) -> dict[str, object]:
    """Call a function that loads something, and return the fields of an ``Outcome``."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, begin = _of_status("VmRSS"), time.monotonic()
    what, text = REFUSED, ""
    try:
        what = load()
    except fsdp2.FSDPError as error:
        text = str(error)
    except SystemExit as error:  # of a command, which has printed what is wrong
        what, text = (REFUSED if error.code == 2 else BARE), f"SystemExit: {error.code}"
    except BaseException as error:
        what = BARE
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
    seconds = time.monotonic() - begin
    nbytes = max(0, _of_status("VmHWM") - before)
    return {"what": what, "text": text[:2000], "seconds": seconds, "nbytes": nbytes}


def _of_status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise LookupError(name)

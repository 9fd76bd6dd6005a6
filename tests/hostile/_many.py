"""Many changes of one file, each loaded in a process with a limit of memory and of time.

One process goes through them; if it dies or hangs, the next one goes on behind the change that did
it. Memory is the peak of each load by itself.
"""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import torch

from tests.hostile._kinds import CHANGED, SILENT, Case
from tests.hostile._tried import (
    BARE,
    CRASHES,
    HANGS,
    LIMIT_S,
    ROOM_NBYTES,
    Outcome,
    limit_memory,
    outcome_of,
)

MOST_NBYTES = 256 << 20
"""A load of a file of some kilobytes may take this much more memory, and no more."""


def tried_many(
    make: Callable[[Path], Case], folder: Path, seeds: Sequence[int]
) -> dict[int, Outcome]:
    """Return what came of each change, by its seed."""
    found: dict[int, Outcome] = {}
    left = [*seeds]
    while left:
        found |= dict(_of_one_process(make, folder / f"from{left[0]}" / "saved", left))
        if left[0] not in found:
            error = folder / f"from{left[0]}" / "error"
            raise RuntimeError(error.read_text() if error.exists() else "no change was tried")
        left = [seed for seed in left if seed not in found]
    return found


def _of_one_process(
    make: Callable[[Path], Case], folder: Path, seeds: Sequence[int]
) -> Iterator[tuple[int, Outcome]]:
    folder.parent.mkdir(parents=True)
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        with os.fdopen(writes, "w") as told:
            try:
                _in_child(make, folder, seeds, told)
            except BaseException:
                Path(folder.parent, "error").write_text(traceback.format_exc())
        os._exit(0)
    os.close(writes)
    begun: int | None = None
    how = CRASHES
    try:
        for line in _lines(reads):
            if line is None:
                how = HANGS
                os.kill(child, signal.SIGKILL)
                break
            seed, outcome = json.loads(line)
            begun = seed if outcome is None else None
            if outcome is not None:
                yield seed, Outcome(**outcome)
    finally:
        os.close(reads)
        os.waitpid(child, 0)
    if begun is not None:
        yield begun, Outcome(how, "", LIMIT_S, 0)


def _lines(reads: int) -> Iterator[bytes | None]:
    """Yield lines as they come; None if none comes in time."""
    rest = b""
    while True:
        if not select.select([reads], [], [], 3 * LIMIT_S)[0]:
            yield None
        part = os.read(reads, 1 << 16)
        if not part:
            return
        *lines, rest = (rest + part).split(b"\n")
        yield from lines


class TooLongError(BaseException):
    """A load took longer than it may: no error that anybody catches."""


def _in_child(
    make: Callable[[Path], Case], folder: Path, seeds: Sequence[int], told: IO[str]
) -> None:
    def stop(number: int, frame: object) -> None:
        raise TooLongError

    torch.set_num_threads(1)  # threads of a pool that was in use do not survive a fork
    case = make(folder)
    limit_memory(ROOM_NBYTES)
    signal.signal(signal.SIGALRM, stop)
    for seed in seeds:
        case.apply(seed)
        print(json.dumps([seed, None]), file=told, flush=True)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        found = outcome_of(case.read)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps([seed, found]), file=told, flush=True)


def faults_of(found: dict[int, Outcome]) -> dict[int, Outcome]:
    """Return what must not come of a load."""
    wrong = (BARE, HANGS, CRASHES, CHANGED, SILENT)
    return {
        seed: one for seed, one in found.items() if one.what in wrong or one.nbytes > MOST_NBYTES
    }


def table_of(kind: str, found: dict[int, Outcome]) -> str:
    """Return one row: how often what came of it, and the time and memory that it took."""
    counts = Counter(one.what for one in found.values())
    seconds = sorted(one.seconds for one in found.values())
    mib = max(one.nbytes for one in found.values()) / (1 << 20)
    what = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    return (
        f"| {kind} | {len(found)} | {what} | {statistics.median(seconds) * 1e3:.1f} ms | "
        f"{seconds[-1]:.2f} s | {mib:.0f} MiB |"
    )

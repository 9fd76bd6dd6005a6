"""One run with accidents, and whether it ended as one without.

[Note: what is equal]
Steps are compared with those of a run that had no accident and made each step on as many ranks:
where the accidents took ranks away, it was stopped there and went on with fewer. So all bits must
be equal. How far the losses are from those of a run that kept its ranks is told, too.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from dataclasses import dataclass
from pathlib import Path

from tests.accidents._accidents import KINDS, MACHINE, Trial
from tests.accidents._job import STEPS, Job, Line

LIMIT_S = 300.0
NEAR = 1e-5
"""Relative: how far a loss may be from that of a run on more ranks, which rounds elsewhere."""


@dataclass(frozen=True)
class Segment:
    """Steps that were made on so many ranks, up to the last one."""

    ranks: int
    last: int


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes:
        seconds: from each accident to the next step; None if no step came after it.
        fault: what is wrong; nothing if all is well.
        difference: of losses, from a run that kept its ranks; relative, the largest.
    """

    trial: Trial
    seconds: list[float | None]
    segments: tuple[Segment, ...]
    fault: str
    difference: float

    def rows(self) -> list[str]:
        ranks = " then ".join(str(segment.ranks) for segment in self.segments)
        ends = self.fault or ("equal" if not self.difference else f"{self.difference:.0e}")
        cells = zip(self.trial.accidents, self.seconds, strict=True)
        return [
            f"| {self.trial.seed} | {ranks} | {accident.kind} | {accident.moment} | "
            f"{'no step was left' if seconds is None else f'{seconds:.1f}'} | {ends} |"
            for accident, seconds in cells
        ]


def tried(trial: Trial, folder: Path) -> Outcome:
    """Run it, and compare."""
    job = Job(folder / f"trial{trial.seed}", nodes=2, nproc=trial.nproc)
    try:
        seconds = _strike_all(job, trial)
        statuses = job.wait(LIMIT_S)
    finally:
        job.end()
    is_machine_gone = any(accident.kind == MACHINE for accident in trial.accidents)
    fault = ""
    if None in statuses:
        fault = f"did not end within {LIMIT_S:.0f} s"
    elif any(statuses[: 1 if is_machine_gone else 2]):
        fault = f"statuses {statuses}"
    made = {line.step: line for line in job.lines()}
    segments = _segments(made)
    if not fault and [*sorted(made)] != [*range(1, STEPS + 1)]:
        fault = f"made steps {sorted(made)}"
    if fault:
        return Outcome(trial, seconds, segments, fault, float("nan"))
    same = _without_accidents(folder, trial.nproc, segments)
    kept = _without_accidents(folder, trial.nproc, (Segment(2 * trial.nproc, STEPS),))
    wrong = [step for step in made if made[step].loss != same[step]]
    difference = max(abs(made[step].loss / kept[step] - 1) for step in made)
    if wrong:
        fault = f"{len(wrong)} losses differ, first that of step {min(wrong)}"
    elif difference > NEAR:
        fault = f"losses are {difference:.0e} from those on {2 * trial.nproc} ranks"
    return Outcome(trial, seconds, segments, fault, difference)


def _strike_all(job: Job, trial: Trial) -> list[float | None]:
    """Let accidents happen; return the seconds from each one to the next step."""
    rng = random.Random(trial.seed)
    seconds: list[float | None] = [None] * len(trial.accidents)
    struck: dict[int, float] = {}  # those that no step has followed yet
    old: list[int] = []
    for number, accident in enumerate(trial.accidents):
        if accident.step is not None:
            job.wait_for_step(accident.step, LIMIT_S)
        elif not struck:
            job.wait_for_workers(LIMIT_S)
        time.sleep(accident.seconds)
        old = job.wait_for_workers(LIMIT_S)
        struck[number] = time.monotonic()
        KINDS[accident.kind](job, rng)
        following = trial.accidents[number + 1 :]
        if not following or following[0].step is not None:
            found = job.next_step(old, time.monotonic() + LIMIT_S)
            for each, begun in struck.items():
                seconds[each] = None if found is None else found - begun
            struck = {}
    return seconds


def _segments(made: dict[int, Line]) -> tuple[Segment, ...]:
    found = []
    for ranks, steps in itertools.groupby(sorted(made), key=lambda step: made[step].ranks):
        found.append(Segment(ranks, max(steps)))
    return tuple(found)


@functools.cache
def _without_accidents(folder: Path, nproc: int, segments: tuple[Segment, ...]) -> dict[int, float]:
    """Return the losses of a run that was stopped on purpose where the number of ranks changes."""
    name = "-".join(f"{segment.ranks}to{segment.last}" for segment in segments)
    losses: dict[int, float] = {}
    for segment in segments:
        place = folder / f"calm-{nproc}-{name}"
        job = Job(place, nodes=segment.ranks // nproc, nproc=nproc, stop_at=segment.last)
        try:
            statuses = job.wait(LIMIT_S)
        finally:
            job.end()
        if any(statuses):
            raise RuntimeError(f"a run without accidents ended with {statuses}: see {place}")
        losses = {line.step: line.loss for line in job.lines()}
    return losses

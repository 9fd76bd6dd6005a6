"""Search for programs that fail: Hypothesis draws and shrinks, ranks run, failures are told apart.

A defect is known by its signature: the kind of op, and what differs or where it was raised. Each
has an exception type of its own, so that Hypothesis shrinks each to a program of its own.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from unittest import SkipTest

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import Flaky

from tests.fuzz._body import AT, MARK, OTHER_RANK
from tests.fuzz._draw import programs
from tests.fuzz._draw_models import Pinned
from tests.fuzz._program import Program
from tests.kit.meshes import DEVICE
from tests.kit.pool import RankPool, _Run
from tests.kit.rank import PRELOADED, Request

DATABASE = Path(__file__).parent.parent.parent / ".hypothesis" / "fuzz"
LIMIT_S = 60.0
GONE = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out", "Connection")


@dataclass(frozen=True)
class Found:
    """A program that fails, and what the ranks said."""

    signature: str
    program: Program
    report: str


class Verdict(NamedTuple):
    """What came of a program: nothing if all was right."""

    found: Found | None = None
    refused: str = ""  # the code of an error that the program expects


class Ranks:
    """Rank processes that run programs. A rank that hangs or dies is replaced."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        os.environ[PRELOADED] = "tests.fuzz._body"
        self._run = _Run(notes_reach=False, patience=1.0)
        self._pool = RankPool(self._run)
        self._limit_s = limit_s

    def run(self, program: Program) -> Found | None:
        """Run a program; return None if all is right, or refused as the program expects."""
        return self.run_all([program])[0].found

    def run_all(self, programs: Sequence[Program]) -> list[Verdict]:
        """Run programs for one number of ranks, in one body as far as none fails."""
        found: list[Verdict] = []
        while len(found) < len(programs):
            rest = programs[len(found) :]
            together = list(itertools.takewhile(lambda program: not program.leaves_world, rest))
            found += self._run_some(together or rest[:1])
        return found

    def _run_some(self, programs: Sequence[Program]) -> list[Verdict]:
        """Run the first of these programs, and as many as the ranks are fit for."""
        setup = programs[0].setup
        if DEVICE != "cpu" and any(program.setup.tensor > 1 for program in programs):
            # Gloo has none of the collectives that DTensor needs there.
            return [Verdict()] * len(programs)
        outcome = self._pool.run(
            Request(
                name="fuzz",
                module="tests.fuzz._body",
                qualname="run_programs",
                kwargs={"programs": tuple(programs)},
                world_size=setup.ranks,
                limit_s=self._limit_s,
                with_process_group=True,
                shares_world=not programs[0].leaves_world,
                device=DEVICE,
            )
        )
        told = [reply.text for reply in outcome.replies]
        if outcome.kind == "skipped":
            return verdicts(programs, [json.loads(text) for text in told])
        index, before = place_of_failure(outcome.text)
        report = re.sub(rf"{AT} \d+ \[.*\]\n?", "", outcome.text)  # which is about other programs
        failed = Verdict(Found(signature_of(report), programs[index], report))
        return [*verdicts(programs, [before]), *[Verdict()] * (index - len(before)), failed]

    def close(self) -> None:
        self._pool.close()
        self._run.close()


def verdicts(programs: Sequence[Program], told: Sequence[list[str]]) -> list[Verdict]:
    """Judge by what each rank told of each program."""
    found = []
    for program, texts in zip(programs, zip(*told, strict=True), strict=False):
        report = "\n".join(text for text in texts if text)
        if any(MARK in text or text == OTHER_RANK for text in texts):
            found.append(Verdict(Found(signature_of(report), program, report)))
        else:
            found.append(Verdict(refused=texts[0]))
    return found


def place_of_failure(report: str) -> tuple[int, list[str]]:
    """Return which program of a body failed, and what a rank told of those before it."""
    told = re.search(rf"{AT} (\d+) (\[.*\])$", report, re.MULTILINE)
    if told is not None:
        return int(told[1]), json.loads(told[2])
    places = re.findall(rf"{AT} (\d+)$", report, re.MULTILINE)
    return max(map(int, places), default=0), []


def signature_of(report: str) -> str:
    """Return what tells this failure from others: of the rank that failed first, if that shows."""
    told = re.findall(rf"{re.escape(MARK)} \| (.*?) \| ", report)
    first = [t for t in told if not any(word in t for word in ("DistBackendError", "RuntimeError"))]
    if not told or ("still running" in report and not first):
        return "hangs" if "still running" in report else f"dies: {_last_words(report)}"
    return (first or told)[0]


def _last_words(report: str) -> str:
    lines = [line for line in report.splitlines() if re.search(r"Error|Fatal|abort|fault", line)]
    return re.sub(r"\d+", "N", lines[-1])[:120] if lines else "without a word"


@functools.cache
def _failure_type(signature: str) -> type[AssertionError]:
    return type("ProgramFails", (AssertionError,), {"signature": signature})


def draw(world_size: int, seed: int, count: int) -> list[Program]:
    """Return programs that depend on the arguments (and the version of Hypothesis) alone."""
    return [draw_one(world_size, f"{seed}:{index}") for index in range(count)]


# Each program has a seed of its own: of one seed Hypothesis draws variants of few programs. The
# first that it draws of any seed is the simplest there is.
ONE = settings(
    max_examples=2,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
    print_blob=False,
    report_multiple_bugs=False,
)


def draw_one(world_size: int, key: str, pinned: Pinned = ()) -> Program:
    found: list[Program] = []

    @seeded(key)
    @ONE
    @given(programs(world_size, pinned))
    def note(program: Program) -> None:
        found.append(program)

    note()
    return found[-1]


@dataclass
class Search:
    """What one run of the fuzzer did so far."""

    ranks: Ranks
    is_shrinking: bool = True
    until_first: bool = False
    pinned: Pinned = ()
    batch: int = 20
    examples: int = 0
    shrink_s: float = 90.0
    found: dict[str, Found] = field(default_factory=dict)
    again: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    flaky: list[str] = field(default_factory=list)
    _reused: set[int] = field(default_factory=set)  # numbers of ranks

    def round(self, world_size: int, seed: int, examples: int, deadline: float) -> None:
        """Run this many programs of a seed. What was found before is only counted."""
        if world_size not in self._reused:
            self._reused.add(world_size)
            self._shrink(world_size, "", Phase.reuse)
        for first in range(0, examples, self.batch):
            if time.monotonic() > deadline or (self.until_first and self.found):
                return
            keys = [f"{seed}:{n}" for n in range(first, min(first + self.batch, examples))]
            drawn = [draw_one(world_size, key, self.pinned) for key in keys]
            for key, verdict in zip(keys, self.ranks.run_all(drawn), strict=True):
                self.examples += 1
                if verdict.refused:
                    self.refused[verdict.refused] += 1
                if verdict.found is not None:
                    self._note(world_size, key, verdict.found)
                    if self.until_first:
                        return

    def _note(self, world_size: int, key: str, found: Found) -> None:
        if found.signature in self.found:
            self.again[found.signature] += 1
            return
        say(f"after {self.examples} programs, seed {key}: {found.signature}")
        self.found[found.signature] = found
        if self.is_shrinking:
            alone = self.ranks.run(found.program)
            if alone is None:
                self.flaky.append(f"{found.signature}: passes alone")
            else:
                self._shrink(world_size, key, Phase.generate, Phase.shrink)
        found = self.found[found.signature]
        say(f"\n{found.signature}\n{found.program}\n{_shorten(found.report)}\n")

    def _shrink(self, world_size: int, key: str, *phases: Phase) -> None:
        """Run one drawn program and what it shrinks to, or those that failed in earlier runs."""
        failed: dict[Program, Found] = {}
        stop = time.monotonic() + self.shrink_s

        @seeded(key)
        @settings(
            parent=ONE,
            database=DirectoryBasedExampleDatabase(DATABASE / f"ranks-{world_size}"),
            phases=phases,
        )
        @given(programs(world_size, self.pinned))
        def trial(program: Program) -> None:
            if program not in failed and time.monotonic() > stop:
                return  # what failed before fails again, so that Hypothesis ends as it should
            failure = failed.get(program) or self.ranks.run(program)
            if failure is None:
                return
            failed[program] = failure
            best = self.found.get(failure.signature)
            if best is None or len(str(program)) <= len(str(best.program)):
                self.found[failure.signature] = failure
            raise _failure_type(failure.signature)(failure.signature)

        try:
            trial()
        except SkipTest:  # nothing is kept of earlier runs
            return
        except Flaky as error:
            self.flaky.append(str(error).splitlines()[0])
        except Exception:  # one failure as it is, or a group of several
            if not failed:
                raise


def say(text: str) -> None:
    print(text, flush=True)


def _shorten(report: str) -> str:
    """Return the lines of a report that say what happened."""
    lines = report.splitlines()
    at = next((i for i, line in enumerate(lines) if MARK in line), None)
    kept = lines[:12] if at is None else lines[at : at + 8]
    return "\n".join(f"    {line[:300]}" for line in kept)

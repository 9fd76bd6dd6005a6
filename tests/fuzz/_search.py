"""Search for programs that fail: Hypothesis draws and shrinks, ranks run, failures are told apart.

A defect is known by its signature: the kind of op, and what differs or where it was raised. Each
has an exception type of its own, so that Hypothesis shrinks each to a program of its own.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import Flaky

from tests._meshes import DEVICE
from tests._pool import RankPool, _Run
from tests._rank import PRELOADED, Request
from tests.fuzz._body import MARK
from tests.fuzz._draw import programs
from tests.fuzz._program import Program

DATABASE = Path(__file__).parent.parent.parent / ".hypothesis" / "fuzz"
LIMIT_S = 60.0
GONE = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out", "Connection")


@dataclass(frozen=True)
class Found:
    """A program that fails, and what the ranks said."""

    signature: str
    program: Program
    report: str


class Ranks:
    """Rank processes that run programs. A rank that hangs or dies is replaced."""

    def __init__(self, limit_s: float = LIMIT_S) -> None:
        os.environ[PRELOADED] = "tests.fuzz._body"
        self._run = _Run(notes_reach=False, patience=1.0)
        self._pool = RankPool(self._run)
        self._limit_s = limit_s

    def run(self, program: Program) -> Found | None:
        """Run a program; return None if all is right."""
        if DEVICE != "cpu" and program.setup.tensor > 1:
            return None  # gloo has none of the collectives that DTensor needs there
        outcome = self._pool.run(
            Request(
                name="fuzz",
                module="tests.fuzz._body",
                qualname="run_program",
                kwargs={"program": program},
                world_size=program.setup.ranks,
                limit_s=self._limit_s,
                with_process_group=True,
                shares_world=not program.leaves_world,
                device=DEVICE,
            )
        )
        if outcome.kind == "passed":
            return None
        told = [reply.text for reply in outcome.replies if reply.text]
        report = outcome.text if outcome.kind == "failed" else "\n".join(told)
        return Found(signature_of(report), program, report)

    def close(self) -> None:
        self._pool.close()
        self._run.close()


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
    found: list[Program] = []

    @seeded(seed)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(programs(world_size))
    def note(program: Program) -> None:
        found.append(program)

    note()
    return found


@dataclass
class Search:
    """What one run of the fuzzer did so far."""

    ranks: Ranks
    is_shrinking: bool = True
    until_first: bool = False
    examples: int = 0
    shrink_s: float = 90.0
    found: dict[str, Found] = field(default_factory=dict)
    again: Counter[str] = field(default_factory=Counter)
    flaky: list[str] = field(default_factory=list)

    def round(self, world_size: int, seed: int, examples: int, deadline: float) -> None:
        """Draw this many programs from a seed. What earlier rounds found is only counted."""
        known = set(self.found)
        failed: dict[Program, Found] = {}
        stop_shrinking = float("inf")
        phases = [Phase.reuse, Phase.generate, *[Phase.shrink] * self.is_shrinking]

        @seeded(seed)
        @settings(
            max_examples=examples,
            database=DirectoryBasedExampleDatabase(DATABASE / f"ranks-{world_size}"),
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=phases,
            print_blob=False,
            report_multiple_bugs=not self.until_first,
        )
        @given(programs(world_size))
        def trial(program: Program) -> None:
            nonlocal stop_shrinking
            now = time.monotonic()
            if program not in failed and now > (stop_shrinking if failed else deadline):
                return  # what failed before fails again, so that Hypothesis ends as it should
            failure = failed.get(program) or self._run(program, is_new=not failed)
            if failure is None:
                return
            if failure.signature in known:
                self.again[failure.signature] += 1
                return
            if not failed:
                stop_shrinking = now + self.shrink_s
            failed[program] = failure
            if failure.signature not in self.found:
                say(f"after {self.examples} examples: {failure.signature}; shrinking")
            best = self.found.get(failure.signature)
            if best is None or len(str(program)) <= len(str(best.program)):
                self.found[failure.signature] = failure
            raise _failure_type(failure.signature)(failure.signature)

        try:
            trial()
        except Flaky as error:
            self.flaky.append(str(error).splitlines()[0])
        except Exception:  # one failure as it is, or a group of several
            if not failed:
                raise
        for signature in {failure.signature for failure in failed.values()}:
            found = self.found[signature]
            say(f"\n{signature}\n{found.program}\n{_shorten(found.report)}\n")

    def _run(self, program: Program, is_new: bool) -> Found | None:
        self.examples += is_new
        return self.ranks.run(program)


def say(text: str) -> None:
    print(text, flush=True)


def _shorten(report: str) -> str:
    """Return the lines of a report that say what happened."""
    lines = report.splitlines()
    at = next((i for i, line in enumerate(lines) if MARK in line), None)
    kept = lines[:12] if at is None else lines[at : at + 8]
    return "\n".join(f"    {line[:300]}" for line in kept)

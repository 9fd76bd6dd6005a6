"""Plant faults in copies of the package and say which of them the tests find: `scripts/mutants`.

A fault (`tests/lab/faults.txt`) is one change of a function. Each gets a copy of the repository.
First the one test runs there that found it last (`tests/lab/detectors.json`). If that passes, the
tests run that are about what breaks, until one fails. Both need no map. A fault that they let pass
meets the tests that enter its function, those first that have most to do with the file for their
time; then those that reach the file; and then those that a trace hook cannot see through: compiled
models, and programs that a test starts itself. What is left has survived.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.lab.faults import FAULTS, Fault
from tests.lab.plant import Package, Planted

ROOT = Path(__file__).parents[2]
SUITES = {
    "default": ["--suite=default"],
    "pool": ["--suite=pool", "-m", "not ecosystem and not gpu"],
}
# What a trace hook does not see: graphs, and processes that a test starts itself.
BEHIND_A_COMPILER = ("tests/behaviour/test_traced.py",)
STARTS_PROGRAMS = ("tests/test_",)
LOOKS_FOR_FAULTS = (
    "tests/scripts/test_faults.py"  # fails in every copy: the fault stands there already
)
DETECTORS = "tests/lab/detectors.json"  # which test found a fault last
LIMIT_S = 1800.0  # of one run of pytest for one fault
_SAVING = threading.Lock()
BAD_USAGE, NOTHING_SELECTED = 4, 5  # pytest's status


@dataclass(frozen=True)
class Verdict:
    """What became of a fault: the test that failed first, or how many passed."""

    fault: str
    file: str
    found_by: str | None
    ran: int
    seconds: float

    def __add__(self, other: Verdict) -> Verdict:
        return replace(
            other,
            found_by=self.found_by or other.found_by,
            ran=self.ran + other.ran,
            seconds=round(self.seconds + other.seconds, 1),
        )


@dataclass(frozen=True)
class Reached:
    """The map that `pytest --reach` writes: each test's seconds and the functions it enters."""

    seconds: dict[str, float]
    entered: dict[str, frozenset[str]]
    unknown: frozenset[str]  # tests of which the map says nothing

    @classmethod
    def read(cls, path: Path, tests: Iterable[str]) -> Reached:
        """Return the map for these tests.

        The map may be of another commit or suite: a test that it lacks enters what the other
        variants of its function do, and one without any is unknown.
        """
        rows = json.loads(path.read_text())
        variants: dict[str, list[str]] = defaultdict(list)
        for test in rows:
            variants[_function(test)].append(test)
        known = {t: [t] if t in rows else variants[_function(t)] for t in tests}
        return cls(
            {t: max((rows[k]["seconds"] for k in like), default=60.0) for t, like in known.items()},
            {
                t: frozenset().union(*(rows[k]["entered"] for k in like))
                for t, like in known.items()
            },
            frozenset(t for t, like in known.items() if not like),
        )

    def rounds(self, fault: Fault, package: Package, tried: Iterable[str]) -> list[list[str]]:
        """Return the other tests in the order to try them; none stands in two rounds."""
        planted = package.plant(fault)
        functions = functions_of(planted, package)
        file = planted.file.removeprefix("fsdp2/") + ":"
        seen = set(tried)
        rounds = []
        for belongs in (
            lambda test: not functions.isdisjoint(self.entered[test]),
            lambda test: any(f.startswith(file) for f in self.entered[test]),
            lambda test: test.startswith(BEHIND_A_COMPILER + STARTS_PROGRAMS),
            # what runs at import is for every test
            lambda test: not functions or test in self.unknown,
        ):
            found = [test for test in self.entered if test not in seen and belongs(test)]
            seen.update(found)
            rounds.append(sorted(found, key=lambda t: self._worth(t, file), reverse=True))
        return rounds

    def _worth(self, test: str, file: str) -> float:
        """Return how much a test has to do with a file, for its time.

        A function that few tests enter says more than one that all do.
        """
        rare = sum(1 / self.count[f] for f in self.entered[test] if f.startswith(file))
        return rare / (self.seconds[test] + 0.2)

    @cached_property
    def count(self) -> Counter[str]:
        """How many tests enter each function."""
        return Counter(f for entered in self.entered.values() for f in entered)


def functions_of(planted: Planted, package: Package) -> set[str]:
    """Return the innermost function around what a fault changes, as the map writes it."""
    around = [
        scope.node
        for scopes in package.file(planted.file).scopes.values()
        for scope in scopes
        if isinstance(scope.node, ast.FunctionDef | ast.AsyncFunctionDef)
        and scope.node.lineno <= planted.first
        and planted.last <= (scope.node.end_lineno or 0)
    ]
    if not around:
        return set()
    innermost = max(around, key=lambda node: node.lineno)
    starts = [innermost.lineno, *(decorator.lineno for decorator in innermost.decorator_list)]
    return {f"{planted.file.removeprefix('fsdp2/')}:{min(starts)}"}


class Copy:
    """A copy of the repository in which faults are planted one after the other."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        self.package = Package(folder)
        tracked = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for name in filter(None, tracked.split("\0")):
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)

    def test(self, fault: Fault, rounds: Sequence[Sequence[str]], suite: str) -> Verdict:
        planted = self.package.plant(fault)
        path = self.folder / planted.file
        sound = path.read_text()
        path.write_text(planted.source)
        started = time.monotonic()
        ran, found_by = 0, None
        try:
            for tests in rounds:
                if tests and found_by is None:
                    found_by = self._first_failure(tests, suite)
                    ran += len(tests)
        finally:
            path.write_text(sound)
        seconds = round(time.monotonic() - started, 1)
        return Verdict(fault.name, planted.file, found_by, ran, seconds)

    def _first_failure(self, tests: Sequence[str], suite: str) -> str | None:
        listed = self.folder / "selected.txt"
        listed.write_text("\n".join(tests))
        report = self.folder / "report.txt"
        paths = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", f"@{listed}", *SUITES[suite], "-x", "-q"),
                *("-p", "no:cacheprovider", "-rfE", "--tb=line", "--in-flight=1"),
            ],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CI": "true"},
            stdout=report.open("w"),
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
        if ended.returncode in (0, NOTHING_SELECTED):
            return None
        if ended.returncode == BAD_USAGE:
            raise RuntimeError(f"pytest did not start: {report.read_text()}")
        lines = report.read_text().splitlines()
        failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        named = [line.partition(" ")[2].partition(" - ")[0] for line in failed]
        return named[0] if named else f"pytest ended with {ended.returncode}: {lines[-1:]}"


def run(
    faults: Sequence[Fault],
    tests: Sequence[str],
    reach: Callable[[], Reached],
    first: Mapping[str, str],
    suite: str,
    jobs: int,
    root: Path,
    saved: Path | None,
) -> list[Verdict]:
    """Run all faults; `first` names the test to begin with, where one is known for a fault.

    The map is asked for only if neither that test nor those about the fault find it. Verdicts go to
    `saved` as they come. What was found according to it is not tried again.
    """
    package = Package(root)
    verdicts = {f.name: Verdict(f.name, package.plant(f).file, None, 0, 0.0) for f in faults}
    for row in _rows(saved):
        if row["fault"] in verdicts and row["found_by"]:
            verdicts[row["fault"]] = Verdict(**row)
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()

    def meet(fault: Fault, rounds: Sequence[Sequence[str]]) -> None:
        copy = copies.get()
        try:
            verdict = verdicts[fault.name] + copy.test(fault, rounds, suite)
        finally:
            copies.put(copy)
        verdicts[fault.name] = verdict
        found = verdict.found_by or f"passed {verdict.ran} tests"
        print(f"{verdict.seconds:>7.1f} s  {fault.name:<44} {found}", flush=True)
        if saved is not None:
            _save(saved, list(verdicts.values()))

    def near(fault: Fault) -> list[str]:
        files = tuple(f"tests/{name}" for name in fault.near)
        return [test for test in tests if test.startswith(files) and test != first.get(fault.name)]

    def left() -> list[Fault]:
        return [fault for fault in faults if verdicts[fault.name].found_by is None]

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(jobs) as threads:
        for _ in range(jobs):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-"))
            copies.put(Copy(root, Path(folder)))

        def meet_all(
            title: str, met: Sequence[Fault], rounds: Callable[[Fault], Sequence[Sequence[str]]]
        ) -> None:
            print(f"{len(met)} faults, {title}:", flush=True)
            list(threads.map(lambda f: meet(f, rounds(f)), met))  # raises what one of them raised

        known = [fault for fault in left() if fault.name in first]
        meet_all("what found them last", known, lambda fault: [[first[fault.name]]])
        meet_all("what is about them", left(), lambda fault: [near(fault)])
        if left():
            reached = reach()
            meet_all(
                "the rest",
                left(),
                lambda f: reached.rounds(f, package, [*near(f), first.get(f.name, "")]),
            )
    return list(verdicts.values())


def _rows(path: Path | None) -> list[dict[str, Any]]:
    """Return the verdicts of a file, as they were written."""
    return json.loads(path.read_text()) if path is not None and path.exists() else []


def _save(path: Path, verdicts: Sequence[Verdict]) -> None:
    with _SAVING:
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1))
        beside.replace(path)


def _function(test: str) -> str:
    return test.partition("[")[0]


def collect(suite: str, root: Path) -> list[str]:
    """Return the names of the suite's tests."""
    listed = subprocess.run(
        [sys.executable, "-m", "pytest", *SUITES[suite], "--collect-only", "-q"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    lines = [line for line in listed.splitlines() if "::" in line]
    return [line for line in lines if not line.startswith(LOOKS_FOR_FAULTS)]


def write_map(path: Path, suite: str, root: Path) -> None:
    """Run the suite once and note what each test enters."""
    print(f"noting which functions the {suite} tests enter", flush=True)
    subprocess.run(
        [sys.executable, "-m", "pytest", *SUITES[suite], "-q", f"--reach={path}"],
        cwd=root,
        check=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="faults to plant; all, if none is named")
    parser.add_argument("--suite", choices=SUITES, default="default")
    parser.add_argument("--map", type=Path, help="what `pytest --reach` wrote; made if missing")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository to copy")
    parser.add_argument("--save", type=Path, help="keep verdicts here, and go on from there")
    parser.add_argument("--afresh", action="store_true", help=f"begin without {DETECTORS}")
    parser.add_argument("--note", action="store_true", help=f"write what found each to {DETECTORS}")
    given = parser.parse_args()
    unknown = set(given.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}; see tests/lab/faults.txt")
    faults = [f for f in FAULTS if not given.names or f.name in given.names]
    tests = collect(given.suite, given.root)
    noted = given.root / DETECTORS
    detectors: dict[str, str] = json.loads(noted.read_text()) if noted.exists() else {}
    there = set() if given.afresh else set(tests)
    first = {fault: test for fault, test in detectors.items() if test in there}
    with tempfile.TemporaryDirectory() as folder:
        path = given.map or Path(folder) / "reach.json"

        def reach() -> Reached:
            if not path.exists():
                write_map(path, given.suite, given.root)
            return Reached.read(path, tests)

        verdicts = run(faults, tests, reach, first, given.suite, given.jobs, given.root, given.save)
    if given.note:
        detectors |= {v.fault: v.found_by for v in verdicts if v.found_by and "::" in v.found_by}
        known = {fault.name: detectors[fault.name] for fault in FAULTS if fault.name in detectors}
        noted.write_text(json.dumps(known, indent=1) + "\n")
    survived = [verdict.fault for verdict in verdicts if verdict.found_by is None]
    found = len(verdicts) - len(survived)
    print(f"{found} of {len(verdicts)} faults found by the {given.suite} tests")
    for name in survived:
        print(f"  survived: {name}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())

"""Plant faults in copies of the package and say which of them the tests find: `scripts/mutants`.

A fault (`tests/_faults.py`) is one change of a function. Each gets a copy of the repository; tests
that enter the changed function run there until one fails, those first that are about what breaks,
or have most to do with the file for their time. A fault that they let pass meets the tests that
reach its file, and then those that a trace hook cannot see through: compiled models, and programs
that a test starts itself. What is left has survived.
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
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tests._faults import FAULTS, Fault
from tests._plant import Package, Planted

ROOT = Path(__file__).parent.parent
SUITES = {"default": "not slow and not ecosystem", "slow": "slow and not ecosystem"}
# What a trace hook does not see: graphs, and processes that a test starts itself.
BEHIND_A_COMPILER = ("tests/behaviour/test_traced.py",)
STARTS_PROGRAMS = ("tests/test_",)
LOOKS_FOR_FAULTS = "tests/test_faults.py"  # fails in every copy: the fault stands there already
LIMIT_S = 1800.0  # of one run of pytest for one fault
NEAR = 3  # rounds that all faults go through before the first one meets the many others
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

    def rounds(self, fault: Fault, package: Package, first: str | None) -> list[list[str]]:
        """Return tests in the order to try them; none stands in two rounds."""
        planted = package.plant(fault)
        functions = functions_of(planted, package)
        file = planted.file.removeprefix("fsdp2/") + ":"
        near = tuple(f"tests/{name}" for name in fault.near)
        seen: set[str] = set()
        rounds = []
        for belongs in (
            lambda test: test == first,
            lambda test: test.startswith(near) and not functions.isdisjoint(self.entered[test]),
            lambda test: test.startswith(near),
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
                *(sys.executable, "-m", "pytest", f"@{listed}", "-m", SUITES[suite], "-x", "-q"),
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
        failed = [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
        return failed[0] if failed else f"pytest ended with {ended.returncode}: {lines[-1:]}"


def run(
    faults: Sequence[Fault],
    reached: Reached,
    first: Mapping[str, str],
    suite: str,
    jobs: int,
    root: Path,
    saved: Path | None,
) -> list[Verdict]:
    """Run all faults; `first` names the test to begin with, where one is known for a fault.

    Verdicts go to `saved` as they come. What was found according to it is not tried again.
    """
    package = Package(root)
    verdicts = {f.name: Verdict(f.name, package.plant(f).file, None, 0, 0.0) for f in faults}
    for row in _rows(saved):
        if row["fault"] in verdicts and row["found_by"]:
            verdicts[row["fault"]] = Verdict(**row)
    copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()

    def meet(fault: Fault, rounds: slice) -> None:
        copy = copies.get()
        try:
            chosen = reached.rounds(fault, package, first.get(fault.name))[rounds]
            verdict = verdicts[fault.name] + copy.test(fault, chosen, suite)
        finally:
            copies.put(copy)
        verdicts[fault.name] = verdict
        found = verdict.found_by or f"passed {verdict.ran} tests"
        print(f"{verdict.seconds:>7.1f} s  {fault.name:<44} {found}", flush=True)
        if saved is not None:
            _save(saved, list(verdicts.values()))

    with contextlib.ExitStack() as stack, ThreadPoolExecutor(jobs) as threads:
        for _ in range(jobs):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mutants-"))
            copies.put(Copy(root, Path(folder)))
        for title, rounds in (("what is about them", slice(NEAR)), ("the rest", slice(NEAR, None))):
            left = [fault for fault in faults if verdicts[fault.name].found_by is None]
            print(f"{len(left)} faults, {title}:", flush=True)
            list(threads.map(partial(meet, rounds=rounds), left))  # raises what one of them raised
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
        [sys.executable, "-m", "pytest", "-m", SUITES[suite], "--collect-only", "-q"],
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
        [sys.executable, "-m", "pytest", "-m", SUITES[suite], "-q", f"--reach={path}"],
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
    parser.add_argument(
        "--first", type=Path, help="verdicts of another run: what found it is tried first"
    )
    parser.add_argument("--save", type=Path, help="keep verdicts here, and go on from there")
    given = parser.parse_args()
    unknown = set(given.names) - {fault.name for fault in FAULTS}
    if unknown:
        parser.error(f"no fault is called {', '.join(sorted(unknown))}; see tests/_faults.py")
    faults = [f for f in FAULTS if not given.names or f.name in given.names]
    package = Package(given.root)
    for fault in faults:
        package.plant(fault)  # or it says what is not there
    with tempfile.TemporaryDirectory() as folder:
        reach = given.map or Path(folder) / "reach.json"
        if not reach.exists():
            write_map(reach, given.suite, given.root)
        first = {row["fault"]: row["found_by"] for row in _rows(given.first) if row["found_by"]}
        reached = Reached.read(reach, collect(given.suite, given.root))
        verdicts = run(faults, reached, first, given.suite, given.jobs, given.root, given.save)
    survived = [verdict.fault for verdict in verdicts if verdict.found_by is None]
    found = len(verdicts) - len(survived)
    print(f"{found} of {len(verdicts)} faults found by the {given.suite} tests")
    for name in survived:
        print(f"  survived: {name}")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())

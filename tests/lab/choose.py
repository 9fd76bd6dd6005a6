"""Choose the default suite: `scripts/choose` writes `tests/default.txt` and
`tests/lab/entered.json`.

What a test finds is counted in *signs*, each a thing that only tests can vouch for:

- a file of promises;
- a promise: the test's function, whatever the values of its parameters;
- a function of the package that it enters, and that function seen from the test's file: a promise
  that goes through it;
- a planted fault that it found (`tests/lab/detectors.json`).

Tests that cost next to nothing are taken first, then the tests that found faults, then always the
one that adds most for its seconds, until the budget is spent. A sign counts once. It is a greedy
cover: near enough, and the same for the same figures.
"""

from __future__ import annotations

import argparse
import ast
import heapq
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.lab.suite import DEFAULT, function_of
from tests.lab.touched import ENTERED, qualified_names
from tests.sim._faults import FAULTS

ROOT = Path(__file__).parents[2]
DETECTORS = Path(__file__).with_name("detectors.json")
BUDGET_S = 370.0
"""CPU seconds of all default tests, as measured with several tests in flight (docs/testing.md)."""
LONGEST_S = 8.0
"""A longer test is never chosen: it is for the pool."""
FREE_S = 0.02
"""A test below this is taken without a question."""
WHOLE = 0.8
"""If more of a function's variants than this share are free, all of them are taken."""
HERE = 0.5
"""What a second counts that a test waits in pytest's own process: the other tests wait with it."""
WEIGHTS = {"file": 1000.0, "promise": 20.0, "enters": 2.0, "enters from": 0.02}
"""Value of a sign. Each file has a default test, and nearly each promise."""
FEW = 25
"""A function that more tests enter than this says nothing about which of them to run first."""


@dataclass(frozen=True)
class Measured:
    """What runs of the candidates showed, by test."""

    seconds: Mapping[str, float]  # CPU, of all ranks and of what the test starts
    waits: Mapping[str, float]  # wall seconds in pytest's own process
    entered: Mapping[str, frozenset[str]]  # functions of the package, by qualified name

    @classmethod
    def read(cls, where: Path, reach: Path) -> Measured:
        """Join what `--where` and `--reach` wrote; a test must be in both."""
        seconds: dict[str, float] = defaultdict(float)
        waits: dict[str, float] = defaultdict(float)
        for test, cause, wall, cpu in json.loads(where.read_text())["rows"]:
            if cause != "wait":
                seconds[test] += cpu
            if cause == "here":
                waits[test] += wall
        rows = json.loads(reach.read_text())
        tests = rows.keys() & seconds.keys()
        name = _names()
        return cls(
            {test: seconds[test] for test in tests},
            {test: waits[test] for test in tests},
            {test: frozenset(filter(None, map(name, rows[test]["entered"]))) for test in tests},
        )

    def cost(self, test: str) -> float:
        return max(self.seconds[test], HERE * self.waits.get(test, 0.0))


def _names() -> Callable[[str], str]:
    """Return what turns `path:first line`, as `--reach` writes it, into a qualified name.

    A function without a name, and the code of a module, is an empty text.
    """

    @cache
    def functions(path: str) -> dict[int, str]:
        tree = ast.parse((ROOT / "fsdp2" / path).read_text())
        return {first: name for name, first, _ in qualified_names(tree)}

    @cache
    def name(entry: str) -> str:
        path, _, line = entry.rpartition(":")
        found = functions(path).get(int(line))
        return f"{path}::{found}" if found else ""

    return name


def variants_of(tests: Iterable[str]) -> dict[str, list[str]]:
    """Return the tests of each function, in the order of their names."""
    found: dict[str, list[str]] = defaultdict(list)
    for test in sorted(tests):
        found[function_of(test)].append(test)
    return found


def signs(measured: Measured, test: str) -> Iterable[tuple[str, ...]]:
    """Yield what a test finds."""
    file = test.partition("::")[0]
    yield ("file", file)
    yield ("promise", function_of(test))
    for function in measured.entered[test]:
        yield ("enters", function)
        yield ("enters from", function, file)


def choose(measured: Measured, forced: Iterable[str], budget_s: float) -> list[str]:
    """Return the tests of the default suite.

    Raises: ValueError if those that must be in it cost more than the budget.
    """
    found: set[tuple[str, ...]] = set()
    chosen: dict[str, None] = {}
    spent = 0.0

    def take(test: str) -> None:
        nonlocal spent
        if test not in chosen:
            chosen[test] = None
            found.update(signs(measured, test))
            spent += measured.cost(test)

    def gain(test: str) -> float:
        new = sum(WEIGHTS[sign[0]] for sign in signs(measured, test) if sign not in found)
        return new / (measured.cost(test) + FREE_S)

    for tests in variants_of(measured.seconds).values():
        free = [test for test in tests if measured.cost(test) < FREE_S]
        # Where nearly all variants are free the rest is noise. Whole functions are whole for
        # variants to come, too: a new file of the package is one of such a test.
        for test in tests if len(free) > WHOLE * len(tests) else free:
            take(test)
    for test in sorted(set(forced) & measured.seconds.keys()):
        take(test)
    if spent > budget_s:
        raise ValueError(f"tests that must be in the suite take {spent:.0f} of {budget_s:g} s")
    left = [
        (-gain(test), test)
        for test in measured.seconds
        if test not in chosen and measured.cost(test) <= LONGEST_S
    ]
    heapq.heapify(left)
    while left:
        _, test = heapq.heappop(left)
        worth = gain(test)
        if worth == 0 or spent + measured.cost(test) > budget_s:
            continue
        if left and worth < -left[0][0]:  # others have come to be worth more: look again
            heapq.heappush(left, (-worth, test))
        else:
            take(test)
    return sorted(chosen)


def lines_of(measured: Measured, chosen: Iterable[str]) -> list[str]:
    """Return the lines of `default.txt`: a function whose variants are all chosen is one line."""
    variants = variants_of(measured.seconds)
    seconds: dict[str, float] = {}
    for function, tests in variants_of(chosen).items():
        if len(tests) == len(variants[function]):
            seconds[function] = sum(measured.seconds[test] for test in tests)
        else:
            seconds.update((test, measured.seconds[test]) for test in tests)
    return [f"{seconds[name]:6.2f} {name}" for name in sorted(seconds)]


def entered_by_few(measured: Measured) -> str:
    """Return which tests enter a function of the package, in the form that `tests.lab.touched`
    reads.

    Functions that more than a few enter are left out.
    """
    found: dict[str, set[str]] = defaultdict(set)
    for test, functions in measured.entered.items():
        for function in functions:
            found[function].add(function_of(test))
    few = {name: tests for name, tests in sorted(found.items()) if len(tests) <= FEW}
    tests = sorted(set().union(*few.values()))
    numbers = {test: number for number, test in enumerate(tests)}
    lines = [
        f"{json.dumps(name)}: {sorted(numbers[test] for test in entering)}"
        for name, entering in few.items()
    ]
    return (
        f'{{"tests": {json.dumps(tests, indent=0)},\n'
        + '"entered": {\n'
        + ",\n".join(lines)
        + "\n}}\n"
    )


def finders() -> list[str]:
    """Return the tests that found planted faults: of the package, and of the order of streams."""
    found = json.loads(DETECTORS.read_text()).values() if DETECTORS.exists() else ()
    scenarios = (f"tests/sim/test_scenarios.py::test_scenario[{f.scenario}]" for f in FAULTS)
    return [*found, *scenarios]


def checks_of_the_tree(tests: Iterable[str]) -> list[str]:
    """Return the tests that read the repository: every change can break one of them."""
    folders = ("tests/scripts/", "tests/test_error_codes", "tests/test_layers", "tests/test_public")
    return [test for test in tests if test.startswith(folders)]


def measure(folder: Path) -> tuple[Path, Path]:
    """Run the candidates twice, for their seconds and for what they enter: tracing costs time."""
    where, reach = folder / "where.json", folder / "reach.json"
    for option in (f"--where={where}", f"--reach={reach}"):
        command = [sys.executable, "-m", "pytest", "--suite=short", "-q", option]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status not in (0, 1):  # 1: a test failed, as that of a new file without a default test
            raise SystemExit(f"pytest ended with {status}: {' '.join(command)}")
    return where, reach


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/choose", description=__doc__)
    parser.add_argument("--where", type=Path, help="what `scripts/test --where=FILE` wrote")
    parser.add_argument("--reach", type=Path, help="what `scripts/test --reach=FILE` wrote")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="CPU seconds")
    given = parser.parse_args()
    where, reach = given.where, given.reach
    if where is None or reach is None:
        folder = ROOT / "build" / "choose"
        folder.mkdir(parents=True, exist_ok=True)
        where, reach = measure(folder)
    measured = Measured.read(where, reach)
    missing = sorted(set(finders()) - measured.seconds.keys())
    print(f"found faults, and are slow or gone: {', '.join(missing) or 'none'}")
    forced = [*finders(), *checks_of_the_tree(measured.seconds)]
    chosen = choose(measured, forced, given.budget)
    total = sum(measured.seconds[test] for test in chosen)
    head = [
        "# The default suite, which `scripts/choose` writes: CPU seconds, and a test. A name",
        "# without values in brackets stands for all variants that are not slow. What is not here",
        f"# is in the pool. {len(chosen)} of {len(measured.seconds)} tests, {total:.0f} CPU s of "
        f"{sum(measured.seconds.values()):.0f}; the budget is {given.budget:g}.",
    ]
    DEFAULT.write_text("\n".join([*head, *lines_of(measured, chosen)]) + "\n")
    ENTERED.write_text(entered_by_few(measured))
    print("\n".join(head))
    return 0


if __name__ == "__main__":
    sys.exit(main())

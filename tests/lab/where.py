"""Where the seconds of a run go: `scripts/test --where` prints a table by cause and one by file.

Each rank tells its pool how long the phases of a body took (`Stopwatch`); what pytest's own process
does is measured here, around collection and around each test. Two figures for each: wall seconds,
of the slowest rank where there are several, and CPU seconds of all processes together.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import pytest

CAUSES = {
    "collect": "import and collect the test files",
    "here": "tests in pytest's own process, and fixtures",
    "start": "a fresh rank process: fork, first lines",
    "hand over": "a body travels to a rank that is there",
    "meet": "store, process group, gloo connections",
    "import": "modules that a body is the first to need",
    "body": "the test itself on its ranks",
    "garbage": "collections after a body",
    "leave": "wait for the other ranks, destroy groups",
    "forget": "caches emptied after a body",
    "wait": "pytest waits for an outcome; not added to a file's",
}


def cpu_s() -> float:
    """Return the CPU seconds of this process, its threads and the children it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


class Stopwatch:
    """Wall and CPU seconds by cause, of one process; `lap` books what passed since the last one."""

    def __init__(self, since: float | None = None) -> None:
        self.spent: dict[str, tuple[float, float]] = {}
        self._wall = time.monotonic() if since is None else since
        self._cpu = cpu_s()

    def lap(self, cause: str) -> None:
        wall, cpu = time.monotonic(), cpu_s()
        before = self.spent.get(cause, (0.0, 0.0))
        self.spent[cause] = (before[0] + wall - self._wall, before[1] + cpu - self._cpu)
        self._wall, self._cpu = wall, cpu


Row = tuple[str, str, float, float]  # test, cause, wall seconds, CPU seconds


def rows_of_body(test: str, ranks: Iterable[dict[str, tuple[float, float]]]) -> list[Row]:
    """Return a row a cause: wall seconds of the slowest rank, CPU seconds of all."""
    wall: dict[str, float] = defaultdict(float)
    cpu: dict[str, float] = defaultdict(float)
    for spent in ranks:
        for cause, (wall_s, cpu_seconds) in spent.items():
            wall[cause] = max(wall[cause], wall_s)
            cpu[cause] += cpu_seconds
    return [(test, cause, wall[cause], cpu[cause]) for cause in wall]


class Where:
    """The plugin: gathers rows, and prints the tables."""

    option = "where"

    def __init__(self, config: pytest.Config) -> None:
        self._path = config.getoption("where")
        self._started = time.monotonic()
        self._watch = Stopwatch()
        self._rows: list[Row] = []

    def add_body(self, test: str, outcome: Any) -> None:
        self._rows += rows_of_body(test, [reply.spent for reply in outcome.replies])

    def pytest_collection_finish(self) -> None:
        self._watch.lap("collect")
        self._rows += [("", cause, *spent) for cause, spent in self._watch.spent.items()]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        watch, known = Stopwatch(), len(self._rows)
        result = yield
        cause = "here" if len(self._rows) == known else "wait"
        watch.lap(cause)
        self._rows.append((item.nodeid, cause, *watch.spent[cause]))
        return result

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        wall_s = time.monotonic() - self._started
        terminalreporter.section("where the seconds went")
        for line in tables(self._rows, wall_s):
            terminalreporter.write_line(line)
        if self._path != "-":
            Path(self._path).write_text(json.dumps({"wall_s": wall_s, "rows": self._rows}))


def tables(rows: list[Row], wall_s: float) -> list[str]:
    """Return the lines of both tables."""
    causes: dict[str, list[float]] = {cause: [0.0, 0.0, 0] for cause in CAUSES}
    files: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    tests: dict[str, set[str]] = defaultdict(set)
    for test, cause, wall, cpu in rows:
        for index, value in enumerate((wall, cpu, 1)):
            causes[cause][index] += value
        if test and cause != "wait":
            file = test.partition("::")[0]
            tests[file].add(test)
            files[file]["wall"] += wall
            files[file]["cpu"] += cpu
            files[file][cause] += wall
    cpu = sum(total[1] for total in causes.values())
    lines = [
        f"{wall_s:.0f} s, {cpu:.0f} CPU s, {cpu / wall_s:.2f} cores busy",
        "",
        f"{'cause':<10} {'times':>6} {'wall s':>8} {'CPU s':>8}",
    ]
    for cause, (wall, spent, count) in causes.items():
        lines.append(f"{cause:<10} {count:>6.0f} {wall:>8.1f} {spent:>8.1f}  {CAUSES[cause]}")
    shown = ["start", "meet", "import", "body", "garbage", "leave", "here"]
    lines += [
        "",
        f"{'wall s by file':<48} {'tests':>6} {'all':>7} {'CPU':>7}"
        + "".join(f"{c:>8}" for c in shown),
    ]
    for file, spent in sorted(files.items(), key=lambda pair: -pair[1]["wall"]):
        lines.append(
            f"{file:<48} {len(tests[file]):>6} {spent['wall']:>7.1f} {spent['cpu']:>7.1f}"
            + "".join(f"{spent[c]:>8.1f}" for c in shown)
        )
    return lines

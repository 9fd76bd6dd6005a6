"""Draw tests until a clock says so: `--draw COMMIT --until TIME --since COMMIT`, as `.ci/run` does.

The order comes from `tests.lab.ring`, with what the change touches first (`tests.lab.touched`). The
tests run in batches of neighbours: within a batch those that need no ranks come first, so that
ranks work beside them. When the time is over no test begins, and what did not begin is left out. A
test that is left out is no failure; a test that fails is.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.kit.ahead import AheadOfTests, is_on_ranks
from tests.lab.ring import ring_order, runs_until_all, runs_until_one, touched_first
from tests.lab.touched import touched_tests

BATCH = 40
"""Tests that are in flight together. More would end a run further from the ring's order."""


class Draw:
    """The plugin: orders the tests, and leaves out what there was no time for."""

    option = "draw"

    def __init__(self, config: pytest.Config, ahead: AheadOfTests) -> None:
        self._commit: str = config.getoption("draw")
        self._since: str | None = config.getoption("since")
        self._ahead = ahead
        self._ahead.until = self._until = config.getoption("until")
        self._touched: set[str] = set()
        self._drawn = 0
        self.left_out: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        by_name = {item.nodeid: item for item in items}
        self._drawn = len(items)
        order = ring_order(by_name, self._commit)
        if self._since is not None:
            self._touched = touched_tests(order, config.rootpath, self._since)
            order = touched_first(order, self._touched)
        batches = [order[at : at + BATCH] for at in range(0, len(order), BATCH)]
        self._ahead.batches = {test: n for n, batch in enumerate(batches) for test in batch}
        items[:] = [
            item
            for batch in batches
            for item in sorted((by_name[test] for test in batch), key=is_on_ranks)
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        # Skipped and not passed over: pytest then takes down the fixtures of the test before.
        if time.time() > self._until and self._ahead.gives_up(item.nodeid):
            self.left_out.add(item.nodeid)
            pytest.skip("left out")

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        is_left_out = report.when == "setup" and report.nodeid in self.left_out
        return ("left out", "", "LEFT OUT") if is_left_out else None

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        ran = self._drawn - len(self.left_out)
        share = ran / (self._drawn or 1)
        terminalreporter.section("what was drawn")
        terminalreporter.write_line(
            f"{ran} tests ran, {len(self.left_out)} were left out: {share:.0%}, from the place "
            f"on the ring of {self._commit[:12]}; {len(self._touched)} that the change touches "
            "came first"
        )
        terminalreporter.write_line(
            f"with this share, runs of CI until a given test has run: {runs_until_one(share):.1f} "
            f"expected; until every test has: {runs_until_all(share):.1f}"
        )


class Tally:
    """The plugin: writes what became of the tests as one line, for the table of `.ci/run`."""

    option = "tally"

    def __init__(self, config: pytest.Config, draw: Draw | None) -> None:
        self._path = Path(config.getoption("tally"))
        self._draw = draw

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        counts = {
            word: len(terminalreporter.stats.get(word, []))
            for word in ("passed", "failed", "error", "skipped", "xfailed")
        }
        ran = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
        left_out = 0 if self._draw is None else len(self._draw.left_out)
        self._path.write_text(f"{ran or 'none'}|{left_out} left out\n")

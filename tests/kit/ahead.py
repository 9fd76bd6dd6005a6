"""The plugin that has bodies run on ranks ahead of the tests that they belong to.

pytest runs one test at a time, and a test on ranks mostly waits. So when the tests are known, all
bodies that need nothing but their parameters go to the pools, and tests of pytest's own process go
first: while they run, the ranks work. A test then finds the outcome of its body there, or waits.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import pytest

from tests.kit import sim as simulator
from tests.kit.pool import Pools
from tests.kit.rank import PRELOADED, Request
from tests.kit.sim._build import build

GIVEN = {"run_on_ranks", "request", "world_size"}  # what `ranks` adds to a body's own arguments


class AheadOfTests:
    """Owns the pools of a run."""

    def __init__(self, config: pytest.Config, hear: Iterable[Any]) -> None:
        in_flight = config.getoption("in_flight")
        self._looks_ahead = in_flight > 1  # one at a time means in the order of the tests
        self._pools = Pools(in_flight, config.getoption("reach") is not None)
        self.until = math.inf  # when bodies stop to begin ahead of their tests, by `time.time`
        self.batches: Mapping[str, int] = {}  # of tests that are drawn; bodies run batch by batch
        self._hear = list(hear)  # plugins that want each outcome
        self._wall_s: dict[str, float] = {}

    def runs(self, node: pytest.Item) -> Callable[[Request], None]:
        """Return what a test calls with its request; it fails or skips as the ranks did."""

        def run(request: Request) -> None:
            outcome = self._pools.outcome(request)
            self._wall_s[node.nodeid] = self._wall_s.get(node.nodeid, 0.0) + outcome.wall_s
            for plugin in self._hear:
                plugin.add_body(node.nodeid, outcome)
            if outcome.kind == "skipped":
                pytest.skip(outcome.text)
            if outcome.kind != "passed":
                pytest.fail(outcome.text, pytrace=False)

        return run

    def gives_up(self, test: str) -> bool:
        """Say if the body of a test has not begun, which then it never does."""
        return self._pools.gives_up(test)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=is_on_ranks)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if self._looks_ahead and not session.config.option.collectonly:
            requests = list(_requests(session.items))
            modules = {request.module for request in requests}
            if any(_is_simulated(item) for item in session.items):
                modules.add("tests.sim")  # which the parent of the ranks looks for
                with contextlib.suppress(simulator.NoCompilerError):  # its ranks say so, and skip
                    build()  # now: it takes a minute, which no body has
            asked_for = filter(None, [os.environ.get(PRELOADED)])
            os.environ[PRELOADED] = ",".join([*asked_for, *sorted(modules)])
            self._pools.take(requests, self.batches, self.until)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "call":  # what the ranks took, not what was left to wait for
            report.duration = self._wall_s.get(item.nodeid, report.duration)
        return report

    def pytest_sessionfinish(self) -> None:
        self._pools.close()


def _is_simulated(item: pytest.Item) -> bool:
    return getattr(item, "module", None) is not None and item.module.__name__.startswith(
        "tests.sim."
    )


def is_on_ranks(item: pytest.Item) -> bool:
    return "run_on_ranks" in getattr(item, "fixturenames", ())


def _requests(items: Iterable[pytest.Item]) -> Iterator[Request]:
    """Return the requests of those tests that need no fixture of their own."""
    for item in items:
        ask = getattr(getattr(item, "obj", None), "ask", None)
        if ask is None or any(item.iter_markers("skip")) or any(item.iter_markers("skipif")):
            continue
        given: dict[str, Any] = item.callspec.params  # type: ignore[attr-defined]  # of a function
        if GIVEN.issuperset(set(item.fixturenames) - set(given)):  # type: ignore[attr-defined]
            yield ask(item.nodeid, given)

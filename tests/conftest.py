"""What the whole suite shares: bodies on ranks, which tests run, what they cost and reach."""

from __future__ import annotations

import math
import os

import pytest

from tests.kit.ahead import AheadOfTests
from tests.kit.pool import RunOnRanks
from tests.lab.draw import Draw, Tally
from tests.lab.reach import Reach
from tests.lab.suite import SUITES, Suite
from tests.lab.where import Where


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--suite",
        choices=SUITES,
        help="which tests: " + "; ".join(f"{name}: {what}" for name, what in SUITES.items()),
    )
    parser.addoption(
        "--draw", metavar="COMMIT", help="run the tests in the order in which CI draws them"
    )
    parser.addoption(
        "--until",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="with --draw: begin no test after this time, in seconds since 1970",
    )
    parser.addoption(
        "--since", metavar="COMMIT", help="with --draw: what changed after this commit comes first"
    )
    parser.addoption("--tally", metavar="FILE", help="write what became of the tests in one line")
    parser.addoption(
        "--in-flight",
        type=int,
        default=max(2, (os.cpu_count() or 2) * 3 // 2),
        metavar="N",
        help="how many bodies run on ranks at a time; 1 runs each in its test's turn",
    )
    parser.addoption(
        "--where",
        nargs="?",
        const="-",
        metavar="FILE",
        help="say in the end where the seconds went, by cause and by file; FILE gets every row",
    )
    parser.addoption(
        "--reach", metavar="FILE", help="write which functions of the package each test enters"
    )


def pytest_configure(config: pytest.Config) -> None:
    for option in ("where", "reach"):  # whose next word may be a test file, and would be written
        path = config.getoption(option)
        if path not in (None, "-") and not path.endswith(".json"):
            raise pytest.UsageError(f"--{option} writes a file that ends in .json; found {path!r}")
    observers = [kind(config) for kind in (Where, Reach) if config.getoption(kind.option)]
    ahead = AheadOfTests(config, observers)
    draw = Draw(config, ahead) if config.getoption(Draw.option) else None
    tally = Tally(config, draw) if config.getoption(Tally.option) else None
    for plugin in (Suite(config), *observers, ahead, draw, tally):
        if plugin is not None:
            config.pluginmanager.register(plugin)


@pytest.fixture
def run_on_ranks(request: pytest.FixtureRequest) -> RunOnRanks:
    """What runs a body on ranks; `tests.kit.pool.ranks` is how a test uses it."""
    (ahead,) = (
        p for p in request.config.pluginmanager.get_plugins() if isinstance(p, AheadOfTests)
    )
    return ahead.runs(request.node)

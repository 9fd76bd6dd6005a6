"""What the whole suite shares: bodies on ranks, and options that say what tests cost and reach."""

from __future__ import annotations

import os

import pytest

from tests._ahead import AheadOfTests
from tests._pool import RunOnRanks
from tests._reach import Reach
from tests._where import Where


def pytest_addoption(parser: pytest.Parser) -> None:
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
    observers = [kind(config) for kind in (Where, Reach) if config.getoption(kind.option)]
    for observer in (*observers, AheadOfTests(config, observers)):
        config.pluginmanager.register(observer)


@pytest.fixture
def run_on_ranks(request: pytest.FixtureRequest) -> RunOnRanks:
    """What runs a body on ranks; `tests._pool.ranks` is how a test uses it."""
    (ahead,) = (
        p for p in request.config.pluginmanager.get_plugins() if isinstance(p, AheadOfTests)
    )
    return ahead.runs(request.node)

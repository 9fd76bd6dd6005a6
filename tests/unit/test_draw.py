"""What a clock cuts is left out and no failure, wherever in a file it cuts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = """\
import pytest

@pytest.fixture(scope="module", autouse=True)
def of_the_file():
    yield

@pytest.mark.parametrize("n", range(5))
def test_{name}(n):
    assert not (n == 4 and "{name}" == "{fails}")
"""
# Time is over after every other test, and is not after the next one: as if bodies had begun ahead.
CLOCK = """\
import itertools, math

ENDS = itertools.cycle([0.0, math.inf])

def pytest_runtest_logfinish(nodeid):
    PLUGIN._until = next(ENDS)

def pytest_collection_finish(session):
    global PLUGIN
    plugins = session.config.pluginmanager.get_plugins()
    (PLUGIN,) = (p for p in plugins if type(p).__name__ == "Draw")
"""


def draw(folder: Path, fails: str = "") -> tuple[int, str, str]:
    """Run three files of five tests; return the status, what was printed, and the tally."""
    for name in ("one", "two", "three"):
        (folder / f"test_{name}.py").write_text(FILE.format(name=name, fails=fails))
    (folder / "conftest.py").write_text(CLOCK)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "--suite=all"]
    ended = subprocess.run(
        [*command, "--draw=ce5f91f", "--tally=tally", f"--rootdir={folder}", str(folder)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return ended.returncode, ended.stdout + ended.stderr, (folder / "tally").read_text().strip()


def test_a_run_that_is_cut_is_no_failure(tmp_path: Path) -> None:
    status, output, tally = draw(tmp_path)
    assert (status, tally) == (0, "8 passed|7 left out"), output
    assert "8 tests ran, 7 were left out: 53%" in output
    assert "until a given test has run: 1.9 expected; until every test has: 4.5" in output


def test_a_test_that_fails_is_one(tmp_path: Path) -> None:
    failed = {fails: draw(tmp_path, fails) for fails in ("one", "two", "three")}
    assert {status for status, _, _ in failed.values()} == {0, 1}  # of some the fifth was left out
    for status, output, tally in failed.values():
        assert (tally == "7 passed, 1 failed|7 left out") == (status == 1), output

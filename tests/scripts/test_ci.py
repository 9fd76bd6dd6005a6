"""`.ci/run` spends a budget in order: what it cuts is no failure, and what fails is one.

Its stages are shell scripts here that end as they are told to, so that only the clock is tried.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAGES = ("browser", "lint", "test", "bench", "docs", "ecosystem")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of one commit whose scripts print their arguments, and do what FILE.do says."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    for name in STAGES:
        script = tmp_path / "scripts" / name
        script.write_text(f'#!/bin/sh\necho "{name}: $*"\n[ ! -e {name}.do ] || . ./{name}.do\n')
        script.chmod(0o755)
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "one")):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def run(checkout: Path, *arguments: str) -> tuple[int, str, dict[str, list[str]]]:
    """Return the status, all output, and the words of each row of the table."""
    ended = subprocess.run(
        ["bash", ".ci/run", *arguments], cwd=checkout, capture_output=True, text=True, timeout=60
    )
    output = ended.stdout + ended.stderr
    rows = output.partition("=== result ===")[2].splitlines()
    return ended.returncode, output, {r.split()[0]: r.split()[1:] for r in rows if r.split()}


def test_every_stage_runs_and_the_pool_gets_what_is_left(checkout: Path) -> None:
    status, output, table = run(checkout, "--budget", "600")
    assert status == 0, output
    assert [table[name][0] for name in ("lint", "test", "bench", "docs", "libraries", "pool")] == [
        "passed"
    ] * 6
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=checkout, text=True).strip()
    drawn = [line for line in output.splitlines() if f"--draw={commit}" in line]
    assert [line.split(":")[0] for line in drawn] == ["ecosystem", "test"]
    assert all("--suite=pool" in line and f"--since={commit}" in line for line in drawn)


def test_a_stage_that_fails_does_not_stop_the_others(checkout: Path) -> None:
    (checkout / "lint.do").write_text("exit 1")
    (checkout / "docs.do").write_text("exit 77")
    status, output, table = run(checkout, "--budget", "600")
    assert status == 1, output
    assert (table["lint"][0], table["docs"][0], table["pool"][0]) == ("failed", "skipped", "passed")


def test_a_stage_that_is_cut_is_no_failure(checkout: Path) -> None:
    (checkout / "bench.do").write_text("exec sleep 30")
    status, output, table = run(checkout, "--budget", "3")
    assert status == 0, output
    assert (table["test"][0], table["bench"][0]) == ("passed", "cut")
    assert (table["docs"][:2], table["pool"][:2]) == (["left", "out"], ["left", "out"])


def test_a_failure_in_a_stage_that_is_cut_is_one(checkout: Path) -> None:
    (checkout / "test.do").write_text("echo 'FAILED tests/test_a.py::test_a'; exec sleep 30")
    status, output, table = run(checkout, "--budget", "3")
    assert status == 1, output
    assert table["test"][0] == "failed"


def test_what_it_does_not_know_is_said(checkout: Path) -> None:
    status, output, _ = run(checkout, "--minutes", "3")
    assert status == 2
    assert "--budget SECONDS and --since COMMIT; found '--minutes'" in output

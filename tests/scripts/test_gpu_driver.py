"""The driver of `scripts/gpu`, and a rehearsal of all its stages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.__main__ import SECONDS
from benchmarks.gpu._driver import Stage, run_stages

ADD = (
    "import json, os\n"
    "add = lambda **r: print(json.dumps(r), file=open(os.environ['FSDP2_GPU_ROWS'], 'a'))\n"
)
HANGS = ADD + (
    "import subprocess, sys, time; add(what='before')\n"
    "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
    "add(pid=subprocess.Popen(sleep, start_new_session=True).pid)\n"
    "time.sleep(60)"
)


def fake(name: str, code: str, seconds: float = 1.0) -> Stage:
    return Stage(name, seconds, [sys.executable, "-S", "-c", code])


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_stages_run_in_order_each_within_its_limit(tmp_path: Path) -> None:
    """One raises, one hangs with a child in a session of its own; the rest runs, and all ends."""
    lines: list[str] = []
    written: list[Any] = []

    def say(line: str) -> None:
        lines.append(line)
        written.append(json.loads((tmp_path / "results.json").read_text())["stages"])

    stages = [
        fake("good", ADD + "add(what='x', ms=1.5); add(headline='all well')", 5.0),
        fake("raises", ADD + "add(what='y'); raise ValueError('odd')", 5.0),
        fake("wrong", ADD + "add(what='z', verdict='failed')", 5.0),
        fake("hangs", HANGS, 3.0),
        fake("absent", "import sys; print('no such card'); sys.exit(77)", 5.0),
        fake("gives_up", ADD + "import sys; add(what='w'); sys.exit(75)", 5.0),
    ]
    began = time.monotonic()
    outcomes = run_stages(stages, 36.0, tmp_path, dict(os.environ), "about", say)
    assert time.monotonic() - began < 36.0
    found = [(one.name, one.verdict) for one in outcomes]
    assert found == [
        ("good", "ok"),
        ("raises", "failed"),
        ("wrong", "failed"),
        ("hangs", "late"),
        ("absent", "skipped"),
        ("gives_up", "late"),
    ]
    assert [line.split()[:2] for line in lines] == [list(pair) for pair in found]
    assert [len(stages) for stages in written] == [1, 2, 3, 4, 5, 6]  # each at once
    assert "all well" in lines[0]
    assert "ValueError: odd" in lines[1]
    assert "no such card" in lines[4]
    assert outcomes[3].rows[0] == {"what": "before"}
    assert is_gone(outcomes[3].rows[1]["pid"])
    assert "| what | ms |\n| --- | --- |\n| x | 1.5 |" in (tmp_path / "tables.md").read_text()
    assert sorted(os.listdir(tmp_path)) == ["log.txt", "results.json", "tables.md"]


def test_rows_are_written_while_a_stage_runs_and_nothing_begins_too_late(tmp_path: Path) -> None:
    code = ADD + (
        "import time; add(what='early')\n"
        f"while 'early' not in open({str(tmp_path / 'results.json')!r}).read(): time.sleep(0.05)"
    )
    (tmp_path / "results.json").write_text("")
    stages = [fake("waits", code, 100.0), *(fake(str(n), "pass", 0.01) for n in range(3))]
    outcomes = run_stages(stages, 60.0, tmp_path, dict(os.environ), say=lambda line: None)
    assert [one.verdict for one in outcomes] == ["ok", "ok", "ok", "ok"]
    outcomes = run_stages(
        [fake("long", "import time; time.sleep(60)", 100.0), fake("no", "pass", 0.01)],
        3.0,
        tmp_path,
        dict(os.environ),
        say=lambda line: None,
    )
    assert [one.verdict for one in outcomes] == ["late", "skipped"]


@pytest.mark.slow
def test_a_rehearsal_runs_every_stage(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--out", str(tmp_path)]
    command += ["--minutes", "20"]  # stages take three times as long beside other tests
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1300)
    lines = [line.split()[:2] for line in found.stdout.splitlines()]
    assert lines == [[name, "ok"] for name in SECONDS], found.stdout + found.stderr
    assert len(os.listdir(tmp_path)) <= 8

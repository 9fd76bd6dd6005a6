"""The simulated device's clock tells what a schedule takes, and plans tell the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.kit.report import Result
from tests.kit.sim import NoCompilerError
from tests.kit.sim._build import build
from tests.lab.mutants import ROOT


def run(tmp_path: Path, *words: str) -> Result:
    """Run the benchmark in a process of its own: large kernels never run there any more."""
    try:
        build()
    except NoCompilerError as reason:
        pytest.skip(f"no simulator: {reason}")
    path = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.device.device", "--json", str(path), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return Result.read(path)


def test_delays_show_where_they_were_planted_and_plans_are_right(tmp_path: Path) -> None:
    """Ten delays; the serial link of `bench link` to 1 %; steps and peaks of plans to 2 %."""
    figures = run(tmp_path, "--check").figures
    planted = {figure.variant for figure in figures if figure.case == "planted"}
    assert len(planted) >= 10
    assert sum(figure.quantity == "step off" for figure in figures) >= 5


def test_a_step_waits_for_nothing_and_is_no_slower_than_torchs(tmp_path: Path) -> None:
    """A head that is read by its weight alone, and nodes that replicate, too."""
    found = run(
        tmp_path,
        *("--libraries", "torch,fsdp2", "--cases"),
        *("8B, 8 ranks, 4k, fused", "8B, 8 x 8 ranks"),
    )
    values = {figure.key: figure.value for figure in found.figures}
    cases = {case for case, _, _ in values}
    assert len(cases) == 2
    for case in cases:
        assert values[case, "fsdp2", "waits"] == 0
        assert values[case, "fsdp2", "step ms"] < values[case, "torch", "step ms"]

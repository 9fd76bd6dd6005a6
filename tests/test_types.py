"""Promise: a type checker sees what calls return, and finds mistakes in a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "typed" / "program.py"


def test_mypy_accepts_a_program_and_finds_its_mistakes(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--python-version=3.11"]
    command += [f"--cache-dir={tmp_path}", "--config-file=", "--follow-imports=silent", PROGRAM]
    found = subprocess.run(
        list(map(str, command)), cwd=PROGRAM.parents[2], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr

"""What every benchmark prints: where its numbers come from, a Markdown table, the same as JSON."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Origin:
    """Where a table's numbers come from."""

    command: str
    commit: str
    torch: str
    python: str

    def to_markdown(self) -> str:
        return f"`{self.command}`: torch {self.torch}, Python {self.python}, commit {self.commit}"


def find_origin(module: str) -> Origin:
    """Describe the current run of `python -m module`."""
    command = shlex.join(["python", "-m", module, *sys.argv[1:]])
    return Origin(command, _find_commit(), version("torch"), platform.python_version())


def _find_commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(REPOSITORY), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short", "HEAD")
        return commit + (" with changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def to_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: the first column left, the others right."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_json(path: Path, origin: Origin, **values: Any) -> None:
    path.write_text(json.dumps({"origin": asdict(origin), **values}, indent=2) + "\n")

"""Run stages one after the other within their minutes, and write what each finds at once.

Owns processes, limits and files. It must not import torch: a stage that breaks, hangs or dies must
not take the driver with it.

A stage is a program of its own, in a session of its own. It appends rows, one JSON object a line,
to the file that ``ROWS`` names, and ends with a status of ``VERDICTS``. Its limit is its share of
the time that is left, so what one stage leaves goes to the later ones. A process belongs to a stage
if ``ROWS`` of its environment is the stage's: at the stage's end all such processes are killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROWS, SECONDS = "FSDP2_GPU_ROWS", "FSDP2_GPU_SECONDS"
OK, FAILED, LATE, SKIPPED = "ok", "failed", "late", "skipped"
VERDICTS = {0: OK, 1: FAILED, 75: LATE, 77: SKIPPED}
POLL_S, RESERVE_S, LEAST_S = 0.1, 3.0, 1.0


@dataclass(frozen=True)
class Stage:
    """``seconds``: its weight among the others; ``command``: what runs it."""

    name: str
    seconds: float
    command: Sequence[str]


@dataclass
class Outcome:
    """What one stage found so far."""

    name: str
    verdict: str = "running"
    seconds: float = 0.0
    limit: float = 0.0
    headline: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)

    def line(self) -> str:
        return f"{self.name:<9} {self.verdict:<8} {self.seconds:6.1f} s  {self.headline}"


def run_stages(
    stages: Sequence[Stage],
    seconds: float,
    out: Path,
    environment: Mapping[str, str],
    about: str = "",
    say: Callable[[str], None] = print,
) -> list[Outcome]:
    """Run stages in order; all is over, and written, before ``seconds`` are."""
    ends = time.monotonic() + seconds - min(RESERVE_S, seconds / 10)
    out.mkdir(parents=True, exist_ok=True)
    (out / "log.txt").write_text("")
    outcomes: list[Outcome] = []
    for place, stage in enumerate(stages):
        left = ends - time.monotonic()
        outcome = Outcome(stage.name)
        outcome.limit = left * stage.seconds / sum(later.seconds for later in stages[place:])
        outcomes.append(outcome)
        if outcome.limit < LEAST_S:
            outcome.verdict, outcome.headline = SKIPPED, "no time is left"
        else:
            _run_stage(stage, outcome, out, environment, lambda: _write(out, about, outcomes))
        _write(out, about, outcomes)
        say(outcome.line())
    return outcomes


def _run_stage(
    stage: Stage,
    outcome: Outcome,
    out: Path,
    environment: Mapping[str, str],
    write: Callable[[], None],
) -> None:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        rows = Path(folder) / "rows"
        rows.touch()
        mine = {ROWS: str(rows), SECONDS: f"{outcome.limit:.1f}"}
        with (out / "log.txt").open("ab") as log:
            log.write(f"\n--- {stage.name}\n".encode())
            log.flush()
            start = log.tell()
            process = subprocess.Popen(
                stage.command,
                env={**environment, **mine},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            status = None
            try:
                while status is None and time.monotonic() - began < outcome.limit:
                    with suppress(subprocess.TimeoutExpired):
                        status = process.wait(POLL_S)
                    if _read(rows, outcome):
                        write()
            finally:
                _kill(process, str(rows))
        _read(rows, outcome)
        outcome.seconds = time.monotonic() - began
        failed = sum(row.get("verdict") == FAILED for row in outcome.rows)
        outcome.verdict = LATE if status is None else VERDICTS.get(status, FAILED)
        if outcome.verdict == OK and failed:
            outcome.verdict = FAILED
        if not outcome.headline or outcome.verdict == LATE:
            done = f"{len(outcome.rows)} rows, {failed} failed"
            outcome.headline = outcome.headline or (
                done if outcome.verdict in (OK, LATE) else _last_line(out / "log.txt", start)
            )


def _read(path: Path, outcome: Outcome) -> bool:
    """Take over whole lines that are new; say whether there were any."""
    lines = path.read_bytes().split(b"\n")[:-1]
    found = [json.loads(line) for line in lines]
    headlines = [row["headline"] for row in found if "headline" in row]
    rows = [row for row in found if "headline" not in row]
    is_new = len(rows) > len(outcome.rows)
    outcome.rows = rows
    outcome.headline = headlines[-1] if headlines else outcome.headline
    return is_new


def _last_line(path: Path, start: int) -> str:
    lines = path.read_bytes()[start:].decode(errors="replace").split("\n")
    return next((line.strip()[:120] for line in reversed(lines) if line.strip()), "said nothing")


def _kill(process: subprocess.Popen[bytes], rows: str) -> None:
    """End a stage's session, and its processes that left it, NCCL's and compilers' too."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    mark = f"{ROWS}={rows}".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in path.read_bytes().split(b"\0"):
                os.kill(int(path.parent.name), signal.SIGKILL)
    process.wait()


def _write(out: Path, about: str, outcomes: Sequence[Outcome]) -> None:
    """Write both files whole or not at all."""
    results = {"about": about, "stages": [asdict(outcome) for outcome in outcomes]}
    parts = [
        f"# What one GPU answered\n\n{about}\n",
        *(_to_markdown(outcome) for outcome in outcomes),
    ]
    for name, text in (
        ("results.json", json.dumps(results, indent=1)),
        ("tables.md", "\n".join(parts)),
    ):
        new = out / f".{name}"
        new.write_text(text + "\n")
        new.replace(out / name)


def _to_markdown(outcome: Outcome) -> str:
    parts = [
        f"## {outcome.name}\n\n{outcome.verdict}, {outcome.seconds:.0f} s: {outcome.headline}\n"
    ]
    for table in dict.fromkeys(row.get("table", "") for row in outcome.rows):
        rows = [row for row in outcome.rows if row.get("table", "") == table]
        columns = [
            name for name in dict.fromkeys(k for row in rows for k in row) if name != "table"
        ]
        lines = [columns, ["---"] * len(columns)]
        lines += [[_show(row.get(name, "")) for name in columns] for row in rows]
        text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        parts.append((f"**{table}**\n\n" if table else "") + text + "\n")
    return "\n".join(parts)


def _show(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value).replace("|", "/").replace("\n", " ")[:300]

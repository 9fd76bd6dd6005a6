"""Launch the workers of `benchmarks.step.host`, two at a time, and collect what they counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kit import callgrind
from benchmarks.kit.host_worker import Request
from benchmarks.kit.report import REPOSITORY

PARALLEL = 2
TIME_LIMIT_S = 900


@dataclass(frozen=True)
class Outcome:
    """What one worker returned, keyed by `make_label`; instructions are a whole window's."""

    request: Request
    results: dict[str, Any] = field(default_factory=dict)
    dumps: dict[str, Path] = field(default_factory=dict)
    is_foreign: bool = False
    error: str | None = None


def run_workers(requests: Sequence[Request], folder: Path) -> list[Outcome]:
    """Run each request in a process of its own; a failure becomes an `Outcome` with `error`."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    if any(request.mode == "count" for request in requests):
        environment[callgrind.SHIM_VARIABLE] = str(callgrind.build_shim(folder))

    def run(index: int) -> Outcome:
        return _run_worker(requests[index], folder / f"worker{index}", environment)

    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(run, range(len(requests))))


def _run_worker(request: Request, prefix: Path, environment: dict[str, str]) -> Outcome:
    command = [sys.executable, "-m", "benchmarks.kit.host_worker", request.to_json()]
    if request.mode == "count":
        command = callgrind.command_under_callgrind(command, prefix)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            cwd=REPOSITORY,
            timeout=TIME_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return Outcome(request, error=f"took longer than {TIME_LIMIT_S} s")
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return Outcome(request, error="\n".join(lines[-12:]) or f"exit status {done.returncode}")
    reply = json.loads(done.stdout.splitlines()[-1])
    results: dict[str, Any] = reply["results"]
    dumps: dict[str, Path] = {}
    if request.mode == "count":
        dumps = callgrind.find_dumps(prefix)
        results = {label: callgrind.read_total(dump) for label, dump in dumps.items()}
    return Outcome(request, results, dumps, reply["is_foreign"])

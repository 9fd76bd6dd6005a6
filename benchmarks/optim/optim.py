"""Host cost of an AdamW step on shards, in instructions: torch's on DTensors, and ours.

    python -m benchmarks.optim.optim

The parameters are 147 small ones in 17 groups, as rank 0 of 8 holds them, so what is counted is
hardly kernels. Instructions come from callgrind and do not depend on the machine's load. The plain
row is the plain optimizer on plain tensors of the local shapes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.kit import callgrind
from benchmarks.kit.optim_worker import LIBRARIES, MODES, make_label
from benchmarks.kit.report import REPOSITORY, Figure, Measured, gated, make_parser, run

TIME_LIMIT_S = 900
SETTINGS = ("depth", "width", "steps", "warmup", "world_size")


def measure(arguments: argparse.Namespace) -> Measured:
    settings: dict[str, Any] = {name: getattr(arguments, name) for name in SETTINGS}
    libraries = [library for library in LIBRARIES if library in arguments.libraries]
    with tempfile.TemporaryDirectory() as folder:
        totals = count(libraries, settings, Path(folder))
    figures = [
        Figure(
            mode,
            library,
            "M instructions a step",
            totals[make_label(library, mode)] / arguments.steps / 1e6,
            gated(library),
        )
        for mode in MODES
        for library in libraries
    ]
    return Measured(figures, settings)


def count(libraries: list[str], settings: dict[str, Any], folder: Path) -> dict[str, int]:
    """Run each library in a process of its own; return the instructions of each window."""
    shim = callgrind.build_shim(folder)
    environment = {
        **os.environ,
        callgrind.SHIM_VARIABLE: str(shim),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }

    def run_one(library: str) -> dict[str, int]:
        prefix = folder / library
        request = json.dumps({**settings, "libraries": [library]})
        command = [sys.executable, "-m", "benchmarks.kit.optim_worker", request]
        done = subprocess.run(
            callgrind.command_under_callgrind(command, prefix),
            capture_output=True,
            text=True,
            env=environment,
            cwd=REPOSITORY,
            timeout=TIME_LIMIT_S,
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            raise RuntimeError(f"{library} failed:\n" + "\n".join(lines[-12:]))
        dumps = callgrind.find_dumps(prefix)
        return {label: callgrind.read_total(dump) for label, dump in dumps.items()}

    with ThreadPoolExecutor(2) as pool:
        return {k: v for found in pool.map(run_one, libraries) for k, v in found.items()}


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("optim", __doc__)
    parser.add_argument("--depth", type=int, default=16, help="blocks of nine parameters")
    parser.add_argument("--width", type=int, default=16, help="of every matrix and norm")
    parser.add_argument("--steps", type=int, default=4, help="steps counted in a window")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--world-size", type=int, default=8)
    return parser


if __name__ == "__main__":
    run("optim", __doc__, measure, _parser())

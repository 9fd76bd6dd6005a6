"""Host cost of an AdamW step on shards, in instructions: torch's on DTensors, and ours.

    python -m benchmarks.optim                 the table (minutes)
    python -m benchmarks.optim --json PATH     the table, and its numbers in a file

The parameters are 147 small ones in 17 groups, as rank 0 of 8 holds them, so what is counted is
hardly kernels. Instructions come from callgrind and do not depend on the machine's load. README.md
in this folder says how to read them.
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

from benchmarks import _callgrind
from benchmarks._optim_worker import LIBRARIES, MODES, make_label
from benchmarks._report import REPOSITORY, find_origin, to_table, write_json

MODULE = "benchmarks.optim"
TIME_LIMIT_S = 900
TITLES = {
    "plain": "torch.optim.AdamW, plain tensors of the local shapes",
    "torch": "torch.optim.AdamW, DTensors of torch's FSDP2",
    "fsdp2": "fsdp2.optim.local(AdamW)",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the numbers here")
    parser.add_argument(
        "--libraries",
        type=lambda text: text.split(","),
        default=list(LIBRARIES),
        help="comma-separated, of: " + ", ".join(LIBRARIES),
    )
    parser.add_argument("--depth", type=int, default=16, help="blocks of nine parameters")
    parser.add_argument("--width", type=int, default=16, help="of every matrix and norm")
    parser.add_argument("--steps", type=int, default=4, help="steps counted in a window")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--world-size", type=int, default=8)
    arguments = parser.parse_args()
    names = ("depth", "width", "steps", "warmup", "world_size")
    settings = {name: getattr(arguments, name) for name in names}
    origin = find_origin(MODULE)
    with tempfile.TemporaryDirectory() as name:
        totals = count(arguments.libraries, settings, Path(name))
    millions = {label: total / arguments.steps / 1e6 for label, total in totals.items()}
    print(origin.to_markdown(), end="\n\n")
    print(show(millions, arguments.libraries))
    if arguments.json is not None:
        write_json(arguments.json, origin, settings=settings, instructions=millions)


def count(libraries: list[str], settings: dict[str, Any], folder: Path) -> dict[str, int]:
    """Run each library in a process of its own; return the instructions of each window."""
    shim = _callgrind.build_shim(folder)
    environment = {
        **os.environ,
        _callgrind.SHIM_VARIABLE: str(shim),
        "OMP_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
    }

    def run(library: str) -> dict[str, int]:
        prefix = folder / library
        request = json.dumps({**settings, "libraries": [library]})
        command = [sys.executable, "-m", "benchmarks._optim_worker", request]
        done = subprocess.run(
            _callgrind.command_under_callgrind(command, prefix),
            capture_output=True,
            text=True,
            env=environment,
            cwd=REPOSITORY,
            timeout=TIME_LIMIT_S,
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            raise RuntimeError(f"{library} failed:\n" + "\n".join(lines[-12:]))
        dumps = _callgrind.find_dumps(prefix)
        return {label: _callgrind.read_total(dump) for label, dump in dumps.items()}

    with ThreadPoolExecutor(2) as pool:
        return {k: v for found in pool.map(run, libraries) for k, v in found.items()}


def show(millions: dict[str, float], libraries: list[str]) -> str:
    """Return the Markdown table; instructions are in millions a step."""
    rows = [
        (TITLES[library], *(f"{millions[make_label(library, mode)]:.2f}" for mode in MODES))
        for library in libraries
    ]
    return to_table(("M instructions a step", *MODES), rows)


if __name__ == "__main__":
    main()

"""Every deterministic benchmark; with --check, against the committed results.

    scripts/bench quick             all variants, printed
    scripts/bench quick --save      all variants, kept in benchmarks/results, to be committed
    scripts/bench quick --check     the plain model and ours, compared with what is committed

A check ends with 1 if a gated figure is more than 10 % worse, and with 77 (skipped) where figures
cannot be compared: another torch, or one for a GPU. Benchmarks that depend on the interpreter's
build are left out where that differs, `host` where valgrind is missing, `device` without a C++
compiler. To accept a figure that became worse for a good reason, run --save and commit the results
with that reason.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.check.compare import TOLERANCE, compare, show
from benchmarks.kit import callgrind
from benchmarks.kit.models import OURS
from benchmarks.kit.report import REPOSITORY, RESULTS, Result, find_origin, module_of
from tests.kit.sim._build import NoCompilerError, compiler

# The longest first: two run at a time.
BENCHMARKS = ("host", "scale", "device", "peak", "link", "copies", "wire", "ops")
NEED_SAME_INTERPRETER = ("host", "scale")
PARALLEL = 2
SKIPPED = 77
TIME_LIMIT_S = 1500


@dataclass(frozen=True)
class Ended:
    """How one benchmark ended: its result as a file (if it wrote one), and what it printed."""

    name: str
    path: Path
    status: int
    output: str
    took_s: float


def main() -> int:
    parser = argparse.ArgumentParser(prog="quick", description=__doc__.split("\n")[0])
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--check", action="store_true")
    chosen.add_argument("--save", action="store_true")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(BENCHMARKS))
    arguments = parser.parse_args()
    if arguments.check and (reason := find_obstacle()):
        print(f"skipped: {reason}")
        return SKIPPED
    names = [name for name in BENCHMARKS if name in arguments.only]
    for name, reason in find_left_out(names, is_check=arguments.check).items():
        print(f"{name}: left out, {reason}")
        names.remove(name)
    with tempfile.TemporaryDirectory() as folder:
        words = ["--libraries", OURS] if arguments.check else []
        words += ["--save"] if arguments.save else []
        ended = run_all(names, words, Path(folder))
        results = {each.name: Result.read(each.path) for each in ended if each.status == 0}
    failed = [each.name for each in ended if each.status != 0]
    for each in ended:
        if not arguments.check or each.status != 0:
            print(f"\n## {each.name}\n\n{each.output}")
    print(", ".join(f"{each.name} {each.took_s:.0f} s" for each in ended))
    if arguments.check:
        failed += check(results)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return int(bool(failed))


def run_all(names: Sequence[str], words: Sequence[str], folder: Path) -> list[Ended]:
    """Run benchmarks, two at a time, each in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "5"}

    def run(name: str) -> Ended:
        path, start = folder / f"{name}.json", time.monotonic()
        command = [sys.executable, "-m", module_of(name), "--json", str(path), *words]
        try:
            done = subprocess.run(
                command,
                cwd=REPOSITORY,
                env=environment,
                text=True,
                capture_output=True,
                timeout=TIME_LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return Ended(name, path, 1, f"took longer than {TIME_LIMIT_S} s", TIME_LIMIT_S)
        output = done.stdout if done.returncode == 0 else done.stdout + done.stderr
        return Ended(name, path, done.returncode, output, time.monotonic() - start)

    with ThreadPoolExecutor(PARALLEL) as pool:
        return list(pool.map(run, names))


def find_obstacle() -> str | None:
    """Return why figures of this environment cannot be compared with those committed."""
    if torch.version.cuda is not None:
        return "this torch is built for a GPU; the committed figures are for a CPU"
    committed = [Result.read(path) for path in RESULTS.glob("*.json")]
    if not committed:
        return "there are no committed results"
    versions = {result.origin.torch.split("+")[0] for result in committed}
    if torch.__version__.split("+")[0] not in versions:
        return f"this is torch {torch.__version__}; the committed figures are for {versions}"
    return None


def find_left_out(names: Sequence[str], *, is_check: bool) -> dict[str, str]:
    """Return which benchmarks cannot run, or not be compared, and why."""
    left_out = {}
    for name in names:
        path = RESULTS / f"{name}.json"
        if name == "host" and (missing := callgrind.find_missing_tools()):
            left_out[name] = f"{' and '.join(missing)} not found"
        elif name == "device" and (reason := find_no_compiler()):
            left_out[name] = reason
        elif is_check and not path.exists():
            left_out[name] = "no committed result"
        elif is_check and name in NEED_SAME_INTERPRETER:
            committed = Result.read(path).origin.interpreter
            if committed != find_origin(name).interpreter:
                left_out[name] = f"its figures are for another interpreter ({committed})"
    return left_out


def find_no_compiler() -> str:
    """Return why the simulated device cannot be built here; empty if it can."""
    try:
        compiler()
    except NoCompilerError as reason:
        return str(reason)
    return ""


def check(results: dict[str, Result]) -> list[str]:
    """Print which gated figures changed; return the benchmarks where one became worse."""
    worse = []
    changes = []
    for name, result in results.items():
        found = compare(Result.read(RESULTS / f"{name}.json"), result)
        changes += [change for change in found if change.is_gated]
        if any(change.is_worse(TOLERANCE) for change in found):
            worse.append(name)
    print(f"\n{show(changes, TOLERANCE)}")
    return worse


if __name__ == "__main__":
    sys.exit(main())

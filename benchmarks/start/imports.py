"""CPU seconds and modules of `import fsdp2`, beside those of torch's own FSDP2.

    python -m benchmarks.start.imports

Each figure is a fresh process. It imports `torch` (`plain`), `torch` and `fully_shard` from
`torch.distributed.fsdp` (`torch`), or `torch` and `fsdp2`. CPU time is user and system time of the
whole process, which the kernel counts; rounds are interleaved, and `over torch` is the difference
within a round. `behind torch` is the CPU time of `import fsdp2` in a process that has imported
torch's own FSDP2: the same difference, with less noise. Modules are the length of `sys.modules`.
`compiled` is a package whose files Python has compiled before, as those of an installed one;
otherwise it compiles each that it imports. No figure is gated: `tests/behaviour/test_import.py`
pins the modules, and times do not repeat.
"""

from __future__ import annotations

import argparse
import compileall
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.kit.models import OURS
from benchmarks.kit.report import REPOSITORY, Figure, Measured, make_parser, run
from benchmarks.kit.rounds import rotate, spread

PROGRAMS = {
    "plain": "import torch",
    "torch": "import torch; from torch.distributed.fsdp import fully_shard",
    OURS: "import torch, fsdp2",
}
BEHIND = (
    f"{PROGRAMS['torch']}; import time; start = time.process_time(); import fsdp2; "
    "print(time.process_time() - start)"
)
COUNT = "; import sys; print(len(sys.modules))"


def measure(arguments: argparse.Namespace) -> Measured:
    figures = []
    names = [name for name in PROGRAMS if name in (*arguments.libraries, "torch")]
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / OURS
        sources = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / OURS, package, ignore=sources)
        for case in ("not compiled", "compiled"):
            if case == "compiled":
                compileall.compile_dir(package, quiet=1)
            figures += _figures_of(case, names, arguments.rounds, folder)
    return Measured(figures, {"rounds": arguments.rounds})


def _figures_of(case: str, names: list[str], rounds: int, folder: str) -> list[Figure]:
    modules = {name: int(_run(PROGRAMS[name] + COUNT, folder)) for name in names}  # warms up, too
    measured = {name: partial(_cpu_s, PROGRAMS[name], folder) for name in names}
    if OURS in names:
        measured["behind"] = lambda: float(_run(BEHIND, folder))
    found = rotate(rounds, measured)
    figures = []
    for name in names:
        differences = [a - b for a, b in zip(found[name], found["torch"], strict=True)]
        figures += [
            Figure(case, name, "modules", modules[name]),
            Figure(case, name, "modules over torch", modules[name] - modules["torch"]),
            Figure(case, name, "CPU s", *spread(found[name])),
            Figure(case, name, "CPU s over torch", *spread(differences)),
        ]
    if OURS in names:
        figures.append(Figure(case, OURS, "CPU s behind torch", *spread(found["behind"])))
    return figures


def _cpu_s(program: str, folder: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _run(program, folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def _run(program: str, folder: str) -> str:
    """Run a program with the copy in a folder, and let nothing be compiled for the next one."""
    environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    parser = make_parser("imports", __doc__)
    parser.add_argument("--rounds", type=int, default=9, metavar="N")
    run("imports", __doc__, measure, parser)

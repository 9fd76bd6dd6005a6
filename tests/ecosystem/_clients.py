"""Runs the programs of `examples/clients` as their users do: with torch's own, and with ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsdp2
from tests.kit.pool import ENVIRONMENT
from tests.kit.torchs_own import with_pause

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = ROOT / "examples" / "clients"
IMPORTED_BEFORE = """\
import importlib, os, runpy, sys
client, program, *rest = sys.argv[1:]
sys.path.insert(0, os.path.dirname(program))  # as for any program
importlib.import_module(client)
import fsdp2
fsdp2.replace_torch()
sys.argv[:] = [program, *rest]
runpy.run_path(program, run_name="__main__")
"""
LIBRARIES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "fsdp2": fsdp2.replace_torch,  # the first: it refuses while a model of torch's is alive
    "torch": nullcontext,
}
"""In which context a client gets the FSDP2 of which library."""


@dataclass(frozen=True)
class Ran:
    """What the first rank of a program printed."""

    losses: tuple[float, ...]  # `loss 1.234567`, one a step
    implementation: str  # `sharded by fsdp2` or `sharded by torch`
    output: str


def run_program(name: str, way: str, *arguments: str, client: str = "", ranks: int = 2) -> Ran:
    """Run `examples/clients/<name>.py` by torchrun.

    `way` is "torch" (untouched, torch's own), "-m fsdp2", or "imported before": `client` is the
    module that is imported before `replace_torch()` is called.
    """
    program = str(PROGRAMS / f"{name}.py")
    start = {
        "torch": [program],
        "-m fsdp2": ["-m", "fsdp2", program],
        "imported before": ["--no-python", sys.executable, "-c", IMPORTED_BEFORE, client, program],
    }[way]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return run([sys.executable, *launcher, *start, *arguments], torchs_own=way == "torch")


def run(command: Sequence[str], timeout_s: float = 300, torchs_own: bool = False) -> Ran:
    """Run a command in the repository; fail with all that it printed."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    if torchs_own:
        path = with_pause(path)
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    text = ended.stdout + ended.stderr
    assert ended.returncode == 0, text
    losses = tuple(float(loss) for loss in re.findall(r"^loss (\S+)$", ended.stdout, re.MULTILINE))
    found = set(re.findall(r"^sharded by (\w+)", ended.stdout, re.MULTILINE))
    assert losses, text
    assert len(found) == 1, text
    return Ran(losses, found.pop(), ended.stdout)

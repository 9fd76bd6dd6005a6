"""``python -m fsdp2 [-m] program args...``: run a program with fsdp2 in place of torch's FSDP2.

The program needs no changes: see ``fsdp2.replace_torch``. The program's Python child processes
(rank launchers, ``multiprocessing`` with spawn) inherit the replacement. With a launcher, use
``torchrun --nproc-per-node 8 -m fsdp2 train.py`` or ``accelerate launch -m fsdp2 train.py``.

``python -m fsdp2 plan module:factory --mesh 8x64`` predicts the time and memory of a sharded model,
and ``python -m fsdp2 report folder`` summarises recordings made with ``fsdp2.record``. Both accept
``--help``. ``python -m fsdp2 compare run1 run2`` reports the first difference between two runs that
``fsdp2.debug.record_bits`` recorded.
``python -m fsdp2 explain FS402`` explains an error or warning by its code, and
``torchrun --nproc-per-node 8 -m fsdp2 doctor`` checks the launched ranks for problems. If a program
has the same name as a command, pass the program's path: ``./plan``.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import fsdp2
from fsdp2._core.api.replacement import REPLACES

USAGE = "usage: python -m fsdp2 [-m] program [program arguments]"
COMMANDS = ("plan", "report", "explain", "doctor", "compare")


def main(arguments: Sequence[str]) -> None:
    """Run the command or program that ``arguments`` name. Exit with status 2 if there is none."""
    is_module = list(arguments[:1]) == ["-m"]
    program, *rest = arguments[is_module:] or [""]
    if program in ("-h", "--help"):
        print(f"{__doc__}\n{USAGE}")
        return
    if program in COMMANDS and not is_module:
        # Imported lazily: ranks that run a program call `main`, but do not need the commands.
        from fsdp2._tools import commands

        commands.run(program, rest)
        return
    if not program or program.startswith("-"):
        _refuse(f"found {program or 'no program'}")
    if not is_module and not Path(program).exists():
        _refuse(f"found no file {program}; use -m to run a module")
    fsdp2.replace_torch()
    _reach_children()
    if os.environ.get("RANK", "0") == "0":
        print(f"fsdp2: replacing torch's own FSDP2 in {program}", file=sys.stderr)
    sys.argv[:] = [program, *rest]
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
        return
    if not getattr(sys.flags, "safe_path", False):  # as Python does for scripts
        sys.path[0] = str(Path(program).resolve().parent)
    runpy.run_path(program, run_name="__main__")


def _refuse(what: str) -> NoReturn:
    print(f"{USAGE}\npython -m fsdp2: {what}", file=sys.stderr)
    sys.exit(2)


def _reach_children() -> None:
    startup = str(Path(fsdp2.__file__).parent / "_tools" / "startup")
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join([startup, *(p for p in known if p and p != startup)])
    os.environ[REPLACES] = "1"


if __name__ == "__main__":
    main(sys.argv[1:])

"""How far a reader walks through a step: files, functions and calls of `fully_shard` and one step.

    python -m benchmarks.step.walk

Two ranks shard four `Linear`s and the module around them. Rank 0 notes each call of a function of
the library: `fully_shard` is all five calls of it, `forward` and `backward` are those of the third
step, when nothing is initialised any more. A call changes file if the library's function that is
next on the stack, where there is one, is of another file. Comprehensions are no calls. `lines` are
those of the files that are entered. The figures are deterministic, and no speed: the step that does
less work may have the longer walk. `--list PART` prints the functions of a part in place of the
table, with their calls, in the order in which they are first called.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.kit.models import OURS
from benchmarks.kit.ranks import run_on_ranks
from benchmarks.kit.report import Figure, Measured, make_parser, run

PARTS = ("fully_shard", "forward", "backward")
MODULES = {OURS: "fsdp2", "torch": "torch.distributed.fsdp"}
RANKS, LAYERS, WIDTH, STEPS = 2, 4, 8, 3

Call = tuple[str, str]
"""The file and the function that is called."""


class Walk:
    """Calls of functions that lie in one folder, in the order in which they happen."""

    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder}/"
        self.calls: list[Call] = []
        self.changes = 0  # of file

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note the calls of this thread; backward on a CPU runs in it, too."""
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call" or not self._is_of_library(frame):
            return
        code = frame.f_code
        self.calls.append((code.co_filename, code.co_qualname))
        above = frame.f_back
        while above is not None and not self._is_of_library(above):
            above = above.f_back
        self.changes += above is not None and above.f_code.co_filename != code.co_filename

    def _is_of_library(self, frame: FrameType) -> bool:
        code = frame.f_code
        return code.co_filename.startswith(self._folder) and not code.co_name.startswith("<")


def walk(_rank: int, world_size: int, library: str) -> dict[str, tuple[list[Call], int]]:
    """Return the calls of each part, and how many of them change file. Runs on a rank."""
    package = importlib.import_module(MODULES[library])
    assert package.__file__ is not None
    walks = {part: Walk(Path(package.__file__).parent) for part in PARTS}
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    with walks["fully_shard"].noted():
        for module in (*model, model):
            package.fully_shard(module, mesh=mesh)
    x = torch.randn(2, WIDTH)
    for step in range(STEPS):
        is_last = step == STEPS - 1
        loss = _run(walks["forward"], is_last, lambda: model(x).sum())
        _run(walks["backward"], is_last, loss.backward)
        for param in model.parameters():
            param.grad = None
    return {part: (found.calls, found.changes) for part, found in walks.items()}


def _run(walk: Walk, is_noted: bool, work: Callable[[], Any]) -> Any:
    if not is_noted:
        return work()
    with walk.noted():
        return work()


@cache
def lines_of(file: str) -> int:
    return len(Path(file).read_text().splitlines())


def measure(arguments: argparse.Namespace) -> Measured:
    figures = []
    for library in (name for name in arguments.libraries if name in MODULES):
        found = run_on_ranks(walk, RANKS, library)[0]
        entered: set[str] = set()
        for part in PARTS:
            calls, changes = found[part]
            files = {file for file, _ in calls}
            if part != "fully_shard":
                entered |= files
            figures += [
                Figure(part, library, "files", len(files)),
                Figure(part, library, "lines", sum(map(lines_of, files))),
                Figure(part, library, "functions", len(set(calls))),
                Figure(part, library, "calls", len(calls)),
                Figure(part, library, "change file, %", 100 * changes / len(calls)),
            ]
        figures += [
            Figure("step", library, "files", len(entered)),
            Figure("step", library, "lines", sum(map(lines_of, entered))),
        ]
        if arguments.list and library == OURS:
            _print(found[arguments.list][0])
    return Measured(figures)


def _print(calls: list[Call]) -> None:
    for (file, function), count in Counter(calls).items():
        print(f"{count:4} {'/'.join(Path(file).parts[-2:])}: {function}")


if __name__ == "__main__":
    parser = make_parser("walk", __doc__)
    parser.add_argument("--list", choices=PARTS, help="print the functions of a part")
    run("walk", __doc__, measure, parser)

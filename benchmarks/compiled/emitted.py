"""What inductor emits for a compiled step: overlap, copies and memory, read from the code.

    python -m benchmarks.compiled.emitted [--lines "bf16, balanced"]

Nothing is timed and no kernel is compiled: `tests/kit/emitted.py` catches the Python code of the
forward and of the backward graph and walks through it. Rank 0 of 8, four blocks, an embedding and a
head in the root. `overlapped` is the share of the collectives that have at least one product of
matrices between their start and their wait. `copies` are bytes written by kernels and calls that
only move data, `casts` those that also change the dtype. `peak` is the most that is allocated at a
time, and `kept` what forward leaves for backward: buffers, results of collectives and saved tensors
by their sizes in the code, no parameters, no batch. All of these are over the model's bytes in the
dtype that it computes in.

`--lines CASE` prints each event of the cases whose names have these words, `--notes` names what has
nothing beside it; `--overlap` and `--unbucketed` are arguments of `fsdp2.compile`.
"""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

from benchmarks.kit.models import PRECISION_NAMES, PRECISIONS, Size
from benchmarks.kit.report import Figure, Measured, run
from tests.kit.emitted import BACKWARD, FORWARD, Step, emitted_step

SIZE = Size(depth=4, width=64, hidden=192, vocabulary=512, tokens=8)
BUDGET = 3 * 4 * SIZE.numel // 2
"""Bytes: enough for some overlap, and not for all."""
MEMORY: dict[str, str | int | None] = {
    "low": "low",
    "balanced": "balanced",
    "fast": "fast",
    f"{BUDGET:,} bytes": BUDGET,
}
VARIANT = "fsdp2.compile"


def measure(arguments: argparse.Namespace) -> Measured:
    figures, notes = [], []
    options: dict[str, Any] = {"overlap": True} if arguments.overlap else {}
    if arguments.unbucketed:
        options["bucket"] = False
    for precision, (name, memory) in product(PRECISIONS, MEMORY.items()):
        case = f"{PRECISION_NAMES[precision]}, {name}"
        bf16 = precision == "bf16"
        step = emitted_step(arguments.world_size, bf16=bf16, memory=memory, size=SIZE, **options)
        figures += figures_of(case, step)
        notes += notes_of(case, step)
        if arguments.lines is not None and all(w in case for w in arguments.lines.split(", ")):
            print(f"\n{case}\n{step.describe()}\n")
    settings = {"world_size": arguments.world_size, "numel": SIZE.numel}
    return Measured(figures, settings, notes if arguments.notes else [])


def figures_of(case: str, step: Step) -> list[Figure]:
    """Return one row of figures."""

    def figure(quantity: str, value: float, *, is_gated: bool = True) -> Figure:
        return Figure(case, VARIANT, quantity, value, is_gated)

    nbytes = step.model_nbytes
    return [
        figure("collectives", len(step.collectives)),
        figure("overlapped", step.overlapped_share, is_gated=False),  # more is better
        figure("not overlapped", len(step.exceptions)),
        figure("copies, forward", step.passes("copy", FORWARD)),
        figure("copies, backward", step.passes("copy", BACKWARD)),
        figure("casts, forward", step.passes("cast", FORWARD)),
        figure("casts, backward", step.passes("cast", BACKWARD)),
        figure("kept", step.kept_nbytes / nbytes),
        figure("peak", step.peak_nbytes / nbytes),
        figure("unknown calls", len(step.unknown)),
    ]


def notes_of(case: str, step: Step) -> list[str]:
    """Name the collectives that nothing hides, and calls that were not understood."""
    alone: dict[str, list[str]] = {}
    for one in step.exceptions:
        what = f"{one.graph} {one.event.name}"
        alone.setdefault(what, []).append(f"#{one.event.ids[0]}")
    found = [f"{what} {', '.join(ids)}" for what, ids in alone.items()]
    notes = [f"{case}: nothing beside {'; '.join(found)}"] if found else []
    return notes + [f"{case}: {name} is unknown" for name in step.unknown]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled.emitted", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--lines", metavar="CASE", help="print the events of these cases")
    parser.add_argument("--notes", action="store_true", help="name what has nothing beside it")
    parser.add_argument("--overlap", action="store_true", help="compile with overlap=True")
    parser.add_argument("--unbucketed", action="store_true", help="compile with bucket=False")
    run("emitted", __doc__, measure, parser)

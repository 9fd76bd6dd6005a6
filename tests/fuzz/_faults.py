"""Show the power of the fuzzer: plant faults in copies of the package, count examples till found.

`scripts/fuzz --faults` does it. Most of them are from `tests/lab/faults.txt`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lab.faults import FAULTS, Fault
from tests.lab.mutants import ROOT, Copy

MOST = 2000  # examples for each fault
NAMED = (
    "version-counts-first-write-only",  # a stale shard
    "first-gradient-not-taken-off",
    "failed-backward-leaves-gradients",
    "partial-reduction-added-again",
    "uneven-tail-unpacked-by-columns",  # wrong rows
    "scale-cached-over-settings",  # a lost scale
    "own-rows-of-rank-zero",
    "differentiated-once-a-backward",
    "updated-input-loses-its-mark",
    "penalty-comes-in-unmarked",
    "waiting-gradients-untold",
    "whole-parameters-serve-any-forward",
    "writes-of-a-forward-lost",
)
OWN = (
    Fault(
        "gather-not-waited-for",
        "fsdp2/_core/params/group.py",
        "ParamGroup.wait_for_unshard",
        "gather.flight.wait()",
        "",
        "Parameters are unpacked before they have arrived.",
        near=(),
    ),
    Fault(
        "unsynced-gradients-dropped",
        "fsdp2/_core/params/reduce.py",
        "Reducer.reduce",
        "self.hold_gradients(plan, with_graph)",
        "self.take_gradients(plan, with_graph)",
        "Gradients of a backward without sync are lost.",
        near=(),
    ),
    Fault(
        "sum-of-accumulated-lost",
        "fsdp2/_core/params/reduce.py",
        "Reducer.take_gradients",
        """
        for whole in wholes:
            if whole is not None:
                ...
        """,
        """
        for whole in wholes:
            if whole is not None:
                ...
        first = next(grad.dtype for grad in grads if grad is not None)
        others = [g is not None and g.dtype is not first for g in grads]
        grads = [torch.zeros_like(g) if o else g for g, o in zip(grads, others)]
        """,
        "What was accumulated in the reduce dtype without sync is lost.",
        near=(),
    ),
)


@dataclass(frozen=True)
class Met:
    """What became of a fault: after how many examples it was found, and by what failure."""

    fault: str
    examples: int
    signature: str | None


def chosen(names: Sequence[str]) -> list[Fault]:
    known = {fault.name: fault for fault in (*FAULTS, *OWN)}
    unknown = set(names) - set(known)
    if unknown:
        raise SystemExit(f"no fault is called {', '.join(sorted(unknown))}")
    return [known[name] for name in names or (*NAMED, *(fault.name for fault in OWN))]


def meet(fault: Fault, ranks: str, most: int) -> Met:
    """Run the fuzzer in a copy with the fault, until it finds something or has tried enough."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        planted = Copy(ROOT, folder).package.plant(fault)
        (folder / planted.file).write_text(planted.source)
        report = folder / "report.json"
        subprocess.run(
            [
                *(sys.executable, "-m", "tests.fuzz", "--until-first", "--no-shrink"),
                *("--ranks", ranks, "--seeds", f"0:{most}", "--most", str(most)),
                *("--report", str(report)),
            ],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        told = json.loads(report.read_text())
    return Met(fault.name, told["examples"], next(iter(told["found"]), None))


def main(names: Sequence[str], ranks: str, most: int) -> int:
    rows = []
    for fault in chosen(names):
        met = meet(fault, ranks, most)
        rows.append(met)
        found = f"{met.examples:>5}  {met.signature}" if met.signature else "    -  not found"
        print(f"{fault.name:<40} {found}", flush=True)
    missed = sum(met.signature is None for met in rows)
    print(f"{len(rows) - missed} of {len(rows)} faults found within {most} examples each")
    return missed > 0

"""Ops dispatched and collectives issued, a block and step, over the plain model.

    python -m benchmarks.step.ops

The model is `host`'s. An op is a call that reaches a `TorchDispatchMode`; collectives are not among
them and have their own column. A figure is the difference between two depths divided by the
difference in depth; `root` is what is left. Limit: no op, and three collectives a block (two
all-gathers, one reduce-scatter).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit.fit import Cost
from benchmarks.kit.host_run import Outcome, run_workers
from benchmarks.kit.host_worker import Request, make_label
from benchmarks.kit.models import PRECISION_NAMES, PRECISIONS, applies
from benchmarks.kit.report import Figure, Measured, gated, make_parser, run

DEPTHS = [4, 8]
Variant = tuple[str, str]


def measure(arguments: argparse.Namespace) -> Measured:
    settings: dict[str, Any] = {"depths": DEPTHS, "steps": 1, "warmup": 3, "world_size": 8}
    request = Request("ops", arguments.libraries, list(PRECISIONS), **settings)
    with tempfile.TemporaryDirectory() as folder:
        (outcome,) = run_workers([request], Path(folder))
    if outcome.error:
        return Measured([], settings, [outcome.error], failed=True)
    ops, collectives = fit_ops([outcome], DEPTHS), fit_collectives([outcome], DEPTHS)
    figures = []
    for precision in PRECISIONS:
        case, plain = PRECISION_NAMES[precision], ops["plain", precision]
        for library in arguments.libraries:
            if library == "plain" or not applies(library, precision):
                continue
            over, is_gated = ops[library, precision] - plain, gated(library)
            calls = collectives[library, precision]
            figures += [
                Figure(case, library, "ops a block", over.per_block, is_gated),
                Figure(case, library, "ops of the root", over.root, is_gated),
                Figure(case, library, "collectives a block", calls.per_block, is_gated),
            ]
        figures.append(Figure(case, "limit", "ops a block", 0))
        figures.append(Figure(case, "limit", "collectives a block", 3))
    return Measured(figures, settings)


def fit_ops(outcomes: Sequence[Outcome], depths: Sequence[int]) -> dict[Variant, Cost]:
    """Return the ops of every variant that workers in mode `ops` ran."""
    return _fit(outcomes, depths, lambda result: sum(result["ops"].values()))


def fit_collectives(outcomes: Sequence[Outcome], depths: Sequence[int]) -> dict[Variant, Cost]:
    """Return the collectives of every variant that workers in mode `ops` ran."""
    return _fit(outcomes, depths, lambda result: result["collectives"])


def _fit(outcomes: Sequence[Outcome], depths: Sequence[int], read: Any) -> dict[Variant, Cost]:
    costs = {}
    for outcome in outcomes:
        if outcome.error or outcome.request.mode != "ops":
            continue
        for library in outcome.request.libraries:
            for precision in outcome.request.precisions:
                if applies(library, precision):
                    labels = [make_label(library, precision, depth) for depth in depths]
                    values = [read(outcome.results[label]) for label in labels]
                    costs[library, precision] = Cost.fit(depths, values)
    return costs


if __name__ == "__main__":
    run("ops", __doc__, measure, make_parser("ops", __doc__))

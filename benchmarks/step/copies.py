"""Bytes that local copies around collectives move, in bytes of the model, a step.

    python -m benchmarks.step.copies

Counted with a `TorchDispatchMode` that knows which ops only move data (`kit/dispatch.py`), on both
sides by the same rule; what the plain model moves is taken away. Collectives do nothing and do not
count. `moved` is bytes read plus bytes written, `written` the second alone; both are divided by
the bytes of the model in the dtype that it computes in. Limit: nothing, and with a reduction in
fp32 of bf16 gradients one pass that reads 2 bytes and writes 4 an element, and one cast of the
shard before each of two all-gathers (6/N bytes each; the root's is gathered once).
"""

from __future__ import annotations

import argparse

from benchmarks.kit import noop
from benchmarks.kit.dispatch import CopyCounter, Moved
from benchmarks.kit.models import MEDIUM, PRECISION_NAMES, PRECISIONS, applies, prepare_step
from benchmarks.kit.report import Figure, Measured, gated, make_parser, run

WARMUP = 2


def measure(arguments: argparse.Namespace) -> Measured:
    size, figures = MEDIUM, []
    for precision in PRECISIONS:
        bf16 = precision == "bf16"
        nbytes = size.numel * (2 if bf16 else 4)
        for ranks in arguments.world_sizes:
            case = f"{PRECISION_NAMES[precision]}, N={ranks}"
            plain = count("plain", ranks, bf16=bf16)
            for library in arguments.libraries:
                if library == "plain" or not applies(library, precision):
                    continue
                found = count(library, ranks, bf16=bf16)
                written = found.written - plain.written
                moved = written + found.read - plain.read
                figures += [
                    Figure(case, library, "moved / model", moved / nbytes, gated(library)),
                    Figure(case, library, "written / model", written / nbytes, gated(library)),
                ]
            read, written = limit_of(ranks, bf16=bf16)
            figures.append(Figure(case, "limit", "moved / model", (read + written) / nbytes))
            figures.append(Figure(case, "limit", "written / model", written / nbytes))
    return Measured(figures, {"numel": size.numel, "world_sizes": arguments.world_sizes})


def count(library: str, ranks: int, *, bf16: bool) -> Moved:
    """Return what one step of a variant copies."""
    with noop.ranks(ranks) as (_, mesh):
        step = prepare_step(library, MEDIUM, mesh, bf16=bf16)
        for _ in range(WARMUP):
            step()
        with CopyCounter() as counter:
            step()
    return counter.moved


def limit_of(ranks: int, *, bf16: bool) -> tuple[float, float]:
    """Return the bytes that the dtype policy alone makes every rank read and write."""
    if not bf16:
        return 0.0, 0.0
    cast = (2 * MEDIUM.numel - MEDIUM.root_numel) / ranks
    return 4 * cast + 2 * MEDIUM.numel, 2 * cast + 4 * MEDIUM.numel


if __name__ == "__main__":
    parser = make_parser("copies", __doc__)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[8, 64], metavar="N")
    run("copies", __doc__, measure, parser)

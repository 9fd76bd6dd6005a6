"""Host cost of a training step, in instructions and dispatched ops, over the plain model.

    python -m benchmarks.step.host                          the table (minutes)
    python -m benchmarks.step.host --libraries fsdp2         the plain model and ours only
    python -m benchmarks.step.host --profile fsdp2-bf16     where one variant's instructions go

A figure is the difference between a deep and a shallow model divided by the difference in depth, so
that what the root and the step itself cost falls out; `root` is that rest. Instructions come from
callgrind and do not depend on the machine's load. README.md in this folder says how to read them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.kit import host_profile
from benchmarks.kit.fit import Cost
from benchmarks.kit.host_run import Outcome, run_workers
from benchmarks.kit.host_worker import CALLS_TIMED, Request, make_label
from benchmarks.kit.models import LIBRARIES, OURS, PRECISION_NAMES, PRECISIONS, applies
from benchmarks.kit.report import Figure, Measured, gated, make_parser, run
from benchmarks.step.ops import Variant, fit_collectives, fit_ops


def measure(arguments: argparse.Namespace) -> Measured:
    settings = {name: getattr(arguments, name) for name in ("steps", "warmup", "world_size")}
    settings["depths"] = arguments.depths
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.profile is not None:
            library, precision = arguments.profile
            print(host_profile.profile(library, precision, folder, arguments.top, settings))
            sys.exit(0)
        requests = [
            Request(mode=mode, libraries=libraries, precisions=list(PRECISIONS), **settings)
            for mode in ("count", "ops")
            for libraries in _share_out(arguments.libraries)
        ]
        outcomes = run_workers(requests, folder)
    failed = any(outcome.error for outcome in outcomes)
    return Measured(
        make_figures(outcomes, arguments.depths, arguments.steps),
        settings,
        make_notes(outcomes),
        failed,
    )


def _share_out(libraries: Sequence[str]) -> list[list[str]]:
    """Return what each process runs.

    Starting under callgrind takes most of the time, so libraries share a process; ours has one of
    its own, so that its failure leaves torch's figures standing, and so do the older ones.
    """
    sets = [("plain", "torch", "torch tuned"), (OURS,), ("ddp", "fsdp1")]
    shares = [[name for name in libraries if name in names] for names in sets]
    return [share for share in shares if share]


def make_arguments() -> argparse.ArgumentParser:
    parser = make_parser("host", __doc__)
    parser.add_argument(
        "--profile",
        type=parse_variant,
        metavar="VARIANT",
        help="show where one variant's cost goes: LIBRARY or LIBRARY-bf16, e.g. fsdp2-bf16, torch",
    )
    parser.add_argument("--top", type=int, default=40, help="rows in each table of --profile")
    parser.add_argument("--depths", type=int, nargs=2, default=[4, 8], metavar="L")
    parser.add_argument("--steps", type=int, default=4, help="steps counted in a window")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--world-size", type=int, default=8)
    return parser


def parse_variant(text: str) -> tuple[str, str]:
    """Split `fsdp2-bf16` into library and precision; no suffix means fp32."""
    library, _, precision = text.partition("-")
    precision = precision or "fp32"
    if library not in LIBRARIES or precision not in PRECISIONS:
        variants = [f"{library}-{precision}" for library in LIBRARIES for precision in PRECISIONS]
        raise argparse.ArgumentTypeError(f"expected one of {variants}, found {text!r}")
    return library, precision


def fit_instructions(
    outcomes: Sequence[Outcome], depths: Sequence[int], steps: int
) -> dict[Variant, Cost]:
    """Return the instructions of every variant that ran under callgrind."""
    costs = {}
    for outcome in outcomes:
        if outcome.error or outcome.request.mode != "count":
            continue
        for library in outcome.request.libraries:
            for precision in PRECISIONS:
                if not applies(library, precision):
                    continue
                labels = [make_label(library, precision, depth) for depth in depths]
                totals = [outcome.results[label] / steps for label in labels]
                costs[library, precision] = Cost.fit(depths, totals)
    return costs


def make_figures(outcomes: Sequence[Outcome], depths: Sequence[int], steps: int) -> list[Figure]:
    """Fit every variant that ran, in the order of `LIBRARIES` within each precision."""
    instructions = fit_instructions(outcomes, depths, steps)
    ops, collectives = fit_ops(outcomes, depths), fit_collectives(outcomes, depths)
    figures = []
    for precision in PRECISIONS:
        case, plain, torch = PRECISION_NAMES[precision], ("plain", precision), ("torch", precision)
        for library in LIBRARIES:
            key = (library, precision)
            if not {key, plain, ("plain", "fp32")} <= instructions.keys() & ops.keys():
                continue
            figures.append(
                Figure(case, library, "M instr. a block", instructions[key].per_block / 1e6)
            )
            if library == "plain":
                continue
            over = instructions[key] - instructions["plain", "fp32"]
            same = instructions[key] - instructions[plain]
            values = {
                "over plain fp32": over.per_block / 1e6,
                "over plain, same dtype": same.per_block / 1e6,
                "ops a block over plain": (ops[key] - ops[plain]).per_block,
                "collectives a block": collectives[key].per_block,
            }
            figures += [Figure(case, library, *item, gated(library)) for item in values.items()]
            # What is left over for the root is small, and differs by tens of percent between runs.
            figures.append(Figure(case, library, "root over plain", same.root / 1e6))
            if torch in instructions:
                torch_over = instructions[torch] - instructions["plain", "fp32"]
                ratio = over.per_block / torch_over.per_block
                figures.append(Figure(case, library, "ratio to torch", ratio))
    return figures


def make_notes(outcomes: Sequence[Outcome]) -> list[str]:
    """Say what the table cannot: the cost of a no-op collective, placeholders, failures."""
    notes = []
    for outcome in outcomes:
        if outcome.error:
            notes.append(f"{outcome.request} failed:\n```\n{outcome.error}\n```")
        if outcome.is_foreign:
            notes.append(f"{outcome.request}: imported from outside this repository.")
        if "all_gather" in outcome.results:
            gather, scatter = (
                outcome.results[label] / CALLS_TIMED / 1e3
                for label in ("all_gather", "reduce_scatter")
            )
            notes.append(
                "One collective of the placeholder, torch's Python function around it included: "
                f"all-gather {gather:.0f} k instructions, reduce-scatter {scatter:.0f} k."
            )
    return notes


if __name__ == "__main__":
    run("host", __doc__, measure, make_arguments())

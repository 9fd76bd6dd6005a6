"""Host cost of a training step, in instructions and dispatched ops, over the plain model.

    python -m benchmarks.host                          the table (minutes)
    python -m benchmarks.host --json PATH              the table, and its numbers in a file
    python -m benchmarks.host --profile fsdp2-bf16     where one variant's instructions go

A figure is the difference between a deep and a shallow model divided by the difference in depth, so
that what the root and the step itself cost falls out; `root` is that rest. Instructions come from
callgrind and do not depend on the machine's load. README.md in this folder says how to read them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks import _host_profile
from benchmarks._host_run import Outcome, run_workers
from benchmarks._host_worker import CALLS_TIMED, PRECISIONS, Request, make_label
from benchmarks._models import LIBRARIES
from benchmarks._report import find_origin, to_table, write_json

MODULE = "benchmarks.host"
PRECISION_NAMES = {"fp32": "fp32", "bf16": "bf16 parameters, fp32 reduction"}


@dataclass(frozen=True)
class Cost:
    """A linear fit through two depths: `per_block * depth + root`."""

    per_block: float
    root: float

    @staticmethod
    def fit(depths: Sequence[int], values: Sequence[float]) -> Cost:
        shallow, deep = depths
        per_block = (values[1] - values[0]) / (deep - shallow)
        return Cost(per_block, values[0] - per_block * shallow)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.per_block - other.per_block, self.root - other.root)


@dataclass(frozen=True)
class Row:
    """One variant's figures, a step.

    `over_plain` compares with the plain model in fp32, `over_plain_same_dtype` with the plain model
    in the dtype that the variant computes in.
    """

    library: str
    precision: str
    instructions: Cost
    over_plain: Cost
    over_plain_same_dtype: Cost
    ratio_to_torch: float | None
    ops_over_plain: Cost
    collectives: Cost


def main() -> None:
    arguments = parse_arguments()
    settings = {name: getattr(arguments, name) for name in ("steps", "warmup", "world_size")}
    settings["depths"] = arguments.depths
    origin = find_origin(MODULE)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.profile is not None:
            library, precision = arguments.profile
            print(origin.to_markdown(), end="\n\n")
            print(_host_profile.profile(library, precision, folder, arguments.top, settings))
            return
        # Starting under callgrind takes most of the time, so libraries share a process; ours has
        # one of its own, so that its failure leaves torch's figures standing.
        ours = [name for name in arguments.libraries if name == "fsdp2"]
        others = [name for name in arguments.libraries if name != "fsdp2"]
        requests = [
            Request(mode=mode, libraries=libraries, precisions=list(PRECISIONS), **settings)
            for mode in ("count", "ops")
            for libraries in (others, ours)
            if libraries
        ]
        outcomes = run_workers(requests, folder)
    rows = make_rows(outcomes, arguments.depths, arguments.steps)
    print(origin.to_markdown(), end="\n\n")
    print(show_rows(rows), end="\n\n")
    for note in make_notes(outcomes):
        print(f"- {note}")
    if arguments.json is not None:
        write_json(
            arguments.json,
            origin,
            settings=settings,
            rows=[asdict(row) for row in rows],
            notes=make_notes(outcomes),
        )
    if any(outcome.error for outcome in outcomes):
        sys.exit(1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the numbers here")
    parser.add_argument(
        "--profile",
        type=parse_variant,
        metavar="VARIANT",
        help="show where one variant's cost goes: LIBRARY or LIBRARY-bf16, e.g. fsdp2-bf16, torch",
    )
    parser.add_argument("--top", type=int, default=40, help="rows in each table of --profile")
    parser.add_argument(
        "--libraries",
        type=lambda text: ["plain", *(x for x in text.split(",") if x != "plain")],
        default=list(LIBRARIES),
        help="comma-separated, of: " + ", ".join(LIBRARIES),
    )
    parser.add_argument("--depths", type=int, nargs=2, default=[4, 8], metavar="L")
    parser.add_argument("--steps", type=int, default=4, help="steps counted in a window")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--world-size", type=int, default=8)
    return parser.parse_args()


def parse_variant(text: str) -> tuple[str, str]:
    """Split `fsdp2-bf16` into library and precision; no suffix means fp32."""
    library, _, precision = text.partition("-")
    precision = precision or "fp32"
    if library not in LIBRARIES or precision not in PRECISIONS:
        variants = [f"{library}-{precision}" for library in LIBRARIES for precision in PRECISIONS]
        raise argparse.ArgumentTypeError(f"expected one of {variants}, found {text!r}")
    return library, precision


def make_rows(outcomes: Sequence[Outcome], depths: Sequence[int], steps: int) -> list[Row]:
    """Fit every variant that ran, in the order of `LIBRARIES` within each precision."""
    instructions: dict[tuple[str, str], Cost] = {}
    ops: dict[tuple[str, str], Cost] = {}
    collectives: dict[tuple[str, str], Cost] = {}
    for outcome in outcomes:
        if outcome.error:
            continue
        for library, precision in product(outcome.request.libraries, PRECISIONS):
            labels = [make_label(library, precision, depth) for depth in depths]
            results: list[Any] = [outcome.results[label] for label in labels]
            key = (library, precision)
            if outcome.request.mode == "count":
                instructions[key] = Cost.fit(depths, [total / steps for total in results])
            else:
                ops[key] = Cost.fit(depths, [sum(r["ops"].values()) for r in results])
                collectives[key] = Cost.fit(depths, [r["collectives"] for r in results])
    rows = []
    for precision in PRECISIONS:
        plain, plain_fp32 = ("plain", precision), ("plain", "fp32")
        reference = ("torch", precision)
        for library in LIBRARIES:
            key = (library, precision)
            if not {key, plain} <= instructions.keys() & ops.keys():
                continue
            over = instructions[key] - instructions[plain_fp32]
            ratio = None
            if reference in instructions:
                torch_over = instructions[reference] - instructions[plain_fp32]
                ratio = over.per_block / torch_over.per_block
            rows.append(
                Row(
                    library=library,
                    precision=precision,
                    instructions=instructions[key],
                    over_plain=over,
                    over_plain_same_dtype=instructions[key] - instructions[plain],
                    ratio_to_torch=ratio,
                    ops_over_plain=ops[key] - ops[plain],
                    collectives=collectives[key],
                )
            )
    return rows


def show_rows(rows: Sequence[Row]) -> str:
    """Return the Markdown table; instructions are in millions."""
    header = (
        "variant",
        "M instr. a block",
        "**over plain fp32**",
        "over plain, same dtype",
        "ratio to torch",
        "root over plain",
        "ops a block over plain",
        "collectives a block",
    )

    def show(row: Row) -> tuple[str, ...]:
        is_plain = row.library == "plain"
        over = (
            "" if is_plain and row.precision == "fp32" else f"{row.over_plain.per_block / 1e6:.2f}"
        )
        sharded = (
            f"{row.over_plain_same_dtype.per_block / 1e6:.2f}",
            "" if row.ratio_to_torch is None else f"{row.ratio_to_torch:.2f}",
            f"{row.over_plain_same_dtype.root / 1e6:.2f}",
            f"{row.ops_over_plain.per_block:.1f}",
            f"{row.collectives.per_block:.1f}",
        )
        return (
            f"{row.library}, {PRECISION_NAMES[row.precision]}",
            f"{row.instructions.per_block / 1e6:.2f}",
            f"**{over}**" if over and not is_plain else over,
            *([""] * len(sharded) if is_plain else sharded),
        )

    return to_table(header, [show(row) for row in rows])


def make_notes(outcomes: Sequence[Outcome]) -> list[str]:
    """Say what the table cannot: the cost of a no-op collective, stand-ins, failures."""
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
                f"One no-op collective, torch's Python function around it included: all-gather "
                f"{gather:.0f} k instructions, reduce-scatter {scatter:.0f} k."
            )
    return notes


if __name__ == "__main__":
    main()

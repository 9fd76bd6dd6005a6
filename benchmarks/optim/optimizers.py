"""Which optimizers step a sharded model as they step the whole one, and what others say instead.

    python -m benchmarks.optim.optimizers [--only NAME,...] [--ranks 2,3] [--save]

Every row is an optimizer of torch or of a library of `PACKAGES` (those that are installed), all
on a model of odd sizes (13, 29, one row: a rank holds nothing of it), for five steps. A number is
how far the largest difference from the whole model on the global batch is, of the way that its
parameters went. `fsdp2` and `torch` are the optimizer itself on the parameters (`DTensor`s) that
each library's `fully_shard` makes; `fsdp2.optim.local` steps on local shards. Letters are errors,
listed below. Where an optimizer rounds more than its parameters do (8-bit states; Muon computes in
bf16), the last column says how far the whole model is from one that steps without that: sharded,
blocks of scales begin elsewhere and sums are cut elsewhere, which differs as much. A cell that is
no error and further off than its bound (twice that, or 1e-12; 1e-4 in fp32) is marked WRONG and
ends the command with 1.
"""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import PackageNotFoundError, version

from benchmarks.kit.optimizers import ROWS, WAYS, Outcome, Row, compare
from benchmarks.kit.ranks import run_on_ranks
from benchmarks.kit.report import RESULTS, find_origin, show_number, to_table

PACKAGES = ("torch", "schedulefree", "bitsandbytes", "torchao", "pytorch_optimizer", "heavyball")
Outcomes = dict[tuple[str, str, int], Outcome]  # by row, way, and number of ranks


def measure_rank(rank: int, size: int, labels: list[str]) -> dict[str, dict[str, Outcome]]:
    """Return the outcomes of every row and way, on one rank."""
    return {row.label: compare(row) for row in ROWS if row.label in labels}


def measure(rows: list[Row], sizes: list[int]) -> Outcomes:
    """Return the outcomes; where ranks disagree, what they all said."""
    outcomes: Outcomes = {}
    for size in sizes:
        ranks = run_on_ranks(measure_rank, size, [row.label for row in rows])
        for row in rows:
            for way in WAYS:
                found = [result[row.label][way.name] for result in ranks]
                outcomes[row.label, way.name, size] = _agreed(found)
    return outcomes


def _agreed(found: list[Outcome]) -> Outcome:
    errors = list(dict.fromkeys(outcome.error for outcome in found))
    if len(errors) > 1:
        return Outcome(error=" / ".join(error or "no error" for error in errors))
    return max(found, key=lambda outcome: outcome.difference)


def to_markdown(rows: list[Row], sizes: list[int], outcomes: Outcomes) -> str:
    """Return the table, with a letter for each error, and the errors."""
    letters: dict[str, str] = {}

    def cell(row: Row, way: str, size: int) -> str:
        outcome = outcomes[row.label, way, size]
        if outcome.error:
            return letters.setdefault(outcome.error, f"({_letter(len(letters))})")
        shown = f"{outcome.difference:.0e}" if outcome.difference else "equal"
        return shown if outcome.is_right(row) else f"WRONG {shown}"

    header = ["optimizer", *(f"{way.name}, {size}" for way in WAYS for size in sizes), "rounding"]
    body = []
    for row in rows:
        rounding = max(
            outcomes[row.label, way.name, size].rounding for way in WAYS for size in sizes
        )
        cells = [cell(row, way.name, size) for way in WAYS for size in sizes]
        body.append([row.label, *cells, show_number(rounding) if rounding else ""])
    notes = [f"- {letter} {error}" for error, letter in letters.items()]
    return "\n\n".join(part for part in (to_table(header, body), "\n".join(notes)) if part)


def _letter(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else f"a{_letter(index - 26)}"


def _versions() -> str:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} is not installed")
    return ", ".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", help="parts of names, with commas")
    parser.add_argument("--ranks", default="2,3", help="numbers of ranks, with commas")
    parser.add_argument("--save", action="store_true", help="keep the table in benchmarks/results")
    arguments = parser.parse_args()
    parts, sizes = arguments.only.split(","), [int(size) for size in arguments.ranks.split(",")]
    rows = [r for r in ROWS if r.find() is not None and any(part in r.label for part in parts)]
    outcomes = measure(rows, sizes)
    origin = find_origin("optimizers").to_markdown()
    text = "\n\n".join((origin, _versions(), to_markdown(rows, sizes, outcomes)))
    print(text)
    if arguments.save:
        (RESULTS / "optimizers.md").write_text(f"# optimizers\n\n{text}\n")
    found = [(r, outcomes[r.label, way.name, n]) for r in rows for way in WAYS for n in sizes]
    return int(any(not outcome.error and not outcome.is_right(row) for row, outcome in found))


if __name__ == "__main__":
    sys.exit(main())

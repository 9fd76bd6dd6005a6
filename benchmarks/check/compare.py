"""Show what changed between two results, or between two folders of results.

    scripts/bench compare A B

Ends with 1 if a gated figure (deterministic, ours) of B is more than `--tolerance` percent above
that of A, or is missing in B.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kit.report import Result, show_number, to_table

TOLERANCE = 0.10
ROUNDING = 1e-6  # a figure of 0 may become this without being worse


@dataclass(frozen=True)
class Change:
    """One figure in two results; None where a result lacks it."""

    benchmark: str
    key: tuple[str, str, str]
    is_gated: bool
    old: float | None
    new: float | None

    @property
    def part(self) -> float:
        """The change as a part of the old figure; infinite where that was 0."""
        if self.old is None or self.new is None or self.old == self.new:
            return 0.0
        return (self.new - self.old) / abs(self.old) if self.old else math.inf

    def is_worse(self, tolerance: float) -> bool:
        """Say whether a gated figure rose by more than a part of itself, or is gone."""
        if not self.is_gated or self.old is None:
            return False
        return self.new is None or self.new - self.old > abs(self.old) * tolerance + ROUNDING


def compare(old: Result, new: Result) -> list[Change]:
    """Return every figure of either result, in the order of the old one."""
    before = {figure.key: figure for figure in old.figures}
    after = {figure.key: figure for figure in new.figures}
    changes = []
    for key in {**before, **after}:
        was, now = before.get(key), after.get(key)
        is_gated = any(figure is not None and figure.is_gated for figure in (was, now))
        values = (was.value if was else None, now.value if now else None)
        changes.append(Change(old.benchmark, key, is_gated, *values))
    return changes


def show(changes: Iterable[Change], tolerance: float, least: float = 0.01) -> str:
    """Return a table of the figures that changed by more than a part of `least`."""
    rows = []
    for change in changes:
        is_worse = change.is_worse(tolerance)
        if change.old is None or change.new is None:
            shown = "new" if change.old is None else "missing"
        elif abs(change.part) < least:
            continue
        else:
            shown = f"{change.part:+.1%}"
        numbers = ["" if x is None else show_number(x) for x in (change.old, change.new)]
        verdict = "**worse**" if is_worse else ("gated" if change.is_gated else "")
        rows.append((change.benchmark, *change.key, *numbers, shown, verdict))
    if not rows:
        return f"No figure changed by more than {least:.0%}."
    header = ("benchmark", "case", "variant", "quantity", "before", "after", "change", "verdict")
    return to_table(header, rows)


def read_results(path: Path) -> dict[str, Result]:
    """Read one result, or every result in a folder."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    return {result.benchmark: result for result in map(Result.read, files)}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="compare", description=__doc__.split("\n")[0])
    parser.add_argument("old", type=Path, metavar="A", help="a JSON file, or a folder of them")
    parser.add_argument("new", type=Path, metavar="B")
    parser.add_argument("--tolerance", type=float, default=100 * TOLERANCE, metavar="PERCENT")
    arguments = parser.parse_args(words)
    tolerance = arguments.tolerance / 100
    old, new = read_results(arguments.old), read_results(arguments.new)
    both = [name for name in old if name in new]
    if not both:
        parser.error(f"no benchmark is in both: {sorted(old)} and {sorted(new)}")
    changes = [change for name in both for change in compare(old[name], new[name])]
    for name in both:
        print(f"{name}: {old[name].origin.to_markdown()}\n -> {new[name].origin.to_markdown()}")
    print(f"\n{show(changes, tolerance)}")
    return int(any(change.is_worse(tolerance) for change in changes))


if __name__ == "__main__":
    sys.exit(main())

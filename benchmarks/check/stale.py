"""Say which committed results are older than the code that they measure.

    scripts/bench stale

For each result: the commit it was measured at, and how many lines of that code changed since, up to
what is checked out. Figures that `quick --check` compares are not wrong by being old: it would say
so. For the others this is all that tells.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kit.report import REPOSITORY, RESULTS, to_table

STEP = (
    "fsdp2/_core/engine",
    "fsdp2/_core/params",
    "fsdp2/_core/comm",
    "fsdp2/_core/agreement",
    "fsdp2/_core/base",
)
COMPILED = ("fsdp2/_compiled", "fsdp2/_core/params", "fsdp2/_core/base")
FILES = ("fsdp2/checkpoint", "fsdp2/_core/transfer")
MEASURES: dict[str, tuple[str, ...]] = {
    "buckets": COMPILED,
    "compile": COMPILED,
    "compile-memory": COMPILED,
    "compile_time": COMPILED,
    "doctor": ("fsdp2/_tools/doctor",),
    "emitted": COMPILED,
    "imports": ("fsdp2/__init__.py", *STEP),
    "muon": ("fsdp2/optim",),
    "muon-owned": ("fsdp2/optim",),
    "neighbours": ("fsdp2/checkpoint",),
    "optimizers": ("fsdp2/optim",),
    "plan": ("fsdp2/_tools/plan", *STEP),
    "record": ("fsdp2/_tools/record", *STEP),
    "restart": ("fsdp2/checkpoint", "examples"),
    "saves": ("fsdp2/checkpoint",),
    "state": FILES,
}
"""By result; what is not here measures a step."""

COMMIT = re.compile(r"commit ([0-9a-f]{7,40})( with changes)?")


@dataclass(frozen=True)
class Age:
    """One result. ``lines`` and ``commits``: since then, in what it measures; None if unknown."""

    name: str
    commit: str
    date: str = ""
    lines: int | None = None
    commits: int | None = None


def git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(REPOSITORY), *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def age_of(path: Path) -> Age:
    """Return how old a result is, or only its commit where this clone does not have that."""
    found = COMMIT.search(path.read_text())
    if found is None:
        return Age(path.stem, "none named")
    commit, changed = found[1], found[2] or ""
    paths = MEASURES.get(path.stem, STEP)
    try:
        date = git("show", "-s", "--format=%cs", commit)
        stat = git("diff", "--shortstat", commit, "HEAD", "--", *paths)
        commits = len(git("log", "--format=%h", f"{commit}..HEAD", "--", *paths).split())
    except subprocess.CalledProcessError:
        return Age(path.stem, f"{commit}{changed}, not in this clone")
    lines = sum(int(number) for number in re.findall(r"(\d+) (?:insertion|deletion)", stat))
    return Age(path.stem, commit + changed, date, lines, commits)


def _shown(count: int | None) -> str:
    return "?" if count is None else str(count)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check.stale", description=__doc__)
    parser.parse_args()
    ages = [age_of(path) for path in sorted(RESULTS.glob("*.md"))]
    ages.sort(key=lambda age: (age.lines is None, -(age.lines or 0)))
    rows = [
        (age.name, age.commit, age.date, _shown(age.commits), _shown(age.lines)) for age in ages
    ]
    print(to_table(("result", "measured at", "on", "commits since", "lines changed since"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

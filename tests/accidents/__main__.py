"""``python -m tests.accidents``: let accidents happen to the example, and see how it goes on.

python -m tests.accidents --count 30 --seed 0
python -m tests.accidents --seed 4 --count 1 --keep DIR     # one of them, with its logs
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from pathlib import Path

from tests.accidents._accidents import Trial
from tests.accidents._job import write_text
from tests.accidents._trial import Outcome, tried

HEAD = """\
| seed | ranks | accident | moment | s to the next step | losses |
|---:|---|---|---|---:|---|"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.accidents", description=__doc__)
    parser.add_argument("--count", type=int, default=30, help="runs")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--keep", type=Path, help="leave logs and checkpoints in this folder")
    given = parser.parse_args()
    outcomes: list[Outcome] = []
    with contextlib.ExitStack() as stack:
        folder = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_text(folder / "text")
        print(HEAD)
        for seed in range(given.seed, given.seed + given.count):
            outcomes.append(tried(Trial.drawn(seed), folder.resolve()))
            print("\n".join(outcomes[-1].rows()), flush=True)
    print(summary(outcomes))
    return int(any(outcome.fault for outcome in outcomes))


def summary(outcomes: list[Outcome]) -> str:
    """Return how many runs ended well, and the seconds of each kind of accident."""
    good = sum(not outcome.fault for outcome in outcomes)
    kinds: dict[str, list[float]] = {}
    for outcome in outcomes:
        for accident, seconds in zip(outcome.trial.accidents, outcome.seconds, strict=True):
            if seconds is not None:
                kinds.setdefault(accident.kind, []).append(seconds)
    count = sum(len(outcome.trial.accidents) for outcome in outcomes)
    rows = [
        f"| {kind} | {len(found)} | {min(found):.1f} | {statistics.median(found):.1f} | "
        f"{max(found):.1f} |"
        for kind, found in sorted(kinds.items())
    ]
    head = "| accident | how often | least s | median s | most s |\n|---|---:|---:|---:|---:|"
    ends = f"{good} of {len(outcomes)} runs, with {count} accidents, ended as without accidents."
    return "\n".join(["", ends, "", head, *rows])


if __name__ == "__main__":
    sys.exit(main())

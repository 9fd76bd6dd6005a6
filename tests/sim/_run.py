"""`scripts/sim`: run scenarios on the simulated accelerator, and print what was found."""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import tempfile
import time
from pathlib import Path

from tests._pool import RankPool, _Run, make_request
from tests._rank import PRELOADED
from tests._sim import NoCompilerError
from tests._sim._build import build
from tests.sim import scenarios  # noqa: F401  # fills the list
from tests.sim._world import SCENARIOS, Report, problems, run_scenario

LIMIT_S = 120.0


def write_report(name: str, folder: str, rank: int) -> None:
    """Run a scenario on this rank, and leave its report in a folder."""
    (Path(folder) / f"{rank}").write_bytes(pickle.dumps(run_scenario(name)))


write_report.body = write_report  # type: ignore[attr-defined]  # what a rank looks for


def run(pool: RankPool, name: str) -> tuple[list[Report], str]:
    """Return the reports of all ranks, and what went wrong where there are none."""
    with tempfile.TemporaryDirectory() as folder:
        request = make_request(
            write_report,
            f"sim-{name}",
            SCENARIOS[name].ranks,
            {"name": name, "folder": folder},
            limit_s=LIMIT_S,
            device="sim",
        )
        outcome = pool.run(request)
        files = sorted(Path(folder).iterdir())
        reports = [pickle.loads(file.read_bytes()) for file in files]
    return reports, "" if outcome.kind == "passed" else outcome.text


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/sim", description=__doc__)
    parser.add_argument("names", nargs="*", help="scenarios; without any, they are listed")
    parser.add_argument("--all", action="store_true", help="all of them")
    options = parser.parse_args()
    names = list(SCENARIOS) if options.all else options.names
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown or not names:
        print("\n".join(SCENARIOS))
        print(f"no such scenario: {', '.join(unknown)}" if unknown else "", file=sys.stderr)
        return 2 if unknown else 0
    try:
        build()
    except NoCompilerError as reason:
        print(f"no simulator: {reason}", file=sys.stderr)
        return 2
    os.environ[PRELOADED] = "tests.sim._run"
    ranks = _Run(notes_reach=False, patience=1.0)
    pool = RankPool(ranks)
    failed = []
    print(
        f"{'scenario':<36} {'ranks':>5} {'operations':>10} {'accesses':>9} {'found':>6} "
        f"{'waits':>6} {'difference':>10} {'s':>5}"
    )
    try:
        for name in names:
            begun = time.monotonic()
            reports, wrong = run(pool, name)
            told = wrong or "\n\n".join(filter(None, map(problems, reports)))
            seconds = time.monotonic() - begun
            if reports:
                worst = max(report.difference for report in reports)
                found = sum(len(report.reports) for report in reports)
                waits = sum(wait.times for report in reports for wait in report.waits)
                print(
                    f"{name:<36} {len(reports):>5} {reports[0].operations:>10} "
                    f"{reports[0].accesses:>9} {found:>6} {waits:>6} {worst:>10.1e} {seconds:>5.1f}"
                )
            if told:
                failed.append(name)
                print(f"{name}: FAILED\n\n{told}\n")
    finally:
        pool.close()
        ranks.close()
    print(
        f"{len(names)} scenarios, {len(failed)} failed{': ' + ', '.join(failed) if failed else ''}"
    )
    return 1 if failed else 0

"""`scripts/sim`: run scenarios on the simulated accelerator, and print what was found."""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kit.pool import RankPool, _Run, make_request
from tests.kit.rank import PRELOADED
from tests.kit.sim import NoCompilerError
from tests.kit.sim._build import build
from tests.lab.mutants import ROOT
from tests.lab.plant import Package
from tests.sim import fault_scenarios, scenarios  # noqa: F401  # they fill the list
from tests.sim._coverage import measure, trace_scenario
from tests.sim._faults import FAULTS
from tests.sim._plant import Verdict, planting
from tests.sim._world import SCENARIOS, problems, run_scenario

LIMIT_S = 120.0


def write_report(name: str, folder: str, rank: int) -> None:
    """Run a scenario on this rank, and leave its report in a folder."""
    (Path(folder) / f"{rank}").write_bytes(pickle.dumps(run_scenario(name)))


write_report.body = write_report  # type: ignore[attr-defined]  # what a rank looks for


def run(
    pool: RankPool, name: str, body: Callable[..., None] = write_report
) -> tuple[list[Any], str]:
    """Return what a body left on each rank, and what went wrong where there is none."""
    with tempfile.TemporaryDirectory() as folder:
        request = make_request(
            body,
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


@contextmanager
def rank_pool() -> Iterator[RankPool]:
    os.environ[PRELOADED] = "tests.sim._run"
    ranks = _Run(notes_reach=False, patience=1.0)
    pool = RankPool(ranks)
    try:
        yield pool
    finally:
        pool.close()
        ranks.close()


def run_all(pool: RankPool, names: Sequence[str]) -> int:
    """Run scenarios and print what was found; 1 if one is not clean."""
    failed = []
    print(
        f"{'scenario':<40} {'ranks':>5} {'operations':>10} {'accesses':>9} {'found':>6} "
        f"{'waits':>6} {'difference':>10} {'s':>5}"
    )
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
                f"{name:<40} {len(reports):>5} {reports[0].operations:>10} "
                f"{reports[0].accesses:>9} {found:>6} {waits:>6} {worst:>10.1e} {seconds:>5.1f}"
            )
        if told:
            failed.append(name)
            print(f"{name}: FAILED\n\n{told}\n")
    print(
        f"{len(names)} scenarios, {len(failed)} failed{': ' + ', '.join(failed) if failed else ''}"
    )
    return 1 if failed else 0


def print_coverage(pool: RankPool, names: Sequence[str]) -> int:
    """Say which lines only a device executes, and which of them no scenario does."""
    coverage = measure(names, lambda name: run(pool, name, trace_scenario))
    print("\n".join(coverage.listing()))
    print()
    print("\n".join(coverage.table()))
    return 0


def meet_faults(names: Sequence[str], jobs: int) -> int:
    """Plant faults and print what is reported of each; 1 if one is not caught."""
    unknown = set(names) - {fault.name for fault in FAULTS}
    if unknown:
        print(f"no such fault: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    faults = [fault for fault in FAULTS if not names or fault.name in names]
    package = Package(ROOT)
    for fault in faults:
        package.plant(fault)  # or it says what is not there
    try:
        build()
    except NoCompilerError as reason:
        print(f"no simulator: {reason}", file=sys.stderr)
        return 2

    def tell(verdict: Verdict) -> None:
        fault = verdict.fault
        reported = " ".join(sorted(verdict.reported)) or "nothing"
        print(f"{fault.name}: {'' if verdict.is_caught else 'NOT CAUGHT, '}{reported}", flush=True)
        print(f"    {fault.file}, by {fault.scenario} in {verdict.seconds:.1f} s", flush=True)
        for kind, line in sorted(verdict.reported.items(), key=lambda e: e[0] != fault.expected):
            print(f"    {kind}: {line}", flush=True)

    with planting(jobs) as planter:
        verdicts = planter.run_all(faults, lambda name: SCENARIOS[name].ranks, tell)
    print(f"\n{'fault':<46} {'file':<36} {'expected':<8} {'reported':<18} {'values':<6} {'s':>5}")
    for verdict in verdicts:
        fault = verdict.fault
        print(
            f"{fault.name:<46} {fault.file.removeprefix('fsdp2/'):<36} {fault.expected:<8} "
            f"{' '.join(sorted(verdict.reported)) or 'nothing':<18} "
            f"{'differ' if verdict.is_in_values else 'same':<6} {verdict.seconds:>5.1f}"
        )
    missed = [verdict.fault.name for verdict in verdicts if not verdict.is_caught]
    silent = sum(not verdict.is_in_values for verdict in verdicts)
    print(
        f"{len(verdicts) - len(missed)} of {len(verdicts)} faults caught, {silent} of them change "
        f"no value{'; not caught: ' + ', '.join(missed) if missed else ''}"
    )
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/sim", description=__doc__)
    parser.add_argument("names", nargs="*", help="scenarios; without any, they are listed")
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument(
        "--faults", nargs="*", metavar="NAME", help="plant faults, say what is reported of each"
    )
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument(
        "--coverage", action="store_true", help="which lines of a device's scenarios run"
    )
    options = parser.parse_args()
    if options.faults is not None:
        return meet_faults(options.faults, options.jobs)
    everything = options.all or (options.coverage and not options.names)
    names = list(SCENARIOS) if everything else options.names
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
    with rank_pool() as pool:
        return print_coverage(pool, names) if options.coverage else run_all(pool, names)

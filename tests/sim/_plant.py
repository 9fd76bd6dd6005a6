"""Plant faults that change the order of streams, and say what the simulator reports of each.

`scripts/sim --faults` does it. A fault (`tests.sim._faults`) is one change of a function in a copy
of the package. Its scenario runs on ranks that are forked from a process with torch and without the
package, and import the copy. Nothing here may import the package.
"""

from __future__ import annotations

import importlib
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.kit.pool import RankPool, _Run, make_request
from tests.lab.mutants import ROOT
from tests.lab.plant import Package
from tests.sim._faults import SimFault

LIMIT_S = 60.0
SCENARIOS = ("tests.sim.scenarios", "tests.sim.fault_scenarios")


@dataclass(frozen=True)
class Verdict:
    """What was reported of a fault."""

    fault: SimFault
    reported: dict[str, str]  # by kind, the first of each
    seconds: float

    @property
    def is_caught(self) -> bool:
        """True if what was expected is among it."""
        return self.fault.expected in self.reported

    @property
    def is_in_values(self) -> bool:
        """True if comparing with the host's values would have shown it, or a plain run failed."""
        return bool({"VALUE", "ERROR"} & set(self.reported))


def meet(name: str, package: str, folder: str, rank: int) -> None:
    """Run a scenario on this rank with the package that lies in a folder; leave what it found."""
    if package:
        assert "fsdp2" not in sys.modules, "a rank that has the package cannot get another one"
        sys.path.insert(0, package)
    for module in SCENARIOS:
        importlib.import_module(module)
    world = importlib.import_module("tests.sim._world")
    loaded = str(sys.modules["fsdp2"].__file__)
    assert not package or loaded.startswith(package), loaded
    found: dict[str, str] = {}
    try:
        report = world.run_scenario(name)
        found = kinds_in(world.SCENARIOS[name], report)
    except BaseException as error:
        said = str(error).strip().splitlines() or [""]
        found = {"ERROR": f"{type(error).__name__}: {said[0]}"}
        (Path(folder) / f"{rank}.error").write_text(traceback.format_exc())
        raise
    finally:
        (Path(folder) / f"{rank}.pickle").write_bytes(pickle.dumps(found))


meet.body = meet  # type: ignore[attr-defined]  # what a rank looks for


def kinds_in(scenario: Any, report: Any) -> dict[str, str]:
    """Return the first report of each kind, in a line."""
    found: dict[str, str] = {}
    for each in report.reports:
        found.setdefault(each.kind, in_a_line(each.text))
    if report.waits and not scenario.may_wait:
        wait = report.waits[0]
        found["WAIT"] = f"{wait.kind} in a steady step, {places(wait.text)[0]}"
    if not report.difference <= scenario.tolerance:
        found["VALUE"] = f"{report.differing} differs by {report.difference:.1e} of its largest"
    return found


def in_a_line(text: str) -> str:
    """Shorten a report: what it says, and the innermost line of the package at each place."""
    parts: list[str] = []
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if line.startswith("  at "):
            inner = [line[5:]]
            for more in lines[index + 1 :]:
                if not more.startswith("       "):
                    break
                inner.append(more.strip())
            parts.append(f"({places(chr(10).join(inner))[0]})")
        elif not line.startswith("   "):
            parts.append(line.strip())
    return " ".join(parts)


def places(text: str) -> list[str]:
    """Return the lines of a call site as ``file:line``, those of the package first."""
    lines = [line.partition(" (")[0] for line in text.replace(", ", "\n").splitlines()]
    short = [line.strip() for line in lines if ".py:" in line]
    ours = [line[line.index("fsdp2/") :] for line in short if "fsdp2/" in line]
    return ours or [line.rpartition("/tests/")[2] for line in short] or ["no line of a program"]


class Planter:
    """Copies of the package, and ranks that run scenarios with them."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._run = _Run(notes_reach=False, patience=float(jobs))
        if hasattr(self._run._context, "set_forkserver_preload"):
            self._run._context.set_forkserver_preload(["tests.sim._preload_torch"])
        self._pools: SimpleQueue[RankPool] = SimpleQueue()
        self._made = [RankPool(self._run) for _ in range(jobs)]
        for pool in self._made:
            self._pools.put(pool)

    def run(self, fault: SimFault, ranks: int) -> Verdict:
        """Run a fault's scenario with it."""
        pool = self._pools.get()
        begun = time.monotonic()
        try:
            with tempfile.TemporaryDirectory(prefix="fault-") as folder:
                package = Path(folder) / "package"
                shutil.copytree(
                    ROOT / "fsdp2", package / "fsdp2", ignore=shutil.ignore_patterns("*.pyc")
                )
                planted = Package(package).plant(fault)
                (package / planted.file).write_text(planted.source)
                reported = self._meet(pool, fault, ranks, package, Path(folder))
        finally:
            self._pools.put(pool)
        return Verdict(fault, reported, time.monotonic() - begun)

    def _meet(
        self, pool: RankPool, fault: SimFault, ranks: int, package: Path, folder: Path
    ) -> dict[str, str]:
        given = {"name": fault.scenario, "package": str(package), "folder": str(folder)}
        request = make_request(
            meet, f"fault-{fault.name}", ranks, given, limit_s=LIMIT_S, device="sim", forks=True
        )
        outcome = pool.run(request)
        found: dict[str, str] = {}
        for rank in range(ranks):
            file = folder / f"{rank}.pickle"
            if file.exists():
                for kind, line in pickle.loads(file.read_bytes()).items():
                    found.setdefault(kind, line.replace(f"{package}/", ""))
        if outcome.kind != "passed":
            found.setdefault("ERROR", _last_line(outcome.text))
        return found

    def run_all(
        self,
        faults: Sequence[SimFault],
        ranks_of: Callable[[str], int],
        tell: Callable[[Verdict], None],
    ) -> list[Verdict]:
        def one(fault: SimFault) -> Verdict:
            verdict = self.run(fault, ranks_of(fault.scenario))
            tell(verdict)
            return verdict

        with ThreadPoolExecutor(self._jobs) as threads:
            return list(threads.map(one, faults))

    def close(self) -> None:
        for pool in self._made:
            pool.close()
        self._run.close()


@contextmanager
def planting(jobs: int) -> Iterator[Planter]:
    planter = Planter(jobs)
    try:
        yield planter
    finally:
        planter.close()


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("=")]
    errors = [line for line in lines if "Error" in line.partition(":")[0]]
    return (errors or lines or [""])[-1][:160]

"""The ``doctor`` command. Every rank runs every check and reaches the same verdicts."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import _exit as end_now  # runs no exit handlers, which might wait for other ranks
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp2._core.base.names import printable
from fsdp2._tools.doctor import advice, fast, installed, machine, right
from fsdp2._tools.doctor.advice import last_word
from fsdp2._tools.doctor.ranks import LostRankError, Ranks, Values
from fsdp2._tools.doctor.verdicts import (
    AREAS,
    MACHINE,
    NOT_MEASURED,
    SET,
    TOO_FEW,
    WARNING,
    WRONG,
    Check,
    Findings,
    Verdict,
    differing,
    exit_status,
    ranks_text,
)
from fsdp2._tools.pages.content import Advice, Fact, Page, Table
from fsdp2._tools.pages.page import write_page, write_whole

FORMAT = 1
CHECKS: tuple[Check, ...] = (*installed.CHECKS, *machine.CHECKS, *right.CHECKS, *fast.CHECKS)
QUICK_S = 10.0
EXAMPLES = """\
examples:
  torchrun --nproc-per-node 4 -m fsdp2 doctor
  torchrun --nproc-per-node 8 -m fsdp2 doctor --html doctor.html --json doctor.json
exit status:
  0 if no check failed (warnings and missing measurements are not failures), 1 if a check failed,
  2 if the command line is invalid
"""


def line_of(verdict: Verdict) -> str:
    """Format a verdict for a terminal; file and host names may contain unprintable characters."""
    return f"  {verdict.status:<12} {verdict.name}: {printable(verdict.said, most=1000)}"


def lines_of_settings(findings: Findings) -> Iterator[str]:
    yield AREAS[SET]
    if not findings.settings:
        yield "  no change is recommended"
    for one in findings.settings:
        change = one.change or "no change"
        yield f"  {one.what}: {change}. {printable(one.reason, most=1000)}"


def verdict_line(findings: Findings) -> str:
    is_wrong = exit_status(findings.verdicts)
    return f"{'FAILED' if is_wrong else 'PASSED'}: {last_word(findings.verdicts)}"


def page_of(findings: Findings, ranks: int, device: str) -> Page:
    verdicts = findings.verdicts
    bad = [one for one in verdicts if one.status in (WRONG, WARNING)]
    tables = []
    for area, title in AREAS.items():
        columns = ("check", "verdict", "finding")
        rows = [(one.name, one.status, one.said) for one in verdicts if one.area == area]
        if area == SET:
            columns = ("setting", "change", "reason")
            rows = [(one.what, one.change or "no change", one.reason) for one in findings.settings]
        tables.append(Table(title, columns, tuple(rows)))
    counts = Counter(one.status for one in verdicts).items()
    facts = (Fact(status, str(number)) for status, number in counts)
    return Page(
        title="fsdp2 doctor",
        subtitle=verdict_line(findings),
        facts=(Fact("ranks", str(ranks), device), *facts),
        advice=tuple(Advice(one.status, one.name, one.said, "") for one in bad),
        tables=tuple(table for table in tables if table.rows),
    )


def write(
    findings: Findings,
    ranks: int,
    device: str,
    page: Path | None,
    file: Path | None,
) -> None:
    """Write the requested files. Raise OSError if a file cannot be written."""
    if file is not None:
        values = {
            "fsdp2_doctor": FORMAT,
            "ranks": ranks,
            "device": device,
            "status": exit_status(findings.verdicts),
            "verdicts": [vars(one) for one in findings.verdicts],
            "settings": [vars(one) for one in findings.settings],
            "hardware": findings.of_first("plan").get("hardware"),  # ``fsdp2.plan`` reads this
            "measured": findings.values,
        }
        write_whole(file, json.dumps(_finite(values), indent=1, allow_nan=False) + "\n")
    if page is not None:
        write_page(page, page_of(findings, ranks, device))


def _finite(value: Any) -> Any:
    """Convert floats that JSON cannot represent (inf, nan) to text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m fsdp2 doctor",
        description="Check that this machine is healthy, and that sharding on it is correct and "
        "fast; recommend settings. Under torchrun, all ranks are measured.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--html", metavar="FILE", type=Path, help="write an HTML page with all findings")
    add(
        "--json",
        metavar="FILE",
        type=Path,
        help="write the findings as JSON, for reports and for fsdp2.plan",
    )
    effort = made.add_mutually_exclusive_group()
    effort.add_argument(
        "--seconds", type=_seconds, default=60.0, help="about how many seconds to time steps (60)"
    )
    effort.add_argument(
        "--quick", dest="seconds", action="store_const", const=QUICK_S, help="same as --seconds 10"
    )
    add("--timeout", type=_seconds, default=60.0, help="seconds until a rank counts as lost (60)")
    add("--hsdp", action="store_true", help="also check HSDP on one host")
    add(
        "--checkpoint",
        metavar="FOLDER",
        type=Path,
        default=Path(),
        help="folder for the test checkpoint (the current folder)",
    )
    return made


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.0 < found <= 86400.0:
        raise argparse.ArgumentTypeError(f"expected 0 < seconds <= 86400, found {text!r}")
    return found


class Doctor:
    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.findings = Findings()
        self._lost: tuple[int, ...] = ()
        self._over = ""  # the reason why collectives no longer work
        self._told_area = ""

    @property
    def _tells(self) -> bool:
        """Return True on the rank that prints: the first one that still answers."""
        left = (rank for rank in range(self.ranks.size) if rank not in self._lost)
        return self.ranks.rank == next(left, None)

    def run(self, checks: Sequence[Check]) -> int:
        self._meet("the first rendezvous")
        if self.ranks.size == 1:
            self._print(
                "Measuring one rank. For N ranks, run torchrun --nproc-per-node N -m fsdp2 doctor"
            )
        for index, check in enumerate(checks):
            if self._over:
                left = checks[index:]
                self._tell(Verdict(one.area, one.name, NOT_MEASURED, self._over) for one in left)
                break
            self._run_one(check)
        return self._finish()

    def _run_one(self, check: Check) -> None:
        if self.ranks.size < check.ranks:
            self._tell([Verdict(check.area, check.name, NOT_MEASURED, TOO_FEW)])
            return

        def give_up(conclude: Callable[[], list[Values]]) -> None:
            """End this process, whose main thread is blocked by a collective that never returns."""
            try:
                failure = _failure(check, conclude())
                self._over = f"{check.name} did not return"
                self._tell([failure])
            except LostRankError as error:
                self._lose(error, check.name)
            self._finish()

        try:
            answers = self.ranks.ask(check.measure, check.limit_s, give_up)
        except LostRankError as error:
            self._lose(error, check.name)
            return
        self.findings.values[check.name] = answers
        if any("error" in one for one in answers):
            self._tell([_failure(check, answers)])
            self._meet("the rendezvous after an error")
            return
        try:
            self._tell(check.judge(answers))
        except Exception as error:  # unexpected values must not hide the other findings
            said = f"cannot judge the measurements: {type(error).__name__}: {error}"
            self._tell([Verdict(check.area, check.name, WRONG, said)])
        if check is CHECKS[-1]:
            self._tell(advice.prediction(self.findings))

    def _meet(self, where: str) -> None:
        try:
            self.ranks.meet()
        except LostRankError as error:
            self._lose(error, where)
        except Exception as error:  # a backend raises its own exception classes
            self._over = "the rendezvous failed"
            said = f"{self._over}: {type(error).__name__}: {error}".partition("\n")[0]
            self._tell([Verdict(MACHINE, "ranks", WRONG, said)])

    def _lose(self, error: LostRankError, where: str) -> None:
        self._lost, self._over = error.ranks, f"lost {ranks_text(error.ranks)}"
        said = f"did not answer within {self.ranks.options.timeout:g} s in {where}"
        self._tell([Verdict(MACHINE, "ranks", WRONG, f"{ranks_text(self._lost)} {said}")])

    def _tell(self, verdicts: Iterable[Verdict]) -> None:
        for verdict in verdicts:
            self.findings.verdicts.append(verdict)
            if verdict.area != self._told_area:
                self._told_area = verdict.area
                self._print(AREAS[verdict.area])
            self._print(line_of(verdict))

    def _print(self, line: str) -> None:
        if self._tells:
            print(line, flush=True)

    def _finish(self) -> int:
        self.findings.settings.extend(advice.settings(self.findings))
        for line in lines_of_settings(self.findings):
            self._print(line)
        self._print(verdict_line(self.findings))
        status, options = exit_status(self.findings.verdicts), self.ranks.options
        if self._tells:
            try:
                device, files = self.ranks.device.type, (options.html, options.json)
                write(self.findings, self.ranks.size, device, *files)
            except OSError as error:
                print(f"python -m fsdp2 doctor: {error}", file=sys.stderr)
                status = 1
            else:
                for path in filter(None, files):
                    self._print(f"wrote {path}")
        if self._over:  # destroying a process group may block if a rank is lost
            self.ranks.wait_for_teller(self._tells)
            sys.stdout.flush()
            sys.stderr.flush()
            end_now(status)
        self.ranks.leave()
        return status


def _failure(check: Check, answers: Sequence[Values]) -> Verdict:
    """Return the verdict on a check that raised. The first exception counts as the cause."""
    raised = {rank: one for rank, one in enumerate(answers) if "error" in one}
    first = min(raised, key=lambda rank: raised[rank]["after_s"])
    said = f"{ranks_text([first])} raised {raised[first]['error']}"
    if len(raised) == len(answers) and len(differing([one["error"] for one in answers])) == 1:
        said = f"every rank raised {raised[first]['error']}"
        if raised[first]["error"].startswith("NotImplementedError"):
            return Verdict(check.area, check.name, NOT_MEASURED, said)
    return Verdict(check.area, check.name, WRONG, said)


def main(arguments: Sequence[str], checks: Sequence[Check] = CHECKS) -> int:
    made = parser()
    given = made.parse_args(arguments)
    for path in filter(None, (given.html, given.json)):
        if not path.absolute().parent.is_dir():
            made.error(f"the folder of {path} does not exist")
    # otherwise torch kills the process at a collective's timeout, before the doctor can report it
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    try:
        ranks = Ranks(given)
    except dist.DistError as error:
        said = f"no rendezvous within {given.timeout:g} s: {error}".partition("\n")[0]
        print(f"python -m fsdp2 doctor: {said}", file=sys.stderr)
        return 1
    return Doctor(ranks).run(checks)

"""What a doctor leaves: lines in a terminal, a page, and a JSON file that ``plan`` reads.

Owns the words around verdicts. It must not measure.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp2._base.names import printable
from fsdp2._doctor.advice import last_word
from fsdp2._doctor.verdicts import AREAS, SET, WARNING, WRONG, Findings, Verdict, exit_status
from fsdp2._pages.content import Advice, Fact, Page, Table
from fsdp2._pages.files import write_whole
from fsdp2._pages.page import write_page

FORMAT = 1


def line_of(verdict: Verdict) -> str:
    """Return a verdict as a terminal shows it: names of files and hosts may hold anything."""
    said = printable(verdict.said, most=1000)
    return f"  {verdict.status:<12} {verdict.name}: {said}"


def lines_of_settings(findings: Findings) -> Iterator[str]:
    yield AREAS[SET]
    if not findings.settings:
        yield "  nothing was measured that says so"
    for one in findings.settings:
        change = one.change or "leave it"
        yield f"  {one.what}: {change}. {printable(one.reason, most=1000)}"


def verdict_line(findings: Findings) -> str:
    """Return the last line of all."""
    is_wrong = exit_status(findings.verdicts)
    return f"{'NOT WELL' if is_wrong else 'WELL'}: {last_word(findings.verdicts)}"


def page_of(findings: Findings, ranks: int, device: str) -> Page:
    verdicts = findings.verdicts
    bad = [one for one in verdicts if one.status in (WRONG, WARNING)]
    tables = [
        Table(
            title,
            ("check", "verdict", "what was found"),
            tuple((v.name, v.status, v.said) for v in verdicts if v.area == area),
        )
        for area, title in AREAS.items()
        if area != SET
    ]
    tables.append(
        Table(
            AREAS[SET],
            ("what", "set", "why"),
            tuple((one.what, one.change or "leave it", one.reason) for one in findings.settings),
        )
    )
    return Page(
        title="fsdp2 doctor",
        subtitle=verdict_line(findings),
        facts=(
            Fact("ranks", str(ranks), device),
            *(
                Fact(status, str(sum(one.status == status for one in verdicts)))
                for status in dict.fromkeys(one.status for one in verdicts)
            ),
        ),
        advice=tuple(Advice(one.status, one.name, one.said, "") for one in bad),
        tables=tuple(table for table in tables if table.rows),
    )


def json_of(findings: Findings, ranks: int, device: str) -> dict[str, Any]:
    """Return what the file holds: ``hardware`` is what ``fsdp2.plan`` takes of it."""
    return {
        "fsdp2_doctor": FORMAT,
        "ranks": ranks,
        "device": device,
        "status": exit_status(findings.verdicts),
        "verdicts": [vars(one) for one in findings.verdicts],
        "settings": [vars(one) for one in findings.settings],
        "hardware": findings.of_first("plan").get("hardware"),
        "measured": dict(findings.values),
    }


def write(
    findings: Findings, ranks: int, device: str, page: Path | None, file: Path | None
) -> None:
    """Write what was asked for.

    Raises:
        OSError: a file cannot be written.
    """
    if file is not None:
        values = _finite(json_of(findings, ranks, device))
        write_whole(file, json.dumps(values, indent=1, allow_nan=False) + "\n")
    if page is not None:
        write_page(page, page_of(findings, ranks, device))


def _finite(value: Any) -> Any:
    """Replace what JSON has no numbers for, by a word."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value

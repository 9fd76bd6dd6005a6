"""Results of checks: lines with a status, figures, recommended settings, and the exit status."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp2._tools.doctor.ranks import Ranks, Values

OK, NOT_MEASURED, WARNING, WRONG = "ok", "not measured", "warning", "wrong"
TOO_FEW = "requires at least two ranks"
RIGHT, FAST, MACHINE, SET = "right", "fast", "machine", "set"
AREAS = {
    RIGHT: "Correctness",
    FAST: "Speed",
    MACHINE: "Machine",
    SET: "Recommended settings",
}


@dataclass(frozen=True)
class Verdict:
    """One line of output: the name of a check, and ``said``, a sentence with the measured value."""

    area: str
    name: str
    status: str
    said: str


@dataclass(frozen=True)
class Setting:
    """A recommended setting. ``change`` is code or a command, or empty if the current setting is
    best. ``reason`` cites the measurement."""

    what: str
    change: str
    reason: str


@dataclass(frozen=True)
class Check:
    """A check. Every rank runs ``measure``, and calls ``judge`` with the results of all ranks, in
    rank order, so all ranks reach the same verdicts. ``limit_s`` is the maximum time of ``measure``
    on a healthy machine. ``ranks`` is the minimum number of ranks."""

    area: str
    name: str
    measure: Callable[[Ranks], Values]
    judge: Callable[[Sequence[Values]], Iterable[Verdict]]
    limit_s: float = 60.0
    ranks: int = 1


@dataclass
class Findings:
    """All findings, in the order of the checks."""

    verdicts: list[Verdict] = field(default_factory=list)
    values: dict[str, Sequence[Values]] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)

    def of_first(self, name: str) -> Values:
        """Return the first rank's measurements in a check, or an empty dict if there are none."""
        found = self.values.get(name) or [{}]
        return dict(found[0])


def exit_status(verdicts: Iterable[Verdict]) -> int:
    """Return 1 if a check failed; warnings and missing measurements are not failures."""
    return int(any(verdict.status == WRONG for verdict in verdicts))


def differing(values: Sequence[Any]) -> Mapping[str, list[int]]:
    """Return the ranks that have each value, keyed by the value as text, most frequent first."""
    found: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(str(value), []).append(rank)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, or ``ranks 1, 2``; long lists are truncated."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"

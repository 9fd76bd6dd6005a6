"""What a check says: one line with a status, the figures behind it, and what to set.

Owns the values and the exit status. They must not know how anything is measured or shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp2._tools.doctor.ranks import Ranks, Values

OK, NOT_MEASURED, WARNING, WRONG = "ok", "not measured", "warning", "wrong"
RIGHT, FAST, MACHINE, SET = "right", "fast", "machine", "set"
AREAS = {
    RIGHT: "Is it right here?",
    FAST: "Is it fast here?",
    MACHINE: "Is the machine well?",
    SET: "What to set",
}


@dataclass(frozen=True)
class Verdict:
    """One line. ``name`` is that of the check, ``said`` a sentence with its figure."""

    area: str
    name: str
    status: str
    said: str


@dataclass(frozen=True)
class Setting:
    """Something to set: ``change`` is code or a command, ``reason`` has the figure that says why.

    ``change`` is empty where what is set already is best.
    """

    what: str
    change: str
    reason: str


@dataclass(frozen=True)
class Check:
    """A question. Every rank runs ``measure``, and ``judge`` is given what all of them measured.

    ``judge`` gets the values in the order of the ranks, and the same on every rank, so all ranks
    come to the same verdicts. ``limit_s``: how long ``measure`` may take where all is well.
    """

    area: str
    name: str
    measure: Callable[[Ranks], Values]
    judge: Callable[[Sequence[Values]], Iterable[Verdict]]
    limit_s: float = 60.0


@dataclass
class Findings:
    """All that was found, in order; filled check by check."""

    verdicts: list[Verdict] = field(default_factory=list)
    values: dict[str, Sequence[Values]] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)

    def of_first(self, name: str) -> Values:
        """Return what the first rank measured in a check; empty if it did not."""
        found = self.values.get(name) or [{}]
        return dict(found[0])


def exit_status(verdicts: Iterable[Verdict]) -> int:
    """Return 1 if something is wrong; warnings, and what was not measured, are no failure."""
    return int(any(verdict.status == WRONG for verdict in verdicts))


def differing(values: Sequence[Any]) -> Mapping[str, list[int]]:
    """Return which ranks have which value, as text; the value of most ranks comes first."""
    found: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(str(value), []).append(rank)
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def counted(number: int, what: str) -> str:
    """Return a number of things."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, or ``ranks 1, 2``; of many the first few."""
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) != 1 else ''} {shown}"

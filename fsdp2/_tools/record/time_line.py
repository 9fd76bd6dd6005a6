"""Converts the rows of one rank to spans of lanes: compute, gathers and reductions over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fsdp2._tools.pages.content import COMPUTE, GATHER, REDUCE, Span

UNIT_KINDS = ("forward", "backward", "recompute")
PREFETCHES = {"hit": "prefetched", "late": "prefetched too late", "none": "not prefetched"}
LANES = {"unshard": GATHER, "reduce": REDUCE, "all_reduce": REDUCE}


def shown(name: str) -> str:
    return name or "<root>"


def has_times(row: dict[str, Any]) -> bool:
    return row["begin_ns"] is not None and row["end_ns"] is not None


def pieces_of(rows: Iterable[dict[str, Any]]) -> list[Span]:
    """Convert rows, such as those of a step, to spans of lanes. Times remain in nanoseconds."""
    known = [row for row in rows if has_times(row) and row["end_ns"] > row["begin_ns"]]
    units = [row for row in known if row["kind"] in UNIT_KINDS]
    waits = [row for row in known if row["kind"] == "wait"]
    waits.sort(key=lambda row: row["begin_ns"])
    flights = [row for row in known if row["kind"] in LANES]
    return [*_innermost(units, waits), *map(_wait, waits), *map(_flight, flights)]


def _wait(row: dict[str, Any]) -> Span:
    cause = f"{row['for']} {shown(row['unit'])}"
    note = f"by {shown(row['by'])}"
    if "prefetch" in row:
        note += f", {PREFETCHES[row['prefetch']]}"
    return Span(COMPUTE, f"wait for {cause}", row["begin_ns"], row["end_ns"], 0, cause, note)


def _flight(row: dict[str, Any]) -> Span:
    kind = row.get("collective", row["kind"])
    name = f"{kind} {shown(row['unit'])}"
    return Span(LANES[row["kind"]], name, row["begin_ns"], row["end_ns"], row["nbytes"])


def _innermost(units: Sequence[dict[str, Any]], waits: Sequence[dict[str, Any]]) -> list[Span]:
    """Return spans of the unit that was last entered at each time: in a root, the running block.
    Waits are cut out. Backwards of units may end in any order, so they do not form a tree."""
    edges = [(row["begin_ns"], 1, row["n"], row) for row in (*units, *waits)]
    edges += [(row["end_ns"], 0, row["n"], row) for row in (*units, *waits)]
    edges.sort(key=lambda edge: edge[:3])
    entered: dict[int, dict[str, Any]] = {}
    waiting: dict[int, dict[str, Any]] = {}
    found: list[Span] = []
    begin: float = 0
    for time, enters, number, row in edges:
        if entered and not waiting and time > begin:
            inner = entered[next(reversed(entered))]
            name = f"{inner['kind']} {shown(inner['unit'])}"
            if found and (found[-1].name, found[-1].end) == (name, begin):
                begin = found.pop().begin
            found.append(Span(COMPUTE, name, begin, time))
        begin = time
        active = waiting if row["kind"] == "wait" else entered
        if enters:
            active[number] = row
        else:
            active.pop(number, None)
    return found

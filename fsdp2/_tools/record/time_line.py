"""Converts the rows of one rank to spans of lanes: compute, gathers and reductions over time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    known = [row for row in rows if has_times(row)]
    waits = sorted(
        (_wait(row) for row in known if row["kind"] == "wait" and row["end_ns"] > row["begin_ns"]),
        key=lambda piece: piece.begin,
    )
    units = [row for row in known if row["kind"] in UNIT_KINDS]
    flights = [row for row in known if row["kind"] in LANES and row["end_ns"] > row["begin_ns"]]
    return [*_without(_innermost(units), waits), *waits, *(_flight(row) for row in flights)]


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


def _innermost(units: Sequence[dict[str, Any]]) -> Iterator[Span]:
    """Yield spans of the unit that was last entered at each time: in a root, the running block.
    Backwards of units may end in any order, so they do not form a tree."""
    edges = [(row["begin_ns"], 1, row["n"], row) for row in units]
    edges += [(row["end_ns"], 0, row["n"], row) for row in units]
    edges.sort(key=lambda edge: edge[:3])
    active: dict[int, dict[str, Any]] = {}
    begin = 0
    for time, enters, number, row in edges:
        if active and time > begin:
            inner = active[next(reversed(active))]
            yield Span(COMPUTE, f"{inner['kind']} {shown(inner['unit'])}", begin, time)
        begin = time
        if enters:
            active[number] = row
        else:
            active.pop(number, None)


def _without(pieces: Iterable[Span], waits: Sequence[Span]) -> Iterator[Span]:
    """Cut waits out of the spans of units, and merge adjacent spans with the same name."""
    last: Span | None = None
    position = 0
    for piece in pieces:
        begin = piece.begin
        while position < len(waits) and waits[position].end <= begin:
            position += 1
        place = position
        cuts = []
        while place < len(waits) and waits[place].begin < piece.end:
            cuts.append((max(waits[place].begin, begin), waits[place].end))
            place += 1
        for start, stop in [*cuts, (piece.end, piece.end)]:
            if start > begin:
                part = Span(piece.lane, piece.name, begin, start)
                if last is not None and last.name == part.name and last.end == part.begin:
                    last = Span(part.lane, part.name, last.begin, part.end)
                else:
                    if last is not None:
                        yield last
                    last = part
            begin = max(begin, stop)
    if last is not None:
        yield last

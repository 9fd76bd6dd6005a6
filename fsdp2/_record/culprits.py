"""Whose fault a wait is: delays of ranks that the others wait for, in time lines and in sums.

Owns what is taken from the waits of others and said of the rank that was late. It must not know
how that is told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from fsdp2._pages.content import Span
from fsdp2._record.align import Arrivals, Delay
from fsdp2._record.time_line import shown

LATE = "late"
"""The lane of a rank that others waited for."""

MOST = 0.5
"""Part of a wait that a delay has to fill, to be why there was a wait."""


def delays_of(late: Iterable[Arrivals], delays: Iterable[Delay]) -> list[Delay]:
    """Return those delays whose rank is late as a habit."""
    ranks = {one.rank for one in late}
    return [delay for delay in delays if delay.rank in ranks]


def caused(delays: Iterable[Delay]) -> Counter[tuple[str, str]]:
    """Return the seconds that all others waited, by unit and kind of collective."""
    found: Counter[tuple[str, str]] = Counter()
    for delay in delays:
        found[delay.unit, delay.kind] += delay.waited_s  # type: ignore[assignment]  # seconds
    return found


def blamed(span: Span, rank: int, delays: Sequence[Delay], start: int) -> Span:
    """Return a wait of ``rank`` with the rank that it was for, if one was late.

    ``start``: where the time line begins, in nanoseconds on the clock of the delays.
    """
    if not span.cause or span.end <= span.begin:
        return span
    for delay in delays:
        if rank == delay.rank or span.cause != f"{delay.kind} {shown(delay.unit)}":
            continue
        begin, end = ((time - start) / 1e9 for time in (delay.begin, delay.end))
        if min(end, span.end) - max(begin, span.begin) > MOST * (span.end - span.begin):
            return replace(span, cause=f"rank {delay.rank}, {span.cause}")
    return span


def late_spans(rank: int, delays: Iterable[Delay], start: int, until: float) -> list[Span]:
    """Return when others waited for a rank, as spans of a lane of its own that do not overlap.

    ``until``: seconds after ``start`` at which the step ends.
    """
    mine = sorted(
        ((one.begin - start) / 1e9, (one.end - start) / 1e9, one) for one in delays
        if one.rank == rank
    )  # fmt: skip
    found: list[Span] = []
    for begin, end, one in mine:
        if end <= 0 or begin >= until:
            continue
        what = f"{one.kind} {shown(one.unit)}"
        if found and begin < found[-1].end:  # several collectives that it came late to together
            last = found[-1]
            found[-1] = replace(last, end=max(last.end, end), note=f"{last.note}, {what}")
        else:
            found.append(Span(LATE, f"the others wait for rank {rank}", begin, end, 0, "", what))
    return found

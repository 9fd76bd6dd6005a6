"""What bounds the steps of a recording: a rank, the links, what is between units, or a unit.

Owns the judgement and its words, as advice and as one line. It must not know pages' pictures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fsdp2._core.base.names import nbytes_text
from fsdp2._tools.pages.content import Advice, Headline, Span
from fsdp2._tools.record.align import Aligned, Arrivals, Delay, delays
from fsdp2._tools.record.rows import RankFile
from fsdp2._tools.record.steps import COLLECTIVES
from fsdp2._tools.record.time_line import has_times, shown

# Whose fault a wait is: delays of ranks that the others wait for, in time lines and in sums.

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


WORTH = 0.01
"""Part of the time from which something is worth a word."""

BOUND = 0.25
"""Part of the time of steps from which something is what bounds them."""

CARRY = ("unshard", "reduce", "all_reduce")

SIGMAS = 2
"""Deviations from chance that are no chance any more."""

LATER = 2
"""Times that a rank is later than the others, from where on it is a habit."""


def steps_of(file: RankFile) -> list[dict[str, Any]]:
    return [row for row in file.rows if row["kind"] == "step" and not row["failed"]]


def seconds_of(files: Sequence[RankFile]) -> float:
    """Return the time of all steps, on the rank that took longest."""
    return max((sum(row["seconds"] for row in steps_of(file)) for file in files), default=0.0)


def stragglers(files: Sequence[RankFile], found: Sequence[Arrivals]) -> tuple[Arrivals, ...]:
    """Return ranks that the others wait for, if that is worth a word.

    A rank is one if it is last far more often than by chance, or later than all others together,
    without its one longest delay: a hiccup is no habit. Who is late for far less time than the
    worst is none: of two ranks, one is the last whenever the other one is not.
    """
    total = seconds_of(files)
    late_s = sum(one.late_s for one in found)
    worst = max((one.late_s for one in found), default=0.0)

    def is_one(one: Arrivals) -> bool:
        if not one.counted or one.late_s < max(WORTH * total, worst / LATER):
            return False
        is_often = one.last - one.expected > SIGMAS * _deviation(one)
        return is_often or one.late_s - one.longest_late_s > LATER * (late_s - one.late_s)

    return tuple(filter(is_one, found))


def _deviation(one: Arrivals) -> float:
    """Return how far chance alone moves the number of times that a rank is last."""
    return math.sqrt(one.expected * (1 - one.expected / one.counted))


class UnitWaits:
    """Waits for what one unit needs, over all ranks and complete steps."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(COLLECTIVES, 0.0)
        self.prefetches: Counter[str] = Counter()

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def _waits_of(files: Sequence[RankFile]) -> dict[str, UnitWaits]:
    found: dict[str, UnitWaits] = {}
    for file in files:
        complete = {row["step"] for row in steps_of(file)}
        for row in file.rows:
            if row["kind"] == "wait" and row["step"] in complete and row["end_ns"] is not None:
                unit = found.setdefault(row["unit"], UnitWaits())
                unit.seconds[row["for"]] += (row["end_ns"] - row["begin_ns"]) / 1e9
                if "prefetch" in row:
                    unit.prefetches[row["prefetch"]] += 1
    return found


class Bounds(NamedTuple):
    """What bounds the steps, and what was found on the way."""

    headline: Headline
    advice: tuple[Advice, ...]
    waits: dict[str, UnitWaits]  # all, by unit
    delays: list[Delay]  # of ranks that the others wait for


def find_bounds(files: Sequence[RankFile], aligned: Aligned, arrived: Sequence[Arrivals]) -> Bounds:
    """Judge what costs the most; what follows from a rank's lateness is no fault of a unit."""
    waits = _waits_of(files)
    late = stragglers(files, arrived)
    held_up = delays_of(late, delays(aligned) if late else ())
    left = _without(waits, caused(held_up))
    of_steps = [*_advise_ranks(files, late, held_up), *_advise_steps(files, left)]
    of_units = _advise_units(files, left)
    headline = _headline(files, of_steps, of_units)
    return Bounds(headline, (*of_steps, *of_units), waits, held_up)


def _headline(
    files: Sequence[RankFile], of_steps: Sequence[Advice], of_units: Sequence[Advice]
) -> Headline:
    if of_steps:
        text = of_steps[0].found.partition(";")[0].partition(":")[0]
        return Headline(f"{of_steps[0].about}: {text}", "bad")
    rows = [row for file in files for row in steps_of(file)]
    total = sum(row["seconds"] for row in rows)
    if not total:
        return Headline("no complete step was recorded")
    compute = 100 * sum(row["compute_s"] for row in rows) / total
    waits = 100 * sum(row[f"wait_{kind}_s"] for row in rows for kind in COLLECTIVES) / total
    rest = f"waits: {waits:.2g} %, mostly for {of_units[0].about}" if of_units else "no wait counts"
    return Headline(f"compute: {compute:.3g} % of the time of steps; {rest}", "good")


def _advise_ranks(
    files: Sequence[RankFile], late: Sequence[Arrivals], held_up: Sequence[Delay]
) -> list[Advice]:
    total = seconds_of(files)
    found = []
    for one in late:
        units = Counter(shown(delay.unit) for delay in held_up if delay.rank == one.rank)
        where = ", ".join(name for name, _ in units.most_common(2))
        share = f" ({100 * one.late_s / total:.2g} % of the steps)" if total else ""
        found.append(
            Advice(
                "slow",
                f"rank {one.rank}",
                f"the others waited {time_text(one.late_s)} for it in all{share}, at most "
                f"{time_text(one.longest_late_s)} at once; it came last to {one.last} of "
                f"{one.counted} collectives, mostly of {where}",
                "look at what this rank does besides: its input pipeline, its share of the work, "
                "its clock rate, other processes on its host",
                f"{time_text(one.late_s)} over the recording; no setting of a model gives it back",
            )
        )
    return found


def _advise_steps(files: Sequence[RankFile], left: dict[str, UnitWaits]) -> list[Advice]:
    """Say what bounds the steps as a whole: the links, or what is between the units."""
    rows = [row for file in files for row in steps_of(file)]
    total = sum(row["seconds"] for row in rows)
    if not total:
        return []
    found = []
    waited = sum(unit.total for unit in left.values()) / total
    if waited > BOUND:
        nbytes, seconds = _carried(files)
        rate = (
            f", {nbytes_text(int(nbytes / seconds))}/s while they are under way" if seconds else ""
        )
        found.append(
            Advice(
                "slow",
                "the links",
                f"{100 * waited:.2g} % of the time of steps is waiting for collectives to which no "
                f"rank came late: {nbytes_text(nbytes // len(rows))} a step and rank{rate}",
                "more work between them (a larger batch a rank, or accumulation), or fewer bytes "
                "(MixedPrecisionPolicy, gather_dtype, Compress); units that are larger, where the "
                "collectives are small",
                f"at most {100 * waited:.2g} % of a step",
            )
        )
    waits = sum(row[f"wait_{kind}_s"] for row in rows for kind in COLLECTIVES)
    idle = 1 - (sum(row["compute_s"] for row in rows) + waits) / total
    if idle > BOUND:
        found.append(
            Advice(
                "slow",
                "between the units",
                f"{100 * idle:.2g} % of the time of steps no unit computes and nothing is waited "
                "for: the optimizer, the input, or a host that is too slow to keep a device busy",
                "fsdp2.optim.local for the optimizer, workers for the input; fsdp2.compile or "
                "larger operations for the host",
                f"at most {100 * idle:.2g} % of a step",
            )
        )
    return found if waited >= idle else found[::-1]  # what costs more comes first


def _carried(files: Sequence[RankFile]) -> tuple[int, float]:
    """Return the bytes that collectives of complete steps carried, and the seconds they took."""
    nbytes, seconds = 0, 0.0
    for file in files:
        complete = {row["step"] for row in steps_of(file)}
        for row in file.rows:
            if row["kind"] in CARRY and row["step"] in complete and has_times(row):
                nbytes += row["nbytes"]
                seconds += (row["end_ns"] - row["begin_ns"]) / 1e9
    return nbytes, seconds


def _without(
    waits: dict[str, UnitWaits], by_ranks: Counter[tuple[str, str]]
) -> dict[str, UnitWaits]:
    """Return the waits that are left where no rank had been late: what a setting can change."""
    left = {}
    for name, unit in waits.items():
        left[name] = one = UnitWaits()
        one.prefetches = unit.prefetches
        for kind, seconds in unit.seconds.items():
            one.seconds[kind] = max(0.0, seconds - by_ranks[name, kind])
    return left


def _advise_units(files: Sequence[RankFile], waits: dict[str, UnitWaits]) -> list[Advice]:
    """Name the units that wait most, and what would help."""
    total = sum(row["seconds"] for file in files for row in steps_of(file))
    worst = sorted(waits.items(), key=lambda item: -item[1].total)[:3]
    found = []
    for name, unit in worst:
        if not total or unit.total < WORTH * total:
            continue
        kind = max(unit.seconds, key=lambda one: unit.seconds[one])
        found.append(
            Advice(
                "slow",
                shown(name),
                f"{100 * unit.total / total:.2g} % of the time of steps is waiting for its "
                f"collectives, mostly {kind}",
                _remedy(kind, unit),
                f"at most {100 * unit.total / total:.2g} % of a step",
            )
        )
    return found


def _remedy(kind: str, unit: UnitWaits) -> str:
    if kind != "all_gather":
        return 'model.set_memory("fast"), which lets more reductions stay in flight'
    if unit.prefetches["none"] > unit.prefetches["late"]:
        return (
            "nobody gathers it ahead: the first unit of a step cannot be; for others keep the "
            "order of forwards, or use set_modules_to_forward_prefetch"
        )
    return 'model.set_memory("fast"), which gathers two units ahead; or larger units'


def time_text(seconds: float) -> str:
    if seconds == float("inf"):
        return "unknown"
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"

"""Bottlenecks of recorded steps, as advice: a rank, the links, code between units, or a unit."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fsdp2._core.base.names import nbytes_text, seconds_text
from fsdp2._tools.pages.content import Advice, Headline, Span
from fsdp2._tools.record.align import WAITS, Aligned, Arrivals, Delay
from fsdp2._tools.record.steps import COLLECTIVES
from fsdp2._tools.record.time_line import LANES, has_times, shown

LATE = "late"
"""The lane that shows when other ranks waited for this rank."""
MOST = 0.5
"""Minimum fraction of a wait that a delay must overlap to count as its cause."""
WORTH = 0.01
"""Minimum cost for which advice is given, as a fraction of the step time."""
BOUND = 0.25
"""Minimum cost of a bottleneck of the whole step, as a fraction of the step time."""
SIGMAS = 2
"""A rank is significantly late if it is last more often than expected, by more than this many
standard deviations."""
LATER = 2
"""A rank is habitually late if its delays exceed this multiple of all other ranks' delays."""


def delays_of(late: Iterable[Arrivals], aligned: Aligned) -> list[Delay]:
    """Return the delays of ranks that are habitually late."""
    ranks = {one.rank for one in late}
    return [delay for delay in aligned.delays if delay.rank in ranks]


def caused(delays: Iterable[Delay]) -> Counter[tuple[str, str]]:
    """Return the total waiting time of other ranks in seconds, by unit and kind of collective."""
    found: Counter[tuple[str, str]] = Counter()
    for delay in delays:
        found[delay.unit, delay.kind] += delay.waited_s  # type: ignore[assignment]  # seconds
    return found


def blamed(span: Span, rank: int, delays: Sequence[Delay], start: int) -> Span:
    """Return ``span``, a wait of ``rank``. If another rank was late, name it in the wait's cause.
    ``start`` is the origin of the timeline, in nanoseconds on the clock of the delays."""
    if not span.cause or span.end <= span.begin:
        return span
    for delay in delays:
        if rank == delay.rank or span.cause != f"{delay.kind} {shown(delay.unit)}":
            continue
        begin, end = ((time - start) / 1e9 for time in (delay.begin, delay.end))
        if min(end, span.end) - max(begin, span.begin) > MOST * (span.end - span.begin):
            return replace(span, cause=f"rank {delay.rank}, {span.cause}")
    return span


def late_spans(
    rank: int,
    delays: Iterable[Delay],
    start: int,
    until: float,
) -> list[Span]:
    """Return the times during which other ranks waited for ``rank``, as spans of a separate lane.
    The spans do not overlap. ``until``: end of the step, in seconds after ``start``."""
    found: list[Span] = []
    mine = (one for one in delays if one.rank == rank)
    for one in sorted(mine, key=lambda one: (one.begin, one.end)):
        begin, end = (one.begin - start) / 1e9, (one.end - start) / 1e9
        if end <= 0 or begin >= until:
            continue
        what = f"{one.kind} {shown(one.unit)}"
        # the rank was late for several collectives at the same time
        if found and begin < found[-1].end:
            last = found[-1]
            found[-1] = replace(last, end=max(last.end, end), note=f"{last.note}, {what}")
        else:
            found.append(Span(LATE, f"the others wait for rank {rank}", begin, end, 0, "", what))
    return found


def stragglers(aligned: Aligned) -> tuple[Arrivals, ...]:
    """Return the stragglers: ranks for which others wait significantly long. A straggler is last
    far more often than by chance, or its delays without the longest exceed ``LATER`` times those of
    all other ranks together. Ranks that are far less late than the worst rank are excluded: with
    only two ranks, one of them is always last."""
    found = aligned.arrivals
    total = _longest_seconds(aligned)
    late_s = sum(one.late_s for one in found)
    worst = max((one.late_s for one in found), default=0.0)

    def is_one(one: Arrivals) -> bool:
        if not one.counted or one.late_s < max(WORTH * total, worst / LATER):
            return False
        # standard deviation of the number of times that a rank is last by chance
        deviation = math.sqrt(one.expected * (1 - one.expected / one.counted))
        is_often = one.last - one.expected > SIGMAS * deviation
        return is_often or one.late_s - one.longest_late_s > LATER * (late_s - one.late_s)

    return tuple(filter(is_one, found))


def _longest_seconds(aligned: Aligned) -> float:
    return max(sum((row["seconds"] for row in file.steps), 0.0) for file in aligned.files)


def timed(aligned: Aligned, *kinds: str) -> Iterator[tuple[dict[str, Any], float]]:
    """Yield the rows of the given kinds in complete steps, with their durations in seconds."""
    for file in aligned.files:
        complete = {row["step"] for row in file.steps}
        for row in file.rows:
            if row["kind"] in kinds and row["step"] in complete and has_times(row):
                yield row, (row["end_ns"] - row["begin_ns"]) / 1e9


@dataclass
class UnitWaits:
    """Waits for the collectives of one unit, over all ranks and complete steps."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COLLECTIVES, 0.0))
    prefetches: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def _waits_of(aligned: Aligned) -> dict[str, UnitWaits]:
    found: dict[str, UnitWaits] = defaultdict(UnitWaits)
    for row, seconds in timed(aligned, "wait"):
        unit = found[row["unit"]]
        unit.seconds[row["for"]] += seconds
        if "prefetch" in row:
            unit.prefetches[row["prefetch"]] += 1
    return found


class Bounds(NamedTuple):
    """The bottleneck of the steps, and the intermediate results."""

    headline: Headline
    advice: tuple[Advice, ...]
    waits: dict[str, UnitWaits]  # keyed by unit
    delays: list[Delay]  # habitually late ranks


def find_bounds(aligned: Aligned) -> Bounds:
    """Find the largest costs. Waits caused by a late rank are not attributed to units."""
    waits = _waits_of(aligned)
    late = stragglers(aligned)
    held_up = delays_of(late, aligned)
    left = _without(waits, caused(held_up))
    of_steps = [*_advise_ranks(aligned, late, held_up), *_advise_steps(aligned, left)]
    of_units = _advise_units(aligned, left)
    headline = _headline(aligned, of_steps, of_units)
    return Bounds(headline, (*of_steps, *of_units), waits, held_up)


def _headline(aligned: Aligned, of_steps: Sequence[Advice], of_units: Sequence[Advice]) -> Headline:
    if of_steps:
        text = of_steps[0].found.partition(";")[0].partition(":")[0]
        return Headline(f"{of_steps[0].about}: {text}", "bad")
    if not aligned.total("seconds"):
        return Headline("no complete step was recorded")
    compute = 100 * aligned.share("compute_s")
    waits = 100 * aligned.share(*WAITS)
    rest = "no wait is significant"
    if of_units:
        rest = f"waits: {waits:.2g} %, mostly for {of_units[0].about}"
    return Headline(f"compute: {compute:.3g} % of the step time; {rest}", "good")


def _advise_ranks(
    aligned: Aligned, late: Sequence[Arrivals], held_up: Sequence[Delay]
) -> list[Advice]:
    total = _longest_seconds(aligned)
    found = []
    for one in late:
        units = Counter(shown(delay.unit) for delay in held_up if delay.rank == one.rank)
        where = ", ".join(name for name, _ in units.most_common(2))
        share = f" ({100 * one.late_s / total:.2g} % of the steps)" if total else ""
        found.append(
            Advice(
                "slow",
                f"rank {one.rank}",
                f"the others waited {time_text(one.late_s)} for it in total{share}, at most "
                f"{time_text(one.longest_late_s)} at a time; it was last in {one.last} of "
                f"{one.counted} collectives, mostly of {where}",
                "check this rank's input pipeline, its share of the work, its clock rate, and "
                "other processes on its host",
                f"{time_text(one.late_s)} over the recording; no model setting avoids this wait",
            )
        )
    return found


def _slow(about: str, share: float, what: str, change: str) -> Advice:
    """Return advice about a cost that is a given fraction of the step time."""
    found = f"{100 * share:.2g} % of the step time {what}"
    return Advice("slow", about, found, change, f"at most {100 * share:.2g} % of a step")


def _advise_steps(aligned: Aligned, left: dict[str, UnitWaits]) -> list[Advice]:
    """Advise on bottlenecks of the step as a whole: the links, or code between the units."""
    total = aligned.total("seconds")
    if not total:
        return []
    found = []
    waited = sum(unit.total for unit in left.values()) / total
    if waited > BOUND:
        found.append(
            _slow(
                "the links",
                waited,
                f"is spent waiting for collectives for which no rank was late: {_carried(aligned)}",
                "more compute per collective (a larger batch per rank, accumulation); fewer bytes "
                "(MixedPrecisionPolicy, gather_dtype, Compress); larger units, if their "
                "collectives are small",
            )
        )
    idle = 1 - aligned.share("compute_s", *WAITS)
    if idle > BOUND:
        found.append(
            _slow(
                "between the units",
                idle,
                "is spent outside of compute and waits for collectives: in the optimizer, on "
                "input, or on a host that is too slow to keep the device busy",
                "fsdp2.optim.local for the optimizer, workers for the input; fsdp2.compile or "
                "larger operations for the host",
            )
        )
    return found if waited >= idle else found[::-1]  # the larger cost first


def _carried(aligned: Aligned) -> str:
    """Return the bytes that collectives send per complete step, and their rate."""
    carried = list(timed(aligned, *LANES))
    nbytes = sum(row["nbytes"] for row, _ in carried)
    seconds = sum(took for _, took in carried)
    rate = f", {nbytes_text(int(nbytes / seconds))}/s while in flight" if seconds else ""
    return f"{nbytes_text(nbytes // len(aligned.steps))} per step and rank{rate}"


def _without(
    waits: dict[str, UnitWaits], by_ranks: Counter[tuple[str, str]]
) -> dict[str, UnitWaits]:
    """Return the waits that no late rank caused. Only these depend on settings."""
    left = {}
    for name, unit in waits.items():
        seconds = {kind: max(0.0, s - by_ranks[name, kind]) for kind, s in unit.seconds.items()}
        left[name] = UnitWaits(seconds, unit.prefetches)
    return left


def _advise_units(aligned: Aligned, waits: dict[str, UnitWaits]) -> list[Advice]:
    """Advise on the units with the longest waits."""
    total = aligned.total("seconds")
    found = []
    for name, unit in sorted(waits.items(), key=lambda item: -item[1].total)[:3]:
        if not total or unit.total < WORTH * total:
            continue
        kind = max(unit.seconds, key=lambda one: unit.seconds[one])
        what = f"is spent waiting for its collectives, mostly {kind}"
        found.append(_slow(shown(name), unit.total / total, what, _remedy(kind, unit)))
    return found


def _remedy(kind: str, unit: UnitWaits) -> str:
    if kind != "all_gather":
        return 'model.set_memory("fast"), which keeps more reductions in flight'
    if unit.prefetches["none"] > unit.prefetches["late"]:
        return (
            "the unit is not prefetched. The first unit of a step is never prefetched; for other "
            "units, keep the order of forwards constant, or use set_modules_to_forward_prefetch"
        )
    return 'model.set_memory("fast"), which prefetches two units; or larger units'


def time_text(seconds: float) -> str:
    return "unknown" if seconds == math.inf else seconds_text(seconds, 3)

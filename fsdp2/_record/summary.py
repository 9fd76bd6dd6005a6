"""What recordings say, as values of a page: facts, advice, memory, time lines, tables.

Owns the words and the choice of what is shown. It must not know how a page is drawn.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from fsdp2._base.arguments import described
from fsdp2._base.errors import ConfigError
from fsdp2._pages.content import (
    COMPUTE,
    GATHER,
    REDUCE,
    Advice,
    Fact,
    MemoryTab,
    Moment,
    Page,
    Planned,
    Span,
    Table,
    TimeLine,
    UnitArea,
)
from fsdp2._record.align import Aligned, Arrivals, Delay, delays
from fsdp2._record.culprits import LATE, blamed, caused, delays_of, late_spans
from fsdp2._record.rows import RankFile
from fsdp2._record.time_line import has_times, pieces_of, shown

WORTH = 0.01
"""Part of the time from which something is worth a word."""

BOUND = 0.25
"""Part of the time of steps from which something is what bounds them."""

CARRY = ("unshard", "reduce", "all_reduce")

SIGMAS = 2
"""Deviations from chance that are no chance any more."""

LATER = 2
"""Times that a rank is later than the others, from where on it is a habit."""

MEMORY_KINDS = ("parameters", "gathered parameters", "communication")
MISSES = ("late", "none")


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


def choose_step(files: Sequence[RankFile], step: int | None) -> int | None:
    """Return the step to show: the one that is asked for, or the last that all ranks have.

    Raises:
        ConfigError: no rank has it.
    """
    numbers = [{row["step"] for row in steps_of(file)} for file in files]
    if step is not None:
        if not any(step in own for own in numbers):
            last = max((max(own, default=0) for own in numbers), default=0)
            raise ConfigError(
                "FS916",
                f"page: expected step to be one that was recorded, found {described(step)}. Pass "
                f"one from 1 to {last}.",
            )
        return step
    common = set.intersection(*numbers)
    return max(common, default=None)


def page(
    files: Sequence[RankFile],
    aligned: Aligned,
    arrived: Sequence[Arrivals],
    step: int | None,
    planned: Planned | None,
) -> Page:
    """Say what recordings show."""
    header = files[0].header
    waits = _waits_of(files)
    late = stragglers(files, arrived)
    held_up = delays_of(late, delays(aligned) if late else ())
    left = _without(waits, caused(held_up))
    which = "no complete step" if step is None else f"time lines and memory of step {step}"
    return Page(
        title=f"Recording of {header['model']}",
        subtitle=(
            f"{len(files)} of {header['world_size']} ranks, {which}; fsdp2 {header['fsdp2']}, "
            f"torch {header['torch']}"
        ),
        facts=tuple(_facts(files)),
        advice=(
            *_advise_ranks(files, late, held_up),
            *_advise_steps(files, left),
            *_advise_units(files, left),
        ),
        units=tuple(_units(files[0])),
        memory=tuple(_memory(file, step, planned) for file in files),
        time_lines=(
            *(_time_line(file, aligned, step, files[0], held_up) for file in files),
            *([] if planned is None or planned.time_line is None else [planned.time_line]),
        ),
        tables=tuple(_tables(files, aligned, arrived, waits)),
        notes=tuple(_notes(files, aligned)),
        order=("times", "memory", "units"),  # what took the time is seen there, and who
    )


def _mean(files: Sequence[RankFile], name: str) -> float:
    values = [row[name] for file in files for row in steps_of(file)]
    return statistics.fmean(values) if values else 0.0


def _longest(files: Sequence[RankFile]) -> dict[int, float]:
    """Return the seconds of each step, on the rank that took longest."""
    found: dict[int, float] = {}
    for file in files:
        for row in steps_of(file):
            found[row["step"]] = max(found.get(row["step"], 0.0), row["seconds"])
    return found


def _facts(files: Sequence[RankFile]) -> list[Fact]:
    seconds = _mean(files, "seconds")
    steps = _longest(files) or {0: 0.0}
    worst = max(steps, key=lambda step: steps[step])
    note = f"half of the steps took longer; the longest: {_time(steps[worst])}, step {worst}"
    waited = sum(_mean(files, f"wait_{kind}_s") for kind in _KINDS)
    hits = _mean(files, "prefetch_hits")
    misses = _mean(files, "prefetch_late") + _mean(files, "prefetch_none")
    tokens = _mean(files, "tokens_per_s")
    found = [
        Fact("steps", str(max(len(steps_of(file)) for file in files))),
        Fact("a step", _time(statistics.median(steps.values())), note),
        Fact("compute", _share(_mean(files, "compute_s"), seconds)),
        Fact("waiting", _share(waited, seconds), "for collectives, with nothing to compute"),
        Fact("prefetched", f"{hits:.3g} of {hits + misses:.3g}", "gathers a step that were ready"),
        Fact("peak of groups", _bytes(_max(files, "peak_nbytes")), "shards, gathered, in flight"),
    ]
    if tokens:
        found.append(Fact("tokens/s", f"{tokens:,.0f}", "a rank, the optimizer counted"))
    return found


_KINDS = ("all_gather", "reduce_scatter", "all_reduce")


def _max(files: Sequence[RankFile], name: str) -> int:
    return max((int(row[name]) for file in files for row in steps_of(file)), default=0)


class UnitWaits:
    """Waits for what one unit needs, over all ranks and complete steps."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(_KINDS, 0.0)
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
                f"the others waited {_time(one.late_s)} for it in all{share}, at most "
                f"{_time(one.longest_late_s)} at once; it came last to {one.last} of "
                f"{one.counted} collectives, mostly of {where}",
                "look at what this rank does besides: its input pipeline, its share of the work, "
                "its clock rate, other processes on its host",
                f"{_time(one.late_s)} over the recording; no setting of a model gives that back",
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
        rate = f", {_bytes(int(nbytes / seconds))}/s while they are under way" if seconds else ""
        found.append(
            Advice(
                "slow",
                "the links",
                f"{100 * waited:.2g} % of the time of steps is waiting for collectives to which no "
                f"rank came late: {_bytes(nbytes // len(rows))} a step and rank{rate}",
                "more work between them (a larger batch a rank, or accumulation), or fewer bytes "
                "(MixedPrecisionPolicy, gather_dtype, Compress); units that are larger, where the "
                "collectives are small",
                f"at most {100 * waited:.2g} % of a step",
            )
        )
    waits = sum(row[f"wait_{kind}_s"] for row in rows for kind in _KINDS)
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
    return found


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


def _units(file: RankFile) -> list[UnitArea]:
    """Return the groups; what is gathered and reduced is what was seen."""
    largest: dict[tuple[str, str], int] = {}
    for row in file.rows:
        if row["kind"] in ("unshard", "reduce"):
            key = (row["kind"], row["unit"])
            largest[key] = max(largest.get(key, 0), row["nbytes"])
    return [
        UnitArea(
            name=group["name"],
            parameters=group["parameters"],
            numel=group["numel"],
            dtypes=tuple(group["dtypes"]),
            whole_nbytes=group["whole_nbytes"],
            shard_nbytes=group["shard_nbytes"],
            padding_nbytes=group["padding_nbytes"],
            gather_nbytes=largest.get(("unshard", group["name"]), 0),
            reduce_nbytes=largest.get(("reduce", group["name"]), 0),
            shard_ranks=group["mesh"][1],
        )
        for group in file.header["groups"]
    ]


def _rows_of(file: RankFile, step: int | None) -> list[dict[str, Any]]:
    return [row for row in file.rows if step is not None and row["step"] == step]


def _memory(file: RankFile, step: int | None, planned: Planned | None) -> MemoryTab:
    """Return the memory of a step; times are from its begin."""
    shards = sum(group["shard_nbytes"] for group in file.header["groups"])
    rows = [row for row in _rows_of(file, step) if "communication_nbytes" in row]
    when = [row.get("host_ns", row["begin_ns"]) for row in rows]
    start = min((time for time in when if time is not None), default=0)
    moments, allocated = [], []
    for time, row in zip(when, rows, strict=True):
        if time is None:
            continue
        label = f"{row['phase']}: {row['kind']} {shown(row['unit'])}"
        nbytes = (shards, row["gathered_nbytes"], row["communication_nbytes"])
        moments.append(Moment((time - start) / 1e9, label, nbytes))
        if "allocated_nbytes" in row:
            allocated.append(Moment((time - start) / 1e9, label, (row["allocated_nbytes"],)))
    moments.sort(key=lambda one: one.time)
    over, name = allocated, "allocated on the device"
    if planned is not None:
        over, name = _at_measured_times(planned.moments, moments), "planned"
    return MemoryTab(
        name=f"rank {file.rank}",
        kinds=MEMORY_KINDS,
        moments=tuple(moments),
        is_timed=True,
        measured=tuple(over),
        measured_name=name if over else "",
    )


def _at_measured_times(planned: Sequence[Moment], measured: Sequence[Moment]) -> list[Moment]:
    """Give what was planned the times at which the same events were measured, in their order."""
    found, rest = [], iter(measured)
    for moment in planned:
        at = next((one.time for one in rest if one.label == moment.label), None)
        if at is None:  # from here on the step was another one
            break
        found.append(Moment(at, moment.label, moment.nbytes))
    return found


def _time_line(
    file: RankFile,
    aligned: Aligned,
    step: int | None,
    first: RankFile,
    held_up: Sequence[Delay],
) -> TimeLine:
    """Return a rank's lanes in a step, on the first rank's clock, from where that one begins."""
    start = _begin_of(first, aligned, step)
    shift, epoch = aligned.shifts[file.rank], file.header["epoch_ns"]

    def seconds(time_ns: int) -> float:
        return (shift.apply(epoch + time_ns) - start) / 1e9

    spans = [
        Span(
            piece.lane,
            piece.name,
            seconds(piece.begin),
            seconds(piece.end),
            piece.nbytes,
            piece.cause,
            piece.note,
        )
        for piece in pieces_of(_rows_of(file, step))
    ]
    spans = [blamed(span, file.rank, held_up, start) for span in spans]
    until = max((span.end for span in spans), default=0.0)
    of_itself = late_spans(file.rank, held_up, start, until)
    spans.sort(key=lambda span: span.begin)
    lanes: tuple[str, ...] = (COMPUTE, GATHER, REDUCE)
    if of_itself:
        lanes = (LATE, *lanes)
    return TimeLine(f"rank {file.rank}", lanes, (*of_itself, *spans))


def _begin_of(file: RankFile, aligned: Aligned, step: int | None) -> int:
    begins = [row["begin_ns"] for row in steps_of(file) if row["step"] == step]
    return aligned.shifts[file.rank].apply(file.header["epoch_ns"] + (begins[0] if begins else 0))


def _tables(
    files: Sequence[RankFile],
    aligned: Aligned,
    arrived: Sequence[Arrivals],
    waits: dict[str, UnitWaits],
) -> list[Table]:
    by_rank = {one.rank: one for one in arrived}
    clocks = {one.rank: one for one in aligned.clocks}
    ranks = []
    for file in files:
        mine, clock = [file], clocks[file.rank]
        one = by_rank[file.rank]
        row = [str(file.rank), file.header["host"], _time(_mean(mine, "seconds"))]
        row += [_time(_mean(mine, "compute_s"))]
        row += [_time(_mean(mine, f"wait_{kind}_s")) for kind in _KINDS]
        row += [f"{one.last} of {one.counted}", _time(one.median_late_s)]
        row += [_time(clock.ahead_s), _time(clock.accuracy_s)]
        ranks.append(tuple(row))
    units = sorted(waits.items(), key=lambda item: -item[1].total)
    return [
        Table(
            "Ranks side by side (means over steps)",
            ("rank", "host", "step", "compute", *_KINDS, "came last", "by", "clock", "within"),
            tuple(ranks),
        ),
        Table(
            "Waits for each unit's collectives (all ranks and steps), and its gathers",
            ("unit", *_KINDS, "prefetched in time", "too late", "not prefetched"),
            tuple(
                (
                    shown(name),
                    *(_time(unit.seconds[kind]) for kind in _KINDS),
                    *(str(unit.prefetches[kind]) for kind in ("hit", *MISSES)),
                )
                for name, unit in units
            ),
        ),
    ]


def _notes(files: Sequence[RankFile], aligned: Aligned) -> list[str]:
    found = [
        "Clocks are aligned by collectives, which no rank ends before all have begun them; "
        f"the worst rank is known within {_time(max(c.accuracy_s for c in aligned.clocks))}."
    ]
    failed = sum(row["kind"] == "step" and row["failed"] for file in files for row in file.rows)
    if failed:
        found.append(f"{failed} steps failed or were cut off; they are in no figure.")
    hanging = [(file.rank, row) for file in files for row in file.rows if row["kind"] == "waiting"]
    found += [
        f"Rank {rank} was waiting for {row['for']} of {shown(row['unit'])} when its file ended."
        for rank, row in hanging
    ]
    return found


def _share(part: float, whole: float) -> str:
    return f"{_time(part)} ({100 * part / whole:.3g} %)" if whole else _time(part)


def _time(seconds: float) -> str:
    if seconds == float("inf"):
        return "unknown"
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def _bytes(nbytes: int) -> str:
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"

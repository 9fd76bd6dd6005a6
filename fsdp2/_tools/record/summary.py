"""What recordings say, as values of a page: facts, memory, time lines, tables.

Owns the words and the choice of what is shown. It must not know how a page is drawn, or what is
worth advice: ``bounds`` does.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fsdp2._core.base.arguments import described
from fsdp2._core.base.errors import ConfigError
from fsdp2._core.base.names import nbytes_text
from fsdp2._tools.pages.content import (
    COMPUTE,
    GATHER,
    REDUCE,
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
from fsdp2._tools.record.align import Aligned, Arrivals, Delay
from fsdp2._tools.record.bounds import (
    LATE,
    UnitWaits,
    blamed,
    find_bounds,
    late_spans,
    steps_of,
    time_text,
)
from fsdp2._tools.record.rows import RankFile
from fsdp2._tools.record.steps import COLLECTIVES
from fsdp2._tools.record.time_line import pieces_of, shown

MEMORY_KINDS = ("parameters", "gathered parameters", "communication")
MISSES = ("late", "none")


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
    bounds = find_bounds(files, aligned, arrived)
    which = "no complete step" if step is None else f"time lines and memory of step {step}"
    return Page(
        title=f"Recording of {header['model']}",
        subtitle=(
            f"{len(files)} of {header['world_size']} ranks, {which}; fsdp2 {header['fsdp2']}, "
            f"torch {header['torch']}"
        ),
        facts=tuple(_facts(files)),
        advice=bounds.advice,
        units=tuple(_units(files[0])),
        memory=tuple(_memory(file, step, planned) for file in files),
        time_lines=(
            *(_time_line(file, aligned, step, files[0], bounds.delays) for file in files),
            *([] if planned is None or planned.time_line is None else [planned.time_line]),
        ),
        tables=tuple(_tables(files, aligned, arrived, bounds.waits)),
        notes=tuple(_notes(files, aligned)),
        headline=bounds.headline,
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
    note = f"half of the steps took longer; the longest: {time_text(steps[worst])}, step {worst}"
    waited = sum(_mean(files, f"wait_{kind}_s") for kind in COLLECTIVES)
    hits = _mean(files, "prefetch_hits")
    misses = _mean(files, "prefetch_late") + _mean(files, "prefetch_none")
    tokens = _mean(files, "tokens_per_s")
    peak = max((int(row["peak_nbytes"]) for file in files for row in steps_of(file)), default=0)
    found = [
        Fact("steps", str(max(len(steps_of(file)) for file in files))),
        Fact("a step", time_text(statistics.median(steps.values())), note),
        Fact("compute", _percent(_mean(files, "compute_s"), seconds), "of all steps and ranks"),
        Fact("waiting", _percent(waited, seconds), "for collectives, with nothing to compute"),
        Fact("prefetched", f"{hits:.3g} of {hits + misses:.3g}", "gathers a step that were ready"),
        Fact("peak of groups", nbytes_text(peak), "shards, gathered, in flight"),
    ]
    if tokens:
        found.append(Fact("tokens/s", f"{tokens:,.0f}", "a rank, the optimizer counted"))
    return found


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
        row = [str(file.rank), file.header["host"], time_text(_mean(mine, "seconds"))]
        row += [time_text(_mean(mine, "compute_s"))]
        row += [time_text(_mean(mine, f"wait_{kind}_s")) for kind in COLLECTIVES]
        row += [f"{one.last} of {one.counted}", time_text(one.median_late_s)]
        row += [time_text(clock.ahead_s), time_text(clock.accuracy_s)]
        ranks.append(tuple(row))
    units = sorted(waits.items(), key=lambda item: -item[1].total)
    return [
        Table(
            "Ranks side by side (means over steps)",
            ("rank", "host", "step", "compute", *COLLECTIVES, "came last", "by", "clock", "within"),
            tuple(ranks),
        ),
        Table(
            "Waits for each unit's collectives (all ranks and steps), and its gathers",
            ("unit", *COLLECTIVES, "prefetched in time", "too late", "not prefetched"),
            tuple(
                (
                    shown(name),
                    *(time_text(unit.seconds[kind]) for kind in COLLECTIVES),
                    *(str(unit.prefetches[kind]) for kind in ("hit", *MISSES)),
                )
                for name, unit in units
            ),
        ),
    ]


def _notes(files: Sequence[RankFile], aligned: Aligned) -> list[str]:
    found = [
        "Clocks are aligned by collectives, which no rank ends before all have begun them; "
        f"the worst rank is known within {time_text(max(c.accuracy_s for c in aligned.clocks))}."
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


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3g} %" if whole else time_text(part)

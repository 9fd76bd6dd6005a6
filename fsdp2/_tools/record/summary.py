"""The facts, memory, timelines and tables of a recording's page. ``bounds`` gives the advice."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fsdp2._core.base.errors import ConfigError, described
from fsdp2._core.base.names import nbytes_text
from fsdp2._tools.pages import content
from fsdp2._tools.pages.content import Fact, Moment, Planned, Table, TimeLine
from fsdp2._tools.record.align import WAITS, Aligned, Delay
from fsdp2._tools.record.bounds import LATE, UnitWaits, blamed, find_bounds, late_spans, time_text
from fsdp2._tools.record.rows import RankFile
from fsdp2._tools.record.steps import COLLECTIVES
from fsdp2._tools.record.time_line import pieces_of, shown


def choose_step(files: Sequence[RankFile], step: int | None) -> int | None:
    """Return the given step or, if it is None, the last step that all ranks recorded.
    ConfigError: no rank recorded the given step."""
    numbers = [{row["step"] for row in file.steps} for file in files]
    if step is not None:
        known = set().union(*numbers)
        if step not in known:
            raise ConfigError(
                "FS916",
                f"page: expected a recorded step, found {described(step)}. Pass a number from "
                f"1 to {max(known, default=0)}.",
            )
        return step
    return max(set.intersection(*numbers), default=None)


def page(aligned: Aligned, step: int | None, planned: Planned | None) -> content.Page:
    files = aligned.files
    header = files[0].header
    bounds = find_bounds(aligned)
    which = "no complete step" if step is None else f"timelines and memory of step {step}"
    return content.Page(
        title=f"Recording of {header['model']}",
        subtitle=(
            f"{len(files)} of {header['world_size']} ranks, {which}; fsdp2 {header['fsdp2']}, "
            f"torch {header['torch']}"
        ),
        facts=tuple(_facts(aligned)),
        advice=bounds.advice,
        units=tuple(_units(files[0])),
        memory=tuple(_memory(file, step, planned) for file in files),
        time_lines=(
            *(_time_line(file, aligned, step, bounds.delays) for file in files),
            *([] if planned is None or planned.time_line is None else [planned.time_line]),
        ),
        tables=tuple(_tables(aligned, bounds.waits)),
        notes=tuple(_notes(aligned)),
        headline=bounds.headline,
        order=("times", "memory", "units"),  # the most useful pictures of a step come first
    )


def _mean(rows: Sequence[dict[str, Any]], *names: str) -> float:
    """Return the sum of the named figures, averaged over steps."""
    return sum(row[name] for row in rows for name in names) / len(rows) if rows else 0.0


def _facts(aligned: Aligned) -> list[Fact]:
    rows = aligned.steps
    longest: dict[int, float] = {}  # duration of each step on the slowest rank
    for row in rows:
        longest[row["step"]] = max(longest.get(row["step"], 0.0), row["seconds"])
    worst, most = max(longest.items(), key=lambda item: item[1], default=(0, 0.0))
    note = f"median; the longest: {time_text(most)}, step {worst}"
    typical = statistics.median(longest.values() or [0.0])
    seconds = _mean(rows, "seconds")
    waited = _mean(rows, *WAITS)
    hits = _mean(rows, "prefetch_hits")
    gathers = _mean(rows, "prefetch_hits", "prefetch_late", "prefetch_none")
    tokens = _mean(rows, "tokens_per_s")
    peak = max((int(row["peak_nbytes"]) for row in rows), default=0)
    found = [
        Fact("steps", str(max(len(file.steps) for file in aligned.files))),
        Fact("a step", time_text(typical), note),
        Fact("compute", _percent(_mean(rows, "compute_s"), seconds), "of all steps and ranks"),
        Fact("waiting", _percent(waited, seconds), "for collectives, with nothing to compute"),
        Fact("prefetched", f"{hits:.3g} of {gathers:.3g}", "gathers per step that were ready"),
        Fact("peak of groups", nbytes_text(peak), "shards, gathered, in flight"),
    ]
    if tokens:
        found.append(Fact("tokens/s", f"{tokens:,.0f}", "per rank, including the optimizer"))
    return found


def _units(file: RankFile) -> list[content.UnitArea]:
    """Return the groups, with the observed sizes of gathers and reductions."""
    same = ("name", "parameters", "numel", "whole_nbytes", "shard_nbytes", "padding_nbytes")
    largest: dict[tuple[str, str], int] = {}
    for row in file.rows:
        if row["kind"] in ("unshard", "reduce"):
            key = (row["kind"], row["unit"])
            largest[key] = max(largest.get(key, 0), row["nbytes"])
    return [
        content.UnitArea(
            **{name: group[name] for name in same},
            dtypes=tuple(group["dtypes"]),
            gather_nbytes=largest.get(("unshard", group["name"]), 0),
            reduce_nbytes=largest.get(("reduce", group["name"]), 0),
            shard_ranks=group["mesh"][1],
        )
        for group in file.header["groups"]
    ]


def _rows_of(file: RankFile, step: int | None) -> list[dict[str, Any]]:
    return [row for row in file.rows if step is not None and row["step"] == step]


def _memory(file: RankFile, step: int | None, planned: Planned | None) -> content.MemoryTab:
    """Return the memory of a step; times are relative to its start."""
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
    return content.MemoryTab(
        name=f"rank {file.rank}",
        kinds=content.MEASURED,
        moments=tuple(moments),
        is_timed=True,
        measured=tuple(over),
        measured_name=name if over else "",
    )


def _at_measured_times(planned: Sequence[Moment], measured: Sequence[Moment]) -> list[Moment]:
    """Return the planned moments in order, each at the measured time of the same event."""
    found, rest = [], iter(measured)
    for moment in planned:
        at = next((one.time for one in rest if one.label == moment.label), None)
        if at is None:  # the step differs from the plan from here on
            break
        found.append(Moment(at, moment.label, moment.nbytes))
    return found


def _time_line(
    file: RankFile, aligned: Aligned, step: int | None, held_up: Sequence[Delay]
) -> TimeLine:
    """Return a rank's lanes in a step. Time 0 is the start of the step on the first rank."""
    rank, epoch = file.rank, file.header["epoch_ns"]
    first = aligned.files[0]
    begin = next((row["begin_ns"] for row in first.steps if row["step"] == step), 0)
    start = aligned.time(first.rank, first.header["epoch_ns"] + begin)

    def seconds(time_ns: float) -> float:
        return (aligned.time(rank, epoch + int(time_ns)) - start) / 1e9

    spans = [
        replace(span, begin=seconds(span.begin), end=seconds(span.end))
        for span in pieces_of(_rows_of(file, step))
    ]
    spans = [blamed(span, rank, held_up, start) for span in spans]
    until = max((span.end for span in spans), default=0.0)
    of_itself = late_spans(rank, held_up, start, until)
    spans.sort(key=lambda span: span.begin)
    lanes = (LATE, *content.LANES) if of_itself else content.LANES
    return TimeLine(f"rank {rank}", lanes, (*of_itself, *spans))


def _tables(aligned: Aligned, waits: dict[str, UnitWaits]) -> list[Table]:
    by_rank = {one.rank: one for one in aligned.arrivals}
    ranks = []
    for file, clock in zip(aligned.files, aligned.clocks, strict=True):
        one = by_rank[file.rank]
        times = [_mean(file.steps, name) for name in ("seconds", "compute_s", *WAITS)]
        row = [str(file.rank), file.header["host"], *map(time_text, times)]
        row += [f"{one.last} of {one.counted}", time_text(one.median_late_s)]
        row += [time_text(clock.ahead_s), time_text(clock.accuracy_s)]
        ranks.append(tuple(row))
    units = sorted(waits.items(), key=lambda item: -item[1].total)
    return [
        Table(
            "Ranks (means over steps)",
            ("rank", "host", "step", "compute", *COLLECTIVES, "last in", "by", "clock", "accuracy"),
            tuple(ranks),
        ),
        Table(
            "Each unit's waits for collectives, and its prefetches (all ranks and steps)",
            ("unit", *COLLECTIVES, "prefetched in time", "too late", "not prefetched"),
            tuple(
                (
                    shown(name),
                    *(time_text(unit.seconds[kind]) for kind in COLLECTIVES),
                    *(str(unit.prefetches[kind]) for kind in ("hit", "late", "none")),
                )
                for name, unit in units
            ),
        ),
    ]


def _notes(aligned: Aligned) -> list[str]:
    found = [
        "Clocks are aligned by means of collectives: no rank ends a collective before all ranks "
        "have begun it. The accuracy is "
        f"{time_text(max(c.accuracy_s for c in aligned.clocks))} or better."
    ]
    rows = [(file.rank, row) for file in aligned.files for row in file.rows]
    failed = sum(row["kind"] == "step" and row["failed"] for _, row in rows)
    if failed:
        found.append(f"{failed} steps failed or are incomplete; the figures exclude them.")
    found += [
        f"Rank {rank} was waiting for {row['for']} of {shown(row['unit'])} when its file ended."
        for rank, row in rows
        if row["kind"] == "waiting"
    ]
    return found


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.3g} %" if whole else time_text(part)

"""A plan as a page: facts, advice, the tree of units, memory by setting, the time line.

Owns the choice of what is shown. It must not know how a page is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from fsdp2._core.base.names import nbytes_text
from fsdp2._tools.pages.content import (
    COMPUTE,
    GATHER,
    REDUCE,
    Advice,
    Fact,
    Headline,
    MemoryTab,
    Moment,
    Page,
    Planned,
    Table,
    TimeLine,
    UnitArea,
)
from fsdp2._tools.plan.hardware import Hardware
from fsdp2._tools.plan.table import Verdict, count, headline, rate_text, rows, seconds_text
from fsdp2._tools.plan.values import GroupPlan, StepPlan

LANES = (COMPUTE, GATHER, REDUCE)
LIMITS = (
    "Memory counts tensors: an allocator's rounding and libraries' work space come on top.",
    "Host time is none, and kernels take the described machine's peak rates: see Hardware.scaled.",
)


def page_of(
    mesh: Sequence[int],
    rank: int,
    groups: Sequence[GroupPlan],
    steps: Mapping[str, StepPlan],
    advice: Sequence[Advice],
    hardware: Hardware | None,
    limit: int | None,
    verdict: Verdict | None,
) -> Page:
    """Return the page of a plan. ``steps``: by the name of their memory setting; none without."""
    step = next(iter(steps.values()), None)
    machine = "" if hardware is None else f" · {hardware.name}"
    return Page(
        title=f"Plan: {headline(mesh, groups)}",
        subtitle=f"as on rank {rank}{machine}",
        headline=None if verdict is None else _headline(verdict),
        facts=tuple(_facts(mesh, groups, step, verdict)),
        advice=tuple(advice),
        units=tuple(_area(group, mesh[-1]) for group in groups),
        memory=tuple(memory_tab(name, one, limit) for name, one in steps.items()),
        time_lines=tuple(
            TimeLine(name, LANES, one.spans) for name, one in steps.items() if one.spans
        ),
        tables=tuple(_tables(groups, step)),
        notes=LIMITS if step is not None else LIMITS[:1],
    )


def _headline(verdict: Verdict) -> Headline:
    kinds = {True: "good", False: "bad", None: ""}
    return Headline(str(verdict), kinds[verdict.fits])


def memory_tab(name: str, step: StepPlan, limit: int | None) -> MemoryTab:
    """Return memory over a step: at each event what there is, before it the most there was."""
    is_timed = step.seconds is not None
    moments = []
    for number, point in enumerate(step.memory):
        time = point.time if is_timed else float(number)
        if point.peak_nbytes > point.nbytes:
            moments.append(Moment(time, f"before {point.label}", point.peak_by_kind))
        moments.append(Moment(time, point.label, point.by_kind))
    return MemoryTab(name, step.kinds, tuple(moments), is_timed, limit)


MEASURED = ("parameters", "gathered parameters", "communication")
"""Kinds of memory that a recording measures, too."""


def planned(step: StepPlan) -> Planned:
    """Return what a recording's page lays over its own."""
    places = [step.kinds.index(kind) for kind in MEASURED]
    moments = tuple(
        Moment(point.time, point.label, (sum(point.by_kind[place] for place in places),))
        for point in step.memory
    )
    return Planned(moments, TimeLine("planned", LANES, step.spans) if step.spans else None)


def _facts(
    mesh: Sequence[int],
    groups: Sequence[GroupPlan],
    step: StepPlan | None,
    verdict: Verdict | None,
) -> Iterator[Fact]:
    """Yield what decides first: the peak and what there is, then speed, then what stays."""
    if step is not None and verdict is not None:
        there_is = verdict.capacity_nbytes
        of = "" if there_is is None else f"of {nbytes_text(there_is)}, "
        yield Fact("peak of a step", nbytes_text(step.highest_nbytes), f"{of}at {verdict.place}")
        yield from _speed(mesh, step)
    yield from _kept(groups, step)


def _speed(mesh: Sequence[int], step: StepPlan) -> Iterator[Fact]:
    if step.seconds is None:
        return
    if step.tokens_per_second is not None:
        every = rate_text(step.tokens_per_second * math.prod(mesh))
        yield Fact("speed of a rank", rate_text(step.tokens_per_second), f"{every} in all")
        yield Fact("MFU", f"{step.mfu or 0.0:.1%}", "kernels at the machine's peak rates")
    waiting = step.waiting_seconds / step.seconds if step.seconds else 0.0
    yield Fact("a step", seconds_text(step.seconds), f"compute waits {waiting:.1%} of it")


def _kept(groups: Sequence[GroupPlan], step: StepPlan | None) -> Iterator[Fact]:
    shards = sum(group.shard_nbytes for group in groups)
    grads = sum(group.grad_nbytes for group in groups)
    padding = sum(group.padding_nbytes for group in groups)
    whole = sum(group.whole_nbytes for group in groups)
    yield Fact("parameters on a rank", nbytes_text(shards), f"{nbytes_text(whole)} gathered")
    yield Fact("gradients on a rank", nbytes_text(grads))
    if padding:
        yield Fact("padding", nbytes_text(padding), "over all ranks of the shard axis")
    if step is None:
        return
    if step.optimizer_nbytes:
        yield Fact("optimizer state", nbytes_text(step.optimizer_nbytes))
    sent = sum(one.nbytes for one in step.collectives)
    yield Fact("collectives", str(len(step.collectives)), f"{nbytes_text(sent)} in their buffers")


def _area(group: GroupPlan, shard_ranks: int) -> UnitArea:
    return UnitArea(
        name=group.name,
        parameters=group.parameters,
        numel=group.numel,
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in group.dtypes),
        whole_nbytes=group.whole_nbytes,
        shard_nbytes=group.shard_nbytes,
        padding_nbytes=group.padding_nbytes,
        gather_nbytes=group.gather_nbytes,
        reduce_nbytes=group.reduce_nbytes,
        shard_ranks=shard_ranks,
    )


def _tables(groups: Sequence[GroupPlan], step: StepPlan | None) -> Iterator[Table]:
    yield Table(
        "Units",
        ("unit", "parameters", "whole", "shard", "padding", "gathered", "reduced"),
        tuple(
            (
                name,
                count(group.numel),
                nbytes_text(group.whole_nbytes),
                nbytes_text(group.shard_nbytes),
                nbytes_text(group.padding_nbytes),
                nbytes_text(group.gather_nbytes),
                nbytes_text(group.reduce_nbytes),
            )
            for name, group in rows(groups)
        ),
    )
    if step is None:
        return
    kinds: dict[tuple[str, str], list[int]] = {}
    for one in step.collectives:
        kinds.setdefault((one.kind, one.phase), []).append(one.nbytes)
    yield Table(
        "Collectives of a step",
        ("kind", "phase", "how many", "bytes"),
        tuple(
            (kind, phase, str(len(sizes)), nbytes_text(sum(sizes)))
            for (kind, phase), sizes in kinds.items()
        ),
    )
    if step.waits:
        yield Table(
            "What compute waits for",
            ("cause", "time"),
            tuple((cause, seconds_text(took)) for cause, took in list(step.waits.items())[:12]),
        )

"""Renders a plan as a table that fits 100 columns, and as the contents of a page."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fsdp2._core.base.names import UNITS, nbytes_text, seconds_text
from fsdp2._tools.pages import content
from fsdp2._tools.pages.content import LANES, Advice, Fact, Moment, Planned, Table, TimeLine
from fsdp2._tools.plan.setup import Prediction
from fsdp2._tools.plan.values import GroupPlan, StepPlan

TIGHT_SHARE = 0.05
"""Share of a device's memory that allocator rounding and libraries may need."""
PLACES = {
    "unshard": "the gather of {}",
    "wait_for_unshard": "the gather of {}",
    "reshard": "the end of {}",
    "reduce": "the reduction of {}",
    "wait_for_reduce": "the wait for the reduction of {}",
    "prefetch": "the gather of {}",
}
MOST_NAMES = 3
"""Maximum number of names in a table row for several equal groups."""
UNIT_COLUMNS = ("parameters", "whole", "shard", "padding", "gathered", "reduced")
MOODS = {True: "good", False: "bad", None: ""}
LIMITS = (
    "Memory includes only tensors, not allocator rounding or library workspaces.",
    "Host time counts as zero, and kernels run at the machine's peak rates: see Hardware.scaled.",
)


@dataclass(frozen=True)
class Verdict:
    """Whether a step fits into the memory of a rank. ``print`` shows the result as one line.

    ``peak_nbytes`` is the peak memory of the step. ``capacity_nbytes`` is the available memory, or
    None if unknown. ``place`` describes where in the step the peak occurs. ``fits`` is None if the
    capacity is unknown. ``way_out`` is the result of a search for a setting that fits, or empty.
    """

    peak_nbytes: int
    capacity_nbytes: int | None
    place: str
    way_out: str = ""

    @property
    def fits(self) -> bool | None:
        if self.capacity_nbytes is None:
            return None
        return self.peak_nbytes <= self.capacity_nbytes

    @property
    def is_tight(self) -> bool:
        """Whether the step fits with little margin for memory that a plan does not count."""
        left = (self.capacity_nbytes or 0) - self.peak_nbytes
        return bool(self.fits) and left < TIGHT_SHARE * (self.capacity_nbytes or 0)

    def __str__(self) -> str:
        if self.capacity_nbytes is None:
            peak = nbytes_text(self.peak_nbytes)
            return f"takes {peak} at {self.place}; pass hardware or a budget to check if it fits"
        words = "fits" if self.fits else "does not fit"
        peak, unit = of_each(self.peak_nbytes, self.capacity_nbytes)
        text = f"{words}: {peak} of {unit} at {self.place}"
        if self.is_tight:
            text += "; little is left for allocator rounding and libraries"
        return f"{text}; {self.way_out}" if self.way_out else text


def verdict_of(step: StepPlan, capacity: int | None) -> Verdict:
    return Verdict(step.highest_nbytes, capacity, place_of(step))


def place_of(step: StepPlan) -> str:
    return place_before(max(step.memory, key=lambda point: point.peak_nbytes).label)


def place_before(label: str) -> str:
    """Describe the event in which a peak occurred, given the label recorded after the event."""
    phase, _, rest = label.partition(": ")
    kind, _, unit = rest.partition(" ")
    if kind not in PLACES:
        return label
    return f"{PLACES[kind].format(unit or '<root>')} in {phase}"


def of_each(peak: int, capacity: int) -> tuple[str, str]:
    """Format two sizes in the second size's unit. If much smaller, the first gets its own unit."""
    unit, name = next(((unit, name) for unit, name in UNITS if capacity >= unit), (1 << 10, "KiB"))
    first = f"{peak / unit:.1f}" if 10 * peak >= unit else nbytes_text(peak)
    return first, f"{capacity / unit:.1f} {name}"


def headline(plan: Prediction) -> str:
    total = sum(group.numel for group in plan.groups)
    shape = " x ".join(str(size) for size in plan.mesh)
    return f"{count(total)} parameters over {plan.ranks:,} ranks ({shape})"


def replicas(mesh: Sequence[int]) -> Iterator[str]:
    """Yield a sentence about replicas, if there are any."""
    if len(mesh) == 2 and mesh[0] > 1:
        every = math.prod(mesh)
        yield (
            f"{mesh[0]:,} replicas, each sharded over {mesh[1]:,} ranks; mesh={every} (--mesh "
            f"{every}) shards over all {every:,}"
        )


def unit_rows(groups: Sequence[GroupPlan]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table of units: a name, and a cell for each of ``UNIT_COLUMNS``."""
    for name, group in rows(groups):
        kinds = ("whole", "shard", "padding", "gather", "reduce")
        sizes = (nbytes_text(getattr(group, f"{kind}_nbytes")) for kind in kinds)
        yield name, count(group.numel), *sizes


def lines(plan: Prediction) -> Iterator[str]:
    """Yield the lines of a plan, at most 100 columns wide. Consecutive equal groups share a row."""
    yield f"{headline(plan)}, as on rank {plan.rank}"
    yield from replicas(plan.mesh)
    yield ""
    for name, *cells in (("unit", *UNIT_COLUMNS), *unit_rows(plan.groups)):
        yield f"{_cut(name, 34):<34}" + "".join(f"{cell:>11}" for cell in cells)
    shards = sum(group.shard_nbytes for group in plan.groups)
    grads = sum(group.grad_nbytes for group in plan.groups)
    yield ""
    yield f"a rank keeps {nbytes_text(shards)} of parameters and {nbytes_text(grads)} of gradients"
    if plan.step is not None:
        yield from _step_lines(plan.step, plan.ranks)


def _step_lines(step: StepPlan, ranks: int) -> Iterator[str]:
    if step.optimizer_nbytes:
        yield f"and {nbytes_text(step.optimizer_nbytes)} of optimizer state"
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        sizes = [one.nbytes for one in step.collectives if one.kind == kind]
        if sizes:
            yield f"{kind}: {len(sizes)} a step, {nbytes_text(sum(sizes))}"
    start, peak = nbytes_text(step.start_nbytes), nbytes_text(step.highest_nbytes)
    yield f"peak {peak} at {place_of(step)}, of which {start} at start"
    if step.host_nbytes:
        yield f"{nbytes_text(step.host_nbytes)} of host memory"
    if step.seconds is not None:
        yield f"a step takes {seconds_text(step.seconds)}; {waits_text(step)}"
        if step.tokens_per_second is not None:
            rate, every = rates_text(step, ranks)
            yield f"{rate} a rank, {every} in all; MFU {step.mfu or 0.0:.1%}"


def waits_text(step: StepPlan) -> str:
    waiting = step.waiting_seconds / step.seconds if step.seconds else 0.0
    return f"compute waits {waiting:.1%} of the time"


def rates_text(step: StepPlan, ranks: int) -> tuple[str, str]:
    """Format the tokens per second of one rank and of all ranks, or 0 if they are unknown."""
    rate = step.tokens_per_second or 0.0
    return rate_text(rate), rate_text(rate * ranks)


def rows(groups: Sequence[GroupPlan]) -> Iterator[tuple[str, GroupPlan]]:
    """Yield a name and a group for each row: consecutive equal groups are merged."""
    for _, same in itertools.groupby(groups, lambda one: replace(one, name="", alone=())):
        alike = list(same)
        yield _joined([one.name or "<root>" for one in alike]), alike[0]


def _joined(names: Sequence[str]) -> str:
    """If names differ only in numbers, return the first name and a count. Otherwise join them."""
    if len(names) > 1 and len({re.sub(r"\d+", "0", name) for name in names}) == 1:
        return f"{names[0]} ({len(names)} times)"
    if len(names) > MOST_NAMES:
        return f"{', '.join(names[:MOST_NAMES])}, ... ({len(names)})"
    return ", ".join(names)


def _cut(text: str, width: int) -> str:
    return text if len(text) < width else f"...{text[-(width - 4) :]}"


def rate_text(tokens: float) -> str:
    digits = f"{tokens:,.0f}" if tokens >= 1000 else f"{tokens:.4g}"
    return f"{digits} tokens/s"


def count(number: int) -> str:
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.4g} {name}"
    return str(number)


def page_of(
    plan: Prediction,
    steps: Mapping[str, StepPlan],
    advice: Sequence[Advice],
    limit: int | None,
    verdict: Verdict | None,
) -> content.Page:
    """Return the page of a plan. ``steps`` is keyed by memory setting, and may be empty."""
    machine = "" if plan.hardware is None else f" · {plan.hardware.name}"
    lines = (TimeLine(name, LANES, one.spans) for name, one in steps.items() if one.spans)
    text = None if verdict is None else content.Headline(str(verdict), MOODS[verdict.fits])
    return content.Page(
        title=f"Plan: {headline(plan)}",
        subtitle=f"as on rank {plan.rank}{machine}",
        headline=text,
        facts=tuple(_facts(plan, verdict)),
        advice=tuple(advice),
        units=tuple(_area(group, plan.mesh[-1]) for group in plan.groups),
        memory=tuple(memory_tab(name, one, limit) for name, one in steps.items()),
        time_lines=tuple(lines),
        tables=tuple(_tables(plan)),
        notes=LIMITS if plan.step is not None else LIMITS[:1],
    )


def memory_tab(name: str, step: StepPlan, limit: int | None) -> content.MemoryTab:
    """Return a step's memory over time: the bytes at each event, and the peak before the event."""
    is_timed = step.seconds is not None
    moments = []
    for number, point in enumerate(step.memory):
        time = point.time if is_timed else float(number)
        if point.peak_nbytes > point.nbytes:
            moments.append(Moment(time, f"before {point.label}", point.peak_by_kind))
        moments.append(Moment(time, point.label, point.by_kind))
    return content.MemoryTab(name, step.kinds, tuple(moments), is_timed, limit)


def planned(step: StepPlan) -> Planned:
    """Return the planned values that a recording's page plots over the measured values."""
    places = [step.kinds.index(kind) for kind in content.MEASURED]
    moments = tuple(
        Moment(point.time, point.label, (sum(point.by_kind[place] for place in places),))
        for point in step.memory
    )
    return Planned(moments, TimeLine("planned", LANES, step.spans) if step.spans else None)


def _facts(plan: Prediction, verdict: Verdict | None) -> Iterator[Fact]:
    """Yield the peak and the available memory first, then speed, then persistent memory."""
    if plan.step is not None and verdict is not None:
        there_is = verdict.capacity_nbytes
        of = "" if there_is is None else f"of {nbytes_text(there_is)}, "
        peak = nbytes_text(plan.step.highest_nbytes)
        yield Fact("peak of a step", peak, f"{of}at {verdict.place}")
        yield from _speed(plan.step, plan.ranks)
    yield from _kept(plan.groups, plan.step)


def _speed(step: StepPlan, ranks: int) -> Iterator[Fact]:
    if step.seconds is None:
        return
    if step.tokens_per_second is not None:
        rate, every = rates_text(step, ranks)
        yield Fact("speed of a rank", rate, f"{every} in all")
        yield Fact("MFU", f"{step.mfu or 0.0:.1%}", "kernels at the machine's peak rates")
    yield Fact("a step", seconds_text(step.seconds), waits_text(step))


def _kept(groups: Sequence[GroupPlan], step: StepPlan | None) -> Iterator[Fact]:
    names = ("shard_nbytes", "grad_nbytes", "padding_nbytes", "whole_nbytes")
    totals = [sum(getattr(group, name) for group in groups) for name in names]
    shards, grads, padding, whole = map(nbytes_text, totals)
    yield Fact("parameters on a rank", shards, f"{whole} gathered")
    yield Fact("gradients on a rank", grads)
    if totals[2]:
        yield Fact("padding", padding, "over all ranks of the shard axis")
    if step is None:
        return
    if step.optimizer_nbytes:
        yield Fact("optimizer state", nbytes_text(step.optimizer_nbytes))
    sent = sum(one.nbytes for one in step.collectives)
    yield Fact("collectives", str(len(step.collectives)), f"{nbytes_text(sent)} in their buffers")


def _area(group: GroupPlan, shard_ranks: int) -> content.UnitArea:
    names = vars(group).keys() & content.UnitArea.__dataclass_fields__.keys()
    same = {name: getattr(group, name) for name in names}
    dtypes = tuple(str(dtype).removeprefix("torch.") for dtype in group.dtypes)
    return content.UnitArea(**same | {"dtypes": dtypes, "shard_ranks": shard_ranks})


def _tables(plan: Prediction) -> Iterator[Table]:
    yield Table("Units", ("unit", *UNIT_COLUMNS), tuple(unit_rows(plan.groups)))
    step = plan.step
    if step is None:
        return
    kinds: dict[tuple[str, str], list[int]] = {}
    for one in step.collectives:
        kinds.setdefault((one.kind, one.phase), []).append(one.nbytes)
    sums = ((*both, str(len(sizes)), nbytes_text(sum(sizes))) for both, sizes in kinds.items())
    yield Table("Collectives of a step", ("kind", "phase", "count", "bytes"), tuple(sums))
    if step.waits:
        longest = list(step.waits.items())[:12]
        took = tuple((cause, seconds_text(seconds)) for cause, seconds in longest)
        yield Table("What compute waits for", ("cause", "time"), took)

"""A plan as a table that fits 100 columns.

Owns the text. It must not know how a plan is found.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fsdp2._core.base.names import UNITS, nbytes_text
from fsdp2._tools.plan.values import GroupPlan, MemoryPoint, StepPlan

# Does a step fit? The line that stands first, wherever a plan is told.

TIGHT_SHARE = 0.05
"""What an allocator rounds and libraries take for themselves may be so much of a device."""
PLACES = {
    "unshard": "the gather of {}",
    "wait_for_unshard": "the gather of {}",
    "reshard": "the end of {}",
    "reduce": "the reduction of {}",
    "wait_for_reduce": "the wait for the reduction of {}",
    "prefetch": "the gather of {}",
}


@dataclass(frozen=True)
class Verdict:
    """Whether a step fits into the memory of a rank. ``print`` shows it as one line.

    ``peak_nbytes`` is the most memory of a step, ``capacity_nbytes`` what there is, or None if it
    is not known. ``place`` says where in the step the peak is. ``fits`` is None if no capacity is
    known. ``way_out`` is what would fit, once it was looked for; else empty.
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
        """True if it fits, and little is left for what a plan does not count."""
        left = (self.capacity_nbytes or 0) - self.peak_nbytes
        return bool(self.fits) and left < TIGHT_SHARE * (self.capacity_nbytes or 0)

    def __str__(self) -> str:
        if self.capacity_nbytes is None:
            peak = nbytes_text(self.peak_nbytes)
            return f"takes {peak} at {self.place}; name hardware or a budget to know if it fits"
        words = "fits" if self.fits else "does not fit"
        peak, unit = of_each(self.peak_nbytes, self.capacity_nbytes)
        text = f"{words}: {peak} of {unit} at {self.place}"
        if self.is_tight:
            text += "; little is left for what an allocator rounds and libraries take"
        return f"{text}; {self.way_out}" if self.way_out else text


def verdict_of(step: StepPlan, capacity: int | None, way_out: str = "") -> Verdict:
    """Return the verdict on a step."""
    return Verdict(step.highest_nbytes, capacity, place_of(step), way_out)


def place_of(step: StepPlan) -> str:
    """Return where the peak of a step is, in words."""
    top: MemoryPoint = max(step.memory, key=lambda point: point.peak_nbytes)
    return place_before(top.label)


def place_before(label: str) -> str:
    """Return in words what begins when a peak is over: events are told when they have begun."""
    phase, _, rest = label.partition(": ")
    kind, _, unit = rest.partition(" ")
    if kind not in PLACES:
        return label
    return f"{PLACES[kind].format(unit or '<root>')} in {phase}"


def of_each(peak: int, capacity: int) -> tuple[str, str]:
    """Return two sizes in one unit, which the second one has; a small first one has its own."""
    unit, name = next(((unit, name) for unit, name in UNITS if capacity >= unit), (1 << 10, "KiB"))
    first = f"{peak / unit:.1f}" if 10 * peak >= unit else nbytes_text(peak)
    return first, f"{capacity / unit:.1f} {name}"


MOST_NAMES = 3
"""So many names of equal groups are in a row."""


def headline(mesh: Sequence[int], groups: Sequence[GroupPlan]) -> str:
    """Return how many parameters are over how many ranks."""
    total = sum(group.numel for group in groups)
    shape = " x ".join(str(size) for size in mesh)
    return f"{count(total)} parameters over {math.prod(mesh):,} ranks ({shape})"


def replicas(mesh: Sequence[int]) -> Iterator[str]:
    """Say who shares the model, where not all ranks do."""
    if len(mesh) == 2 and mesh[0] > 1:
        every = math.prod(mesh)
        yield (
            f"{mesh[1]:,} ranks share the model, in {mesh[0]:,} replicas; mesh={every} (--mesh "
            f"{every}): all {every:,} share it"
        )


def lines(
    mesh: Sequence[int], rank: int, groups: Sequence[GroupPlan], step: StepPlan | None
) -> Iterator[str]:
    """Yield a table that fits 100 columns: equal groups that follow each other are one row."""
    yield f"{headline(mesh, groups)}, as on rank {rank}"
    yield from replicas(mesh)
    yield ""
    heads = ("parameters", "whole", "shard", "padding", "gathered", "reduced")
    yield f"{'unit':<34}" + "".join(f"{head:>11}" for head in heads)
    for name, group in rows(groups):
        cells = (
            count(group.numel),
            nbytes_text(group.whole_nbytes),
            nbytes_text(group.shard_nbytes),
            nbytes_text(group.padding_nbytes),
            nbytes_text(group.gather_nbytes),
            nbytes_text(group.reduce_nbytes),
        )
        yield f"{_cut(name, 34):<34}" + "".join(f"{cell:>11}" for cell in cells)
    shards = sum(group.shard_nbytes for group in groups)
    grads = sum(group.grad_nbytes for group in groups)
    yield ""
    yield f"a rank keeps {nbytes_text(shards)} of parameters and {nbytes_text(grads)} of gradients"
    if step is not None:
        yield from _step_lines(step, mesh)


def _step_lines(step: StepPlan, mesh: Sequence[int]) -> Iterator[str]:
    if step.optimizer_nbytes:
        yield f"and {nbytes_text(step.optimizer_nbytes)} of optimizer state"
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        sizes = [one.nbytes for one in step.collectives if one.kind == kind]
        if sizes:
            yield f"{kind}: {len(sizes)} a step, {nbytes_text(sum(sizes))}"
    top = max(step.memory, key=lambda point: point.peak_nbytes)
    start = nbytes_text(step.start_nbytes)
    place = place_before(top.label)
    yield f"peak {nbytes_text(step.highest_nbytes)} at {place}, of which {start} at start"
    if step.host_nbytes:
        yield f"{nbytes_text(step.host_nbytes)} of the host's memory"
    if step.seconds is not None:
        waiting = step.waiting_seconds / step.seconds if step.seconds else 0.0
        yield f"a step takes {seconds_text(step.seconds)}; compute waits {waiting:.1%} of it"
        if step.tokens_per_second is not None:
            rate, every = step.tokens_per_second, step.tokens_per_second * math.prod(mesh)
            yield f"{rate_text(rate)} a rank, {rate_text(every)} in all; MFU {step.mfu or 0.0:.1%}"


def rows(groups: Sequence[GroupPlan]) -> Iterator[tuple[str, GroupPlan]]:
    """Yield names and sizes: equal groups that follow each other are one."""
    for _, same in itertools.groupby(groups, lambda one: replace(one, name="", alone=())):
        alike = list(same)
        yield _joined([one.name or "<root>" for one in alike]), alike[0]


def _joined(names: Sequence[str]) -> str:
    """Return names that differ in numbers as the first and how many; others side by side."""
    if len(names) > 1 and len({re.sub(r"\d+", "0", name) for name in names}) == 1:
        return f"{names[0]} ({len(names)} times)"
    if len(names) > MOST_NAMES:
        return f"{', '.join(names[:MOST_NAMES])}, ... ({len(names)})"
    return ", ".join(names)


def _cut(text: str, width: int) -> str:
    return text if len(text) < width else f"...{text[-(width - 4) :]}"


def rate_text(tokens: float) -> str:
    """Return tokens a second with four digits at most."""
    digits = f"{tokens:,.0f}" if tokens >= 1000 else f"{tokens:.4g}"
    return f"{digits} tokens/s"


def seconds_text(seconds: float) -> str:
    """Return a time with the unit that fits it."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds * 1e6:.4g} us"


def count(number: int) -> str:
    """Return a number with the prefix that fits it."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.4g} {name}"
    return str(number)

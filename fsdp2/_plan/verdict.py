"""Does a step fit? The line that stands first, wherever a plan is told.

Owns the verdict and its words. It must not know how a plan is made, nor look for a way out itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsdp2._base.sizes import UNITS, nbytes_text
from fsdp2._plan.values import MemoryPoint, StepPlan

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

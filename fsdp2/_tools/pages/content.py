"""The contents of a page as plain values. Plans and recordings create them; ``page`` draws them."""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE, GATHER, REDUCE = LANES = ("compute", "gathers", "reductions")
"""Lanes of a timeline."""
KINDS = (
    "parameters",  # sharded and unsharded parameters
    "optimizer state",
    "gradients",  # sharded gradients
    "gathered parameters",
    "communication",  # buffers of collectives
    "activations",  # and everything else that the model and its backward allocate
    "logits",  # activations with one value per vocabulary entry
)
"""Categories of memory, from bottom to top in the picture."""
MEASURED = ("parameters", "gathered parameters", "communication")
"""The categories that a recording measures."""


@dataclass(frozen=True)
class Fact:
    """A headline figure of a page: a name, a value with a unit, and a short note."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Advice:
    """A recommendation and the figure that supports it. ``str`` formats both as text.

    ``severity`` is ``slow`` or ``memory``. ``about`` names the unit, the parameter or the step.
    ``found`` is the finding, with a number. ``change`` is the advised action, as code if possible.
    ``gain`` is the predicted effect of the change, with a number, or empty.
    """

    severity: str
    about: str
    found: str
    change: str
    gain: str = ""

    def __str__(self) -> str:
        answer = f"{self.change}: {self.gain}" if self.gain else self.change
        text = f"{self.severity}, {self.about}: {self.found}"
        return f"{text}\n    {answer}" if answer else text


@dataclass(frozen=True)
class UnitArea:
    """A group of parameters, with a dotted name. ``padding_nbytes`` is the total over the
    ``shard_ranks`` ranks of the shard axis, so that the page can draw the padding of a shard."""

    name: str
    parameters: int
    numel: int
    dtypes: tuple[str, ...]
    whole_nbytes: int
    shard_nbytes: int
    padding_nbytes: int
    gather_nbytes: int
    reduce_nbytes: int
    shard_ranks: int = 1


@dataclass(frozen=True)
class Moment:
    """Bytes allocated at the event ``label``: one number per kind in the tab's ``kinds``. ``time``:
    seconds from the step's start, or the number of the event if times are unknown."""

    time: float
    label: str
    nbytes: tuple[int, ...]


@dataclass(frozen=True)
class MemoryTab:
    """Memory over a step, for one setting or one rank. ``limit_nbytes``: the device's memory, if
    known. ``measured``: other values, measured or planned, drawn as a line over ``moments``."""

    name: str
    kinds: tuple[str, ...]
    moments: tuple[Moment, ...]
    is_timed: bool
    limit_nbytes: int | None = None
    measured: tuple[Moment, ...] = ()
    measured_name: str = ""


@dataclass(frozen=True)
class Span:
    """A span of time, in seconds from the timeline's start. ``cause``: the reason for a gap in a
    lane; empty for work. ``nbytes`` and ``note`` are shown in a tooltip."""

    lane: str
    name: str
    begin: float
    end: float
    nbytes: int = 0
    cause: str = ""
    note: str = ""


@dataclass(frozen=True)
class TimeLine:
    """The lanes of one rank or of one setting."""

    name: str
    lanes: tuple[str, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Planned:
    """The plan of a step, to be drawn over measurements. Each moment has one number, and is
    drawn at the measured time of the event in its label. ``time_line`` is None if no times
    were planned."""

    moments: tuple[Moment, ...]
    time_line: TimeLine | None = None


@dataclass(frozen=True)
class Table:
    """A table with a heading, for data that is not drawn (ranks, collectives by kind)."""

    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Headline:
    """The main result, at the top of a page. ``kind``: ``good``, ``bad``, or empty."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Page:
    """The contents of a page, from top to bottom. Empty fields are not shown. ``order`` lists the
    three kinds of pictures, the most important first."""

    title: str
    subtitle: str
    facts: tuple[Fact, ...] = ()
    advice: tuple[Advice, ...] = ()
    units: tuple[UnitArea, ...] = ()
    memory: tuple[MemoryTab, ...] = ()
    time_lines: tuple[TimeLine, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()
    headline: Headline | None = None
    order: tuple[str, ...] = ("units", "memory", "times")

"""What a page shows, as plain values. Plans and recordings are told in them; ``page`` draws them.

Owns the values. They must not know what they were made of, nor how they are drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE, GATHER, REDUCE = "compute", "gathers", "reductions"
"""Lanes of a time line."""

KINDS = (
    "parameters",  # shards, and what is not sharded
    "optimizer state",
    "gradients",  # sharded ones
    "gathered parameters",
    "communication",  # buffers of collectives
    "activations",  # and all else that the model and its backward make
    "logits",  # of these, what has a number for each word of the vocabulary
)
"""What memory is for, from the bottom of the picture to its top."""


@dataclass(frozen=True)
class Fact:
    """A figure at the head of a page: its name, its value with a unit, and a word about it."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Advice:
    """One thing to do, with the number that says why. ``print`` it to read it.

    ``severity`` says what is lost: ``slow`` or ``memory``.
    ``about`` names the unit, the parameter or the step. ``found`` says what was seen, with its
    number. ``change`` says what to do, as code where that is possible. ``gain`` says what the
    change is predicted to bring, with its number; it may be empty.
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
    """A group of parameters in the tree of units. Sizes in bytes; names are dotted paths.

    ``padding_nbytes``: what padding adds over all ranks of the shard axis; ``shard_ranks``: how
    many these are, so that the padding in a shard can be drawn.
    """

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
    """Bytes that are alive at a time: ``nbytes`` in the order of the tab's ``kinds``.

    ``time`` in seconds from the step's start, or the number of the event if no time is known.
    ``label`` is what happened there.
    """

    time: float
    label: str
    nbytes: tuple[int, ...]


@dataclass(frozen=True)
class MemoryTab:
    """Memory over a step, for one setting or one rank.

    ``limit_nbytes``: of the device, None if it is not known. ``measured``: moments of one kind that
    are drawn over it as a line (what a rank measured, or what was planned).
    """

    name: str
    kinds: tuple[str, ...]
    moments: tuple[Moment, ...]
    is_timed: bool
    limit_nbytes: int | None = None
    measured: tuple[Moment, ...] = ()
    measured_name: str = ""


@dataclass(frozen=True)
class Span:
    """Something with a begin and an end, in seconds from the time line's start.

    ``cause``: of a gap in a lane, what was waited for; empty for work. ``nbytes`` and ``note`` are
    shown where the pointer is.
    """

    lane: str
    name: str
    begin: float
    end: float
    nbytes: int = 0
    cause: str = ""
    note: str = ""


@dataclass(frozen=True)
class TimeLine:
    """Lanes of one rank or of one setting; those of a page are drawn below each other."""

    name: str
    lanes: tuple[str, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Planned:
    """What a step was planned to be, to be laid over what was measured.

    ``moments``: of one kind, in the order of events, whose names are their labels; they get the
    times at which these events were measured. ``time_line``: None if no time was planned.
    """

    moments: tuple[Moment, ...]
    time_line: TimeLine | None = None


@dataclass(frozen=True)
class Table:
    """A table with a heading: what has no picture (ranks side by side, collectives by kind)."""

    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Headline:
    """What decides, above all else of a page. ``kind``: ``good``, ``bad``, or empty."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Page:
    """All that a page shows, from its top to its end. What is empty is left out.

    ``order``: of the three kinds of pictures, what decides first.
    """

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

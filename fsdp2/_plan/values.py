"""What a plan consists of, as plain values: groups, collectives, memory, time.

Owns the values. They must not know how they are found or shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fsdp2._base import events
from fsdp2._pages.content import COMPUTE, Span


@dataclass(frozen=True)
class ParamPlan:
    """One parameter of a group, whole: ``dim`` is what it is sharded along, None: by none.

    ``padding_nbytes``: what padding adds over all ranks of the shard axis.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None
    nbytes: int
    padding_nbytes: int


@dataclass(frozen=True)
class GroupPlan:
    """Parameters that are gathered and reduced together.

    ``name``: full name of the unit, or of the large part of a root that is a group of its own. All
    sizes in bytes. ``shard_nbytes``: of the shards that this rank keeps, with their padding;
    ``padding_nbytes``: what padding adds over all ranks of the shard axis; ``whole_nbytes``: of the
    unsharded parameters; ``gather_nbytes``: what a rank has when it has gathered;
    ``regather_nbytes``: the same in backward, where it may gather over fewer ranks;
    ``reduce_nbytes``: what it gives to a reduce-scatter; ``all_reduce_nbytes``: to the all-reduce
    over the replicate axis; ``grad_nbytes``: of its sharded gradients. ``parameters`` and
    ``numel``: how many there are, and elements in them, whole. ``alone``: names of the parameters
    that travel in collectives of their own. ``params``: each of them.
    """

    name: str
    parameters: int
    numel: int
    dtypes: tuple[torch.dtype, ...]
    shard_nbytes: int
    padding_nbytes: int
    whole_nbytes: int
    gather_nbytes: int
    regather_nbytes: int
    reduce_nbytes: int
    all_reduce_nbytes: int
    grad_nbytes: int
    alone: tuple[str, ...] = ()
    params: tuple[ParamPlan, ...] = field(default=(), repr=False, compare=False)


@dataclass(frozen=True)
class Collective:
    """One collective of a step: ``phase`` is forward or backward, ``kind`` as torch calls it."""

    phase: str
    kind: str
    unit: str
    nbytes: int


@dataclass(frozen=True)
class MemoryPoint:
    """Bytes that are alive on a rank after something happened, and the most since the last point.

    ``label`` says what happened. ``time``: in seconds from the step's start, 0 if no hardware was
    given. ``by_kind`` and ``peak_by_kind``: the same bytes by what they are for, in the order of
    ``StepPlan.kinds``.
    """

    label: str
    time: float
    nbytes: int
    peak_nbytes: int
    by_kind: tuple[int, ...]
    peak_by_kind: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """What one rank does in a step, in order, the memory that it takes, and the time.

    ``start_nbytes``: before the forward, with the optimizer's state if an optimizer was given;
    gradients are cleared, but their memory stays, for the next ones. ``peak_nbytes``: the most in
    forward and backward, all included; ``optimizer_peak_nbytes``: the most in the optimizer's step
    (0 without an optimizer).
    ``seconds`` of a whole step, and ``spans`` of its time line, are there if hardware was given.
    """

    kinds: tuple[str, ...]
    collectives: tuple[Collective, ...]
    events: tuple[events.Event, ...]
    memory: tuple[MemoryPoint, ...]
    start_nbytes: int
    peak_nbytes: int
    optimizer_nbytes: int
    optimizer_peak_nbytes: int = 0
    seconds: float | None = None
    spans: tuple[Span, ...] = field(default=(), repr=False)

    @property
    def highest_nbytes(self) -> int:
        """The most bytes of the whole step."""
        return max(self.peak_nbytes, self.optimizer_peak_nbytes)

    @property
    def waiting_seconds(self) -> float:
        """How long compute waits for links."""
        return sum(s.end - s.begin for s in self.spans if s.lane == COMPUTE and s.cause)

    @property
    def waits(self) -> dict[str, float]:
        """Seconds that compute waits, by what it waits for, the longest first."""
        found: dict[str, float] = {}
        for span in self.spans:
            if span.lane == COMPUTE and span.cause:
                found[span.cause] = found.get(span.cause, 0.0) + span.end - span.begin
        return dict(sorted(found.items(), key=lambda item: -item[1]))

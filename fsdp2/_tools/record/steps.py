"""What a step took: sums over its rows, as scalars.

Owns the sums. It must not know where rows come from, or clocks: it is told spans of time.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

LATE_NS = 100_000
"""A wait as long as this is one: less is what a call of the backend and looks at clocks take."""

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class RecordedStep:
    """A step of one rank: from its first forward until its reductions were waited for.

    Times are seconds, sizes are bytes. ``seconds`` is the sum of ``compute_s``, of ``between_s``
    (the loss, the caller's own code) and of the three waits. A wait is *exposed*: compute stood
    still.

    - ``gathered_nbytes``, ``reduced_nbytes``: the buffers of all all-gathers and reduce-scatters.
    - ``prefetch_hits``: all-gathers that were over when they were needed; ``prefetch_late``: those
      that were begun ahead and not over; ``prefetch_none``: those that nobody began ahead.
    - ``peak_nbytes``: the most bytes of shards, unsharded parameters and buffers of collectives.
    - ``rss_nbytes``: the process' memory at the end, 0 where the system does not tell.
    - ``allocated_nbytes``: what the device's allocator has given out, 0 without a device.
    - ``tokens_per_s``: counted from the end of the step before, so that the optimizer is included;
      0 if ``tokens`` was not given.
    """

    number: int
    seconds: float
    compute_s: float
    between_s: float
    wait_all_gather_s: float
    wait_reduce_scatter_s: float
    wait_all_reduce_s: float
    gathered_nbytes: int
    reduced_nbytes: int
    prefetch_hits: int
    prefetch_late: int
    prefetch_none: int
    peak_nbytes: int
    rss_nbytes: int
    allocated_nbytes: int
    tokens_per_s: float

    @property
    def scalars(self) -> dict[str, float]:
        """All figures but the number, by name: what ``record(scalars=...)`` is called with."""
        values = dataclasses.asdict(self)
        del values["number"]
        return values


class Step:
    """A step that goes on, or whose times are not all known yet. Number 0: outside of steps."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.unknown = 0  # rows whose times a device has not told yet
        self.is_over = False
        self.failed = False
        self.begin_ns: int | None = None
        self.end_ns = 0
        self.passes_ns = 0
        self.waits_ns = dict.fromkeys(COLLECTIVES, 0)
        self.gathered_nbytes = self.reduced_nbytes = self.peak_nbytes = 0
        self.prefetches = {"hit": 0, "late": 0, "none": 0}
        self.rss_nbytes = self.allocated_nbytes = 0

    def add_pass(self, begin_ns: int, end_ns: int) -> str:
        """A forward or a backward of a root was from here to there."""
        self.begin_ns = begin_ns if self.begin_ns is None else min(begin_ns, self.begin_ns)
        self.end_ns = max(end_ns, self.end_ns)
        self.passes_ns += end_ns - begin_ns
        return ""

    def add_wait(self, kind: str, prefetch: str, begin_ns: int, end_ns: int) -> str:
        """Compute stood still. ``prefetch``: ``ahead`` or ``none``; empty: no gather was needed.

        Returns what the row says besides.
        """
        waited = end_ns - begin_ns
        self.waits_ns[kind] += waited
        is_late = "true" if waited >= LATE_NS else "false"
        if not prefetch:
            return f',"is_late":{is_late}'
        found = prefetch
        if prefetch == "ahead":
            found = "late" if waited >= LATE_NS else "hit"
        self.prefetches[found] += 1
        return f',"is_late":{is_late},"prefetch":"{found}"'

    def summarize(self, tokens: float, last_end_ns: int | None) -> RecordedStep:
        """Return the scalars; ``last_end_ns`` is the end of the step before."""
        begin_ns = self.begin_ns or 0
        waits_ns = sum(self.waits_ns.values())
        period_ns = self.end_ns - (begin_ns if last_end_ns is None else last_end_ns)
        return RecordedStep(
            number=self.number,
            seconds=(self.end_ns - begin_ns) / 1e9,
            compute_s=(self.passes_ns - waits_ns) / 1e9,
            between_s=(self.end_ns - begin_ns - self.passes_ns) / 1e9,
            wait_all_gather_s=self.waits_ns["all_gather"] / 1e9,
            wait_reduce_scatter_s=self.waits_ns["reduce_scatter"] / 1e9,
            wait_all_reduce_s=self.waits_ns["all_reduce"] / 1e9,
            gathered_nbytes=self.gathered_nbytes,
            reduced_nbytes=self.reduced_nbytes,
            prefetch_hits=self.prefetches["hit"],
            prefetch_late=self.prefetches["late"],
            prefetch_none=self.prefetches["none"],
            peak_nbytes=self.peak_nbytes,
            rss_nbytes=self.rss_nbytes,
            allocated_nbytes=self.allocated_nbytes,
            tokens_per_s=tokens * 1e9 / period_ns if tokens and period_ns > 0 else 0.0,
        )

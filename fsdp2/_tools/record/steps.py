"""Sums over the rows of a step, as scalars."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

LATE_NS = 100_000
"""Shorter waits do not count as late: they are overhead of the backend and of clock readings."""
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class RecordedStep:
    """A step of one rank, from its first forward to the end of the wait for its reductions.

    Times are in seconds, and sizes in bytes. ``seconds`` is the sum of ``compute_s``, ``between_s``
    (the loss, the caller's own code) and the three waits. All waits are *exposed*: compute was idle
    during them.

    - ``gathered_nbytes``, ``reduced_nbytes``: the buffer sizes of all-gathers and reduce-scatters.
    - ``prefetch_hits``: all-gathers that had completed when they were needed; ``prefetch_late``:
      those that were prefetched but not complete; ``prefetch_none``: those that were not
      prefetched.
    - ``peak_nbytes``: the peak of shards, unsharded parameters and buffers of collectives.
    - ``rss_nbytes``: the process's memory at the end, or 0 if the system does not report it.
    - ``allocated_nbytes``: memory allocated by the device's allocator, or 0 on a CPU.
    - ``tokens_per_s``: measured from the end of the previous step, so that the optimizer is
      included; 0 if ``tokens`` was not given.
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
        """All values except ``number``, keyed by name, as passed to ``record(scalars=...)``."""
        values = dataclasses.asdict(self)
        del values["number"]
        return values


class Step:
    """A step that is running, or whose times are pending. Step 0 collects rows outside of steps."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.unknown = 0  # number of rows whose times are still unknown
        self.failed = False
        self.begin_ns: int | None = None
        self.end_ns = 0
        self.passes_ns = 0
        self.waits_ns = dict.fromkeys(COLLECTIVES, 0)
        self.prefetches = {"hit": 0, "late": 0, "none": 0}
        # the counts of the same names in ``RecordedStep``
        self.nbytes = dict.fromkeys(("gathered", "reduced", "peak", "rss", "allocated"), 0)

    def add_pass(self, begin_ns: int, end_ns: int) -> str:
        self.begin_ns = begin_ns if self.begin_ns is None else min(begin_ns, self.begin_ns)
        self.end_ns = max(end_ns, self.end_ns)
        self.passes_ns += end_ns - begin_ns
        return ""

    def add_wait(self, kind: str, prefetch: str, begin_ns: int, end_ns: int) -> str:
        """Add an exposed wait, and return columns of its row. ``prefetch`` is ``ahead``, ``none``,
        or empty if no gather was needed."""
        waited = end_ns - begin_ns
        self.waits_ns[kind] += waited
        is_late = waited >= LATE_NS
        text = f',"is_late":{str(is_late).lower()}'
        if not prefetch:
            return text
        if prefetch == "ahead":
            prefetch = "late" if is_late else "hit"
        self.prefetches[prefetch] += 1
        return f'{text},"prefetch":"{prefetch}"'

    def summarize(self, tokens: float, last_end_ns: int | None) -> RecordedStep:
        """Return the scalars; ``last_end_ns`` is the end of the previous step."""
        begin_ns = self.begin_ns or 0
        waits_ns = sum(self.waits_ns.values())
        waits: dict[str, Any] = {f"wait_{kind}_s": ns / 1e9 for kind, ns in self.waits_ns.items()}
        period_ns = self.end_ns - (begin_ns if last_end_ns is None else last_end_ns)
        return RecordedStep(
            number=self.number,
            seconds=(self.end_ns - begin_ns) / 1e9,
            compute_s=(self.passes_ns - waits_ns) / 1e9,
            between_s=(self.end_ns - begin_ns - self.passes_ns) / 1e9,
            **waits,
            **{f"{kind}_nbytes": nbytes for kind, nbytes in self.nbytes.items()},
            prefetch_hits=self.prefetches["hit"],
            prefetch_late=self.prefetches["late"],
            prefetch_none=self.prefetches["none"],
            tokens_per_s=tokens * 1e9 / period_ns if tokens and period_ns > 0 else 0.0,
        )

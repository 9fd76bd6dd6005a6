"""Estimate the clock offsets between ranks, and find the ranks that join collectives last.

[Note: aligning clocks]
Clock offsets are estimated from the recorded collectives, without communication. No rank completes
a collective before all ranks of its axis have begun it. A collective recorded on ranks ``r`` and
``q`` therefore limits how far the clock of ``q`` can be ahead::

  begin of q - end of r  <=  ahead  <=  end of q - begin of r

Together, the limits of all collectives leave a narrow range. A collective also ends at about the
same time on all ranks. The estimate is the median difference of exact end times (of a wait, or from
a device event), clamped to the range. The accuracy is the distance from the estimate to the farther
end of the range, typically the time of a fast collective: 0.1 to 1 ms. Clocks drift, so each minute
has its own estimate; values in between are interpolated. A collective is identified by its unit,
its kind, the last backward, and the number of such collectives since then.
"""

from __future__ import annotations

import bisect
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fsdp2._tools.record.rows import RankFile
from fsdp2._tools.record.steps import COLLECTIVES, LATE_NS

WINDOW_NS = 60_000_000_000
KINDS = {"unshard": "all_gather", "reduce": "reduce_scatter", "all_reduce": "all_reduce"}
WAITS = tuple(f"wait_{kind}_s" for kind in COLLECTIVES)
"""The figures of a step that are wait times."""

Key = tuple[Any, ...]


@dataclass(frozen=True)
class ClockOffset:
    """A rank's average clock offset relative to the first rank's clock, and its accuracy.

    ``ahead_s`` and ``accuracy_s`` are seconds. ``accuracy_s`` is infinite if no recorded collective
    connects the rank to the first rank.
    """

    rank: int
    ahead_s: float
    accuracy_s: float


@dataclass(frozen=True)
class Arrivals:
    """A rank's late arrivals: the rank arrived last in ``last`` of ``counted`` collectives.

    A collective counts if its last rank was late by more than the accuracy of the clocks, and by at
    least 0.1 ms. ``expected`` is the number of collectives in which the rank would be last by
    chance. A delay is counted from the arrival of the second-to-last rank, in seconds: ``late_s``
    is the sum of delays, ``median_late_s`` the median, ``longest_late_s`` the maximum.
    """

    rank: int
    last: int
    counted: int
    expected: float
    late_s: float
    median_late_s: float
    longest_late_s: float = 0.0


@dataclass(frozen=True)
class Met:
    """One collective on one rank, in nanoseconds since the epoch."""

    begin: int
    end: int
    is_exact: bool


@dataclass(frozen=True)
class Shift:
    """Offsets to subtract from a rank's times, interpolated linearly between ``times``."""

    times: tuple[int, ...] = ()
    ahead: tuple[int, ...] = ()
    accuracy: float = 0.0

    def apply(self, time_ns: int) -> int:
        if not self.times:
            return time_ns
        after = bisect.bisect(self.times, time_ns)
        if after == 0 or after == len(self.times):
            return time_ns - self.ahead[max(after - 1, 0)]
        start, stop = self.times[after - 1], self.times[after]
        low, high = self.ahead[after - 1], self.ahead[after]
        return time_ns - low - (high - low) * (time_ns - start) // (stop - start)


@dataclass(frozen=True)
class Delay:
    """The time that a collective waited for ``rank``: from the second-to-last arrival to the last,
    in nanoseconds since the epoch on the first rank's clock. ``ranks``: all ranks of the axis."""

    rank: int
    kind: str
    unit: str
    begin: int
    end: int
    ranks: tuple[int, ...]

    @property
    def waited_s(self) -> float:
        """The total waiting time of the other ranks, in seconds."""
        return (self.end - self.begin) * (len(self.ranks) - 1) / 1e9


@dataclass
class Aligned:
    """The recordings of ranks, with the times of their collectives on one clock."""

    files: Sequence[RankFile]
    shifts: dict[int, Shift] = field(default_factory=dict)
    met: dict[int, dict[Key, Met]] = field(default_factory=dict)

    def time(self, rank: int, epoch_ns: int) -> int:
        """Convert a time on a rank's clock to the first rank's clock."""
        return self.shifts.get(rank, Shift()).apply(epoch_ns)

    @cached_property
    def clocks(self) -> tuple[ClockOffset, ...]:
        return tuple(
            ClockOffset(rank, statistics.fmean(shift.ahead or [0]) / 1e9, shift.accuracy / 1e9)
            for rank, shift in sorted(self.shifts.items())
        )

    @cached_property
    def delays(self) -> list[Delay]:
        """The collectives whose last rank was late by more than the accuracy of the clocks."""
        found = []
        everywhere: dict[Key, dict[int, int]] = defaultdict(dict)
        for rank, met in self.met.items():
            for key, one in met.items():
                everywhere[key][rank] = one.begin
        for key, begins in everywhere.items():
            if len(begins) < 2 or set(begins) != set(key[0]):  # some of its ranks were not recorded
                continue
            *_, second, last = sorted(begins, key=lambda rank: begins[rank])
            lateness = begins[last] - begins[second]
            if lateness < max(LATE_NS, *(self.shifts[rank].accuracy for rank in begins)):
                continue
            found.append(Delay(last, key[1], key[2], begins[second], begins[last], tuple(begins)))
        return found

    @cached_property
    def arrivals(self) -> tuple[Arrivals, ...]:
        """Each rank's late arrivals; the worst rank first."""
        late: dict[int, list[int]] = {rank: [] for rank in self.met}
        counted: Counter[int] = Counter()
        expected = dict.fromkeys(self.met, 0.0)
        for one in self.delays:
            late[one.rank].append(one.end - one.begin)
            for rank in one.ranks:
                counted[rank] += 1
                expected[rank] += 1 / len(one.ranks)
        found = []
        for rank, ones in late.items():
            median = statistics.median(ones) if ones else 0.0
            times = (time / 1e9 for time in (sum(ones), median, max(ones, default=0)))
            found.append(Arrivals(rank, len(ones), counted[rank], expected[rank], *times))
        return tuple(sorted(found, key=lambda one: (-one.late_s, one.rank)))

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        return [row for file in self.files for row in file.steps]

    def total(self, *names: str) -> float:
        return float(sum(row[name] for row in self.steps for name in names))

    def share(self, *names: str) -> float:
        return self.total(*names) / self.total("seconds")


def collectives_of(file: RankFile) -> dict[Key, Met]:
    """Return a rank's collectives; keys are the same on all ranks, and begin with the axis."""
    groups = {group["name"]: group for group in file.header["groups"]}
    axes, epoch = file.header["axes"], file.header["epoch_ns"]
    counts: Counter[Key] = Counter()
    found = {}
    for row in file.rows:
        kind = KINDS.get(row["kind"])
        if kind is None or row["unit"] not in groups or "is_smaller" in row:
            continue
        group = groups[row["unit"]]
        axis = tuple(axes[group["replicate_axis" if kind == "all_reduce" else "shard_axis"]])
        name = (axis, kind, row["unit"], row["round"])
        counts[name] += 1
        if axis and row["end_ns"] is not None and row["begin_ns"] is not None:
            found[name + (counts[name],)] = Met(  # noqa: RUF005  # a star is 3.11 syntax to mypy
                epoch + row["begin_ns"], epoch + row["end_ns"], "is_exact" in row
            )
    return found


def align(files: Sequence[RankFile]) -> Aligned:
    """Align the clocks of all ranks. See [Note: aligning clocks]."""
    raw = {file.rank: collectives_of(file) for file in files}
    _keep_comparable(raw)
    aligned = Aligned(files)
    left = sorted(raw)
    while left:
        common, rank, known = max(
            ((len(aligned.met[a].keys() & raw[b].keys()), b, a) for a in aligned.met for b in left),
            default=(0, left[0], left[0]),
        )
        if not common:
            rank = left[0]
            shift = Shift(accuracy=float("inf") if aligned.met else 0.0)
        else:
            shift = _compare(aligned.met[known], raw[rank], aligned.shifts[known].accuracy)
        left.remove(rank)
        aligned.shifts[rank] = shift
        aligned.met[rank] = {
            key: Met(shift.apply(one.begin), shift.apply(one.end), one.is_exact)
            for key, one in raw[rank].items()
        }
    return aligned


def _keep_comparable(raw: Mapping[int, dict[Key, Met]]) -> None:
    """Drop collectives if ranks recorded different numbers of them between two backwards."""
    counts: dict[Key, set[int]] = defaultdict(set)
    for met in raw.values():
        for name, count in Counter(key[:-1] for key in met).items():
            counts[name].add(count)
    for met in raw.values():
        for key in [key for key in met if len(counts[key[:-1]]) > 1]:
            del met[key]


def _compare(known: Mapping[Key, Met], other: Mapping[Key, Met], accuracy: float) -> Shift:
    """Return how far ``other`` is ahead of ``known``, whose times have this ``accuracy``."""
    windows: dict[int, list[tuple[Met, Met]]] = defaultdict(list)
    common = sorted(known.keys() & other.keys(), key=lambda key: known[key].begin)
    first = known[common[0]].begin
    for key in common:
        windows[(known[key].begin - first) // WINDOW_NS].append((known[key], other[key]))
    times, ahead, worst = [], [], 0.0
    for pairs in windows.values():
        low = max(q.begin - r.end for r, q in pairs)
        high = min(q.end - r.begin for r, q in pairs)
        exact = [q.end - r.end for r, q in pairs if r.is_exact and q.is_exact]
        guess = round(statistics.median(exact)) if exact else (low + high) // 2
        if low <= high:
            guess = min(max(guess, low), high)
        times.append(round(statistics.fmean(q.begin for _, q in pairs)))
        ahead.append(guess)
        worst = max(worst, abs(high - guess), abs(guess - low))
    return Shift(tuple(times), tuple(ahead), accuracy + worst)

"""Ranks side by side: how their clocks differ, and who comes last to collectives.

Owns estimates over several ranks' files. It must not know formats of output.

[Note: aligning clocks]
Nothing is sent to compare clocks: collectives do it. None of them ends anywhere before every rank
of its axis has begun it. So for ranks ``r`` and ``q``, each collective that both recorded bounds
how far the clock of ``q`` is ahead::

    begin of q - end of r  <=  ahead  <=  end of q - begin of r

All collectives together leave a narrow range. Each ends at about the same time on all ranks, too,
so within the range the median difference of ends is taken, of those ends that are exact (a rank
waited for it, or a device told). What is left of the range to either side is said as the accuracy:
as a rule the time of a fast collective, 0.1 to 1 ms. Clocks drift, so this is done for each minute
on its own, and in between the offset goes from one to the next. Collectives are known by their
unit, their kind, and the number of the last backward, which ranks share whenever each began to
record.
"""

from __future__ import annotations

import bisect
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdp2._tools.record.rows import RankFile
from fsdp2._tools.record.steps import LATE_NS

WINDOW_NS = 60_000_000_000
KINDS = {"unshard": "all_gather", "reduce": "reduce_scatter", "all_reduce": "all_reduce"}
Key = tuple[Any, ...]


@dataclass(frozen=True)
class ClockOffset:
    """How far a rank's clock is ahead of the first rank's, on average, and how well that is known.

    ``ahead_s`` and ``accuracy_s`` are seconds. ``accuracy_s`` is infinite if nothing that was
    recorded connects the rank with the first one.
    """

    rank: int
    ahead_s: float
    accuracy_s: float


@dataclass(frozen=True)
class Arrivals:
    """How a rank came to its collectives: it was the last rank in ``last`` of ``counted``.

    A collective counts if its last rank came later than clocks are uncertain, and at least 0.1 ms.
    ``expected`` is in how many of them the rank would be last by chance. Lateness is in seconds
    after the last but one: ``late_s`` is the sum, ``median_late_s`` the median, ``longest_late_s``
    the most.
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
    """What is subtracted from a rank's times: at some times, and in between linearly."""

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


@dataclass
class Aligned:
    """Ranks' collectives on one clock."""

    shifts: dict[int, Shift] = field(default_factory=dict)
    met: dict[int, dict[Key, Met]] = field(default_factory=dict)

    @property
    def clocks(self) -> tuple[ClockOffset, ...]:
        return tuple(
            ClockOffset(
                rank,
                statistics.fmean(shift.ahead) / 1e9 if shift.ahead else 0.0,
                shift.accuracy / 1e9,
            )
            for rank, shift in sorted(self.shifts.items())
        )


def collectives_of(file: RankFile) -> dict[Key, Met]:
    """Return a rank's collectives by what all ranks call them: the axis is the first of the key."""
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
            found[name + (counts[name],)] = Met(  # noqa: RUF005  # mypy reads a star as new syntax
                epoch + row["begin_ns"], epoch + row["end_ns"], "is_exact" in row
            )
    return found


def align(files: Sequence[RankFile]) -> Aligned:
    """Find the clocks of all ranks. See [Note: aligning clocks]."""
    raw = {file.rank: collectives_of(file) for file in files}
    _keep_comparable(raw)
    aligned = Aligned()
    left = sorted(raw)
    while left:
        best = max(
            ((len(aligned.met[a].keys() & raw[b].keys()), b, a) for a in aligned.met for b in left),
            default=(0, left[0], left[0]),
        )
        common, rank, known = best
        if not common:
            rank = left[0]
            accuracy = 0.0 if not aligned.met else float("inf")
            shift = Shift(accuracy=accuracy)
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
    """Drop collectives of which ranks saw different numbers between the same backwards."""
    counts: dict[Key, set[int]] = defaultdict(set)
    for met in raw.values():
        for name, count in Counter(key[:-1] for key in met).items():
            counts[name].add(count)
    for met in raw.values():
        for key in [key for key in met if len(counts[key[:-1]]) > 1]:
            del met[key]


def _compare(known: Mapping[Key, Met], other: Mapping[Key, Met], accuracy: float) -> Shift:
    """Find how far ``other`` is ahead of a clock that is known within ``accuracy``."""
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


@dataclass(frozen=True)
class Delay:
    """A collective for which ``rank`` was late: from when the last but one came until it came.

    Times in nanoseconds since the epoch, on the first rank's clock. ``ranks``: of the axis.
    """

    rank: int
    kind: str
    unit: str
    begin: int
    end: int
    ranks: tuple[int, ...]

    @property
    def waited_s(self) -> float:
        """The time of all others together, in seconds."""
        return (self.end - self.begin) * (len(self.ranks) - 1) / 1e9


def delays(aligned: Aligned) -> Iterator[Delay]:
    """Yield each collective whose last rank came later than clocks are uncertain."""
    everywhere: dict[Key, dict[int, int]] = defaultdict(dict)
    for rank, met in aligned.met.items():
        for key, one in met.items():
            everywhere[key][rank] = one.begin
    for key, begins in everywhere.items():
        if len(begins) < 2 or set(begins) != set(key[0]):  # some rank was not recorded
            continue
        *_, second, last = sorted(begins, key=lambda rank: begins[rank])
        lateness = begins[last] - begins[second]
        if lateness < max(LATE_NS, *(aligned.shifts[rank].accuracy for rank in begins)):
            continue
        yield Delay(last, key[1], key[2], begins[second], begins[last], tuple(begins))


def arrivals(aligned: Aligned) -> tuple[Arrivals, ...]:
    """Say how often each rank was the last to come, and by how much; the worst first."""
    late: dict[int, list[int]] = {rank: [] for rank in aligned.met}
    counted: Counter[int] = Counter()
    expected = dict.fromkeys(aligned.met, 0.0)
    for one in delays(aligned):
        late[one.rank].append(one.end - one.begin)
        for rank in one.ranks:
            counted[rank] += 1
            expected[rank] += 1 / len(one.ranks)
    found = [
        Arrivals(
            rank,
            len(ones),
            counted[rank],
            expected[rank],
            sum(ones) / 1e9,
            statistics.median(ones) / 1e9 if ones else 0.0,
            max(ones, default=0) / 1e9,
        )
        for rank, ones in late.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.late_s, one.rank)))

"""Clocks and stragglers, from files that are made here: what is put in comes out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp2._tools.pages.content import Span
from fsdp2._tools.record.align import Delay, align
from fsdp2._tools.record.bounds import blamed, caused, delays_of, late_spans, stragglers
from fsdp2._tools.record.rows import RankFile

MS = 1_000_000
MINUTE = 60_000_000_000


def file_of(rank: int, rows: list[dict[str, Any]], epoch_ns: int = 0, world: int = 2) -> RankFile:
    groups = [{"name": "a", "shard_axis": 0, "replicate_axis": 1}]
    header = {"rank": rank, "epoch_ns": epoch_ns, "groups": groups}
    return RankFile(Path(f"rank{rank}"), {**header, "axes": [list(range(world)), []]}, tuple(rows))


def gather(number: int, begin: int, end: int, **more: Any) -> dict[str, Any]:
    row = {"kind": "unshard", "unit": "a", "round": number, "begin_ns": begin, "end_ns": end}
    return {**row, "n": number, "is_exact": True, **more}


def step_row(seconds: float) -> dict[str, Any]:
    return {"kind": "step", "unit": "", "failed": False, "seconds": seconds, "step": 1}


def two_ranks(count: int, late: list[int], epochs: tuple[int, int]) -> list[RankFile]:
    """Collectives every 10 ms that end 1 ms after the last rank came; ``late``: by rank."""
    files: list[list[dict[str, Any]]] = [[], []]
    for number in range(count):
        came = [10 * MS * number + late[rank] * (number % 3 != 0) for rank in (0, 1)]
        for rank in (0, 1):
            files[rank].append(
                gather(number, came[rank] - epochs[rank], max(came) + MS - epochs[rank])
            )
    return [file_of(rank, [*files[rank], step_row(10.0 * count / 1e3)]) for rank in (0, 1)]


@pytest.mark.parametrize("ahead", [0, 7 * MS, -3_000_000_000])
def test_a_shift_comes_back(ahead: int) -> None:
    found = align(two_ranks(30, [0, 0], (0, -ahead)))
    assert found.clocks[0].ahead_s == 0
    assert found.clocks[1].ahead_s == pytest.approx(ahead / 1e9)
    assert found.clocks[1].accuracy_s == pytest.approx(0.001)


def test_ends_that_are_seen_late_are_not_believed() -> None:
    """A rank that looked late has a clock that is known less well, and says so."""
    files = two_ranks(30, [0, 0], (0, 0))
    for row in files[1].rows[:-1]:
        row["end_ns"] += 400 * MS
        if row["n"] != 7:
            del row["is_exact"]
    files[1].rows[7]["end_ns"] -= 400 * MS
    found = align(files)
    assert found.clocks[1].ahead_s == pytest.approx(0.0)  # by the one that is exact
    assert found.clocks[1].accuracy_s == pytest.approx(0.001)
    del files[1].rows[7]["is_exact"]
    files[1].rows[7]["end_ns"] += 400 * MS
    clock = align(files).clocks[1]
    assert clock.ahead_s <= clock.accuracy_s == pytest.approx(0.201)


def test_a_clock_that_drifts() -> None:
    """For each minute an offset of its own, and in between a line."""
    rows: list[list[dict[str, Any]]] = [[], []]
    for number in range(600):
        time = number * MINUTE // 100
        drift = number * MS // 10
        rows[0].append(gather(number, time, time + MS))
        rows[1].append(gather(number, time + drift, time + drift + MS))
    shift = align([file_of(0, rows[0]), file_of(1, rows[1])]).shifts[1]
    for number in (120, 333, 480):
        time, drift = number * MINUTE // 100, number * MS // 10
        assert shift.apply(time + drift) == pytest.approx(time, abs=0.2 * MS)


def test_ranks_that_nothing_connects() -> None:
    one, other = two_ranks(3, [0, 0], (0, 0))
    found = align([one, file_of(1, [])])
    assert found.clocks[1].accuracy_s == float("inf")
    assert found.arrivals[0].counted == 0
    assert align([other]).clocks[0].accuracy_s == 0


def test_a_chain_of_axes() -> None:
    """Ranks that share no axis with the first one are reached over others."""

    def one(rank: int, axis: list[int], epoch: int) -> RankFile:
        rows = [gather(n, 10 * MS * n - epoch, 10 * MS * n + MS - epoch) for n in range(5)]
        found = file_of(rank, rows)
        found.header["axes"][0] = axis
        return found

    files = [one(0, [0, 1], 0), one(1, [0, 1], -5 * MS)]
    both = file_of(2, [], 0)
    middle = [gather(n, 10 * MS * n + 5 * MS, 10 * MS * n + 6 * MS) for n in range(5)]
    files[1].header["axes"].append([1, 2])
    files[1].header["groups"].append({"name": "b", "shard_axis": 2, "replicate_axis": 1})
    rows = [*files[1].rows, *({**row, "unit": "b"} for row in middle)]
    files[1] = RankFile(files[1].path, files[1].header, tuple(rows))
    both.header["axes"][0] = [1, 2]
    both.header["groups"] = [{"name": "b", "shard_axis": 0, "replicate_axis": 1}]
    last = [{**row, "unit": "b", "begin_ns": row["begin_ns"] + 9 * MS} for row in middle]
    last = [{**row, "end_ns": row["end_ns"] + 9 * MS} for row in last]
    found = align([*files, RankFile(both.path, both.header, tuple(last))])
    assert [clock.ahead_s for clock in found.clocks] == pytest.approx([0.0, 0.005, 0.014])


def test_a_straggler_is_told_from_chance() -> None:
    files = two_ranks(60, [0, 4 * MS], (0, -2 * MS))
    aligned = align(files)
    (worst, other) = aligned.arrivals
    assert (worst.rank, worst.last, worst.counted, worst.expected) == (1, 40, 40, 20.0)
    assert worst.median_late_s == pytest.approx(0.004)
    assert worst.late_s == pytest.approx(0.16)
    assert (other.rank, other.last, other.late_s) == (0, 0, 0.0)
    assert stragglers(aligned) == (worst,)


def test_a_wait_is_laid_at_the_door_of_the_rank_that_was_late() -> None:
    files = two_ranks(60, [0, 4 * MS], (0, -2 * MS))
    aligned = align(files)
    found = delays_of(stragglers(aligned), aligned)
    assert len(found) == 40
    assert caused(found) == {("a", "all_gather"): pytest.approx(0.16)}
    assert delays_of((), aligned) == []
    wait = Span("compute", "wait for all_gather a", 0.010, 0.015, 0, "all_gather a", "by a")
    assert blamed(wait, 0, found, 0).cause == "rank 1, all_gather a"
    assert blamed(wait, 1, found, 0) is wait  # its own
    assert blamed(wait, 0, found, 50 * MS) is wait  # of another time
    other = replace(wait, cause="reduce_scatter a")
    assert blamed(other, 0, found, 0) is other
    work = replace(wait, cause="")
    assert blamed(work, 0, found, 0) is work
    spans = late_spans(1, found, 0, until=0.045)
    assert [(s.begin, s.end) for s in spans] == [
        (pytest.approx(begin), pytest.approx(begin + 0.004)) for begin in (0.010, 0.020, 0.040)
    ]
    assert late_spans(0, found, 0, until=1.0) == []


def test_what_a_rank_is_late_to_at_once_is_one_delay() -> None:
    both = [
        Delay(1, "all_gather", unit, 5 * MS, end * MS, (0, 1, 2))
        for unit, end in (("a", 9), ("b", 8))
    ]
    (span,) = late_spans(1, both, 0, until=1.0)
    assert (span.begin, span.end) == (pytest.approx(0.005), pytest.approx(0.009))
    assert set(span.note.split(", ")) == {"all_gather a", "all_gather b"}
    assert caused(both) == {
        ("a", "all_gather"): pytest.approx(0.008),
        ("b", "all_gather"): pytest.approx(0.006),
    }


def test_two_that_take_turns_are_no_stragglers() -> None:
    rows: list[list[dict[str, Any]]] = [[], []]
    for number in range(60):
        came = [10 * MS * number + 4 * MS * (number % 2 == rank) for rank in (0, 1)]
        for rank in (0, 1):
            rows[rank].append(gather(number, came[rank], max(came) + MS))
    files = [file_of(rank, [*rows[rank], step_row(0.6)]) for rank in (0, 1)]
    assert stragglers(align(files)) == ()


def test_what_ranks_saw_differently_is_left_out() -> None:
    """Between two backwards one rank recorded more collectives than the other."""
    one, other = two_ranks(4, [0, 0], (0, 0))
    more = RankFile(one.path, one.header, (gather(2, 0, MS), *one.rows))
    found = align([more, other])
    assert {key[3] for key in found.met[0]} == {0, 1, 3}


def test_a_gather_over_fewer_ranks_tells_nothing() -> None:
    one, other = two_ranks(4, [0, 0], (0, 0))
    assert len(align([one, other]).met[0]) == 4
    for file in (one, other):
        file.rows[0]["is_smaller"] = True
    assert len(align([one, other]).met[0]) == 3

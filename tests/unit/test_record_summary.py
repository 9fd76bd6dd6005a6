"""What bounds the steps of a recording, from files that are made here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp2._tools.record.align import align
from fsdp2._tools.record.rows import RankFile
from fsdp2._tools.record.summary import page

MS = 1_000_000
STEPS = 20


def recording(rank: int, *, compute: int, late: int = 0, link: int = 1, gap: int = 0) -> RankFile:
    """Steps of one gather and then some compute, in ms; rank 1 comes ``late`` to each gather."""
    rows: list[dict[str, Any]] = []
    end = 0
    for step in range(1, STEPS + 1):
        begin = end
        held = late * (step % 3 != 0)  # clocks are known by the steps in which nobody is late
        came = begin + gap * MS + held * MS * rank
        landed = begin + (gap + held + link) * MS
        end = landed + compute * MS
        of_step = {"step": step, "unit": "a", "round": step, "n": step}
        rows.append(
            {
                "kind": "unshard",
                "begin_ns": came,
                "end_ns": landed,
                "nbytes": 1 << 20,
                "is_exact": True,
                **of_step,
            }
        )
        rows.append(
            {
                "kind": "wait",
                "for": "all_gather",
                "by": "a",
                "prefetch": "none",
                "begin_ns": came,
                "end_ns": landed,
                **of_step,
            }
        )
        waits = {
            "wait_all_gather_s": (landed - came) / 1e9,
            "wait_reduce_scatter_s": 0.0,
            "wait_all_reduce_s": 0.0,
        }
        prefetches = {"prefetch_hits": 0, "prefetch_late": 0, "prefetch_none": 1}
        took = {"seconds": (end - begin) / 1e9, "compute_s": (compute + held * rank) / 1e3}
        rows.append(
            {
                "kind": "step",
                "failed": False,
                "begin_ns": begin,
                "end_ns": end,
                **of_step,
                **took,
                **waits,
                **prefetches,
                "peak_nbytes": 1,
                "tokens_per_s": 0.0,
                "unit": "",
            }
        )
    group = {
        "name": "a",
        "parameters": 1,
        "numel": 4,
        "dtypes": ["float32"],
        "whole_nbytes": 16,
        "shard_nbytes": 8,
        "padding_nbytes": 0,
        "mesh": [1, 2],
        "shard_axis": 0,
        "replicate_axis": 1,
    }
    header = {
        "rank": rank,
        "epoch_ns": 0,
        "host": "h",
        "model": "M",
        "world_size": 2,
        "fsdp2": "",
        "torch": "",
        "groups": [group],
        "axes": [[0, 1], []],
    }
    return RankFile(Path(f"rank{rank}"), header, tuple(rows))


CAUSES: dict[str, tuple[dict[str, int], list[str], str]] = {
    "a slow rank": ({"compute": 200, "late": 100}, ["rank 1"], "rank 1: the others waited 1."),
    "a slow link": ({"compute": 20, "link": 30}, ["the links", "a"], "the links: 60 % of the step"),
    "a host between the units": (
        {"compute": 20, "gap": 30},
        ["between the units", "a"],
        "between the units: 59 % of the step time is spent outside of compute",
    ),
    "a link, and a slower host": (
        {"compute": 10, "link": 30, "gap": 40},
        ["between the units", "the links", "a"],
        "between the units: 50 % of the step time",
    ),
    "compute alone": ({"compute": 500}, [], "compute: 99.8 % of the step time"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_cause_comes_first(cause: str) -> None:
    """What follows from it is not said again as the fault of a unit."""
    given, expected, headline = CAUSES[cause]
    files = [recording(rank, **given) for rank in (0, 1)]
    made = page(align(files), 1, None)
    found = [one.about for one in made.advice]
    assert found[:1] == expected[:1]
    assert set(found) <= set(expected)
    assert made.headline is not None
    assert made.headline.text.startswith(headline)
    assert made.order[0] == "times"
    (typical,) = (fact for fact in made.facts if fact.name == "a step")
    assert f"{sum(given.values()) + ('link' not in given)} ms" == typical.value


def test_one_long_step_is_told_and_hides_nothing() -> None:
    files = [recording(rank, compute=20) for rank in (0, 1)]
    next(row for row in files[1].rows if row["kind"] == "step" and row["step"] == 7)["seconds"] = (
        2.0
    )
    made = page(align(files), 1, None)
    (typical,) = (fact for fact in made.facts if fact.name == "a step")
    assert (typical.value, typical.note.rpartition("; ")[2]) == (
        "21 ms",
        "the longest: 2 s, step 7",
    )

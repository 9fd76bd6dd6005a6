"""A step of each library beside torch's own: the rows of README's table.

All variants of a row lie in memory together and take turns. ``step ms`` is between events of the
device, ``host ms`` until everything is enqueued; medians. ``peak GB`` is above the step's start.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

from benchmarks.gpu import _machine
from benchmarks.gpu._rows import Rows
from benchmarks.gpu._steps import (
    BLOCKS_8B,
    LARGE,
    LIBRARIES,
    SMALL,
    Step,
    emulated,
    make_step,
    size_of,
    warm_up,
)
from benchmarks.kit.rounds import rotate

ROUNDS = 1 if _machine.REHEARSES else 15
CASES = [
    (SMALL, 8, False),
    (BLOCKS_8B, 8, False),
    (LARGE, 8, False),
    (SMALL, 8, True),
    (BLOCKS_8B, 8, True),
    (SMALL, 64, False),
    (BLOCKS_8B, 64, False),
    (LARGE, 64, False),
    (LARGE, 8, True),
]


def compare(title: str, ranks: int, has_optimizer: bool) -> list[dict[str, Any]]:
    # the plain model holds all states of the optimizer, so it is timed without one
    names = LIBRARIES if has_optimizer else ("plain", *LIBRARIES)
    with emulated(ranks) as mesh:
        steps = {
            name: warm_up(make_step(name, size_of(title), mesh, optimizer=has_optimizer))
            for name in names
        }
        rows = measure(steps)
        steps.clear()
    _machine.empty()
    return rows


def measure(steps: dict[str, Step]) -> list[dict[str, Any]]:
    took: dict[str, list[_machine.Took]] = {name: [] for name in steps}

    def time(name: str) -> float:
        took[name].append(_machine.time_once(steps[name]))
        return took[name][-1].device_ms

    rotate(ROUNDS, {name: lambda name=name: time(name) for name in steps})  # type: ignore[misc]
    rows = []
    for name, step in steps.items():
        ratios = [
            mine.device_ms / its.device_ms
            for mine, its in zip(took[name], took["torch"], strict=True)
        ]
        rows.append(
            {
                "library": name,
                "step ms": statistics.median(one.device_ms for one in took[name]),
                "over torch": statistics.median(ratios),
                "host ms": statistics.median(one.host_ms for one in took[name]),
                "peak GB": _machine.find_peak(step) / _machine.GB,
                **_machine.kernel_ms(_machine.profiled(step)),
            }
        )
    return rows


def main() -> None:
    _machine.need_a_gpu()
    rows = Rows()
    said = []
    for title, ranks, has_optimizer in CASES[2:5] if _machine.REHEARSES else CASES:
        what = f"{title}, N={ranks}{', AdamW' * has_optimizer}"
        found = rows.ask("", what, lambda c=(title, ranks, has_optimizer): compare(*c), 8.0)  # type: ignore[misc]
        for row in found or []:
            if row["library"] == "fsdp2":
                said.append(f"{row['over torch']:.2f}")
    rows.end(f"ours over torch's default: {' '.join(said)}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()

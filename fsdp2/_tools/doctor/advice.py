"""Recommends settings, based only on measurements, and reports the accuracy of the plan."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TypeGuard

from fsdp2._core.base.names import nbytes_text
from fsdp2._tools.doctor import fast
from fsdp2._tools.doctor.ranks import Values
from fsdp2._tools.doctor.verdicts import (
    FAST,
    NOT_MEASURED,
    OK,
    WARNING,
    WRONG,
    Findings,
    Setting,
    Verdict,
    counted,
)

GAIN = 0.97
"""A setting is recommended if it reduces the median step time to less than this fraction of the
current time, and makes steps faster in three quarters of the rounds."""
FAR = 2.0
"""A warning is given if the step time differs from the planned time by more than this factor."""


def prediction(findings: Findings) -> Iterator[Verdict]:
    """Compare the measured step with the planned one."""
    steps, plan = findings.values.get("steps"), findings.of_first("plan")
    if not _is_complete(steps) or plan.get("seconds") is None:
        return
    took = statistics.median(fast.rounds_of(steps, fast.OURS))
    factor = took / plan["seconds"]
    said = f"a step took {factor:.3g} times as long as planned"
    peak = steps[0]["looks"][fast.OURS].get("peak")
    if peak:
        said += f", and {peak / plan['peak']:.3g} times the planned memory"
    is_far = not 1 / FAR <= factor <= FAR
    if is_far:
        said += ": a plan assumes no other work on the machine, and separate cores for each rank"
    yield Verdict(FAST, "prediction", WARNING if is_far else OK, said)


def settings(findings: Findings) -> Iterator[Setting]:
    """Yield settings to change, and settings to keep."""
    steps = findings.values.get("steps")
    if _is_complete(steps):
        yield from _of_steps(steps, _copied_in_a_hop(findings))
    yield from _environment(findings)


def _of_steps(steps: Sequence[Values], hop: str) -> Iterator[Setting]:
    if steps[0]["ranks"] == 1:
        return
    ours = fast.rounds_of(steps, fast.OURS)
    names = (fast.LOW, fast.FASTEST)
    memory = {name: fast.ratio(fast.rounds_of(steps, name), ours) for name in names}
    best = min(memory, key=lambda name: memory[name][1])
    said = "; ".join(f"{name} takes {_share(*times)}" for name, times in memory.items())
    is_better = memory[best][1] < GAIN and memory[best][2] < 1
    yield Setting(
        "memory and prefetch",
        f"model.{best}" if is_better else "",
        f"{said} of the time of 'balanced', which prefetches one unit",
    )
    low, middle, high = fast.ratio(fast.rounds_of(steps, fast.PACKED), ours)
    is_better = middle < GAIN and high < 1
    yield Setting(
        "zero-copy size",
        f"model.{fast.PACKED}" if is_better else "",
        f"if all parameters are in one collective, a step takes {_share(low, middle, high)} "
        f"of the current time{hop}",
    )


def _share(low: float, middle: float, high: float) -> str:
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"


def _is_complete(found: Sequence[Values] | None) -> TypeGuard[Sequence[Values]]:
    return bool(found) and not any("error" in one for one in found or ())


def _copied_in_a_hop(findings: Findings) -> str:
    machine = findings.of_first("plan").get("hardware")
    if not machine or not machine["latency"]:
        return ""
    nbytes = int(machine["latency"] * machine["memory_bandwidth"] / 2)
    hop = f"{machine['latency'] * 1e6:.3g} us"
    return f"; one more collective costs a hop ({hop}), the time to copy {nbytes_text(nbytes)}"


def _environment(findings: Findings) -> Iterator[Setting]:
    limits = findings.values.get("limits")
    if not _is_complete(limits):
        return
    for host in sorted({one["host"] for one in limits}):
        there = [one for one in limits if one["host"] == host]
        threads, cores = sum(one["threads"] for one in there), there[0]["cores"]
        if threads > max(cores, len(there)):
            each = max(1, int(cores // len(there)))
            yield Setting(
                "environment",
                f"export OMP_NUM_THREADS={each}",
                f"{threads} threads of {len(there)} ranks run on {cores:g} cores",
            )
            return


def last_word(verdicts: Sequence[Verdict]) -> str:
    """Return a summary: the number of verdicts by status, and the names of checks to look at."""
    wrong = [one.name for one in verdicts if one.status == WRONG]
    warned = [one.name for one in verdicts if one.status == WARNING]
    unknown = sum(one.status == NOT_MEASURED for one in verdicts)
    words = []
    if wrong:
        words.append(f"{len(wrong)} wrong ({', '.join(dict.fromkeys(wrong))})")
    if warned:
        words.append(f"{counted(len(warned), 'warning')} ({', '.join(dict.fromkeys(warned))})")
    words.append(f"{sum(one.status == OK for one in verdicts)} ok, {unknown} not measured")
    return "; ".join(words)

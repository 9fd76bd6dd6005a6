"""Sizes that people write, and the settings that make a step fit into one.

Owns the search: which changes are tried, and how they are told. It must not know how one is run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fsdp2._base.arguments import wrong_type, wrong_value
from fsdp2._base.containers import map_tensors, visit_tensors
from fsdp2._base.policy import CPUOffloadPolicy
from fsdp2._plan.values import StepPlan

UNITS = {
    "": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(("", "K", "M", "G", "T"))},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), 1)},
}
SIZE = "a number of bytes, as 70 * 10**9, '70GB' or '64GiB'"
LARGEST = 1 << 60
"""Bytes: what no device has."""
MEMORY = ("fast", "balanced", "low")
MOST = 1 << 16
"""No larger batch is looked for."""


def size_of(who: str, name: str, value: object) -> int:
    """Return the bytes of a size as people write it.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, str):
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(who, name, SIZE, value)
        if not 0 < value <= LARGEST:
            raise wrong_value(who, name, SIZE, value)
        return value
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", value, re.IGNORECASE)
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    if found is None or found[2].lower() not in units:
        raise wrong_value(who, name, SIZE, value)
    nbytes = float(found[1]) * units[found[2].lower()]
    if not 1 <= nbytes <= LARGEST:
        raise wrong_value(who, name, SIZE, value)
    return int(nbytes)


@dataclass(frozen=True)
class Suggestion:
    """Settings to plan or train with, and what they are predicted to give.

    ``changes``: as keywords of ``plan``; ``code``: the same to read. ``seconds`` of a step, if
    hardware was given. ``batch``: of the best one that fits, the largest first dim of the batch
    with which it still does; None if nothing in the batch has rows.
    """

    changes: Mapping[str, Any]
    code: str
    peak_nbytes: int
    seconds: float | None
    fits: bool
    batch: int | None = None


Predict = Callable[[dict[str, Any]], StepPlan]


def suggest(batch: object, budget: int, predict: Predict, may_offload: bool) -> list[Suggestion]:
    """Return what was tried, the best first: what fits, and among that the fastest.

    Each memory setting is tried, then with checkpointing, then with offload too: the dearer ones
    only while nothing fits. ``may_offload``: the model's policies can still be chosen.
    """
    tried: list[Suggestion] = []
    ways: list[dict[str, Any]] = [{}, {"activation_checkpointing": True}]
    for dearer in [*ways, _offloaded()] if may_offload else ways:
        for memory in MEMORY:
            changes = {**dearer, "memory": memory}
            step = predict(changes)
            peak, fits = step.highest_nbytes, step.highest_nbytes <= budget
            tried.append(Suggestion(changes, code_of(changes), peak, step.seconds, fits))
        if any(one.fits for one in tried):
            break
    tried.sort(
        key=lambda one: (not one.fits, (one.seconds or 0.0) if one.fits else 0.0, one.peak_nbytes)
    )
    best = tried[0]
    if best.fits:
        rows = largest_batch(batch, best.peak_nbytes, budget, predict, dict(best.changes))
        tried[0] = replace(best, batch=rows)
    return tried


def _offloaded() -> dict[str, Any]:
    return {"activation_checkpointing": True, "offload_policy": CPUOffloadPolicy()}


def code_of(changes: Mapping[str, Any]) -> str:
    """Return changes as the lines that make them."""
    parts = []
    if "offload_policy" in changes:
        parts.append("fully_shard(..., offload_policy=CPUOffloadPolicy())")
    if changes.get("activation_checkpointing"):
        parts.append("torch.utils.checkpoint around each unit")
    if "memory" in changes:
        parts.append(f"model.set_memory({changes['memory']!r})")
    return ", ".join(parts)


def rows_of(batch: object) -> int | None:
    """Return the size of the first dim that all tensors of a batch share."""
    found: list[int] = []
    visit_tensors(lambda one: found.append(one.shape[0] if one.dim() else 0), batch)
    return found[0] if found and found[0] and len(set(found)) == 1 else None


def with_rows(batch: Any, rows: int) -> Any:
    """Return a batch of tensors with another first dim; values are not looked at."""

    def resized(tensor: Tensor) -> Tensor:
        return tensor.new_empty((rows, *tensor.shape[1:]))

    return map_tensors(resized, batch)


def largest_batch(
    batch: object, peak: int, budget: int, predict: Predict, changes: dict[str, Any]
) -> int | None:
    """Return the most rows with which a step fits: guessed from two sizes, and then tried.

    ``peak``: with the batch as it is, which fits.
    """
    rows = rows_of(batch)
    if rows is None:
        return None

    def peak_with(number: int) -> int:
        return predict({**changes, "batch": with_rows(batch, number)}).highest_nbytes

    double = peak_with(2 * rows)
    of_a_row = max((double - peak) / rows, 1.0)
    low, high = (2 * rows, MOST + 1) if double <= budget else (rows, 2 * rows)
    guess, is_near = int(rows + (budget - peak) / of_a_row), False
    while high - low > 1:
        if not low < guess < high:
            guess = (low + high) // 2
        if peak_with(guess) <= budget:
            low, step = guess, 1
        else:
            high, step = guess, -1
        guess = guess + step if not is_near else (low + high) // 2
        is_near = True
    return low

"""Sizes that people write, and the settings that make a step fit into one.

Owns the search: which changes are tried, and how they are told. It must not know how one is run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fsdp2._base.arguments import wrong_type, wrong_value
from fsdp2._base.containers import map_tensors, visit_tensors
from fsdp2._base.policy import CPUOffloadPolicy
from fsdp2._base.sizes import nbytes_text
from fsdp2._plan.hardware import Hardware
from fsdp2._plan.table import seconds_text
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
    """Settings to plan or train with, and what they are predicted to give. ``print`` shows one.

    ``changes`` are keywords: ``plan.changed(**suggestion.changes)`` is that plan. ``code`` says
    the same as code. ``peak_nbytes`` is the most memory of a step, in bytes. ``seconds`` is the
    time of a step, or None if the plan has no hardware. ``fits``: the peak is within the budget.
    ``batch`` is set on the first suggestion alone, if that fits: the largest first dim of the
    batch that still fits, looked for up to 65536. It is None elsewhere, and if the tensors of
    the batch do not share their first dim.
    """

    changes: Mapping[str, Any] = field(repr=False)
    code: str
    peak_nbytes: int
    seconds: float | None
    fits: bool
    batch: int | None = None

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        words = [f"{verdict}: {self.code}, peak {nbytes_text(self.peak_nbytes)}"]
        if self.seconds is not None:
            words.append(f"{seconds_text(self.seconds)} a step")
        if self.batch is not None:
            words.append(f"up to a batch of {self.batch}")
        return ", ".join(words)


Predict = Callable[[dict[str, Any]], StepPlan]


def suggest(
    batch: object,
    budget: int,
    predict: Predict,
    may_offload: bool,
    machine: Hardware | None,
    sharding: Sequence[str] = (),
) -> list[Suggestion]:
    """Return what was tried, the best first: what fits, and among that the fastest.

    Each memory setting is tried, then with checkpointing, on a device then with activations and
    with states on the host, then with all on the host: the dearer ones only while nothing fits.
    ``may_offload``: the model's policies can still be chosen. ``sharding``: values of ``shard`` to
    try beside each that needs no ``CPUOffloadPolicy``.
    """
    tried: list[Suggestion] = []
    steps: dict[str, StepPlan] = {}
    again = {"activation_checkpointing": True}
    ways: list[dict[str, Any]] = [{}, again]
    if machine is not None and machine.device_type != "cpu":
        activations = {**again, "offload_activations": True}
        ways += [activations, {**activations, "offload_states": True}]
    for dearer in [*ways, _offloaded()] if may_offload else ways:
        tries = [{**dearer, "memory": memory} for memory in MEMORY]
        if "offload_policy" not in dearer:
            tries += [{**dearer, "shard": shard} for shard in sharding]
        for changes in tries:
            step = steps[code_of(changes)] = predict(changes)
            peak, fits = step.highest_nbytes, step.highest_nbytes <= budget
            tried.append(Suggestion(changes, code_of(changes), peak, step.seconds, fits))
        if any(one.fits for one in tried):
            break
    tried.sort(
        key=lambda one: (not one.fits, (one.seconds or 0.0) if one.fits else 0.0, one.peak_nbytes)
    )
    best = tried[0]
    if best.fits:
        rows = largest_batch(batch, steps[best.code], budget, predict, dict(best.changes))
        tried[0] = replace(best, batch=rows)
    return tried


def _offloaded() -> dict[str, Any]:
    return {"activation_checkpointing": True, "offload_policy": CPUOffloadPolicy()}


def code_of(changes: Mapping[str, Any]) -> str:
    """Return changes as the lines that make them."""
    parts = []
    if "shard" in changes:
        parts.append(f"fully_shard(..., shard={changes['shard']!r})")
    if "offload_policy" in changes:
        parts.append("fully_shard(..., offload_policy=CPUOffloadPolicy())")
    if changes.get("activation_checkpointing"):
        parts.append("torch.utils.checkpoint around each unit")
    if changes.get("offload_activations"):
        parts.append("fsdp2.offload_activations around each unit")
    if changes.get("offload_states"):
        parts.append("fsdp2.optim.offload_states(optimizer)")
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
    batch: object, step: StepPlan, budget: int, predict: Predict, changes: dict[str, Any]
) -> int | None:
    """Return the most rows with which a step fits, as ``step`` does with those of the batch.

    What is held at a moment grows evenly with the rows, so the peak does between moments. Two sizes
    tell where each event would leave the budget; the first of them is tried. Then a line between
    what fits and what does not leads to the next size. Every third is in the middle, whatever the
    line says, so that the search ends soon for a model whose memory grows in another way.
    """
    rows = rows_of(batch)
    if rows is None:
        return None

    def with_batch(number: int) -> StepPlan:
        return predict({**changes, "batch": with_rows(batch, number)})

    double = with_batch(2 * rows)
    leaves = [
        rows + (budget - one) * rows // (two - one)
        for one, two in zip(_peaks(step), _peaks(double), strict=False)  # it may run other events
        if two > one
    ]
    known = {rows: step.highest_nbytes, 2 * rows: double.highest_nbytes}
    low, high = (2 * rows, MOST + 1) if known[2 * rows] <= budget else (rows, 2 * rows)
    guess, turn = min(leaves, default=MOST), 0
    while high - low > 1:
        turn += 1
        guess = min(max(guess, low + 1), high - 1)
        known[guess] = with_batch(guess).highest_nbytes
        low, high = (guess, high) if known[guess] <= budget else (low, guess)
        if turn % 3 == 0:
            guess = (low + high) // 2
        elif high in known:
            guess = low + (budget - known[low]) * (high - low) // (known[high] - known[low])
        else:
            guess = low + 2**turn
    return low


def _peaks(step: StepPlan) -> list[int]:
    return [*(point.peak_nbytes for point in step.memory), step.highest_nbytes]

"""Sizes that people write, and the settings that make a step fit into one.

Owns the search: which changes are tried, and how they are told. It must not know how one is run.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fsdp2._core.base.arguments import wrong_type, wrong_value
from fsdp2._core.base.containers import map_tensors, visit_tensors
from fsdp2._core.base.names import nbytes_text
from fsdp2._core.base.policy import CPUOffloadPolicy
from fsdp2._tools.plan.hardware import Hardware
from fsdp2._tools.plan.table import rate_text, seconds_text
from fsdp2._tools.plan.values import StepPlan

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


LOSS_CHUNKS = 8
"""Parts that a loss in chunks is tried with: so few that each is still a large product."""
LOGITS_SHARE = 0.05
"""A loss in chunks is tried if logits are so much of a peak."""


@dataclass(frozen=True)
class Suggestion:
    """Settings to plan or train with, and what they are predicted to give. ``print`` shows one.

    ``changes`` are keywords: ``plan.changed(**suggestion.changes)`` is that plan. ``code`` says
    the same as code. ``peak_nbytes`` is the most memory of a step, in bytes. ``seconds`` is the
    time of a step, or None if the plan has no hardware. ``fits``: the peak is within the budget.
    ``batch`` is set where the changes have a smaller batch, and on the first suggestion, if that
    fits: the largest first dim of the batch that still fits, looked for up to 65536. It is None
    elsewhere, and if the tensors of the batch do not share their first dim. ``note`` says what the
    time leaves out; it may be empty. ``tokens_per_second`` is of one rank, and so is
    ``most_tokens_per_second``, with the largest batch that fits.
    """

    changes: Mapping[str, Any] = field(repr=False)
    code: str
    peak_nbytes: int
    seconds: float | None
    fits: bool
    batch: int | None = None
    note: str = ""
    tokens_per_second: float | None = None
    most_tokens_per_second: float | None = None

    @property
    def name(self) -> str:
        """What a line that names it has: a batch by its rows, all else by its code."""
        return f"batch {self.batch}" if list(self.changes) == ["batch"] else self.code

    def __str__(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        words = [f"{verdict}: {self.code}, peak {nbytes_text(self.peak_nbytes)}"]
        if self.seconds is not None:
            words.append(f"{seconds_text(self.seconds)} a step{self.note}")
        if self.tokens_per_second is not None:
            words.append(f"{rate_text(self.tokens_per_second)} a rank")
        if self.batch is not None and "batch" not in self.changes:
            rate = self.most_tokens_per_second
            most = "" if rate in (None, self.tokens_per_second) else f" ({rate_text(rate)} a rank)"
            words.append(f"up to a batch of {self.batch}{most}")
        return ", ".join(words)


Predict = Callable[[dict[str, Any]], StepPlan]


@dataclass
class Search:
    """Settings are tried, the cheap ones first; each is told as soon as it is known.

    ``may_offload``: the model's policies can still be chosen. ``memory``: the setting of the plan,
    None if it is not known by a name. ``machine``: what it is planned for; activations and states
    leave devices alone. ``sharding``: values of ``shard`` to try beside what needs no
    ``CPUOffloadPolicy``. ``fused``: makes the optimizer with ``fused=True``, which has no copies of
    all gradients; None if that is not known.
    """

    batch: Any
    budget: int
    predict: Predict
    may_offload: bool
    memory: str | int | None
    found: Callable[[Suggestion], None]
    machine: Hardware | None = None
    sharding: Sequence[str] = ()
    fused: Callable[..., Any] | None = None
    _steps: dict[str, StepPlan] = field(default_factory=dict, init=False)

    def run(self) -> list[Suggestion]:
        """Return what was tried, the best first: what fits, and among that the fastest for a row.

        The dearer ways are tried only while nothing fits.
        """
        tried: list[Suggestion] = []

        def take(stage: Iterable[Suggestion]) -> None:
            for one in stage:
                if not any(_gives_the_same(one, other) for other in tried):
                    tried.append(one)
                    self.found(one)

        for stage in self._stages():
            take(stage)
            if any(one.fits for one in tried):
                break
        take(self._roomier([one for one in tried if one.fits]))
        rows = rows_of(self.batch) or 1
        tried.sort(
            key=lambda one: (
                not one.fits,
                (one.seconds or 0.0) / (one.batch or rows) if one.fits else 0.0,
                one.peak_nbytes,
            )
        )
        best = tried[0]
        if best.fits and best.batch is None:
            step, changes = self._steps[best.code], dict(best.changes)
            found = largest_batch(self.batch, step, self.budget, self.predict, changes)
            if found is not None:
                most, step = found
                tried[0] = replace(best, batch=most, most_tokens_per_second=step.tokens_per_second)
        return tried

    def _roomier(self, fitting: Sequence[Suggestion]) -> Iterator[Suggestion]:
        """Try what fits with memory settings that keep more: ``low`` is tried first, and slower."""
        for one in fitting:
            if one.changes.get("memory") == "low" and len(one.changes) > 1:
                yield from self._each(*({**one.changes, "memory": each} for each in MEMORY[:-1]))

    def first(self) -> Suggestion | None:
        """Return the first that fits, without looking for better ones; None if nothing does."""
        every = (one for stage in self._stages() for one in stage)
        return next((one for one in every if one.fits), None)

    def _stages(self) -> Iterator[Iterator[Suggestion]]:
        yield self._settings()
        yield self._alone()
        yield self._each(*self._together())
        if self.machine is not None and self.machine.device_type != "cpu":
            away = {"activation_checkpointing": True, "offload_activations": True}
            for dearer in (away, {**away, "offload_states": True}):
                yield self._each(*({**dearer, "memory": memory} for memory in self._memories()))
        if self.may_offload:
            yield self._each(*(self._offloaded(more) for more in ({}, *self._chunks())))

    def _settings(self) -> Iterator[Suggestion]:
        """Try memory settings, but none that keeps more than one that does not fit."""
        most = -1  # places in MEMORY, which begins with what keeps most
        for memory in self._memories():
            place = MEMORY.index(str(memory)) if memory in MEMORY else len(MEMORY)
            if place > most:
                one = self._try({"memory": memory})
                most = most if one.fits or memory not in MEMORY else max(most, place)
                yield one
        yield from self._each(*({"shard": shard} for shard in self.sharding))

    def _memories(self) -> list[str | int]:
        """The plan's own setting first, and of equals it is the one that is told."""
        own = [] if self.memory is None else [self.memory]
        return [*own, *(memory for memory in MEMORY if memory != self.memory)]

    def _alone(self) -> Iterator[Suggestion]:
        yield from self._smaller({})
        again = {"activation_checkpointing": True}
        sharded = ({**again, "shard": shard} for shard in self.sharding)
        yield from self._each(again, *sharded, *self._chunks())

    def _together(self) -> Iterator[dict[str, Any]]:
        again = {"activation_checkpointing": True}
        for more in ({}, *self._chunks()):
            yield {**again, **more, "memory": "low"}
        if self.fused is not None and self._is_at_the_optimizer(again):
            for own in ({}, {"memory": "low"}):
                yield {**again, "optimizer": self.fused, **own}

    def _is_at_the_optimizer(self, changes: dict[str, Any]) -> bool:
        """True if the optimizer's step takes more than forward and backward do."""
        step = self._steps.get(code_of(changes))
        return step is not None and step.optimizer_peak_nbytes > step.peak_nbytes

    def _smaller(self, changes: dict[str, Any]) -> Iterator[Suggestion]:
        """Look for the largest smaller batch that fits, from one row on."""
        rows = rows_of(self.batch)
        if rows is None or rows < 2:
            return
        best = self._try({**changes, "batch": with_rows(self.batch, 1)}, 1)
        low, high = 1, rows if best.fits else 1
        while high - low > 1:
            middle = (low + high) // 2
            one = self._try({**changes, "batch": with_rows(self.batch, middle)}, middle)
            low, high = (middle, high) if one.fits else (low, middle)
            best = one if one.fits else best
        yield best

    def _chunks(self) -> Iterator[dict[str, Any]]:
        step = self._steps.get(code_of({"memory": self.memory})) or next(iter(self._steps.values()))
        top = max(step.memory, key=lambda point: point.peak_nbytes)
        logits = dict(zip(step.kinds, top.peak_by_kind, strict=True)).get("logits", 0)
        if logits > LOGITS_SHARE * step.highest_nbytes:
            yield {"loss_chunks": LOSS_CHUNKS}

    def _offloaded(self, more: dict[str, Any]) -> dict[str, Any]:
        offload = CPUOffloadPolicy()
        return {"activation_checkpointing": True, "offload_policy": offload, **more}

    def _each(self, *ways: dict[str, Any]) -> Iterator[Suggestion]:
        for changes in ways:
            yield self._try(changes)

    def _try(self, changes: dict[str, Any], rows: int | None = None) -> Suggestion:
        code = code_of(changes)
        step = self._steps[code] = self.predict(changes)
        return Suggestion(
            changes,
            code,
            step.highest_nbytes,
            step.seconds,
            step.highest_nbytes <= self.budget,
            rows,
            OFFLOADED if "offload_policy" in changes else "",
            step.tokens_per_second,
        )


OFFLOADED = " without the optimizer's step on the host"
"""What the time of an offloaded step leaves out; copies between host and device are in it."""


def _gives_the_same(one: Suggestion, other: Suggestion) -> bool:
    mine = (one.peak_nbytes, one.seconds, one.batch)
    return mine == (other.peak_nbytes, other.seconds, other.batch)


TOLD = {
    *("batch", "shard", "offload_policy", "activation_checkpointing", "loss_chunks"),
    *("offload_activations", "offload_states", "memory", "optimizer"),
}
"""Changes that have words of their own."""


def code_of(changes: Mapping[str, Any]) -> str:
    """Return changes as the lines that make them."""
    parts = []
    if "batch" in changes:
        parts.append(f"a batch of {rows_of(changes['batch'])}")
    if "shard" in changes:
        parts.append(f"fully_shard(..., shard={changes['shard']!r})")
    if "offload_policy" in changes:
        parts.append("fully_shard(..., offload_policy=CPUOffloadPolicy())")
    if changes.get("activation_checkpointing"):
        parts.append("torch.utils.checkpoint around each unit")
    if changes.get("loss_chunks", 1) > 1:
        parts.append(f"head and loss in {changes['loss_chunks']} chunks of the tokens")
    if changes.get("offload_activations"):
        parts.append("fsdp2.offload_activations around each unit")
    if changes.get("offload_states"):
        parts.append("fsdp2.optim.offload_states(optimizer)")
    if "optimizer" in changes:
        made = changes["optimizer"]
        is_fused = isinstance(made, functools.partial) and made.keywords == {"fused": True}
        parts.append(f"{made.func.__name__}(..., fused=True)" if is_fused else "another optimizer")
    if "memory" in changes:
        parts.append(f"model.set_memory({changes['memory']!r})")
    parts += [f"another {name}" for name in changes if name not in TOLD]
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
) -> tuple[int, StepPlan] | None:
    """Return the most rows with which a step fits, as ``step`` does with those of the batch.

    The second value is the step with so many rows.

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
    steps = {rows: step, 2 * rows: double}
    known = {number: one.highest_nbytes for number, one in steps.items()}
    low, high = (2 * rows, MOST + 1) if known[2 * rows] <= budget else (rows, 2 * rows)
    guess, turn = min(leaves, default=MOST), 0
    while high - low > 1:
        turn += 1
        guess = min(max(guess, low + 1), high - 1)
        steps[guess] = with_batch(guess)
        known[guess] = steps[guess].highest_nbytes
        low, high = (guess, high) if known[guess] <= budget else (low, guess)
        if turn % 3 == 0:
            guess = (low + high) // 2
        elif high in known:
            guess = low + (budget - known[low]) * (high - low) // (known[high] - known[low])
        else:
            guess = low + 2**turn
    return low, steps[low]


def _peaks(step: StepPlan) -> list[int]:
    return [*(point.peak_nbytes for point in step.memory), step.highest_nbytes]

"""Parses memory sizes, and searches for settings with which a step fits into a memory budget."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdp2._core.base.containers import map_tensors
from fsdp2._core.base.errors import ConfigError, wrong_type, wrong_value
from fsdp2._core.base.names import nbytes_text, seconds_text
from fsdp2._core.base.policy import CPUOffloadPolicy
from fsdp2._tools.plan.hardware import Hardware
from fsdp2._tools.plan.setup import Prediction, code_of, rows_of
from fsdp2._tools.plan.shown import rate_text
from fsdp2._tools.plan.values import StepPlan

UNITS = {
    "": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate(("", "K", "M", "G", "T"))},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate(("K", "M", "G", "T"), 1)},
}
SIZE = "a number of bytes, such as 70 * 10**9, '70GB' or '64GiB'"
LARGEST = 1 << 60
"""In bytes; larger than the memory of any device."""
MEMORY = ("fast", "balanced", "low")
AGAIN: dict[str, Any] = {"activation_checkpointing": True}
MOST = 1 << 16
"""Upper bound of the search for a batch size."""
LOSS_CHUNKS = 8
"""Number of chunks of a chunked loss: few enough that each is still a large matmul."""
LOGITS_SHARE = 0.05
"""A chunked loss is tried if logits take more than this share of the peak memory."""
OFFLOADED = " excluding the optimizer's step on the host"
"""Note on the time of an offloaded step, which includes the copies between host and device."""
WHOLE = ("optimizer", "gradients")
"""Values of ``shard`` with which parameters stay unsharded during the micro-batches of a step."""


def size_of(who: str, name: str, value: object) -> int:
    """Parse a size given by the user, such as ``80GB``. Raise ConfigError if it is invalid."""
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise wrong_type(who, name, SIZE, value)
    nbytes: float = value if isinstance(value, int) else 0
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)\s*", value, re.IGNORECASE)
        units = {unit.lower(): factor for unit, factor in UNITS.items()}
        if found is not None and found[2].lower() in units:
            nbytes = float(found[1]) * units[found[2].lower()]
    if not 1 <= nbytes <= LARGEST:
        raise wrong_value(who, name, SIZE, value)
    return int(nbytes)


@dataclass(frozen=True)
class Suggestion:
    """Settings to plan or train with, and their predicted results. ``print`` shows one line.

    ``changes`` are keyword arguments: ``plan.changed(**suggestion.changes)`` returns the plan with
    these settings. ``code`` describes them, where possible as Python code. ``peak_nbytes`` is the
    peak memory of a step, in bytes. ``seconds`` is the time of a step, or None if the plan has no
    hardware. ``fits`` is True if the peak is within the budget. ``batch`` is the size of the first
    dim of the largest batch that fits, up to 65536. It is set if ``changes`` reduces the batch, and
    on the first suggestion if this suggestion fits. Otherwise, or if the batch's tensors have
    different first dims, it is None. ``note`` names the work that ``seconds`` excludes, or is
    empty. ``tokens_per_second`` is the throughput of one rank, and ``most_tokens_per_second`` its
    throughput with the largest batch.
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
        """A short name: the number of rows if only the batch differs, otherwise ``code``."""
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
    """A search over settings, cheap ones first; ``found`` is called with each planned suggestion.
    ``may_offload``: whether ``offload_policy`` can still be set. ``memory``: the plan's own
    setting. ``machine``: offloading activations and states is tried only if this is a device.
    ``sharding``: values of ``shard`` to try without ``CPUOffloadPolicy``. ``fused``: creates the
    optimizer with ``fused=True``, which avoids a copy of all gradients; None if unsupported."""

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
        """Return all trials, best first. Try expensive settings only if no cheaper one fits."""
        tried: list[Suggestion] = []
        known = set()

        def take(stage: Iterable[Suggestion]) -> None:
            for one in stage:
                result = (one.peak_nbytes, one.seconds, one.batch)
                if result not in known:
                    known.add(result)
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
        """For each fitting setting that was tried only with ``low``, try faster memory settings."""
        for one in fitting:
            if one.changes.get("memory") == "low" and len(one.changes) > 1:
                yield from self._each(*({**one.changes, "memory": each} for each in MEMORY[:-1]))

    def first(self) -> Suggestion | None:
        """Return the first setting that fits, or None. Do not search for a better one."""
        every = (one for stage in self._stages() for one in stage)
        return next((one for one in every if one.fits), None)

    def _stages(self) -> Iterator[Iterator[Suggestion]]:
        yield self._settings()
        yield self._alone()
        yield self._each(*self._together())
        if self.machine is not None and self.machine.device_type != "cpu":
            away = {**AGAIN, "offload_activations": True}
            for dearer in (away, {**away, "offload_states": True}):
                yield self._each(*({**dearer, "memory": memory} for memory in self._memories()))
        if self.may_offload:
            host = {**AGAIN, "offload_policy": CPUOffloadPolicy()}
            yield self._each(*({**host, **more} for more in ({}, *self._chunks())))

    def _settings(self) -> Iterator[Suggestion]:
        """Try memory settings. Skip those that use more memory than a setting that does not fit."""
        most = -1  # index in MEMORY; earlier settings use more memory
        for memory in self._memories():
            place = MEMORY.index(str(memory)) if memory in MEMORY else len(MEMORY)
            if place > most:
                one = self._try({"memory": memory})
                most = most if one.fits or memory not in MEMORY else max(most, place)
                yield one
        yield from self._each(*({"shard": shard} for shard in self.sharding))

    def _memories(self) -> list[str | int]:
        """List the plan's own setting first, because only the first of equal results is shown."""
        own = [] if self.memory is None else [self.memory]
        return [*own, *(memory for memory in MEMORY if memory != self.memory)]

    def _alone(self) -> Iterator[Suggestion]:
        yield from self._smaller()
        sharded = ({**AGAIN, "shard": shard} for shard in self.sharding)
        yield from self._each(dict(AGAIN), *sharded, *self._chunks())

    def _together(self) -> Iterator[dict[str, Any]]:
        for more in ({}, *self._chunks()):
            yield {**AGAIN, **more, "memory": "low"}
        step = self._steps.get(code_of(AGAIN))
        is_at_the_optimizer = step is not None and step.optimizer_peak_nbytes > step.peak_nbytes
        if self.fused is not None and is_at_the_optimizer:
            for own in ({}, {"memory": "low"}):
                yield {**AGAIN, "optimizer": self.fused, **own}

    def _smaller(self) -> Iterator[Suggestion]:
        """Find, by bisection, the largest batch that fits and is smaller than the plan's own."""
        rows = rows_of(self.batch)
        if rows is None or rows < 2:
            return
        best = self._try({"batch": with_rows(self.batch, 1)}, 1)
        low, high = 1, rows if best.fits else 1
        while high - low > 1:
            middle = (low + high) // 2
            one = self._try({"batch": with_rows(self.batch, middle)}, middle)
            low, high = (middle, high) if one.fits else (low, middle)
            best = one if one.fits else best
        yield best

    def _chunks(self) -> Iterator[dict[str, Any]]:
        step = self._steps.get(code_of({"memory": self.memory})) or next(iter(self._steps.values()))
        top = max(step.memory, key=lambda point: point.peak_nbytes)
        logits = dict(zip(step.kinds, top.peak_by_kind, strict=True)).get("logits", 0)
        if logits > LOGITS_SHARE * step.highest_nbytes:
            yield {"loss_chunks": LOSS_CHUNKS}

    def _each(self, *ways: dict[str, Any]) -> Iterator[Suggestion]:
        for changes in ways:
            yield self._try(changes)

    def _try(self, changes: dict[str, Any], rows: int | None = None) -> Suggestion:
        code = code_of(changes)
        step = self._steps[code] = self.predict(changes)
        note = OFFLOADED if "offload_policy" in changes else ""
        peak, fits = step.highest_nbytes, step.highest_nbytes <= self.budget
        rate = step.tokens_per_second
        return Suggestion(changes, code, peak, step.seconds, fits, rows, note, rate)


def with_rows(batch: Any, rows: int) -> Any:
    """Return the batch with ``rows`` as the size of its first dim; values are undefined."""
    return map_tensors(lambda tensor: tensor.new_empty((rows, *tensor.shape[1:])), batch)


def largest_batch(
    batch: object,
    step: StepPlan,
    budget: int,
    predict: Predict,
    changes: dict[str, Any],
) -> tuple[int, StepPlan] | None:
    """Return the largest number of rows with which a step fits, and that step. ``step`` is the step
    with ``batch``, and must fit. Memory at each event is usually linear in the number of rows, so
    the steps with two batch sizes predict how many rows fit at each event. The lowest of these
    numbers is tried first. Further guesses interpolate between a size that fits and a size that
    does not. Every third guess is the midpoint, in case memory is not linear."""
    rows = rows_of(batch)
    if rows is None:
        return None

    def with_batch(number: int) -> StepPlan:
        return predict({**changes, "batch": with_rows(batch, number)})

    double = with_batch(2 * rows)
    leaves = [
        rows + (budget - one) * rows // (two - one)
        for one, two in zip(_peaks(step), _peaks(double), strict=False)  # events may differ
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


def budget_of(plan: Prediction, who: str, budget: object) -> int | None:
    """Return ``budget`` in bytes; by default, the hardware's memory, or None if that is unknown."""
    if budget is not None:
        return size_of(f"Plan.{who}", "budget", budget)
    return None if plan.hardware is None else plan.hardware.memory_nbytes


def search_of(
    plan: Prediction,
    budget: str | int | None,
    found: Callable[[Suggestion], None] = lambda suggestion: None,
) -> Search:
    """Return the search for ``Plan.suggest``, or raise its errors. ``found``: as for ``Search``."""
    plan.step_for("suggest")
    nbytes = budget_of(plan, "suggest", budget)
    if nbytes is None:
        raise ConfigError(
            "FS901",
            "Plan.suggest: found neither a budget nor hardware with known memory. Pass as "
            "budget the number of bytes per rank, such as '70GB'.",
        )
    setup, chosen = plan.setup, {"shard", "shard_outer", "reshard_after_forward", "offload_policy"}
    may_choose = not plan.is_sharded and chosen.isdisjoint(setup.fully_shard_kwargs)

    def predict(changes: dict[str, Any]) -> StepPlan:
        return plan.changed(**changes).step_for("suggest")

    sharding = WHOLE if may_choose and setup.micro_batches > 1 else ()
    return Search(
        *(setup.batch, nbytes, predict, not plan.is_sharded, setup.memory, found),
        machine=plan.hardware,
        sharding=sharding,
        fused=_fused(setup.optimizer, plan.hardware),
    )


def _fused(optimizer: object, machine: Hardware | None) -> Callable[..., Any] | None:
    """Return a factory that sets ``fused=True`` on a torch optimizer; None if unsupported."""
    if machine is None or machine.device_type == "cpu" or not isinstance(optimizer, type):
        return None
    is_torchs = optimizer.__module__.startswith("torch.optim.")
    if not is_torchs or "fused" not in inspect.signature(optimizer).parameters:
        return None
    return _with_fused_step(optimizer)


@functools.cache
def _with_fused_step(optimizer: type) -> Callable[..., Any]:
    return functools.partial(optimizer, fused=True)  # cached, because traces are keyed by object

"""Debugging tools: execution order, cost of communication, bitwise comparison. No cost if unused.

Also exports the result types of ``fsdp2.units``. A training step does not import this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
import torch.nn as nn

from fsdp2._core.agreement.agreement import SAME_ON_EVERY_RANK
from fsdp2._core.api.inspect import GroupInfo, ShardInfo, UnitInfo
from fsdp2._core.api.settings import refuse_during_step, sharded_units
from fsdp2._core.base import torch_autograd, torch_compiler
from fsdp2._core.base.errors import (
    ConfigError,
    StateError,
    carrying,
    check_count,
    check_flag,
    check_process_group,
    named,
)
from fsdp2._core.base.warn import warn
from fsdp2._core.comm.wire import Wire
from fsdp2._core.engine.tree import Unit
from fsdp2._tools.record.bits import BitsRecording, record_bits
from fsdp2._tools.record.bits_compared import SameBits, same_bits

__all__ = [
    "BitsRecording",
    "GroupInfo",
    "OrderCheck",
    "SameBits",
    "ShardInfo",
    "UnitInfo",
    "check_order",
    "record_bits",
    "same_bits",
    "without_communication",
]

SHOWN = 12  # maximum number of units that an error lists for each rank


def check_order(
    model: nn.Module, steps: int = 2, *, process_group: dist.ProcessGroup | None = None
) -> OrderCheck:
    """Check that a model's units run in the same order on all ranks.

    In the first ``steps`` forwards, ranks compare their orders before each unit communicates, so a
    difference raises an error instead of causing a hang. Later, each rank compares its order with
    that of the last compared forward, without recomputation, and warns once per unit out of order.

    Args:
        model: a model that contains units; all of them are checked.
        steps: number of forwards that ranks compare (at least 1), each by a small collective.
        process_group: the ranks that run the model; default: all.

    Returns:
        An ``OrderCheck``; call its ``remove()`` to end the check.

    Raises:
        ConfigError: ``model`` contains no unit; ``steps`` is not a positive int;
            ``process_group`` is not a process group.
        StateError: raised by a forward, on every rank, if ranks run different units. The message
            lists the order of each rank.

    On a CPU, ranks compare their collectives before each exchange of data even without this check
    (docs/architecture.md). On a device, they do so only with this check.

    Source: the execution-order check of torch's FSDP1 (``TORCH_DISTRIBUTED_DEBUG``).
    """
    count = check_count("check_order", "steps", steps)
    check_process_group("check_order", "process_group", process_group)
    units = sharded_units("check_order", "model", model)
    names = {module: name for name, module in model.named_modules()}
    named_units = [(next(names[m] for m in unit.modules if m in names), unit) for unit in units]
    return OrderCheck(named_units, count, process_group)


class OrderCheck:
    """An active ``check_order``. ``order`` lists the unit names of the last compared forward."""

    def __init__(
        self, units: Sequence[tuple[str, Unit]], steps: int, pg: dist.ProcessGroup | None
    ) -> None:
        self.order: list[str] = []
        self._steps = steps
        self._pg = pg
        self._running: list[str] = []
        self._entered: Unit | None = None
        self._forwards = 0
        self._warned: set[str] = set()
        self._handles = []
        for name, unit in units:
            for module in unit.modules:
                before = module.register_forward_pre_hook(_Hook(self, unit, name), prepend=True)
                after = module.register_forward_hook(_Hook(self, unit), always_call=True)
                self._handles += [before, after]

    def remove(self) -> None:
        """End the check. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, unit: Unit, name: str) -> None:
        if torch_autograd.graph_task_id() != -1:  # recomputed in backward
            return
        if self._entered is None:
            self._entered, self._running = unit, []
        self._running.append(name or "<root>")
        if self._forwards < self._steps:
            self._compare()
        else:
            self._warn()

    def _leave(self, unit: Unit) -> None:
        """Called when a unit's forward returns or raises."""
        if self._entered is not unit or torch_autograd.graph_task_id() != -1:
            return
        self._entered = None
        if self._forwards < self._steps:
            self.order = self._running
        self._forwards += 1

    def _compare(self) -> None:
        own = [*self.order, "|", *self._running] if self.order else self._running
        orders: list[Any] = [None] * dist.get_world_size(self._pg)
        with named(f"check_order: before {self._running[-1]}"), carrying():
            dist.all_gather_object(orders, own, group=self._pg)
        if any(order != own for order in orders):
            ranks = dist.get_process_group_ranks(self._pg or dist.group.WORLD)
            did = "; ".join(f"rank {r}: {_shown(o)}" for r, o in zip(ranks, orders, strict=True))
            self._entered = None
            raise StateError(
                "FS401",
                f"{self._running[-1]}: ranks run different units, or the same units in a different "
                f"order ({did}; | marks the start of a forward). No data was corrupted. "
                f"{SAME_ON_EVERY_RANK}",
            )

    def _warn(self) -> None:
        position, name = len(self._running) - 1, self._running[-1]
        expected = self.order[position] if position < len(self.order) else "nothing"
        if name != expected and name not in self._warned:
            self._warned.add(name)
            warn(
                "FS408",
                f"fsdp2: {name} runs where {expected} ran before (forward {self._forwards + 1}, "
                f"unit {position + 1}). Prefetching follows the recorded order, so a different "
                "order causes unnecessary gathers.",
            )


@dataclass(eq=False)
class _Hook:
    """A forward pre-hook if ``name`` is given, else a forward hook. Copied with the module."""

    check: OrderCheck
    unit: Unit
    name: str | None = None

    @torch_compiler.never_traced
    def __call__(self, *_: Any) -> None:
        if self.name is not None:
            self.check._enter(self.unit, self.name)
        else:
            self.check._leave(self.unit)


def _shown(order: list[str]) -> str:
    left_out = ["..."] if len(order) > SHOWN else []
    return " ".join([*left_out, *order[-SHOWN:]])


@contextmanager
def without_communication(
    model: nn.Module, *, gathers: bool = True, reductions: bool = True
) -> Iterator[None]:
    """Skip the collectives of a model's units, to measure their cost.

    Packing, copies, casts and scaling still run. Other ranks' shards and all reduced
    gradients are uninitialised memory, so results are wrong, and a warning is issued. Do not step
    the optimizer if you need the parameters afterwards. Custom collectives and reduction hooks are
    skipped too. Collectives in ``clip_grad_norm_`` and in your own code still run. All ranks must
    enter and leave the context together.

    Args:
        gathers: skip the all-gathers; False runs them.
        reductions: skip reduce-scatters, and all-reduces over a replicate axis; False runs them.

    Raises:
        ConfigError: ``model`` contains no unit; both flags are False; a flag is not a bool.
        StateError: entered during a step.

    Source: ``FSDP_USE_FAKE_ALL_GATHER`` and ``FSDP_USE_FAKE_REDUCE`` of torch's FSDP1.
    """
    check_flag("without_communication", "gathers", gathers)
    check_flag("without_communication", "reductions", reductions)
    if not gathers and not reductions:
        raise ConfigError(
            "FS505",
            "without_communication: found gathers=False and reductions=False, so nothing would be "
            "skipped. Omit one of them.",
        )
    units = sharded_units("without_communication", "model", model)
    refuse_during_step("without_communication", units)
    warn(
        "FS515",
        "fsdp2.debug.without_communication: collectives are skipped, so all results are wrong "
        "until the context exits. Use it for measurements only.",
    )
    groups = [group for unit in units for group in unit.own_groups]
    wires = {group: group.wire for group in groups}
    for group, wire in wires.items():
        group.send_by(_NoWire(wire, gathers, reductions))
    stamps = [(stamp, stamp.silence(True)) for group in groups for stamp in group.ids.all]
    try:
        yield
    finally:
        for unit in units:
            if unit.runtime is not None:
                unit.runtime.recover_if_failed()
        for group, wire in wires.items():
            group.send_by(wire)
        for stamp, was_silent in reversed(stamps):
            stamp.silence(was_silent)


GATHERS = ("all_gather", "all_gather_uneven")
REDUCTIONS = ("reduce_scatter", "reduce_scatter_uneven", "all_reduce")


class _NoWire(Wire):
    """A ``Wire`` that skips some or all collectives. Uses the buffers of the replaced wire."""

    carries: ClassVar[bool] = False

    def __init__(self, wire: Wire, gathers: bool, reductions: bool) -> None:
        super().__init__()
        self.take_over(wire)
        self.is_separate = False  # otherwise copying the model would create process groups
        if reductions:
            self.sum_replicas = None
        for name in (*(GATHERS if gathers else ()), *(REDUCTIONS if reductions else ())):
            setattr(self, name, _carry_nothing)  # shadows the class's method


def _carry_nothing(*_: Any, **__: Any) -> None:
    """A no-op in place of a collective."""

"""Tools to look at a run: ``check_order`` and ``without_communication``. Off, they cost nothing.

Owns hooks and wires that exist only while one of them is on, and makes public what ``fsdp2.units``
returns: ``UnitInfo``, ``GroupInfo``, ``ShardInfo``. It must not know what a step needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from fsdp2._core.agreement.agreement import SAME_ON_EVERY_RANK
from fsdp2._core.api.inspect import GroupInfo, ShardInfo, UnitInfo
from fsdp2._core.api.settings import refuse_during_step, sharded_units
from fsdp2._core.base import torch_autograd, torch_compiler
from fsdp2._core.base.arguments import check_count, check_flag, check_process_group
from fsdp2._core.base.errors import ConfigError, StateError
from fsdp2._core.base.warn import warn
from fsdp2._core.comm.mesh import MeshAxis
from fsdp2._core.comm.process_mesh import carrying, named
from fsdp2._core.comm.wire import Wire
from fsdp2._core.engine.tree import Unit

__all__ = [
    "GroupInfo",
    "OrderCheck",
    "ShardInfo",
    "UnitInfo",
    "check_order",
    "without_communication",
]

SHOWN = 12
"""How many units of an order an error lists."""


def check_order(
    model: nn.Module, steps: int = 2, *, process_group: dist.ProcessGroup | None = None
) -> OrderCheck:
    """Watch in which order a model's units run, on all ranks.

    In the first ``steps`` forwards ranks compare, before each unit, which one each is about to
    run. They do so before any of them communicates, so a difference is an error and not a hang.
    In later forwards each rank compares with the order of the last of these, and warns once for
    each unit that comes out of turn. Recomputed forwards do not count.

    Args:
        model: what ``fully_shard`` was applied to, units below it included.
        steps: forwards to compare over ranks, at least 1. Each comparison is one small synchronous
            collective.
        process_group: the ranks that run the model; default: all.

    Returns:
        An ``OrderCheck``, whose ``remove()`` ends the watch.

    Raises:
        ConfigError: there is no unit in ``model``; ``steps`` is not an int of at least 1; not a
            process group.
        StateError: (from a forward, on every rank) ranks run different units; with all orders.

    On a CPU ranks always compare their collectives before these mix (docs/architecture.md). On a
    device they do so only here.

    Source: the check of the execution order in torch's FSDP1 (``TORCH_DISTRIBUTED_DEBUG``).
    """
    count = check_count("check_order", "steps", steps)
    check_process_group("check_order", "process_group", process_group)
    units = sharded_units("check_order", "model", model)
    names = {module: name for name, module in model.named_modules()}
    named_units = [(next(names[m] for m in unit.modules if m in names), unit) for unit in units]
    return OrderCheck(named_units, count, process_group)


class OrderCheck:
    """The watch that ``check_order`` begins.

    ``order`` has the names of the units, in the order of the last forward that ranks compared.
    """

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
        """End the watch. A second call does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, unit: Unit, name: str) -> None:
        """A unit is about to run."""
        if torch_autograd.graph_task_id() != -1:  # recomputation
            return
        if self._entered is None:
            self._entered, self._running = unit, []
        self._running.append(name or "<root>")
        if self._forwards < self._steps:
            self._compare()
        else:
            self._warn()

    def _leave(self, unit: Unit) -> None:
        """A unit's forward is over, or raised."""
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
                f"{self._running[-1]}: ranks run different units, or in another order ({did}; "
                f"| is where a forward begins). Nothing was mixed yet. {SAME_ON_EVERY_RANK}",
            )

    def _warn(self) -> None:
        position, name = len(self._running) - 1, self._running[-1]
        expected = self.order[position] if position < len(self.order) else "nothing"
        if name != expected and name not in self._warned:
            self._warned.add(name)
            warn(
                "FS408",
                f"fsdp2: {name} runs where {expected} ran before (forward "
                f"{self._forwards + 1}, unit {position + 1}). Prefetching follows the recorded "
                "order, and gathers in vain where it changes.",
            )


class _Hook:
    """A hook as an object: copies of the module keep a check of their own.

    Before the forward it has a name, after it it has none.
    """

    def __init__(self, check: OrderCheck, unit: Unit, name: str | None = None) -> None:
        self._check, self._unit, self._name = check, unit, name

    @torch_compiler.never_traced
    def __call__(self, *_: Any) -> None:
        if self._name is not None:
            self._check._enter(self._unit, self._name)
        else:
            self._check._leave(self._unit)


def _shown(order: list[str]) -> str:
    left_out = ["..."] if len(order) > SHOWN else []
    return " ".join([*left_out, *order[-SHOWN:]])


@contextmanager
def without_communication(
    model: nn.Module, *, gathers: bool = True, reductions: bool = True
) -> Iterator[None]:
    """Skip the collectives of a model's units, to measure what they cost.

    Everything else of a step runs: packing, copies, casts, scaling. Parameters of other ranks and
    gradients are whatever memory held, so results are wrong. A warning says so. Do not step an
    optimizer whose parameters you want to keep. Custom collectives and hooks of reductions are
    skipped, too. Collectives of ``clip_grad_norm_`` and of your own code run. Every rank enters and
    leaves the context together.

    Args:
        gathers: skip the all-gathers; False lets them run.
        reductions: skip the reduce-scatters, and the all-reduces over a replicate axis; False lets
            them run.

    Raises:
        ConfigError: there is no unit in ``model``; both flags are False; a flag is not a bool.
        StateError: entered during a step.

    Source: ``FSDP_USE_FAKE_ALL_GATHER`` and ``FSDP_USE_FAKE_REDUCE`` of torch's FSDP1.
    """
    check_flag("without_communication", "gathers", gathers)
    check_flag("without_communication", "reductions", reductions)
    if not gathers and not reductions:
        raise ConfigError(
            "FS505",
            "without_communication: found gathers=False and reductions=False, which leave nothing "
            "out. Pass one of them at most.",
        )
    units = sharded_units("without_communication", "model", model)
    refuse_during_step("without_communication", units)
    warn(
        "FS515",
        "fsdp2.debug.without_communication: collectives are left out, so all results are wrong "
        "until the context is left. Use it for measurements only.",
    )
    groups = [group for unit in units for group in unit.own_groups]
    wires = {group: group.wire for group in groups}
    for group, wire in wires.items():
        group.reshard()
        group.reducer.wire = _NoWire(wire, gathers, reductions)
        group.rewire()
    stamps = [(stamp, stamp.silence(True)) for group in groups for stamp in group.ids.all]
    try:
        yield
    finally:
        for unit in units:
            if unit.runtime is not None:
                unit.runtime.recover_if_failed()
        for group, wire in wires.items():
            group.reshard()
            group.reducer.wire = wire
            group.rewire()
        for stamp, was_silent in reversed(stamps):
            stamp.silence(was_silent)


class _NoWire(Wire):
    """A wire that carries nothing, or one sort of collectives only.

    Buffers, and what it carries, are those of the wire whose place it takes.
    """

    carries: ClassVar[bool] = False

    def __init__(self, wire: Wire, gathers: bool, reductions: bool) -> None:
        super().__init__()
        self.take_over(wire)
        self.is_separate = False  # else a copy would make its process group on this one
        self._skips_gathers, self._skips_reductions = gathers, reductions
        if reductions:
            self.sum_replicas = None

    def all_gather(self, output: Tensor, sent: Tensor, axis: MeshAxis, async_op: bool) -> Any:
        return None if self._skips_gathers else super().all_gather(output, sent, axis, async_op)

    def reduce_scatter(
        self, output: Tensor, sent: Tensor, op: Any, axis: MeshAxis, async_op: bool
    ) -> Any:
        if self._skips_reductions:
            return None
        return super().reduce_scatter(output, sent, op, axis, async_op)

    def all_gather_uneven(
        self, outputs: Sequence[Tensor], sent: Tensor, axis: MeshAxis, async_op: bool
    ) -> Any:
        if self._skips_gathers:
            return None
        return super().all_gather_uneven(outputs, sent, axis, async_op)

    def reduce_scatter_uneven(
        self,
        output: Tensor,
        sent: Tensor,
        sizes: Sequence[int],
        op: Any,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        if self._skips_reductions:
            return None
        return super().reduce_scatter_uneven(output, sent, sizes, op, axis, async_op)

    def all_reduce(
        self, tensor: torch.Tensor, op: Any, axis: MeshAxis, async_op: bool
    ) -> dist.Work | None:
        return None if self._skips_reductions else super().all_reduce(tensor, op, axis, async_op)

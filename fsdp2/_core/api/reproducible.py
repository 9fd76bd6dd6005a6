"""``reproducible``: bitwise equal training on any number of ranks; ``mean_over_slots`` for logs.

Checks the model, and defines the hooks that begin slots. ``params.slot_sums`` sums gradients within
a rank, ``comm.tree_sum`` sums them across ranks, and ``base.slot_clock`` counts slots.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fsdp2._core.api.comm_hooks import Compress, Hooked
from fsdp2._core.api.settings import refuse_during_step, sharded_units
from fsdp2._core.base import torch_autograd, torch_comm, torch_compiler
from fsdp2._core.base.errors import (
    ConfigError,
    StateError,
    check_count,
    check_module,
    wrong_value,
)
from fsdp2._core.base.slot_clock import SlotClock, clocks, loaded
from fsdp2._core.base.warn import warn
from fsdp2._core.comm.coded_sum import CODES
from fsdp2._core.comm.mesh import DataMesh
from fsdp2._core.comm.process_mesh import wire_device
from fsdp2._core.comm.tree_codes import CodedTreeWire, RowCodes
from fsdp2._core.comm.tree_sum import TreeWire
from fsdp2._core.engine.tree import Unit
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.slot_sums import SlotSums, coded_spans

WHO = "reproducible"

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def reproducible(model: nn.Module, slots: int | None, *, seed: int = 0) -> range:
    """Make training bitwise equal on any number of ranks; return the slots that this rank runs.

    The global batch is divided into micro-batches, called slots. On each rank, run one forward and
    one backward for each slot in the returned range, in order. After the last slot, each gradient
    is the mean over all slots, and is bitwise equal on 1, 2, 4, ... ranks. The results of
    ``clip_grad_norm_`` and of element-wise optimizers are then bitwise equal, too::

        for slot in fsdp2.reproducible(model, slots=8):
            loss_of(model(batch[slot])).backward()
        fsdp2.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    Gradients are summed in one binary tree over slot numbers: within a rank as slots complete, then
    across ranks by an all-to-all and a local sum. The all-to-all sends the same number of bytes as
    a reduce-scatter. Before the all-to-all, a rank holds up to log2(slots per rank) + 1 copies of
    the unsharded gradients. Do not use ``set_requires_gradient_sync`` or ``no_sync``:
    ``reproducible`` controls gradient sync.

    The random numbers of a training forward (such as dropout masks) depend on ``seed``, the step
    number and the slot. ``checkpoint.save`` stores the seed and the step number; after ``load``,
    training continues from this step on any number of ranks.

    Call ``reproducible`` once, after ``fully_shard``, on every rank. A later call starts again at
    step 0. Copies of the model are not reproducible.

    Args:
        model: the sharded model whose forward you call.
        slots: number of slots, a power of two that is a multiple of the number of data-parallel
            ranks. With None, the model is no longer reproducible.
        seed: seed of the random numbers, at least 0.

    Returns:
        The range of this rank's slot numbers; empty if ``slots`` is None.

    Raises:
        ConfigError: ``model`` has no unit, the number of ranks or slots is not supported, or
            results would depend on the number of ranks (because of parameters on several meshes,
            batch statistics, a custom reduce-scatter or hook, error feedback, or sums in fp16).
        StateError: called during a step.

    Source: EasyScale (SC 2023), which makes the training of replicated models bitwise equal.
    """
    units = sharded_units(WHO, "model", model)
    refuse_during_step(WHO, units)
    if slots is not None and check_count(WHO, "slots", slots) & (slots - 1):
        raise wrong_value(WHO, "slots", "a power of two", slots)
    check_count(WHO, "seed", seed, 0)
    groups = [group for unit in units for group in unit.own_groups]
    if slots is not None:
        data = _data_of(groups)
        _check_model(model, units, groups)
        mine = _own_slots(data, slots)
    if model in clocks:
        _all[clocks[model]].end()
    if slots is None:
        return range(0)
    device = next((unit.device for unit in units if unit.own_groups), torch.device("cpu"))
    clock = SlotClock(slots, mine, seed, device)
    if model in loaded:
        clock.go_on(loaded.pop(model))
    Slots(model, units, clock, data)
    _watch_optimizers()
    return mine


def _data_of(groups: Sequence[ParamGroup]) -> DataMesh:
    """Return the groups' common mesh; ConfigError if meshes differ or there are no parameters."""
    if not groups:
        raise ConfigError("FS516", f"{WHO}: found no parameters. Pass the sharded model.")
    first = groups[0]
    for group in groups:
        if _place(group.data) != _place(first.data):
            raise ConfigError(
                "FS516",
                f"{WHO}: {group.params[0].fqn} is sharded over different ranks than "
                f"{first.params[0].fqn}, as with expert parallelism. Results would then depend on "
                "the number of ranks. Shard all parameters over one mesh.",
            )
    return first.data


def _place(data: DataMesh) -> tuple[int, int]:
    """Return this rank's index among the data-parallel ranks, and their number."""
    return data.replicate.rank * data.shard.size + data.shard.rank, data.size


def _own_slots(data: DataMesh, slots: int) -> range:
    rank, size = _place(data)
    if slots % size or size & (size - 1):
        serving = [1 << power for power in range(slots.bit_length())]
        raise ConfigError(
            "FS516",
            f"{WHO}: found {size} data-parallel ranks for {slots} slots. Use "
            f"{', '.join(map(str, serving))} ranks, or set slots to a power of two that is "
            "divisible by the number of ranks.",
        )
    each = slots // size
    return range(rank * each, (rank + 1) * each)


def _check_model(model: nn.Module, units: Sequence[Unit], groups: Sequence[ParamGroup]) -> None:
    """Raise ConfigError if results would depend on the number of ranks."""
    for name, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.track_running_stats:
            raise ConfigError(
                "FS516",
                f"{WHO}: {name or '<root>'} is a {type(module).__name__}, whose statistics depend "
                "on the samples of each rank. Use GroupNorm or LayerNorm, or pass "
                "track_running_stats=False.",
            )
    for unit in units:
        if unit.settings.manual_finalization:
            _refuse(unit.fqn, "it uses manual finalization", "Use automatic finalization.")
    for group in groups:
        _hook_of(group)
        for param in group.params:
            if param.chosen.coding is not None:
                _refuse(param.fqn, "it has a gather_dtype, which a single rank ignores", "Omit it.")
            if param.trainable and param.accumulated_dtype is torch.float16:
                hint = "Pass reduce_dtype=torch.float32 in its policy."
                _refuse(param.fqn, "its float16 sums are scaled by the number of ranks", hint)


def _hook_of(group: ParamGroup) -> Compress | None:
    """Return the group's ``Compress`` hook, if any.

    Raises:
        ConfigError: the sums of its hook or reduce-scatter may depend on the number of ranks.
    """
    wire = group.wire
    plain = wire.plain if isinstance(wire, TreeWire) and wire.sum_rows is None else wire
    scatter = plain.custom[1]
    if scatter is None:
        return None
    what = "a custom reduce-scatter or hook"
    if isinstance(scatter, Hooked) and isinstance(scatter.hook, Compress):
        hook = scatter.hook
        serves = hook.dtype is not torch.float16 and not hook.only_replicas
        if serves and not hook.error_feedback:
            return hook
        what = f"Compress({hook.dtype}) with error_feedback={hook.error_feedback}"
        what += f" and only_replicas={hook.only_replicas}"
    hint = "Use no hook, or Compress to bfloat16 or 8 bits without error_feedback or only_replicas."
    _refuse(group.fqn, f"{what} rounds gradient sums differently for each number of ranks", hint)
    return None


def _tree_wire(group: ParamGroup, slots: int) -> TreeWire:
    hook = _hook_of(group)
    if hook is None or hook.dtype not in CODES:
        return TreeWire(group.wire, slots, None if hook is None else hook.dtype)
    codes = RowCodes(hook.dtype, hook.block)
    return CodedTreeWire(group.wire, slots, codes, functools.partial(coded_spans, group.reducer))


def _refuse(fqn: str | None, found: str, hint: str) -> None:
    raise ConfigError("FS516", f"{WHO}: {fqn or '<root>'}: {found}. {hint}")


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_pre_hook(_leave_fused)


def _leave_fused(optimizer: Optimizer, *_: Any) -> None:
    """Replace fused optimizer kernels on a CPU with foreach ones while a model is reproducible.

    In torch 2.11, fused kernels compute the elements after a tensor's last full SIMD vector in a
    different way. Results would thus depend on shard boundaries, and so on the number of ranks.
    """
    for group in optimizer.param_groups if clocks else ():
        if group.get("fused") and any(param.is_cpu for param in group["params"]):
            group.update(fused=False, foreach=True)
            warn(
                "FS516",
                f"{WHO}: {type(optimizer).__name__}(fused=True) on a CPU computes the last "
                "elements of each shard differently from the others, so foreach=True is used "
                "instead. Pass foreach=True to avoid this warning.",
            )


class Slots:
    """The hooks, wires and gradient sums that make a model reproducible."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], clock: SlotClock, data: DataMesh
    ) -> None:
        self.model = model
        self.units = units
        self.clock: SlotClock | None = clock
        self.data = data
        self._syncs = True  # whether this class last turned gradient sync on
        self._runs = False  # a training forward is running
        self._groups = [group for unit in units for group in unit.own_groups]
        for group in self._groups:
            group.send_by(_tree_wire(group, clock.slots))
        self._sums = [SlotSums(group.reducer, clock) for group in self._groups]
        self._handles = [
            model.register_forward_pre_hook(self.before, prepend=True),
            model.register_forward_hook(self.after, always_call=True),
        ]
        clocks[model] = clock
        _all[clock] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert, ()  # a copy of the model is not reproducible

    def end(self) -> None:
        """Remove the hooks, and restore wires and gradient sync."""
        for handle in self._handles:
            handle.remove()
        for sums in self._sums:
            sums.end()
        for group in self._groups:
            if isinstance(group.wire, TreeWire):
                group.send_by(group.wire.plain)
        self._synchronize(True)
        self.clock = None
        del clocks[self.model]

    @torch_compiler.never_traced
    def before(self, *_: Any) -> None:
        """Forward pre-hook on the model: begin a slot's forward if this is a training forward."""
        clock = self.clock
        recomputes = torch_autograd.graph_task_id() != -1
        if clock is None or self._runs or recomputes or not torch.is_grad_enabled():
            return
        for unit in self.units:
            if unit.runtime is not None:
                unit.runtime.recover_if_failed()
        self._check()
        clock.begin_forward(any(sums.was_dropped for sums in self._sums))
        self._runs = True
        if clock.is_last is not self._syncs:
            self._synchronize(clock.is_last)

    @torch_compiler.never_traced
    def after(self, *_: Any) -> None:
        if self._runs and self.clock is not None:
            self._runs = False
            self.clock.end_forward()

    def _synchronize(self, is_on: bool) -> None:
        self._syncs = is_on
        for unit in self.units:
            unit.configure(reduce_grads=is_on, all_reduce_grads=is_on)

    def _check(self) -> None:
        """Raise StateError if the user changed a setting on which reproducibility depends."""
        for unit in self.units:
            found = unit.settings.reduce_grads, unit.settings.all_reduce_grads
            if found != (self._syncs, self._syncs):
                _refuse_change(unit.fqn, "gradient sync was changed")
        for group in self._groups:
            if group.wire.carries and (
                not isinstance(group.wire, TreeWire) or group.wire.custom[1] is not None
            ):
                _refuse_change(group.fqn, "another hook or reduce-scatter was set")


def _refuse_change(fqn: str | None, found: str) -> None:
    raise StateError(
        "FS330",
        f"{WHO}: {fqn or '<root>'}: {found} after reproducible() was called. Remove this "
        "change, or make it before that call.",
    )


def _inert() -> Slots:
    slots = Slots.__new__(Slots)
    slots.clock = None
    slots._runs = False
    return slots


_all: weakref.WeakValueDictionary[SlotClock, Slots] = weakref.WeakValueDictionary()


def slots_of(who: str, model: nn.Module) -> Slots:
    """Return the ``Slots`` of a model.

    Raises:
        StateError: the model is not reproducible.
    """
    clock = clocks.get(check_module(who, "model", model))
    if clock is None:
        raise StateError(
            "FS330", f"{who}: the model is not reproducible. Call fsdp2.reproducible(model) first."
        )
    return _all[clock]


def mean_over_slots(model: nn.Module, values: Iterable[Tensor | float]) -> Tensor:
    """Average a number such as the loss over all slots, bitwise equal on any number of ranks.

    Collective over the model's data-parallel ranks. The numbers are summed in fp64, in the same
    binary tree over slots as the gradients.

    Args:
        model: a model for which ``reproducible`` was called.
        values: a number or a one-element tensor for each of this rank's slots, in order.

    Returns:
        A plain 0-dim tensor in fp64, on the device of the first tensor in ``values``.

    Raises:
        ConfigError: ``values`` does not have exactly one number for each of this rank's slots.
        StateError: the model is not reproducible.
    """
    who = "mean_over_slots"
    slots = slots_of(who, model)
    clock, data = slots.clock, slots.data
    assert clock is not None
    given = list(values) if isinstance(values, Iterable) else [values]
    if len(given) != len(clock.mine):
        expected = f"one number for each of {len(clock.mine)} slots"
        raise wrong_value(who, "values", expected, f"{len(given)} numbers")
    device = next((value.device for value in given if isinstance(value, Tensor)), None)
    with torch.no_grad():
        found = [torch.as_tensor(v, dtype=torch.float64, device=device).reshape(()) for v in given]
        total = _tree_sum(torch.stack(found))
        for axis in (data.shard, data.replicate):
            if axis.size > 1:
                sent = total.reshape(1).to(wire_device(axis.pg, total.device))
                gathered = sent.new_empty(axis.size)
                torch_comm.all_gather_single(gathered, sent, group=axis.pg)
                total = _tree_sum(gathered).to(total.device)
    return total / clock.slots


def _tree_sum(values: Tensor) -> Tensor:
    while len(values) > 1:
        values = values[::2] + values[1::2]
    return values[0]

"""The settings of a sharded module that can change while it trains.

Owns every ``set_*`` method and its checks. A setting lies on the groups of the unit, in its
``Settings`` (plain values) or in its ``Wire`` (objects that send); nothing here acts by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn

from fsdp2._api.checks import check_comm
from fsdp2._base import torch_modules
from fsdp2._base.arguments import (
    check_count,
    check_dtype,
    check_flag,
    check_module,
    check_number,
    described,
    wrong_type,
    wrong_value,
)
from fsdp2._base.errors import ConfigError, ConfigTypeError, StateError, coded
from fsdp2._base.events import IDLE
from fsdp2._comm import collectives
from fsdp2._comm.collectives import CustomComm
from fsdp2._comm.process_mesh import carrying, operation
from fsdp2._comm.streams import streams_for
from fsdp2._engine.between_steps import units_below
from fsdp2._engine.memory_budget import overlap_for
from fsdp2._engine.unit import Unit, unit_of
from fsdp2._param_group.group import ParamGroup


def own_unit(module: object) -> Unit:
    """Return the unit of a sharded module.

    A function, as are the next ones, because a user's module may have any attribute.
    """
    assert isinstance(module, nn.Module)
    unit = unit_of(module)
    assert unit is not None
    return unit


def units_in(module: object, recurse: bool) -> list[Unit]:
    """Return the unit of a sharded module, and those below it."""
    if not check_flag(type(module).__name__, "recurse", recurse):
        return [own_unit(module)]
    assert isinstance(module, nn.Module)
    return units_below(module)


def groups_in(module: object, recurse: bool = False) -> list[ParamGroup]:
    return [group for unit in units_in(module, recurse) for group in unit.own_groups]


def configure(module: object, recurse: bool, **changes: Any) -> None:
    for unit in units_in(module, recurse):
        unit.configure(**changes)


def sharded_units(who: str, name: str, module: nn.Module, recurse: bool = True) -> list[Unit]:
    """Return the units in a module that a function was given as ``name``.

    Raises:
        ConfigError: it is not a module, or there is no unit in it.
    """
    units = units_below(check_module(who, name, module))
    if not recurse:
        units = [unit for unit in units if module in unit.modules]
    if not units:
        raise ConfigError(
            "FS503",
            f"{who}: fully_shard was applied to nothing in this {type(module).__name__}. Pass the "
            "sharded model.",
        )
    return units


def refuse_during_step(
    who: str, units: Iterable[Unit], hint: str = "Call it between steps."
) -> None:
    """Raise StateError if a forward or a backward of these units is under way, and did not fail."""
    for unit in units:
        if unit.runtime is None:
            continue
        with contextlib.suppress(StateError):  # ranks that diverged: the next step says so
            unit.runtime.recover_if_failed()
        if unit.runtime.context.phase is not IDLE:
            raise StateError(
                "FS301",
                f"{who}: called during the {unit.runtime.context.phase} of "
                f"{unit.runtime.root.fqn or '<root>'}. {hint}",
            )


class ControlSurface:
    """What ``FSDPModule`` lets its users set. A setting holds until it is set again."""

    # When gradients are reduced.

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is the last before the optimizer step.

        After one that is not, reductions may still be in flight, and ``grad`` is not complete.
        """
        configure(self, True, is_last_backward=_flag("set_is_last_backward", is_last_backward))

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Say whether backward reduces gradients. While it does not, they accumulate unsharded, in
        ``grad`` of the unsharded parameters, in the reduce dtype of the policy or of the parameter.
        """
        flag = _flag("set_requires_gradient_sync", requires_gradient_sync)
        configure(self, recurse, reduce_grads=flag, all_reduce_grads=flag)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Say whether backward all-reduces over the replicate axis. While it does not, reduced
        shards accumulate, and ``grad`` is not set.
        """
        flag = _flag("set_requires_all_reduce", requires_all_reduce)
        configure(self, recurse, all_reduce_grads=flag)

    # When parameters are whole.

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether parameters are freed after forward, from the next forward on."""
        flag = _flag("set_reshard_after_forward", reshard_after_forward)
        configure(self, recurse, reshard_after_forward=flag)
        for group in groups_in(self, recurse):
            group.reshard_to(None)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Say whether parameters are freed after backward."""
        flag = _flag("set_reshard_after_backward", reshard_after_backward)
        configure(self, recurse, reshard_after_backward=flag)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Say whether the memory of whole parameters stays when they are resharded.

        The shards are registered as ever, and the next gather fills the same memory: parameters
        keep their ``data_ptr``, as captured CUDA graphs need, and their memory is never free.
        False frees it at once, unless a step is using it.

        Source: the meaning of the same method in ``torch.distributed.fsdp``, torch 2.15.
        """
        check_flag("set_keep_unsharded_storage", "keep", keep)
        configure(self, recurse, keep_unsharded_storage=keep)
        for group in groups_in(self, recurse):
            group.follow_storage()

    def set_memory(self, memory: str | int) -> None:
        """Say how much memory the overlap of collectives and compute may take, for the whole tree.

        Call it on the root, on every rank alike, at any time between steps.

        Args:
            memory: ``"low"``: no unit is gathered ahead, each reduction is waited for at once.
                ``"balanced"`` (as without a call): one unit ahead, one reduction in flight.
                ``"fast"``: two ahead, three in flight, and a root's large parts stay whole
                from forward to backward. A number of bytes: as much overlap as fits, so that
                unsharded parameters, their gradients and the buffers of collectives never take
                more in a step like the one before it. On a device, ``"low"`` and a number let
                the host wait for the device at the end of each backward.

        At most 1, 2 or 3 units below the root are whole or on their way at a time. Lists given to
        ``set_modules_to_forward_prefetch`` or ``set_modules_to_backward_prefetch``, and the number
        given to ``set_reduce_scatter_max_input_buffers``, count more than this.

        Raises:
            ConfigError: anything else, or a number below what is needed without any overlap.
        """
        configure(self, True, overlap=overlap_for(memory, units_in(self, True)))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Say whether backward gathers this unit's parameters (not those of units below it).

        False saves the all-gather where backward reads no parameter of the unit, as that of an
        embedding. Where it does read one, its memory is gone: the result is undefined.
        """
        flag = _flag("set_unshard_in_backward", unshard_in_backward)
        configure(self, False, unshard_in_backward=flag)

    def set_modules_to_forward_prefetch(self, modules: Iterable[torch_modules.FSDPModule]) -> None:
        """Gather these units when this one's forward begins, instead of the recorded next one."""
        units = _units_of("set_modules_to_forward_prefetch", modules)
        configure(self, False, forward_prefetch=units)

    def set_modules_to_backward_prefetch(self, modules: Iterable[torch_modules.FSDPModule]) -> None:
        """Gather these units when this one's backward begins, instead of the one before it."""
        units = _units_of("set_modules_to_backward_prefetch", modules)
        configure(self, False, backward_prefetch=units)

    # What a gradient is.

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this unit's summed gradients (not those of units below it) by ``factor``.

        The sum is over all data-parallel ranks, of the shard and the replicate axis. Without a
        factor it is divided by their number. ``set_gradient_reduction`` sets a whole tree.

        Raises:
            ConfigError: ``factor`` is not a finite number above 0.
        """
        who, expected = "set_gradient_divide_factor", "a finite number above 0"
        configure(self, False, divide_by=_factor(who, "factor", factor, expected))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of ``set_gradient_divide_factor``; deprecated."""
        warnings.warn(
            coded(
                "FS506",
                "set_reduce_scatter_divide_factor is deprecated: use set_gradient_divide_factor",
            ),
            FutureWarning,
            stacklevel=2,
        )
        self.set_gradient_divide_factor(factor)

    def set_gradient_reduction(self, reduction: str | float, *, recurse: bool = True) -> None:
        """Say what becomes of the gradients of all data-parallel ranks, for the whole tree.

        Args:
            reduction: ``"mean"`` over ranks (the default of a unit), ``"sum"``, or a number that
                the sum is divided by. It means the same with and without a replicate axis, and
                when gradients accumulate over several backwards.
            recurse: for the units below this one too.

        Raises:
            ConfigError: anything else.
        """
        known: dict[object, float | None] = {"mean": None, "sum": 1.0}
        expected = "'mean', 'sum' or a finite number above 0"
        divide_by = (
            known[reduction]
            if isinstance(reduction, str) and reduction in known
            else _factor("set_gradient_reduction", "reduction", reduction, expected)
        )
        configure(self, recurse, divide_by=divide_by)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Say whether this unit's collectives only ever sum, and scaling is a kernel of its own.

        Otherwise a mean is left to the backend where it can (``ReduceOp.AVG``).
        """
        flag = check_flag("set_force_sum_reduction_for_comms", "enable", enable)
        configure(self, False, only_sums=flag)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Say whether a parameter that no rank used gets a gradient of zeros instead of None.

        Ranks may use different parameters of a unit in any case: every rank reduces all of them.

        Raises:
            ConfigError: a parameter with ``grad_dtype=None`` in a unit without a ``reduce_dtype``:
                zeros have no dtype there. (The first forward says so if it is set later.)
        """
        flag = _flag("set_reduce_scatter_unused_params", reduce_scatter_unused_params)
        for group in groups_in(self, recurse):
            group.check_unused(dataclasses.replace(group.settings, reduce_unused=flag))
        configure(self, recurse, reduce_unused=flag)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.Stream | None = None
    ) -> None:
        """Call ``hook(reduced)`` on each flat reduced gradient of this unit, before it is stored.

        Args:
            hook: changes ``reduced`` in place: this rank's part of the reduce-scatter, after the
                all-reduce over the replicate axis if there is one. 1-D, in the reduce dtype; a
                unit whose parameters lie on several meshes calls it once for each. While a hook
                is set, a parameter that no rank used gets a gradient and not None.
            stream: the device stream to run the hook in, of any class (``torch.Stream``,
                ``torch.cuda.Stream``). What the hook puts there may use ``reduced`` as long as it
                runs: the memory is held until then. On a CPU the hook runs at once.

        Raises:
            ConfigError: a stream together with a replicate axis, whose stream the hook runs in.
        """
        who = "set_all_reduce_hook"
        if not callable(hook):
            raise wrong_type(who, "hook", "a function", hook)
        if stream is not None and not isinstance(stream, torch.Stream):
            raise wrong_type(who, "stream", "a torch.Stream or None", stream)
        groups = groups_in(self)
        if stream is not None and any(group.data.replicate.size > 1 for group in groups):
            raise ConfigError(
                "FS505",
                "set_all_reduce_hook: found a stream together with a replicate axis. Leave out the "
                "stream: the hook runs in that of the all-reduce.",
            )
        for group in groups:
            group.reducer.hook, group.reducer.hook_stream = hook, stream

    # How it is sent.

    def set_custom_all_gather(self, comm: CustomComm) -> None:
        """Gather this unit's parameters by ``comm(output, input, group, async_op)``.

        A unit whose parameters lie on several meshes calls it for each, with that mesh's group.
        """
        check_comm("set_custom_all_gather", comm)
        for group in groups_in(self):
            group.wire.gather = comm
            group.rewire()

    def set_custom_reduce_scatter(self, comm: CustomComm) -> None:
        """Reduce this unit's gradients by ``comm(output, input, group, op, async_op)``.

        A unit whose parameters lie on several meshes calls it for each, with that mesh's group.
        """
        check_comm("set_custom_reduce_scatter", comm)
        groups = groups_in(self)
        if any(group.wire.gradient_dtype is not None for group in groups):
            raise ConfigError(
                "FS505",
                "set_custom_reduce_scatter: found a dtype set with set_gradient_wire_dtype, which "
                "is for the library's own. Call set_gradient_wire_dtype(None) first.",
            )
        for group in groups:
            group.wire.scatter = comm
            group.rewire()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Say whether this unit's buffers come from the process group's own allocator, if any.

        Raises:
            ConfigError: a custom collective is set, which allocates for itself.
        """
        check_flag("set_allocate_memory_from_process_group_for_comm", "enable", enable)
        groups = groups_in(self)
        _refuse_custom("set_allocate_memory_from_process_group_for_comm", groups)
        for group in groups:
            wire = group.wire
            wire.gather = collectives.DefaultAllGather()
            wire.scatter = collectives.DefaultReduceScatter()
            if enable:
                wire.use_group_memory(group.data.shard.pg)
            group.rewire()

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Gather this unit's parameters through symmetric memory.

        Raises:
            UnsupportedError: the process group's backend is not NCCL.
            ConfigError: another ``backend``, or a custom collective is set.
        """
        groups = groups_in(self)
        _refuse_custom("set_symm_mem_for_comm", groups)
        made = {
            group: collectives.SymmetricMemoryAllGather(group.data.shard.pg, backend)
            for group in groups
            if group.data.shard.pg is not None
        }
        for group, gather in made.items():
            group.wire.gather = gather
            group.rewire()

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Say whether gradients are reduced over a process group of their own.

        Then an all-gather and a reduce-scatter can be on the wire at a time. Collective: every rank
        calls it. Units over the same ranks share one more process group.
        """
        check_flag("set_separate_reduce_scatter_group", "enable", enable)
        with operation("set_separate_reduce_scatter_group"), carrying():
            for group in groups_in(self, recurse):
                group.separate_reductions(enable)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Say how many reductions may hold their inputs at a time, instead of ``set_memory``.

        The next one waits for the oldest before it packs its gradients.
        """
        count = check_count(
            "set_reduce_scatter_max_input_buffers", "max_input_buffers", max_input_buffers
        )
        configure(self, recurse, input_buffers=count)

    def set_copy_free_min_bytes(self, min_bytes: int | None, *, recurse: bool = True) -> None:
        """Say how large a parameter must be to travel in collectives of its own.

        Such a one is gathered from its shard right into the memory where it is used, and reduced
        right from its gradient if its rows divide evenly over the ranks. Smaller ones share one
        collective, which costs copies. Every rank sets the same.

        Args:
            min_bytes: bytes of the whole parameter in the dtype that it is computed in. ``None``:
                all parameters of a unit share one collective, as they do with collectives of the
                user's own. The default is 131072 on a CPU and ``None`` on a device.
            recurse: for the units below this one too.

        Raises:
            ConfigError: ``min_bytes`` is neither None nor an int of at least 1.
        """
        if min_bytes is not None:
            min_bytes = check_count("set_copy_free_min_bytes", "min_bytes", min_bytes)
        for group in groups_in(self, recurse):
            group.send_zero_copy(min_bytes)

    def set_gradient_wire_dtype(self, dtype: torch.dtype | None, *, recurse: bool = True) -> None:
        """Say in which dtype gradients travel in the reduce-scatter; their sum stays as it is.

        The sum is made in the reduce dtype, from parts in ``dtype``: an all-to-all and a local sum,
        on every backend. So bf16 halves what fp32 sends, and loses one rounding for each rank's
        part, none in the sum. The all-reduce over a replicate axis stays in the reduce dtype.

        Args:
            dtype: a floating dtype; ``None``: the reduce dtype, as it is by default.
            recurse: for the units below this one too.

        Raises:
            ConfigError: ``dtype`` is not one, or a custom reduce-scatter is set.
        """
        check_dtype("set_gradient_wire_dtype", "dtype", dtype)
        groups = groups_in(self, recurse)
        if dtype is not None and not all(group.wire.scatters_zero_copy for group in groups):
            raise ConfigError(
                "FS505",
                "set_gradient_wire_dtype: found a reduce-scatter of your own, or one on special "
                "memory, which sends what it is given. Use one or the other.",
            )
        for group in groups:
            group.wire.gradient_dtype = dtype
            group.rewire()

    def set_post_optim_event(self, event: torch.Event | None) -> None:
        """Let the next forward's all-gathers wait for ``event`` only, not for all that compute
        was given before it. Record it after the optimizer step, each time anew. On a CPU the host
        waits: anything with a method ``synchronize`` will do, and None, which is what
        ``torch.cpu.current_stream().record_event()`` returns, is nothing to wait for.

        Raises:
            ConfigError: ``event`` has no such method; None on a device.
        """
        unit = own_unit(self)
        is_nothing = event is None and unit.device.type == "cpu"
        methods = ("synchronize",) if unit.device.type == "cpu" else ("synchronize", "wait")
        is_event = not isinstance(event, type) and all(
            callable(getattr(event, method, None)) for method in methods
        )
        if not is_event and not is_nothing:
            raise wrong_type("set_post_optim_event", "event", "a torch.Event", event)
        root = unit if unit.runtime is None else unit.runtime.root
        root.post_optim_event = event


def share_comm_ctx(modules: Iterable[nn.Module]) -> None:
    """Let several roots use the same streams, as the stages of a pipeline on one rank should.

    On a CPU there are no streams, and this changes nothing that can be seen.

    Raises:
        ConfigError: something in the list was not given to ``fully_shard``.
    """
    units = _units_of("share_comm_ctx", modules)
    if not units:
        return
    first = units[0]
    streams = first.streams if first.runtime is None else first.runtime.context.streams
    if streams is None:
        streams = streams_for(first.device)
    for unit in units:
        unit.streams = streams
        if unit.runtime is not None:
            unit.runtime.context.streams = streams


def _flag(setter: str, value: object) -> bool:
    """Check the argument of a setter, which is called as what it sets."""
    return check_flag(setter, setter.removeprefix("set_"), value)


def _refuse_custom(name: str, groups: Iterable[ParamGroup]) -> None:
    if any(group.wire.is_custom for group in groups):
        raise ConfigError(
            "FS505",
            f"{name}: found a custom all-gather or reduce-scatter, which allocates for itself. Use "
            "one or the other.",
        )


def _factor(who: str, name: str, factor: object, expected: str) -> float:
    number = check_number(who, name, factor, expected)
    if not math.isfinite(number) or number <= 0:
        raise wrong_value(who, name, expected, factor)
    return number


def _units_of(who: str, modules: object) -> tuple[Unit, ...]:
    units = []
    expected = "a list of modules that fully_shard was applied to"
    if not isinstance(modules, Iterable) or isinstance(modules, str | bytes | torch.Tensor):
        raise wrong_type(who, "modules", expected, modules)
    for module in modules:
        if not isinstance(module, ControlSurface):
            raise ConfigTypeError(
                "FS101",
                f"{who}: expected modules to be {expected}, found {described(module)} in it.",
            )
        units.append(own_unit(module))
    return tuple(units)

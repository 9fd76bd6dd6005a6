"""The settings of a sharded module that can be changed during training: all ``set_*`` methods.

Setters store plain values in a unit's ``Settings``, and communication objects in the ``Wire`` of
each of its groups. The engine reads both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn

from fsdp2._core.api.collect import check_comm
from fsdp2._core.base import torch_modules
from fsdp2._core.base.capabilities import ZeroCopy
from fsdp2._core.base.errors import (
    ConfigError,
    ConfigTypeError,
    StateError,
    carrying,
    check_count,
    check_dtype,
    check_flag,
    check_module,
    check_number,
    described,
    wrong_type,
    wrong_value,
)
from fsdp2._core.base.events import IDLE
from fsdp2._core.base.names import class_name
from fsdp2._core.base.warn import warn
from fsdp2._core.comm.comms import CustomComm
from fsdp2._core.comm.process_mesh import operation
from fsdp2._core.comm.symmetric import SymmetricMemoryAllGather
from fsdp2._core.comm.wire import DefaultAllGather, DefaultReduceScatter
from fsdp2._core.engine.between_steps import units_below
from fsdp2._core.engine.memory_budget import overlap_for
from fsdp2._core.engine.tree import Unit, unit_of
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.param import check_unused


def own_unit(module: object) -> Unit:
    """Return a sharded module's unit. (Not a method: it could hide a user's attribute.)"""
    assert isinstance(module, nn.Module)
    unit = unit_of(module)
    assert unit is not None
    return unit


def units_in(module: object, recurse: bool) -> list[Unit]:
    if not check_flag(class_name(module), "recurse", recurse):
        return [own_unit(module)]
    assert isinstance(module, nn.Module)
    return units_below(module)


def groups_in(module: object, recurse: bool = False) -> list[ParamGroup]:
    return [group for unit in units_in(module, recurse) for group in unit.own_groups]


def configure(module: object, recurse: bool, **changes: Any) -> None:
    for unit in units_in(module, recurse):
        unit.configure(**changes)


def sharded_units(
    who: str,
    name: str,
    module: nn.Module,
    recurse: bool = True,
) -> list[Unit]:
    """Return the units in a module that was passed as the argument ``name``."""
    units = units_below(check_module(who, name, module))
    if not recurse:
        units = [unit for unit in units if module in unit.modules]
    if not units:
        hint = "Pass the sharded model."
        if any(isinstance(one, torch_modules.FSDPModule) for one in module.modules()):
            hint = "Use fsdp2.fully_shard instead of torch's, or call fsdp2.replace_torch() first."
        raise ConfigError(
            "FS503",
            f"{who}: fully_shard was not applied to any module in the {class_name(module)}. {hint}",
        )
    return units


def refuse_during_step(
    who: str, units: Iterable[Unit], hint: str = "Call it between steps."
) -> None:
    """Raise StateError if one of the units is in a forward or backward that has not failed."""
    for unit in units:
        if unit.runtime is None:
            continue
        with contextlib.suppress(StateError):  # ranks diverged: the next step raises this error
            unit.runtime.recover_if_failed()
        if unit.runtime.context.phase is not IDLE:
            raise StateError(
                "FS301",
                f"{who}: called during the {unit.runtime.context.phase} of "
                f"{unit.runtime.root.fqn or '<root>'}. {hint}",
            )


class ControlSurface:
    """The setters of ``FSDPModule``. Each setting applies until it is changed."""

    # Timing of gradient reductions.

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the last one before the optimizer step.

        Call this method on the root; it applies to all units of the tree. After a backward that is
        not the last one, reductions may still be in flight, and ``grad`` may be incomplete.

        Raises:
            ConfigError: ``is_last_backward`` is not a bool.
        """
        configure(self, True, is_last_backward=_flag("set_is_last_backward", is_last_backward))

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Set whether backward reduces gradients.

        With False, gradients accumulate in the ``grad`` of the unsharded parameters, in the reduce
        dtype. This requires memory for the unit's full gradients. The call also sets the flag of
        ``set_requires_all_reduce`` to the same value. Units with ``shard="gradients"`` always
        reduce over the shard axis and defer only the all-reduce.

        Args:
            requires_gradient_sync: if False, defer the reduction to a later backward.
            recurse: also configure the units below this one.

        Raises:
            ConfigError: an argument is not a bool.
        """
        flag = _flag("set_requires_gradient_sync", requires_gradient_sync)
        for unit in units_in(self, recurse):
            unit.configure(**unit.settings.sharding.sync(flag))

    def set_requires_all_reduce(
        self,
        requires_all_reduce: bool,
        *,
        recurse: bool = True,
    ) -> None:
        """Set whether backward all-reduces gradients over the replicate axis.

        With False, backward reduces over the shard axis only; the results accumulate internally and
        ``grad`` is not set. No effect without a replicate axis.

        Args:
            requires_all_reduce: if False, defer the all-reduce to a later backward.
            recurse: also configure the units below this one.

        Raises:
            ConfigError: an argument is not a bool.
        """
        flag = _flag("set_requires_all_reduce", requires_all_reduce)
        configure(self, recurse, all_reduce_grads=flag)

    # Lifetime of unsharded parameters.

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether unsharded parameters are freed after forward, starting with the next forward.

        With False, parameters gathered in a no-grad forward are also reused in the next no-grad
        forward, unless the shards are written in between. Writes that do not increment the version
        counter (``p.data.mul_``, NumPy) are not detected: call ``reshard()`` after them. In
        contrast, ``fully_shard(reshard_after_forward=False)`` keeps parameters only for backward.

        Args:
            reshard_after_forward: True or False; overrides an int passed to ``fully_shard``.
            recurse: also configure the units below this one.

        Raises:
            ConfigError: an argument is not a bool; or the flag is True for a unit whose ``shard``
                keeps parameters unsharded.
        """
        flag = _flag("set_reshard_after_forward", reshard_after_forward)
        units = units_in(self, recurse)
        whole = next((unit for unit in units if unit.settings.sharding.keeps_whole), None)
        if flag and whole is not None:
            raise ConfigError(
                "FS234",
                f"set_reshard_after_forward: {whole.fqn or '<root>'} has "
                f"{whole.settings.sharding.name}, so its parameters stay unsharded. Omit this "
                'call, or pass shard="parameters" to fully_shard.',
            )
        configure(self, recurse, reshard_after_forward=flag, keeps_in_evaluation=not flag)
        for group in groups_in(self, recurse):
            if group.data.layers is None:
                group.reshard_to(None)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether unsharded parameters are freed after backward.

        With False, shards are registered after backward, but unsharded parameters stay in memory.
        The next forward reuses them, unless the shards were written in between, for example by an
        optimizer step. Writes that do not increment the version counter (``p.data.mul_``, NumPy)
        are not detected: call ``reshard()`` after them.

        Args:
            reshard_after_backward: True or False.
            recurse: also configure the units below this one.

        Raises:
            ConfigError: an argument is not a bool.
        """
        flag = _flag("set_reshard_after_backward", reshard_after_backward)
        configure(self, recurse, reshard_after_backward=flag)

    def set_keep_unsharded_storage(
        self,
        keep: bool,
        *,
        recurse: bool = True,
    ) -> None:
        """Set whether resharding retains the memory of unsharded parameters.

        With True, shards are registered as usual, but every gather writes to the same memory, which
        is never freed: parameters keep their ``data_ptr``, as captured CUDA graphs require.

        Args:
            keep: if False, free the memory immediately, or at the end of a step that is using it.
            recurse: also configure the units below this one.

        Raises:
            ConfigError: an argument is not a bool.

        Source: the method of the same name in ``torch.distributed.fsdp``, torch 2.15.
        """
        check_flag("set_keep_unsharded_storage", "keep", keep)
        configure(self, recurse, keep_unsharded_storage=keep)
        for group in groups_in(self, recurse):
            group.keep_memory()

    def set_memory(self, memory: str | int) -> None:
        """Limit the memory used to overlap collectives with compute, for the whole tree.

        Call it on the root between steps, with the same argument on every rank.

        Args:
            memory: one of

                - ``"low"``: no prefetch, and no reduction stays in flight;
                - ``"balanced"``, the default: prefetch one unit, with one reduction in flight;
                - ``"fast"``: prefetch two units, with three reductions in flight. The large parts
                  of a root stay unsharded from forward to backward;
                - a number of bytes: an upper limit on unsharded parameters, their gradients and
                  collective buffers, if steps are similar. Overlap is maximized within this limit.

                With ``"low"`` or a number, the host waits for the device after each backward.

        With ``"low"``, ``"balanced"`` and ``"fast"``, at most 1, 2 and 3 units below the root,
        respectively, are unsharded or being gathered at a time.
        ``set_modules_to_forward_prefetch``, ``set_modules_to_backward_prefetch`` and
        ``set_reduce_scatter_max_input_buffers`` take precedence over this setting. Not in torch.

        Raises:
            ConfigError: ``memory`` is invalid, or is less than a step needs without overlap.
        """
        configure(self, True, overlap=overlap_for(memory, units_in(self, True)))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers this unit's parameters (not those of units below it).

        False saves the all-gather of a unit whose parameters are not read in backward, such as an
        embedding. If backward does read a parameter, it reads freed memory: results are undefined.

        Raises:
            ConfigError: ``unshard_in_backward`` is not a bool.
        """
        flag = _flag("set_unshard_in_backward", unshard_in_backward)
        configure(self, False, unshard_in_backward=flag)

    def set_modules_to_forward_prefetch(self, modules: Iterable[torch_modules.FSDPModule]) -> None:
        """Set the units that are gathered when the forward of this unit begins.

        Default: the units that ran after this one in the previous step; ``set_memory`` determines
        their number. An empty list disables prefetching.

        Args:
            modules: sharded modules, in the order in which they are gathered.

        Raises:
            ConfigError: ``modules`` is not a list of modules that ``fully_shard`` was applied to.
        """
        units = _units_of("set_modules_to_forward_prefetch", modules)
        unit = own_unit(self)
        unit.configure(prefetch=dataclasses.replace(unit.settings.prefetch, forward=units))

    def set_modules_to_backward_prefetch(self, modules: Iterable[torch_modules.FSDPModule]) -> None:
        """Set the units that are gathered when the backward of this unit begins.

        Default: the units that ran before this one in forward; ``set_memory`` determines their
        number. An empty list disables prefetching.

        Args:
            modules: sharded modules, in the order in which they are gathered.

        Raises:
            ConfigError: ``modules`` is not a list of modules that ``fully_shard`` was applied to.
        """
        units = _units_of("set_modules_to_backward_prefetch", modules)
        unit = own_unit(self)
        unit.configure(prefetch=dataclasses.replace(unit.settings.prefetch, backward=units))

    # Scaling and storage of gradients.

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Set the divisor of this unit's summed gradients (not those of units below it).

        Gradients are summed over all data-parallel ranks (shard and replicate axes). None (default)
        divides by the number of ranks. For the entire tree, call ``set_gradient_reduction``.

        Raises:
            ConfigError: ``factor`` is neither None nor a finite number above 0.
        """
        if factor is not None:
            who, expected = "set_gradient_divide_factor", "a finite number above 0 or None"
            factor = _factor(who, "factor", factor, expected)
        configure(self, False, divide_by=factor)

    def set_reduce_scatter_divide_factor(self, factor: float | None) -> None:
        """Deprecated alias of ``set_gradient_divide_factor``; issues a ``FutureWarning``.

        Raises:
            ConfigError: ``factor`` is neither None nor a finite number above 0.
        """
        warn(
            "FS506",
            "set_reduce_scatter_divide_factor is deprecated: use set_gradient_divide_factor",
            FutureWarning,
        )
        self.set_gradient_divide_factor(factor)

    def set_gradient_reduction(
        self,
        reduction: str | float,
        *,
        recurse: bool = True,
    ) -> None:
        """Set how gradients of data-parallel ranks are combined in the whole tree. Not in torch.

        Args:
            reduction: ``"mean"`` over ranks (the default), ``"sum"``, or a number by which the sum
                is divided. Neither a replicate axis nor gradient accumulation changes the meaning.
            recurse: also configure the units below this one.

        Raises:
            ConfigError: ``reduction`` is neither ``"mean"``, ``"sum"`` nor a finite number above 0.
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
        """Set whether this unit's reductions compute sums, which a separate kernel then scales.

        By default, the backend computes means (``ReduceOp.AVG``) if it supports them.

        Raises:
            ConfigError: ``enable`` is not a bool.
        """
        flag = check_flag("set_force_sum_reduction_for_comms", "enable", enable)
        configure(self, False, only_sums=flag)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether a parameter that no rank used gets a gradient of zeros instead of None.

        In either case, ranks may use different parameters of a unit: all gradients are reduced.

        Args:
            reduce_scatter_unused_params: True for zeros, False for None.
            recurse: also configure the units below this one.

        Raises:
            ConfigError: an argument is not a bool; or a parameter has ``grad_dtype=None`` in a unit
                without a ``reduce_dtype``, so the dtype of the zeros is undefined. (If
                ``grad_dtype`` is set later, the first forward raises this error.)
        """
        flag = _flag("set_reduce_scatter_unused_params", reduce_scatter_unused_params)
        for group in groups_in(self, recurse):
            changed = dataclasses.replace(group.settings, reduce_unused=flag)
            check_unused(group.params, changed, group.policy)
        configure(self, recurse, reduce_unused=flag)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None] | None, *, stream: torch.Stream | None = None
    ) -> None:
        """Call ``hook(reduced)`` for each flat reduced gradient of this unit, before it is stored.

        Args:
            hook: modifies ``reduced`` in place. ``reduced`` is 1-D, in the reduce dtype, and holds
                this rank's shard after the reduce-scatter and, with a replicate axis, all-reduce.
                The hook is called once per mesh of the unit's parameters. With a hook, a parameter
                that no rank used gets a gradient instead of None. ``None`` removes the hook.
            stream: the device stream to run the hook on (``torch.Stream``, ``torch.cuda.Stream``).
                ``reduced`` stays allocated until the hook's work on that stream is complete. On a
                CPU the hook runs synchronously.

        Raises:
            ConfigError: ``hook`` is neither a function nor None; or ``stream`` is not a stream, or
                was passed with a replicate axis (the hook then runs on the all-reduce's stream).
        """
        who = "set_all_reduce_hook"
        if hook is not None and not callable(hook):
            raise wrong_type(who, "hook", "a function or None", hook)
        if stream is not None and not isinstance(stream, torch.Stream):
            raise wrong_type(who, "stream", "a torch.Stream or None", stream)
        groups = groups_in(self)
        if stream is not None and any(group.data.replicate.size > 1 for group in groups):
            raise ConfigError(
                "FS505",
                "set_all_reduce_hook: found a stream together with a replicate axis. Omit the "
                "stream: the hook runs on the stream of the all-reduce.",
            )
        for group in groups:
            group.reducer.hook, group.reducer.hook_stream = hook, stream

    # Communication.

    def set_custom_all_gather(self, comm: CustomComm) -> None:
        """Gather this unit's parameters with ``comm``, called as ``AllGather.__call__`` specifies.

        ``comm`` is called once per mesh of the unit's parameters, with that mesh's process group.

        Args:
            comm: an ``AllGather``, or any object with ``allocate`` and the same call signature.

        Raises:
            ConfigError: ``comm`` is a class, is not callable, or has no ``allocate``.
        """
        check_comm("set_custom_all_gather", comm)
        refuse_dealt("set_custom_all_gather", groups_in(self))
        for group in groups_in(self):
            group.wire.gather = comm
            group.rewire()

    def set_custom_reduce_scatter(self, comm: CustomComm) -> None:
        """Reduce this unit's gradients with ``comm``; for its arguments, see ``ReduceScatter``.

        ``comm`` is called once per mesh of the unit's parameters, with that mesh's process group.

        Args:
            comm: a ``ReduceScatter``, or any object with ``allocate`` and the same call signature.

        Raises:
            ConfigError: ``comm`` is a class, is not callable, or has no ``allocate``; or a gradient
                wire dtype is set.
        """
        check_comm("set_custom_reduce_scatter", comm)
        groups = groups_in(self)
        refuse_dealt("set_custom_reduce_scatter", groups)
        if any(group.wire.gradient_dtype is not None for group in groups):
            raise ConfigError(
                "FS505",
                "set_custom_reduce_scatter: found a gradient wire dtype, which custom "
                "reduce-scatters do not support. Call set_gradient_wire_dtype(None) first.",
            )
        for group in groups:
            group.wire.scatter = comm
            group.rewire()

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Set whether this unit's buffers come from the process group's allocator, if it has one.

        Raises:
            ConfigError: ``enable`` is not a bool; or a custom collective has its own allocator.
        """
        check_flag("set_allocate_memory_from_process_group_for_comm", "enable", enable)
        groups = groups_in(self)
        _refuse_custom("set_allocate_memory_from_process_group_for_comm", groups)
        for group in groups:
            group.wire.gather, group.wire.scatter = DefaultAllGather(), DefaultReduceScatter()
            if enable:
                group.wire.use_group_memory(group.data.shard.pg)
            group.rewire()

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Gather this unit's parameters with symmetric memory, which peers read directly.

        Raises:
            UnsupportedError: the process group's backend is not NCCL.
            ConfigError: ``backend`` is not ``"NCCL"``, or a custom collective is set.
        """
        groups = groups_in(self)
        _refuse_custom("set_symm_mem_for_comm", groups)
        refuse_dealt("set_symm_mem_for_comm", groups)
        made = {
            group: SymmetricMemoryAllGather(group.data.shard.pg, backend)
            for group in groups
            if group.data.shard.pg is not None
        }
        for group, gather in made.items():
            group.wire.gather = gather
            group.rewire()

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Set whether gradients are reduced over a separate process group.

        This allows an all-gather and a reduce-scatter to be in flight at the same time. Call it on
        every rank. Units sharded over the same ranks share one additional process group.

        Args:
            enable: if False, reduce over the process group of the all-gathers again.
            recurse: also configure the units below this one.

        Raises:
            ConfigError: an argument is not a bool.
        """
        check_flag("set_separate_reduce_scatter_group", "enable", enable)
        groups = groups_in(self, recurse)
        if enable:
            refuse_layers("set_separate_reduce_scatter_group", groups)
        with operation("set_separate_reduce_scatter_group"), carrying():
            for group in groups:
                group.reducer.separate(enable)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many reductions may hold input buffers at a time; overrides ``set_memory``.

        Any further reduction packs its gradients only after the oldest reduction is complete.

        Args:
            max_input_buffers: an int of at least 1.
            recurse: also configure the units below this one.

        Raises:
            ConfigError: ``max_input_buffers`` is not an int of at least 1.
        """
        who = "set_reduce_scatter_max_input_buffers"
        count = check_count(who, "max_input_buffers", max_input_buffers)
        configure(self, recurse, input_buffers=count)

    def set_copy_free_min_bytes(
        self,
        min_bytes: int | None,
        *,
        recurse: bool = True,
    ) -> None:
        """Set the minimum size of parameters that are sent in separate collectives. Not in torch.

        A parameter of at least this size is gathered directly into its final memory. If its rows
        divide evenly, its gradient is also sent without a copy. Smaller parameters share one
        collective, which requires copies. Set the same value on every rank.

        Args:
            min_bytes: size in bytes of the unsharded parameter in its compute dtype. ``None``: all
                parameters of a unit share one collective, as with custom collectives. The default
                on a CPU is 131072. On a device it is 524288 per rank for up to 64 ranks, 33554432
                in total for up to 512 ranks, and 65536 per rank for more ranks; each rank's shard
                must then also be a multiple of 128 bytes, which NCCL transfers faster.
            recurse: also configure the units below this one.

        Raises:
            ConfigError: ``min_bytes`` is neither None nor an int of at least 1.
        """
        if min_bytes is not None:
            min_bytes = check_count("set_copy_free_min_bytes", "min_bytes", min_bytes)
        for group in groups_in(self, recurse):
            group.send_zero_copy(None if min_bytes is None else ZeroCopy(min_bytes))

    def set_gradient_wire_dtype(
        self,
        dtype: torch.dtype | None,
        *,
        recurse: bool = True,
    ) -> None:
        """Set the dtype in which the reduce-scatter sends gradients. Not in torch.

        On every backend, an all-to-all sends gradients in ``dtype``, and the receiver sums them in
        the reduce dtype. With bf16, for example, half the bytes of fp32 are sent, and each rank's
        gradient is rounded only once, before the sum. All-reduces over a replicate axis, and
        reductions of complex gradients, use the reduce dtype.

        Args:
            dtype: a floating-point dtype. ``None`` (default) means the reduce dtype.
            recurse: also configure the units below this one.

        Raises:
            ConfigError: ``dtype`` is not floating-point, or a custom reduce-scatter is set.
        """
        check_dtype("set_gradient_wire_dtype", "dtype", dtype)
        groups = groups_in(self, recurse)
        if dtype is not None and not all(group.wire.scatters_zero_copy for group in groups):
            raise ConfigError(
                "FS505",
                "set_gradient_wire_dtype: found a reduce-scatter that is custom or has its own "
                "allocator, and therefore sends its input unchanged. Use either this "
                "reduce-scatter or a wire dtype.",
            )
        for group in groups:
            group.wire.gradient_dtype = dtype
            group.rewire()

    def set_post_optim_event(self, event: torch.Event | None) -> None:
        """Make the all-gathers of the next forward wait only for ``event``.

        By default, they wait for all preceding work on the compute stream.

        Args:
            event: an event recorded and passed after each optimizer step. ``None`` removes it. On a
                CPU the host waits, and ``event`` may be any object with a ``synchronize`` method,
                because ``torch.cpu.current_stream().record_event()`` returns None.

        Raises:
            ConfigError: ``event`` has no ``synchronize`` or, on a device, no ``wait`` method.
        """
        unit = own_unit(self)
        methods = ("synchronize",) if unit.device.type == "cpu" else ("synchronize", "wait")
        is_event = not isinstance(event, type) and all(
            callable(getattr(event, method, None)) for method in methods
        )
        if event is not None and not is_event:
            raise wrong_type("set_post_optim_event", "event", "a torch.Event or None", event)
        root = unit if unit.runtime is None else unit.runtime.root
        root.post_optim_event = event


def share_comm_ctx(modules: Iterable[nn.Module]) -> None:
    """Share streams between several roots, such as the stages of a pipeline on one rank.

    No effect on a CPU, which has no streams.

    Args:
        modules: roots that ``fully_shard`` was applied to.

    Raises:
        ConfigError: ``modules`` is not a list of modules that ``fully_shard`` was applied to.

    Source: the function of the same name in ``torch.distributed.fsdp``.
    """
    units = _units_of("share_comm_ctx", modules)
    if not units:
        return
    streams = units[0].lanes
    for unit in units:
        unit.streams = streams
        if unit.runtime is not None:
            unit.runtime.context.streams = streams


def _flag(setter: str, value: object) -> bool:
    """Check a setter's argument, whose name is the setter's name without ``set_``."""
    return check_flag(setter, setter.removeprefix("set_"), value)


def refuse_dealt(who: str, groups: Iterable[ParamGroup]) -> None:
    """Raise ConfigError if ranks send different amounts, which ``who`` does not support."""
    for group in groups:
        for param in group.params:
            deal = param.placement.layout.deal
            if deal is not None:
                raise ConfigError(
                    "FS505",
                    f"{who}: {param.fqn} {deal.asked_by}, so ranks send different amounts, which "
                    "this call does not support. Omit the call for this unit, or return Shard(0) "
                    "from shard_placement_fn.",
                )


def refuse_layers(who: str, groups: Iterable[ParamGroup]) -> None:
    """Raise ConfigError for a group whose gradients are scattered over two axes."""
    for group in groups:
        if group.data.layers is not None:
            raise ConfigError(
                "FS505",
                f"{who}: {group.fqn or '<root>'} has {group.settings.sharding.name}, so its "
                "gradients are scattered twice, over two process groups, which this call does not "
                "support. Omit this call, or that argument of fully_shard.",
            )


def _refuse_custom(name: str, groups: Iterable[ParamGroup]) -> None:
    if any(group.wire.is_custom for group in groups):
        raise ConfigError(
            "FS505",
            f"{name}: found a custom all-gather or reduce-scatter, which has its own allocator. "
            "Omit either this call or the custom collective.",
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


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Context manager in which backwards accumulate gradients without communication.

    The first backward after the context reduces the gradients accumulated in its root. (A root is a
    unit without an enclosing unit; if ``module`` has several roots, each needs such a backward.) An
    optimizer step before that backward ignores these gradients and warns. The context applies to
    ``backward()`` calls, not to forwards. Gradients accumulate unsharded, in the reduce dtype, so
    each rank needs memory for the full gradients of the model. Units with ``shard="gradients"``
    still reduce over the shard axis and defer only the all-reduce. The context disables gradient
    sync for every unit in ``module`` (``set_requires_gradient_sync``) and restores the previous
    setting on exit. Contexts may be nested.

    Args:
        module: the model, or a part of it, which does not have to be a unit itself.

    Raises:
        ConfigError: ``module`` contains no unit.
        StateError: called inside a forward or a backward of ``module``. Nothing was changed.

    Source: the method of the same name of torch's ``FullyShardedDataParallel``.
    """
    units = sharded_units("no_sync", "module", module)
    refuse_during_step(
        "no_sync",
        units,
        "Some units may have already reduced gradients: enter the context before the forward, or "
        "between forward and backward.",
    )
    before = [(unit, unit.settings) for unit in units]
    for unit in units:
        unit.configure(**unit.settings.sharding.sync(False))
    try:
        yield
    finally:
        for unit, settings in before:
            unit.configure(
                reduce_grads=settings.reduce_grads, all_reduce_grads=settings.all_reduce_grads
            )

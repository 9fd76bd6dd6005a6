"""The settings of a sharded module that can change while it trains.

Owns every ``set_*`` method and its checks. A setting lies on the groups of the unit, in its
``Settings`` (plain values) or in its ``Wire`` (objects that send); nothing here acts by itself.
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
from fsdp2._core.base.arguments import (
    check_count,
    check_dtype,
    check_flag,
    check_module,
    check_number,
    described,
    wrong_type,
    wrong_value,
)
from fsdp2._core.base.capabilities import ZeroCopy
from fsdp2._core.base.errors import ConfigError, ConfigTypeError, StateError
from fsdp2._core.base.events import IDLE
from fsdp2._core.base.names import class_name
from fsdp2._core.base.warn import warn
from fsdp2._core.comm.comms import CustomComm
from fsdp2._core.comm.device_streams import streams_for
from fsdp2._core.comm.process_mesh import carrying, operation
from fsdp2._core.comm.symmetric import SymmetricMemoryAllGather
from fsdp2._core.comm.wire import DefaultAllGather, DefaultReduceScatter
from fsdp2._core.engine.between_steps import units_below
from fsdp2._core.engine.memory_budget import overlap_for
from fsdp2._core.engine.tree import Unit, unit_of
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.param import check_unused


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
    if not check_flag(class_name(module), "recurse", recurse):
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
        hint = "Pass the sharded model."
        if any(isinstance(one, torch_modules.FSDPModule) for one in module.modules()):
            hint = "torch's own was: use fsdp2.fully_shard, or call fsdp2.replace_torch() first."
        raise ConfigError(
            "FS503",
            f"{who}: fully_shard was applied to nothing in this {class_name(module)}. {hint}",
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
        """Say whether the next backward is the last one before the optimizer step.

        Call it on the root: it sets every unit below, too. After a backward that is not the last,
        reductions may still be in flight, and ``grad`` may be incomplete.

        Raises:
            ConfigError: not a bool.
        """
        configure(self, True, is_last_backward=_flag("set_is_last_backward", is_last_backward))

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Say whether backward reduces gradients.

        While it does not, gradients add up on the whole parameters: in ``grad`` of the unsharded
        parameters, in the reduce dtype. That takes the memory of the whole unit's gradients. The
        call sets ``set_requires_all_reduce`` to the same value. A unit with ``shard="gradients"``
        keeps no whole gradients: its backwards reduce over the shard axis all the same, and only an
        all-reduce waits.

        Args:
            requires_gradient_sync: False lets gradients wait for a later backward.
            recurse: for the units below this one too.

        Raises:
            ConfigError: not a bool.
        """
        flag = _flag("set_requires_gradient_sync", requires_gradient_sync)
        for unit in units_in(self, recurse):
            unit.configure(**unit.settings.sharding.sync(flag))

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Say whether backward all-reduces gradients over the replicate axis.

        While it does not, backward reduces over the shard axis only. The reduced shards add up, and
        ``grad`` is not set. Without a replicate axis it changes nothing.

        Args:
            requires_all_reduce: False puts the all-reduce off.
            recurse: for the units below this one too.

        Raises:
            ConfigError: not a bool.
        """
        flag = _flag("set_requires_all_reduce", requires_all_reduce)
        configure(self, recurse, all_reduce_grads=flag)

    # When parameters are whole.

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether parameters are freed after forward, from the next forward on.

        After False, what a forward without gradients gathered also serves the next forward without
        gradients, unless the shards were written to since. Writes that count no version
        (``p.data.mul_``, NumPy) are not noticed there: call ``reshard()`` after them. The argument
        of ``fully_shard`` keeps parameters for their backward only.

        Args:
            reshard_after_forward: True or False. A number of ranks can be given to ``fully_shard``
                only; a call of this method replaces it.
            recurse: for the units below this one too.

        Raises:
            ConfigError: not a bool; or True for a unit whose parameters stay whole (``shard``).
        """
        flag = _flag("set_reshard_after_forward", reshard_after_forward)
        units = units_in(self, recurse)
        whole = next((unit for unit in units if unit.settings.sharding.keeps_whole), None)
        if flag and whole is not None:
            raise ConfigError(
                "FS234",
                f"set_reshard_after_forward: {whole.fqn or '<root>'} has "
                f"{whole.settings.sharding.name}, so its parameters stay whole. Leave the "
                'call out, or shard it with shard="parameters".',
            )
        configure(self, recurse, reshard_after_forward=flag, keeps_in_evaluation=not flag)
        for group in groups_in(self, recurse):
            if group.data.layers is None:
                group.reshard_to(None)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Say whether parameters are freed after backward.

        False keeps the memory of whole parameters, while shards are registered. The next forward
        then gathers nothing, unless the shards were written to since, as by an optimizer step.
        Writes that count no version (``p.data.mul_``, NumPy) are not noticed: call ``reshard()``
        after them.

        Args:
            reshard_after_backward: True or False.
            recurse: for the units below this one too.

        Raises:
            ConfigError: not a bool.
        """
        flag = _flag("set_reshard_after_backward", reshard_after_backward)
        configure(self, recurse, reshard_after_backward=flag)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Say whether the memory of whole parameters stays when they are resharded.

        The shards are registered as ever, and the next gather fills the same memory. So parameters
        keep their ``data_ptr``, as captured CUDA graphs need. That memory is never free.

        Args:
            keep: False frees the memory at once, or at the end of a step that uses it.
            recurse: for the units below this one too.

        Raises:
            ConfigError: not a bool.

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
            memory: one of

                - ``"low"``: no unit is gathered ahead, and each reduction is waited for at once;
                - ``"balanced"``, as without a call: one unit ahead, and one reduction in flight;
                - ``"fast"``: two units ahead, and three reductions in flight. The large parts of a
                  root stay whole from forward to backward;
                - a number of bytes: as much overlap as fits. Unsharded parameters, their gradients
                  and the buffers of collectives together never take more, as long as a step is like
                  the one before it.

                On a device, with ``"low"`` or a number, the host waits for the device at the end of
                each backward.

        With the three words at most 1, 2 or 3 units below the root are whole or being gathered at a
        time. What you give to ``set_modules_to_forward_prefetch``,
        ``set_modules_to_backward_prefetch`` or ``set_reduce_scatter_max_input_buffers`` counts more
        than this. torch has no such method.

        Raises:
            ConfigError: another word or type; or fewer bytes than a step needs without any overlap.
        """
        configure(self, True, overlap=overlap_for(memory, units_in(self, True)))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Say whether backward gathers this unit's parameters (not those of units below it).

        False saves the all-gather of a unit whose parameters backward does not read, such as an
        embedding. If backward does read one, its memory is gone and the result is undefined.

        Raises:
            ConfigError: not a bool.
        """
        flag = _flag("set_unshard_in_backward", unshard_in_backward)
        configure(self, False, unshard_in_backward=flag)

    def set_modules_to_forward_prefetch(self, modules: Iterable[torch_modules.FSDPModule]) -> None:
        """Gather these units when the forward of this unit begins.

        Without a call they are units that came next in the step before; ``set_memory`` says how
        many. An empty list gathers nothing ahead.

        Args:
            modules: sharded modules, in the order in which they are gathered.

        Raises:
            ConfigError: not a list, or something in it was not given to ``fully_shard``.
        """
        units = _units_of("set_modules_to_forward_prefetch", modules)
        configure(self, False, forward_prefetch=units)

    def set_modules_to_backward_prefetch(self, modules: Iterable[torch_modules.FSDPModule]) -> None:
        """Gather these units when the backward of this unit begins.

        Without a call they are the units whose forwards ran before this one's; ``set_memory`` says
        how many. An empty list gathers nothing ahead.

        Args:
            modules: sharded modules, in the order in which they are gathered.

        Raises:
            ConfigError: not a list, or something in it was not given to ``fully_shard``.
        """
        units = _units_of("set_modules_to_backward_prefetch", modules)
        configure(self, False, backward_prefetch=units)

    # What a gradient is.

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Divide this unit's summed gradients (not those of units below it) by ``factor``.

        The sum is over all data-parallel ranks, of the shard and the replicate axis. Without a
        factor, or after None, it is divided by their number. ``set_gradient_reduction`` sets a
        whole tree.

        Raises:
            ConfigError: ``factor`` is neither None nor a finite number above 0.
        """
        if factor is not None:
            who, expected = "set_gradient_divide_factor", "a finite number above 0 or None"
            factor = _factor(who, "factor", factor, expected)
        configure(self, False, divide_by=factor)

    def set_reduce_scatter_divide_factor(self, factor: float | None) -> None:
        """Do what ``set_gradient_divide_factor`` does. Deprecated: a ``FutureWarning`` says so.

        Raises:
            ConfigError: ``factor`` is neither None nor a finite number above 0.
        """
        warn(
            "FS506",
            "set_reduce_scatter_divide_factor is deprecated: use set_gradient_divide_factor",
            FutureWarning,
        )
        self.set_gradient_divide_factor(factor)

    def set_gradient_reduction(self, reduction: str | float, *, recurse: bool = True) -> None:
        """Say how the gradients of all data-parallel ranks become one, for the whole tree.

        Args:
            reduction: ``"mean"`` over ranks (the default of a unit), ``"sum"``, or a number that
                the sum is divided by. It means the same with and without a replicate axis, and
                when gradients accumulate over several backwards.
            recurse: for the units below this one too.

        torch has no such method.

        Raises:
            ConfigError: another word, or a number that is not finite and above 0.
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
        """Say whether this unit's collectives only sum. Scaling is then a kernel of its own.

        Without it, a mean is left to the backend where the backend has one (``ReduceOp.AVG``).

        Raises:
            ConfigError: not a bool.
        """
        flag = check_flag("set_force_sum_reduction_for_comms", "enable", enable)
        configure(self, False, only_sums=flag)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Say whether a parameter that no rank used gets a gradient of zeros instead of None.

        Ranks may use different parameters of a unit in any case: every rank reduces all of them.

        Args:
            reduce_scatter_unused_params: True for zeros.
            recurse: for the units below this one too.

        Raises:
            ConfigError: not a bool; or a parameter has ``grad_dtype=None`` in a unit without a
                ``reduce_dtype``: zeros would have no dtype. (If ``grad_dtype`` is set later, the
                first forward raises it.)
        """
        flag = _flag("set_reduce_scatter_unused_params", reduce_scatter_unused_params)
        for group in groups_in(self, recurse):
            changed = dataclasses.replace(group.settings, reduce_unused=flag)
            check_unused(group.params, changed, group.policy)
        configure(self, recurse, reduce_unused=flag)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None] | None, *, stream: torch.Stream | None = None
    ) -> None:
        """Call ``hook(reduced)`` on each flat reduced gradient of this unit, before it is stored.

        Args:
            hook: changes ``reduced`` in place. ``reduced`` is 1-D, in the reduce dtype: this rank's
                part of the reduce-scatter, after the all-reduce over the replicate axis if there is
                one. A unit whose parameters lie on several meshes calls the hook once for each.
                While a hook is set, a parameter that no rank used gets a gradient and not None.
                ``None`` removes the hook.
            stream: the device stream to run the hook in, of any class (``torch.Stream``,
                ``torch.cuda.Stream``). Work that the hook puts there may use ``reduced`` until it
                is done: the memory is held for so long. On a CPU the hook runs at once.

        Raises:
            ConfigError: neither a function nor None; not a stream; or a stream together with a
                replicate axis: the hook then runs in the stream of the all-reduce.
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
                "set_all_reduce_hook: found a stream together with a replicate axis. Leave out the "
                "stream: the hook runs in that of the all-reduce.",
            )
        for group in groups:
            group.reducer.hook, group.reducer.hook_stream = hook, stream

    # How it is sent.

    def set_custom_all_gather(self, comm: CustomComm) -> None:
        """Gather this unit's parameters by ``comm``, called as ``AllGather.__call__`` says.

        A unit whose parameters lie on several meshes calls it for each, with that mesh's group.

        Args:
            comm: an ``AllGather``, or any object with ``allocate`` that can be called alike.

        Raises:
            ConfigError: ``comm`` is a class, cannot be called, or has no ``allocate``.
        """
        check_comm("set_custom_all_gather", comm)
        refuse_dealt("set_custom_all_gather", groups_in(self))
        for group in groups_in(self):
            group.wire.gather = comm
            group.rewire()

    def set_custom_reduce_scatter(self, comm: CustomComm) -> None:
        """Reduce this unit's gradients by ``comm``, called as ``ReduceScatter.__call__`` says.

        A unit whose parameters lie on several meshes calls it for each, with that mesh's group.

        Args:
            comm: a ``ReduceScatter``, or any object with ``allocate`` that can be called alike.

        Raises:
            ConfigError: ``comm`` is a class, cannot be called, or has no ``allocate``; or
                ``set_gradient_wire_dtype`` was given a dtype.
        """
        check_comm("set_custom_reduce_scatter", comm)
        groups = groups_in(self)
        refuse_dealt("set_custom_reduce_scatter", groups)
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
            ConfigError: not a bool; or a custom collective is set, which allocates for itself.
        """
        check_flag("set_allocate_memory_from_process_group_for_comm", "enable", enable)
        groups = groups_in(self)
        _refuse_custom("set_allocate_memory_from_process_group_for_comm", groups)
        for group in groups:
            wire = group.wire
            wire.gather = DefaultAllGather()
            wire.scatter = DefaultReduceScatter()
            if enable:
                wire.use_group_memory(group.data.shard.pg)
            group.rewire()

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Gather this unit's parameters through symmetric memory: memory that ranks read directly.

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
        """Say whether gradients are reduced over a process group of their own.

        Then an all-gather and a reduce-scatter can be on the wire at the same time. Collective:
        every rank calls it. Units over the same ranks share one more process group.

        Args:
            enable: False reduces over the process group of the all-gathers again.
            recurse: for the units below this one too.

        Raises:
            ConfigError: not a bool.
        """
        check_flag("set_separate_reduce_scatter_group", "enable", enable)
        groups = groups_in(self, recurse)
        if enable:
            refuse_layers("set_separate_reduce_scatter_group", groups)
        with operation("set_separate_reduce_scatter_group"), carrying():
            for group in groups:
                group.reducer.planner.separate(enable, group.wire)

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Say how many reductions may hold their input buffers at a time.

        This counts more than ``set_memory``. One more reduction waits for the oldest before it
        packs its gradients.

        Args:
            max_input_buffers: an int of at least 1.
            recurse: for the units below this one too.

        Raises:
            ConfigError: ``max_input_buffers`` is not an int of at least 1.
        """
        count = check_count(
            "set_reduce_scatter_max_input_buffers", "max_input_buffers", max_input_buffers
        )
        configure(self, recurse, input_buffers=count)

    def set_copy_free_min_bytes(self, min_bytes: int | None, *, recurse: bool = True) -> None:
        """Say how large a parameter must be to travel in collectives of its own.

        Such a parameter is gathered from its shard straight into the memory where it is used. If
        the ranks divide its rows evenly, it is also reduced straight from its gradient. Smaller
        parameters share one collective, which costs copies. Every rank sets the same.

        Args:
            min_bytes: bytes of the whole parameter in the dtype that it is computed in. ``None``:
                all parameters of a unit share one collective, as they do with custom collectives.
                The default is 131072 on a CPU. On a device it is 524288 for each rank on up to 64
                ranks, 33554432 on up to 512, and 65536 for each rank on more; and then only where a
                rank's part is a multiple of 128 bytes, which NCCL moves faster.
            recurse: for the units below this one too.

        torch has no such method.

        Raises:
            ConfigError: ``min_bytes`` is neither None nor an int of at least 1.
        """
        if min_bytes is not None:
            min_bytes = check_count("set_copy_free_min_bytes", "min_bytes", min_bytes)
        for group in groups_in(self, recurse):
            group.send_zero_copy(None if min_bytes is None else ZeroCopy(min_bytes))

    def set_gradient_wire_dtype(self, dtype: torch.dtype | None, *, recurse: bool = True) -> None:
        """Say in which dtype gradients travel in the reduce-scatter. Their sum keeps its dtype.

        The sum is made in the reduce dtype from parts in ``dtype``, by an all-to-all and a local
        sum, on every backend. So bf16 sends half the bytes of fp32. Each rank's part is rounded
        once, and the sum is not. The all-reduce over a replicate axis stays in the reduce dtype. So
        does a unit with complex gradients.

        Args:
            dtype: a floating dtype; ``None``, the default, is the reduce dtype.
            recurse: for the units below this one too.

        torch has no such method.

        Raises:
            ConfigError: ``dtype`` is no floating dtype, or a custom reduce-scatter is set.
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
        """Let the all-gathers of the next forward wait for ``event`` alone.

        Without it they wait for all work that was given to the compute stream before.

        Args:
            event: recorded after the optimizer step, anew in each step. ``None`` takes an earlier
                one back. On a CPU the host waits: ``event`` may be anything with a method
                ``synchronize``; ``torch.cpu.current_stream().record_event()`` returns None.

        Raises:
            ConfigError: ``event`` lacks ``synchronize``, or on a device ``wait``.
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
    """Let several roots use the same streams, as the stages of a pipeline on one rank should.

    On a CPU there are no streams, and the call has no effect.

    Args:
        modules: roots that were given to ``fully_shard``.

    Raises:
        ConfigError: something in the list was not given to ``fully_shard``.

    Source: the meaning of the same function in ``torch.distributed.fsdp``.
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


def refuse_dealt(who: str, groups: Iterable[ParamGroup]) -> None:
    """Raise ConfigError if a collective of the user's would have to send uneven pieces."""
    for group in groups:
        for param in group.params:
            deal = param.placement.layout.deal
            if deal is not None:
                raise ConfigError(
                    "FS505",
                    f"{who}: {param.fqn} {deal.asked_by}, so ranks send different amounts, which "
                    "collectives of this interface do not. Leave it out for this unit, or let "
                    "shard_placement_fn return Shard(0).",
                )


def refuse_layers(who: str, groups: Iterable[ParamGroup]) -> None:
    """Raise ConfigError for a group whose gradients are scattered over two axes."""
    for group in groups:
        if group.data.layers is not None:
            raise ConfigError(
                "FS505",
                f"{who}: {group.fqn or '<root>'} has {group.settings.sharding.name}, so its "
                "gradients are scattered twice, over two process groups, which this does not "
                "reach. Use one or the other.",
            )


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


# ``no_sync``: backwards that accumulate instead of reducing, inside a context.


@contextmanager
def no_sync(module: nn.Module) -> Iterator[None]:
    """Let backwards inside the context add up gradients without communication.

    The next backward outside of it that goes through the same root reduces the sum. A unit with no
    unit above it is a root; a ``module`` that contains several has one such backward to wait for in
    each. An optimizer's step before that goes on without these gradients, and warns. What counts is
    where ``backward()`` is called, not the forward. Gradients add up on whole parameters, in the
    reduce dtype: on each rank they take the memory of the gradients of the whole model. Not so in a
    unit with ``shard="gradients"``: its backwards reduce over the shard axis all the same, and add
    up there; only the all-reduce over a replicate axis is left to the last. Inside the
    context, ``set_requires_gradient_sync`` of every unit in ``module`` is False. Afterwards it is
    what it was before. Contexts may be nested.

    Args:
        module: the model, or a part of it. It need not be sharded itself.

    Raises:
        ConfigError: there is no unit in ``module``.
        StateError: entered inside of a forward or a backward of ``module``. Nothing was changed.

    Source: the method of the same name of torch's ``FullyShardedDataParallel``.
    """
    units = sharded_units("no_sync", "module", module)
    refuse_during_step(
        "no_sync",
        units,
        "Some units may have reduced already: enter it before the forward, or between forward and "
        "backward.",
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

"""``FSDPModule``, the class of sharded modules: methods (except setters), copying and pickling.

Does not depend on how ``fully_shard`` collects parameters.

[Note: recognised as torch's]
Torch's pipelining and other software check ``isinstance(module,
torch.distributed.fsdp.FSDPModule)``, so torch's class is our *last* base. The MRO of a sharded
``Net`` is ``FSDPNet, FSDPModule, Net, ..., nn.Module, ControlSurface, torch's FSDPModule``.
Attributes that only torch's class has are hidden: reading one raises ``AttributeError``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch.nn as nn

from fsdp2._core.api.inspect import tied_lines
from fsdp2._core.api.settings import ControlSurface, own_unit, units_in
from fsdp2._core.base import torch_autograd, torch_modules
from fsdp2._core.base.errors import ConfigError, StateError, check_flag, check_mapping
from fsdp2._core.base.events import IDLE
from fsdp2._core.base.pending_copies import wait_for_copies
from fsdp2._core.comm.wire import PendingReduction
from fsdp2._core.engine.between_steps import (
    finish,
    know,
    refuse_whole,
    register_torch_state,
    reshard_if_idle,
    torch_state,
    unless_another_thread_steps,
)
from fsdp2._core.engine.step import call_module
from fsdp2._core.engine.tree import UNIT_ATTRIBUTE, Runtime, Unit, unit_of
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.reduce import may_hold
from fsdp2._core.params.registration import SHARDED


class GradientReductionHandle(torch_modules.GradientReductionHandle):  # type: ignore[misc]  # Any
    """Handle returned by ``finalize_backward(async_op=True)``, used to wait for the reductions."""

    def __init__(self, pending: PendingReduction | None) -> None:
        self._pending = pending

    def wait(self) -> None:
        """Wait until gradients are reduced, then free the buffers. Idempotent.

        Raises:
            StateError: ``reset_iter_state()`` has discarded the gradients.
        """
        pending = self._pending
        if pending is None:
            return
        streams = pending.tree.context.streams
        if streams.pending is not pending:
            raise StateError(
                "FS311",
                "GradientReductionHandle.wait: reset_iter_state() discarded the reduction of this "
                "handle. Run the backward again.",
            )
        self._pending = streams.pending = None
        pending.tree.end_reductions()


def _check_finalize(runtime: Runtime) -> None:
    who = "finalize_backward"
    runtime.refuse_pending(who)
    if not runtime.root.settings.manual_finalization:
        raise StateError(
            "FS310",
            f"{who}: backward is finalized automatically for this model. Call "
            "set_manual_backward_finalization(True) on the root before the forward.",
        )
    if torch_autograd.graph_task_id() != -1:
        raise StateError(
            "FS301", f"{who}: called during a backward. Call it after backward has returned."
        )
    for unit in runtime.units:
        for group in unit.own_groups:
            is_split = group.data.summed.size > 1 and not group.settings.all_reduce_grads
            is_partial = group.reducer.unreduced.partial is not None
            if is_split or (is_partial and not group.settings.sharding.scatters_always):
                raise StateError(
                    "FS310",
                    f"{who}: {group.fqn or '<root>'} is configured not to reduce gradients over "
                    "the replicate axis, so the backward cannot be finalized manually. Call "
                    "set_requires_all_reduce(True), or use automatic finalization.",
                )


COMPOSABLE_NAME = "fully_shard"

_classes: dict[type, type] = {}


def sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class of sharded ``cls`` instances: a subclass of ``FSDPModule`` and ``cls``."""
    if cls not in _classes:
        namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__, "_fsdp2_original": cls}
        try:
            _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), namespace)
        except TypeError as error:
            raise ConfigError(
                "FS204",
                f"fully_shard: {cls.__name__} cannot be subclassed ({error}), but sharding "
                "requires a subclass. Give default values to the arguments of its "
                "__init_subclass__ or metaclass.",
            ) from error
    return _classes[cls]


def rebuild_module(cls: type[nn.Module]) -> nn.Module:
    """Create an empty sharded instance; ``copy`` or ``pickle`` then restores its state."""
    return object.__new__(sharded_class(cls))


def register_names(module: nn.Module, unit: Unit) -> None:
    """Register a module for composable APIs and torch's ``fully_shard.state``."""
    torch_modules.register_composable_name(module, COMPOSABLE_NAME)
    register_torch_state(module, unit)


class FSDPModule(nn.Module, ControlSurface, torch_modules.FSDPModule):
    """Base class that ``fully_shard`` adds to a module's class; use it for ``isinstance`` checks.

    ``isinstance(module, torch.distributed.fsdp.FSDPModule)`` is also true. Do not instantiate it.
    Its methods are documented on a separate page.

    Source: the class of the same name in ``torch.distributed.fsdp``, torch 2.15.
    """

    _fsdp2_original: ClassVar[type[nn.Module]] = nn.Module

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Create an unsharded instance: slicing a sharded ``Sequential`` calls this. Without
        arguments, create an empty sharded instance, which a user's ``__deepcopy__`` fills."""
        if not args and not kwargs:
            return object.__new__(cls)
        return cls._fsdp2_original(*args, **kwargs)

    __call__ = call_module

    def _call_original(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``__call__`` of the original class; compilers may trace this method."""
        return super().__call__(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reshard_if_idle(own_unit(self))
        reduced: Any = super().__reduce_ex__(protocol)
        state = dict(reduced[2])
        torch_modules.forget_composable_names(state)
        cls, original = type(self), self._fsdp2_original
        if cls is _classes.get(original):
            return (rebuild_module, (original,), state, *reduced[3:])
        return (*reduced[:2], state, *reduced[3:])  # the user assigned a subclass to __class__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's own
        unit = own_unit(self)
        register_names(self, unit)
        know(unit)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        unit = own_unit(self)
        reshard_if_idle(unit)
        params = [param for group in unit.own_groups for param in group.params]
        for param in params:
            param.see_grad_dtype()  # the dtype is lost if the parameter is replaced
        kept = {param: grad for param in params if (grad := param.set_gradient_aside()) is not None}
        try:
            return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's own
        finally:
            for param in params:
                param.see_grad_dtype()
            for param, grad in kept.items():
                param.sharded.grad = grad.to(param.sharded.device)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the shards by name. Takes the same arguments as ``nn.Module.state_dict``.

        If another thread starts a step during the call, the step waits until the call returns.

        Raises:
            StateError: another thread is inside a step, or has left parameters unsharded.
        """
        unit = self.__dict__.get(UNIT_ATTRIBUTE)
        with unless_another_thread_steps(unit) if unit is not None else contextlib.nullcontext():
            return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        """Load shards that ``state_dict()`` returned.

        Arguments (``strict``, ``assign``) and result are those of ``nn.Module.load_state_dict``.
        With ``assign=True``, the loaded tensors become the parameters. Load full tensors with
        ``fsdp2.checkpoint.load_full_state``.

        Raises:
            ConfigError: ``state_dict`` is not a dict, or has full tensors for sharded parameters.
                Nothing was changed.
        """
        check_mapping("load_state_dict", "state_dict", state_dict)
        is_assigned = kwargs.get("assign", args[1] if len(args) > 1 else False)
        wait_for_copies()
        if not is_assigned:
            for unit in units_in(self, recurse=True):
                reshard_if_idle(unit)
            params = self.named_parameters(remove_duplicate=False)
            refuse_whole(params, state_dict, "Nothing was changed.")
        return super().load_state_dict(state_dict, *args, **kwargs)

    def train(self, mode: bool = True) -> Any:
        """Set training or evaluation mode, as ``nn.Module.train`` does; return the module.

        Units whose policy has ``full_precision_in_eval`` switch their dtypes.

        Raises:
            ConfigError: ``mode`` is not a bool.
            StateError: the switch would change the dtype of parameters that a step is using.
        """
        check_flag("train", "mode", mode)
        for unit in units_in(self, recurse=True):
            _check_mode_change(unit, mode)
        result = super().train(mode)
        own = unit_of(self)
        if own is not None:
            _follow_mode(own)
        return result

    def extra_repr(self) -> str:
        """Return the original class's text, followed by one line for each tied parameter."""
        return "\n".join(filter(None, (super().extra_repr(), *tied_lines(self))))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of both sharded and unsharded parameters.

        After a backward without gradient sync, unsharded parameters have gradients, which the
        optimizer's ``zero_grad`` does not clear.

        Args:
            set_to_none: if True, set gradients to None; if False, fill them with zeros.

        Raises:
            ConfigError: ``set_to_none`` is not a bool.
        """
        check_flag("zero_grad", "set_to_none", set_to_none)
        super().zero_grad(set_to_none)
        own = own_unit(self)
        known = own.runtime.units if own.runtime is not None and own.is_root else None
        for unit in units_in(self, recurse=True) if known is None else known:
            for group in unit.own_groups:
                _zero_grad(group, set_to_none)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters (not those of units below it).

        Unsharded parameters stay registered until ``reshard()`` is called, until the unit's next
        forward ends and frees them, or until a backward ends.

        Args:
            async_op: return immediately. The parameters are unsharded after ``wait()`` on the
                returned handle, or when the unit's forward begins.

        Returns:
            An ``UnshardHandle`` if ``async_op``, else None.

        Raises:
            ConfigError: ``async_op`` is not a bool.
            StateError: called inside ``summon_full_params``.
        """
        check_flag("unshard", "async_op", async_op)
        unit = own_unit(self)
        if unit.summoned_on:
            raise StateError(
                "FS306",
                f"{unit.fqn or '<root>'}: unshard() was called inside summon_full_params, where "
                "parameters are already unsharded. Exit the context first.",
            )
        if unit.runtime is not None:
            unit.runtime.recover_if_failed()
            if unit.runtime.context.phase is IDLE:
                unit.runtime.staying.begin_forward()
        unit.lanes.order_after_compute("gather")
        groups = unit.own_groups
        for group in groups:
            group.context.streams = unit.lanes
            group.inspect()
        for group in groups:
            group.unshard()
            group.registration.is_held = True
        if async_op:
            return UnshardHandle(groups)
        for group in groups:
            group.wait_for_unshard()
        return None

    def reshard(self) -> None:
        """Free this unit's unsharded parameters and register its shards. Does not communicate."""
        for group in own_unit(self).own_groups:
            group.reshard()
            group.context.streams.finish_host_reads()

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Finalize the backwards of this tree in manual mode: reduce pending gradients and reshard.

        Call it on the root, on every rank, after the last backward of a step and before gradients
        are read or cleared. To reduce once for several backwards, disable gradient sync for them
        (``set_requires_gradient_sync``), and enable it before this call. No-op before a forward.

        Args:
            async_op: return once the reductions are issued. Gradients are available after
                ``wait()`` on the returned handle. Until then, do not begin a forward of this model
                or of a model that shares its streams.

        Returns:
            A ``GradientReductionHandle`` if ``async_op``, else None.

        Raises:
            ConfigError: ``async_op`` is not a bool.
            StateError: the module is not the root; the mode is not manual; a backward is running;
                the handle of the previous call has not been waited on; all-reduces over a replicate
                axis are disabled (``set_requires_all_reduce``); or a unit has no gradients after a
                pipeline step with split backwards. Nothing was changed.

        Source: the method of the same name in ``torch.distributed.fsdp``, torch 2.15.
        """
        check_flag("finalize_backward", "async_op", async_op)
        runtime = _root_runtime("finalize_backward", own_unit(self))
        if runtime is None:
            return GradientReductionHandle(None) if async_op else None
        _check_finalize(runtime)
        finish(runtime)
        if not async_op:
            runtime.end_reductions()
            return None
        runtime.context.streams.pending = pending = PendingReduction(runtime)
        return GradientReductionHandle(pending)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether backwards of this tree are finalized only by ``finalize_backward``.

        Call it on the root, before the forward.

        Args:
            enabled: True for manual mode, False for automatic finalization.

        Raises:
            ConfigError: ``enabled`` is not a bool.
            StateError: the module is not the root, or a backward is running or not finalized.

        Source: the method of the same name in ``torch.distributed.fsdp``, torch 2.15.
        """
        who, unit = "set_manual_backward_finalization", own_unit(self)
        check_flag(who, "enabled", enabled)
        runtime = _root_runtime(who, unit)
        is_changed = enabled is not unit.settings.manual_finalization
        if is_changed and torch_autograd.graph_task_id() != -1:
            text = f"{who}: called during a backward. Call it before the forward."
            raise StateError("FS301", text)
        began = None if runtime is None else runtime.backward.began_manual
        if began is not None and enabled is not began:
            raise StateError(
                "FS310",
                f"{who}: found a backward that began in the other mode and has not ended. Call "
                "finalize_backward() first, or reset_iter_state() to discard it.",
            )
        unit.configure(manual_finalization=enabled)

    def reset_iter_state(self) -> None:
        """Discard all gradients of the tree, and the state of an unfinished step.

        Call it on any unit of the tree. No-op before the first forward. After an exception, the
        next forward cleans up automatically but keeps reduced gradients. This call also clears
        reduced gradients, including those of earlier backwards. It cancels a pending
        ``finalize_backward(async_op=True)``: ``wait()`` on the returned handle then raises.

        Raises:
            StateError: a model that shares the streams has an unfinished reduction.

        Source: the method of the same name in ``torch.distributed.fsdp``, torch 2.15.
        """
        unit = own_unit(self)
        if unit.runtime is not None:
            unit.runtime.recover()
            for known in unit.runtime.units:
                for group in known.own_groups:
                    for param in group.params:
                        param.sharded.grad = None

    def _get_fsdp_state(self) -> Any:
        """Return the state for torch's pipelining, which calls this method by name."""
        own_unit(self)  # raises on an empty instance
        return torch_state(self)

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """No-op: torch's method selects the stream in which gathers allocate; here it is fixed."""
        check_flag("_set_unshard_async_op", "async_op", async_op)


def _root_runtime(who: str, unit: Unit) -> Runtime | None:
    runtime = unit.runtime
    if runtime is not None and runtime.root is not unit:
        raise StateError(
            "FS303",
            f"{who}: called on {unit.fqn}, which is not the root. Call it on the module whose "
            "forward you run.",
        )
    return runtime


torch_modules.hide_torchs_own(FSDPModule, torch_modules.FSDPModule)


class UnshardHandle(torch_modules.UnshardHandle):
    """Handle returned by ``unshard(async_op=True)``, used to wait for the all-gather."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups: Sequence[ParamGroup] = groups

    def wait(self) -> None:
        """Wait until the parameters are unsharded and registered.

        No-op if called again, or after the unit's forward or its ``reshard()``.
        """
        groups, self._groups = self._groups, ()
        for group in groups:
            if group.registration.is_held:
                group.wait_for_unshard()


def _zero_grad(group: ParamGroup, set_to_none: bool) -> None:
    """Clear gradients of shards that are not registered, and gradients that are not reduced yet."""
    unreduced = group.reducer.unreduced
    if unreduced.is_waiting or unreduced.is_owed or id(group.reducer) in may_hold:
        group.reducer.discard()
    if group.state is SHARDED:
        return
    for param in group.params:
        if param.sharded.grad is not None:
            if set_to_none:
                param.sharded.grad = None
            else:
                param.sharded.grad.zero_()


def _check_mode_change(unit: Unit, mode: bool) -> None:
    """Raise StateError if the mode change would change dtypes during a step."""
    if not unit.precision.chosen.full_precision_in_eval or unit.runtime is None:
        return
    unit.runtime.recover_if_failed()
    phase = unit.runtime.context.phase
    if phase is not IDLE and any(module.training is not mode for module in unit.modules):
        raise StateError(
            "FS302",
            f"{unit.fqn or '<root>'}: train({mode}) was called during a {phase}. The unit's policy "
            "has full_precision_in_eval, so the call would change the dtype of parameters in use. "
            "Call train() between steps.",
        )


def _follow_mode(unit: Unit) -> None:
    """Apply the policy for the unit's mode; invalidate graphs recorded with the old policy."""
    if not unit.precision.follow(unit.modules):
        return
    unit.calls.open = 0
    if unit.owner is not None:
        unit.owner.precision.outdate()
        unit.owner.calls.open = 0
    unit.precision.choose_input_dtype(unit.is_root)
    for group in unit.own_groups:
        group.compute_by(unit.precision.policy)

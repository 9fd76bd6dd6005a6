"""What may be done to a module's state only between steps.

Owns the check that no step is under way, after which sharded parameters are registered, and the
hooks by which ``state_dict`` and ``load_state_dict`` of a unit's modules ask for that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from fsdp2._core.base import torch_autograd
from fsdp2._core.base.arguments import check_module
from fsdp2._core.base.errors import ConfigError, StateError
from fsdp2._core.base.events import IDLE
from fsdp2._core.base.names import clean
from fsdp2._core.base.pending_copies import wait_for_copies
from fsdp2._core.engine.tree import Runtime, Unit, unit_of
from fsdp2._core.params.registration import GATHERING, SHARDED


def units_below(module: nn.Module) -> list[Unit]:
    """Return the units of a module's tree, each once; the module need not be one."""
    found = (unit_of(part) for part in module.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def refuse_other_thread(module: object, what: str) -> None:
    """Check that what ranks do together is begun by the thread of the steps, if there are several.

    It is the same on all ranks, so nothing is told. See [Note: threads] in ``threads``.

    Raises:
        StateError: another thread took the last step, and still lives.
    """
    if threading.active_count() == 1 or not isinstance(module, nn.Module):
        return
    for unit in units_below(module):
        ranks = [group.data.shard.size * group.data.replicate.size for group in unit.groups]
        has_other = unit.runtime is not None and unit.runtime.thread.is_another
        if has_other and max(ranks, default=1) > 1:
            raise StateError(
                "FS301",
                f"{what}: called in another thread than the one that runs steps of "
                f"{unit.fqn or '<root>'}. All ranks take part in both, each in the same order. "
                "Call it in that thread, between steps.",
            )


def require_idle(module: object, what: str) -> list[Unit]:
    """Check that no step is under way, and register sharded parameters; return the units.

    Raises:
        ConfigError: not a module.
        StateError: inside a forward or a backward.
    """
    wait_for_copies()  # whoever calls may write
    units = units_below(check_module(what, "the model", module))
    refuse_other_thread(module, what)
    for unit in units:
        runtime = unit.runtime
        if runtime is None:
            continue
        with unless_another_thread_steps(unit):
            runtime.recover_if_failed()
        if runtime.context.phase is not IDLE or torch_autograd.graph_task_id() != -1:
            phase = "backward" if runtime.context.phase is IDLE else runtime.context.phase
            raise StateError(
                "FS301",
                f"{what}: {unit.fqn or '<root>'} is inside a {phase}, where "
                "parameters are gathered and freed. Call it between steps.",
            )
    for unit in units:
        reshard_if_idle(unit)
        adopt_if_idle(unit)
    return units


def reshard_if_idle(unit: Unit) -> None:
    """Register sharded parameters, unless a step is under way."""
    with unless_another_thread_steps(unit) as is_another:
        if is_another:  # to free what it keeps would change its collectives on this rank alone
            _require_sharded(unit)
            return
        if unit.runtime is not None:
            with contextlib.suppress(StateError):  # ranks that diverged can still save theirs
                unit.runtime.recover_if_failed()
        if unit.runtime is None or unit.runtime.context.phase is IDLE:
            for group in unit.own_groups:
                if group.state is not GATHERING or unit.runtime is None or not unit.runtime.failed:
                    group.reshard()
                    group.context.streams.finish_host_reads()


@contextlib.contextmanager
def unless_another_thread_steps(unit: Unit) -> Iterator[bool]:
    """Around what looks at parameters between steps. See [Note: threads] in ``threads``.

    It gives True if steps run in another thread.

    Raises:
        StateError: another thread is inside of a forward or a backward.
    """
    runtime = unit.runtime
    if runtime is None:
        yield False
        return
    with runtime.thread.lock:
        if runtime.is_in_other_thread:
            raise StateError(
                "FS301",
                f"{unit.fqn or '<root>'}: another thread is inside a {runtime.context.phase} "
                "of it, where parameters are gathered and freed. Read, copy or save its state "
                "in the thread that trains, between steps.",
            )
        yield runtime.thread.is_another


def _require_sharded(unit: Unit) -> None:
    if any(group.state is not SHARDED for group in unit.own_groups):
        raise StateError(
            "FS301",
            f"{unit.fqn or '<root>'}: another thread has run a forward, and keeps parameters "
            "whole for its backward or for the next forward. Read, copy or save its state in "
            "that thread, between steps.",
        )


def adopt_if_idle(unit: Unit) -> None:
    """Take over what ``load_state_dict(assign=True)`` registered.

    At once, so that an optimizer made next holds shards, before the first forward too. A model
    that leaves the meta device in several loads waits for the last of them.
    """
    if unit.summoned_on:
        return
    if unit.runtime is None or unit.runtime.context.phase is IDLE:
        for group in unit.own_groups:
            if not any(param.is_on_meta for param in group.params):
                group.inspect()


class StateHooks:
    """What a unit's modules call around their states: an object, so that copies of them copy it."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def before_state(self, *_: Any, **__: Any) -> None:
        """Register sharded parameters before ``state_dict`` reads them."""
        reshard_if_idle(self.unit)

    def before_load(
        self,
        module: nn.Module,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        *_: Any,
    ) -> None:
        """Register a module's sharded parameters before ``load_state_dict`` fills them.

        Raises:
            ConfigError: it has whole tensors for them.
        """
        reshard_if_idle(self.unit)
        if not local_metadata.get("assign_to_params_buffers", False):
            own = ((prefix + name, param) for name, param in module._parameters.items())
            refuse_whole(own, state_dict, "Modules before it are loaded already.")

    def after_load(self, *_: Any, **__: Any) -> None:
        """Take over what ``load_state_dict(assign=True)`` registered."""
        adopt_if_idle(self.unit)

    def register(self) -> None:
        """Put the hooks onto the unit's modules, and onto those that hold its parameters."""
        unit = self.unit
        for module in unit.modules:
            module.register_load_state_dict_post_hook(self.after_load)
        groups = unit.own_groups
        holders = {site.module for group in groups for p in group.params for site in p.sites}
        for module in holders.union(unit.modules):
            module.register_state_dict_pre_hook(self.before_state)
            module.register_load_state_dict_pre_hook(self.before_load)


@contextlib.contextmanager
def original_buffers(units: Iterable[Unit]) -> Iterator[None]:
    """Register cast buffers in their dtypes of origin inside the context: to be filled."""
    found = [unit.precision.buffers for unit in units]
    on = [buffers for buffers in found if buffers is not None and buffers.is_on]
    for buffers in on:
        buffers.restore()
    try:
        yield
    finally:
        for buffers in on:
            buffers.cast()


def refuse_whole(
    params: Iterable[tuple[str, torch.Tensor | None]], state_dict: Mapping[str, Any], after: str
) -> None:
    """Raise ConfigError where torch would fail to copy whole tensors to shards.

    ``after`` says what was changed.
    """
    for name, param in params:
        value = state_dict.get(name, state_dict.get(clean(name)))
        if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not value.dim():
            continue
        if isinstance(param, DTensor):
            raise ConfigError(
                "FS623",
                f"load_state_dict: {clean(name)} is a whole tensor in the state dict, and sharded "
                "in the model. Load whole tensors with fsdp2.checkpoint.load_full_state(model, "
                f"{{'model': state_dict}}). {after}",
            )


def finish(runtime: Runtime) -> None:
    """Reduce what backwards left to the caller, and reshard, as settings say now.

    Raises:
        StateError: a unit's part of the gradient is lost. See ``Unit.note_unsynced_backward``.
    """
    lost = [
        unit
        for unit in runtime.units
        if unit.may_lose_gradients
        and not any(group.reducer.has_local_gradients for group in unit.groups)
    ]
    for unit in runtime.units:
        unit.may_lose_gradients = False
    if lost:
        raise StateError(
            "FS315",
            f"{lost[0].fqn or '<root>'}: found no gradient after a step of a pipeline whose "
            "schedule computes gradients of inputs first and those of parameters later. Such a "
            "schedule looks for the parameters between forward and backward, when this unit "
            f"({len(lost)} in this stage) had freed them. Apply fully_shard to the modules of "
            "a stage with reshard_after_forward=False.",
        )
    runtime.is_pipelined = True
    if runtime.parts is not None:
        runtime.parts.is_off = True  # several forwards may run before their backwards
    runtime.reduce_the_rest(set(), is_last=True, is_manual=False)


def rest(runtime: Runtime) -> None:
    """Wait for what is in flight, and for the optimizer: a step begins that is not ours."""
    if runtime.reductions:
        runtime.wait_for_reductions()
    event, runtime.root.post_optim_event = runtime.root.post_optim_event, None
    if event is not None and runtime.context.streams.async_op:
        event.synchronize()
    elif event is not None:
        event.wait()

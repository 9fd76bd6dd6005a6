"""What may be done to a module's state only between steps.

Owns the check that no step is under way, after which sharded parameters are registered. It must not
know what is done then.
"""

from __future__ import annotations

import threading

import torch.nn as nn

from fsdp2._base import torch_autograd
from fsdp2._base.arguments import check_module
from fsdp2._base.errors import StateError
from fsdp2._base.events import IDLE
from fsdp2._engine.unit import Unit, unit_of


def units_below(module: nn.Module) -> list[Unit]:
    """Return the units of a module's tree, each once; the module need not be one."""
    found = (unit_of(part) for part in module.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def refuse_other_thread(module: object, what: str) -> None:
    """Check that what ranks do together is begun by the thread of the steps, if there are several.

    It is the same on all ranks, so nothing is told. See [Note: threads] of the runtime.

    Raises:
        StateError: another thread took the last step, and still lives.
    """
    if threading.active_count() == 1 or not isinstance(module, nn.Module):
        return
    for unit in units_below(module):
        ranks = [group.data.shard.size * group.data.replicate.size for group in unit.groups]
        has_other = unit.runtime is not None and unit.runtime.has_other_thread
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
    units = units_below(check_module(what, "the model", module))
    refuse_other_thread(module, what)
    for unit in units:
        runtime = unit.runtime
        if runtime is None:
            continue
        with unit.unless_another_thread_steps():
            runtime.recover_if_failed()
        if runtime.context.phase is not IDLE or torch_autograd.graph_task_id() != -1:
            phase = "backward" if runtime.context.phase is IDLE else runtime.context.phase
            raise StateError(
                "FS301",
                f"{what}: {unit.fqn or '<root>'} is inside a {phase}, where "
                "parameters are gathered and freed. Call it between steps.",
            )
    for unit in units:
        unit.reshard_if_idle()
        unit.adopt_if_idle()
    return units

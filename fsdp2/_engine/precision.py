"""Full precision in evaluation: the change of a unit's precision with its modules' mode.

It must not know when a step runs: nothing here runs in one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

import torch.nn as nn

from fsdp2._base.errors import StateError
from fsdp2._base.events import IDLE
from fsdp2._base.policy import MixedPrecisionPolicy
from fsdp2._engine.unit import Unit


@contextlib.contextmanager
def original_buffers(units: Iterable[Unit]) -> Iterator[None]:
    """Register buffers in their dtypes of origin inside the context: to be filled."""
    found = [unit.cast_buffers for unit in units]
    on = [buffers for buffers in found if buffers is not None and buffers.is_on]
    for buffers in on:
        buffers.restore()
    try:
        yield
    finally:
        for buffers in on:
            buffers.cast()


def policy_for(policy: MixedPrecisionPolicy, modules: Iterable[nn.Module]) -> MixedPrecisionPolicy:
    """Return the policy that holds in the modules' present mode."""
    if not policy.full_precision_in_eval or any(module.training for module in modules):
        return policy
    return dataclasses.replace(policy, param_dtype=None, buffer_dtype=None)


def check_mode_change(unit: Unit, mode: bool) -> None:
    """Raise StateError if the unit's precision would change under a step. Changes nothing."""
    if not unit.chosen_policy.full_precision_in_eval or unit.runtime is None:
        return
    unit.runtime.recover_if_failed()
    phase = unit.runtime.clock.phase
    if phase is not IDLE and any(module.training is not mode for module in unit.modules):
        raise StateError(
            f"{unit.fqn or '<root>'}: found train({mode}) during a {phase}. Its policy has "
            "full_precision_in_eval, so that would change the dtype of parameters in use. Call it "
            "between steps."
        )


def stale_call(fqn: str) -> str:
    """Say what is wrong with a backward through parameters of another precision."""
    return (
        f"{fqn or '<root>'}: train() or eval() was called between this forward and its backward. "
        "Its policy has full_precision_in_eval, so the parameters that it needs are gone. "
        "Run the backward first."
    )


def follow_mode(unit: Unit) -> None:
    """Let a unit compute in the precision that its modules' mode asks for.

    Its parameters are made anew, so a graph that holds old ones must not run: whoever recorded it
    has the old policy, as an object.
    """
    policy = policy_for(unit.chosen_policy, unit.modules)
    if policy == unit.policy:
        return
    unit.policy = dataclasses.replace(policy)
    unit.open_calls = 0
    if unit.governor is not None:
        unit.governor.policy = dataclasses.replace(unit.governor.policy)
        unit.governor.open_calls = 0
    unit.choose_input_dtype()
    for group in unit.own_groups:
        group.compute_by(policy)
    if unit.cast_buffers is not None:
        if policy.buffer_dtype is None:
            unit.cast_buffers.restore()
        else:
            unit.cast_buffers.cast()

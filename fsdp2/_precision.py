"""What a policy says beside dtypes of a step: buffers in low precision, full precision in eval.

Owns casts of buffers and their way in and out of state dicts, and the change of a unit's precision
between training and evaluation. It must not know when a step runs it: nothing here runs in one.

[Note: cast buffers]
A buffer that a policy casts is registered in low precision. What it was is kept beside, and is what
``state_dict`` gives and ``load_state_dict`` fills, as long as the cast one still is a cast of it;
otherwise a state dict gives the cast one in its dtype of origin. Versions would not tell: torch's
batch norm writes to its statistics without counting.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._errors import StateError
from fsdp2._events import IDLE
from fsdp2._policy import MixedPrecisionPolicy
from fsdp2._unit import Unit


class CastBuffer:
    """One buffer in low precision. See [Note: cast buffers]."""

    def __init__(self, module: nn.Module, name: str, dtype: torch.dtype) -> None:
        self.module = module
        self.name = name
        self._dtype = dtype
        self._origin: torch.dtype | None = None
        self._original: Tensor | None = None
        self._cast: Tensor | None = None

    def cast(self) -> None:
        """Register the buffer in low precision, whatever is there now."""
        buffer = self.module._buffers.get(self.name)
        if buffer is None or buffer is self._cast or not is_cast_by_policies(buffer):
            return
        self._origin, self._original = buffer.dtype, buffer
        self._cast = self.module._buffers[self.name] = buffer.to(self._dtype)

    def original(self) -> Tensor | None:
        """Return the buffer in its dtype of origin; None if it is not one that was cast."""
        buffer = self.module._buffers.get(self.name)
        if buffer is None or self._origin is None or buffer.dtype is not self._dtype:
            return None
        if self._is_unchanged():
            return self._original
        return buffer.detach().to(self._origin)

    def _is_unchanged(self) -> bool:
        buffer, original = self.module._buffers.get(self.name), self._original
        if original is None or buffer is None or buffer is not self._cast or buffer.is_meta:
            return False
        return torch.equal(original.to(self._dtype), buffer)

    def restore(self) -> None:
        """Register the buffer in its dtype of origin."""
        original = self.original()
        if original is not None:
            self.module._buffers[self.name] = original
            self._original = self._cast = None


class CastBuffers:
    """The buffers of a unit that its policy casts."""

    def __init__(self, sites: Iterable[tuple[nn.Module, str]], dtype: torch.dtype) -> None:
        self.members = [CastBuffer(module, name, dtype) for module, name in sites]
        self.is_on = False
        for module in dict.fromkeys(member.module for member in self.members):
            # torch marks the hook, which a method does not allow
            module.register_state_dict_post_hook(functools.partial(self._before_state_leaves))
            module.register_load_state_dict_pre_hook(self._before_load)
            module.register_load_state_dict_post_hook(self._after_load)

    def cast(self) -> None:
        self.is_on = True
        for member in self.members:
            member.cast()

    def restore(self) -> None:
        self.is_on = False
        for member in self.members:
            member.restore()

    def _before_state_leaves(
        self, module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any
    ) -> None:
        for member in self.members:
            key = prefix + member.name
            original = member.original() if member.module is module else None
            if original is not None and key in state:
                state[key] = original.detach()

    def _before_load(self, module: nn.Module, *_: Any) -> None:
        for member in self.members:
            if member.module is module and member.original() is not None:
                member.restore()

    def _after_load(self, module: nn.Module, _keys: Any) -> None:
        for member in self.members:
            if member.module is module and self.is_on:
                member.cast()


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


def is_cast_by_policies(buffer: Tensor) -> bool:
    """True for plain floating-point buffers of more than 8 bits."""
    if isinstance(buffer, DTensor):
        return False
    return buffer.is_floating_point() and buffer.dtype.itemsize > 1


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

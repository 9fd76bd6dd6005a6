"""In what dtypes a unit computes: its policy, as the mode of its modules lets it hold.

It must not know units, or when a step runs: nothing here runs in one.

[Note: cast buffers]
A buffer that a policy casts is registered in low precision. What it was is kept beside, and is what
``state_dict`` gives and ``load_state_dict`` fills, as long as the cast one still is a cast of it;
otherwise a state dict gives the cast one in its dtype of origin. Versions would not tell: torch's
batch norm writes to its statistics without counting.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._core.base.policy import MixedPrecisionPolicy

# Buffers that a policy casts to low precision.


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
            if member.module is module:
                member.restore()

    def _after_load(self, module: nn.Module, _keys: Any) -> None:
        for member in self.members:
            if member.module is module and self.is_on:
                member.cast()


def is_cast_by_policies(buffer: Tensor) -> bool:
    """True for plain floating-point buffers of more than 8 bits."""
    if isinstance(buffer, DTensor):
        return False
    return buffer.is_floating_point() and buffer.dtype.itemsize > 1


class Precision:
    """What the user chose for a unit, and what of it holds now."""

    def __init__(self, chosen: MixedPrecisionPolicy, modules: Sequence[nn.Module]) -> None:
        self.chosen = chosen
        self.policy = _policy_for(chosen, modules)  # that holds; a call tells it by identity
        self.buffers: CastBuffers | None = None  # None: none is cast
        self.input_dtype: torch.dtype | None = None  # None: inputs are not cast
        self.choose_input_dtype(is_root=False)

    def choose_input_dtype(self, is_root: bool) -> None:
        """See to what floating-point inputs of a forward are cast. Call it when that may change."""
        policy = self.policy
        casts = policy.cast_forward_inputs or (policy.cast_root_forward_inputs and is_root)
        self.input_dtype = policy.param_dtype if casts else None

    def cast_buffers(self, sites: Iterable[tuple[nn.Module, str]], dtype: torch.dtype) -> None:
        """Take buffers in, and cast them if that is what holds now."""
        self.buffers = CastBuffers(sites, dtype)
        if self.policy.buffer_dtype is not None:
            self.buffers.cast()

    def follow(self, modules: Sequence[nn.Module]) -> bool:
        """Let hold what the modules' mode asks for; return whether that is something else."""
        policy = _policy_for(self.chosen, modules)
        if policy == self.policy:
            return False
        self.policy = dataclasses.replace(policy)
        if self.buffers is not None:
            if policy.buffer_dtype is None:
                self.buffers.restore()
            else:
                self.buffers.cast()
        return True

    def outdate(self) -> None:
        """Let calls that were recorded until now be told from later ones."""
        self.policy = dataclasses.replace(self.policy)


def _policy_for(policy: MixedPrecisionPolicy, modules: Iterable[nn.Module]) -> MixedPrecisionPolicy:
    """Return the policy that holds in the modules' present mode."""
    if not policy.full_precision_in_eval or any(module.training for module in modules):
        return policy
    return dataclasses.replace(policy, param_dtype=None, buffer_dtype=None, gather_dtype=None)

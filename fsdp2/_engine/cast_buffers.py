"""Buffers that a policy casts to low precision.

Owns their casts, and their way in and out of state dicts. It must not know units, or when a step
runs: nothing here runs in one.

[Note: cast buffers]
A buffer that a policy casts is registered in low precision. What it was is kept beside, and is what
``state_dict`` gives and ``load_state_dict`` fills, as long as the cast one still is a cast of it;
otherwise a state dict gives the cast one in its dtype of origin. Versions would not tell: torch's
batch norm writes to its statistics without counting.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor


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

"""Nodes that save parameters by hooks of ours, so that reading one tells that a backward comes.

Owns the hooks of saved tensors. Why they are needed says [Note: outputs that nobody sees] in
``step``; a forward that hides no output enters nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fsdp2._base import torch_compiler
from fsdp2._engine.tree import Unit


class _Saved:
    """What a node saved of a unit's parameters. Who reads it has the unit gathered first."""

    __slots__ = ("read", "tensor")

    def __init__(self, read: Callable[[], None], tensor: Tensor) -> None:
        self.read = read
        self.tensor = tensor


class SavedByHooks:
    """The hooks of one forward of a unit, in place from now until ``end``.

    ``read`` is called when a node is about to read a parameter; ``around`` are the hooks of the
    next forward around this one that has some.
    """

    def __init__(self, unit: Unit, read: Callable[[], None], around: SavedByHooks | None) -> None:
        self._unit = unit
        self._read = read
        self._around = around
        self._hooks: saved_tensors_hooks | None = saved_tensors_hooks(self.pack, _unpack)
        self._hooks.__enter__()

    def end(self) -> SavedByHooks | None:
        """Let nodes save as they did before; return the hooks around these."""
        assert self._hooks is not None
        self._hooks.__exit__()
        # They own this, and this owns a call, whose end tells that a graph was dropped.
        self._hooks = None
        return self._around

    @torch_compiler.always_eager
    def pack(self, tensor: Tensor) -> Any:
        """Return what a node saves for a tensor."""
        if tensor.grad_fn is not None:  # a node that saves what it made would own itself
            tensor = tensor.detach()
        hooks: SavedByHooks | None = self
        while hooks is not None:
            if hooks._unit.holds(tensor):
                return _Saved(hooks._read, tensor)
            hooks = hooks._around
        return tensor


@torch_compiler.always_eager
def _unpack(saved: Any) -> Any:
    """Give a node what it saved."""
    if type(saved) is not _Saved:
        return saved
    saved.read()
    return saved.tensor

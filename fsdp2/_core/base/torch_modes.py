"""Private torch API for modes and transforms that a forward may run under.

Comments say why each name is needed. Tested: torch 2.11.0, 2.13.0, 2.15.0. No unit or group code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import _CloneArgBeforeMutateMode  # of allow_mutation_on_saved_tensors
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # for hidden_from_modes
)
from torch.utils.checkpoint import (  # modes of selective checkpointing
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
)

DispatchMode = TorchDispatchMode  # base class of dispatch modes; its public name is undocumented
hidden_from_modes: Callable[[], AbstractContextManager[Any]] = _disable_current_modes
"""Context manager that hides operations from dispatch modes (counters, tracers)."""

# Modes and transforms around a forward. No public API exits them temporarily.

count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return the number of active dispatch modes in this thread."""

transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Return True inside a functorch transform (``vmap``, ``grad``, ``jvp``)."""

_ASIDE_MODES = (
    _CachingTorchDispatchMode,
    _CachedTorchDispatchMode,
    _CloneArgBeforeMutateMode,  # would copy saved parameters when a gather fills their memory
)

dual_level: Callable[[Any], int] = attrgetter("_current_level")
"""Return the dual level of ``torch.autograd.forward_ad``; -1 outside of all levels."""


def is_under_transforms() -> bool:
    """Return True if tensors may have layers (functorch wrappers, dual numbers)."""
    return transforms_are_active() or dual_level(forward_ad) >= 0


def layers_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return a tensor's layers, each of which may have a separate autograd history: under ``jvp``,
    a wrapper, its tangent, and the tensors that both wrap."""
    functorch = torch._C._functorch
    active = functorch.get_interpreter_stack() or ()
    dual = {i.level() for i in active if i.key() == functorch.TransformType.Jvp} or {-1}
    found = [tensor]
    for layer in found:
        if forward_ad._current_level >= 0 and functorch.maybe_get_level(layer) in dual:
            tangent = forward_ad.unpack_dual(layer).tangent
            if tangent is not None:
                found.append(tangent)
        if functorch.is_functorch_wrapped_tensor(layer):
            found.append(functorch.get_unwrapped(layer))
    return found


def run_aside(function: Callable[..., object], *args: Any) -> None:
    """Call ``function`` outside of selective checkpointing and functorch transforms. Selective
    checkpointing must count the same operations in a recomputation as in the forward. It must not
    count the engine's operations, because a recomputation may find parameters already gathered.
    Other dispatch modes (``CommDebugMode``) still see all operations."""
    with _unseen():
        if transforms_are_active():
            with torch._C._DisableFuncTorch():
                function(*args)
        else:
            function(*args)


def unseen_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the full tensor, hidden from selective checkpointing."""
    with _unseen():
        return tensor.view_as(tensor)


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Temporarily remove the modes of selective checkpointing from the dispatch stack."""
    modes = [torch._C._get_dispatch_stack_at(i) for i in range(count_modes())]
    others = [mode for mode in modes if not isinstance(mode, _ASIDE_MODES)]
    if len(others) == len(modes):
        yield
        return
    _exchange_modes(modes, others)
    try:
        yield
    finally:
        _exchange_modes(others, modes)


def _exchange_modes(old: Sequence[Any], new: Sequence[Any]) -> None:
    for _ in old:
        torch._C._pop_torch_dispatch_stack(None)
    for mode in new:
        torch._C._push_on_torch_dispatch_stack(mode)

"""Private torch API, by subject: modes and transforms that a forward may run under.

Each private name states why it is needed. Tried on torch 2.11.0, 2.13.0 and 2.15.0. Nothing here
knows what a unit or a group is.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # tensors without memory
from torch.autograd import forward_ad
from torch.autograd.graph import _CloneArgBeforeMutateMode  # of allow_mutation_on_saved_tensors
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # the test torch itself uses
)
from torch.utils.checkpoint import (  # what selective checkpointing sees operations with
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
)

DispatchMode = TorchDispatchMode
"""Base of what sees every operation; the public name of it is no documented one."""

hidden_from_modes: Callable[[], AbstractContextManager[Any]] = _disable_current_modes
"""Run what is inside where no dispatch mode (a counter, a tracer) sees it."""


def without_memory() -> AbstractContextManager[Any]:
    """Make fake tensors inside: shapes, dtypes and devices, but no values."""
    mode: AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


@contextlib.contextmanager
def without_traces_in_the_log() -> Iterator[None]:
    """Keep back what fake tensors print: the traceback of every error, which is raised anyway."""
    log, thread = logging.getLogger(FakeTensorMode.__module__), threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(is_of_others)
    try:
        yield
    finally:
        log.removeFilter(is_of_others)


def has_real_memory() -> bool:
    """True unless tensors made now are fake (an estimate of memory, a trace)."""
    return type(torch.empty(0, dtype=torch.uint8, device="cpu")) is torch.Tensor


# Modes and transforms that a forward may run under. No public way to step out of them exists.

count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Return how many dispatch modes are active in this thread."""

transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Return True inside of a functorch transform (``vmap``, ``grad``, ``jvp``)."""

_ASIDE_MODES = (
    _CachingTorchDispatchMode,
    _CachedTorchDispatchMode,
    _CloneArgBeforeMutateMode,  # it would copy saved parameters whose memory is being filled
)


dual_level: Callable[[Any], int] = attrgetter("_current_level")
"""Return the level of dual numbers that ``torch.autograd.forward_ad`` is at; -1 outside of any."""


def is_under_transforms() -> bool:
    """Return True if tensors may consist of several: functorch's wrappers, dual numbers."""
    return transforms_are_active() or dual_level(forward_ad) >= 0


def layers_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return every tensor that a value consists of and that may have a history of its own.

    Under ``jvp`` that is a wrapper, its tangent, and what both of them wrap.
    """
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
    """Call ``function`` where selective checkpointing and functorch transforms do not reach it.

    Only where ``count_modes`` or ``transforms_are_active`` says that there is one.

    What the engine does is no part of the user's function: a recomputation may find the parameters
    gathered, and its policy must count the same operations as in forward. Other dispatch modes
    (``CommDebugMode``) go on seeing everything.
    """
    with _unseen():
        if transforms_are_active():
            with torch._C._DisableFuncTorch():
                function(*args)
        else:
            function(*args)


def unseen_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the whole tensor that selective checkpointing does not count."""
    with _unseen():
        return tensor.view_as(tensor)


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Take the modes of selective checkpointing off the stack of dispatch modes for a while."""
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

"""Private torch API, by subject: modules, and what other software asks about them.

The public names of torch's own FSDP2 that isinstance checks ask about come in here, and nowhere
else. Each private name states why it is needed. Tried on torch 2.11.0, 2.13.0 and 2.15.0. Nothing
here knows what a unit or a group is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
import torch.nn as nn
from torch.distributed._composable.contract import (  # what `replicate` and the like read
    REGISTRY_KEY,
    STATE_KEY,
    RegistryItem,
)
from torch.distributed.fsdp import FSDPModule as FSDPModule  # what isinstance checks ask about
from torch.distributed.fsdp import ShardingStrategy as ShardingStrategy
from torch.distributed.fsdp import UnshardHandle as UnshardHandle
from torch.distributed.fsdp import fully_shard  # for its accessor alone
from torch.distributed.fsdp.wrap import CustomPolicy as CustomPolicy

try:
    from torch.distributed.fsdp import (  # type: ignore[attr-defined]  # since torch 2.15
        GradientReductionHandle as GradientReductionHandle,
    )
except ImportError:

    class GradientReductionHandle:  # type: ignore[no-redef]
        """Stands where torch has none yet."""


def is_persistent(module: nn.Module, name: str) -> bool:
    """True if a buffer is in its module's ``state_dict``. No public way exists."""
    return name not in module._non_persistent_buffers_set


custom_policy_function: Callable[[CustomPolicy], Callable[[nn.Module], Any]]
custom_policy_function = attrgetter("_lambda_fn")
"""The function of a module that the user made the policy of."""


# Observation and composition.


def profiler_is_running() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)


def register_composable_name(module: nn.Module, name: str) -> None:
    """Enter a name in the registry of composable APIs, which ``replicate`` and the like read.

    The public decorator ``contract`` builds the state itself and checks every name of the tree
    again at each call, which costs quadratic time over a model's units.
    """
    module.__dict__.setdefault(REGISTRY_KEY, {})[name] = RegistryItem()


def register_torch_state(module: nn.Module, state: object) -> None:
    """Let ``torch.distributed.fsdp.fully_shard.state(module)`` return ``state``.

    The accessor, itself public, looks under the function that the decorator ``contract`` wrapped.
    """
    module.__dict__.setdefault(STATE_KEY, {})[inspect.unwrap(fully_shard)] = state


def composable_names(module: nn.Module) -> list[str]:
    """Return the composable APIs that were applied to the module."""
    return list(module.__dict__.get(REGISTRY_KEY, {}))


def forget_composable_names(state: dict[str, Any]) -> None:
    """Drop the registry from a module's state before it is pickled: its key is per process."""
    state.pop(STATE_KEY, None)
    state.pop(REGISTRY_KEY, None)

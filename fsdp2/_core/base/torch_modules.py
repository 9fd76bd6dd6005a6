"""Private torch APIs for modules, and for queries about modules by other software.

Only this file imports the public names of torch's own FSDP2, which isinstance checks need. Comments
explain why each private name is needed. Tested with torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import weakref
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch.distributed import _composable_state  # read by `_get_module_state`
from torch.distributed import fsdp as _fsdp
from torch.distributed._composable.contract import (  # read by `replicate` and similar
    REGISTRY_KEY,
    STATE_KEY,
    RegistryItem,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule as FSDPModule  # for isinstance checks
from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy
from torch.distributed.fsdp import ShardingStrategy as ShardingStrategy
from torch.distributed.fsdp import UnshardHandle as UnshardHandle
from torch.distributed.fsdp import fully_shard as fully_shard  # its accessor; compared by doctor
from torch.distributed.fsdp._fully_shard._fsdp_common import (  # for mesh_info, read by other code
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)
from torch.distributed.fsdp.wrap import CustomPolicy as CustomPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

from fsdp2._core.base.errors import ConfigError

if TYPE_CHECKING:

    class FSDPState:
        """Torch's class, which torch's getters check for. We use none of its attributes."""
else:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as FSDPState

try:
    from torch.distributed.fsdp import (  # type: ignore[attr-defined]  # since torch 2.15
        GradientReductionHandle as GradientReductionHandle,
    )
except ImportError:

    class GradientReductionHandle:  # type: ignore[no-redef]
        """Placeholder for older torch."""


try:  # since torch 2.12 or 2.13
    from torch.distributed.fsdp import DataParallelMeshDims as DataParallelMeshDims
except ImportError:

    class DataParallelMeshDims:  # type: ignore[no-redef]
        """Placeholder for older torch."""


HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",  # the module above imports FSDP2's names from it
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
"""Torch modules from which other software imports FSDP2's names."""

INNER_HOME = "torch.distributed.fsdp._fully_shard._fully_shard"
"""The module that implements torch's FSDP2; some software imports FSDP2's names from it."""

for _home in (*HOMES, INNER_HOME):
    importlib.import_module(_home)  # imported later, it would get our names from the first module

PUBLIC = {name: getattr(_fsdp, name) for name in _fsdp.__all__}
"""Torch's own objects by name, unaffected by ``replace_torch``."""


def is_persistent(module: nn.Module, name: str) -> bool:
    """Return True if a buffer is in its module's ``state_dict``. There is no public API."""
    return name not in module._non_persistent_buffers_set


def name_of_class_policy(policy: object) -> str | None:
    """Return the name of an FSDP1 policy that selects modules by class; None for other policies."""
    if isinstance(policy, ModuleWrapPolicy):
        return "ModuleWrapPolicy"
    if getattr(policy, "func", None) is transformer_auto_wrap_policy:  # a functools.partial
        return "transformer_auto_wrap_policy"
    return None


custom_policy_function: Callable[[CustomPolicy], Callable[[nn.Module], Any]]
custom_policy_function = attrgetter("_lambda_fn")  # the function that the user passed to the policy
profiler_is_running: Callable[[], bool]
profiler_is_running = partial(attrgetter("_is_profiler_enabled"), torch.autograd.profiler)

REGISTRIES = (REGISTRY_KEY, STATE_KEY)
"""Module attributes through which torch finds composable APIs and their states."""


class _Registry(dict[str, RegistryItem]):
    """The composable APIs of a module. Torch's own ``fully_shard`` would shard our shards, and its
    helper looks up only ``replicate`` here. Therefore any lookup by this helper, which is
    recognised by its name, raises an error."""

    def __contains__(self, name: object) -> bool:
        if sys._getframe(1).f_code.co_name == "_is_composable_with_fsdp":
            raise ConfigError(
                "FS908",
                "torch's own fully_shard was called on a tree that contains a module sharded by "
                "fsdp2, which it cannot manage. Use fsdp2.fully_shard for the entire tree: import "
                "it from fsdp2, or call fsdp2.replace_torch() first.",
            )
        return super().__contains__(name)


def register_composable_name(module: nn.Module, name: str) -> None:
    """Register a composable API, which ``replicate`` and similar APIs look up. We do not use the
    public decorator ``contract``, because it checks all names in the tree at each call: the total
    cost is quadratic in the number of units."""
    known = module.__dict__.get(REGISTRY_KEY, {})
    module.__dict__[REGISTRY_KEY] = _Registry({**known, name: RegistryItem()})


def register_torch_state(module: nn.Module, state: FSDPState) -> None:
    """Make torch's getters return ``state``: two private getters, and ``fully_shard.state``, which
    looks up the function that the decorator ``contract`` wrapped. Programs call the private getters
    ``_get_module_state`` and ``_get_module_fsdp_state`` (which returns only an ``FSDPState``) to
    check whether a module is already sharded."""
    module.__dict__.setdefault(STATE_KEY, {})[inspect.unwrap(fully_shard)] = state
    found: Any = state  # for a type checker, it is not a `_State`
    _composable_state._module_state_mapping[module] = weakref.ref(found)


def torch_state(module: nn.Module) -> object:
    """Return the state from ``register_torch_state``; None if there is none."""
    return module.__dict__.get(STATE_KEY, {}).get(inspect.unwrap(fully_shard))


def composable_names(module: nn.Module) -> list[str]:
    return list(module.__dict__.get(REGISTRY_KEY, {}))


def forget_composable_names(state: dict[str, Any]) -> None:
    """Drop the registries from a module's state before pickling: keys differ between processes."""
    state.pop(STATE_KEY, None)
    state.pop(REGISTRY_KEY, None)


def mesh_info(mesh: DeviceMesh, shard_dim: int | None, replicate_dim: int | None) -> Any:
    """Return torch's FSDP2 description of a mesh: the role, size and group of each dim."""
    if shard_dim is None:
        return DDPMeshInfo(mesh, replicate_mesh_dim=replicate_dim)
    if replicate_dim is None:
        return FSDPMeshInfo(mesh, shard_mesh_dim=shard_dim)
    return HSDPMeshInfo(mesh, shard_mesh_dim=shard_dim, replicate_mesh_dim=replicate_dim)


class _Hidden:
    """Hides an attribute of torch's class from our subclass: reading it raises an error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(f"type object {owner.__name__!r} has no attribute {self._name!r}")


def hide_torchs_own(ours: type, theirs: type) -> None:
    """Hide the attributes that ``ours`` would inherit from its base ``theirs``."""
    own = set().union(*(vars(cls) for cls in ours.__mro__ if cls not in (theirs, object)))
    for name in vars(theirs):
        if name not in own and not hasattr(object, name):
            setattr(ours, name, _Hidden(name))

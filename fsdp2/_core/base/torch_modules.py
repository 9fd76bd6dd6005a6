"""Private torch API, by subject: modules, and what other software asks about them.

The public names of torch's own FSDP2 that isinstance checks ask about come in here, and nowhere
else. Each private name states why it is needed. Tried on torch 2.11.0, 2.13.0 and 2.15.0. Nothing
here knows what a unit or a group is.
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
from torch.distributed import _composable_state  # what `_get_module_state` looks into
from torch.distributed import fsdp as _fsdp
from torch.distributed._composable.contract import (  # what `replicate` and the like read
    REGISTRY_KEY,
    STATE_KEY,
    RegistryItem,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy as CPUOffloadPolicy
from torch.distributed.fsdp import FSDPModule as FSDPModule  # what isinstance checks ask about
from torch.distributed.fsdp import MixedPrecisionPolicy as MixedPrecisionPolicy
from torch.distributed.fsdp import OffloadPolicy as OffloadPolicy
from torch.distributed.fsdp import ShardingStrategy as ShardingStrategy
from torch.distributed.fsdp import UnshardHandle as UnshardHandle
from torch.distributed.fsdp import fully_shard as fully_shard  # its accessor; our peer in a doctor
from torch.distributed.fsdp._fully_shard._fsdp_common import (  # what other code asks a mesh for
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)
from torch.distributed.fsdp.wrap import CustomPolicy as CustomPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

from fsdp2._core.base.errors import ConfigError

if TYPE_CHECKING:

    class FSDPState:
        """Torch's class, by which its getters know a state. Ours inherits nothing of it."""
else:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState as FSDPState

try:
    from torch.distributed.fsdp import (  # type: ignore[attr-defined]  # since torch 2.15
        GradientReductionHandle as GradientReductionHandle,
    )
except ImportError:

    class GradientReductionHandle:  # type: ignore[no-redef]
        """Stands where torch has none yet."""


try:
    from torch.distributed.fsdp import (
        DataParallelMeshDims as DataParallelMeshDims,  # since torch 2.12 or 2.13
    )
except ImportError:

    class DataParallelMeshDims:  # type: ignore[no-redef]
        """Stands where torch has none yet."""


HOMES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",  # of which the one above imports them
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
"""Modules of torch from which software imports the names of FSDP2: loaded now, see below."""

INNER_HOME = "torch.distributed.fsdp._fully_shard._fully_shard"
"""The module that torch's FSDP2 is written in, from which some software imports its names too."""

for _home in (*HOMES, INNER_HOME):
    importlib.import_module(_home)  # else the later ones would import ours from the first

PUBLIC = {name: getattr(_fsdp, name) for name in _fsdp.__all__}
"""Torch's own objects by their names, whatever stands in the homes later."""


def is_persistent(module: nn.Module, name: str) -> bool:
    """True if a buffer is in its module's ``state_dict``. No public way exists."""
    return name not in module._non_persistent_buffers_set


def name_of_class_policy(policy: object) -> str | None:
    """Name a policy of FSDP1 that picks modules by their classes; None if it is another."""
    if isinstance(policy, ModuleWrapPolicy):
        return "ModuleWrapPolicy"
    if getattr(policy, "func", None) is transformer_auto_wrap_policy:  # of functools.partial
        return "transformer_auto_wrap_policy"
    return None


custom_policy_function: Callable[[CustomPolicy], Callable[[nn.Module], Any]]
custom_policy_function = attrgetter("_lambda_fn")
"""The function of a module that the user made the policy of."""


# Observation and composition.


profiler_is_running: Callable[[], bool] = partial(
    attrgetter("_is_profiler_enabled"), torch.autograd.profiler
)


REGISTRIES = (REGISTRY_KEY, STATE_KEY)
"""Attributes of a module by which torch finds what was applied to it: from there to the unit."""


class _Registry(dict[str, RegistryItem]):
    """The composable APIs of one module, with a sentence for torch's own ``fully_shard``.

    That one does not ask whether a module below is a unit of ours: it would shard its shards. It
    asks each whether ``replicate`` was applied, as nothing else does by a function of this name.
    """

    def __contains__(self, name: object) -> bool:
        if sys._getframe(1).f_code.co_name == "_is_composable_with_fsdp":
            raise ConfigError(
                "FS908",
                "torch's own fully_shard was called on a tree with a module that fsdp2 has "
                "sharded, and cannot manage it. Use fsdp2.fully_shard for the whole tree: import "
                "it from fsdp2, or call fsdp2.replace_torch() first.",
            )
        return super().__contains__(name)


def register_composable_name(module: nn.Module, name: str) -> None:
    """Enter a name in the registry of composable APIs, which ``replicate`` and the like read.

    The public decorator ``contract`` builds the state itself and checks every name of the tree
    again at each call, which costs quadratic time over a model's units.
    """
    known = module.__dict__.get(REGISTRY_KEY, {})
    module.__dict__[REGISTRY_KEY] = _Registry({**known, name: RegistryItem()})


def register_torch_state(module: nn.Module, state: FSDPState) -> None:
    """Let torch's getters return ``state``: ``fully_shard.state(module)``, and two private ones.

    The accessor, itself public, looks under the function that the decorator ``contract`` wrapped.
    Programs ask ``_get_module_state`` and ``_get_module_fsdp_state`` whether a module is sharded
    already, and shard it once more if the answer is None. The latter returns an ``FSDPState`` only.
    """
    module.__dict__.setdefault(STATE_KEY, {})[inspect.unwrap(fully_shard)] = state
    found: Any = state  # to a type checker ours is no `_State`
    _composable_state._module_state_mapping[module] = weakref.ref(found)


def torch_state(module: nn.Module) -> object:
    """Return what ``register_torch_state`` left; None if it did not."""
    return module.__dict__.get(STATE_KEY, {}).get(inspect.unwrap(fully_shard))


def composable_names(module: nn.Module) -> list[str]:
    """Return the composable APIs that were applied to the module."""
    return list(module.__dict__.get(REGISTRY_KEY, {}))


def forget_composable_names(state: dict[str, Any]) -> None:
    """Drop the registry from a module's state before it is pickled: its key is per process."""
    state.pop(STATE_KEY, None)
    state.pop(REGISTRY_KEY, None)


def mesh_info(mesh: DeviceMesh, shard_dim: int | None, replicate_dim: int | None) -> Any:
    """Describe a mesh as torch's FSDP2 does inside: which dim is which, with sizes and groups."""
    if shard_dim is None:
        return DDPMeshInfo(mesh, replicate_mesh_dim=replicate_dim)
    if replicate_dim is None:
        return FSDPMeshInfo(mesh, shard_mesh_dim=shard_dim)
    return HSDPMeshInfo(mesh, shard_mesh_dim=shard_dim, replicate_mesh_dim=replicate_dim)


# What torch's classes have and ours, which are recognised as theirs, have not.


class _Hidden:
    """A name of torch's class that ours does not have: as if it were not inherited."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Any:
        raise AttributeError(f"type object {owner.__name__!r} has no attribute {self._name!r}")


def hide_torchs_own(ours: type, theirs: type) -> None:
    """Hide what ``ours`` would inherit from ``theirs``, which it is a subclass of."""
    own = set().union(*(vars(cls) for cls in ours.__mro__ if cls not in (theirs, object)))
    for name in vars(theirs):
        if name not in own and not hasattr(object, name):
            setattr(ours, name, _Hidden(name))

"""The only private module to which pickles of sharded models and optimizers refer.

Pickles refer to public classes by their public name, in ``fsdp2``. The private classes listed here
have this module as their ``__module__``, so that pickles remain loadable when files are moved. All
other classes are pickled under their actual module. Names may be added here, but never removed.

The classes and functions that are imported below are loaded in every process. ``LATER`` maps
further names to the modules that define them. Such a module is loaded when a pickle refers to the
name, and sets the object's ``__module__`` (``[Note: names that load later]`` of the package).
"""

# ruff: noqa: F401  # unpickling looks up these imports here

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from fsdp2._core.api.comm_hooks import Compress, Hooked
from fsdp2._core.api.inspect import GroupInfo, ShardInfo, UnitInfo
from fsdp2._core.api.module import rebuild_module
from fsdp2._core.base.policy import (
    CastBuffer,
    CastBuffers,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Overlap,
    Precision,
    Prefetch,
    Settings,
    Sharding,
)
from fsdp2._core.base.torch_dealt import DealtTensor, dealt
from fsdp2._core.comm.mesh import DataMesh, KeptOnMesh
from fsdp2._core.comm.wire import Wire
from fsdp2._core.engine.between_steps import StateHooks, TorchState
from fsdp2._core.engine.parts import PartHook
from fsdp2._core.engine.step import ForwardHooks, ForwardMethod
from fsdp2._core.engine.tree import Unit
from fsdp2._core.params.buffers import Readers
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.layout import ShardLayout
from fsdp2._core.params.param import ChosenDtypes, FSDPParam, OwnerMark
from fsdp2._core.params.placement import ParamPlacement
from fsdp2._core.params.registration import Site

PLACE = "fsdp2._pickles"
"""The module name in pickles. ``fsdp2`` registers this module under this name; no file has it."""

LATER: Mapping[str, str] = {
    "Activations": "fsdp2._core.api.activations",
    "EMA": "fsdp2.optim._ema",
    "rebuild_offloaded": "fsdp2.optim._offload",
    "rebuild_optimizer": "fsdp2.optim._local",
}

for _named in (*globals().values(), DataMesh.of):
    if getattr(_named, "__module__", "").startswith("fsdp2."):
        _named.__module__ = PLACE


def __getattr__(name: str) -> Any:
    """Load an object of ``LATER`` when unpickling looks it up here."""
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(LATER[name]), name)

"""The one private module that pickles of sharded models and optimizers refer to.

Public classes are pickled under their public name, in ``fsdp2``. A pickle refers to a class by its
module; private classes give this module, so that a pickle outlives a move of files. Classes not
listed here are found at their location. Names may be added to a table, but never removed.

Every process loads the classes and functions that are imported below. ``LATER`` maps further names
to their modules, which set this module's name themselves (``[Note: names that load later]`` of the
package); unpickling loads them.
"""

# ruff: noqa: F401  # what is imported is looked up here by pickles

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
"""The module that pickles name: there is no such file, ``fsdp2`` puts this module in its place."""

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
    """Load an object of ``LATER``: pickles look it up here."""
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(LATER[name]), name)

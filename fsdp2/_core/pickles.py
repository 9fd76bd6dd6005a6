"""The one private place that pickles of sharded models and optimizers name.

Public classes they name as users do, by ``fsdp2``.

A pickle names each class by a module. These say that they are from here, so that a pickle outlives
a move of files. What is not here is found where it is: a name may join a table, never leave it.

``NAMED`` are objects that every process loads. ``LATER`` has the modules of others, which name this
one themselves (``[Note: names that load later]`` of the package); a pickle that has them loads
them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from fsdp2._core.api.comm_hooks import Compress, Hooked
from fsdp2._core.api.inspect import GroupInfo, ShardInfo, UnitInfo
from fsdp2._core.api.module import rebuild_module
from fsdp2._core.base.policy import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Overlap,
    Settings,
    Sharding,
)
from fsdp2._core.base.torch_dealt import DealtTensor, dealt
from fsdp2._core.comm.mesh import DataMesh, KeptOnMesh
from fsdp2._core.comm.wire import Wire
from fsdp2._core.engine.between_steps import StateHooks, TorchState
from fsdp2._core.engine.parts import PartHook
from fsdp2._core.engine.precision import CastBuffer, CastBuffers, Precision
from fsdp2._core.engine.step import ForwardHooks, ForwardMethod
from fsdp2._core.engine.tree import Unit
from fsdp2._core.params.early_release import Readers
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.layout import ShardLayout
from fsdp2._core.params.param import ChosenDtypes, FSDPParam, OwnerMark
from fsdp2._core.params.placement import ParamPlacement
from fsdp2._core.params.registration import Site

PLACE = "fsdp2._pickles"
"""The module that pickles name: there is no such file, ``fsdp2`` puts this module in its place."""

NAMED: tuple[Any, ...] = (
    CPUOffloadPolicy,
    CastBuffer,
    CastBuffers,
    ChosenDtypes,
    Compress,
    DataMesh,
    DataMesh.of,
    DataParallelMeshDims,
    FSDPParam,
    ForwardHooks,
    ForwardMethod,
    GroupInfo,
    Hooked,
    KeptOnMesh,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Overlap,
    DealtTensor,
    dealt,
    OwnerMark,
    ParamGroup,
    ParamPlacement,
    PartHook,
    Precision,
    Readers,
    Settings,
    ShardInfo,
    ShardLayout,
    Sharding,
    Site,
    StateHooks,
    TorchState,
    Unit,
    UnitInfo,
    Wire,
    rebuild_module,
)

LATER: Mapping[str, str] = {
    "Activations": "fsdp2._core.api.activations",
    "EMA": "fsdp2.optim._ema",
    "rebuild_offloaded": "fsdp2.optim._offload",
    "rebuild_optimizer": "fsdp2.optim._local",
}

for _named in NAMED:
    _named.__module__ = PLACE


def __getattr__(name: str) -> Any:
    """Load an object of ``LATER``: pickles look it up here."""
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(LATER[name]), name)

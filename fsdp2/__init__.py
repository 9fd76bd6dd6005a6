"""Composable, per-parameter sharding for PyTorch: ``fully_shard`` and related functions.

[Note: names that load later]
Every rank and every worker process imports this file, so it imports only the code that a training
step needs. The other public names, and the submodules, are imported on first access
(``__getattr__``) and then cached in this module's ``__dict__``.
"""

import importlib as _importlib
import os as _os
import sys as _sys
import typing as _typing

if _sys.argv[:2] == ["-m", "explain"] and "fsdp2" in _sys.orig_argv:
    # `python -m fsdp2 explain` does not need torch, whose import takes seconds
    _importlib.import_module("fsdp2._core.base.paragraphs").main(_sys.argv[2:])
    _sys.exit()

from fsdp2._core import pickles as _pickles
from fsdp2._core.api.comm_hooks import Compress, register_comm_hook
from fsdp2._core.api.fully_shard import fully_shard, register_fsdp_forward_method
from fsdp2._core.api.inspect import units
from fsdp2._core.api.module import FSDPModule, GradientReductionHandle, UnshardHandle
from fsdp2._core.api.replacement import REPLACES as _REPLACES
from fsdp2._core.api.replacement import replace_torch
from fsdp2._core.api.settings import no_sync, share_comm_ctx
from fsdp2._core.base.errors import (
    ConfigError,
    ConfigTypeError,
    FSDPError,
    LostRank,
    StateError,
    UnsupportedError,
)
from fsdp2._core.base.policy import (
    Aligned,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
    Whole,
)
from fsdp2._core.comm.comms import AllGather, Comm, ReduceScatter

if _typing.TYPE_CHECKING:  # declares the lazily imported names to type checkers and editors
    from fsdp2 import checkpoint as checkpoint
    from fsdp2 import debug as debug
    from fsdp2 import optim as optim
    from fsdp2 import plans as plans
    from fsdp2 import recordings as recordings
    from fsdp2 import weights as weights
    from fsdp2 import wrap as wrap
    from fsdp2._compiled.compile import CompiledModel, compile  # noqa: A004  # as in torch
    from fsdp2._core.api.activations import offload_activations
    from fsdp2._core.api.reproducible import mean_over_slots, reproducible
    from fsdp2._core.transfer.materialize import materialize, sync_from_rank0
    from fsdp2._core.transfer.summon import full_params, summon_full_params
    from fsdp2._tools.plan.plan import plan
    from fsdp2._tools.record.recording import record
    from fsdp2._tools.record.recordings import read_recordings
    from fsdp2.optim._clip import clip_grad_norm_
    from fsdp2.optim._graphed import GraphedStep, graphed

_sys.modules[_pickles.PLACE] = _pickles  # old pickles contain this module name

__all__ = [
    "Aligned",
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "CompiledModel",
    "Compress",
    "ConfigError",
    "ConfigTypeError",
    "DataParallelMeshDims",
    "FSDPError",
    "FSDPModule",
    "GradientReductionHandle",
    "GraphedStep",
    "LostRank",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
    "ShardPlacementResult",
    "StateError",
    "UnshardHandle",
    "UnsupportedError",
    "Whole",
    "clip_grad_norm_",
    "compile",
    "full_params",
    "fully_shard",
    "graphed",
    "materialize",
    "mean_over_slots",
    "no_sync",
    "offload_activations",
    "plan",
    "read_recordings",
    "record",
    "register_comm_hook",
    "register_fsdp_forward_method",
    "replace_torch",
    "reproducible",
    "share_comm_ctx",
    "summon_full_params",
    "sync_from_rank0",
    "units",
]

__version__ = "0.1.0"

for _name in __all__:  # show classes under their public names in tracebacks and reprs
    _value = globals().get(_name)
    if isinstance(_value, type) and _value is not FSDPModule:  # its type hints need __module__
        _value.__module__ = __name__

_SUBMODULES = ("checkpoint", "debug", "optim", "plans", "recordings", "weights", "wrap")

_LATER = {  # mirrors the TYPE_CHECKING imports above: name -> defining module
    "CompiledModel": "_compiled.compile",
    "GraphedStep": "optim._graphed",
    "clip_grad_norm_": "optim._clip",
    "compile": "_compiled.compile",
    "full_params": "_core.transfer.summon",
    "graphed": "optim._graphed",
    "materialize": "_core.transfer.materialize",
    "mean_over_slots": "_core.api.reproducible",
    "offload_activations": "_core.api.activations",
    "plan": "_tools.plan.plan",
    "read_recordings": "_tools.record.recordings",
    "record": "_tools.record.recording",
    "reproducible": "_core.api.reproducible",
    "summon_full_params": "_core.transfer.summon",
    "sync_from_rank0": "_core.transfer.materialize",
}

if not _typing.TYPE_CHECKING:  # otherwise type checkers would accept misspelt names

    def __getattr__(name: str) -> object:
        """Import a name on first access: see [Note: names that load later]."""
        if name in _SUBMODULES:
            return _importlib.import_module(f"{__name__}.{name}")  # also sets the attribute
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(_importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_SUBMODULES, *_LATER})


if _os.environ.get(_REPLACES) == "1":  # set by `python -m fsdp2 program`
    replace_torch()

"""Composable, per-parameter sharding for PyTorch: ``fully_shard`` and what belongs to it."""

from fsdp2 import checkpoint as checkpoint
from fsdp2 import debug as debug
from fsdp2 import optim as optim
from fsdp2 import wrap as wrap
from fsdp2._api import fully_shard, register_fsdp_forward_method
from fsdp2._clip import clip_grad_norm_
from fsdp2._comm import AllGather, Comm, ReduceScatter
from fsdp2._comm_hooks import Compress, register_comm_hook
from fsdp2._compile import CompiledModel, compile  # noqa: A004  # torch's name for it
from fsdp2._control import share_comm_ctx
from fsdp2._errors import ConfigError, FSDPError, StateError, UnsupportedError
from fsdp2._full_params import full_params
from fsdp2._inspect import GroupInfo, ShardInfo, UnitInfo, units
from fsdp2._materialize import materialize
from fsdp2._module import FSDPModule, UnshardHandle
from fsdp2._no_sync import no_sync
from fsdp2._policy import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlacementResult,
)
from fsdp2._summon import summon_full_params
from fsdp2._sync import sync_from_rank0

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "CompiledModel",
    "Compress",
    "ConfigError",
    "DataParallelMeshDims",
    "FSDPError",
    "FSDPModule",
    "GroupInfo",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
    "ShardInfo",
    "ShardPlacementResult",
    "StateError",
    "UnitInfo",
    "UnshardHandle",
    "UnsupportedError",
    "clip_grad_norm_",
    "compile",
    "full_params",
    "fully_shard",
    "materialize",
    "no_sync",
    "register_comm_hook",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "summon_full_params",
    "sync_from_rank0",
    "units",
]

__version__ = "0.1.0"

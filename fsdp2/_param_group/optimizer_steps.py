"""Optimizer steps, of any optimizer: how many there were, and what none may step.

Owns the two hooks that torch calls around every ``Optimizer.step``. It must not know groups.

[Note: steps are counted]
Whole parameters that stay from one step to the next are compared with their shards by versions. But
torch's multi-tensor and fused kernels write to DTensors without counting a version, on the DTensor
or on its local tensor (seen with torch 2.13.0). So every step of any optimizer counts as a write.

[Note: an optimizer that trains nothing]
An optimizer that was made at the wrong moment holds parameters that never get a gradient: those of
before ``fully_shard``, or whole ones. It would train nothing, without a word, so its first step
raises; every rank made it at the same moment.

[Note: forgotten parameters]
``fully_shard`` on the outermost module is easily forgotten. What is in no unit is trained, and
nobody averages its gradients over ranks: they drift apart, without a word. An optimizer sees such
parameters beside sharded ones; its first step warns.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp2._base import torch_compiler
from fsdp2._base.errors import StateError, coded
from fsdp2._param_group.param import OwnerMark, is_forgotten, stand_in_of

_count = 0
_is_watching = False
_looked_at: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""How many param groups of each optimizer were looked at."""


def watch_optimizers() -> None:
    """Let torch call this module around every optimizer step from now on."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        register_optimizer_step_pre_hook(_before)
        register_optimizer_step_post_hook(_after)


def steps_so_far() -> int:
    """Return how many steps of optimizers there were: the same number on ranks that run alike."""
    return _count


@torch_compiler.always_eager
def _before(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    groups = optimizer.param_groups
    if _looked_at.get(optimizer) == len(groups):
        return
    for group in groups:
        for param in group["params"]:
            what = stand_in_of(param)
            if what is not None:
                raise StateError(
                    "FS701",
                    f"{type(optimizer).__name__}: found {what}, which gets no gradient, so this "
                    "optimizer would not train it. Make optimizers after fully_shard, and not "
                    "between unshard() and reshard() or between a forward and its backward: "
                    "parameters() are the shards then.",
                )
    _looked_at[optimizer] = len(groups)
    _warn_of_forgotten(optimizer)


def _warn_of_forgotten(optimizer: Optimizer) -> None:
    """See [Note: forgotten parameters]."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    forgotten = [param for param in params if is_forgotten(param)]
    sharded = [param for param in params if OwnerMark.owner_of(param) is not None]
    if forgotten and any(param.device_mesh.size() > 1 for param in sharded):
        warnings.warn(
            coded(
                "FS709",
                f"{type(optimizer).__name__}: {len(forgotten)} of its parameters are in no unit "
                f"(the first has shape {tuple(forgotten[0].shape)}), so fsdp2 does not average "
                "their gradients over ranks. Call fully_shard on the outermost module, after the "
                "inner ones. If something else averages them, as DistributedDataParallel does, "
                "pass them as ignored_params.",
            ),
            stacklevel=3,
        )


@torch_compiler.always_eager
def _after(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    global _count
    _count += 1

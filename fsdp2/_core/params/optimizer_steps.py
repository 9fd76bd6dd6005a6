"""Optimizer steps, of any optimizer: how many there were, and what none may step.

Owns the two hooks that torch calls around every ``Optimizer.step``. It must not know groups.

[Note: steps are counted]
Whole parameters that stay from one step to the next are compared with their shards by versions. But
torch's multi-tensor and fused kernels write to DTensors without counting a version, on the DTensor
or on its local tensor (seen with torch 2.13.0). So every step of an optimizer counts as a write, if
it holds shards, or memory of them. A step of another one, a probe that one rank fits alone, does
not: whether a forward gathers may depend only on what all ranks share.

[Note: an optimizer that trains nothing]
An optimizer that was made at the wrong moment holds parameters that never get a gradient: those of
before ``fully_shard``, or whole ones. It would train nothing, without a word, so its first step
raises; every rank made it at the same moment.

[Note: forgotten parameters]
``fully_shard`` on the outermost module is easily forgotten. What is in no unit is trained, and
nobody averages its gradients over ranks: they drift apart, without a word. An optimizer sees such
parameters beside sharded ones; its first step warns.

[Note: gradients that no optimizer sees]
Gradients may wait for a reduction: of a backward without sync, until the next backward of the same
root with sync. An optimizer's step in between goes on without them. It may be meant (one optimizer,
several roots), so it is told once. Gradients that nobody will ever reduce are an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp2._core.base import torch_compiler, torch_dealt
from fsdp2._core.base.errors import StateError
from fsdp2._core.base.warn import warn
from fsdp2._core.params import registration
from fsdp2._core.params.param import OwnerMark, is_forgotten, stand_in_of
from fsdp2._core.params.reduce import may_hold

_is_watching = False
_looked_at: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
"""How many param groups of each optimizer were looked at."""
_placed: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
"""The table of states of each optimizer that were placed as owned parameters are."""


def watch_optimizers() -> None:
    """Let torch call this module around every optimizer step from now on."""
    global _is_watching
    if not _is_watching:
        _is_watching = True
        register_optimizer_step_pre_hook(_before)
        register_optimizer_step_post_hook(_after)


@torch_compiler.always_eager
def _before(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    groups = optimizer.param_groups
    if may_hold:
        _tell_of_unreduced(optimizer)
    if torch_dealt.Dealt.was_made:
        _place_states(optimizer)
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


def _place_states(optimizer: Optimizer) -> None:
    """Let states lie as their parameters do, if either is owned: torch's helpers load them so.

    Of torch's own optimizers and others that have a table of states; ours look themselves.
    """
    table = vars(optimizer).get("state")
    if table is None or _placed.get(optimizer) is table:
        return
    if table:  # to load states makes another table
        _placed[optimizer] = table
    for group in optimizer.param_groups:
        for param in group["params"]:
            if not isinstance(param, DTensor) or param not in table:
                continue
            if any(isinstance(t, torch_dealt.DealtTensor) for t in (param, *table[param].values())):
                torch_dealt.place_like(param, table[param])


def _tell_of_unreduced(optimizer: Optimizer) -> None:
    """See [Note: gradients that no optimizer sees]."""
    stepped = [OwnerMark.owner_of(p) for group in optimizer.param_groups for p in group["params"]]
    waiting = []
    for reducer in tuple(may_hold):
        if not reducer.has_unreduced:
            may_hold.discard(reducer)
        elif any(param in stepped for param in reducer.params):
            reducer.refuse_hidden()
            waiting.append(reducer.ids.fqn or "<root>")
    if waiting:
        warn(
            "FS710",
            f"{type(optimizer).__name__}: {', '.join(sorted(waiting))}: gradients of a "
            "backward without sync wait here, and this step does not see them. The next "
            "backward with sync reduces them, if its forward begins at the same outermost "
            "unit. Run that before the step, or call zero_grad() on the model to drop them.",
        )


def _warn_of_forgotten(optimizer: Optimizer) -> None:
    """See [Note: forgotten parameters]."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    forgotten = [param for param in params if is_forgotten(param)]
    sharded = [param for param in params if OwnerMark.owner_of(param) is not None]
    if forgotten and any(param.device_mesh.size() > 1 for param in sharded):
        warn(
            "FS709",
            f"{type(optimizer).__name__}: {len(forgotten)} of its parameters are in no unit "
            f"(the first has shape {tuple(forgotten[0].shape)}), so fsdp2 does not average "
            "their gradients over ranks. Call fully_shard on the outermost module, after the "
            "inner ones. If something else averages them, as DistributedDataParallel does, "
            "pass them as ignored_params.",
        )


@torch_compiler.always_eager
def _after(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if any(isinstance(param, DTensor) for param in _params_of(optimizer)) or (
        registration.lie_in_shards(_params_of(optimizer))
    ):
        registration.optimizer_steps.count += 1


def _params_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])

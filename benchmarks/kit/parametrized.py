"""Sharding by parametrization: an independent small version of the idea of torchtitan's SimpleFSDP.

Every parameter is a DTensor, split by rows. Reading it as an attribute of its module casts and
gathers it; the derivative of that reduces and casts the gradient. A checkpoint around the read lets
the compiler gather again in backward. There are no units, no hooks and no buckets: whoever compiles
the model sees a collective for each parameter.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


def parametrize(model: nn.Module, mesh: DeviceMesh, *, bf16: bool = False) -> nn.Module:
    """Shard a model's parameters over a mesh of one axis, and gather each where it is read."""
    dtypes = (torch.bfloat16, torch.float32) if bf16 else (None, None)
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        for name, parameter in own.items():
            sharded = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(sharded))
        reads = {name: property(functools.partial(_read, name=name, dtypes=dtypes)) for name in own}
        if reads:
            module.__class__ = type(f"Read{type(module).__name__}", (type(module),), reads)
    return model


def _read(module: nn.Module, name: str, dtypes: tuple[Any, Any]) -> Tensor:
    def gather(sharded: DTensor) -> Tensor:
        to, back = dtypes
        whole = sharded.redistribute(
            placements=[Replicate()], forward_dtype=to, backward_dtype=back
        )
        return whole.to_local(grad_placements=[Partial("avg")])

    kept: Tensor = checkpoint(
        gather,
        module._parameters[name],
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, _policy),
    )
    return kept


def _policy(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    names = ("all_gather_into_tensor", "wait_tensor", "_to_copy")
    if operation.overloadpacket.__name__.split("::")[-1] in names:
        return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.PREFER_RECOMPUTE

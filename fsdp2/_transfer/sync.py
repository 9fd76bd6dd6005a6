"""``sync_from_rank0``: one model on all ranks, before it is sharded.

Owns the checks that ranks hold the same model, up to values. It must not know shards.
"""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._base.arguments import check_module
from fsdp2._base.errors import ConfigError
from fsdp2._comm.process_mesh import operation
from fsdp2._engine.between_steps import units_below
from fsdp2._param_group.group import ParamGroup
from fsdp2._transfer.redistribute import STAGED_NBYTES, Grids, checked_together, scatter


@operation("sync_from_rank0")
def sync_from_rank0(model: nn.Module) -> nn.Module:
    """Give parameters and buffers of every rank the values of rank 0. Returns the model.

    For a model that each rank built by itself, or that rank 0 alone loaded. Call it **before**
    ``fully_shard``: that keeps each rank's own rows, and rank 0 does not have the others' rows any
    more. Collective over all ranks, in pieces of 64 MiB. For a model on the meta device there is
    ``materialize(..., sync_from_rank0=True)``, for a whole state ``checkpoint.load_full_state``.

    Raises:
        ConfigError: not a module; a parameter that is sharded already, or on meta; ranks have other
            names, shapes or dtypes. Every rank raises it, and nothing was changed.
    """
    with checked_together("sync_from_rank0", model):
        check_module("sync_from_rank0", "model", model)
    tensors: list[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    grids, helds = Grids([]), []
    with grids.main.together("sync_from_rank0"):  # ranks may have different models
        for group in (group for unit in units_below(model) for group in unit.own_groups):
            require_replicas("sync_from_rank0", group)
        for name, tensor in tensors:
            if tensor.is_meta or isinstance(tensor, DTensor):
                raise ConfigError(
                    "FS227",
                    f"sync_from_rank0: expected plain tensors with memory, found {name} on the "
                    "meta device or as a DTensor. Call it before the model is sharded; "
                    "materialize() is for meta.",
                )
            helds.append(grids.hold(name, tensor))
    seen = [f"{name}: {t.dtype} of shape {tuple(t.shape)}" for name, t in tensors]
    difference = grids.difference(seen)
    if difference is not None:
        raise ConfigError(
            "FS404",
            f"sync_from_rank0: ranks have different models. Found {difference}. Build the model in "
            "the same way on every rank.",
        )
    with torch.no_grad():
        for held in helds:
            scatter([held], STAGED_NBYTES, lambda held: held.local)
    return model


def require_replicas(what: str, group: ParamGroup) -> None:
    """Raise ConfigError if ranks hold rows of their own of a group's parameters.

    These came from each rank's own values, and no rank has the rest of them: where the ranks
    differed, the shards are parts of different tensors.
    """
    if group.data.shard.size == 1:
        return
    for param in group.params:
        if not param.is_on_meta and param.placement.layout.dim is not None:
            raise ConfigError(
                "FS227",
                f"{what}: {param.fqn} is sharded already, from the values that each rank had, and "
                "rank 0 has its own rows only. Call fsdp2.sync_from_rank0(model) before "
                "fully_shard, or load a whole state with checkpoint.load_full_state.",
            )

"""Which shard a registered parameter holds: what a group's plan copies in.

Owns the sources of a plan, and the refusal of what cannot be one. It must not know states or
buffers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._base import torch_dtensor
from fsdp2._base.errors import StateError
from fsdp2._param_group import packing
from fsdp2._param_group.extension import needs_extension, own_shard
from fsdp2._param_group.param import FSDPParam

Source = tuple[Tensor, nn.Parameter | None]
"""A shard, unpadded, and the registered parameter that holds it (None: one is to be made)."""


def own_rows(param: FSDPParam, whole: Tensor, rank: int) -> Tensor:
    """View this rank's rows of a whole parameter; an extended one copies them."""
    whole = torch_dtensor.local_part(whole.detach())
    if needs_extension(whole):
        return own_shard(whole, param, rank)
    return packing.shard_of(whole, param.placement.layout, rank)


def own_sources(params: Iterable[FSDPParam]) -> list[Source]:
    """Return the shards that parameters hold now."""
    return [(torch_dtensor.local_tensor(param.sharded), param.sharded) for param in params]


def source_of(param: FSDPParam, new: Tensor | None, rank: int) -> Source:
    """Return the shard that a replaced parameter holds.

    Raises:
        StateError: what is registered is no parameter, or cannot be sharded as the old one was.
    """
    placement = param.placement
    if isinstance(new, nn.Parameter):
        if placement.is_sharded(new):
            local, fits = torch_dtensor.local_tensor(new), placement.layout.shard_shape(rank)
            if tuple(local.shape) != fits or local.layout is not torch.strided:
                raise StateError(
                    "FS317",
                    f"{param.fqn}: its local tensor was replaced by one of shape "
                    f"{tuple(local.shape)} and layout {local.layout}. This rank's shard is dense, "
                    f"of shape {fits}. Put one of that shape there, or a whole nn.Parameter on "
                    "the module.",
                )
            return local, new
        if placement.is_unsharded(new):
            return own_rows(param, new, rank), None
    found = "nothing" if new is None else f"{type(new).__name__} of shape {tuple(new.shape)}"
    if isinstance(new, DTensor):
        found += f" with placements {new.placements} on {new.device_mesh}"
    raise StateError(
        "FS317",
        f"{param.fqn}: was replaced by {found}, which this module cannot shard. Register an "
        f"nn.Parameter {placement.describe()}.",
    )

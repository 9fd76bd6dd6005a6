"""What is registered on the modules, seen from a group: sources for its plan.

Owns the question what the user did to registered parameters, and the answer to which shard each one
holds. It must not know buffers, states or collectives. A group asks before every forward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._base import torch_dtensor
from fsdp2._base.errors import StateError
from fsdp2._param_group import packing
from fsdp2._param_group.extension import needs_extension, own_shard
from fsdp2._param_group.param import FSDPParam, Site

Source = tuple[Tensor, nn.Parameter | None]
"""A shard, unpadded, and the registered parameter that holds it (None: one is to be made)."""


@dataclass(frozen=True)
class StandIn:
    """A tensor in a parameter's place that is no parameter (``functional_call``)."""

    site: Site
    param: FSDPParam
    tensor: Tensor


@dataclass(frozen=True)
class Findings:
    """What differs from what the group registered."""

    toggled: list[FSDPParam] = field(default_factory=list)
    cast: list[FSDPParam] = field(default_factory=list)
    replaced: dict[FSDPParam, Tensor | None] = field(default_factory=dict)
    stand_ins: list[StandIn] = field(default_factory=list)


def look(params: Iterable[FSDPParam]) -> Findings:
    """Compare what is registered with what the group registered, by identity. Changes nothing."""
    findings = Findings()
    for param in params:
        sharded, unsharded = param.sharded, param.unsharded
        trainable = param.trainable
        if sharded.requires_grad is not trainable or (
            unsharded is not None and unsharded.requires_grad is not trainable
        ):
            findings.toggled.append(param)
        if unsharded is not None and unsharded.dtype is not param.unsharded_dtype:
            findings.cast.append(param)
        if torch_dtensor.local_tensor(sharded) is not param.local:
            findings.replaced[param] = sharded
        for site in param.sites:
            found: Tensor | None = site.module._parameters.get(site.name)
            if found is sharded:
                continue
            if found is None or isinstance(found, nn.Parameter):
                if found is None or (found is not unsharded and found is not param.post_forward):
                    findings.replaced[param] = found
            else:
                findings.stand_ins.append(StandIn(site, param, found))
    return findings


def refuse_assigned_data(param: FSDPParam) -> None:
    """Raise StateError for a sharded parameter of which ``.data`` was assigned."""
    raise StateError(
        f"{param.fqn}: found an assignment to .data, which a DTensor forgets: its shard still has "
        "the old values, and the new ones are gone. Write in place (under no_grad: "
        "param.copy_(new)), or register a new nn.Parameter."
    )


def own_rows(param: FSDPParam, whole: Tensor, rank: int) -> Tensor:
    """View this rank's rows of a whole parameter; an extended one copies them."""
    whole = whole.detach()
    if isinstance(whole, DTensor):
        whole = torch_dtensor.local_tensor(whole)
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
                    f"{param.fqn}: its local tensor was replaced by one of shape "
                    f"{tuple(local.shape)} and layout {local.layout}. This rank's shard is dense, "
                    f"of shape {fits}. Put one of that shape there, or a whole nn.Parameter on "
                    "the module."
                )
            return local, new
        if placement.is_unsharded(new):
            return own_rows(param, new, rank), None
    found = "nothing" if new is None else f"{type(new).__name__} of shape {tuple(new.shape)}"
    if isinstance(new, DTensor):
        found += f" with placements {new.placements} on {new.device_mesh}"
    raise StateError(
        f"{param.fqn}: was replaced by {found}, which this module cannot shard. Register an "
        f"nn.Parameter {placement.describe()}."
    )

"""``units``: describe the result of each ``fully_shard`` call as plain values and as a short text.

Does not modify the model, and does not communicate.
"""

import math
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2._core.base.errors import check_module
from fsdp2._core.base.names import nbytes_text
from fsdp2._core.engine.between_steps import units_below
from fsdp2._core.engine.tree import Unit, unit_of
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.param import FSDPParam


@dataclass(frozen=True)
class ShardInfo:
    """One parameter of a unit, and this rank's shard of it.

    ``names`` are the parameter's names in the inspected model; a tied parameter has several names.
    ``shape`` and ``stride`` describe the full parameter (or this rank's tensor-parallel part).
    ``dtype`` is the dtype of the shard. ``dim`` is the sharded dim, or None if every rank has the
    full parameter. ``local_shape`` is the shape of this rank's shard, without padding. ``start`` is
    the index of the shard's first row along ``dim``. ``owner`` is the ``shard_rank`` of the only
    rank that stores the parameter (``Whole``), else None. ``block`` is the block size in rows along
    ``dim`` (``Aligned``), else None. ``nbytes`` is the size of the shard in bytes, including
    padding. ``offset`` is the shard's offset in bytes in the group's flat buffer of shards, or None
    if an extension stores the shard elsewhere.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    placements: tuple[Any, ...]
    requires_grad: bool
    dim: int | None
    start: int
    local_shape: tuple[int, ...]
    offset: int | None
    nbytes: int
    owner: int | None = None
    block: int | None = None


@dataclass(frozen=True)
class GroupInfo:
    """Parameters of a unit that are gathered and reduced together.

    ``shard_rank`` is this rank's index on the shard axis of ``mesh``, from 0. ``shard_size`` and
    ``replicate_size`` are the sizes of the shard axis and the replicate axis, or 1 if ``mesh`` has
    no such axis. ``state`` is ``"sharded"``, ``"unsharded"``, or ``"sharded_post_forward"``, which
    means sharded over fewer ranks between forward and backward. ``nbytes`` is the size of this
    rank's shards in bytes, including padding. ``shards`` has one entry per parameter.
    """

    mesh: DeviceMesh
    shard_rank: int
    shard_size: int
    replicate_size: int
    state: str
    nbytes: int
    shards: tuple[ShardInfo, ...]


@dataclass(frozen=True)
class UnitInfo:
    """The result of one ``fully_shard`` call.

    ``names`` are the names of the unit's modules in the inspected model (``""`` is the model).
    Before the first forward, ``is_root`` is True if no unit encloses this unit; afterwards, it is
    True if that forward began with this unit. ``is_conditional`` and ``reshard_after_forward`` are
    the values passed to ``fully_shard`` or to a later setter. ``groups`` has one entry for each
    mesh on which the unit has parameters, and one for each large part of a root. ``str()``
    summarises the unit in one line, with its tied parameters and its parameters' size on this rank.
    """

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    is_root: bool
    is_conditional: bool
    reshard_after_forward: bool | int | None
    groups: tuple[GroupInfo, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The first name of each parameter, in the order of the flat buffers."""
        return tuple(shard.names[0] for group in self.groups for shard in group.shards)

    def __str__(self) -> str:
        """Summarise the unit: module names, bytes on this rank, and numbers of ranks."""
        name = ", ".join(name or "<root>" for name in self.names)
        shards = [shard for group in self.groups for shard in group.shards]
        if not shards:
            return f"{name}: unit without parameters"
        here = sum(math.prod(shard.local_shape) * shard.dtype.itemsize for shard in shards)
        whole = sum(math.prod(shard.shape) * shard.dtype.itemsize for shard in shards)
        places = {
            f"{group.shard_size}"
            + (f" x {group.replicate_size} replicas" if group.replicate_size > 1 else "")
            for group in self.groups
        }
        count = f"{len(shards)} parameter" + ("s" if len(shards) > 1 else "")
        ties = [" = ".join(shard.names) for shard in shards if len(shard.names) > 1]
        return (
            f"{name}: unit of {count}, {nbytes_text(here)} of {nbytes_text(whole)} on this rank, "
            f"sharded over {' and '.join(sorted(places))}"
            + (f"; tied: {', '.join(ties)}" if ties else "")
        )


def tied_lines(module: nn.Module) -> list[str]:
    """Return ``"tied: <names>"`` for each tied parameter whose names are all in this module, but
    not all in one inner sharded module."""
    params = [
        param
        for unit in units_below(module)
        for group in unit.own_groups
        for param in group.params
        if len(param.sites) > 1
    ]
    if not params:
        return []
    names = _names_below(module)
    inner = [set(part.modules()) for part in names if part is not module and unit_of(part)]

    def has_all(parts: Container[nn.Module], param: FSDPParam) -> bool:
        return all(site.module in parts for site in param.sites)

    return [
        f"tied: {' = '.join(_names_of(param, names))}"
        for param in params
        if has_all(names, param) and not any(has_all(parts, param) for parts in inner)
    ]


def units(model: nn.Module) -> list[UnitInfo]:
    """Describe the units in a model, outermost first, with this rank's shards.

    Reads only shapes and sizes, and does not communicate. Returns an empty list if the model is
    not sharded.

    Raises:
        ConfigError: ``model`` is not a module.

    Source: ``fsdp_modules`` and the shard metadata of torch's FSDP1.
    """
    check_module("units", "model", model)
    names = _names_below(model)
    found = units_below(model)
    below: set[Unit] = set()
    for unit in found:
        below |= {other for top in unit.modules for other in units_below(top)} - {unit}
    return [
        UnitInfo(
            names=tuple(names[module][0] for module in unit.modules if module in names),
            modules=unit.modules,
            is_root=unit.is_root if unit.runtime is not None else unit not in below,
            is_conditional=unit.conditional,
            reshard_after_forward=unit.settings.reshard_after_forward,
            groups=tuple(_group_info(group, names) for group in unit.own_groups),
        )
        for unit in found
    ]


def _names_below(model: nn.Module) -> dict[nn.Module, list[str]]:
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def _names_of(param: FSDPParam, names: dict[nn.Module, list[str]]) -> tuple[str, ...]:
    found = [
        f"{prefix}.{site.name}" if prefix else site.name
        for site in param.sites
        for prefix in names.get(site.module, [])
    ]
    return tuple(dict.fromkeys(found))


def _group_info(group: ParamGroup, names: dict[nn.Module, list[str]]) -> GroupInfo:
    data = group.data
    shards = tuple(_shard_info(param, names, data.shard.rank) for param in group.params)
    return GroupInfo(
        mesh=data.mesh,
        shard_rank=data.shard.rank,
        shard_size=data.shard.size,
        replicate_size=data.replicate.size,
        state=group.registration.form.name.lower(),
        nbytes=sum(shard.nbytes for shard in shards),
        shards=shards,
    )


def _shard_info(param: FSDPParam, names: dict[nn.Module, list[str]], rank: int) -> ShardInfo:
    layout, sharded = param.placement.layout, param.sharded
    assert isinstance(sharded, DTensor)
    span, local = param.span, param.local
    nbytes = span.nbytes if span is not None else 0 if local is None else local.nbytes
    deal = layout.deal
    return ShardInfo(
        names=_names_of(param, names) or (param.fqn,),
        shape=layout.shape,
        stride=layout.stride,
        dtype=sharded.dtype,
        placements=tuple(sharded.placements),
        requires_grad=param.trainable,
        dim=layout.dim,
        start=layout.start(rank),
        local_shape=layout.shard_shape(rank),
        offset=None if span is None else span.start,
        nbytes=nbytes,
        owner=layout.owner,
        block=None if deal is None or deal.owner is not None else deal.block,
    )

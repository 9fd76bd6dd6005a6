"""Which parameters and buffers a call of ``fully_shard`` takes.

Owns the walk over the module tree, ties, and every check of a parameter. It changes nothing until
``take_ties``. It must not know hooks or phases.

[Note: ties]
A parameter that is registered in several places is one ``FSDPParam`` with several sites, and stays
one object under every name. Places in different units are joined as the calls arrive, bottom up:
the first unit takes the parameter, later ones add their sites, and the first unit that contains
every path to a site takes it over, because only that unit's forward spans all its uses. A unit may
contain every site and not every path: another module around it may contain a site, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp2._core.api.policies import Ignored
from fsdp2._core.base import torch_modules
from fsdp2._core.base.errors import ConfigError, StateError
from fsdp2._core.base.names import class_name
from fsdp2._core.base.rows import Deal
from fsdp2._core.comm.mesh import DataMesh
from fsdp2._core.engine.between_steps import units_below
from fsdp2._core.engine.tree import Unit, unit_of
from fsdp2._core.params.deals import Claim, deal_blocks, give, given_so_far
from fsdp2._core.params.extension import (
    brings_extension,
    check_extension,
    dealt_refused,
    smaller_mesh_refused,
)
from fsdp2._core.params.param import SUMMONED, FSDPParam, OwnerMark
from fsdp2._core.params.placement import ParamPlacement, claim_of, place, shard_dim, shard_mesh
from fsdp2._core.params.registration import Site

PART_NBYTES = 1 << 20
"""Unsharded bytes from which on a submodule of a root is a group of its own.

See ``_core.engine.parts``.
"""


class BufferSite(NamedTuple):
    """A buffer on a module."""

    module: nn.Module
    name: str

    def move_to(self, device: torch.device) -> None:
        """Move the buffer, unless it is there, on meta, or a DTensor (which follows its mesh)."""
        buffer = self.module._buffers[self.name]
        if buffer is None or isinstance(buffer, DTensor):
            return
        if buffer.device not in (device, torch.device("meta")):
            self.module._buffers[self.name] = buffer.to(device)


@dataclass(frozen=True)
class Taken:
    """A parameter that a call takes: where it is registered, and where its shards will lie.

    ``releases_gathered``: see ``FSDPParam``.
    """

    fqn: str
    sites: list[Site]
    data: DataMesh
    placement: ParamPlacement
    releases_gathered: bool | None = None


@dataclass
class Collected:
    """What a call takes: own parameters by original, sites and parameters of ties, buffers.

    ``meshes``: that of the call, and those that its parameters were given. ``left_alone``: what the
    call was told to ignore, and what torch's ``replicate`` looks after.
    """

    meshes: list[DataMesh]
    left_alone: set[Tensor]
    own: dict[nn.Parameter, Taken] = field(default_factory=dict)
    tied: dict[FSDPParam, list[Site]] = field(default_factory=dict)
    shared: dict[FSDPParam, list[nn.Module]] = field(default_factory=dict)
    escaped: dict[Unit, list[FSDPParam]] = field(default_factory=dict)
    buffers: list[BufferSite] = field(default_factory=list)


def collect(
    modules: Sequence[nn.Module],
    data: DataMesh,
    placement_fn: Callable[[nn.Parameter], Any] | None,
    ignored: Ignored,
) -> Collected:
    """Find, check and place the parameters of ``modules`` that no unit below them has taken.

    Raises:
        ConfigError: a parameter that cannot be sharded; the message names it.
    """
    collected = Collected([data], set(ignored.tensors))
    found: dict[nn.Parameter, tuple[str, list[Site]]] = {}
    giving: set[nn.Module] = set()  # those of `modules` that have a parameter to take
    for top, prefix, module in _managed(modules, ignored, collected.left_alone):
        for name, param in module._parameters.items():
            if param is None or param in ignored:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            site, owner = Site(module, name), OwnerMark.owner_of(param)
            if owner is None:
                found.setdefault(param, (fqn, []))[1].append(site)
            elif any(s.module is module and s.name == name for s in owner.sites):
                collected.shared.setdefault(owner, []).append(top)  # a module of two units
                continue
            else:
                collected.tied.setdefault(owner, []).append(site)
            giving.add(top)
        collected.buffers += [
            BufferSite(module, name)
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer not in ignored
        ]
    choices: dict[nn.Parameter, tuple[int | None, DataMesh]] = {}
    claims: dict[DataMesh, dict[nn.Parameter, Claim]] = {}
    for param, (fqn, _) in found.items():
        _check_param(param, fqn, data)
        choice = None if placement_fn is None else placement_fn(param)
        choice, chosen = shard_mesh(choice, fqn, data)
        dim = shard_dim(choice, param, fqn)
        choices[param] = dim, chosen
        claim = claim_of(choice, param, dim, fqn, chosen)
        if claim is not None:
            claims.setdefault(chosen, {})[param] = claim
        if chosen not in collected.meshes:
            collected.meshes.append(chosen)
    deals = _deal(claims)
    for param, (fqn, sites) in found.items():
        dim, chosen = choices[param]
        releases = check_extension(param, fqn, by_rows=dim == 0 and param not in deals)
        placement = place(param, fqn, chosen, dim, deals.get(param))
        collected.own[param] = Taken(fqn, sites, chosen, placement, releases)
    on_meta = [fqn for param, (fqn, _) in found.items() if param.is_meta]
    if 0 < len(on_meta) < len(found):
        raise ConfigError(
            "FS207",
            f"fully_shard: found parameters on meta ({', '.join(on_meta)}) beside real ones in "
            "one group. Materialise all of them, or none, or shard their modules separately.",
        )
    _refuse_inside(collected.shared, giving)
    _find_escaped(collected, modules)
    return collected


def _deal(claims: dict[DataMesh, dict[nn.Parameter, Claim]]) -> dict[nn.Parameter, Deal]:
    """Return the deals of parameters whose rows are to lie in whole blocks."""
    deals: dict[nn.Parameter, Deal] = {}
    for used, of_mesh in claims.items():
        loads = given_so_far(used.shard.pg, used.shard.size)
        chosen = deal_blocks(list(of_mesh.values()), loads)
        deals.update(zip(of_mesh, chosen, strict=True))
    return deals


def count_dealt(collected: Collected) -> None:
    """Count what the call deals to ranks, for the calls after it. See ``deals``."""
    for param, taken in collected.own.items():
        layout, axis = taken.placement.layout, taken.data.shard
        if layout.deal is not None:  # counted whole: alike on ranks of all other axes
            assert layout.dim is not None
            shape, block, is_long = tuple(param.shape), layout.deal.block, bool(layout.deal.ends)
            claim = Claim(shape, param.dtype.itemsize, layout.dim, block, is_long=is_long)
            give(axis.pg, claim, layout.deal, axis.size)


def _refuse_inside(shared: dict[FSDPParam, list[nn.Module]], giving: set[nn.Module]) -> None:
    """Raise ConfigError for a module of the call whose parameters an outer unit manages.

    A module in ``giving`` has other parameters as well, added after the outer call: it may be a
    unit.
    """
    for param, users in shared.items():
        for outer in param.tops:
            inside = set(outer.modules())
            for module in users:
                if module is not outer and module in inside and module not in giving:
                    raise ConfigError(
                        "FS202",
                        f"fully_shard: the parameters of this {class_name(module)} are taken: "
                        f"fully_shard was applied to the {class_name(outer)} around it before. "
                        "Apply it to inner modules first, and to the outermost one last.",
                    )


def refuse_smaller(collected: Collected) -> None:
    """Raise ConfigError if a parameter cannot be sharded over a smaller mesh after forward."""
    escaped = [param for params in collected.escaped.values() for param in params]
    names = [param.fqn for param in escaped if param.is_extended]
    names += [own.fqn for original, own in collected.own.items() if brings_extension(original)]
    if names:
        raise ConfigError("FS211", smaller_mesh_refused(names[0]))
    found = [(param.fqn, param.placement.layout.deal) for param in escaped]
    found += [(own.fqn, own.placement.layout.deal) for own in collected.own.values()]
    for fqn, deal in found:
        if deal is not None:
            raise ConfigError("FS211", dealt_refused(fqn, deal))


def take_ties(collected: Collected, tops: tuple[nn.Module, ...]) -> dict[DataMesh, list[FSDPParam]]:
    """Add sites to tied parameters; return those that the new unit, of ``tops``, takes over.

    See [Note: ties].
    """
    escaped: dict[DataMesh, list[FSDPParam]] = {}
    for param, sites in collected.tied.items():
        param.sites.extend(sites)
        for site in sites:
            site.module._parameters[site.name] = param.sharded
    for param, users in collected.shared.items():
        param.uses.extend(users)
    for unit, params in collected.escaped.items():
        for param in params:
            param.tops = tops
        for data, released in _release(unit, params):
            escaped.setdefault(data, []).extend(released)
    return escaped


def _release(unit: Unit, params: Sequence[FSDPParam]) -> Iterator[tuple[DataMesh, list[FSDPParam]]]:
    """Give parameters up to another unit; yield them by mesh. A group of none is none."""
    for group in unit.own_groups:
        taken = [param for param in group.params if param in params]
        if taken:
            group.release(taken)
            yield group.data, taken
    unit.own_groups[:] = [group for group in unit.own_groups if group.params]


def find_parts(
    modules: Sequence[nn.Module], params: Sequence[FSDPParam]
) -> dict[nn.Module, list[FSDPParam]]:
    """Return large submodules, and the parameters of each. See ``_core.engine.parts``.

    If ``modules`` contain other units, these are the largest submodules that do not; only the
    parameters that nobody outside of one shares count.
    Otherwise it is the module itself, if it is the only one and has no submodules.
    """
    parts: dict[nn.Module, list[FSDPParam]] = {}
    if any(units_below(module) for module in modules):
        candidates = list(_unitless(modules))
    else:
        candidates = [m for m in modules if len(modules) == 1 and not any(m.children())]
    for module in candidates:
        inside = set(module.modules())
        own = [param for param in params if all(place in inside for place in param.places)]
        if sum(param.nbytes for param in own) >= PART_NBYTES:
            parts[module] = own
    return parts


def _unitless(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Yield the largest modules below ``modules`` that are no units and contain none."""
    for module in modules:
        for child in module.children():
            if unit_of(child) is not None:
                continue
            if units_below(child):
                yield from _unitless([child])
            else:
                yield child


def _find_escaped(collected: Collected, modules: Sequence[nn.Module]) -> None:
    """Find the parameters of units below that are used outside of their unit but inside ours.

    Raises:
        ConfigError: such a parameter lies on a mesh that this call does not use.
    """
    parents: dict[nn.Module, list[nn.Module]] = {}
    for unit in dict.fromkeys(unit for module in modules for unit in units_below(module)):
        for group in unit.own_groups:
            for param in group.params:
                places = param.places + collected.shared.get(param, [])
                places += [site.module for site in collected.tied.get(param, [])]
                if len(places) == 1:
                    continue
                parents = parents or _parents(modules)
                if not all(place in parents for place in places):
                    continue
                if not _is_reached_outside(unit, places, parents):
                    continue
                if group.data not in collected.meshes:
                    meshes = " and ".join(str(data.mesh) for data in collected.meshes)
                    raise ConfigError(
                        "FS209",
                        f"{param.fqn}: is tied across units on different meshes, "
                        f"{group.data.mesh} and {meshes}. Pass the inner fully_shard the mesh of "
                        "the outer one.",
                    )
                collected.escaped.setdefault(unit, []).append(param)


def _parents(modules: Sequence[nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """Return all modules that contain each module as a child; none for ``modules``."""
    parents: dict[nn.Module, list[nn.Module]] = {top: [] for top in modules}
    for top in modules:
        for module in top.modules():
            for child in module.children():
                parents.setdefault(child, []).append(module)
    return parents


def _is_reached_outside(
    unit: Unit, places: Iterable[nn.Module], parents: dict[nn.Module, list[nn.Module]]
) -> bool:
    """Return True if a path from the outermost modules to a place does not lead through a unit."""
    seen, pending = set(unit.modules), list(places)
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        if not parents[module]:
            return True
        seen.add(module)
        pending += parents[module]
    return False


def _managed(
    modules: Sequence[nn.Module], ignored: Ignored, left_alone: set[Tensor]
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield (top, name, module) for modules that no unit or other composable API below has.

    Parameters of the other API are added to ``left_alone``.
    """
    seen: set[nn.Module] = set()

    def walk(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or module in ignored.modules:
            return
        seen.add(module)
        yield prefix, module
        for name, child in module.named_children():
            if unit_of(child) is not None:
                continue
            if "replicate" in torch_modules.composable_names(child):
                left_alone.update(child.parameters())
            else:
                yield from walk(f"{prefix}.{name}" if prefix else name, child)

    for top in modules:
        for prefix, module in walk("", top):
            yield top, prefix, module


def _check_param(param: nn.Parameter, fqn: str, data: DataMesh) -> None:
    if is_lazy(param):
        raise ConfigError(
            "FS205",
            f"{fqn}: has no shape yet, because its module is lazy. Run the module once on an "
            "example input, then apply fully_shard.",
        )
    if param.__dict__.get(SUMMONED) is not None:
        raise StateError(
            "FS306",
            f"{fqn}: fully_shard was called inside summon_full_params, where the parameters of "
            "another unit are registered whole. Leave the context first.",
        )
    if isinstance(param, DTensor) and data.full is None and param.device_mesh == data.mesh:
        raise ConfigError(
            "FS202",
            f"{fqn}: is already a DTensor on {data.mesh}, the mesh to shard over. Pass fully_shard "
            "another dim of a common mesh than parallelize_module, or register a plain parameter "
            "(full_tensor()).",
        )
    if param.layout is not torch.strided:
        raise ConfigError(
            "FS206",
            f"{fqn}: expected a dense parameter, found layout {param.layout}. Convert it, or put "
            "it into ignored_params.",
        )

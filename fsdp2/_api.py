"""``fully_shard`` and ``register_fsdp_forward_method``: check everything, then change the module.

Owns the order in which a call checks, collects, shards and installs. It must not know when things
happen in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from fsdp2._checks import (
    check_ignored,
    check_method,
    check_modules,
    check_placement_fn,
    check_policies,
    check_reshard,
)
from fsdp2._collect import Collected, collect, take_ties
from fsdp2._group import ParamGroup
from fsdp2._hooks import UNIT_ATTRIBUTE, ForwardMethod, register_hooks, unit_of
from fsdp2._mesh import DataMesh, check_mesh, default_mesh
from fsdp2._module import FSDPModule, register_names, sharded_class
from fsdp2._param import FSDPParam
from fsdp2._policy import MixedPrecisionPolicy, OffloadPolicy, Settings
from fsdp2._unit import Unit

M = TypeVar("M", nn.Module, list[nn.Module])
ShardPlacementFn = Callable[[nn.Parameter], Placement | None]


def fully_shard(
    module: M,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # frozen
    ignored_params: set[nn.Parameter] | None = None,
) -> M:
    """Shard the parameters of a module, in place, over the data-parallel ranks.

    Parameters of ``module`` that no earlier call took become one group: gathered in one collective
    before forward (and again before backward), and their gradients reduced in one. Call it bottom
    up: on blocks first, on the root last. Afterwards ``parameters()`` yields DTensors under the
    same names, and the module's class is a subclass of ``FSDPModule`` and of its own class.

    Args:
        module: a module, or several that form one group.
        mesh: 1-D ``(shard,)`` or 2-D ``(replicate, shard)``. ``None``: all ranks.
        reshard_after_forward: ``True`` frees the parameters between forward and backward;
            ``False`` keeps them; an int, a divisor of the shard size, keeps them sharded over that
            many neighbouring ranks (1 means False, the shard size means True); ``None`` is True
            below the root and False at the root.
        shard_placement_fn: returns ``Shard(dim)`` for any dim (negative too; dims that the ranks
            do not divide too), ``Replicate()``, or ``None`` for ``Shard(0)``. Scalars replicate.
        mp_policy: dtypes of compute, reduction and outputs.
        offload_policy: where shards are kept.
        ignored_params: parameters to leave alone: not sharded, moved or reduced.

    Returns:
        ``module`` itself.

    Raises:
        ConfigError: an argument or a parameter cannot be used. Nothing was changed.

    Source: the meaning of the same function in ``torch.distributed.fsdp``, torch 2.13.
    """
    modules = check_modules(module)
    device_mesh = check_mesh(mesh if mesh is not None else default_mesh())
    data = DataMesh.of(device_mesh)
    smaller = check_reshard(reshard_after_forward, data.shard.size)
    check_policies(mp_policy, offload_policy)
    check_placement_fn(shard_placement_fn)
    classes = {target: sharded_class(type(target)) for target in modules}
    collected = collect(modules, data, shard_placement_fn, check_ignored(ignored_params))

    if smaller is None and reshard_after_forward is not None:
        reshard_after_forward = reshard_after_forward is True or reshard_after_forward > 1
    settings = Settings(reshard_after_forward=reshard_after_forward)
    unit = Unit(tuple(modules), mp_policy, settings)
    device = data.device
    params = _make_params(collected)
    params += take_ties(collected)
    if params:
        group = ParamGroup(data, mp_policy, device)
        group.shard(params)
        if smaller is not None:
            group.reshard_to(smaller)
        unit.groups.append(group)
    for buffer_site in collected.buffers:
        buffer_site.move_to(device)
    for target in modules:
        target.__dict__[UNIT_ATTRIBUTE] = unit
        register_names(target, unit)
        target.__class__ = classes[target]
    register_hooks(unit)
    return module


def _state(module: nn.Module) -> Unit | None:
    return unit_of(module)


fully_shard.state = _state  # type: ignore[attr-defined]  # the composable contract's accessor


def _make_params(collected: Collected) -> list[FSDPParam]:
    params = []
    for original, (fqn, sites, placement) in collected.own.items():
        param = FSDPParam(fqn, sites, placement, original)
        params.append(param)
    return params


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` gather and free parameters as ``module(...)`` does.

    Does nothing for a module that is not an ``FSDPModule``.

    Raises:
        ConfigError: the module has no such method, or it is a generator or a coroutine.
    """
    name = check_method(module, method_name)
    if isinstance(module, FSDPModule):
        module.__dict__[name] = ForwardMethod(module, name)

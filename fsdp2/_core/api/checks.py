"""Checks of what ``fully_shard`` and its relatives are given. Each raises, or returns.

Owns the messages for what only sharded modules are given; ``_core.base.arguments`` has those for
single values. It must not know how arguments are used.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp2._core.base import torch_modules
from fsdp2._core.base.arguments import described, wrong_type, wrong_value
from fsdp2._core.base.errors import ConfigError, ConfigTypeError
from fsdp2._core.base.names import class_name
from fsdp2._core.base.policy import (
    OUTER,
    SHARDINGS,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Sharding,
)
from fsdp2._core.comm.mesh import DataMesh
from fsdp2._core.engine.tree import unit_of


def check_modules(module: object) -> list[nn.Module]:
    candidates = list(module) if isinstance(module, list | tuple) else [module]
    if not candidates:
        raise ConfigError(
            "FS102", "fully_shard: found an empty list of modules. Pass at least one."
        )
    modules: list[nn.Module] = []
    for candidate in candidates:
        if not isinstance(candidate, nn.Module):
            raise ConfigTypeError(
                "FS101",
                f"fully_shard: expected an nn.Module or a list of them, found "
                f"{type(candidate).__name__}. Pass the module itself.",
            )
        if isinstance(candidate, torch.jit.ScriptModule):
            raise ConfigError(
                "FS204",
                f"fully_shard: found a ScriptModule, {candidate.original_name}, whose class cannot "
                "change. Shard the module that it was scripted from.",
            )
        modules.append(candidate)
    modules = _outermost(modules)
    for target in modules:
        if is_container(target):
            raise ConfigError(
                "FS201",
                f"fully_shard: {class_name(target)} has no forward, so nothing would gather "
                "its parameters. Apply fully_shard to each of its modules, or to its parent.",
            )
        if unit_of(target) is not None or "fully_shard" in torch_modules.composable_names(target):
            raise ConfigError(
                "FS202",
                f"fully_shard: was already applied to this {class_name(target)}. Apply it "
                "once to each module.",
            )
        if "replicate" in torch_modules.composable_names(target):
            raise ConfigError(
                "FS203",
                f"fully_shard: replicate was already applied to this {class_name(target)}, and "
                "manages its parameters. Apply one of the two to a module.",
            )
    return modules


def is_container(module: nn.Module) -> bool:
    """True for a list or a dict of modules without a forward, which would gather parameters."""
    is_several = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return is_several and type(module).forward is nn.Module.forward


def _outermost(modules: Sequence[Any]) -> list[nn.Module]:
    """Drop repeated modules, and modules inside another of the list."""
    unique = list(dict.fromkeys(modules))
    inner = {child for top in unique for child in top.modules() if child is not top}
    return [top for top in unique if top not in inner]


def check_reshard(choice: object, data: DataMesh) -> int | None:
    """Return the number of ranks to reshard to, or None for a bool or ``None``."""
    size = data.shard.size
    if choice is None or isinstance(choice, bool):
        return None
    if not isinstance(choice, int):
        raise wrong_type("fully_shard", "reshard_after_forward", "None, a bool or an int", choice)
    if choice < 1 or size % choice:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        raise ConfigError(
            "FS211",
            f"fully_shard: found reshard_after_forward={described(choice)} for {size} shard ranks "
            f"on {data.mesh}. Pass a divisor: one of {divisors}.",
        )
    return None if choice in (1, size) else choice


def check_sharding(
    shard: object, outer: object, reshard_after_forward: object, offload: object
) -> Sharding:
    """Return what ``shard`` and ``shard_outer`` stand for, if the other arguments go with it."""
    expected = f"one of {', '.join(map(repr, SHARDINGS))}"
    if not isinstance(shard, str):
        raise wrong_type("fully_shard", "shard", expected, shard)
    if shard not in SHARDINGS:
        raise wrong_value("fully_shard", "shard", expected, shard)
    expected = f"one of {', '.join(map(repr, OUTER))}"
    if outer is not None and not isinstance(outer, str):
        raise wrong_type("fully_shard", "shard_outer", expected, outer)
    if outer not in OUTER:
        raise wrong_value("fully_shard", "shard_outer", expected, outer)
    sharding = SHARDINGS[shard]
    if outer is not None:
        if sharding.keeps_whole:
            raise ConfigError(
                "FS234",
                f"fully_shard: found {sharding.name} beside {OUTER[outer].name}. With whole "
                "parameters all ranks are one axis: leave shard_outer out, and pass a 1-D mesh of "
                "them.",
            )
        if type(reshard_after_forward) is int:
            raise ConfigError(
                "FS234",
                f"fully_shard: found reshard_after_forward={reshard_after_forward} beside "
                f"{OUTER[outer].name}, which reshards to the inner dim of the mesh. Leave it out.",
            )
        return OUTER[outer]
    if not sharding.keeps_whole:
        return sharding
    stays = f"fully_shard: found {sharding.name}, which keeps parameters whole on each rank"
    if reshard_after_forward is not None and reshard_after_forward is not False:
        raise ConfigError(
            "FS234",
            f"{stays}, and reshard_after_forward={described(reshard_after_forward)}, which frees "
            'them. Leave that out, or pass shard="parameters".',
        )
    if isinstance(offload, CPUOffloadPolicy):
        raise ConfigError(
            "FS234",
            f"{stays}, and a CPUOffloadPolicy, which copies them to the device for each use. Leave "
            'the policy out, or pass shard="parameters".',
        )
    return sharding


def check_layers(mesh: DeviceMesh, dims: object) -> None:
    """Raise ConfigError unless a mesh has an outer and an inner dim, of several ranks each."""
    found = f"{mesh.ndim} dims" if mesh.ndim != 2 else f"a shape of {tuple(mesh.shape)}"
    if dims is None and mesh.ndim == 2 and min(mesh.shape) > 1:
        return
    found = found if dims is None else "dp_mesh_dims"
    raise ConfigError(
        "FS234",
        "fully_shard: shard_outer needs a 2-D mesh of data-parallel dims, (outer, inner), with "
        f"several ranks along each, found {found}. Pass one without dp_mesh_dims; or leave "
        "shard_outer out, and pass a 1-D mesh of all ranks.",
    )


def check_method(module: object, name: object) -> str:
    """Return the name of a method of ``module`` that can be run between two hooks."""
    who = "register_fsdp_forward_method"
    if not isinstance(module, nn.Module):
        raise wrong_type(who, "module", "an nn.Module", module)
    if not isinstance(name, str):
        raise wrong_type(who, "method_name", "the name of a method", name)
    method = getattr(module, name, None)
    if not callable(method):
        raise ConfigError(
            "FS501",
            f"{who}: {type(module).__name__} has no method {described(name)}. Pass the name of one "
            "that it has.",
        )
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method):
        raise ConfigError(
            "FS502",
            f"register_fsdp_forward_method: {type(module).__name__}.{name} is a generator or a "
            "coroutine, whose body runs after the call returned, when parameters are sharded "
            "again. Register a method that returns its result.",
        )
    return name


def check_policies(mp_policy: object, offload_policy: object) -> None:
    """What is in a policy was checked when it was made."""
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        expected, hint = "a fsdp2.MixedPrecisionPolicy", ""
        if isinstance(mp_policy, torch.dtype):
            hint = f"Pass MixedPrecisionPolicy(param_dtype={mp_policy})."
        raise wrong_type("fully_shard", "mp_policy", expected, mp_policy, hint)
    if not isinstance(offload_policy, OffloadPolicy | None):
        expected = "a fsdp2.OffloadPolicy or None"
        raise wrong_type("fully_shard", "offload_policy", expected, offload_policy)


def check_comm(name: str, comm: object) -> None:
    """Accept anything with the two methods: the classes are there to document them."""
    is_class = isinstance(comm, type)
    if is_class or not callable(comm) or not callable(getattr(comm, "allocate", None)):
        raise wrong_type(
            name,
            "comm",
            "an object with allocate(size, dtype=, device=) that can be called",
            comm,
            "Pass an instance of a class derived from fsdp2.AllGather or fsdp2.ReduceScatter.",
        )

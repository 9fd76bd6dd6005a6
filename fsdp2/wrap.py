"""Shard a model with a wrap policy (``shard_model``), and make meshes for FSDP1's strategies.

Interprets wrap policies and the launcher's environment variables, and applies ``fully_shard``.

[Note: modules that a policy selects]
A policy is a collection of classes, a function of a module that returns a bool or keywords of
``fully_shard``, or a recursive FSDP1 policy, ``policy(module, recurse, nonwrapped_numel)``. It runs
for each module below the root, and only once if a module has several names. A recursive policy
decides before a module's children whether to recurse into the children, and decides after the
children whether to shard the rest of the module. A module without parameters is never selected. A
container without a ``forward`` is never called, so no hook could gather its parameters: the choice
for the container applies to each child instead.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import socket
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2._core.api.collect import (
    Asking,
    Choice,
    Chosen,
    Ignored,
    WrapPolicy,
    called_in,
    run_policy,
)
from fsdp2._core.api.fully_shard import check_call, fully_shard
from fsdp2._core.base import torch_comm, torch_modules
from fsdp2._core.base.errors import (
    ConfigError,
    check_count,
    check_device_type,
    check_module,
    described,
    wrong_type,
    wrong_value,
)
from fsdp2._core.base.names import children_first
from fsdp2._core.comm.mesh import default_device_type, default_mesh, require_process_group
from fsdp2._core.comm.process_mesh import Grid, operation
from fsdp2._core.engine.between_steps import units_below
from fsdp2._core.engine.tree import unit_of
from fsdp2._core.params.param import OwnerMark

__all__ = ["hybrid_mesh", "shard_model", "strategy"]

_SHARDING = Asking(
    "shard_model", "the model becomes a unit", "True, False, or a dict of keywords of fully_shard"
)

DEFAULTS = {  # defaults of fully_shard's keywords
    name: parameter.default
    for name, parameter in inspect.signature(fully_shard).parameters.items()
    if name != "module"
}
_OF_FSDP1 = {
    "sharding_strategy": "**fsdp2.wrap.strategy(...)",
    "process_group": "mesh",
    "device_mesh": "mesh",
    "mixed_precision": "mp_policy",
    "cpu_offload": "offload_policy",
    "auto_wrap_policy": "policy",
    "ignored_modules": "ignored_states",
}


def shard_model(
    model: nn.Module, policy: WrapPolicy, **fully_shard_kwargs: Any
) -> dict[str, dict[str, Any]]:
    """Apply ``fully_shard`` to the modules that a policy selects, innermost first, and to the root.

    Args:
        model: the root, changed in place. It always becomes a unit.
        policy: selects the units below the root. One of

            - a set (or list) of module classes, or torch's ``ModuleWrapPolicy``;
            - a function of a module that returns a bool, or a dict of keywords of ``fully_shard``
              that override ``fully_shard_kwargs`` (an empty dict means False), or torch's
              ``CustomPolicy`` with such a function;
            - a recursive FSDP1 policy: ``functools.partial(size_based_auto_wrap_policy,
              min_num_params=...)``.
        fully_shard_kwargs: keywords of ``fully_shard`` for all units, including the root.
            ``ignored_params`` and ``ignored_states`` apply to every unit, and the policy is not
            called for ignored modules. ``shard_placement_fn`` is called twice for each parameter,
            because all parameters are checked before any is sharded.

    Returns:
        The units in sharding order: a dict from each unit's first name (``""`` for the root) to the
        keywords that the policy returned for it.

    A module with several names is one unit. Parameters tied across several units belong to the
    first unit that contains all of them. The choice for a container without a ``forward``
    (``ModuleList``) applies to its children. Modules without parameters and modules that are
    already sharded are not selected. A class that matches no module triggers a warning.

    Raises:
        ConfigError: ``policy`` is not a policy; unknown keywords of ``fully_shard``; any error that
            ``fully_shard`` raises. Nothing was changed.

    Source: ``auto_wrap_policy`` of torch's ``FullyShardedDataParallel``.
    """
    check_module("shard_model", "model", model)
    _check_keywords(fully_shard_kwargs, "fully_shard_kwargs")
    names = {module: name for name, module in children_first(model)}
    kwargs = {  # the first unit would exhaust an iterator, such as `model.head.parameters()`
        name: list(value) if isinstance(value, Iterator) else value
        for name, value in fully_shard_kwargs.items()
    }
    ignored = Ignored.of(kwargs.get("ignored_params"), kwargs.get("ignored_states"))
    chosen: Chosen = {}
    for selected, choice in run_policy(policy, model, ignored, _SHARDING).items():
        for module in called_in(selected):
            has_any = any(param not in ignored for param in module.parameters())
            if has_any and module not in ignored.modules and (module not in chosen or choice):
                chosen[module] = choice
    chosen.pop(model, None)
    for module, choice in chosen.items():
        _check_keywords(choice, f"the policy's choice for {names[module]}")
    inside = {part for unit in units_below(model) for top in unit.modules for part in top.modules()}
    order = [
        module
        for module in names
        if module in chosen and not (module in inside and _is_taken(module))
    ]
    if kwargs.get("mesh") is None:
        kwargs = {**kwargs, "mesh": default_mesh()}
    taken = ignored.modules
    for module in (*order, model):  # check all before changing any
        with _naming(names[module]):
            check_call([module], {**DEFAULTS, **kwargs, **chosen.get(module, {})}, taken)
        taken |= {module}
    for module in (*order, model):
        with _naming(names[module]):
            fully_shard(module, **{**kwargs, **chosen.get(module, {})})
    return {**{names[module]: chosen[module] for module in order}, "": {}}


def _is_taken(module: nn.Module) -> bool:
    """Return True if the module, or each of its parameters, already belongs to a unit."""
    if unit_of(module) is not None:
        return True
    return all(OwnerMark.owner_of(param) is not None for param in module.parameters())


@contextlib.contextmanager
def _naming(unit: str) -> Iterator[None]:
    """Prefix errors with the unit's name, which ``fully_shard`` cannot determine."""
    try:
        yield
    except ConfigError as error:
        text = f"shard_model: {unit or '<root>'}: {error.text}"
        raise type(error)(error.code, text) from error


def _check_keywords(choice: Choice, what: str) -> None:
    for name in choice:
        if name not in DEFAULTS:
            instead = _OF_FSDP1.get(name)
            hint = f"Pass {instead} instead." if instead else f"Use one of {sorted(DEFAULTS)}."
            raise ConfigError(
                "FS214",
                f"shard_model: {name!r} in {what} is not a keyword of fully_shard. {hint}",
            )


def strategy(
    name: str | torch_modules.ShardingStrategy,
    mesh: DeviceMesh | None = None,
    *,
    device_type: str | None = None,
) -> dict[str, Any]:
    """Return the keywords of ``fully_shard`` that correspond to an FSDP1 sharding strategy.

    =====================  =============================  =========================
    strategy               mesh                           reshard_after_forward
    =====================  =============================  =========================
    FULL_SHARD             ``(all,)``                     True, but not at the root
    SHARD_GRAD_OP          ``(all,)``                     False
    NO_SHARD               ``(all, 1)``                   False
    HYBRID_SHARD           ``(nodes, ranks of a node)``   True, but not at the root
    _HYBRID_SHARD_ZERO2    ``(nodes, ranks of a node)``   False
    =====================  =============================  =========================

    ``NO_SHARD`` keeps full parameters on every rank and all-reduces gradients: its parameters are
    DTensors over a shard axis of size 1.

    Args:
        name: the strategy's name, or the member of torch's enum.
        mesh: 1-D for the first two strategies, ``(n, 1)`` for ``NO_SHARD``, 2-D for the last two.
            Default: a mesh over all ranks (``hybrid_mesh`` for the last two). Collective.
        device_type: device type of the default mesh. Default: the accelerator, else the CPU.

    Raises:
        ConfigError: an unknown strategy; a mesh that does not fit the strategy; no such device.

    Source: ``torch.distributed.fsdp.ShardingStrategy``.
    """
    key = name.name if isinstance(name, torch_modules.ShardingStrategy) else name
    known = torch_modules.ShardingStrategy.__members__
    expected = f"a ShardingStrategy or its name, one of {', '.join(known)}"
    if not isinstance(key, str):
        raise wrong_type("strategy", "name", expected, name)
    if key not in known:
        raise wrong_value("strategy", "name", expected, name)
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise wrong_type("strategy", "mesh", "a DeviceMesh or None", mesh)
    check_device_type("strategy", "device_type", device_type)
    keeps = key in ("SHARD_GRAD_OP", "NO_SHARD", "_HYBRID_SHARD_ZERO2")
    ndim = 1 if key in ("FULL_SHARD", "SHARD_GRAD_OP") else 2
    if mesh is None:
        mesh = _mesh_of(key, device_type)
    elif mesh.ndim != ndim or (key == "NO_SHARD" and mesh.size(1) != 1):
        wanted = "2-D, of shape (ranks, 1)" if key == "NO_SHARD" else f"{ndim}-D"
        raise ConfigError(
            "FS222",
            f"strategy: {key} needs a mesh that is {wanted}, found one of shape "
            f"{tuple(mesh.shape)}. Omit mesh to use all ranks.",
        )
    return {"mesh": mesh, "reshard_after_forward": False if keeps else None}


def _mesh_of(key: str, device_type: str | None) -> DeviceMesh:
    if "HYBRID" in key:
        return hybrid_mesh(device_type)
    require_process_group("strategy")
    kind, size = device_type or default_device_type(), dist.get_world_size()
    if key == "NO_SHARD":
        mesh = init_device_mesh(kind, (size, 1), mesh_dim_names=("replicate", "shard"))
        return _waiting_as_the_world(mesh)
    return init_device_mesh(kind, (size,), mesh_dim_names=("shard",))


def _waiting_as_the_world(mesh: DeviceMesh) -> DeviceMesh:
    """Set the timeout of the mesh's process groups to that of the default group."""
    for dim in range(mesh.ndim):
        torch_comm.wait_as_the_world(mesh.get_group(dim))
    return mesh


def hybrid_mesh(device_type: str | None = None, *, ranks_per_node: int | None = None) -> DeviceMesh:
    """Return a mesh ``("replicate", "shard")`` that shards within nodes and replicates across them.

    Nodes are identified from the launcher's environment: ``GROUP_RANK`` (torchrun),
    ``SLURM_NODEID``, or else the host name. Ranks of a node need not be consecutive. Collective
    over all ranks; initialises the default process group if there is none.

    Args:
        device_type: device type of the mesh. Default: the accelerator, else the CPU.
        ranks_per_node: number of consecutive ranks that form a node. Default: see above.

    Raises:
        ConfigError: nodes have different numbers of ranks. Raised on every rank.

    Source: the default process groups of ``HYBRID_SHARD`` in torch's FSDP1.
    """
    check_device_type("hybrid_mesh", "device_type", device_type)
    if ranks_per_node is not None:
        check_count("hybrid_mesh", "ranks_per_node", ranks_per_node)
    require_process_group("hybrid_mesh")
    size = dist.get_world_size()
    if ranks_per_node is None:
        launched = [os.environ.get(name) for name in ("GROUP_RANK", "SLURM_NODEID")]
        named = (node for node in launched if node is not None)
        with operation("hybrid_mesh"):
            nodes = Grid.world().collect(next(named, socket.gethostname()))
    else:
        if size % ranks_per_node:
            raise ConfigError(
                "FS222",
                f"hybrid_mesh: found ranks_per_node={described(ranks_per_node)} for {size} ranks. "
                "Pass a divisor of the number of ranks.",
            )
        nodes = [str(rank // ranks_per_node) for rank in range(size)]
    rows: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        rows.setdefault(node, []).append(rank)
    if len({len(row) for row in rows.values()}) > 1:
        listing = ", ".join(f"{node}: {row}" for node, row in rows.items())
        raise ConfigError(
            "FS222",
            f"hybrid_mesh: expected equal numbers of ranks per node, found {listing}. Start the "
            "same number of ranks on each node, or pass ranks_per_node or your own mesh.",
        )
    kind = device_type or default_device_type()
    mesh = DeviceMesh(kind, list(rows.values()), mesh_dim_names=("replicate", "shard"))
    return _waiting_as_the_world(mesh)

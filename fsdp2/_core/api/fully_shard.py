"""``fully_shard`` and ``register_fsdp_forward_method``: check everything, then change the module.

A call validates arguments, collects parameters, shards them, and then installs hooks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from fsdp2._core.api.collect import (
    Collected,
    Ignored,
    check_layers,
    check_method,
    check_modules,
    check_policies,
    check_reshard,
    check_sharding,
    check_smaller,
    collect,
    find_parts,
    move_buffer,
    take_ties,
)
from fsdp2._core.api.module import FSDPModule, register_names, sharded_class
from fsdp2._core.base import torch_dtensor
from fsdp2._core.base.errors import carrying, check_flag, check_function, check_module, named
from fsdp2._core.base.policy import (
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Precision,
    Settings,
    ShardPlacementResult,
    keeps_dtype,
    ours,
)
from fsdp2._core.comm.mesh import DataMesh, check_mesh, default_mesh
from fsdp2._core.engine.attach import attach
from fsdp2._core.engine.between_steps import TorchState, know, torch_state, watch_optimizers
from fsdp2._core.engine.parts import PartHook
from fsdp2._core.engine.step import ForwardMethod, register_hooks
from fsdp2._core.engine.tree import (
    UNIT_ATTRIBUTE,
    EndOfBackward,
    Runtime,
    Unit,
    enter,
    leave,
    unit_of,
)
from fsdp2._core.params.deals import give
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.param import FSDPParam, leave_alone

P = ParamSpec("P")
M = TypeVar("M", bound=nn.Module)  # list is invariant: list[nn.Linear] is not list[nn.Module]
STEPS_OF_OURS = (
    attach,
    enter,
    leave,
    Runtime.arrive,
    Runtime.depart,
    Runtime.begin_backward,
    Runtime.end_reductions,
    Runtime.recover,
    EndOfBackward.__call__,
    ParamGroup.unshard,
    ParamGroup.wait_for_unshard,
    ParamGroup.reshard,
)
"""Engine code that modifies parameters and gradients; the ``spmd_types`` checker skips it."""

ShardPlacementFn = Callable[[nn.Parameter], Placement | ShardPlacementResult | None]


class _FullyShard(Protocol[P]):
    """The type of ``fully_shard``: returns a module for a module, and a list for a list."""

    @overload
    def __call__(self, module: nn.Module, *args: P.args, **kwargs: P.kwargs) -> FSDPModule: ...

    @overload
    def __call__(self, module: list[M], *args: P.args, **kwargs: P.kwargs) -> list[FSDPModule]: ...


def _typed(function: Callable[Concatenate[Any, P], Any]) -> _FullyShard[P]:
    return function  # type: ignore[return-value]  # its types are wider


@_typed
def fully_shard(
    module: nn.Module | list[M],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen
    offload_policy: OffloadPolicy | None = OffloadPolicy(),  # noqa: B008  # frozen
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    conditional: bool = False,
    ignored_states: Iterable[nn.Module] | Iterable[Tensor] | None = None,
    shard: str = "parameters",
    shard_outer: str | None = None,
) -> Any:
    """Shard the parameters of a module in place over the data-parallel ranks.

    All parameters of ``module`` that are not sharded yet form one group. The group is all-gathered
    with one collective before forward, and again before backward; its gradients are reduced with
    one collective. Parameters on different meshes form one group per mesh. If ``module`` contains
    modules that are already sharded, each submodule with at least 1 MiB of parameters (an
    embedding, a head) is a separate group. Call ``fully_shard`` bottom-up: on the blocks first,
    then on the root. After the call, the parameters are DTensors with the same names, and the class
    of ``module`` derives from both ``FSDPModule`` and its original class.

    A tensor subclass may define ``fsdp_pre_all_gather``, which selects the tensors to gather, and
    ``fsdp_post_all_gather``, which builds the parameter from the gathered tensors. If the parameter
    shares no memory with the gathered tensors,
    ``fsdp_should_release_all_gather_outputs_after_post_all_gather() -> bool`` may return True: the
    gathered tensors are then freed immediately, and allocated again by the next gather.

    Args:
        module: a module, or a list of modules whose parameters form one group.
        mesh: a 1-D mesh ``(shard,)`` or a 2-D mesh ``(replicate, shard)``. ``None``: all ranks.
            With ``dp_mesh_dims``: the full mesh, with any number of named dims.
        reshard_after_forward: ``True`` frees the unsharded parameters after forward. ``False``
            keeps them until backward. An int reshards them over that number of adjacent ranks, and
            must divide the size of the shard axis (1 means ``False``, the full size ``True``).
            ``None`` means ``False`` for the root and ``True`` for all other units. The next forward
            always gathers again, and therefore uses values that were written to the shards.
        shard_placement_fn: called with each parameter. It returns ``Shard(dim)`` for any dim (even
            if negative or not evenly divisible), ``Replicate()``, ``None`` (same as ``Shard(0)``),
            ``Whole()`` (one rank owns the full parameter), ``Aligned(dim)`` (no block of rows is
            split), or a ``ShardPlacementResult``, which can also specify a mesh. Scalars are
            replicated.
        mp_policy: dtypes of compute, reduction and outputs. torch's own policies and
            ``DataParallelMeshDims`` are also accepted.
        offload_policy: where shards are stored. ``None`` means no offloading.
        ignored_params: parameters excluded from sharding, device moves and gradient reduction.
        dp_mesh_dims: the dims of ``mesh`` that data parallelism uses. Parameters must be DTensors
            on ``mesh`` with ``Replicate()`` on these dims. In forward, they have this layout again.
            Plain parameters are accepted if all dims are data-parallel. Gradients are averaged over
            the data-parallel dims, so (as without this argument) the loss must be a mean over the
            rank's input. Plain parameters may also be annotated with the package ``spmd_types``: R,
            I or ``S(dim)`` on the other dims, and R or nothing on the data-parallel dims. Such
            parameters are stored as DTensors, but are plain in forward. Their gradients are also
            summed over the other dims that are annotated R.
        conditional: set this if some ranks may skip this module, or units below it, in a forward.
            Every rank then gathers the module's parameters and reduces their gradients together
            with those of the nearest enclosing unit that is not conditional.
        ignored_states: further states to ignore: either modules (with all their parameters and
            buffers), or individual parameters and buffers.
        shard: the states to shard. Optimizer states are always sharded, and ``parameters()``
            between steps always yields shards; the last two modes also keep unsharded copies.

            - ``"parameters"``: optimizer states, gradients and parameters (ZeRO-3);
            - ``"gradients"`` (ZeRO-2): the first forward after an optimizer step gathers parameters
              unit by unit, in the compute dtype. Parameters stay unsharded until a backward with
              gradient sync, so run every backward except the last without sync (``no_sync``). Each
              backward reduces gradients as they are computed;
            - ``"optimizer"`` (ZeRO-1): like ``"gradients"``, but a backward without gradient sync
              does not communicate, so gradients also stay unsharded until the backward with sync.
        shard_outer: the states that are also sharded over the outer dim of a 2-D mesh. ``None``: no
            states (this dim replicates). ``"optimizer"``: optimizer states, and ``parameters()``
            between steps, are sharded over all ranks as if they formed one axis. During a step,
            parameters and gradients are sharded over the inner dim. The first forward after an
            optimizer step gathers over all ranks; other gathers use the inner dim. Each backward
            reduces over the inner dim; with gradient sync, it then reduces over the outer dim.

    Returns:
        ``module`` itself, whose class is now a subclass of ``FSDPModule`` and of its original
        class. Type checkers infer ``FSDPModule``, as with torch's function: use the original
        variable to access attributes of the original class.

    Raises:
        ConfigError: an argument is invalid, or a parameter is unsupported. Nothing was changed.

    Source: the function of the same name in ``torch.distributed.fsdp``, torch 2.15, which lacks
    ``conditional``, ``ignored_states``, ``shard`` and ``shard_outer``. ZeRO: arXiv 1910.02054.
    Parameters sharded within a node: hpZ of ZeRO++ (arXiv 2306.10209).
    """
    modules = check_modules(module)
    mp_policy = ours(mp_policy)
    offload_policy = OffloadPolicy() if offload_policy is None else ours(offload_policy)
    keywords = {
        "mesh": mesh,
        "reshard_after_forward": reshard_after_forward,
        "shard_placement_fn": shard_placement_fn,
        "mp_policy": mp_policy,
        "offload_policy": offload_policy,
        "ignored_params": ignored_params,
        "dp_mesh_dims": dp_mesh_dims,
        "conditional": conditional,
        "ignored_states": ignored_states,
        "shard": shard,
        "shard_outer": shard_outer,
    }
    collected = check_call(modules, keywords)
    classes = [sharded_class(type(target)) for target in modules]
    # drop the user's function, which may not be picklable
    asked = dataclasses.replace(mp_policy, param_dtype_override_fn=None)
    precision, device = Precision(asked, modules), collected.meshes[0].device
    unit = Unit(tuple(modules), precision, collected.settings, device, conditional)
    _install(unit, collected, _shard(unit, collected, mp_policy, offload_policy))
    for target, its_class in zip(modules, classes, strict=True):
        target.__class__ = its_class
    return module


def _shard(
    unit: Unit,
    collected: Collected,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: OffloadPolicy,
) -> dict[nn.Module, ParamGroup]:
    """Create a unit's groups; return those of its large parts (``engine.parts``)."""

    def make_group(used: DataMesh, members: list[FSDPParam]) -> ParamGroup:
        group = ParamGroup(used, unit.precision.policy, unit.device, offload_policy)
        group.settings, smaller = unit.settings, collected.smaller[used]
        group.shard(members)
        if smaller is not None:
            with named("fully_shard"), carrying():
                group.reshard_to(smaller)
        unit.own_groups.append(group)
        return group

    if any(taken.placement.annotation is not None for taken in collected.own.values()):
        torch_dtensor.leave_unchecked((fully_shard, *STEPS_OF_OURS))
    own = collected.own.items()
    kept = {param for param, taken in own if keeps_dtype(mp_policy, param, taken.fqn)}
    params: dict[DataMesh, list[FSDPParam]] = {}
    for original, taken in own:
        param = FSDPParam(taken.fqn, taken.sites, taken.placement, original)
        param.tops = unit.modules
        param.chosen.keeps_dtype = original in kept
        param.wrapped.releases_gathered = taken.releases_gathered
        params.setdefault(taken.data, []).append(param)
    made: dict[nn.Module, ParamGroup] = {}
    for used in params:
        parts = {} if unit.conditional else find_parts(unit.modules, params[used])
        for part, members in parts.items():
            made[part] = make_group(used, members)
        apart = {param for members in parts.values() for param in members}
        params[used] = [param for param in params[used] if param not in apart]
    for used, tied in take_ties(collected, unit.modules).items():
        params.setdefault(used, []).extend(tied)
    for used, members in params.items():
        if members:
            make_group(used, members)
    return made


def _install(unit: Unit, collected: Collected, parts: dict[nn.Module, ParamGroup]) -> None:
    names = {part: name for top in unit.modules for name, part in top.named_modules()}
    for part, group in parts.items():
        hook = PartHook(group.early.become_part(names[part]))
        for inner in part.modules():
            inner.register_forward_pre_hook(hook)
    for module, name in collected.buffers:
        move_buffer(module, name, unit.device)
    if unit.precision.chosen.buffer_dtype is not None:
        unit.precision.cast_buffers(collected.buffers)
    for target in unit.modules:
        target.__dict__[UNIT_ATTRIBUTE] = unit
        register_names(target, unit)
    register_hooks(unit)
    know(unit)
    leave_alone(collected.left_alone)
    watch_optimizers()
    for known in dict.fromkeys(unit_of(part) for part in names):
        if known is not None:
            known.take_names(names)
    for taken in collected.own.values():  # add dealt blocks to each rank's load: see ``deals``
        deal, axis = taken.placement.layout.deal, taken.data.shard
        if taken.claim is not None and deal is not None:
            give(axis.pg, taken.claim, deal, axis.size)


def check_call(
    modules: Sequence[nn.Module],
    asked: Mapping[str, Any],
    taken: frozenset[nn.Module] = frozenset(),
) -> Collected:
    """Check the keywords of ``fully_shard`` and collect the parameters to shard. Parameters of
    modules in ``taken`` are excluded: other calls will shard them first."""
    mesh, outer, choice = asked["mesh"], asked["shard_outer"], asked["reshard_after_forward"]
    offload_policy, dims = ours(asked["offload_policy"]), ours(asked["dp_mesh_dims"])
    check_policies(ours(asked["mp_policy"]), offload_policy)
    sharding = check_sharding(asked["shard"], outer, choice, offload_policy)
    with named("fully_shard"), carrying():  # creating process groups is collective
        checked = check_mesh(default_mesh() if mesh is None and dims is None else mesh, dims)
        if outer is not None:
            check_layers(checked, dims)
            data = DataMesh.layered(checked)
        elif dims is not None:
            data = DataMesh.named(checked, dims)
        else:
            data = DataMesh.of(checked)
    check_reshard(choice, data)
    expected = "a function of a parameter or None"
    check_function("fully_shard", "shard_placement_fn", asked["shard_placement_fn"], expected)
    check_flag("fully_shard", "conditional", asked["conditional"])
    ignored = Ignored.of(asked["ignored_params"], asked["ignored_states"])
    left = Ignored(ignored.tensors, ignored.modules | taken)
    collected = collect(modules, data, asked["shard_placement_fn"], left)
    for used in collected.meshes:
        size = check_reshard(choice, used)
        collected.smaller[used] = size if used.layers is None else used.layers.shard.size
    choice = False if sharding.keeps_whole else choice
    if any(collected.smaller.values()):
        check_smaller(collected)
    elif choice is not None:  # 1 means False, and the full size means True
        choice = choice is True or choice > 1
    collected.settings = Settings(reshard_after_forward=choice, sharding=sharding)
    return collected


def _state(module: nn.Module) -> TorchState | None:
    return torch_state(check_module("fully_shard.state", "module", module))


fully_shard.state = _state  # type: ignore[attr-defined]  # as `contract` defines it in torch


def register_fsdp_forward_method(module: nn.Module | None, method_name: str) -> None:
    """Make ``module.method_name(...)`` gather and free parameters as ``module(...)`` does.

    No-op if ``module`` is None or not an ``FSDPModule``.

    Args:
        module: the module that defines the method, or None.
        method_name: the method's name. Its body must have finished when the call returns.

    Raises:
        ConfigError: the method does not exist, or is a generator or a coroutine.

    Source: the function of the same name in ``torch.distributed.fsdp``.
    """
    if module is None:
        return
    name = check_method(module, method_name)
    if isinstance(module, FSDPModule):
        module.__dict__[name] = ForwardMethod(module, name)

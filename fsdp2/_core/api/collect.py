"""Collect the parameters and buffers for a call of ``fully_shard``.

Checks arguments and parameters, evaluates policies, and traverses the module tree. Modifies nothing
before ``take_ties``.

[Note: ties]
A parameter registered in several places is one ``FSDPParam`` with several sites, and remains one
object under all its names. Sites in different units are joined bottom-up, by successive calls: the
first unit owns the parameter, and later units add their sites. The first unit that contains every
path to every site takes over the parameter, because only that unit's forward spans all its uses.
(Containing all sites is not sufficient: a module outside the unit may contain the same site.)
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp2._core.base import torch_dtensor, torch_modules
from fsdp2._core.base.errors import (
    ConfigError,
    ConfigTypeError,
    StateError,
    described,
    wrong_type,
    wrong_value,
)
from fsdp2._core.base.names import class_name
from fsdp2._core.base.policy import (
    OUTER,
    SHARDINGS,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    Settings,
    Sharding,
)
from fsdp2._core.base.warn import warn
from fsdp2._core.comm.mesh import DataMesh
from fsdp2._core.engine.between_steps import units_below
from fsdp2._core.engine.tree import Unit, unit_of
from fsdp2._core.params.deals import Claim, deal_blocks, given_so_far
from fsdp2._core.params.extension import check_extension, needs_extension, refuse_smaller
from fsdp2._core.params.param import SUMMONED, FSDPParam, OwnerMark
from fsdp2._core.params.placement import ParamPlacement, claim_of, place, shard_dim, shard_mesh
from fsdp2._core.params.registration import Site


@dataclass(frozen=True)
class Ignored:
    """States that ``fully_shard`` ignores. ``tensors`` includes those of ``modules``."""

    tensors: frozenset[Tensor]
    modules: frozenset[nn.Module]

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self.tensors

    @staticmethod
    def of(params: object, states: object) -> Ignored:
        """Parse ``ignored_params`` and ``ignored_states`` (either unsharded modules or tensors)."""
        tensors: set[Tensor] = set()
        for param in _listed(params):
            if not isinstance(param, nn.Parameter):
                raise ConfigTypeError(
                    "FS101",
                    "fully_shard: expected ignored_params to be a set of nn.Parameter, found "
                    f"{type(param).__name__} in it. Pass the parameters themselves; pass modules "
                    "and buffers as ignored_states.",
                )
            tensors.add(param)
        found = _listed(states)
        modules = [item for item in found if isinstance(item, nn.Module)]
        own = [item for item in found if isinstance(item, Tensor)]
        wrong = [item for item in found if not isinstance(item, nn.Module | Tensor)]
        if wrong:
            raise ConfigTypeError(
                "FS101",
                "fully_shard: expected ignored_states to contain modules, or parameters and "
                f"buffers, found {described(wrong[0])} in it. Pass the modules or tensors "
                "themselves, not their names.",
            )
        if modules and own:
            raise ConfigError(
                "FS212",
                f"fully_shard: found a {class_name(modules[0])} and a {type(own[0]).__name__} of "
                f"shape {tuple(own[0].shape)} in ignored_states. Pass only modules or only "
                "tensors: to combine them, replace each module by [*module.parameters(), "
                "*module.buffers()].",
            )
        inside = {child for module in modules for child in module.modules()}
        for child in inside:
            if unit_of(child) is not None:
                raise ConfigError(
                    "FS212",
                    f"fully_shard: ignored_states contains a {class_name(child)} that fully_shard "
                    "was already applied to. Omit this module: a call never shards parameters that "
                    "an earlier call sharded.",
                )
            tensors.update(child.parameters(recurse=False), child.buffers(recurse=False))
        return Ignored(frozenset(tensors.union(own)), frozenset(inside))


def _listed(states: object) -> list[object]:
    if states is None:
        return []
    is_one = isinstance(states, nn.Module | Tensor) or not isinstance(states, Iterable)
    return [states] if is_one else list(states)  # type: ignore[call-overload]  # an Iterable


Choice = dict[str, Any]
Chosen = dict[nn.Module, Choice]
WrapPolicy = (
    Collection[type[nn.Module]]
    | torch_modules.CustomPolicy
    | Callable[[nn.Module], bool | Choice]
    | Callable[[nn.Module, bool, int], bool]
)


class Asking(NamedTuple):
    """Texts for messages: the caller, the effect if no module matches, valid policy results."""

    who: str
    if_none: str
    answers: str


def run_policy(
    policy: object,
    model: nn.Module,
    ignored: Ignored,
    asking: Asking,
) -> Chosen:
    if isinstance(policy, torch_modules.CustomPolicy):
        return _ask(torch_modules.custom_policy_function(policy), model, ignored, asking)
    is_text = isinstance(policy, str | bytes | Tensor)
    if isinstance(policy, Iterable) and not is_text and not callable(policy):
        classes = tuple(policy)
        wrong = [c for c in classes if not (isinstance(c, type) and issubclass(c, nn.Module))]
        if wrong or not classes:
            found = f"{described(wrong[0])} in it" if wrong else "none"
            raise ConfigTypeError(
                "FS101",
                f"{asking.who}: expected policy to contain module classes, found {found}. Pass, "
                "for example, {TransformerBlock}.",
            )
        if not any(isinstance(module, classes) for module in model.modules()):
            names = ", ".join(sorted(c.__name__ for c in classes))
            _warn_of_nothing(model, f"of class {names}", asking)
        return _ask(lambda module: isinstance(module, classes), model, ignored, asking)
    if isinstance(policy, type | nn.Module) or not callable(policy):
        expected = "a set of module classes, a function, or a policy of torch.distributed.fsdp.wrap"
        raise wrong_type(asking.who, "policy", expected, policy)
    if _is_recursive(policy):
        chosen: Chosen = {}
        _recurse(policy, model, ignored, chosen)
        name = torch_modules.name_of_class_policy(policy)
        picks = functools.partial(policy, recurse=False, nonwrapped_numel=0)
        if name is not None and not any(picks(module=module) for module in model.modules()):
            _warn_of_nothing(model, f"matched by {name}", asking)
        return chosen
    return _ask(policy, model, ignored, asking)


def _warn_of_nothing(model: nn.Module, what: str, asking: Asking) -> None:
    warn(
        "FS228",
        f"{asking.who}: no module of the {class_name(model)} is {what}, so {asking.if_none}. "
        "Pass the classes of the model's blocks.",
    )


def _is_recursive(policy: Callable[..., Any]) -> bool:
    """Return True for an FSDP1 policy, which accepts ``(module, recurse, nonwrapped_numel)``."""
    try:
        inspect.signature(policy).bind(module=None, recurse=True, nonwrapped_numel=0)
    except (TypeError, ValueError):
        return False
    return True


def _ask(
    function: Callable[[nn.Module], Any], model: nn.Module, ignored: Ignored, asking: Asking
) -> Chosen:
    chosen: Chosen = {}
    for name, module in model.named_modules():
        if module is model or module in ignored.modules:
            continue
        answer = function(module)
        if not isinstance(answer, bool | dict):
            raise ConfigError(
                "FS213",
                f"{asking.who}: the policy returned {described(answer)} for {name}. Return "
                f"{asking.answers}.",
            )
        if answer:
            chosen[module] = answer if isinstance(answer, dict) else {}
    return chosen


def _recurse(
    policy: Callable[..., Any],
    module: nn.Module,
    ignored: Ignored,
    chosen: Chosen,
    is_root: bool = True,
) -> int:
    """Apply a recursive policy; return the number of elements in units within ``module``."""
    numel = sum(param.numel() for param in module.parameters() if param not in ignored)
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    taken = 0
    for child in module.children():
        if child not in ignored.modules and child not in chosen:
            taken += _recurse(policy, child, ignored, chosen, is_root=False)
    if is_root or not policy(module=module, recurse=False, nonwrapped_numel=numel - taken):
        return taken
    chosen[module] = {}
    return numel


PART_NBYTES = 1 << 20  # minimum unsharded bytes of a large part: ``_core.engine.parts``


def move_buffer(module: nn.Module, name: str, device: torch.device) -> None:
    """Move a buffer to a device, unless it is a DTensor or on the meta device."""
    buffer = module._buffers[name]
    if buffer is None or isinstance(buffer, DTensor):
        return
    if buffer.device not in (device, torch.device("meta")):
        module._buffers[name] = buffer.to(device)


@dataclass(eq=False)
class Taken:
    """A parameter that a ``fully_shard`` call shards."""

    fqn: str
    data: DataMesh
    sites: list[Site] = field(default_factory=list)
    dim: int | None = None
    claim: Claim | None = None  # blocks to deal to ranks
    placement: ParamPlacement = field(init=False)
    releases_gathered: bool | None = None


@dataclass
class Collected:
    """The result of ``collect``: new parameters, tied parameters of inner units, and buffers."""

    meshes: list[DataMesh]  # the call's mesh, then any other meshes of its parameters
    left_alone: set[Tensor]  # ignored states, and parameters managed by torch's ``replicate``
    own: dict[nn.Parameter, Taken] = field(default_factory=dict)
    tied: dict[FSDPParam, list[Site]] = field(default_factory=dict)
    shared: dict[FSDPParam, list[nn.Module]] = field(default_factory=dict)
    escaped: dict[Unit, list[FSDPParam]] = field(default_factory=dict)
    buffers: list[tuple[nn.Module, str]] = field(default_factory=list)
    # number of ranks to reshard to after forward, by mesh; None: the full shard axis
    smaller: dict[DataMesh, int | None] = field(default_factory=dict)
    settings: Settings = field(default_factory=Settings)  # the unit's settings


def collect(
    modules: Sequence[nn.Module],
    data: DataMesh,
    placement_fn: Callable[[nn.Parameter], Any] | None,
    ignored: Ignored,
) -> Collected:
    """Find, check and place the parameters of ``modules`` that do not belong to a unit yet."""
    collected = Collected([data], set(ignored.tensors))
    giving: set[nn.Module] = set()  # members of `modules` with a parameter to shard
    for top, prefix, module in _managed(modules, ignored, collected.left_alone):
        for name, param in module._parameters.items():
            if param is None or param in ignored:
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            site, owner = Site(module, name), OwnerMark.owner_of(param)
            if owner is None:
                collected.own.setdefault(param, Taken(fqn, data)).sites.append(site)
            elif any(s.module is module and s.name == name for s in owner.sites):
                collected.shared.setdefault(owner, []).append(top)  # module is in two units
                continue
            else:
                collected.tied.setdefault(owner, []).append(site)
            giving.add(top)
        collected.buffers += [
            (module, name)
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer not in ignored
        ]
    for param, taken in collected.own.items():
        _check_param(param, taken.fqn, data)
        choice = None if placement_fn is None else placement_fn(param)
        choice, taken.data = shard_mesh(choice, taken.fqn, data)
        taken.dim = shard_dim(choice, param, taken.fqn)
        taken.claim = claim_of(choice, param, taken.dim, taken.fqn, taken.data)
        if taken.data not in collected.meshes:
            collected.meshes.append(taken.data)
    for used in collected.meshes:
        members = [(param, one) for param, one in collected.own.items() if one.data == used]
        claims = [taken.claim for _, taken in members if taken.claim is not None]
        shard = used.shard
        deals = iter(deal_blocks(claims, given_so_far(shard.pg, shard.size)) if claims else ())
        for param, taken in members:
            deal = None if taken.claim is None else next(deals)
            by_rows = taken.dim == 0 and deal is None
            taken.releases_gathered = check_extension(param, taken.fqn, by_rows)
            taken.placement = place(param, taken.fqn, used, taken.dim, deal)
    on_meta = [taken.fqn for param, taken in collected.own.items() if param.is_meta]
    if 0 < len(on_meta) < len(collected.own):
        raise ConfigError(
            "FS207",
            f"fully_shard: found parameters on the meta device ({', '.join(on_meta)}) in a group "
            "with materialized parameters. Materialize all or none, or shard modules separately.",
        )
    _refuse_inside(collected.shared, giving)
    _find_escaped(collected, modules)
    return collected


def _refuse_inside(shared: dict[FSDPParam, list[nn.Module]], giving: set[nn.Module]) -> None:
    """Raise ConfigError if an outer unit manages the parameters of a module not in ``giving``."""
    for param, users in shared.items():
        for outer in param.tops:
            inside = set(outer.modules())
            for module in users:
                if module is not outer and module in inside and module not in giving:
                    raise ConfigError(
                        "FS202",
                        f"fully_shard: the parameters of this {class_name(module)} were already "
                        f"sharded with the enclosing {class_name(outer)}. Shard inner "
                        "modules first, and the outermost one last.",
                    )


def check_smaller(collected: Collected) -> None:
    """Raise ConfigError if a parameter cannot be sharded over a smaller mesh after forward."""
    for param in itertools.chain.from_iterable(collected.escaped.values()):
        if param.wrapped.is_extended or param.placement.layout.deal is not None:
            refuse_smaller(param.fqn, param.placement.layout.deal)
    for original, own in collected.own.items():
        is_extended = needs_extension(torch_dtensor.local_part(original))
        if is_extended or own.placement.layout.deal is not None:
            refuse_smaller(own.fqn, own.placement.layout.deal)


def take_ties(collected: Collected, tops: tuple[nn.Module, ...]) -> dict[DataMesh, list[FSDPParam]]:
    """Add sites to tied parameters; return parameters that the new unit takes over. [Note: ties]"""
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
        for group in unit.own_groups:
            taken = [param for param in group.params if param in params]
            if taken:
                group.release(taken)
                escaped.setdefault(group.data, []).extend(taken)
        unit.own_groups[:] = [group for group in unit.own_groups if group.params]
    return escaped


def find_parts(
    modules: Sequence[nn.Module], params: Sequence[FSDPParam]
) -> dict[nn.Module, list[FSDPParam]]:
    """Return the large parts (``_core.engine.parts``) and their parameters. If ``modules`` contain
    units, parts are the largest submodules without units; parameters shared with other modules are
    excluded. Otherwise, the only possible part is a single module without submodules."""
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
    """Yield the largest modules below ``modules`` that neither are nor contain units."""
    for module in modules:
        for child in module.children():
            if unit_of(child) is not None:
                continue
            if units_below(child):
                yield from _unitless([child])
            else:
                yield child


def _find_escaped(collected: Collected, modules: Sequence[nn.Module]) -> None:
    """Find each inner unit's parameters that the new unit also uses outside of the inner unit."""
    parents: dict[nn.Module, list[nn.Module]] = {}
    for unit in dict.fromkeys(unit for module in modules for unit in units_below(module)):
        for group in unit.own_groups:
            for param in group.params:
                places = param.places + collected.shared.get(param, [])
                places += [site.module for site in collected.tied.get(param, [])]
                if len(places) == 1:
                    continue
                parents = parents or _parents(modules)
                is_inside = all(place in parents for place in places)
                if not is_inside or not _is_reached_outside(unit, places, parents):
                    continue
                if group.data not in collected.meshes:
                    meshes = " and ".join(str(data.mesh) for data in collected.meshes)
                    raise ConfigError(
                        "FS209",
                        f"{param.fqn} is tied across units on different meshes, {group.data.mesh} "
                        f"and {meshes}. Pass the same mesh to both fully_shard calls.",
                    )
                collected.escaped.setdefault(unit, []).append(param)


def _parents(modules: Sequence[nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """Map each module to all its parents within ``modules``; outermost modules have none."""
    parents: dict[nn.Module, list[nn.Module]] = {top: [] for top in modules}
    for top in modules:
        for module in top.modules():
            for child in module.children():
                parents.setdefault(child, []).append(module)
    return parents


def _is_reached_outside(
    unit: Unit, places: Iterable[nn.Module], parents: dict[nn.Module, list[nn.Module]]
) -> bool:
    """Return True if a path from the outermost modules to one of ``places`` bypasses the unit."""
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
    """Yield (top, name, module) for modules outside inner units; fill ``left_alone``."""
    seen = set(ignored.modules)
    for top in modules:
        waiting = [("", top)]
        while waiting:
            prefix, module = waiting.pop()
            if module in seen:
                continue
            seen.add(module)
            yield top, prefix, module
            for name, child in reversed(list(module.named_children())):
                if unit_of(child) is not None:
                    continue
                if "replicate" in torch_modules.composable_names(child):
                    left_alone.update(child.parameters())
                else:
                    waiting.append((f"{prefix}.{name}" if prefix else name, child))


def _check_param(param: nn.Parameter, fqn: str, data: DataMesh) -> None:
    if is_lazy(param):
        raise ConfigError(
            "FS205",
            f"{fqn} has no shape yet, because its module is lazy. Run the module once on an "
            "example input, then apply fully_shard.",
        )
    if param.__dict__.get(SUMMONED) is not None:
        raise StateError(
            "FS306",
            f"{fqn}: fully_shard was called inside summon_full_params, where the unsharded "
            "parameters of another unit are registered. Exit the context first.",
        )
    if isinstance(param, DTensor) and data.full is None and param.device_mesh == data.mesh:
        raise ConfigError(
            "FS202",
            f"{fqn} is already a DTensor on {data.mesh}, the mesh to shard over. Pass different "
            "dims of one mesh to fully_shard and parallelize_module, or register a plain parameter "
            "(full_tensor()).",
        )
    if param.layout is not torch.strided:
        raise ConfigError(
            "FS206",
            f"{fqn}: expected a dense parameter, found layout {param.layout}. Convert it, or add "
            "it to ignored_params.",
        )


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
                "be changed. Shard the module before scripting it.",
            )
        modules.append(candidate)
    unique = list(dict.fromkeys(modules))
    inner = {child for top in unique for child in top.modules() if child is not top}
    modules = [top for top in unique if top not in inner]
    for target in modules:
        if is_container(target):
            raise ConfigError(
                "FS201",
                f"fully_shard: {class_name(target)} has no forward, so its parameters would "
                "never be gathered. Apply fully_shard to each of its modules, or to its parent.",
            )
        if unit_of(target) is not None or "fully_shard" in torch_modules.composable_names(target):
            raise ConfigError(
                "FS202",
                f"fully_shard was already applied to this {class_name(target)}. Apply it "
                "once to each module.",
            )
        if "replicate" in torch_modules.composable_names(target):
            raise ConfigError(
                "FS203",
                f"fully_shard: replicate was already applied to this {class_name(target)}, and "
                "manages its parameters. Apply only one of the two functions.",
            )
    return modules


def is_container(module: nn.Module) -> bool:
    """Return True for a ModuleList or ModuleDict without a forward."""
    is_several = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return is_several and type(module).forward is nn.Module.forward


def called_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module or, in place of a container without a forward, the modules in it."""
    if not is_container(module):
        yield module
        return
    for child in module.children():
        yield from called_in(child)


def check_reshard(choice: object, data: DataMesh) -> int | None:
    """Return the number of ranks to reshard to; None for a bool, ``None``, 1 or all ranks."""
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
    """Return the ``Sharding`` for ``shard`` and ``outer``; ConfigError if arguments conflict."""
    sharding = _one_of("shard", shard, SHARDINGS)
    layered = _one_of("shard_outer", outer, OUTER)
    if outer is not None:
        if sharding.keeps_whole:
            raise ConfigError(
                "FS234",
                f"fully_shard: found {sharding.name} with {layered.name}. With unsharded "
                "parameters, all ranks form one axis: omit shard_outer, and pass a 1-D mesh of all "
                "ranks.",
            )
        if type(reshard_after_forward) is int:
            raise ConfigError(
                "FS234",
                f"fully_shard: found reshard_after_forward={reshard_after_forward} with "
                f"{layered.name}, which reshards to the mesh's inner dim. Omit one of the two "
                "arguments.",
            )
        return layered
    if not sharding.keeps_whole:
        return sharding
    stays = f"fully_shard: found {sharding.name}, which keeps parameters unsharded"
    if reshard_after_forward is not None and reshard_after_forward is not False:
        raise ConfigError(
            "FS234",
            f"{stays}, and reshard_after_forward={described(reshard_after_forward)}, which frees "
            'them. Omit the latter, or pass shard="parameters".',
        )
    if isinstance(offload, CPUOffloadPolicy):
        raise ConfigError(
            "FS234",
            f"{stays}, and a CPUOffloadPolicy, which copies them to the device for each use. Omit "
            'the policy, or pass shard="parameters".',
        )
    return sharding


def _one_of(name: str, value: Any, known: Mapping[Any, Sharding]) -> Sharding:
    expected = f"one of {', '.join(map(repr, known))}"
    if not isinstance(value, tuple(map(type, known))):
        raise wrong_type("fully_shard", name, expected, value)
    if value not in known:
        raise wrong_value("fully_shard", name, expected, value)
    return known[value]


def check_layers(mesh: DeviceMesh, dims: object) -> None:
    """Raise ConfigError unless a mesh has an outer and an inner dim, each with several ranks."""
    found = f"{mesh.ndim} dims" if mesh.ndim != 2 else f"a shape of {tuple(mesh.shape)}"
    if dims is None and mesh.ndim == 2 and min(mesh.shape) > 1:
        return
    found = found if dims is None else "dp_mesh_dims"
    raise ConfigError(
        "FS234",
        "fully_shard: shard_outer requires a 2-D mesh of data-parallel dims, (outer, inner), with "
        f"several ranks along each dim, but found {found}. Pass such a mesh without dp_mesh_dims, "
        "or omit shard_outer and pass a 1-D mesh of all ranks.",
    )


def check_method(module: object, name: object) -> str:
    """Return ``name``; ConfigError if the method's body may run after the call returns."""
    who = "register_fsdp_forward_method"
    if not isinstance(module, nn.Module):
        raise wrong_type(who, "module", "an nn.Module", module)
    if not isinstance(name, str):
        raise wrong_type(who, "method_name", "the name of a method", name)
    method = getattr(module, name, None)
    if not callable(method):
        raise ConfigError(
            "FS501",
            f"{who}: {type(module).__name__} has no method {described(name)}. Pass the name of an "
            "existing method.",
        )
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method):
        raise ConfigError(
            "FS502",
            f"{who}: {type(module).__name__}.{name} is a generator or a coroutine, whose body runs "
            "after the call returns, when parameters are sharded again. Register a method that "
            "returns its result.",
        )
    return name


def check_policies(mp_policy: object, offload_policy: object) -> None:
    """Check the types of policies; their constructors have checked the fields."""
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        is_dtype, expected = isinstance(mp_policy, torch.dtype), "a fsdp2.MixedPrecisionPolicy"
        hint = f"Pass MixedPrecisionPolicy(param_dtype={mp_policy})." if is_dtype else ""
        raise wrong_type("fully_shard", "mp_policy", expected, mp_policy, hint)
    if not isinstance(offload_policy, OffloadPolicy | None):
        expected = "a fsdp2.OffloadPolicy or None"
        raise wrong_type("fully_shard", "offload_policy", expected, offload_policy)


def check_comm(name: str, comm: object) -> None:
    """Accept any callable object with ``allocate``; it need not derive from our base classes."""
    is_class = isinstance(comm, type)
    if is_class or not callable(comm) or not callable(getattr(comm, "allocate", None)):
        expected = "a callable object with allocate(size, dtype=, device=)"
        hint = "Pass an instance of a class derived from fsdp2.AllGather or fsdp2.ReduceScatter."
        raise wrong_type(name, "comm", expected, comm, hint)

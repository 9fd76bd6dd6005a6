"""``fully_shard``, ``FSDPModule`` and ``register_fsdp_forward_method``.

Owns validation (everything is checked before anything is changed), the choice of which parameters
a call takes, and the class swap. It must not know when things happen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from fsdp2 import _torch
from fsdp2._collect import Collected, collect, take_ties
from fsdp2._errors import ConfigError
from fsdp2._group import ParamGroup
from fsdp2._hooks import (
    UNIT_ATTRIBUTE,
    ForwardMethod,
    forward_raised,
    register_hooks,
    unit_of,
)
from fsdp2._mesh import DataMesh, check_mesh, default_mesh
from fsdp2._param import FSDPParam
from fsdp2._policy import MixedPrecisionPolicy, OffloadPolicy, Settings
from fsdp2._runtime import Unit

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
    modules = _check_modules(module)
    device_mesh = check_mesh(mesh if mesh is not None else default_mesh())
    data = DataMesh.of(device_mesh)
    smaller = _check_reshard(reshard_after_forward, data.shard.size)
    _check_policies(mp_policy, offload_policy)
    collected = collect(modules, data, shard_placement_fn, _check_ignored(ignored_params))

    if smaller is None and reshard_after_forward is not None:
        reshard_after_forward = reshard_after_forward is True or reshard_after_forward > 1
    settings = Settings(reshard_after_forward=reshard_after_forward)
    unit = Unit(tuple(modules), mp_policy, settings)
    device = data.device
    params = _make_params(collected)
    params += take_ties(collected, modules)
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
        _torch.register_composable_state(target, fully_shard, unit)
        target.__class__ = _sharded_class(type(target))
    register_hooks(unit)
    return module


def _state(module: nn.Module) -> Unit | None:
    return unit_of(module)


fully_shard.state = _state  # type: ignore[attr-defined]  # the composable contract's accessor


def _make_params(collected: Collected) -> list[FSDPParam]:
    params = []
    for original, (fqn, sites, placement) in collected.own.items():
        param = FSDPParam(fqn, sites, placement, original)
        original.__dict__["_fsdp2_param"] = weakref.ref(param)
        params.append(param)
    return params


def _check_modules(module: object) -> list[nn.Module]:
    candidates = list(module) if isinstance(module, list | tuple) else [module]
    if not candidates:
        raise ConfigError("fully_shard: found an empty list of modules. Pass at least one.")
    modules: list[nn.Module] = []
    for candidate in candidates:
        if not isinstance(candidate, nn.Module):
            raise ConfigError(
                f"fully_shard: expected an nn.Module or a list of them, found "
                f"{type(candidate).__name__}. Pass the module itself."
            )
        modules.append(candidate)
    modules = _outermost(modules)
    for target in modules:
        if isinstance(target, nn.ModuleList | nn.ModuleDict) and not _has_forward(target):
            raise ConfigError(
                f"fully_shard: {type(target).__name__} has no forward, so nothing would gather "
                "its parameters. Apply fully_shard to each of its modules, or to its parent."
            )
        if unit_of(target) is not None or "fully_shard" in _torch.composable_names(target):
            raise ConfigError(
                f"fully_shard: was already applied to this {type(target).__name__}. Apply it "
                "once to each module."
            )
    return modules


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _outermost(modules: Sequence[Any]) -> list[nn.Module]:
    """Drop repeated modules, and modules inside another of the list."""
    unique = list(dict.fromkeys(modules))
    inner = {child for top in unique for child in top.modules() if child is not top}
    return [top for top in unique if top not in inner]


def _check_reshard(choice: object, size: int) -> int | None:
    """Return the number of ranks to reshard to, or None for a bool or ``None``."""
    if choice is None or isinstance(choice, bool) or choice in (1, size):
        return None
    if not isinstance(choice, int):
        raise ConfigError(
            f"fully_shard: expected reshard_after_forward to be None, a bool or an int, found "
            f"{choice!r}."
        )
    if choice < 1 or size % choice:
        divisors = [d for d in range(1, size + 1) if size % d == 0]
        raise ConfigError(
            f"fully_shard: found reshard_after_forward={choice} for {size} shard ranks. Pass a "
            f"divisor: one of {divisors}."
        )
    return choice


def _check_policies(mp_policy: object, offload_policy: object) -> None:
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise ConfigError(
            f"fully_shard: expected mp_policy to be a fsdp2.MixedPrecisionPolicy, found "
            f"{type(mp_policy).__name__}."
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(mp_policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(
                f"fully_shard: expected mp_policy.{name} to be a floating-point dtype or None, "
                f"found {dtype!r}."
            )
    if not isinstance(offload_policy, OffloadPolicy):
        raise ConfigError(
            f"fully_shard: expected offload_policy to be a fsdp2.OffloadPolicy, found "
            f"{type(offload_policy).__name__}."
        )


def _check_ignored(ignored: object) -> set[nn.Parameter]:
    if ignored is None:
        return set()
    params: set[nn.Parameter] = set()
    for param in ignored if isinstance(ignored, Iterable) else [ignored]:
        if not isinstance(param, nn.Parameter):
            raise ConfigError(
                f"fully_shard: expected ignored_params to be a set of nn.Parameter, found "
                f"{type(param).__name__} in it. Pass the parameters, not their names or modules."
            )
        params.add(param)
    return params


_classes: dict[type, type] = {}


def _sharded_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of ``FSDPModule`` and ``cls`` that sharded instances of ``cls`` have."""
    if cls not in _classes:
        namespace = {"__module__": cls.__module__, "__doc__": cls.__doc__}
        _classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), namespace)
    return _classes[cls]


def _rebuild(cls: type[nn.Module]) -> nn.Module:
    """Make an empty sharded instance; its state follows (copy and pickle)."""
    sharded = _sharded_class(cls)
    instance: nn.Module = object.__new__(sharded)
    return instance


class FSDPModule(nn.Module):
    """What ``fully_shard`` adds to a module. ``isinstance(module, FSDPModule)`` tells."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make a plain instance: a slice of a sharded ``Sequential`` is a plain one."""
        return cls.__mro__[2](*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except BaseException:
            forward_raised(self._unit())
            raise

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._unit().reshard_if_idle()
        reduced: Any = super().__reduce_ex__(protocol)
        state = dict(reduced[2])
        _torch.forget_composable_state(state)
        return (_rebuild, (type(self).__mro__[2],), state, *reduced[3:])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch's own
        _torch.register_composable_state(self, fully_shard, self._unit())

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        self._unit().reshard_if_idle()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's own

    def _unit(self) -> Unit:
        unit = unit_of(self)
        assert unit is not None
        return unit

    def _units(self, recurse: bool) -> list[Unit]:
        if not recurse:
            return [self._unit()]
        return list(dict.fromkeys(u for m in self.modules() if (u := unit_of(m)) is not None))

    def _configure(self, recurse: bool, **changes: Any) -> None:
        for unit in self._units(recurse):
            unit.configure(**changes)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters (not those of units below it).

        Args:
            async_op: return at once; the parameters are whole after ``wait()`` of the result, or
                once the unit's forward begins.
        """
        unit = self._unit()
        if unit.runtime is not None:
            unit.runtime.recover_if_failed()
            unit.runtime.streams.order_after_compute("gather")
        unit.inspect()
        unit.unshard()
        if async_op:
            return UnshardHandle(unit)
        unit.wait_for_unshard()
        return None

    def reshard(self) -> None:
        """Free this unit's unsharded parameters and register the sharded ones."""
        self._unit().reshard()

    def reset_iter_state(self) -> None:
        """Drop what an unfinished step left, now. The next forward would do so by itself.

        Discards gradients that were not reduced yet, those accumulated without sync too.
        """
        unit = self._unit()
        if unit.runtime is not None:
            unit.runtime.recover()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Say whether the next backward is the last before the optimizer step.

        After one that is not, reductions may still be in flight, and ``grad`` is not complete.
        """
        self._configure(True, is_last_backward=_flag("is_last_backward", is_last_backward))

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Say whether backward reduces gradients. While it does not, they accumulate unsharded,
        in the reduce dtype.
        """
        flag = _flag("requires_gradient_sync", requires_gradient_sync)
        self._configure(recurse, reduce_grads=flag, all_reduce_grads=flag)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Say whether backward all-reduces over the replicate axis. While it does not, reduced
        shards accumulate, and ``grad`` is not set.
        """
        flag = _flag("requires_all_reduce", requires_all_reduce)
        self._configure(recurse, all_reduce_grads=flag)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Say whether parameters are freed after forward, from the next forward on."""
        flag = _flag("reshard_after_forward", reshard_after_forward)
        for unit in self._units(recurse):
            unit.configure(reshard_after_forward=flag)
            for group in unit.groups:
                group.reshard_to(None)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Say whether parameters are freed after backward."""
        flag = _flag("reshard_after_backward", reshard_after_backward)
        self._configure(recurse, reshard_after_backward=flag)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these units when this one's forward begins, instead of the recorded next one."""
        self._unit().forward_prefetch = _check_prefetch(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Gather these units when this one's backward begins, instead of the one before it."""
        self._unit().backward_prefetch = _check_prefetch(modules)


class UnshardHandle:
    """An ``unshard(async_op=True)`` under way."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Wait until the parameters are whole and registered. Further calls do nothing."""
        unit, self._unit = self._unit, None
        if unit is not None:
            unit.wait_for_unshard()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.method_name(...)`` gather and free parameters as ``module(...)`` does.

    Does nothing for a module that is not an ``FSDPModule``.

    Raises:
        ConfigError: the module has no such method.
    """
    if not callable(getattr(module, method_name, None)):
        raise ConfigError(
            f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}."
        )
    if isinstance(module, FSDPModule):
        module.__dict__[method_name] = ForwardMethod(module, method_name)


def _check_prefetch(modules: object) -> tuple[Unit, ...]:
    units = []
    for module in modules if isinstance(modules, Iterable) else [modules]:
        if not isinstance(module, FSDPModule):
            raise ConfigError(
                f"expected a list of modules that fully_shard was applied to, found "
                f"{type(module).__name__} in it."
            )
        units.append(module._unit())
    return tuple(units)


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"expected {name} to be a bool, found {value!r}.")
    return value

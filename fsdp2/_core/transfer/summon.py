"""``summon_full_params`` and ``full_params``: full parameters in a context, or from an iterator.

[Note: summoned]
Full parameters are separate tensors in the dtype of the shards, not a group's buffers, so a group's
state does not change. While full parameters are registered, units must not run, and must not
inspect these parameters: a forward raises, and ``Unit.summoned_on`` prevents units from adopting
the parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._core.base import torch_dtensor
from fsdp2._core.base.errors import (
    ConfigError,
    StateError,
    check_count,
    check_dtype,
    check_flag,
    check_function,
)
from fsdp2._core.base.interrupts import kept_interrupts
from fsdp2._core.base.names import class_name, cleaned, named_parameters
from fsdp2._core.base.warn import warn
from fsdp2._core.comm.process_mesh import operation
from fsdp2._core.engine.between_steps import require_idle
from fsdp2._core.engine.tree import Unit, unit_of
from fsdp2._core.params.param import SUMMONED, OwnerMark
from fsdp2._core.params.registration import Site
from fsdp2._core.transfer.redistribute import (
    STAGED_NBYTES,
    Grids,
    LocalShard,
    Target,
    checked_together,
    gather,
)

WHO = "summon_full_params"


@dataclass(eq=False)
class _Summoned:
    name: str
    sharded: nn.Parameter
    sites: list[Site]
    held: LocalShard
    whole: nn.Parameter | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as None, because a copy of a full parameter is an ordinary parameter."""
        return type(None), ()

    def register(self, param: nn.Parameter) -> None:
        for site in self.sites:
            site.put(param)

    def write_back(self, with_grads: bool) -> None:
        found = self.sites[0].registered
        assert found is not None
        block = found.detach()[self.held.own.slices]
        with torch.no_grad():
            self.held.local.copy_(block)
        if with_grads:
            self._write_grad(found.grad)

    def _write_grad(self, grad: Tensor | None) -> None:
        if grad is None:
            self.sharded.grad = None
            return
        block = grad.detach()[self.held.own.slices]
        if self.sharded.grad is None:
            dtype = self.sharded.grad_dtype or grad.dtype
            made = torch.empty_like(self.held.local, dtype=dtype)
            self.sharded.grad = torch_dtensor.placed_like(self.sharded, made)
        with torch.no_grad():
            torch_dtensor.local_tensor(self.sharded.grad).copy_(block)


def _check(module: nn.Module, flags: dict[str, bool]) -> list[Unit]:
    for name, flag in flags.items():
        check_flag("summon_full_params", name, flag)
    rank0_only = flags["rank0_only"]
    if rank0_only and flags["writeback"]:
        raise ConfigError(
            "FS307",
            "summon_full_params: found rank0_only=True with writeback=True, but the other ranks "
            "have no values to write back. Pass writeback=False, or rank0_only=False.",
        )
    units = require_idle(module, "summon_full_params")
    if any(unit.summoned_on == "first" or (rank0_only and unit.summoned_on) for unit in units):
        raise StateError(
            "FS307",
            "summon_full_params: the context is nested in another context for the same parameters, "
            "and one of the two uses rank0_only. Exit the outer context first.",
        )
    return units


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Register full parameters on a module's units while the context is active.

    Each full parameter is a plain ``nn.Parameter`` under the same name, in the dtype of the shards
    (not the compute dtype). It is unsharded over replicate and tensor-parallel axes too, so
    ``module.apply(fn)``, ``state_dict()`` and initialisers work as in a single process. Entering is
    collective; exiting does not communicate. ``module`` may be inside a sharded module. Contexts
    may be nested: parameters of an outer context stay registered, and an inner context with
    ``writeback`` writes them back when it exits.

    Args:
        recurse: include units below ``module``. False uses only the module's own unit or, if the
            module is not a unit, the parameters registered directly on the module.
        writeback: on exit, each rank copies its own part of the registered tensors to its shards;
            replicas with different values are not synchronized. False discards all changes.
        rank0_only: only the first rank of the mesh gets full parameters; the others keep their
            shards. Requires ``writeback=False``.
        offload_to_cpu: put the full parameters in host memory.
        with_grads: register full gradients as ``grad``, and write them back with ``writeback``. A
            gradient set to None is dropped; a new gradient gets its parameter's placements.

    Raises:
        ConfigError: not a module; a flag that is not a bool; ``rank0_only`` with ``writeback``; a
            gradient that only some ranks have.
        StateError: called inside a forward or a backward; a forward, ``unshard`` or ``fully_shard``
            of a summoned unit inside the context; on exit, a parameter that was removed or reshaped
            (shards keep their values).
        UnsupportedError: a parameter is a wrapper subclass, which has no storage of its own.

    Source: torch's ``FullyShardedDataParallel.summon_full_params``, for composable modules.
    """
    flags = {
        "recurse": recurse,
        "writeback": writeback,
        "rank0_only": rank0_only,
        "offload_to_cpu": offload_to_cpu,
        "with_grads": with_grads,
    }
    with operation("summon_full_params"):
        with checked_together("summon_full_params", module) as same:
            units = _check(module, flags)
            same.update((name, flags[name]) for name in ("recurse", "rank0_only", "with_grads"))
        summoned = (param.__dict__.get(SUMMONED) for param in module.parameters())
        outer = [item for item in summoned if isinstance(item, _Summoned)]
        found = _find(module, units if recurse else None)
        grids = Grids([item.sharded for item in found])
        _gather(found, grids, rank0_only, offload_to_cpu, with_grads)
    if offload_to_cpu and not rank0_only and torch.accelerator.is_available():
        warn(
            "FS309",
            "summon_full_params: with offload_to_cpu but not rank0_only, every rank on a machine "
            "stores a copy of every parameter in host memory.",
        )
    top = unit_of(module)
    own = [unit for unit in units if not unit.summoned_on and (recurse or unit is top)]
    parts = [part for unit in own for part in unit.modules]
    parts += [site.module for item in found for site in item.sites]
    handles = [
        part.register_forward_pre_hook(_refuse_forward, prepend=True)
        for part in dict.fromkeys(parts)
    ]
    for unit in own:
        unit.summoned_on = "first" if rank0_only else "all"
    for item in found:
        if item.whole is not None:
            item.register(item.whole)
    try:
        yield
    finally:
        for unit in own:
            unit.summoned_on = ""
        for handle in handles:
            handle.remove()
        bad = next(filter(None, map(_problem, found)), None)
        try:
            if bad is not None:
                raise StateError("FS308", f"summon_full_params: {bad} No shard was changed.")
            if writeback:
                for item in (*(item for item in found if item.whole is not None), *outer):
                    item.write_back(with_grads)
        finally:
            for item in found:
                item.register(item.sharded)
                if item.whole is not None:
                    item.whole.__dict__.pop(SUMMONED, None)


def _refuse_forward(module: nn.Module, args: Any) -> None:
    unit = unit_of(module)
    name = unit.fqn if unit is not None else ""
    raise StateError(
        "FS306",
        f"{name or class_name(module)}: its forward was called inside summon_full_params, where no "
        "parameters are gathered and no gradients reduced. Exit the context first.",
    )


def _find(module: nn.Module, units: list[Unit] | None) -> list[_Summoned]:
    sites: dict[int, list[Site]] = {}
    params: dict[int, tuple[str, nn.Parameter]] = {}
    wanted: set[int] | None = None
    if units is None:
        unit = unit_of(module)
        own = list(module.parameters(recurse=False))
        if unit is not None:
            own = [param.sharded for group in unit.own_groups for param in group.params]
        wanted = {id(param) for param in own}
    for prefix, part in module.named_modules():
        for name, param in part._parameters.items():
            if not isinstance(param, DTensor) or (wanted is not None and id(param) not in wanted):
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            params.setdefault(id(param), (fqn, param))  # type: ignore[arg-type]  # both
            sites.setdefault(id(param), []).append(Site(part, name))
    for key, (_, param) in params.items():
        owner = OwnerMark.owner_of(param)
        if owner is not None and owner.sharded is param:  # includes places outside the module
            sites[key] = list(owner.sites)
    grids = Grids([param for _, param in params.values()])
    return [
        _Summoned(fqn, param, sites[key], grids.hold(fqn, param))
        for key, (fqn, param) in params.items()
    ]


def _gather(
    found: list[_Summoned],
    grids: Grids,
    rank0_only: bool,
    offload: bool,
    with_grads: bool,
) -> None:
    helds = [item.held for item in found]
    if rank0_only:
        grids.require_common(helds, WHO)
    device = torch.device("cpu") if offload else None
    target = Target(on_all=not rank0_only, device=device, counted=False)
    for index, tensor in _received(helds, target, grids):
        item = found[index]
        whole = nn.Parameter(tensor, requires_grad=item.sharded.requires_grad)
        vars(whole).update(torch_dtensor.own_attributes(item.sharded))
        if whole.grad_dtype is not item.sharded.grad_dtype:  # accept the same grads as the shard
            whole.grad_dtype = item.sharded.grad_dtype
        whole.__dict__[SUMMONED] = item
        item.whole = whole
    if not with_grads:
        return
    having = [item for item in found if item.sharded.grad is not None]
    difference = grids.difference([item.name for item in having])
    if difference is not None:
        raise ConfigError(
            "FS406",
            f"summon_full_params: some ranks lack a gradient. Found the gradient of {difference}. "
            "Clear it on all ranks, or omit with_grads.",
        )
    grads = [grids.hold(f"{item.name}.grad", item.sharded.grad) for item in having]  # type: ignore[arg-type]  # not None
    for index, tensor in _received(grads, target, grids):
        item = having[index]
        if item.whole is not None:
            item.whole.grad = tensor


def _received(helds: list[LocalShard], target: Target, grids: Grids) -> list[tuple[int, Tensor]]:
    with contextlib.closing(gather(helds, STAGED_NBYTES, target, grids.main, WHO)) as tensors:
        return [(index, tensor) for index, tensor in tensors if tensor is not None]


def _problem(item: _Summoned) -> str | None:
    """Describe why a registered tensor cannot be written back to its shard; None if it can be."""
    if item.whole is None:
        return None
    seen = [site.registered for site in item.sites]
    now = seen[0]
    if now is None:
        return f"{item.name} was removed inside the context. Keep it registered."
    if isinstance(now, DTensor):
        return f"{item.name} is now a DTensor. Replace it with a full parameter."
    if tuple(now.shape) != item.held.shape:
        return (
            f"{item.name} now has shape {tuple(now.shape)} instead of {item.held.shape}. Write to "
            "it in place."
        )
    if any(other is not now for other in seen):
        return f"{item.name} is tied, but was replaced in only one place. Replace it everywhere."
    return None


# ``full_params``: iterate over a model's full parameters in bounded memory.

Transform = Callable[[str, Tensor], "Tensor | None"]


def full_params(
    module: nn.Module,
    *,
    max_bytes: int,
    dtype: torch.dtype | None = None,
    callback: Transform | None = None,
    names: Callable[[str], bool] | None = None,
    buffers: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Iterate over ``(name, full tensor)`` pairs of a module's parameters, in bounded memory.

    Parameters are gathered in buckets, in the order of ``named_parameters()``. Names omit wrappers
    such as activation checkpointing; a tied parameter is yielded once, under its first name.
    Each tensor is a new, detached plain tensor on the device of the shards, and belongs to the
    caller. Tensor-parallel parameters are unsharded too. Collective: every rank must iterate to the
    end, or leave the loop at the same tensor. If only one rank leaves the loop, or its callback or
    loop body raises, the other ranks raise at the next bucket.

    To merge adapters, gather them first, then add them in ``callback``::

        adapters = dict(full_params(model, max_bytes=n, names=lambda name: "lora_" in name))

        def merge(name, weight):
            stem = name.removesuffix("base_layer.weight")
            a, b = (adapters.get(f"{stem}lora_{x}.default.weight") for x in "AB")
            return weight if a is None else weight + scale * (b @ a)

        for name, weight in full_params(model, max_bytes=n, callback=merge): ...

    Args:
        module: a sharded module, or any module whose parameters may be DTensors.
        max_bytes: upper bound on the size of a bucket plus its communication buffers. Tensors that
            the caller keeps are not counted (a loop variable keeps one while the next bucket is
            gathered). A larger parameter is sent separately, in pieces; its size is not counted.
        dtype: cast floating-point tensors to this dtype (before sending, if it is narrower).
        callback: called with each name and full tensor on every rank. Its result is yielded; None
            skips the tensor.
        names: predicate, which must select the same names on every rank; None selects all.
        buffers: yield this rank's buffers too, after the parameters.

    Raises:
        ConfigError: not a module; ``max_bytes`` is not a positive int; ``dtype`` is not a
            floating-point dtype.
        StateError: called inside a forward or a backward; a parameter is on the meta device;
            another rank left the loop, raised in its callback, or ran out of memory.
        UnsupportedError: a tensor is a partial sum or a wrapper subclass.
    """
    # an interrupt stays pending; the exchange of the first bucket reports it to the other ranks
    with kept_interrupts(leave_pending=True), checked_together("full_params", module) as same:
        check_count("full_params", "max_bytes", max_bytes)
        check_dtype("full_params", "dtype", dtype)
        check_function("full_params", "callback", callback)
        check_function("full_params", "names", names)
        check_flag("full_params", "buffers", buffers)
        require_idle(module, "full_params")
        found: dict[str, Tensor] = {**named_parameters(module)}
        if buffers:
            found |= cleaned(dict(module.named_buffers()))
        chosen = {name: found[name] for name in found if names is None or names(name)}
        grids = Grids(list(chosen.values()))
        helds = [grids.hold(name, tensor) for name, tensor in chosen.items()]
        same.update(max_bytes=max_bytes, dtype=dtype, names=[*chosen])
    tensors = gather(helds, max_bytes, Target(dtype=dtype), grids.main, "full_params")
    return _iterate(tensors, list(chosen), callback)


def _iterate(
    tensors: Generator[tuple[int, Tensor | None], None, None],
    names: list[str],
    callback: Transform | None,
) -> Iterator[tuple[str, Tensor]]:
    with contextlib.closing(tensors):
        for index, tensor in tensors:
            assert tensor is not None
            result: Tensor | None = tensor
            if callback is not None:
                try:
                    result = callback(names[index], tensor)
                except Exception as error:
                    tensors.throw(error)  # report the error to the other ranks
                    raise
            del tensor
            if result is not None:
                yield names[index], result
            del result

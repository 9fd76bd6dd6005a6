"""Loading states: whole ones, which the first rank may have alone, and those of each rank's parts.

Owns the way of values from a state to the ranks that hold them. What is compared, and when a model
changes, is in ``_change`` ([Note: all or nothing]). It must not know files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2._base import torch_dtensor
from fsdp2._base.errors import ConfigError
from fsdp2._base.fitting import numbers_of, require_representable
from fsdp2._base.names import cleaned, named_parameters
from fsdp2._engine.between_steps import require_idle
from fsdp2._engine.unit import original_buffers
from fsdp2._transfer.materialize import allocate
from fsdp2._transfer.redistribute import Grids, Held, scatter
from fsdp2.checkpoint._change import (
    Change,
    IncompatibleKeys,
    Rooms,
    Told,
    check_optimizer,
    compare,
    copy_all,
    local_of,
    optimizer_part,
    state_like,
    tell,
)
from fsdp2.checkpoint._optimizer_state import map_values
from fsdp2.checkpoint._state import is_extra, model_tensors

# Whole states.


def load_full(
    what: str,
    model: nn.Module,
    optimizer: Optimizer | None,
    describe: Callable[[], Told],
    source: Callable[[str], Tensor],
    optim_source: Callable[[str], Tensor],
    *,
    from_rank0: bool,
    strict: bool,
    max_bytes: int,
    is_in_memory: bool,
) -> IncompatibleKeys:
    """Load whole tensors that the first rank has, or every rank. See [Note: all or nothing].

    ``is_in_memory``: reading values cannot fail, so that the model's need no room.
    """
    with original_buffers(require_idle(model, what)):
        tensors, extra = model_tensors(model)
        grids = Grids([*tensors.values()])
        has_state = grids.main.is_first or not from_rank0
        told: Told | None = None
        with grids.main.together(what):
            told = describe() if has_state else None
        if from_rank0:
            told = grids.main.broadcast(told)
        assert told is not None
        chosen = _chosen(told.model, tensors)
        is_in_memory = not grids.main.any_is(not is_in_memory)
        with grids.main.together(what):
            keys = compare(what, told, tensors, extra, strict)
            if optimizer is not None:
                assert told.optimizer is not None
                check_optimizer(what, model, optimizer, told.optimizer, strict)
            for name, tensor in chosen.items() if has_state and is_in_memory else ():
                require_representable(what, name, source(name), tensor.dtype)

        def fill(helds: list[Held], read: Callable[[str], Tensor]) -> None:
            _fill(what, grids, helds, max_bytes, read, from_rank0)

        if is_in_memory and any(tensor.is_meta for tensor in tensors.values()):
            with grids.main.together(what):
                allocate(model)
            chosen = _chosen(told.model, model_tensors(model)[0])
        rooms = None if is_in_memory else Rooms(what, model, chosen, grids)
        if rooms is None:
            helds = [grids.hold(name, tensor) for name, tensor in chosen.items()]
        else:
            helds = [*rooms.helds.values()]
        if from_rank0:
            grids.require_common(helds, what)
        named = None
        if optimizer is not None and told.optimizer is not None:
            named, in_optimizer = _optimizer_rooms(what, model, optimizer, told.optimizer, grids)
            fill(in_optimizer, optim_source)
        if rooms is not None:
            fill(helds, source)
        extras = {n: value for n, value in told.extra.items() if n in extra and is_extra(n)}
        change = Change(what, model, optimizer, named, extras)
        change.apply(grids, lambda: fill(helds, source) if rooms is None else rooms.write())
        return keys


def _chosen(names: Iterable[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's tensors that a state has, each once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name in names:
        if name in tensors:
            found.setdefault(id(tensors[name]), (name, tensors[name]))
    return dict(found.values())


def _fill(
    what: str,
    grids: Grids,
    helds: list[Held],
    max_bytes: int,
    source: Callable[[str], Tensor],
    from_rank0: bool,
) -> None:
    """Fill shards; what reading a tensor raises is raised on all ranks, once nothing travels."""
    error: Exception | None = None

    def read(held: Held) -> Tensor:
        nonlocal error
        try:
            value = source(held.name)
            require_representable(what, held.name, value, held.dtype)
            return value
        except Exception as caught:
            error = error or caught
            zero = torch.zeros((), dtype=held.dtype, device=held.local.device)
            return zero.expand(held.shape)

    if from_rank0:
        scatter(helds, max_bytes, read)
    else:
        with torch.no_grad():
            for held in helds:
                held.local.copy_(read(held)[held.own.slices])
    grids.main.raise_together(error, what)


def _optimizer_rooms(
    what: str, model: nn.Module, optimizer: Optimizer, told: dict[str, Any], grids: Grids
) -> tuple[dict[str, Any], list[Held]]:
    """Return the optimizer's state under names, its tensors placed and empty; and these."""
    params = named_parameters(model)
    now = optimizer.state
    helds: list[Held] = []

    numbers = numbers_of(optimizer)

    def make_room(full: str, value: Tensor) -> Tensor:
        field = full[len(name) + 1 :]
        is_number = field in numbers
        made = state_like(param, current.get(field), tuple(value.shape), value.dtype, is_number)
        helds.append(grids.hold(full, made))
        return made

    state: dict[str, dict[str, Any]] = {}
    with grids.main.together(what):
        for name, fields in told["state"].items():
            if name in params:
                param = params[name]
                current: Any = now.get(param, {})
                state[name] = map_values(make_room, name, fields)
    return {"state": state, "param_groups": told["param_groups"]}, helds


# States of each rank's parts.


@dataclass(frozen=True)
class _Parts:
    """What a form of state has for this rank's parts of a model and an optimizer.

    ``part`` returns a tensor's part here, of its name, its value in the state and the model's own;
    ``named`` the optimizer's state under names. Both raise ConfigError for what does not fit.
    """

    part: Callable[[str, Tensor, Tensor], Tensor]
    named: Callable[[Optimizer], dict[str, Any]]
    has_whole_shapes: bool


def _load_parts(
    what: str,
    model: nn.Module,
    state: Any,
    optimizer: Optimizer | None,
    strict: bool,
    parts_of: Callable[[Grids], _Parts],
) -> IncompatibleKeys:
    """Load a state of each rank's own parts. See [Note: all or nothing]."""
    with original_buffers(require_idle(model, what)):
        tensors, extra = model_tensors(model)
        grids = Grids([*tensors.values()])
        pairs: list[tuple[Tensor, Tensor]] = []
        named: dict[str, Any] | None = None
        keys = IncompatibleKeys([], [])
        given: dict[str, Any] = {}
        with grids.main.together(what):
            told = tell(what, state, model, None)
            parts, given = parts_of(grids), cleaned(state["model"])
            shapes = told.model if parts.has_whole_shapes else dict.fromkeys(told.model)
            keys = compare(what, Told(shapes, told.extra), tensors, extra, strict)
            for name, own in _chosen(told.model, tensors).items():
                value = parts.part(name, given[name], own)
                require_representable(what, name, value, own.dtype)
                pairs.append((local_of(own), value))
            if optimizer is not None:
                named = parts.named(optimizer)
                check_optimizer(what, model, optimizer, named, strict)
        extras = {name: given[name] for name in told.extra if name in extra and is_extra(name)}
        Change(what, model, optimizer, named, extras).apply(grids, lambda: copy_all(pairs))
        return keys


def load_local(model: nn.Module, state: Any, optimizer: Optimizer | None) -> None:
    """Load what ``local`` returned on the same rank of the same layout."""
    what = "load_local_state"

    def parts_of(grids: Grids) -> _Parts:
        saved = cleaned(state.get("layout", {}))

        def part(name: str, value: Tensor, own: Tensor) -> Tensor:
            _require_same_place(what, grids.hold(name, own), saved, value)
            return value

        return _Parts(
            part,
            lambda optimizer: _wrapped(what, model, optimizer, state, saved, grids),
            has_whole_shapes=False,
        )

    _load_parts(what, model, state, optimizer, True, parts_of)


def load_sharded(
    model: nn.Module, state: Mapping[str, Any], optimizer: Optimizer | None, strict: bool
) -> IncompatibleKeys:
    """Load DTensors placed as the model's are."""
    what = "load_sharded_state"

    def part(name: str, value: Tensor, own: Tensor) -> Tensor:
        _require_placed_alike(what, name, value, own)
        return local_of(value)

    parts = _Parts(
        part,
        lambda optimizer: optimizer_part(what, state, model, optimizer),
        has_whole_shapes=True,
    )
    return _load_parts(what, model, state, optimizer, strict, lambda _: parts)


def _require_same_place(
    what: str, held: Held, saved: Mapping[str, Any], value: Tensor, name: str | None = None
) -> None:
    """Raise ConfigError if a rank's part was another one, or another shape than its layout says."""
    name = name or held.name
    here = (held.shape, held.own.starts, held.own.sizes)
    whole = (held.shape, (0,) * len(held.shape), held.shape)
    then = saved.get(name, whole)
    if tuple(map(tuple, then)) != here:
        raise ConfigError(
            f"{what}: {name} is {here} here and {saved.get(name)} in the state (whole shape, "
            "start, size). A rank-local state loads on the same ranks and meshes only; use the "
            "sharded one elsewhere. Nothing was changed."
        )
    if tuple(value.shape) != held.own.sizes:
        raise ConfigError(
            f"{what}: {name} is {held.own.sizes} on this rank and {tuple(value.shape)} in the "
            "state. Load what local_state returned on this rank. Nothing was changed."
        )


def _wrapped(
    what: str,
    model: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    saved: Mapping[str, Any],
    grids: Grids,
) -> dict[str, Any]:
    """Return an optimizer's state under names, with DTensors of this rank's parts."""
    named = optimizer_part(what, state, model, optimizer)
    params = named_parameters(model)

    def wrap(full: str, value: Tensor) -> Tensor:
        if full not in saved:
            return value.clone()
        like: Tensor | None = params.get(name)
        if not isinstance(like, DTensor) or tuple(like.shape) != tuple(saved[full][0]):
            raise ConfigError(
                f"{what}: {full} was a DTensor of shape {tuple(saved[full][0])}, and its parameter "
                "is not. Use the sharded state. Nothing was changed."
            )
        _require_same_place(what, grids.hold(name, like), saved, value, full)
        spec = torch_dtensor.spec_of(like)
        made = torch_dtensor.make_spec(
            spec.mesh, spec.placements, like.shape, like.stride(), value.dtype
        )
        return torch_dtensor.new_dtensor(value.clone(), made)

    found = {}
    for name, fields in named["state"].items():
        found[name] = map_values(wrap, name, fields)
    return {**named, "state": found}


def _require_placed_alike(what: str, name: str, value: Tensor, own: Tensor) -> None:
    here, there = (getattr(t, "placements", "no DTensor") for t in (own, value))
    if here != there or local_of(value).shape != local_of(own).shape:
        raise ConfigError(
            f"{what}: {name} is {there} in the state, {tuple(local_of(value).shape)} on this rank, "
            f"and {here}, {tuple(local_of(own).shape)}, in the model. Use save and load, or the "
            "full state."
        )

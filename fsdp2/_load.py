"""Loading a state, in any form, into a model and an optimizer: all of it, or nothing.

Owns the comparison of what is loaded with what is there, the room for values that are not the
model's yet, and the moment when they become the model's. It must not know files.

[Note: all or nothing]
1. *Compare.* Who has a state tells names, shapes and dtypes; every rank compares them with its own
   model and optimizer, which are the same everywhere. Values in memory are looked at, too.
2. *Beside.* Values get room of their own: an optimizer's always, a model's where reading them may
   fail (files). It is as large as what the rank holds of them, and not counted by ``max_bytes``.
3. *Agree.* Every rank has all of its values, or all ranks raise. Only now, what users wrote runs
   (``load_state_dict`` of the optimizer, ``set_extra_state``); if it raises, it is undone.
4. *Write.* Values are copied to where the model's lie, from room or from a state in memory.
So up to the last step nothing was changed, and nothing in the last step can fail by itself.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2 import _torch
from fsdp2._errors import ConfigError
from fsdp2._fit import check_options, check_state, require_representable
from fsdp2._idle import require_idle
from fsdp2._materialize import allocate
from fsdp2._names import clean, cleaned, named_modules, named_parameters
from fsdp2._optim_state import (
    keys_of,
    load_named,
    map_values,
    matched_groups,
    names_in_groups,
    rekey,
    with_clean_names,
)
from fsdp2._precision import original_buffers
from fsdp2._state import is_extra, model_tensors
from fsdp2._stream import Grids, Held, scatter


class IncompatibleKeys(NamedTuple):
    """Names that a load with ``strict=False`` passed over."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True)
class Told:
    """What the rank that has a full state tells the others about it."""

    model: dict[str, tuple[int, ...] | None]
    extra: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None


# 1. Compare.


def tell(what: str, state: Any, model: nn.Module, optimizer: Optimizer | None) -> Told:
    """Describe a state.

    Raises:
        ConfigError: it is none; it has no part for the optimizer.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("model"), Mapping):
        raise ConfigError(
            f"{what}: expected {{'model': ..., 'optimizer': ...}}, found "
            f"{list(state)[:5] if isinstance(state, Mapping) else type(state).__name__}. Put a "
            "plain state dict under 'model'."
        )
    shapes: dict[str, tuple[int, ...] | None] = {}
    extra: dict[str, Any] = {}
    for name, value in state["model"].items():
        if isinstance(value, Tensor) and not is_extra(name):
            shapes[clean(name)] = tuple(value.shape)
        else:
            extra[clean(name)] = value
    told = None
    if optimizer is not None:
        named = optimizer_part(what, state, model, optimizer)
        for name, fields in named["state"].items():
            _refuse_aliases(name, fields)
        told = {
            "param_groups": named["param_groups"],
            "state": {
                name: map_values(lambda _, value: _without_values(value), name, fields)
                for name, fields in named["state"].items()
            },
        }
    return Told(shapes, extra, told)


def optimizer_part(
    what: str, state: Mapping[str, Any], model: nn.Module, optimizer: Optimizer
) -> dict[str, Any]:
    """Return the optimizer's state under clean names.

    Raises:
        ConfigError: there is none.
    """
    named = state.get("optimizer")
    if not isinstance(named, Mapping) or "param_groups" not in named or "state" not in named:
        raise ConfigError(
            f"{what}: an optimizer was passed, and the state has no 'optimizer'. Leave it out, or "
            "load a state that was taken with one."
        )
    named = dict(named)
    if keys_of(named) == "id":
        return rekey(named, "name", model=model, optimizer=optimizer)
    return with_clean_names(named)


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _refuse_aliases(name: str, fields: Mapping[str, Any]) -> None:
    """Raise if two values of a parameter's state are the same memory.

    Observed with torch 2.11 and 2.13: ``FSDP.optim_state_dict`` of a model with
    ``use_orig_params=True`` on a CPU gathers one value after another into one buffer, and with
    ``offload_to_cpu=True`` returns views of it, so that every value is the last one.
    """
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    for key, value in fields.items():
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.numel() > 1:
            place = value.data_ptr(), tuple(value.shape)
            if place in seen:
                raise ConfigError(
                    f"load_full_state: {seen[place]} and {key} of {name} in the optimizer's state "
                    "share memory, so one of them has the other's values. If torch's FSDP1 made "
                    "it: take it with FullOptimStateDictConfig(offload_to_cpu=False), or under "
                    "StateDictType.SHARDED_STATE_DICT. If it is meant, clone one of them."
                )
            seen[place] = key


def compare(
    what: str, told: Told, tensors: Mapping[str, Tensor], extra: Mapping[str, Any], strict: bool
) -> IncompatibleKeys:
    """Compare a state that is to be loaded with the model. A tie needs one of its names.

    Raises:
        ConfigError: a shape differs; with ``strict``, a name that only one of the two has.
    """
    offered = {**told.model, **told.extra}
    given = {id(tensors[name]) for name in told.model if name in tensors}
    missing = [n for n, tensor in tensors.items() if n not in offered and id(tensor) not in given]
    missing += [name for name in extra if name not in offered]
    unexpected = [name for name in offered if name not in tensors and name not in extra]
    wrong = [
        f"{name}: {tuple(tensors[name].shape)} in the model, {shape} in the state"
        for name, shape in told.model.items()
        if name in tensors and shape is not None and tuple(tensors[name].shape) != shape
    ]
    wrong += [f"{name}: no tensor in the state" for name in told.extra if name in tensors]
    problems = []
    if wrong:
        problems.append("other shapes for " + "; ".join(wrong[:5]))
    if strict and missing:
        problems.append(f"{len(missing)} missing names: {', '.join(missing[:5])}")
    if strict and unexpected:
        problems.append(
            f"{len(unexpected)} names that the model lacks: {', '.join(unexpected[:5])}"
        )
    if problems:
        hint = "" if wrong else " Pass strict=False to load what fits."
        raise ConfigError(
            f"{what}: the state does not fit the model. Found {' and '.join(problems)}.{hint} "
            "Nothing was changed."
        )
    return IncompatibleKeys(missing, unexpected)


def check_optimizer(
    what: str, model: nn.Module, optimizer: Optimizer, named: Mapping[str, Any], strict: bool
) -> None:
    """Compare an optimizer's state under names, values of which may be on meta, with it.

    Raises:
        ConfigError: it is another optimizer's; with ``strict``, it has parameters that the model
            lacks; the optimizer was built before its parameters had memory.
    """
    own = names_in_groups(model, optimizer)
    for names, group in zip(own, optimizer.param_groups, strict=True):
        on_meta = [n for n, p in zip(names, group["params"], strict=True) if p.is_meta]
        if on_meta:
            raise ConfigError(
                f"{what}: {on_meta[0]} is on the meta device, and gets memory as a new parameter, "
                "which the optimizer does not hold. Load the model first (or call "
                "fsdp2.materialize), build the optimizer, and load both. Nothing was changed."
            )
    groups = matched_groups(model, optimizer, dict(named))
    check_options(what, optimizer, named["param_groups"])
    params = named_parameters(model)
    unknown = [name for name in named["state"] if name not in params]
    if strict and unknown:
        raise ConfigError(
            f"{what}: the optimizer's state has {len(unknown)} names that the model lacks: "
            f"{', '.join(map(str, unknown[:5]))}. Pass strict=False to load what fits. Nothing "
            "was changed."
        )
    check_state(what, optimizer, groups, own, named["state"])


# 2. Beside.


def state_like(
    param: Tensor, current: object, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return an empty tensor for a value of a parameter's state, placed as it will be used.

    Values of the parameter's shape lie as the parameter does; others as what is there now, or whole
    on every rank (numbers of steps on the CPU).
    """
    like = param
    if isinstance(current, DTensor) and tuple(current.shape) == shape:
        like = current
    if isinstance(like, DTensor) and tuple(like.shape) == shape:
        local = torch.empty_like(_torch.local_tensor(like), dtype=dtype)
        spec = _torch.spec_of(like)
        made = _torch.make_spec(spec.mesh, spec.placements, shape, like.stride(), dtype)
        return _torch.new_dtensor(local, made)
    device = param.device if shape else torch.device("cpu")
    return torch.empty(shape, dtype=dtype, device=device)


def room_for(tensor: Tensor) -> Tensor:
    """Return an empty tensor placed as another, with memory though that one may have none."""
    if not isinstance(tensor, DTensor):
        kept = torch.device("cpu") if tensor.is_meta else tensor.device
        return torch.empty_like(tensor.detach(), device=kept)
    local = _torch.local_tensor(tensor).detach()
    kept = torch.device(tensor.device_mesh.device_type) if local.is_meta else local.device
    return _torch.new_dtensor(torch.empty_like(local, device=kept), _torch.spec_of(tensor))


class Rooms:
    """What a model's tensors will be, beside them. Made on every rank, or on none."""

    def __init__(
        self, what: str, model: nn.Module, chosen: Mapping[str, Tensor], grids: Grids
    ) -> None:
        self._what = what
        self._model = model
        self._main = grids.main
        with self._main.together(what):
            made = {name: room_for(tensor) for name, tensor in chosen.items()}
        self.helds = {name: grids.hold(name, room) for name, room in made.items()}

    def write(self) -> None:
        """Copy all of it to the model, whose parameters on meta get memory first."""
        tensors, _ = model_tensors(self._model)
        if any(tensor.is_meta for tensor in tensors.values()):
            with self._main.together(self._what):
                allocate(self._model)
            tensors, _ = model_tensors(self._model)
        copy_all((local_of(tensors[name]), held.local) for name, held in self.helds.items())


def local_of(tensor: Tensor) -> Tensor:
    local = _torch.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    return local.detach()


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


# 3. Agree, and 4. write.


@dataclass(frozen=True)
class Change:
    """What a load does beside writing tensors of the model.

    ``extra`` are extra states by name; ``named`` is an optimizer's state under names.
    """

    what: str
    model: nn.Module
    optimizer: Optimizer | None
    named: Mapping[str, Any] | None
    extra: Mapping[str, Any]

    def apply(self, grids: Grids, write: Callable[[], None]) -> None:
        """Do it on every rank, or on none, and then write. See [Note: all or nothing]."""
        undo: list[Callable[[], None]] = []
        try:
            with grids.main.together(self.what):
                if self.optimizer is not None and self.named is not None:
                    undo.append(_undo_of(self.optimizer))
                    load_named(self.model, self.optimizer, dict(self.named))
                self._set_extra(undo)
        except BaseException:
            for back in reversed(undo):
                with contextlib.suppress(Exception):  # of what the user wrote: the rest goes on
                    back()
            raise
        write()

    def _set_extra(self, undo: list[Callable[[], None]]) -> None:
        modules = named_modules(self.model)
        for name, value in self.extra.items():
            module = modules[name.rpartition(".")[0]]
            before = copy.deepcopy(module.get_extra_state())
            undo.append(partial(module.set_extra_state, before))
            module.set_extra_state(value)


def _undo_of(optimizer: Optimizer) -> Callable[[], None]:
    kept = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    return lambda: optimizer.__setstate__(dict(kept))


# Full states.


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

    def make_room(full: str, value: Tensor) -> Tensor:
        held = current.get(full[len(name) + 1 :])
        made = state_like(param, held, tuple(value.shape), value.dtype)
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


# Rank-local and sharded states.


def load_local(model: nn.Module, state: Any, optimizer: Optimizer | None) -> None:
    """Load what ``local`` returned on the same rank of the same layout."""
    what = "load_local_state"
    with original_buffers(require_idle(model, what)):
        tensors, extra = model_tensors(model)
        grids = Grids([*tensors.values()])
        pairs: list[tuple[Tensor, Tensor]] = []
        named: dict[str, Any] | None = None
        given: dict[str, Any] = {}
        with grids.main.together(what):
            told = tell(what, state, model, None)
            given, saved = cleaned(state["model"]), cleaned(state.get("layout", {}))
            compare(what, Told(dict.fromkeys(told.model), told.extra), tensors, extra, True)
            for name, tensor in _chosen(told.model, tensors).items():
                _require_same_place(what, grids.hold(name, tensor), saved, given[name])
                require_representable(what, name, given[name], tensor.dtype)
                pairs.append((local_of(tensor), given[name]))
            if optimizer is not None:
                named = _wrapped(what, model, optimizer, state, saved, grids)
                check_optimizer(what, model, optimizer, named, True)
        extras = {name: given[name] for name in told.extra if name in extra and is_extra(name)}
        Change(what, model, optimizer, named, extras).apply(grids, lambda: copy_all(pairs))


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
        spec = _torch.spec_of(like)
        made = _torch.make_spec(spec.mesh, spec.placements, like.shape, like.stride(), value.dtype)
        return _torch.new_dtensor(value.clone(), made)

    found = {}
    for name, fields in named["state"].items():
        found[name] = map_values(wrap, name, fields)
    return {**named, "state": found}


def load_sharded(
    model: nn.Module, state: Mapping[str, Any], optimizer: Optimizer | None, strict: bool
) -> IncompatibleKeys:
    """Load DTensors placed as the model's are."""
    what = "load_sharded_state"
    with original_buffers(require_idle(model, what)):
        tensors, extra = model_tensors(model)
        grids = Grids([*tensors.values()])
        pairs: list[tuple[Tensor, Tensor]] = []
        named: dict[str, Any] | None = None
        keys = IncompatibleKeys([], [])
        given: dict[str, Any] = {}
        with grids.main.together(what):
            told = tell(what, state, model, None)
            given = cleaned(state["model"])
            keys = compare(what, told, tensors, extra, strict)
            for name, own in _chosen(told.model, tensors).items():
                _require_placed_alike(what, name, given[name], own)
                require_representable(what, name, local_of(given[name]), own.dtype)
                pairs.append((local_of(own), local_of(given[name])))
            if optimizer is not None:
                named = optimizer_part(what, state, model, optimizer)
                check_optimizer(what, model, optimizer, named, strict)
        extras = {name: given[name] for name in told.extra if name in extra and is_extra(name)}
        Change(what, model, optimizer, named, extras).apply(grids, lambda: copy_all(pairs))
        return keys


def _require_placed_alike(what: str, name: str, value: Tensor, own: Tensor) -> None:
    here, there = (getattr(t, "placements", "no DTensor") for t in (own, value))
    if here != there or local_of(value).shape != local_of(own).shape:
        raise ConfigError(
            f"{what}: {name} is {there} in the state, {tuple(local_of(value).shape)} on this rank, "
            f"and {here}, {tuple(local_of(own).shape)}, in the model. Use save and load, or the "
            "full state."
        )

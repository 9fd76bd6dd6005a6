"""Model and optimizer state in three forms: full, sharded, rank-local.

Owns what belongs to a state, its ties, and the comparison of what is loaded with what is there. It
must not know files. ``_stream`` moves the tensors.

A state is ``{"model": {name: tensor}, "optimizer": {"state": {...}, "param_groups": [...]}}``.

[Note: what is loaded is compared first]
The first rank tells the names, shapes and dtypes of what it has; every rank compares them with its
own model, which is the same everywhere. So either all ranks raise the same error and nothing was
changed, or the values follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2 import _torch
from fsdp2._errors import ConfigError, StateError
from fsdp2._idle import require_idle
from fsdp2._materialize import allocate
from fsdp2._optim_state import keys_of, load_named, map_values, matched_groups, named_state, rekey
from fsdp2._precision import original_buffers
from fsdp2._stream import Grids, Held, Target, gather, scatter

EXTRA_STATE = "_extra_state"


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


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return parameters and persistent buffers by name, ties being one object; and extra state."""
    found = model.state_dict(keep_vars=True)
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in found.items() if name not in tensors}


def sharded(model: nn.Module, optimizer: Optimizer | None, keys: Any) -> dict[str, Any]:
    """Return the state as it lies; tensors are shared with the model and the optimizer."""
    require_idle(model, "sharded_state")
    state: dict[str, Any] = {"model": dict(model.state_dict())}
    if optimizer is not None:
        named = named_state(model, optimizer)
        if keys == "id":
            named = rekey(named, "id", model=model, optimizer=optimizer)
        state["optimizer"] = named
    return state


class _Slots:
    """The tensors of a state, each once, with the names that it has there."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.names: list[list[str]] = []
        self._known: dict[int, int] = {}

    def add(self, name: str, tensor: Tensor) -> int:
        """Return the number of a tensor."""
        number = self._known.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
            self.names.append([])
        self.names[number].append(name)
        return number


def full(
    model: nn.Module,
    optimizer: Optimizer | None,
    keys: Any,
    target: Target,
    max_bytes: int,
    visit: Callable[[list[str], Tensor | None], None] | None = None,
) -> dict[str, Any]:
    """Return the whole state where the target says, else an empty one.

    ``visit`` takes each tensor of the model with its names instead of the state.
    """
    require_idle(model, "full_state")
    slots = _Slots()
    tensors, extra = model_tensors(model)
    numbers = {name: slots.add(name, tensor) for name, tensor in tensors.items()}
    in_optimizer: dict[str, int] = {}
    named: dict[str, Any] = {}
    if optimizer is not None:
        named = named_state(model, optimizer)

        def note(key: str, value: Tensor) -> Tensor:
            in_optimizer[key] = slots.add(key, value)
            return value

        for name, fields in named["state"].items():
            map_values(note, name, fields)
    grids = Grids([*slots.tensors])
    helds = [
        grids.hold(names[0], tensor)
        for names, tensor in zip(slots.names, slots.tensors, strict=True)
    ]
    grids.require_common(helds, "full_state")
    whole: dict[int, Tensor | None] = {}
    with closing(gather(helds, max_bytes, target, grids.main, "full_state")) as gathered:
        for index, tensor in gathered:
            if visit is None:
                whole[index] = tensor
            else:
                visit(slots.names[index], tensor)
    if visit is not None or not target.takes(grids.main):
        return {}
    state: dict[str, Any] = {"model": {name: whole[numbers[name]] for name in tensors} | extra}
    if optimizer is not None:
        values = {
            name: map_values(lambda key, _: whole[in_optimizer[key]], name, fields)
            for name, fields in named["state"].items()
        }
        state["optimizer"] = {**named, "state": values}
    if optimizer is not None and keys == "id":
        state["optimizer"] = rekey(state["optimizer"], "id", model=model, optimizer=optimizer)
    return state


# Loading.


def tell(state: Mapping[str, Any], model: nn.Module, optimizer: Optimizer | None) -> Told:
    """Describe a full state.

    Raises:
        ConfigError: it is none; it has no part for the optimizer.
    """
    if not isinstance(state, Mapping) or "model" not in state:
        raise ConfigError(
            "load_full_state: expected {'model': ..., 'optimizer': ...}, found "
            f"{list(state)[:5] if isinstance(state, Mapping) else type(state).__name__}. Put a "
            "plain state dict under 'model'."
        )
    shapes: dict[str, tuple[int, ...] | None] = {}
    extra: dict[str, Any] = {}
    for name, value in state["model"].items():
        if isinstance(value, Tensor):
            shapes[name] = tuple(value.shape)
        else:
            extra[name] = value
    told = None
    if optimizer is not None:
        if "optimizer" not in state:
            raise ConfigError(
                "load_full_state: an optimizer was passed, and the state has no 'optimizer'. Leave "
                "it out, or load a state that was taken with one."
            )
        named = state["optimizer"]
        if keys_of(named) == "id":
            named = rekey(named, "name", model=model, optimizer=optimizer)
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
) -> IncompatibleKeys:
    """Load whole tensors that the first rank has, or every rank. See the note above."""
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
        error: Exception | None = None
        keys = IncompatibleKeys([], [])
        try:
            keys = compare(what, told, tensors, extra, strict)
            if optimizer is not None:
                _check_optimizer(model, optimizer, told)
        except ConfigError as caught:
            error = caught
        grids.main.raise_together(error, what)
        if any(tensor.is_meta for tensor in tensors.values()):
            allocate(model)
            tensors, extra = model_tensors(model)
        chosen: dict[int, tuple[str, Tensor]] = {}
        for name in told.model:
            if name in tensors:
                chosen.setdefault(id(tensors[name]), (name, tensors[name]))
        names = {name: name for name, _ in chosen.values()}
        helds = [grids.hold(name, tensor) for name, tensor in chosen.values()]
        if from_rank0:
            grids.require_common(helds, what)
        _fill(what, grids, helds, max_bytes, lambda held: source(names[held.name]), from_rank0)
        modules = dict(model.named_modules())
        for name, value in told.extra.items():
            if name in extra and name.rpartition(".")[2] == EXTRA_STATE:
                modules[name.rpartition(".")[0]].set_extra_state(value)
        if optimizer is not None and told.optimizer is not None:
            state = _load_optimizer(
                what, model, optimizer, told.optimizer, grids, optim_source, from_rank0, max_bytes
            )
            load_named(model, optimizer, state)
        return keys


def _fill(
    what: str,
    grids: Grids,
    helds: list[Held],
    max_bytes: int,
    source: Callable[[Held], Tensor],
    from_rank0: bool,
) -> None:
    """Fill shards; what reading a tensor raises is raised on all ranks, once nothing travels."""
    error: BaseException | None = None

    def read(held: Held) -> Tensor:
        nonlocal error
        try:
            return source(held)
        except BaseException as caught:  # an interrupt is raised at the end too
            error = error or caught
            zero = torch.zeros((), dtype=held.local.dtype, device=held.local.device)
            return zero.expand(held.shape)

    if from_rank0:
        scatter(helds, max_bytes, read)
    else:
        with torch.no_grad():
            for held in helds:
                held.local.copy_(read(held)[held.own.slices])
    grids.main.raise_together(error, what)


def _check_optimizer(model: nn.Module, optimizer: Optimizer, told: Told) -> None:
    assert told.optimizer is not None
    matched_groups(model, optimizer, told.optimizer)


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


def _load_optimizer(
    what: str,
    model: nn.Module,
    optimizer: Optimizer,
    told: dict[str, Any],
    grids: Grids,
    source: Callable[[str], Tensor],
    from_rank0: bool,
    max_bytes: int,
) -> dict[str, Any]:
    """Return the optimizer's state under names, its tensors placed and filled."""
    params = dict(model.named_parameters())
    state: dict[str, dict[str, Any]] = {}
    helds: list[Held] = []
    for name, fields in told["state"].items():
        if name not in params:
            continue
        param = params[name]
        current = optimizer.state.get(param, {})

        def make_room(
            full: str,
            value: Tensor,
            name: str = name,
            param: Tensor = param,
            current: Any = current,
        ) -> Tensor:
            now = current.get(full[len(name) + 1 :])
            made = state_like(param, now, tuple(value.shape), value.dtype)
            helds.append(grids.hold(full, made))
            return made

        state[name] = map_values(make_room, name, fields)
    _fill(what, grids, helds, max_bytes, lambda held: source(held.name), from_rank0)
    return {"state": state, "param_groups": told["param_groups"]}


# Rank-local.


def local(model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return this rank's own tensors, and where they lie. Tensors are shared with the model."""
    require_idle(model, "local_state")
    state = sharded(model, optimizer, "name")
    layout: dict[str, Any] = {}

    def cut(name: str, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        region = grids.hold(name, value).own
        layout[name] = (tuple(value.shape), region.starts, region.sizes)
        return _torch.local_tensor(value).detach()

    grids = Grids(list(state["model"].values()))
    result: dict[str, Any] = {
        "model": {name: cut(name, value) for name, value in state["model"].items()}
    }
    if optimizer is not None:
        named = state["optimizer"]
        values = {name: map_values(cut, name, fields) for name, fields in named["state"].items()}
        result["optimizer"] = {**named, "state": values}
    return {**result, "layout": layout}


def load_local(model: nn.Module, state: Mapping[str, Any], optimizer: Optimizer | None) -> None:
    """Load what ``local`` returned on the same rank of the same layout."""
    units = require_idle(model, "load_local_state")
    tensors, _ = model_tensors(model)
    grids = Grids([*tensors.values()])
    named: dict[str, Any] = {}
    with grids.main.together("load_local_state"):
        now = local(model, None)
        mine, saved = now["layout"], state["layout"]
        differ = [n for n in now["model"] if saved.get(n) != mine.get(n)]
        differ += [name for name in state["model"] if name not in now["model"]]
        if differ:
            raise ConfigError(
                f"load_local_state: {differ[0]} is {mine.get(differ[0])} here and "
                f"{saved.get(differ[0])} in the state (whole shape, start, size). A rank-local "
                "state loads on the same ranks and meshes only; use the sharded one elsewhere."
            )
        if optimizer is not None:
            if "optimizer" not in state:
                raise ConfigError("load_local_state: the state was taken without an optimizer.")
            params = dict(model.named_parameters())
            named = {
                **state["optimizer"],
                "state": {
                    name: map_values(partial(_wrapped, params[name], saved), name, fields)
                    for name, fields in state["optimizer"]["state"].items()
                },
            }
    with torch.no_grad(), original_buffers(units):
        tensors, _ = model_tensors(model)
        for name, value in state["model"].items():
            if isinstance(value, Tensor):
                grids.hold(name, tensors[name]).local.copy_(value)
    if optimizer is not None:
        load_named(model, optimizer, named)


def _wrapped(param: Tensor, layout: Mapping[str, Any], name: str, value: Tensor) -> Tensor:
    """Make a DTensor of a rank's part of a parameter's state."""
    if name not in layout:
        return value.clone()
    shape = tuple(layout[name][0])
    if not isinstance(param, DTensor) or tuple(param.shape) != shape:
        raise StateError(
            f"load_local_state: {name} was a DTensor of shape {shape}, and its parameter is not. "
            "Use the sharded state."
        )
    spec = _torch.spec_of(param)
    made = _torch.make_spec(spec.mesh, spec.placements, shape, param.stride(), value.dtype)
    return _torch.new_dtensor(value.clone(), made)


def load_sharded(
    model: nn.Module, state: Mapping[str, Any], optimizer: Optimizer | None, strict: bool
) -> IncompatibleKeys:
    """Load DTensors placed as the model's are."""
    what = "load_sharded_state"
    require_idle(model, what)
    tensors, extra = model_tensors(model)
    grids = Grids([*tensors.values()])
    keys = IncompatibleKeys([], [])
    with grids.main.together(what):
        told = tell(state, model, None)
        keys = compare(what, told, tensors, extra, strict)
        for name in told.model:
            value, own = state["model"][name], tensors.get(name)
            if isinstance(own, DTensor) and (
                not isinstance(value, DTensor) or value.placements != own.placements
            ):
                raise ConfigError(
                    f"{what}: {name} is {getattr(value, 'placements', 'no DTensor')} in the state "
                    f"and {own.placements} in the model. Use save and load, or the full state."
                )
        if optimizer is not None:
            named = state["optimizer"]
            if keys_of(named) == "id":
                named = rekey(named, "name", model=model, optimizer=optimizer)
    model.load_state_dict(dict(state["model"]), strict=False)
    if optimizer is not None:
        load_named(model, optimizer, named)
    return keys

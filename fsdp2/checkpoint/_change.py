"""What a load changes, in any form, in a model and an optimizer: all of it, or nothing.

Owns the comparison of what is loaded with what is there, the room for values that are not the
model's yet, and the moment when they become the model's. It must not know where values come from.

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

from fsdp2._core.base import torch_dtensor
from fsdp2._core.base.errors import ConfigError
from fsdp2._core.base.fitting import check_options, check_state
from fsdp2._core.base.names import clean, named_modules, named_parameters
from fsdp2._core.transfer.materialize import allocate
from fsdp2._core.transfer.redistribute import Grids
from fsdp2.checkpoint._optimizer_state import (
    load_named,
    matched_groups,
    names_in_groups,
    rekey,
)
from fsdp2.checkpoint._state import is_extra, model_tensors


class IncompatibleKeys(NamedTuple):
    """Names that a load with ``strict=False`` passed over. With ``strict=True`` both are empty.

    ``missing_keys`` are names of the model that the state lacks. ``unexpected_keys`` are names of
    the state that the model lacks.

    Source: what ``nn.Module.load_state_dict`` returns.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True)
class StateManifest:
    """What the rank that has a full state tells the others about it."""

    model: dict[str, tuple[int, ...] | None]
    extra: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None


# 1. Compare.


def tell(what: str, state: Any) -> StateManifest:
    """Describe the model's part of a state.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("model"), Mapping):
        raise ConfigError(
            "FS601",
            f"{what}: expected {{'model': ..., 'optimizer': ...}}, found "
            f"{list(state)[:5] if isinstance(state, Mapping) else type(state).__name__}. Put a "
            "plain state dict under 'model'.",
        )
    shapes: dict[str, tuple[int, ...] | None] = {}
    extra: dict[str, Any] = {}
    for name, value in state["model"].items():
        if isinstance(value, Tensor) and not is_extra(name):
            shapes[clean(name)] = tuple(value.shape)
        else:
            extra[clean(name)] = value
    return StateManifest(shapes, extra)


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
            "FS602",
            f"{what}: an optimizer was passed, and the state has no 'optimizer'. Leave it out, or "
            "load a state that was taken with one.",
        )
    return rekey(dict(named), "name", model=model, optimizer=optimizer)


def refuse_aliases(name: str, fields: Mapping[str, Any]) -> None:
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
                    "FS606",
                    f"load_full_state: {seen[place]} and {key} of {name} in the optimizer's state "
                    "share memory, so one of them has the other's values. If torch's FSDP1 made "
                    "it: take it with FullOptimStateDictConfig(offload_to_cpu=False), or under "
                    "StateDictType.SHARDED_STATE_DICT. If it is meant, clone one of them.",
                )
            seen[place] = key


def compare(
    what: str,
    told: StateManifest,
    tensors: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    strict: bool,
) -> IncompatibleKeys:
    """Compare a state that is to be loaded with the model.

    A tie needs one of its names, and a tensor without elements none: nothing of it can be lost.

    Raises:
        ConfigError: a shape differs; with ``strict``, a name that only one of the two has.
    """
    offered = {**told.model, **told.extra}
    given = {id(tensors[name]) for name in told.model if name in tensors}
    needed = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
    missing = [n for n, tensor in needed.items() if n not in offered and id(tensor) not in given]
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
        without = " Pass strict=False to load what fits, without an optimizer."
        hint = "" if wrong else without
        raise ConfigError(
            "FS603",
            f"{what}: the state does not fit the model. Found {' and '.join(problems)}.{hint} "
            "Nothing was changed.",
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
                "FS605",
                f"{what}: {on_meta[0]} is on the meta device, and gets memory as a new parameter, "
                "which the optimizer does not hold. Load the model first (or call "
                "fsdp2.materialize), build the optimizer, and load both. Nothing was changed.",
            )
    groups = matched_groups(model, optimizer, dict(named))
    check_options(what, optimizer, named["param_groups"])
    params = named_parameters(model)
    unknown = [name for name in named["state"] if name not in params]
    if strict and unknown:
        raise ConfigError(
            "FS604",
            f"{what}: the optimizer's state has {len(unknown)} names that the model lacks: "
            f"{', '.join(map(str, unknown[:5]))}. Pass strict=False to load what fits. Nothing "
            "was changed.",
        )
    check_state(what, optimizer, groups, own, named["state"])


def chosen(names: Iterable[str], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's tensors that a state has, each once, under the first of these names."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name in names:
        if name in tensors:
            found.setdefault(id(tensors[name]), (name, tensors[name]))
    return dict(found.values())


# 2. Beside.


def state_like(param: Tensor, current: object, told: Tensor, is_number: bool) -> Tensor:
    """Return an empty tensor for a value of a parameter's state, placed as it will be used.

    A value lies as what is there now. If that has another shape, or is not there yet, a value of
    the parameter's shape lies as the parameter does, unless it ``is_number``: a number of steps of
    a 0-dim parameter has its shape too. Others are whole on every rank, numbers on the CPU.

    Args:
        told: the whole value, on meta.
    """
    like: Tensor | None = None if is_number else param
    if isinstance(current, Tensor) and current.shape == told.shape:
        like = current
    if isinstance(like, DTensor) and like.shape == told.shape:
        local = torch.empty_like(torch_dtensor.local_tensor(like), dtype=told.dtype)
        return torch_dtensor.placed_like(like, local)
    device = param.device if told.dim() else torch.device("cpu")
    return torch.empty(told.shape, dtype=told.dtype, device=device)


def room_for(tensor: Tensor) -> Tensor:
    """Return an empty tensor placed as another, with memory though that one may have none."""
    local = local_of(tensor)
    real = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else "cpu"
    made = torch.empty_like(local, device=real if local.is_meta else local.device)
    return torch_dtensor.placed_like(tensor, made)


def with_memory(what: str, model: nn.Module, grids: Grids) -> dict[str, Tensor]:
    """Return a model's tensors; parameters on meta get memory first, on every rank or on none."""
    tensors, _ = model_tensors(model)
    if any(tensor.is_meta for tensor in tensors.values()):
        with grids.main.together(what):
            allocate(model)
        tensors, _ = model_tensors(model)
    return tensors


def local_of(tensor: Tensor) -> Tensor:
    return torch_dtensor.local_part(tensor).detach()


def copy_all(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source)


# 3. Agree, and 4. write.


def change(
    what: str,
    model: nn.Module,
    optimizer: Optimizer | None,
    named: Mapping[str, Any] | None,
    extra: Mapping[str, Any],
    grids: Grids,
    write: Callable[[], None],
) -> None:
    """Load all but the model's tensors on every rank, or on none, and then write these.

    See [Note: all or nothing].

    Args:
        named: the optimizer's state under names.
        extra: extra states by name.
    """
    undo: list[Callable[[], None]] = []
    try:
        with grids.main.together(what):
            if optimizer is not None and named is not None:
                undo.append(_undo_of(optimizer))
                load_named(model, optimizer, dict(named))
            _set_extra(model, extra, undo)
    except BaseException:
        for back in reversed(undo):
            with contextlib.suppress(Exception):  # of what the user wrote: the rest goes on
                back()
        raise
    write()


def _set_extra(model: nn.Module, extra: Mapping[str, Any], undo: list[Callable[[], None]]) -> None:
    modules = named_modules(model)
    for name, value in extra.items():
        module = modules[name.rpartition(".")[0]]
        before = copy.deepcopy(module.get_extra_state())
        undo.append(partial(module.set_extra_state, before))
        module.set_extra_state(value)


def _undo_of(optimizer: Optimizer) -> Callable[[], None]:
    kept = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    return lambda: optimizer.__setstate__(dict(kept))

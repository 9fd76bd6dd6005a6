"""Model and optimizer state in three forms: full, sharded, rank-local.

Owns what belongs to a state, and its ties. It must not know files, nor how a state is loaded
(``_load``, ``_change``). ``_core.transfer.redistribute`` moves the tensors.

A state is ``{"model": {name: tensor}, "optimizer": {"state": {...}, "param_groups": [...]}}``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2._core.base import torch_dtensor
from fsdp2._core.base.arguments import check_count, check_flag, check_module, check_optimizer
from fsdp2._core.base.errors import ConfigError
from fsdp2._core.base.names import cleaned
from fsdp2._core.comm.process_mesh import operation
from fsdp2._core.engine.between_steps import require_idle
from fsdp2._core.transfer.redistribute import Grids, Target, checked_together, gather
from fsdp2.checkpoint._optimizer_state import (
    Keys,
    check_keys,
    map_state,
    named_state,
    rekey,
    settle_state,
)
from fsdp2.checkpoint._wrapped import opened

MAX_BYTES = 256 << 20
"""Default cap on what a rank holds beside its shards while tensors travel."""

EXTRA_STATE = "_extra_state"


def check(
    who: str,
    model: object,
    optimizer: object = None,
    *,
    max_bytes: object = MAX_BYTES,
    **flags: object,
) -> None:
    """Raise ConfigError for what no function of ``fsdp2.checkpoint`` can use."""
    check_module(who, "model", model)
    check_optimizer(who, optimizer)
    for name, flag in flags.items():
        check_flag(who, name, flag)
    check_count(who, "max_bytes", max_bytes)


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return parameters and persistent buffers by name, ties being one object; and extra state.

    Of a frozen parameter that wraps other tensors it is these. See ``_wrapped``.
    """
    found = cleaned(model.state_dict(keep_vars=True))
    tensors = {
        name: value
        for name, value in found.items()
        if isinstance(value, Tensor) and not is_extra(name)
    }
    extra = {name: value for name, value in found.items() if name not in tensors}
    return opened(model, tensors), extra


def made_anew(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return those tensors of a model's state that are made for each state: nobody reads them back.

    A module may put into its state what is no parameter and no buffer. If that is the module's own
    memory, a load writes there; what was made for the state is lost.
    """
    own = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    known = cleaned(dict(own))
    loose = {n: t for n, t in tensors.items() if n not in known and not isinstance(t, DTensor)}
    if not loose:
        return {}
    again = cleaned(model.state_dict(keep_vars=True))
    return {
        name: tensor
        for name, tensor in loose.items()
        if isinstance(again.get(name), Tensor) and again[name].data_ptr() != tensor.data_ptr()
    }


def require_kept(what: str, name: str, value: Tensor, current: Tensor) -> None:
    """Raise ConfigError if a value is to be loaded that the module would not take, and has not."""
    there = value.to(current.device, current.dtype)
    if not torch.equal(there, current):
        raise ConfigError(
            "FS603",
            f"{what}: {name} differs from the model's, and its module makes it anew for each "
            "state, so nothing can be loaded into it. Load into a model that was made, and "
            "quantised, from the same weights. Nothing was changed.",
        )


def is_extra(name: str) -> bool:
    """True for what ``get_extra_state`` of a module returned, a tensor perhaps."""
    return name.rpartition(".")[2] == EXTRA_STATE


@operation("full_state")
def full_state(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    rank0_only: bool = True,
    cpu_offload: bool = True,
    max_bytes: int = MAX_BYTES,
    optim_keys: Keys = "name",
) -> dict[str, Any]:
    """Return the whole state of a model and its optimizer, as one process would have it.

    Tensors are plain and new; names of a tied parameter share one. Ranks other than the writer hold
    at most ``max_bytes`` beside their shards at any time, and so does the writer beside what it
    has collected.

    Args:
        optimizer: one over the model's parameters.
        rank0_only: only the first rank of the mesh gets the state, the others an empty dict.
        cpu_offload: the tensors are in host memory.
        max_bytes: bytes of the buffers that tensors travel in; 256 MiB by default.
        optim_keys: ``"name"`` calls parameters by name, as torch's FSDP1 and DCP helpers do,
            ``"id"`` as ``optimizer.state_dict()`` of one process does.

    Raises:
        ConfigError: the optimizer holds other parameters; a wrong argument.
        StateError: inside a forward or a backward; a parameter is on the meta device.
        UnsupportedError: a parameter lies on some of the model's ranks only, is a partial sum, or
            is a tensor subclass without bytes of its own.
    """
    flags = {"rank0_only": rank0_only, "cpu_offload": cpu_offload}
    with checked_together("full_state", model) as same:
        check("full_state", model, optimizer, max_bytes=max_bytes, **flags)
        check_keys("full_state: optim_keys", optim_keys)
        require_idle(model, "full_state")
        tensors, extra = model_tensors(model)  # a hook of the user's may raise
        same.update(has_optimizer=optimizer is not None)
        same.update(rank0_only=rank0_only, max_bytes=max_bytes)
    device = torch.device("cpu") if cpu_offload else None
    target = Target(on_all=not rank0_only, device=device, counted=False)
    given = [*tensors.items()]
    named: dict[str, Any] = {}
    if optimizer is not None:
        settle_state(optimizer)
        with Grids([*tensors.values()]).main.together("full_state"):
            named = named_state(model, optimizer)  # a rank may have states that others have not

        def note(name: str, key: str, value: Tensor) -> Tensor:
            given.append((f"{name}.{key}", value))
            return value

        map_state(note, named["state"])
    grids = Grids([tensor for _, tensor in given])
    whole: dict[int, Tensor | None] = {}

    def keep(places: list[int], tensor: Tensor | None) -> None:
        whole.update(dict.fromkeys(places, tensor))

    gather_each("full_state", grids, given, target, max_bytes, keep)
    if not target.takes(grids.main):
        return {}
    found: Iterator[Any] = iter([whole[place] for place in range(len(given))])
    state: dict[str, Any] = {"model": {name: next(found) for name in tensors} | extra}
    if optimizer is not None:
        values = map_state(lambda *_: next(found), named["state"])
        state["optimizer"] = {**named, "state": values}
        if optim_keys == "id":
            state["optimizer"] = rekey(state["optimizer"], "id", model=model, optimizer=optimizer)
    return state


def gather_each(
    what: str,
    grids: Grids,
    given: Sequence[tuple[str, Tensor]],
    target: Target,
    max_bytes: int,
    visit: Callable[[list[int], Tensor | None], None],
) -> None:
    """Gather tensors under names, each once, and call ``visit`` with its places among those given.

    It gets None instead of a tensor where the target does not say that it is received.
    """
    slots: dict[int, list[int]] = {}
    for place, (_, value) in enumerate(given):
        slots.setdefault(id(value), []).append(place)
    helds = [grids.hold(*given[places[0]]) for places in slots.values()]
    grids.require_common(helds, what)
    each = [*slots.values()]
    with closing(gather(helds, max_bytes, target, grids.main, what)) as gathered:
        for index, tensor in gathered:
            visit(each[index], tensor)


@operation("sharded_state")
def sharded_state(
    model: nn.Module, optimizer: Optimizer | None = None, *, optim_keys: Keys = "name"
) -> dict[str, Any]:
    """Return the state as it lies on the ranks: DTensors that share memory with the model.

    The dict has ``"model"``, and ``"optimizer"`` if one was given. Nothing is sent, but the states
    of an optimizer of owners (``fsdp2.optim.whole``).

    Args:
        optimizer: one over the model's parameters.
        optim_keys: as for ``full_state``.

    Raises:
        ConfigError: not a module; the optimizer holds other parameters; another ``optim_keys``.
        StateError: inside a forward or a backward.
    """
    check("sharded_state", model, optimizer)
    check_keys("sharded_state: optim_keys", optim_keys)
    require_idle(model, "sharded_state")
    state: dict[str, Any] = {"model": cleaned(model.state_dict())}
    if optimizer is not None:
        settle_state(optimizer)
        state["optimizer"] = named_state(model, optimizer)
        if optim_keys == "id":
            state["optimizer"] = rekey(state["optimizer"], "id", model=model, optimizer=optimizer)
    return state


@operation("local_state")
def local_state(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """Return this rank's own parts as plain tensors, and under ``"layout"`` where they lie.

    The dict has ``"model"``, ``"layout"``, and ``"optimizer"`` if one was given. Tensors share
    memory with the model: save them before the next step. ``torch.save`` of the dict is the fastest
    checkpoint there is. It loads on the same ranks of the same meshes only.

    Raises:
        ConfigError: not a module; the optimizer holds other parameters.
        StateError: inside a forward or a backward.
    """
    check("local_state", model, optimizer)
    require_idle(model, "local_state")
    state: dict[str, Any] = {"model": cleaned(model.state_dict())}
    layout: dict[str, Any] = {}

    def cut(name: str, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        region = grids.hold(name, value).own
        layout[name] = (tuple(value.shape), region.starts, region.sizes)
        return torch_dtensor.local_tensor(value).detach()

    grids = Grids(list(state["model"].values()))
    result: dict[str, Any] = {
        "model": {name: cut(name, value) for name, value in state["model"].items()}
    }
    if optimizer is not None:
        settle_state(optimizer)
        named = named_state(model, optimizer, is_local=True)
        values = map_state(lambda name, key, t: cut(f"{name}.{key}", t), named["state"])
        result["optimizer"] = {**named, "state": values}
    return {**result, "layout": layout}

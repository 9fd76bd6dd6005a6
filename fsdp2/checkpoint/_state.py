"""Model and optimizer state in three forms: full, sharded, rank-local.

Owns what belongs to a state, and its ties. It must not know files, nor how a state is loaded
(``_load``, ``_change``). ``_transfer.redistribute`` moves the tensors.

A state is ``{"model": {name: tensor}, "optimizer": {"state": {...}, "param_groups": [...]}}``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2._base import torch_dtensor
from fsdp2._base.names import cleaned
from fsdp2._engine.between_steps import require_idle
from fsdp2._transfer.redistribute import Grids, Target, gather
from fsdp2.checkpoint._optimizer_state import map_values, named_state, rekey

EXTRA_STATE = "_extra_state"


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return parameters and persistent buffers by name, ties being one object; and extra state."""
    found = cleaned(model.state_dict(keep_vars=True))
    tensors = {
        name: value
        for name, value in found.items()
        if isinstance(value, Tensor) and not is_extra(name)
    }
    return tensors, {name: value for name, value in found.items() if name not in tensors}


def is_extra(name: str) -> bool:
    """True for what ``get_extra_state`` of a module returned, a tensor perhaps."""
    return name.rpartition(".")[2] == EXTRA_STATE


def sharded(model: nn.Module, optimizer: Optimizer | None, keys: Any) -> dict[str, Any]:
    """Return the state as it lies; tensors are shared with the model and the optimizer."""
    require_idle(model, "sharded_state")
    state: dict[str, Any] = {"model": cleaned(model.state_dict())}
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
        return torch_dtensor.local_tensor(value).detach()

    grids = Grids(list(state["model"].values()))
    result: dict[str, Any] = {
        "model": {name: cut(name, value) for name, value in state["model"].items()}
    }
    if optimizer is not None:
        named = state["optimizer"]
        values = {name: map_values(cut, name, fields) for name, fields in named["state"].items()}
        result["optimizer"] = {**named, "state": values}
    return {**result, "layout": layout}

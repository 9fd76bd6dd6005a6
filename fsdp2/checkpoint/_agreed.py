"""What ranks agree on before they save: who has what, and one number for all.

Owns the way from a model and its optimizer to contents that all ranks divide alike. It must not
know where they are written to.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from fsdp2._core.comm.process_mesh import Grid
from fsdp2._core.transfer.redistribute import Grids
from fsdp2.checkpoint._contents import Content, Contents
from fsdp2.checkpoint._extra import EXTRA, EXTRA_TENSORS, packed
from fsdp2.checkpoint._optimizer_state import named_state, settle_state
from fsdp2.checkpoint._state import sharded_state
from fsdp2.checkpoint._wrapped import opened


@dataclass(frozen=True)
class Agreed:
    """Contents that all ranks know how to divide, and a number that all have alike."""

    main: Grid
    contents: Contents
    number: int


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return the model's part of what is saved."""
    state = sharded_state(model)
    tensors = {name: value for name, value in state["model"].items() if value is not None}
    return {"model": opened(model, tensors)}


def main_of(state: dict[str, Any]) -> Grid:
    return Grids([*state["model"].values()]).main


def agree(
    what: str,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Any,
    state: dict[str, Any],
    number: int,
    require: Callable[[], None],
) -> Agreed:
    """Return what is to be saved, divided among the ranks. Collective.

    ``number``: the first rank's counts, of at most 63 bits. What ``require`` raises on a rank, all
    raise.
    """
    grids = Grids([*state["model"].values()])
    main = grids.main
    settle_state(optimizer)
    with main.together(what) as same:
        if optimizer is not None:  # a rank may have states that the others have not
            state["optimizer"] = named = named_state(model, optimizer)
            named["state"] = _without_tuples(named["state"])
        beside = packed(extra, main.is_first) if extra is not None else {}
        own_beside = beside.pop(EXTRA, None)  # the first rank's
        same["DTensors in extra"] = [*beside.get(EXTRA_TENSORS, ())]
        contents = Contents.of(state | beside, grids)
        digests = contents.digests()
        require()
    total = zlib.crc32(repr(digests).encode())
    number, most, least = main.highest(number if main.is_first else 0, total, -total)
    contents = contents.agreed(main, digests, is_equal=most == -least)
    if own_beside is not None:
        contents.rest.append(Content((EXTRA,), own_beside))
    return Agreed(main, contents, number)


def _without_tuples(value: Any) -> Any:
    """Return lists for tuples of tensors, which DCP does not look into."""
    if isinstance(value, dict):
        return {key: _without_tuples(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        return list(value)
    return value

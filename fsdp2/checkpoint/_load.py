"""Loading states: whole ones, which the first rank may have alone, and those of each rank's parts.

Owns the way of values from a state to the ranks that hold them. What is compared, and when a model
changes, is in ``_change`` ([Note: all or nothing]). It must not know files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2._core.base import torch_dtensor
from fsdp2._core.base.errors import ConfigError
from fsdp2._core.base.fitting import numbers_of, require_representable
from fsdp2._core.base.names import clean, cleaned, named_parameters
from fsdp2._core.comm.process_mesh import operation
from fsdp2._core.engine.between_steps import original_buffers, require_idle
from fsdp2._core.transfer.redistribute import Grids, LocalShard, checked_together, scatter
from fsdp2.checkpoint._change import (
    IncompatibleKeys,
    StateManifest,
    change,
    check_optimizer,
    chosen,
    compare,
    copy_all,
    local_of,
    optimizer_part,
    refuse_aliases,
    room_for,
    state_like,
    tell,
    with_memory,
)
from fsdp2.checkpoint._optimizer_state import map_state, settle_state
from fsdp2.checkpoint._state import (
    MAX_BYTES,
    check,
    is_extra,
    made_anew,
    model_tensors,
    require_kept,
)

PLAIN_DICTS = (dict, OrderedDict)
"""A state of any other mapping may be read from files as it is asked."""

# Whole states.


@operation("load_full_state")
def load_full_state(
    model: nn.Module,
    state: Mapping[str, Any] | None,
    optimizer: Optimizer | None = None,
    *,
    from_rank0: bool = True,
    strict: bool = True,
    max_bytes: int = MAX_BYTES,
) -> IncompatibleKeys:
    """Load a whole state: what ``full_state``, a plain model or torch's FSDP1 returned.

    The first rank scatters each tensor to the ranks that hold parts of it, so that no other rank
    has more than ``max_bytes`` beside its shards. Parameters on the meta device get memory first.
    The optimizer's state may be under names or ids; values of a parameter's shape become
    DTensors placed as the parameter is. Values are cast to the dtypes of the model.

    Args:
        state: needed on the first rank of the mesh only; the others may pass None. If its
            ``"model"`` is no plain dict, values may be read from files as it is asked, and get room
            beside the model's first, which ``max_bytes`` does not count.
        from_rank0: False takes each rank's own ``state``, and nothing is sent.
        strict: every name must be in both; a tied parameter needs one of its names.

    Returns:
        Names of the model that the state lacks, and the other way round (empty if ``strict``).

    Raises:
        ConfigError: names, shapes or the kind of the optimizer differ; no state for the optimizer;
            a value that an integer dtype cannot hold. Nothing was changed.
        StateError: inside a forward or a backward; reading a value failed. Nothing was changed.
    """
    what = "load_full_state"
    with checked_together(what, model) as same:
        check(what, model, optimizer, max_bytes=max_bytes, from_rank0=from_rank0, strict=strict)
        same.update(has_optimizer=optimizer is not None, strict=strict)
        same.update(from_rank0=from_rank0, max_bytes=max_bytes)
    given = _Given(model, state, optimizer)
    return load_full(
        what, model, optimizer, given, from_rank0=from_rank0, strict=strict, max_bytes=max_bytes
    )


class Source:
    """Values that are loaded, of all ranks or of the first one, and what is told of them before.

    ``is_in_memory``: reading them cannot fail, so that the model's need no room.
    """

    is_in_memory = False

    def describe(self) -> StateManifest:
        """Tell what there is: of what has to be read for that, names only."""
        raise NotImplementedError

    def with_optimizer(
        self, told: StateManifest, model: nn.Module, optimizer: Optimizer
    ) -> StateManifest:
        """Tell of the optimizer too, once the names fit."""
        return told

    def with_objects(self, told: StateManifest, extra: Mapping[str, Any]) -> StateManifest:
        """Read what is no tensor, once all fits; ``extra`` has the model's extra states."""
        return told

    def read(self, name: str, in_optimizer: bool) -> Tensor:
        """Return a whole value."""
        raise NotImplementedError

    def fill(self, what: str, held: LocalShard, in_optimizer: bool) -> None:
        """Fill this rank's part of a tensor."""
        value = self.read(held.name, in_optimizer)
        require_representable(what, held.name, value, held.dtype)
        held.local.copy_(value[held.own.slices])


class _Given(Source):
    """A whole state that a caller passed; on ranks that have none, it is not asked."""

    def __init__(self, model: nn.Module, state: Any, optimizer: Optimizer | None) -> None:
        self._model = model
        self._state = state
        self._optimizer = optimizer
        self._names: dict[str, str] = {}
        self._values: dict[str, Tensor] = {}
        self.is_in_memory = (
            not isinstance(state, Mapping) or type(state.get("model")) in PLAIN_DICTS
        )

    def describe(self) -> StateManifest:
        told = tell("load_full_state", self._state)
        self._names = {clean(name): name for name in self._state["model"]}
        if self._optimizer is None:
            return told
        named = optimizer_part("load_full_state", self._state, self._model, self._optimizer)
        for name, fields in named["state"].items():
            refuse_aliases(name, fields)
        return replace(told, optimizer={**named, "state": map_state(self._note, named["state"])})

    def _note(self, name: str, key: str, value: Tensor) -> Tensor:
        self._values[f"{name}.{key}"] = value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    def read(self, name: str, in_optimizer: bool) -> Tensor:
        found: Tensor = (
            self._values[name] if in_optimizer else self._state["model"][self._names[name]]
        )
        return found


def load_full(
    what: str,
    model: nn.Module,
    optimizer: Optimizer | None,
    source: Source,
    *,
    from_rank0: bool,
    strict: bool,
    max_bytes: int = MAX_BYTES,
) -> IncompatibleKeys:
    """Load what the first rank has, or every rank. See [Note: all or nothing]."""
    settle_state(optimizer)
    with original_buffers(require_idle(model, what)):
        tensors, extra = model_tensors(model)
        grids = Grids([*tensors.values()])
        has_state = grids.main.is_first or not from_rank0
        with grids.main.together(what):
            told = source.describe() if has_state else None
        if from_rank0:
            told = grids.main.broadcast(told)
        assert told is not None
        own = chosen(told.model, tensors)
        is_in_memory = not grids.main.any_is(not source.is_in_memory)
        with grids.main.together(what):
            keys = compare(what, told, tensors, extra, strict)
            if optimizer is not None:
                told = source.with_optimizer(told, model, optimizer)
                assert told.optimizer is not None
                check_optimizer(what, model, optimizer, told.optimizer, strict)
            told = source.with_objects(told, extra)
            loose = made_anew(model, own)
            for name, tensor in own.items() if has_state and is_in_memory else ():
                value = source.read(name, False)
                require_representable(what, name, value, tensor.dtype)
                if name in loose:
                    require_kept(what, name, value, loose[name])

        def fill(helds: list[LocalShard], in_optimizer: bool) -> None:
            if from_rank0:
                _scatter(what, grids, helds, max_bytes, source, in_optimizer)
                return
            with grids.main.together(what), torch.no_grad():
                for held in helds:
                    source.fill(what, held, in_optimizer)

        def write() -> None:
            if is_in_memory:
                fill(helds, False)
                return
            tensors = with_memory(what, model, grids)
            copy_all((local_of(tensors[held.name]), held.local) for held in helds)

        if is_in_memory:
            own = chosen(told.model, with_memory(what, model, grids))
        else:
            with grids.main.together(what):
                own = {name: room_for(tensor) for name, tensor in own.items()}
        helds = [grids.hold(name, tensor) for name, tensor in own.items()]
        if from_rank0:
            grids.require_common(helds, what)
        named = None
        if optimizer is not None and told.optimizer is not None:
            named, in_optimizer = _optimizer_rooms(what, model, optimizer, told.optimizer, grids)
            fill(in_optimizer, True)
        if not is_in_memory:
            fill(helds, False)
            with grids.main.together(what):
                for name in loose:
                    require_kept(what, name, own[name], loose[name])
        extras = {n: value for n, value in told.extra.items() if n in extra and is_extra(n)}
        change(what, model, optimizer, named, extras, grids, write)
        return keys


def _scatter(
    what: str,
    grids: Grids,
    helds: list[LocalShard],
    max_bytes: int,
    source: Source,
    in_optimizer: bool,
) -> None:
    """Fill shards; what reading a tensor raises is raised on all ranks, once nothing travels."""
    error: Exception | None = None

    def read(held: LocalShard) -> Tensor:
        nonlocal error
        try:
            value = source.read(held.name, in_optimizer)
            require_representable(what, held.name, value, held.dtype)
            return value
        except Exception as caught:
            error = error or caught
            zero = torch.zeros((), dtype=held.dtype, device=held.local.device)
            return zero.expand(held.shape)

    scatter(helds, max_bytes, read)
    grids.main.raise_together(error, what)


def _optimizer_rooms(
    what: str, model: nn.Module, optimizer: Optimizer, told: dict[str, Any], grids: Grids
) -> tuple[dict[str, Any], list[LocalShard]]:
    """Return the optimizer's state under names with placed and empty tensors for those on meta."""
    params = named_parameters(model)
    now, numbers = optimizer.state, numbers_of(optimizer)
    in_blocks = getattr(optimizer, "_block_state_room", None)  # of optim.local
    helds: list[LocalShard] = []

    def make_room(name: str, key: str, value: Tensor) -> Tensor:
        if not value.is_meta:
            return value
        current = now.get(params[name], {}).get(key)
        made = in_blocks(params[name], key, tuple(value.shape)) if in_blocks is not None else None
        if made is None:
            made = state_like(params[name], current, value, key in numbers)
        helds.append(grids.hold(f"{name}.{key}", made))
        return made

    ours = {name: fields for name, fields in told["state"].items() if name in params}
    with grids.main.together(what):
        state = map_state(make_room, ours)
    return {"state": state, "param_groups": told["param_groups"]}, helds


# States of each rank's parts.


@operation("load_sharded_state")
def load_sharded_state(
    model: nn.Module,
    state: Mapping[str, Any],
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
) -> IncompatibleKeys:
    """Load what ``sharded_state`` returned for a model on the same meshes.

    Parameters on the meta device get memory.

    Raises:
        ConfigError: as ``load_full_state``, or another placement; nothing was changed.
        StateError: inside a forward or a backward.
    """
    with checked_together("load_sharded_state", model) as same:
        check("load_sharded_state", model, optimizer, strict=strict)
        same.update(has_optimizer=optimizer is not None, strict=strict)
    return _load_parts("load_sharded_state", model, state, optimizer, strict, is_local=False)


@operation("load_local_state")
def load_local_state(
    model: nn.Module, state: Mapping[str, Any], optimizer: Optimizer | None = None
) -> None:
    """Load what ``local_state`` returned on this rank.

    Raises:
        ConfigError: as ``load_full_state``, or some rank's parts lie elsewhere now; nothing was
            changed.
    """
    with checked_together("load_local_state", model) as same:
        check("load_local_state", model, optimizer)
        same.update(has_optimizer=optimizer is not None)
    _load_parts("load_local_state", model, state, optimizer, True, is_local=True)


def _load_parts(
    what: str,
    model: nn.Module,
    state: Any,
    optimizer: Optimizer | None,
    strict: bool,
    *,
    is_local: bool,
) -> IncompatibleKeys:
    """Load a state of each rank's own parts. See [Note: all or nothing].

    ``is_local``: they are plain tensors, which lie where the state's layout says.
    """
    settle_state(optimizer)
    with original_buffers(require_idle(model, what)):
        tensors, extra = model_tensors(model)
        grids = Grids([*tensors.values()])
        values: dict[str, Tensor] = {}
        named: dict[str, Any] | None = None
        with grids.main.together(what):
            told = tell(what, state)
            given = cleaned(state["model"])
            layout = cleaned(state.get("layout", {})) if is_local else {}
            shapes = dict.fromkeys(told.model) if is_local else told.model
            keys = compare(what, StateManifest(shapes, told.extra), tensors, extra, strict)
            for name, own in chosen(told.model, tensors).items():
                value = given[name]
                if is_local:
                    _require_same_place(what, name, grids.hold(name, own), layout, value)
                else:
                    _require_placed_alike(what, name, value, own)
                    value = local_of(value)
                require_representable(what, name, value, own.dtype)
                values[name] = value
            for name, current in made_anew(model, chosen(told.model, tensors)).items():
                require_kept(what, name, values[name], current)
            if optimizer is not None:
                named = optimizer_part(what, state, model, optimizer)
                if is_local:
                    named["state"] = _wrapped(what, model, optimizer, named["state"], layout, grids)
                check_optimizer(what, model, optimizer, named, strict)
            extras = {n: given[n] for n in told.extra if n in extra and is_extra(n)}

        def write() -> None:
            tensors = with_memory(what, model, grids)
            copy_all((local_of(tensors[name]), value) for name, value in values.items())

        change(what, model, optimizer, named, extras, grids, write)
        return keys


def _require_same_place(
    what: str, name: str, held: LocalShard, layout: Mapping[str, Any], value: Tensor
) -> None:
    """Raise ConfigError if a rank's part was another one, or another shape than its layout says."""
    here = (held.shape, held.own.starts, held.own.sizes)
    whole = (held.shape, (0,) * len(held.shape), held.shape)
    then = layout.get(name, whole)
    if tuple(map(tuple, then)) != here:
        raise ConfigError(
            "FS621",
            f"{what}: {name} is {here} here and {layout.get(name)} in the state (whole shape, "
            "start, size). A rank-local state loads on the same ranks and meshes only; use the "
            "sharded one elsewhere. Nothing was changed.",
        )
    if tuple(value.shape) != held.own.sizes:
        raise ConfigError(
            "FS621",
            f"{what}: {name} is {held.own.sizes} on this rank and {tuple(value.shape)} in the "
            "state. Load what local_state returned on this rank. Nothing was changed.",
        )


def _wrapped(
    what: str,
    model: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    layout: Mapping[str, Any],
    grids: Grids,
) -> dict[str, Any]:
    """Return what an optimizer's state has under names, with DTensors of this rank's parts."""
    params = named_parameters(model)
    state_room = getattr(optimizer, "state_room", None)

    def wrap(name: str, key: str, value: Tensor) -> Tensor:
        full = f"{name}.{key}"
        if full not in layout:
            return value.clone()
        like: Tensor | None = params.get(name)
        shape = tuple(layout[full][0])
        if state_room is not None and like is not None and tuple(like.shape) != shape:
            like = state_room(like, shape, value.dtype)
        if not isinstance(like, DTensor) or tuple(like.shape) != tuple(layout[full][0]):
            raise ConfigError(
                "FS621",
                f"{what}: {full} was a DTensor of shape {tuple(layout[full][0])}, and its "
                "parameter is not. Use the sharded state. Nothing was changed.",
            )
        _require_same_place(what, full, grids.hold(name, like), layout, value)
        return torch_dtensor.placed_like(like, value.clone())

    return map_state(wrap, state)


def _require_placed_alike(what: str, name: str, value: Tensor, own: Tensor) -> None:
    here, there = (getattr(t, "placements", "no DTensor") for t in (own, value))
    if here != there or local_of(value).shape != local_of(own).shape:
        raise ConfigError(
            "FS622",
            f"{what}: {name} is {there} in the state, {tuple(local_of(value).shape)} on this rank, "
            f"and {here}, {tuple(local_of(own).shape)}, in the model. Use save and load, or the "
            "full state.",
        )

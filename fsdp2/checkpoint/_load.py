"""Load states of any form into a model and an optimizer: all or nothing.

Values are full tensors (on all ranks, or only on the first) or each rank's shards. Reads no files.

[Note: all or nothing]
1. *Compare.* Ranks that have a state describe its names, shapes and dtypes. Every rank compares the
   description with its own model and optimizer. Values in memory are validated too.
2. *Read.* The optimizer's values, and all values from files, are read into separate buffers, which
   are as large as the rank's shards and do not count towards ``max_bytes``.
3. *Agree.* All ranks raise unless every rank has all of its values. User code
   (``load_state_dict``, ``set_extra_state``) runs only after this check. If it raises, its changes
   are undone.
4. *Write.* Values are copied into the model, from the separate buffers or from a state in memory.
A load that raises in steps 1 to 3 therefore leaves all state unchanged; step 4 only copies values.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2._core.base import torch_dtensor
from fsdp2._core.base.errors import ConfigError
from fsdp2._core.base.fitting import check_options, check_state, numbers_of, require_representable
from fsdp2._core.base.names import clean, cleaned, named_modules, named_parameters
from fsdp2._core.comm.process_mesh import operation
from fsdp2._core.engine.between_steps import original_buffers, require_idle
from fsdp2._core.transfer.materialize import allocate
from fsdp2._core.transfer.redistribute import Grids, LocalShard, scatter
from fsdp2.checkpoint._state import (
    MAX_BYTES,
    checked,
    is_extra,
    load_named,
    made_anew,
    map_state,
    matched_groups,
    model_tensors,
    names_in_groups,
    rekey,
    require_kept,
    settle_state,
)


class IncompatibleKeys(NamedTuple):
    """Names that a load with ``strict=False`` skipped. With ``strict=True`` both lists are empty.

    ``missing_keys`` are the names in the model that the state lacks. ``unexpected_keys`` are the
    names in the state that the model lacks.

    Source: the result of ``nn.Module.load_state_dict``.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True)
class StateManifest:
    model: dict[str, tuple[int, ...] | None]
    extra: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None


# 1. Compare.


def tell(what: str, state: Any) -> StateManifest:
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
    named = state.get("optimizer")
    if not isinstance(named, Mapping) or "param_groups" not in named or "state" not in named:
        raise ConfigError(
            "FS602",
            f"{what}: an optimizer was passed, but the state has no 'optimizer'. Omit the "
            "optimizer, or load a state that includes one.",
        )
    return rekey(dict(named), "name", model=model, optimizer=optimizer)


def refuse_aliases(name: str, fields: Mapping[str, Any]) -> None:
    """Raise if two values of a parameter's state share memory. With torch 2.11 and 2.13 on a CPU,
    ``FSDP.optim_state_dict`` with ``use_orig_params=True`` and ``offload_to_cpu=True`` returns
    views of one reused buffer, so all values equal the last value."""
    seen: dict[tuple[int, tuple[int, ...]], str] = {}
    for key, value in fields.items():
        if isinstance(value, Tensor) and not isinstance(value, DTensor) and value.numel() > 1:
            place = value.data_ptr(), tuple(value.shape)
            if place in seen:
                raise ConfigError(
                    "FS606",
                    f"load_full_state: {seen[place]} and {key} of {name} in the optimizer's state "
                    "share memory, so one of them has the other's values. If torch's FSDP1 created "
                    "the state, recreate it with FullOptimStateDictConfig(offload_to_cpu=False) or "
                    "StateDictType.SHARDED_STATE_DICT. If the sharing is intended, clone one of "
                    "the two tensors.",
                )
            seen[place] = key


def compare(
    what: str,
    told: StateManifest,
    tensors: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    strict: bool,
) -> IncompatibleKeys:
    """Compare shapes and, if ``strict``, names. Tied names need one match, empty tensors none."""
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
        problems.append("different shapes for " + "; ".join(wrong[:5]))
    if strict and missing:
        problems.append(f"{len(missing)} missing names: {', '.join(missing[:5])}")
    if strict and unexpected:
        problems.append(
            f"{len(unexpected)} names that the model lacks: {', '.join(unexpected[:5])}"
        )
    if problems:
        hint = " To load only what fits, pass strict=False and no optimizer." if not wrong else ""
        raise ConfigError(
            "FS603",
            f"{what}: the state does not fit the model. Found {' and '.join(problems)}.{hint} "
            "Nothing was changed.",
        )
    return IncompatibleKeys(missing, unexpected)


def check_optimizer(
    what: str,
    model: nn.Module,
    optimizer: Optimizer,
    named: Mapping[str, Any],
    strict: bool,
) -> None:
    """Compare an optimizer with a state keyed by name. The state may contain meta tensors."""
    own = names_in_groups(model, optimizer)
    for names, group in zip(own, optimizer.param_groups, strict=True):
        on_meta = [n for n, p in zip(names, group["params"], strict=True) if p.is_meta]
        if on_meta:
            raise ConfigError(
                "FS605",
                f"{what}: {on_meta[0]} is on the meta device. Allocating it creates a new "
                "parameter, which the optimizer does not have. Load the model first (or call "
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
    """Return the tensors with these names, keyed by name (tied tensors only by the first name)."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name in names:
        if name in tensors:
            found.setdefault(id(tensors[name]), (name, tensors[name]))
    return dict(found.values())


# 2. Read.


def state_like(
    param: Tensor,
    current: object,
    told: Tensor,
    is_number: bool,
) -> Tensor:
    """Return an empty tensor with the shape and dtype of ``told``, a value of an optimizer state.

    The result is placed like ``current`` or else like ``param``, if that has the same shape.
    Otherwise, the result is a plain tensor, on the CPU if 0-dim. A number (``is_number``) is never
    placed like ``param``: a 0-dim parameter and its step count have the same shape.
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
    """Return an empty tensor with the placements of ``tensor``, but never on the meta device."""
    local = local_of(tensor)
    real = tensor.device_mesh.device_type if isinstance(tensor, DTensor) else "cpu"
    made = torch.empty_like(local, device=real if local.is_meta else local.device)
    return torch_dtensor.placed_like(tensor, made)


def with_memory(what: str, model: nn.Module, grids: Grids) -> dict[str, Tensor]:
    """Allocate a model's meta tensors, on every rank or on none. Return all of its tensors."""
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
    """Steps 3 and 4: load everything except the model's tensors, which ``write`` copies last."""
    undo: list[Callable[[], None]] = []
    try:
        with grids.main.together(what):
            if optimizer is not None and named is not None:
                kept = {"state": optimizer.state, "param_groups": optimizer.param_groups}
                undo.append(partial(optimizer.__setstate__, kept))
                load_named(model, optimizer, dict(named))
            _set_extra(model, extra, undo)
    except BaseException:
        for back in reversed(undo):
            with contextlib.suppress(Exception):  # user code may raise; continue undoing
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


PLAIN_DICTS = (dict, OrderedDict)  # other mappings may read values from files on access


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
    """Load a full state, created by ``full_state``, a plain model, or torch's FSDP1.

    The first rank scatters each tensor to the ranks that have parts of it, so all other ranks need
    at most ``max_bytes`` in addition to their shards. Parameters on the meta device are allocated
    first. The optimizer's state may be keyed by name or id; values with a parameter's shape become
    DTensors with the parameter's placements. Values are cast to the model's dtypes.

    Args:
        state: required only on the first rank of the mesh; other ranks may pass None. If
            ``state["model"]`` is not a plain dict, accessing a value may read a file. In that case,
            values are first read into separate buffers, which do not count towards ``max_bytes``.
        from_rank0: if False, each rank loads its own ``state``, and no values are sent.
        strict: require equal names in model and state. One name of a tied parameter suffices.

    Returns:
        Names that the state lacks, and names that the model lacks (both empty if ``strict``).

    Raises:
        ConfigError: names, shapes or the optimizer's class differ; the optimizer's state is
            missing; or an integer dtype cannot represent a value. Nothing was changed.
        StateError: called in a forward or backward; or reading a value failed. Nothing was changed.
    """
    what = "load_full_state"
    flags = {"from_rank0": from_rank0, "strict": strict}
    with checked(what, model, optimizer, max_bytes=max_bytes, **flags):
        given = _Given(model, state, optimizer)
    return load_full(
        what, model, optimizer, given, from_rank0=from_rank0, strict=strict, max_bytes=max_bytes
    )


class Source:
    """A source of values to load, with their description."""

    is_in_memory = False  # True if reading the values cannot fail

    def describe(self) -> StateManifest:
        """Describe the state without reading values; non-tensors are described by name only."""
        raise NotImplementedError

    def with_optimizer(
        self, told: StateManifest, model: nn.Module, optimizer: Optimizer
    ) -> StateManifest:
        """Add the optimizer's description. Called only if the model's names match."""
        return told

    def with_objects(self, told: StateManifest, extra: Mapping[str, Any]) -> StateManifest:
        """Add non-tensor values; called only if everything matches. ``extra``: the model's own."""
        return told

    def read(self, name: str, in_optimizer: bool) -> Tensor:
        raise NotImplementedError

    def fill(self, what: str, held: LocalShard, in_optimizer: bool) -> None:
        value = self.read(held.name, in_optimizer)
        require_representable(what, held.name, value, held.dtype)
        held.local.copy_(value[held.own.slices])


class _Given(Source):
    def __init__(
        self,
        model: nn.Module,
        state: Any,
        optimizer: Optimizer | None,
    ) -> None:
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
        if in_optimizer:
            return self._values[name]
        found: Tensor = self._state["model"][self._names[name]]
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
    """Load the first rank's state, or each rank's own state. See [Note: all or nothing]."""
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
    """Fill shards from the first rank. If its reads fail, all ranks raise after the scatter."""
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
    what: str,
    model: nn.Module,
    optimizer: Optimizer,
    told: dict[str, Any],
    grids: Grids,
) -> tuple[dict[str, Any], list[LocalShard]]:
    params = named_parameters(model)
    now, numbers = optimizer.state, numbers_of(optimizer)
    in_blocks = getattr(optimizer, "_block_state_room", None)  # defined by ``optim.local``
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


@operation("load_sharded_state")
def load_sharded_state(
    model: nn.Module,
    state: Mapping[str, Any],
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
) -> IncompatibleKeys:
    """Load a state that ``sharded_state`` returned for a model on the same meshes.

    Parameters on the meta device are allocated.

    Raises:
        ConfigError: as for ``load_full_state``, or placements differ. Nothing was changed.
        StateError: called in a forward or backward.
    """
    return _load_parts("load_sharded_state", model, state, optimizer, strict, is_local=False)


@operation("load_local_state")
def load_local_state(
    model: nn.Module, state: Mapping[str, Any], optimizer: Optimizer | None = None
) -> None:
    """Load a state that ``local_state`` returned on this rank.

    Raises:
        ConfigError: as for ``load_full_state``, or the position or size of a shard has changed.
            Nothing was changed.
    """
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
    """Load each rank's shards, which are DTensors, or plain tensors if ``is_local``."""
    with checked(what, model, optimizer, strict=strict):
        pass
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
            told = replace(told, model=dict.fromkeys(told.model)) if is_local else told
            keys = compare(what, told, tensors, extra, strict)
            mine = chosen(told.model, tensors)
            for name, own in mine.items():
                value = given[name]
                if is_local:
                    _require_same_place(what, name, grids.hold(name, own), layout, value)
                else:
                    _require_placed_alike(what, name, value, own)
                    value = local_of(value)
                require_representable(what, name, value, own.dtype)
                values[name] = value
            for name, current in made_anew(model, mine).items():
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
    what: str,
    name: str,
    held: LocalShard,
    layout: Mapping[str, Any],
    value: Tensor,
) -> None:
    """Raise ConfigError unless the state's shard has the same position and size as this rank's."""
    here = (held.shape, held.own.starts, held.own.sizes)
    whole = (held.shape, (0,) * len(held.shape), held.shape)
    then = layout.get(name, whole)
    if tuple(map(tuple, then)) != here:
        raise ConfigError(
            "FS621",
            f"{what}: {name} has full shape, start and size {here} on this rank, but "
            f"{layout.get(name)} in the state. A rank-local state loads only on the same ranks and "
            "meshes; use the sharded state otherwise. Nothing was changed.",
        )
    if tuple(value.shape) != held.own.sizes:
        raise ConfigError(
            "FS621",
            f"{what}: {name} has size {held.own.sizes} on this rank, but {tuple(value.shape)} in "
            "the state. Load this rank's result of local_state. Nothing was changed.",
        )


def _wrapped(
    what: str,
    model: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, Any],
    layout: Mapping[str, Any],
    grids: Grids,
) -> dict[str, Any]:
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
        if not isinstance(like, DTensor) or tuple(like.shape) != shape:
            raise ConfigError(
                "FS621",
                f"{what}: {full} was a DTensor of shape {shape}, but its parameter is not a "
                "DTensor of that shape. Use the sharded state. Nothing was changed.",
            )
        _require_same_place(what, full, grids.hold(name, like), layout, value)
        return torch_dtensor.placed_like(like, value.clone())

    return map_state(wrap, state)


def _require_placed_alike(what: str, name: str, value: Tensor, own: Tensor) -> None:
    here, there = (getattr(t, "placements", "none") for t in (own, value))
    if here != there or local_of(value).shape != local_of(own).shape:
        raise ConfigError(
            "FS622",
            f"{what}: {name} has placements {there} and local shape {tuple(local_of(value).shape)} "
            f"in the state, but {here} and {tuple(local_of(own).shape)} in the model. Use save and "
            "load, or the full state.",
        )

"""Model and optimizer state in three forms: full, sharded, rank-local.

``_load`` loads a state; ``_core.transfer.redistribute`` moves the tensors. For frozen parameters
that wrap other tensors, see [Note: parts of wrapped parameters] in ``_core.params.parts``.

An optimizer's state is keyed by name or id. A parameter's id is its index over all param groups, as
in ``torch.optim``. Its name is the name in ``named_parameters()`` without wrapper prefixes
(``_core.base.names``). A tied parameter is identified by its first name.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, Literal

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from fsdp2._core.base import torch_dealt, torch_dtensor
from fsdp2._core.base.containers import map_tensors
from fsdp2._core.base.errors import (
    ConfigError,
    ConfigTypeError,
    UnsupportedError,
    check_count,
    check_flag,
    check_mapping,
    check_module,
    check_optimizer,
    described,
)
from fsdp2._core.base.names import clean, cleaned, named_parameters
from fsdp2._core.base.rows import Deal, chunk_of, rows_of
from fsdp2._core.comm.process_mesh import operation
from fsdp2._core.engine.between_steps import require_idle
from fsdp2._core.params.layout import contiguous_stride
from fsdp2._core.params.param import FSDPParam, OwnerMark
from fsdp2._core.params.parts import Part, can_be_taken_apart, inside
from fsdp2._core.transfer.redistribute import Grids, Target, checked_together, gather

Keys = Literal["name", "id"]
MAX_BYTES = 256 << 20  # default limit on a rank's memory, beyond its shards, during transfers
OWN_CHOICE = ("cpu_offload", "trust", "verify")  # flags that may differ between ranks
EXTRA_STATE = "_extra_state"


@contextmanager
def checked(
    who: str,
    model: nn.Module,
    optimizer: object = None,
    *,
    max_bytes: object = MAX_BYTES,
    **flags: object,
) -> Iterator[dict[str, object]]:
    """Check a collective function's arguments, and yield the dict from ``checked_together``."""
    with checked_together(who, model) as same:
        check_module(who, "model", model)
        check_optimizer(who, optimizer)
        for name, flag in flags.items():
            check_flag(who, name, flag)
        check_count(who, "max_bytes", max_bytes)
        same.update(has_optimizer=optimizer is not None, max_bytes=max_bytes)
        same.update({name: flag for name, flag in flags.items() if name not in OWN_CHOICE})
        yield same


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a model's tensors and extra states, by name. For the tensors, see ``opened``."""
    found = cleaned(model.state_dict(keep_vars=True))
    tensors = {
        name: value
        for name, value in found.items()
        if isinstance(value, Tensor) and not is_extra(name)
    }
    extra = {name: value for name, value in found.items() if name not in tensors}
    return opened(model, tensors), extra


def made_anew(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that modules create for each state dict, in new memory at each call. They
    are neither parameters nor buffers, and writes to them are lost."""
    lists = model.named_parameters, model.named_buffers
    known = cleaned({n: t for each in lists for n, t in each(remove_duplicate=False)})
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
    """Raise ConfigError if a value differs from a tensor that a module creates for state dicts."""
    if not torch.equal(value.to(current.device, current.dtype), current):
        raise ConfigError(
            "FS603",
            f"{what}: {name} differs from the model's value, and cannot be loaded because its "
            "module creates it for each state dict. Load into a model that was built and quantized "
            "from the same weights. Nothing was changed.",
        )


def is_extra(name: str) -> bool:
    """Return True for the name of a module's extra state, whose value may be a tensor."""
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
    """Return the full state of a model and its optimizer, as in a single process.

    The tensors are plain copies; all names of a tied parameter share one copy. A rank that does not
    receive the state needs at most ``max_bytes`` of memory in addition to its shards. A rank that
    receives the state also needs memory for the tensors received so far.

    Args:
        optimizer: an optimizer over the model's parameters.
        rank0_only: only the first rank of the mesh gets the state; the others get an empty dict.
        cpu_offload: return the tensors in host memory.
        max_bytes: maximum size of the communication buffers; 256 MiB by default.
        optim_keys: ``"name"``: identify parameters by name, as torch's FSDP1 and DCP helpers do;
            ``"id"``: by index, as ``optimizer.state_dict()`` does in a single process.

    Raises:
        ConfigError: the optimizer has parameters that the model lacks; a wrong argument.
        StateError: inside a forward or a backward; a parameter is on the meta device.
        UnsupportedError: a parameter is on only some of the model's ranks, is a partial sum, or is
            a tensor subclass without storage of its own.
    """
    flags = {"rank0_only": rank0_only, "cpu_offload": cpu_offload}
    with checked("full_state", model, optimizer, max_bytes=max_bytes, **flags):
        check_keys("full_state: optim_keys", optim_keys)
        require_idle(model, "full_state")
        tensors, extra = model_tensors(model)  # a state-dict hook may raise
    device = torch.device("cpu") if cpu_offload else None
    target = Target(on_all=not rank0_only, device=device, counted=False)
    given = [*tensors.items()]
    named: dict[str, Any] = {}
    if optimizer is not None:
        settle_state(optimizer)
        with Grids([*tensors.values()]).main.together("full_state"):
            named = named_state(model, optimizer)  # ranks may have different states

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
    """Gather each tensor object once. Call ``visit`` with the object's indices in ``given``, and
    the full tensor (None on ranks that do not receive it)."""
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
    """Return the sharded state: DTensors that share memory with the model.

    The dict has ``"model"``, and ``"optimizer"`` if an optimizer was given. No communication is
    needed, except for the states of an ``fsdp2.optim.whole`` optimizer.

    Args:
        optimizer: an optimizer over the model's parameters.
        optim_keys: as for ``full_state``.

    Raises:
        ConfigError: the optimizer has parameters that the model lacks; a wrong argument.
        StateError: inside a forward or a backward.
    """
    check_module("sharded_state", "model", model)
    check_optimizer("sharded_state", optimizer)
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
    """Return this rank's shards as plain tensors, and their positions under ``"layout"``.

    The dict has ``"model"``, ``"layout"``, and ``"optimizer"`` if an optimizer was given. Tensors
    share memory with the model: save them before the next step. Saving the dict with ``torch.save``
    is the fastest kind of checkpoint, but the file loads only on the same ranks of the same meshes.

    Raises:
        ConfigError: the optimizer has parameters that the model lacks; a wrong argument.
        StateError: inside a forward or a backward.
    """
    check_module("local_state", "model", model)
    check_optimizer("local_state", optimizer)
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


def opened(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Replace frozen wrapper tensors with their inner tensors, named ``name.inner``. The inner
    tensors share memory with the model, so a load can write to them; a tied tensor remains one
    object. A wrapper that requires grad or is of an unknown class is returned unchanged."""
    found: dict[str, Tensor] = {}
    known: dict[int, dict[str, Tensor]] = {}
    params: dict[str, nn.Parameter] = {}
    for name, value in tensors.items():
        local = torch_dtensor.local_part(value) if isinstance(value, Tensor) else value
        if not isinstance(local, Tensor) or not can_be_taken_apart(local):
            found[name] = value
            continue
        params = params or named_parameters(model)
        param = params.get(name, value)
        if param.requires_grad:
            found[name] = value
            continue
        if id(param) not in known:
            known[id(param)] = _inside(name, value, local, OwnerMark.owner_of(param))
        parts = known[id(param)].items()
        found |= {f"{name}.{inner}" if inner else name: t for inner, t in parts}
    return found


def _inside(
    name: str,
    value: Tensor,
    local: Tensor,
    owner: FSDPParam | None,
) -> dict[str, Tensor]:
    """Return a value's inner tensors, or the value with the name "" if their layout is unknown."""
    tensors = inside(local)
    if not isinstance(value, DTensor):
        return tensors
    parts = None if owner is None else owner.wrapped.parts
    sizes = zip(value.device_mesh.shape, value.placements, strict=True)
    if all(size == 1 or placement.is_replicate() for size, placement in sizes):
        parts = tuple(Part(inner, None) for inner in tensors)
    if parts is None:
        return {"": value}
    return {part.name: _placed(name, value, tensors[part.name], part) for part in parts}


def _placed(name: str, value: DTensor, local: Tensor, part: Part) -> DTensor:
    mesh, shape = value.device_mesh, list(local.shape)
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for axis, placement in enumerate(value.placements):
        if placement.is_replicate() or part.dim is None or mesh.size(axis) == 1:
            continue
        shape[part.dim] = part.length
        placements[axis] = _along(name, value, part, mesh.size(axis), placement)
    whole = tuple(shape)
    spec = torch_dtensor.make_spec(mesh, placements, whole, contiguous_stride(whole), local.dtype)
    return torch_dtensor.new_dtensor(local.detach(), spec)


def _along(
    name: str,
    value: DTensor,
    part: Part,
    size: int,
    placement: Placement,
) -> Placement:
    assert part.dim is not None
    rows, deal = value.shape[0], torch_dealt.deal_in(placement)
    counts = [rows_of(rows, size, place, deal)[1] * part.length for place in range(size)]
    if not torch_dtensor.shards_dim(placement, 0) or any(count % rows for count in counts):
        raise UnsupportedError(
            "FS624",
            f"{name}: {placement} splits its {rows} rows over {size} ranks, but the {part.length} "
            f"rows of its inner tensor {part.name} cannot be split in proportion. Save {name} on "
            "fewer ranks, or omit it and load the base model again.",
        )
    counts = [count // rows for count in counts]
    if counts == [chunk_of(part.length, size, place)[1] for place in range(size)]:
        return Shard(part.dim)
    return torch_dealt.Dealt(part.dim, Deal(1, 0, tuple(itertools.accumulate(counts))))


# An optimizer's state, keyed by name or id.


def check_keys(what: str, keys: object) -> None:
    if not isinstance(keys, str) or keys not in ("name", "id"):
        text = f"{what}: expected 'name' or 'id', found {described(keys)}."
        if isinstance(keys, str):
            raise ConfigError("FS102", text)
        raise ConfigTypeError("FS101", text)


def check_optim_state(what: str, state: object) -> None:
    given = check_mapping(what, "the optimizer's state", state)
    groups, values = given.get("param_groups"), given.get("state")
    if not isinstance(groups, list | tuple) or not all(
        isinstance(group, Mapping) and "params" in group for group in groups
    ):
        raise ConfigError(
            "FS607",
            f"{what}: expected the optimizer's state to have 'param_groups', a list of dicts with "
            f"'params', found {described(groups)} under that key.",
        )
    if not isinstance(values, Mapping) or not all(isinstance(v, Mapping) for v in values.values()):
        raise ConfigError(
            "FS607",
            f"{what}: expected the optimizer's state to have 'state', a dict with a dict for each "
            f"parameter, found {described(values)} under that key.",
        )


def names_in_groups(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names in each param group. Raise ConfigError if the model lacks a parameter."""
    names = {id(param): name for name, param in named_parameters(model).items()}
    found: list[list[str]] = []
    for number, group in enumerate(optimizer.param_groups):
        found.append([])
        for place, param in enumerate(group["params"]):
            if id(param) not in names:
                raise ConfigError(
                    "FS610",
                    f"optimizer: parameter {place} of param group {number}, of shape "
                    f"{tuple(param.shape)}, is not a parameter of the model. Build the optimizer "
                    "after fully_shard and fsdp2.materialize, from model.parameters().",
                )
            found[-1].append(names[id(param)])
    return found


def ordered_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    return [name for names in names_in_groups(model, optimizer) for name in names]


def keys_of(state: dict[str, Any]) -> Keys:
    params = [key for group in state.get("param_groups", ()) for key in group["params"]]
    keys = params or list(state.get("state", {}))
    return "id" if keys and isinstance(keys[0], int) else "name"


def renamed(state: dict[str, Any], new: dict[Any, Any]) -> dict[str, Any]:
    """Return an optimizer's state with its keys mapped by ``new``. Other keys are unchanged."""
    return {
        **state,
        "state": {new.get(key, key): value for key, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [new.get(key, key) for key in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def with_clean_names(state: dict[str, Any]) -> dict[str, Any]:
    """Remove wrapper modules' prefixes, which old checkpoints contain, from a state's names."""
    listed = [name for group in state["param_groups"] for name in group["params"]]
    found = renamed(state, {name: clean(name) for name in dict.fromkeys(listed)})
    return {**found, "state": cleaned(state["state"])}


def rekey(
    optim_state: dict[str, Any],
    keys: Keys,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
) -> dict[str, Any]:
    """Return an optimizer's state keyed by name or by id. Shares the tensors; no communication.

    Args:
        optim_state: from ``optimizer.state_dict()``, this module, or torch's FSDP1 and DCP helpers.
        keys: ``"name"`` or ``"id"``.
        model: provides the names; required to convert ids to names. Without ``optimizer``, ids are
            indices into ``model.parameters()``.
        optimizer: an optimizer over the model's parameters, whose param groups define the ids.
            Without it, names get ids in the order of the state's param groups.

    Raises:
        ConfigError: invalid ``keys``; ``model`` is missing; an id or a name matches no parameter.
    """
    check_keys("rekey", keys)
    check_optim_state("rekey", optim_state)
    if model is not None:
        check_module("rekey", "model", model)
    check_optimizer("rekey", optimizer)
    if keys_of(optim_state) == "name":
        optim_state = with_clean_names(optim_state)
    if keys_of(optim_state) == keys:
        return renamed(optim_state, {})
    if model is None and (keys == "name" or optimizer is not None):
        way = "ids to names" if keys == "name" else "names to ids"
        raise ConfigError("FS611", f"rekey: converting {way} needs a model. Pass model=.")
    listed = [key for group in optim_state["param_groups"] for key in group["params"]]
    ordered = listed
    if model is not None and optimizer is not None:
        ordered = ordered_names(model, optimizer)
    elif model is not None and keys == "name":
        ordered = list(named_parameters(model))
    new: dict[Any, Any] = dict(enumerate(ordered))
    if keys == "id":
        new = {name: number for number, name in new.items()}
    unknown = [key for key in (*listed, *optim_state["state"]) if key not in new]
    if unknown:
        lacking = "its param groups do" if keys == "id" else "the model does"
        lacking = lacking if model is None or optimizer is None else "the optimizer does"
        raise ConfigError(
            "FS604",
            f"rekey: found {unknown[:5]} in the optimizer's state, which {lacking} not have. Pass "
            "the model and the optimizer that the state belongs to.",
        )
    return renamed(optim_state, new)


def map_state(
    function: Callable[[str, str, Tensor], Any], state: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Replace each tensor in an optimizer state with ``function(name, unique key, tensor)``."""

    def mapped(name: str, key: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return function(name, key, value)
        inside = itertools.count()
        return map_tensors(lambda item: function(name, f"{key}.{next(inside)}", item), value)

    return {
        name: {key: mapped(name, key, value) for key, value in fields.items()}
        for name, fields in state.items()
    }


def settle_state(optimizer: Optimizer | None) -> None:
    """Convert the states of an ``optim.whole`` optimizer to shards. Collective."""
    settle = getattr(optimizer, "gather_state", None)
    if settle is not None:
        settle()


def named_state(
    model: nn.Module, optimizer: Optimizer, *, is_local: bool = False
) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` keyed by name, with rank-local states if ``is_local``."""
    take = getattr(optimizer, "local_state_dict", None) if is_local else None
    state = (take or optimizer.state_dict)()
    return renamed(state, dict(enumerate(ordered_names(model, optimizer))))


def matched_groups(
    model: nn.Module, optimizer: Optimizer, state: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the optimizer's param groups with ids, and with the options saved in ``state``."""
    own = names_in_groups(model, optimizer)
    saved = {
        name: {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in state["param_groups"]
        for name in group["params"]
    }
    missing = [name for names in own for name in names if name not in saved]
    if missing:
        raise ConfigError(
            "FS608",
            f"optimizer: the state has no param group with {', '.join(missing[:5])}. Load the "
            "state of an optimizer with the same parameters, or omit the optimizer.",
        )
    groups = []
    number = 0
    for current, names in zip(optimizer.param_groups, own, strict=True):
        options = [saved[name] for name in names]
        if any(option != options[0] for option in options[1:]):
            raise ConfigError(
                "FS609",
                f"optimizer: the param group of {names[0]} was saved as several groups with "
                "different options. Build the optimizer with the same groups.",
            )
        kept = {key: value for key, value in current.items() if key != "params"}
        ids = list(range(number, number + len(names)))
        number += len(names)
        groups.append({**kept, **(options[0] if options else {}), "params": ids})
    return groups


def load_named(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state keyed by name, with param groups in any order. On ConfigError, load nothing."""
    groups = matched_groups(model, optimizer, state)
    values = state["state"]
    ordered = enumerate(ordered_names(model, optimizer))
    by_id = {number: values[name] for number, name in ordered if name in values}
    optimizer.load_state_dict({"state": by_id, "param_groups": groups})

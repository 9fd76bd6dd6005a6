"""An optimizer's state under names or under ids.

Owns the two ways to call a parameter in an optimizer's ``state_dict``, the way from one to the
other, and the matching of param groups. It must not know how tensors are sharded or sent.

Ids are what ``torch.optim`` makes: the place of a parameter in the param groups, one after another.
Names are those of ``model.named_parameters()`` without wrappers (see ``_core.base.names``); a tied
parameter has the first one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from fsdp2._core.base.arguments import check_mapping, check_module, check_optimizer, described
from fsdp2._core.base.containers import map_tensors
from fsdp2._core.base.errors import ConfigError, ConfigTypeError
from fsdp2._core.base.names import clean, cleaned, named_parameters

Keys = Literal["name", "id"]


def check_keys(what: str, keys: object) -> None:
    """Raise ConfigError unless it is 'name' or 'id'."""
    if not isinstance(keys, str) or keys not in ("name", "id"):
        text = f"{what}: expected 'name' or 'id', found {described(keys)}."
        if isinstance(keys, str):
            raise ConfigError("FS102", text)
        raise ConfigTypeError("FS101", text)


def check_optim_state(what: str, state: object) -> None:
    """Raise ConfigError unless it has the form of an optimizer's state dict."""
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
    """Return the names of the parameters of each param group.

    Raises:
        ConfigError: the optimizer holds a tensor that is no parameter of the model.
    """
    names = {id(param): name for name, param in named_parameters(model).items()}
    found: list[list[str]] = []
    for number, group in enumerate(optimizer.param_groups):
        found.append([])
        for place, param in enumerate(group["params"]):
            if id(param) not in names:
                raise ConfigError(
                    "FS610",
                    f"optimizer: parameter {place} of param group {number}, of shape "
                    f"{tuple(param.shape)}, is no parameter of the model. Build the optimizer "
                    "after fully_shard and fsdp2.materialize, from model.parameters().",
                )
            found[-1].append(names[id(param)])
    return found


def ordered_names(model: nn.Module, optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's parameters: each one's place is its id."""
    return [name for names in names_in_groups(model, optimizer) for name in names]


def keys_of(state: dict[str, Any]) -> Keys:
    """Say how parameters are called in an optimizer's state."""
    params = [key for group in state.get("param_groups", ()) for key in group["params"]]
    keys = params or list(state.get("state", {}))
    return "id" if keys and isinstance(keys[0], int) else "name"


def renamed(state: dict[str, Any], new: dict[Any, Any]) -> dict[str, Any]:
    """Return an optimizer's state under other keys; keys without a new one stay out of groups."""
    return {
        **state,
        "state": {new.get(key, key): value for key, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [new.get(key, key) for key in group["params"]]}
            for group in state["param_groups"]
        ],
    }


def with_clean_names(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state under names without wrappers in them: old ones have them."""
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
    """Return an optimizer's state under names or under ids. Tensors are shared, nothing is sent.

    Args:
        optim_state: what ``optimizer.state_dict()``, this module, or torch's FSDP1 and DCP helpers
            return.
        keys: ``"name"`` or ``"id"``.
        model: whose names are meant; needed to name ids. Without ``optimizer`` ids count
            ``model.parameters()``.
        optimizer: one over the model's parameters, whose param groups say which id is whose.
            Without it, names get ids in the order in which the state's param groups list them.

    Raises:
        ConfigError: another ``keys``; a model is missing; an id or a name that the model lacks.
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
    if model is None and keys == "name":
        raise ConfigError("FS611", "rekey: ids get names from a model. Pass model=.")
    if model is None and optimizer is not None:
        raise ConfigError("FS611", "rekey: names get an optimizer's ids by a model. Pass model=.")
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
            "the model and the optimizer that the state is of.",
        )
    return renamed(optim_state, new)


def map_state(
    function: Callable[[str, str, Tensor], Any], state: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the states of parameters with every tensor replaced, in containers too.

    ``function`` is given a parameter's name, a name that no other tensor of its state has, and the
    tensor.
    """

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
    """Let an optimizer of owners (``fsdp2.optim.whole``) have its state in shards. Collective.

    Its ``state_dict`` sends nothing after that, so that ranks may meet errors of their own in it.
    """
    settle = getattr(optimizer, "gather_state", None)
    if settle is not None:
        settle()


def named_state(
    model: nn.Module, optimizer: Optimizer, *, is_local: bool = False
) -> dict[str, Any]:
    """Return ``optimizer.state_dict()`` under names.

    ``is_local``: with what only this rank can load, where the optimizer tells that apart.
    """
    take = getattr(optimizer, "local_state_dict", None) if is_local else None
    state = (take or optimizer.state_dict)()
    return renamed(state, dict(enumerate(ordered_names(model, optimizer))))


def matched_groups(
    model: nn.Module, optimizer: Optimizer, state: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return the optimizer's param groups, under ids, with the options of a state under names.

    Raises:
        ConfigError: as ``load_named``.
    """
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
            "state of an optimizer over the same parameters, or leave the optimizer out.",
        )
    groups = []
    number = 0
    for current, names in zip(optimizer.param_groups, own, strict=True):
        options = [saved[name] for name in names]
        if any(option != options[0] for option in options[1:]):
            raise ConfigError(
                "FS609",
                f"optimizer: the param group of {names[0]} was several groups with different "
                "options when it was saved. Build the optimizer with the same groups.",
            )
        kept = {key: value for key, value in current.items() if key != "params"}
        ids = list(range(number, number + len(names)))
        number += len(names)
        groups.append({**kept, **(options[0] if options else {}), "params": ids})
    return groups


def load_named(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state under names, whatever the order of its param groups.

    Raises:
        ConfigError: a parameter of the optimizer is in no param group of the state, or those of one
            group are in several with different options; nothing was changed.
    """
    groups = matched_groups(model, optimizer, state)
    values = state["state"]
    ordered = enumerate(ordered_names(model, optimizer))
    by_id = {number: values[name] for number, name in ordered if name in values}
    optimizer.load_state_dict({"state": by_id, "param_groups": groups})

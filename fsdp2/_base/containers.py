"""Tensors inside what users pass to and return from a forward.

Owns ``map_tensors``, which replaces tensors in lists, tuples, named tuples, dicts (and their
subclasses) and dataclasses, nested in any way, and ``visit_tensors``, which only looks, and so
looks into any mapping and any other object's attributes too. A container is copied only if a tensor
in it changed: a call in which nothing changes keeps every object's identity.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from types import ModuleType
from typing import Any

import torch


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return ``value`` with every tensor replaced by ``function(tensor)``."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if value is None or isinstance(value, str | int | float | bool | torch.nn.Module):
        return value
    if isinstance(value, list | tuple):
        items = [map_tensors(function, item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if type(value) is list:  # a compiler cannot trace what follows, so not for these
            return items
        if isinstance(value, list):
            copied_list = copy.copy(value)
            copied_list[:] = items
            return copied_list
        if hasattr(value, "_fields"):
            return type(value)(*items)
        if hasattr(value, "n_sequence_fields"):  # torch.return_types, made of one iterable
            return type(value)(items)
        return tuple(items) if type(value) is tuple else tuple.__new__(type(value), items)
    if isinstance(value, Mapping):
        changed = {key: map_tensors(function, item) for key, item in value.items()}
        changed = {key: item for key, item in changed.items() if item is not value[key]}
        if not changed:
            return value
        return _replace_items(value, changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        new = {name: map_tensors(function, item) for name, item in fields.items()}
        new = {name: item for name, item in new.items() if item is not fields[name]}
        if not new:
            return value
        copied: Any = copy.copy(value)
        for name, item in new.items():
            object.__setattr__(copied, name, item)  # frozen dataclasses too
        return copied
    return value


def _replace_items(mapping: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """Return a copy of a mapping with some items changed, of the same type where it can be had."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return {**mapping, **changed}
    kept = {key: mapping[key] for key in changed}
    replaced = copy.copy(mapping)
    _set_items(replaced, changed)
    if any(mapping[key] is not kept[key] for key in kept):  # a copy that shares its items
        _set_items(mapping, kept)
        return {**mapping, **changed}
    return replaced


def _set_items(mapping: MutableMapping[Any, Any], items: dict[Any, Any]) -> None:
    """Set items one by one: some mappings refuse ``update``, such as outputs of transformers."""
    for key, item in items.items():
        mapping[key] = item


_LEAVES = (str, bytes, int, float, type, ModuleType, torch.nn.Module)


def visit_tensors(
    function: Callable[[torch.Tensor], None], value: Any, seen: set[int] | None = None
) -> None:
    """Call ``function`` for every tensor in ``value``, in containers and attributes of objects.

    ``seen`` is for calls from inside: what was looked at already.
    """
    seen = set() if seen is None else seen
    if value is None or isinstance(value, _LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        function(value)
        return
    children: Iterable[Any] = ()
    if isinstance(value, Mapping):
        children = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        children = value
    elif dataclasses.is_dataclass(value):
        children = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    for child in (*children, *getattr(value, "__dict__", {}).values()):
        visit_tensors(function, child, seen)

"""Traverses the inputs and outputs of a forward, to visit or replace the tensors in them.

``map_tensors`` replaces tensors in lists, tuples, named tuples, dicts and dataclasses, and copies
only containers in which a tensor changed. ``visit_tensors`` is read-only, but also visits mappings
of any class, attributes (and slots), and the objects that functions and generators refer to.
``Loan`` replaces tensors in a forward's arguments, but does not copy mutable containers.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
from collections import deque
from collections.abc import Callable, Iterable, KeysView, Mapping, MutableMapping, ValuesView
from types import FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from fsdp2._core.base import torch_autograd

T = TypeVar("T")


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if value is None or isinstance(value, _PLAIN):
        return value
    return _rebuild(value, lambda item: map_tensors(function, item))


_PLAIN = (str, int, float, bool, torch.nn.Module)


def _rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply ``change`` to each item of a container; return a copy if any item changed."""
    if isinstance(value, list | tuple):
        items = [change(item) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if type(value) is list:  # a compiler cannot trace the code below
            return items
        if isinstance(value, list):
            copied_list = copy.copy(value)
            copied_list[:] = items
            return copied_list
        if hasattr(value, "_fields"):
            return type(value)(*items)
        if hasattr(value, "n_sequence_fields"):  # torch.return_types, built from one iterable
            return type(value)(items)
        return tuple(items) if type(value) is tuple else tuple.__new__(type(value), items)
    is_mapping = isinstance(value, Mapping)
    if not is_mapping and (isinstance(value, type) or not dataclasses.is_dataclass(value)):
        return value
    old = _items_of(value)
    changed = {key: change(item) for key, item in old.items()}
    changed = {key: item for key, item in changed.items() if item is not old[key]}
    if not changed:
        return value
    if is_mapping:
        return _replace_items(value, changed)
    copied: Any = copy.copy(value)
    _set_items(copied, changed)
    return copied


def _replace_items(mapping: Mapping[Any, Any], changed: dict[Any, Any]) -> Any:
    """Return a copy of a mapping, of the same type if possible, with some items replaced."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return {**mapping, **changed}
    kept = {key: mapping[key] for key in changed}
    replaced = copy.copy(mapping)
    _set_items(replaced, changed)
    if any(mapping[key] is not kept[key] for key in kept):  # the copy shares the original's items
        _set_items(mapping, kept)
        return {**mapping, **changed}
    return replaced


def _set_items(container: Any, items: dict[Any, Any]) -> None:
    """Set items one by one: some mappings (transformers' ModelOutput) do not support ``update``."""
    for key, item in items.items():
        _set_item(container, key, item)


@dataclasses.dataclass
class _Lent:
    """A replacement passed to a forward, and the caller's original."""

    stands: Any
    original: Any
    version: int

    def returned(self) -> Any:
        """Return the original, or the new value of a modified cast, in the original's dtype."""
        stands, original = self.stands, self.original
        if not isinstance(original, torch.Tensor) or stands.dtype is original.dtype:
            return original
        if stands.is_inference():  # inference tensors have no version
            was_written = not torch.equal(stands, original.to(stands.dtype))
        else:
            was_written = _version_of(stands) != self.version
        return stands.to(original.dtype) if was_written else original


def _version_of(value: Any) -> int:
    is_counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return torch_autograd.version_of(value) if is_counted else 0


class Loan:
    """Temporarily replaces tensors in the caller's containers during a forward. The forward may
    modify these containers (append to a list, fill a cache). ``exchange`` replaces the tensors in
    mutable containers, and ``give_back`` restores the caller's tensors wherever it finds their
    replacements. A cast that was updated in place is converted back to the caller's dtype."""

    __slots__ = ("_function", "_lent", "_originals")

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._function = function
        self._lent: list[tuple[Any, list[Any]]] = []  # containers, each with its original items
        self._originals: dict[int, _Lent] = {}  # by id of the replacement

    def exchange(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._function(value)
        if value is None or isinstance(value, _PLAIN):
            return value
        if not _can_be_written(value):
            return _rebuild(value, self.exchange)
        if any(value is container for container, _ in self._lent):
            return value  # passed twice, or contained in itself
        items = _items_of(value)
        self._lent.append((value, list(items.values())))
        for key, old in items.items():
            new = self.exchange(old)
            if new is not old:
                stands = _set_item(value, key, new)
                self._originals[id(stands)] = _Lent(stands, old, _version_of(stands))
        return value

    def give_back(self) -> None:
        for container, _ in self._lent:
            for key, item in _items_of(container).items():
                lent = self._originals.get(id(item))
                if lent is not None:
                    _set_item(container, key, lent.returned())

    def map_added(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the tensors that the forward added to containers. Call after ``give_back``."""
        for container, key, item in self._added():
            new = map_tensors(function, item)
            if new is not item:
                _set_item(container, key, new)

    def with_added(self, output: Any) -> Any:
        """Return an output, together with any items that the forward added to containers."""
        added = [item for _, _, item in self._added()]
        return (output, added) if added else output

    def _added(self) -> list[tuple[Any, Any, Any]]:
        found = []
        for container, before in self._lent:
            known = set(map(id, before))
            items = _items_of(container).items()
            found += [(container, key, item) for key, item in items if id(item) not in known]
        return found


def _can_be_written(value: Any) -> bool:
    if isinstance(value, list) or type(value) is dict:
        return True
    if isinstance(value, MutableMapping):  # some mappings create items on access
        return all(value[key] is item for key, item in value.items())
    params = getattr(type(value), "__dataclass_params__", None)
    return params is not None and not params.frozen and not isinstance(value, Mapping | tuple)


def _items_of(container: Any) -> dict[Any, Any]:
    if isinstance(container, list):
        return dict(enumerate(container))
    if isinstance(container, Mapping):
        return dict(container.items())
    fields = dataclasses.fields(container)
    return {f.name: getattr(container, f.name) for f in fields if hasattr(container, f.name)}


def _set_item(container: Any, key: Any, item: Any) -> Any:
    """Write an item to a container. Return the item as stored: some mappings convert items."""
    if isinstance(container, list | MutableMapping):
        container[key] = item
        return container[key]
    object.__setattr__(container, key, item)  # including frozen dataclasses
    return item


_LEAVES = (str, bytes, int, float, type, ModuleType, torch.nn.Module)


def visit_tensors(
    function: Callable[[torch.Tensor], None], value: Any, seen: set[int] | None = None
) -> None:
    """Call ``function`` for every tensor in containers and attributes. Skip ids in ``seen``."""
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
    elif isinstance(value, _COLLECTIONS):
        children = value
    elif isinstance(value, _LAZY):
        children = _kept_by(value)
    else:
        children = [getattr(value, name, None) for name in _fields_and_slots(type(value))]  # type: ignore[arg-type]  # a type is hashable
    for child in (*children, *getattr(value, "__dict__", {}).values()):
        visit_tensors(function, child, seen)


_COLLECTIONS = (list, tuple, set, frozenset, deque, KeysView, ValuesView)

_ITERATORS: tuple[type, ...] = (type(iter([])), type(iter(())))
_LAZY = (FunctionType, MethodType, functools.partial, GeneratorType, *_ITERATORS)


def _kept_by(value: Any) -> list[Any]:
    """Return a function's or generator's referents, or the remaining items of an iterator."""
    if isinstance(value, FunctionType):
        variables = gc.get_referents(*(value.__closure__ or ()))  # those that have a value
        return [*variables, value.__defaults__, value.__kwdefaults__]
    if isinstance(value, MethodType | functools.partial):
        return gc.get_referents(value)
    if isinstance(value, GeneratorType):
        return [] if value.gi_frame is None else list(value.gi_frame.f_locals.values())
    return list(copy.copy(value))


@functools.lru_cache(256)
def _fields_and_slots(kind: type) -> tuple[str, ...]:
    names = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        own = (slots,) if isinstance(slots, str) else tuple(slots)
        prefix = "_" + base.__name__.lstrip("_")
        for name in own:
            is_mangled = name.startswith("__") and not name.endswith("__")
            names.append(prefix + name if is_mangled else name)
    return tuple(dict.fromkeys(names))


def alive(members: WeakValueDictionary[int, T]) -> list[T]:
    """Return the live members of a process-wide collection. Iteration over a ``WeakSet`` or a
    ``WeakValueDictionary`` would raise if another thread (such as another rank) added a member."""
    found = (ref() for ref in members.valuerefs())  # one C call, during which no other thread runs
    return [member for member in found if member is not None]

"""Tensors inside what users pass to and return from a forward.

Owns ``map_tensors``, which replaces tensors in lists, tuples, named tuples, dicts (and their
subclasses) and dataclasses, nested in any way, and ``visit_tensors``, which only looks, and so
looks into any mapping, any other object's attributes (in slots, too), and what functions and
generators refer to. A container is copied only if a tensor in it changed: a call in which nothing
changes keeps every object's identity. ``Loan`` replaces tensors in the arguments of a forward, and
copies no container that the forward could write to.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterable, KeysView, Mapping, MutableMapping, ValuesView
from types import CellType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch

from fsdp2._core.base import torch_autograd


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Return ``value`` with every tensor replaced by ``function(tensor)``."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if value is None or isinstance(value, _PLAIN):
        return value
    return _rebuild(value, lambda item: map_tensors(function, item))


_PLAIN = (str, int, float, bool, torch.nn.Module)


def _rebuild(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container with ``change`` applied to each item: a copy, if one is another then."""
    if isinstance(value, list | tuple):
        items = [change(item) for item in value]
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
        changed = {key: change(item) for key, item in value.items()}
        changed = {key: item for key, item in changed.items() if item is not value[key]}
        if not changed:
            return value
        return _replace_items(value, changed)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
        new = {name: change(item) for name, item in fields.items()}
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


@dataclasses.dataclass
class _Lent:
    """What a forward found in place of what the caller had."""

    stands: Any
    original: Any
    version: int

    def returned(self) -> Any:
        stands, original = self.stands, self.original
        is_cast = isinstance(original, torch.Tensor) and stands.dtype is not original.dtype
        return stands.to(original.dtype) if is_cast and self._was_written else original

    @property
    def _was_written(self) -> bool:
        """True if the forward updated a cast in place. In inference mode nothing counts that."""
        if self.stands.is_inference():
            return not torch.equal(self.stands, self.original.to(self.stands.dtype))
        return _version_of(self.stands) != self.version


def _version_of(value: Any) -> int:
    """Return how often a tensor was written in place; 0 for anything that does not count it."""
    is_counted = isinstance(value, torch.Tensor) and not value.is_inference()
    return torch_autograd.version_of(value) if is_counted else 0


class Loan:
    """Other tensors in the caller's own containers, while a forward runs.

    A forward may write to what it is given: append to a list, fill a cache. So containers that can
    be written to stay the caller's. ``exchange`` replaces the tensors inside of them, and
    ``give_back`` puts the caller's back, wherever they are by then. A cast that the forward updated
    in place is put there in the caller's dtype: the caller's tensor has not the new values. The
    rest is copied, as ``map_tensors`` does.
    """

    __slots__ = ("_function", "_lent", "_originals")

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._function = function
        self._lent: list[tuple[Any, list[Any]]] = []  # containers, and what was in each
        self._originals: dict[int, _Lent] = {}  # by identity of what is in place of it

    def exchange(self, value: Any) -> Any:
        """Return ``value`` with every tensor replaced."""
        if isinstance(value, torch.Tensor):
            return self._function(value)
        if value is None or isinstance(value, _PLAIN):
            return value
        if not _can_be_written(value):
            return _rebuild(value, self.exchange)
        if any(value is container for container, _ in self._lent):  # given twice, or in itself
            return value
        items = _items_of(value)
        self._lent.append((value, list(items.values())))
        for key, old in items.items():
            new = self.exchange(old)
            if new is not old:
                stands = _set_item(value, key, new)
                self._originals[id(stands)] = _Lent(stands, old, _version_of(stands))
        return value

    def give_back(self) -> None:
        """Put back what the caller had in place of what ``exchange`` put there."""
        for container, _ in self._lent:
            for key, item in _items_of(container).items():
                lent = self._originals.get(id(item))
                if lent is not None:
                    _set_item(container, key, lent.returned())

    def map_added(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the tensors that the forward put into containers, after ``give_back``."""
        for container, key, item in self._added():
            new = map_tensors(function, item)
            if new is not item:
                _set_item(container, key, new)

    def with_added(self, output: Any) -> Any:
        """Return an output, together with what the forward put into containers, if it did."""
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
    if isinstance(value, MutableMapping):  # some make their items when they are asked for them
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
    """Write to a container; return what it has then: some mappings convert what they are given."""
    if isinstance(container, list | MutableMapping):
        container[key] = item
        return container[key]
    object.__setattr__(container, key, item)
    return item


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
    elif isinstance(value, _COLLECTIONS):
        children = value
    elif isinstance(value, _LAZY):
        children = _kept_by(value)
    else:
        children = [getattr(value, name, None) for name in _fields_and_slots(type(value))]  # type: ignore[arg-type]  # a type is hashable
    for child in (*children, *getattr(value, "__dict__", {}).values()):
        visit_tensors(function, child, seen)


_COLLECTIONS = (list, tuple, set, frozenset, deque, KeysView, ValuesView)

_LAZY: tuple[type, ...] = (
    FunctionType,
    MethodType,
    functools.partial,
    GeneratorType,
    type(iter([])),
    type(iter(())),
)


def _kept_by(value: Any) -> list[Any]:
    """Return what a function or a generator refers to, or an iterator has yet to yield."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [*cells, value.__defaults__, value.__kwdefaults__]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, GeneratorType):
        return [] if value.gi_frame is None else list(value.gi_frame.f_locals.values())
    return list(copy.copy(value))


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # raises if the variable has no value
    except ValueError:
        return False
    return True


@functools.lru_cache(256)
def _fields_and_slots(kind: type) -> tuple[str, ...]:
    """Return the names of a class's dataclass fields and slots."""
    names = [f.name for f in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        own = (slots,) if isinstance(slots, str) else tuple(slots)
        prefix = "_" + base.__name__.lstrip("_")
        names.extend(
            prefix + name if name.startswith("__") and not name.endswith("__") else name
            for name in own
        )
    return tuple(dict.fromkeys(names))

"""Unpickling that executes nothing: plain data, and stand-ins for classes that only hold data.

Owns which names a pickle may use. It must not know what is in the pickles.

[Note: what a pickle may name]
A pickle is a program whose instructions fetch a name from a module, call it, and set attributes on
it. What it fetches here is a function or a class that was made for this one unpickling, never the
named class itself: whatever it does to that, nobody else sees. A name that is not in a table is
refused, unless the caller trusts the pickle.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

PLAIN: tuple[type, ...] = (
    *(bytearray, complex, dict, float, frozenset, int, list, range, set, slice),
    *(Counter, OrderedDict, deque),
    *(torch.Size, torch.device),
)
"""What a pickle of plain data may call. ``torch.serialization.add_safe_globals`` adds to it."""

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


class RefusedError(pickle.UnpicklingError):
    """A pickle names something that its table lacks."""


class Unpickler(pickle.Unpickler):
    """Unpickles what ``names`` makes, and dtypes; with ``trust``, everything.

    Args:
        names: what a pickle finds under (module, name).
        tensors: for a pickle that refers to tensors by number.
    """

    def __init__(
        self,
        pickled: bytes,
        names: Mapping[tuple[str, str], Any],
        *,
        trust: bool = False,
        tensors: Mapping[int, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(io.BytesIO(pickled))
        self._names = names
        self._trust = trust
        self._tensors = tensors or {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name. See [Note: what a pickle may name]."""
        if module == "torch" and name in DTYPES:
            return DTYPES[name]
        if (module, name) in self._names:
            return self._names[module, name]
        if self._trust:
            return super().find_class(module, name)
        raise RefusedError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> torch.Tensor:
        return self._tensors[pid]


def plain_names() -> dict[tuple[str, str], Any]:
    """Return the table for plain data."""
    names: dict[tuple[str, str], Any] = {
        (made.__module__, made.__name__): _caller(made) for made in PLAIN
    }
    names["collections", "defaultdict"] = _make_defaultdict
    names["builtins", "Ellipsis"] = ...
    for safe in torch.serialization.get_safe_globals():
        value, path = safe if isinstance(safe, tuple) else (safe, "")
        path = path or f"{value.__module__}.{value.__qualname__}"
        module, _, name = path.rpartition(".")
        names[module, name] = value
    return names


def _caller(made: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(made, updated=())
    def call(*args: Any) -> Any:
        return made(*args)

    return call


def _make_defaultdict(factory: Any = None, *items: Any) -> defaultdict[Any, Any]:
    return defaultdict(getattr(factory, "__wrapped__", factory), *items)

"""Which names a pickle may use: plain data, what a user allowed, and everything with trust.

Owns the table of plain data and who runs a pickle. It must not know what is in the pickles.

[Note: what a pickle may name]
A name that is not in a table is refused, unless the caller trusts the pickle. What stands in a
table under the name of a class is a function made for this one unpickling, which takes no more than
a pickle of plain data passes. What a user allowed with ``torch.serialization.add_safe_globals`` is
in the table too. What torch allows there for itself is not: a ``DeviceMesh`` makes process groups.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from pickle import UnpicklingError
from typing import Any

import torch

from fsdp2._core.base.errors import ConfigError
from fsdp2.checkpoint._pickle_machine import (
    DICTS,
    ELEMENTS,
    Allowed,
    Machine,
    RefusedError,
    require_keys,
)

DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
OF_TORCH = ("torch.distributed.", "torch.nested.", "torch._dynamo.")
"""Modules whose classes torch itself allows when it is imported."""

LATIN = ("latin1", "latin-1")
"""How protocol 2, which torch writes, says bytes as text."""


def unpickle(
    data: bytes,
    names: Mapping[tuple[str, str], Any],
    *,
    trust: bool = False,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return what a pickle describes, from a table of names; with ``trust``, from everywhere.

    Raises:
        RefusedError: it needs a name that the table lacks.
        UnpicklingError: it is damaged.
    """
    if not trust:
        return Machine(data, names, persistent).run()
    trusting = _Trusting(io.BytesIO(data))
    trusting.names = names
    trusting.persistent = persistent
    return trusting.load()


class _Trusting(pickle.Unpickler):
    names: Mapping[tuple[str, str], Any]
    persistent: Callable[[Any], Any] | None

    def find_class(self, module: str, name: str) -> Any:
        found = self.names.get((module, name))
        if found is None or isinstance(found, Allowed):
            return super().find_class(module, name)
        return found

    def persistent_load(self, pid: Any) -> Any:
        if self.persistent is None:
            raise UnpicklingError("a reference to another file")
        return self.persistent(pid)


def plain_names() -> dict[tuple[str, str], Any]:
    """Return the table for plain data. See [Note: what a pickle may name]."""
    made: dict[Any, Callable[..., Any]] = {}
    made |= {kind: _maker(kind) for kind in (int, float, complex, range, slice, torch.device)}
    made |= {kind: _maker(kind, ()) for kind in (bool, str, tuple)}
    made |= {kind: _maker(kind, ELEMENTS) for kind in (list, set, frozenset, deque, torch.Size)}
    made |= {kind: _maker(kind, DICTS) for kind in (dict, OrderedDict, Counter)}
    made |= {bytes: _maker_of_bytes(bytes), bytearray: _maker_of_bytes(bytearray)}
    kinds = {id(function): kind for kind, function in made.items()}

    def make_defaultdict(factory: Any = None) -> defaultdict[Any, Any]:
        return defaultdict(None if factory is None else kinds[id(factory)])

    names: dict[tuple[str, str], Any] = {
        **{(kind.__module__, kind.__name__): function for kind, function in made.items()},
        ("collections", "defaultdict"): make_defaultdict,
        ("builtins", "Ellipsis"): ...,
        ("_codecs", "encode"): _encode,
        **{("torch", name): dtype for name, dtype in DTYPES.items()},
    }
    for safe in torch.serialization.get_safe_globals():
        value, path = safe if isinstance(safe, tuple) else (safe, "")
        path = path or f"{value.__module__}.{value.__qualname__}"
        if not path.startswith(OF_TORCH):
            module, _, name = path.rpartition(".")
            names[module, name] = Allowed(value)
    return names


def _maker(kind: Any, kinds: tuple[type, ...] = (object,)) -> Callable[..., Any]:
    """Return a function that calls a class, with a value of one of ``kinds`` first, or nothing."""

    def make(*args: Any) -> Any:
        for first in args[:1]:
            if kinds != (object,):
                _require_kind(first, kinds)
            if kind in (set, frozenset):
                require_keys(first)
        return kind(*args)

    return make


def _maker_of_bytes(kind: Any) -> Callable[..., Any]:
    def make(content: Any = b"", codec: Any = None) -> Any:
        return kind(content if type(content) is bytes else _encode(content, codec))

    return make


def _encode(text: Any, codec: Any) -> bytes:
    _require_kind(text, (str,))
    if codec not in LATIN:
        raise UnpicklingError("bytes in another codec")
    return bytes(text, "latin-1")


def not_plain(what: str, error: RefusedError) -> ConfigError:
    """Return the error for a value that is loaded only if it is trusted."""
    return ConfigError(
        "FS616",
        f"load: {what} is no plain data: it needs {error}, and loading that could run any code. "
        "Pass trust=True if you know who wrote it, allow its class with "
        "torch.serialization.add_safe_globals, or save numbers, strings, tensors, lists and dicts "
        "only. Nothing was changed.",
    )


def _require_kind(given: Any, kinds: tuple[type, ...]) -> None:
    """Raise TypeError for what has any length in a few bytes, a range, or is no container."""
    if type(given) not in kinds:
        raise UnpicklingError(f"it makes a container of a {type(given).__name__}")

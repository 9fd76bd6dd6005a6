"""``replace_torch``: rebind torch's FSDP2 names to fsdp2's objects for software that imports them.

[Note: what is rebound]
Names are rebound in torch's public modules (``torch_modules.HOMES``), so that later imports get our
objects. Modules loaded earlier may have bound torch's objects to names of their own. We find these
names by object identity in all loaded modules except torch's and ours, and in the classes of these
modules, and rebind them. Torch's other modules keep their bindings, because they operate on the
results of torch's ``fully_shard``. The module that implements torch's FSDP2
(``torch_modules.INNER_HOME``) also keeps its bindings, which its own functions use, but its class
becomes ``_Shown``, so that imports from it get our objects. (Policies imported from their defining
modules, and policies in default arguments, closures and containers cannot be rebound;
``_core.base.policy.ours`` converts them when they are passed to us.)
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch.nn as nn

from fsdp2._core.api.fully_shard import fully_shard, register_fsdp_forward_method
from fsdp2._core.api.module import FSDPModule, GradientReductionHandle, UnshardHandle
from fsdp2._core.api.settings import share_comm_ctx
from fsdp2._core.base import torch_modules
from fsdp2._core.base.errors import StateError
from fsdp2._core.base.events import logger
from fsdp2._core.base.policy import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

OURS: Mapping[str, Any] = {
    "CPUOffloadPolicy": CPUOffloadPolicy,
    "DataParallelMeshDims": DataParallelMeshDims,
    "FSDPModule": FSDPModule,
    "GradientReductionHandle": GradientReductionHandle,
    "MixedPrecisionPolicy": MixedPrecisionPolicy,
    "OffloadPolicy": OffloadPolicy,
    "UnshardHandle": UnshardHandle,
    "fully_shard": fully_shard,
    "register_fsdp_forward_method": register_fsdp_forward_method,
    "share_comm_ctx": share_comm_ctx,
}
REPLACES = "FSDP2_REPLACE_TORCH"
"""Environment variable: "1" makes ``import fsdp2`` call ``replace_torch``."""

_theirs = {name: torch_modules.PUBLIC[name] for name in OURS if name in torch_modules.PUBLIC}
_by_torchs = {id(theirs): OURS[name] for name, theirs in _theirs.items()}
_by_ours = {id(OURS[name]): theirs for name, theirs in _theirs.items()}


class Replacement(contextlib.AbstractContextManager["Replacement"]):
    """An active replacement; ``undo()``, or the end of a ``with`` block, reverts it."""

    def __init__(self) -> None:
        self._loaded = set(sys.modules)
        self._bound: list[tuple[Any, str, Any, Any]] = []  # (module, name, torch's object, ours)
        homes = [module for home in torch_modules.HOMES if (module := sys.modules.get(home))]
        self._is_first = not any(vars(home).get("fully_shard") is fully_shard for home in homes)
        for holder in (*homes, *_others()):
            self._bound += _rebind(holder, _by_torchs)
        inner = sys.modules[torch_modules.INNER_HOME]
        self._shows = type(inner) is ModuleType  # False if another replacement changed its class
        if self._shows:
            inner.__class__ = _Shown
        if self.names:
            logger.info("replace_torch: rebound %s", ", ".join(self.names))

    @property
    def names(self) -> list[str]:
        """Qualified names of all rebound attributes, sorted."""
        bound = [f"{_name_of(holder)}.{name}" for holder, name, _, _ in self._bound]
        home = torch_modules.INNER_HOME
        inner = vars(sys.modules[home]).items() if self._shows else ()
        return sorted(bound + [f"{home}.{name}" for name, one in inner if id(one) in _by_torchs])

    def undo(self) -> None:
        """Restore torch's objects wherever this replacement bound ours.

        Modules that were loaded later are included, unless they import fsdp2 themselves. Models
        that are already sharded do not change. Idempotent.
        """
        for holder, name, theirs, ours in self._bound:
            if vars(holder).get(name) is ours:
                setattr(holder, name, theirs)
        self._bound.clear()
        if self._shows:
            self._shows = False
            sys.modules[torch_modules.INNER_HOME].__class__ = ModuleType
        if not self._is_first:
            return
        self._is_first = False
        for name, module in list(sys.modules.items()):
            is_new = name not in self._loaded and isinstance(module, ModuleType)
            if is_new and not _is_within(name, "fsdp2") and not _imports_ours(module):
                for holder in (module, *_classes_of(name, module)):
                    _rebind(holder, _by_ours)

    def __exit__(self, *_: object) -> None:
        self.undo()


def replace_torch() -> Replacement:
    """Make software that imports torch's FSDP2 use fsdp2 instead, without changes to its code.

    The rebound names are ``fully_shard``, ``FSDPModule``, ``MixedPrecisionPolicy``,
    ``OffloadPolicy``, ``CPUOffloadPolicy``, ``DataParallelMeshDims``,
    ``register_fsdp_forward_method``, ``share_comm_ctx``, ``UnshardHandle`` and
    ``GradientReductionHandle``, in all of torch's public modules that have them. Earlier imports
    are also rebound: every attribute of a loaded module or class that refers to one of torch's
    objects is rebound to ours. The logger ``fsdp2`` lists rebound attributes at level ``INFO``.
    Torch's internal modules and FSDP1 do not change. Call this function again to rebind later
    imports. ``python -m fsdp2 program`` calls it before the program runs.

    Returns:
        An object with the rebound ``names`` and a method ``undo()``. As a context manager, it
        undoes the replacement on exit.

    Raises:
        StateError: a model sharded by torch's ``fully_shard`` is still alive. Nothing was changed.
    """
    sharded = _sharded_by_torch()
    if sharded is not None:
        raise StateError(
            "FS909",
            f"replace_torch: torch's own fully_shard has already sharded a {sharded}. Call "
            "replace_torch() before sharding anything, or start the program with python -m fsdp2.",
        )
    return Replacement()


class _Shown(ModuleType):
    """Class of torch's inner module during a replacement: attribute access returns our objects."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return _by_torchs.get(id(value), value)


def _sharded_by_torch() -> str | None:
    """Return the class name of a live module that torch's ``fully_shard`` has sharded."""
    direct = torch_modules.FSDPModule.__subclasses__()
    kinds = {kind for kind in direct if issubclass(kind, nn.Module) and kind is not FSDPModule}
    for _ in range(2 if kinds else 0):
        found = next((one for one in gc.get_objects() if type(one) in kinds), None)
        if found is None:
            return None
        name = type(found).__mro__[2].__name__
        del found
        gc.collect()  # a reference cycle may keep an unreachable model alive
    return name if kinds else None


def _others() -> Iterator[Any]:
    """Yield loaded modules that are neither torch's nor ours, and their classes."""
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and not _is_within(name, "torch", "fsdp2"):
            yield module
            yield from _classes_of(name, module)


def _classes_of(name: str, module: ModuleType) -> list[type]:
    found = [one for one in list(vars(module).values()) if isinstance(one, type)]
    return [one for one in found if vars(one).get("__module__") == name]


def _is_within(name: str, *packages: str) -> bool:
    return name.partition(".")[0] in packages


def _imports_ours(module: ModuleType) -> bool:
    """Return True if a module's source imports fsdp2, or cannot be read."""
    try:
        text = inspect.getsource(module)
    except (OSError, TypeError):
        return True
    return re.search(r"^\s*(import|from)\s+fsdp2\b", text, re.MULTILINE) is not None


def _rebind(holder: Any, table: Mapping[int, Any]) -> list[tuple[Any, str, Any, Any]]:
    """Rebind the names of a module or class according to the table; return the changes."""
    bound = []
    for name, value in list(vars(holder).items()):
        if (other := table.get(id(value))) is not None:
            setattr(holder, name, other)
            bound.append((holder, name, value, other))
    return bound


def _name_of(holder: Any) -> str:
    is_class = isinstance(holder, type)
    return f"{holder.__module__}.{holder.__qualname__}" if is_class else str(holder.__name__)

"""``replace_torch``: software that imports torch's FSDP2 names gets ours.

Owns which names stand for which, and who has them bound. It must not know what they do.

[Note: what is rebound]
Names live in torch's public homes (``torch_modules.HOMES``); whoever imports from there later gets
ours. Who imported before has torch's object under a name of its own: of every module that is loaded
and is not torch's or ours, and of the classes in it, such names are rebound, by identity. Torch's
own modules that are loaded keep what they have: they work on what torch's ``fully_shard`` made.
So does the one that torch's FSDP2 is written in (``torch_modules.INNER_HOME``), for its own
functions. Who imports a name from there, or reads it as an attribute, gets ours: the module becomes
a ``_Shown``. (Policies that come from where they are defined stay torch's, and are taken.)
Defaults of arguments, closures and containers are out of reach; torch's policies in there are taken
(``_core.base.policy.ours``).
"""

from __future__ import annotations

import gc
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType, TracebackType
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
"""Name of the environment variable: "1" lets ``import fsdp2`` call ``replace_torch``."""

_pairs: list[tuple[Any, Any]] = [
    (theirs, OURS[name]) for name, theirs in torch_modules.PUBLIC.items() if name in OURS
]
_by_torchs = {id(theirs): ours for theirs, ours in _pairs}
_by_ours = {id(ours): theirs for theirs, ours in _pairs}


class Replacement:
    """What ``replace_torch`` did; ``undo()``, or the end of a ``with`` block, takes it back."""

    def __init__(self) -> None:
        self._loaded = set(sys.modules)
        self._bound: list[tuple[Any, str, Any, Any]] = []  # where, name, torch's, ours
        homes = [module for home in torch_modules.HOMES if (module := sys.modules.get(home))]
        self._is_first = not any(vars(home).get("fully_shard") is fully_shard for home in homes)
        for holder in (*homes, *_others()):
            self._bound += _rebind(holder, _by_torchs)
        inner = sys.modules[torch_modules.INNER_HOME]
        self._shows = type(inner) is ModuleType  # else another replacement does
        if self._shows:
            inner.__class__ = _Shown
        if self.names:
            logger.info("replace_torch: rebound %s", ", ".join(self.names))

    @property
    def names(self) -> list[str]:
        """Full names of what was rebound, in order."""
        bound = [f"{_name_of(holder)}.{name}" for holder, name, _, _ in self._bound]
        shown = [f"{torch_modules.INNER_HOME}.{name}" for name in _shown()] if self._shows else []
        return sorted(bound + shown)

    def undo(self) -> None:
        """Bind torch's objects again, wherever this replacement put ours.

        So too in modules that were loaded since, unless they import fsdp2 themselves. Models that
        were sharded stay what they are. A second call does nothing.
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

    def __enter__(self) -> Replacement:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()


def replace_torch() -> Replacement:
    """Let software that imports torch's FSDP2 names get those of fsdp2, without changing it.

    The names are ``fully_shard``, ``FSDPModule``, ``MixedPrecisionPolicy``, ``OffloadPolicy``,
    ``CPUOffloadPolicy``, ``DataParallelMeshDims``, ``register_fsdp_forward_method``,
    ``share_comm_ctx``, ``UnshardHandle`` and ``GradientReductionHandle``, in all of torch's public
    modules that have them. What was imported before is rebound: where a module or a class has one
    of torch's objects under a name, that name now leads to ours. The logger ``fsdp2`` lists these
    names, at level ``INFO``. Torch's own modules are left alone, and so is FSDP1. A second call
    rebinds what was bound since, and is harmless. ``python -m fsdp2 program`` calls this before the
    program runs.

    Returns:
        An object with the ``names`` that were rebound, and with ``undo()``. As a context manager it
        undoes the replacement at the end.

    Raises:
        StateError: a model that torch's ``fully_shard`` has sharded is alive. Nothing was changed.
    """
    sharded = _sharded_by_torch()
    if sharded is not None:
        raise StateError(
            "FS909",
            f"replace_torch: a {sharded} that torch's own fully_shard has sharded is alive. Call "
            "replace_torch() before anything is sharded, or start the program with python -m "
            "fsdp2.",
        )
    return Replacement()


class _Shown(ModuleType):
    """Torch's inner module while a replacement lasts: others see ours, its own functions do not."""

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        return _by_torchs.get(id(value), value)


def _shown() -> list[str]:
    """Names of the inner module that lead to ours."""
    own = vars(sys.modules[torch_modules.INNER_HOME])
    return [name for name, value in own.items() if id(value) in _by_torchs]


def _sharded_by_torch() -> str | None:
    """Return the class of a living module that torch's ``fully_shard`` has sharded."""
    direct = torch_modules.FSDPModule.__subclasses__()
    kinds = {kind for kind in direct if issubclass(kind, nn.Module) and kind is not FSDPModule}
    for _ in range(2 if kinds else 0):
        found = next((one for one in gc.get_objects() if type(one) in kinds), None)
        if found is None:
            return None
        name = type(found).__mro__[2].__name__
        del found
        gc.collect()  # a model that nobody has any more may be in a circle
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
    """True if the text of a module imports fsdp2, or if it has none."""
    try:
        text = inspect.getsource(module)
    except (OSError, TypeError):
        return True
    return re.search(r"^\s*(import|from)\s+fsdp2\b", text, re.MULTILINE) is not None


def _rebind(holder: Any, table: Mapping[int, Any]) -> list[tuple[Any, str, Any, Any]]:
    """Bind a module's or a class's names anew, as the table says; return what was bound."""
    bound = []
    for name, value in list(vars(holder).items()):
        if (other := table.get(id(value))) is not None:
            setattr(holder, name, other)
            bound.append((holder, name, value, other))
    return bound


def _name_of(holder: Any) -> str:
    if isinstance(holder, type):
        return f"{holder.__module__}.{holder.__qualname__}"
    name: str = holder.__name__
    return name

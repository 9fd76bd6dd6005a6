"""The public surface of an FSDP2 as data, and the list that is kept of torch 2.15's.

It says which names, methods, parameters and fields there are, of torch's or of ours, so that the
two are compared as data. `torch_2_15.json` beside this file has the newest torch's, for
interpreters with an older one. With that torch, this program writes it anew:

    python -m tests.lab.torch_surface >tests/lab/torch_2_15.json
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PINNED_VERSION = "2.15"
PINNED = Path(__file__).with_name("torch_2_15.json")

BUILT_BY_USERS = {
    "CPUOffloadPolicy": {},
    "DataParallelMeshDims": {"shard": ("a", "b")},
    "MixedPrecisionPolicy": {},
    "OffloadPolicy": {},
}
"""Classes that programs make instances of, with arguments to make one for its fields."""

COLLECTIVES = ("Comm", "AllGather", "ReduceScatter")
"""Classes that programs derive their own from; torch has them in a private module."""


@dataclass(frozen=True)
class Surface:
    """What programs can name, call and read."""

    names: dict[str, str]
    """Of the package: whether it is a class or a function."""
    calls: dict[str, dict[str, str]]
    """Of functions and methods: the parameters in their order, each by its kind and default."""
    fields: dict[str, dict[str, str]]
    """Of policies: their fields and what they hold."""
    abstract: dict[str, list[str]]
    """Of collectives: the methods that a program writes."""

    def has(self, entry: str) -> bool:
        """Tell about a name, or a name's method or field after a dot."""
        name, _, member = entry.partition(".")
        return (name if not member else entry) in {
            *self.names,
            *self.calls,
            *(f"{made}.{field}" for made, fields in self.fields.items() for field in fields),
        }


def surface_of(
    package: Any, names: Iterable[str], collectives: Any, like: Surface | None = None
) -> Surface:
    """Return the surface of a package; `collectives` is the module that has those.

    Of classes the methods are those that the class itself has, or the ones of `like`.
    """
    found = {name: getattr(package, name) for name in names}
    calls: dict[str, Callable[..., Any]] = {}
    for name, value in found.items():
        if not isinstance(value, type) or name in BUILT_BY_USERS:
            calls[name] = value
        if isinstance(value, type):
            calls |= _methods(name, value, like)
    calls["fully_shard.state"] = found["fully_shard"].state
    abstract = {name: getattr(collectives, name).__abstractmethods__ for name in COLLECTIVES}
    for name, methods in abstract.items():
        calls |= {f"{name}.{m}": getattr(getattr(collectives, name), m) for m in methods}
    made = {name: found[name](**BUILT_BY_USERS[name]) for name in BUILT_BY_USERS if name in found}
    return Surface(
        {name: "class" if isinstance(value, type) else "function" for name, value in found.items()},
        {name: parameters_of(call) for name, call in sorted(calls.items())},
        {name: {key: repr(v) for key, v in vars(policy).items()} for name, policy in made.items()},
        {name: sorted(methods) for name, methods in abstract.items()},
    )


def _methods(name: str, cls: type, like: Surface | None) -> dict[str, Callable[..., Any]]:
    if like is not None:
        wanted = [call.partition(".")[2] for call in like.calls if call.startswith(f"{name}.")]
        return {f"{name}.{m}": getattr(cls, m) for m in wanted if hasattr(cls, m)}
    return {
        f"{name}.{method}": value
        for method, value in vars(cls).items()
        if callable(value) and (not method.startswith("_") or method == "__call__")
    }


def parameters_of(function: Callable[..., Any]) -> dict[str, str]:
    """Return each parameter's kind and, if it has one, its default."""
    return {
        name: parameter.kind.description
        + ("" if parameter.default is parameter.empty else f" = {_text(parameter.default)}")
        for name, parameter in inspect.signature(function).parameters.items()
    }


def _text(default: Any) -> str:
    """Return a default as a text that is the same in all packages: fields stand elsewhere."""
    if dataclasses.is_dataclass(default) and default == type(default)():
        return f"{type(default).__name__}()"
    return repr(default)


def installed_surface() -> Surface:
    """Return the surface of the torch that is installed."""
    import torch.distributed.fsdp as package
    from torch.distributed.fsdp import _fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_api

    return surface_of(package, sorted(_fully_shard.__all__), _fsdp_api)


def pinned_surface() -> Surface:
    """Return the surface that is kept."""
    return Surface(**json.loads(PINNED.read_text()))


def main() -> None:
    import torch

    if not torch.__version__.startswith(f"{PINNED_VERSION}."):
        sys.exit(f"this is torch {torch.__version__}, and the list is of {PINNED_VERSION}")
    print(json.dumps(dataclasses.asdict(installed_surface()), indent=1))


if __name__ == "__main__":
    main()

"""What to say where torch met a sharded parameter among ordinary tensors.

Between the forwards of its unit a parameter is registered as a ``DTensor``. Whoever uses it then,
together with a tensor, gets an error of torch that names neither the parameter nor a remedy. This
finds the parameter in the traceback. It owns the words. It runs after an error alone, and must not
change what a step does.
"""

from __future__ import annotations

import ast
import linecache
import sys
import weakref
from collections.abc import Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any

import torch.nn as nn

from fsdp2._core.base.errors import StateError
from fsdp2._core.base.names import class_name
from fsdp2._core.engine.tree import Unit
from fsdp2._core.params.param import FSDPParam
from fsdp2._core.params.registration import Site

MIXED = "got mixed torch.Tensor and DTensor"
"""In torch's message, of 2.11 to 2.15."""

_units: weakref.WeakSet[Unit] = weakref.WeakSet()


def know(unit: Unit) -> None:
    """Let errors name the parameters of a unit. The first one lets Python's last words say more."""
    if not _units:
        tell_before_the_end()
    _units.add(unit)


def units_around(unit: Unit) -> list[Unit]:
    """Return the units whose modules contain those of a unit."""
    return [
        other
        for other in list(_units)
        if other is not unit
        and all(any(part is top for part in _parts(other)) for top in unit.modules)
    ]


def _parts(unit: Unit) -> Iterator[nn.Module]:
    for top in unit.modules:
        yield from top.modules()


def explained(error: BaseException) -> StateError | None:
    """Return what to raise in place of torch's error; None for any other error."""
    if not isinstance(error, RuntimeError) or MIXED not in str(error):
        return None
    owners = {
        (id(site.module), site.name): (param, site, unit)
        for unit in list(_units)
        for group in unit.own_groups
        for param in group.params
        for site in param.sites
        if site.registered is param.sharded
    }
    for frame, instruction in _innermost_first(error.__traceback__):
        for module, name in _used_in(frame, instruction):
            found = owners.get((id(module), name))
            if found is not None:
                return StateError("FS326", _words(*found, error))
    return None


def _words(param: FSDPParam, site: Site, unit: Unit, error: RuntimeError) -> str:
    top = unit.modules[0]
    owner = f"{unit.fqn or 'the outermost module'} ({class_name(top)})"
    names = {id(module): name for name, module in top.named_modules()}
    inside = names.get(id(site.module), "")
    ways = (
        "Use it inside of that forward (another method than forward: "
        "fsdp2.register_fsdp_forward_method)"
    )
    if inside:
        called = f"{unit.fqn}.{inside}" if unit.fqn else inside
        ways += f", or apply fully_shard to {called} too: then its own call gathers it"
    return (
        f"{param.fqn}: used while it is sharded. It is whole while a forward of {owner} runs, and "
        f"that one was not running here. {ways}. To read it between steps: "
        f"fsdp2.summon_full_params. torch said: {error}"
    )


def _innermost_first(traceback: TracebackType | None) -> list[tuple[FrameType, int]]:
    found = []
    while traceback is not None:
        found.append((traceback.tb_frame, traceback.tb_lasti))
        traceback = traceback.tb_next
    return found[::-1]


def _used_in(frame: FrameType, instruction: int) -> Iterator[tuple[nn.Module, str]]:
    """Yield the parameters that a frame's own module has, or that its line names."""
    own = frame.f_locals.get("self")
    if isinstance(own, nn.Module):
        yield from ((own, name) for name in own._parameters)
    known = {**frame.f_globals, **frame.f_locals}
    for node in _expressions(frame, instruction):
        if isinstance(node, ast.Attribute):
            module = _value(node.value, known)
            if isinstance(module, nn.Module):
                yield module, node.attr


def _expressions(frame: FrameType, instruction: int) -> Iterator[ast.AST]:
    """Yield the nodes of the expression that runs, or nothing where it cannot be read."""
    code = frame.f_code
    first = last = frame.f_lineno
    begin: int | None = None
    end: int | None = None
    if sys.version_info >= (3, 11):  # before, all that is known is the line
        found = list(code.co_positions())[instruction // 2]
        first, last, begin, end = found[0] or first, found[1] or last, found[2], found[3]
    lines = [
        linecache.getline(code.co_filename, n, frame.f_globals) for n in range(first, last + 1)
    ]
    raw = [line.encode() for line in lines]  # columns count bytes
    if begin is not None and end is not None:
        raw[-1] = raw[-1][:end]
        raw[0] = raw[0][begin:]
    text = b"".join(raw).decode(errors="replace").strip()
    for candidate in (f"({text})", text, text.removeprefix("return ")):
        try:
            tree = ast.parse(candidate)
        except SyntaxError:  # a part of a statement, or none
            continue
        yield from ast.walk(tree)
        return


def _value(node: ast.AST, known: Mapping[str, Any]) -> Any:
    """Return what a chain of names refers to, without running code of a property."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        return _member(_value(node.value, known), node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        whole, key = _value(node.value, known), node.slice.value
        if isinstance(whole, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            if isinstance(key, int) and len(whole):
                key = key % len(whole)
            return dict(whole.named_children()).get(str(key))
    return None


def _member(owner: Any, name: str) -> Any:
    found = getattr(owner, "__dict__", {}).get(name)
    if found is None and isinstance(owner, nn.Module):
        found = dict(owner.named_children()).get(name)
    return found


def tell_before_the_end() -> None:
    """Say it also behind the traceback of an error that nobody catches.

    A call of an inner module alone passes through none of our code, and hooks on every module
    would cost each step.
    """
    before = sys.excepthook

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        before(kind, error, traceback)
        found = explained(error)
        if found is not None:
            print(f"fsdp2: {found}", file=sys.stderr)

    sys.excepthook = hook

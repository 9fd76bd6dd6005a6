"""Names of parameters and modules, with wrappers omitted, and text formatting for messages.

Wrappers (activation checkpointing, the compiler, torch's FSDP1) are modules between a parent and
its child, so their names appear in ``named_parameters()``. Torch's state dict helpers and the
wrappers' ``state_dict()`` omit these names, so checkpoints load with or without the wrappers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch.nn as nn

WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})

V = TypeVar("V")


def class_name(module: object) -> str:
    """Return the name of the class that the user defined, not of its ``fully_shard`` subclass."""
    return getattr(type(module), "_fsdp2_original", type(module)).__name__


def printable(text: object, most: int = 200) -> str:
    """Return text as one terminal line: escape unprintable characters and truncate to ``most``."""
    shown = str(text)
    shown = shown if len(shown) <= most else f"{shown[:most]}..."
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def clean(name: str) -> str:
    if not any(wrapper in name for wrapper in WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def cleaned(mapping: Mapping[str, V]) -> dict[str, V]:
    """Return a mapping with clean names, or with the original names if clean ones collide."""
    found = {clean(name): value for name, value in mapping.items()}
    return found if len(found) == len(mapping) else dict(mapping)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by clean name; a tied parameter appears only under its first name."""
    return cleaned(dict(model.named_parameters()))


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules by clean name: wrapped modules, not their wrappers."""
    return {clean(name): module for name, module in model.named_modules(remove_duplicate=False)}


def children_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once, under its first name and after its children."""
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if module in seen:
            return
        seen.add(module)
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child)
        yield name, module

    yield from walk("", model)


def in_terminal(text: str) -> str:
    """Escape each line for a terminal: unit, host and file names may contain escape sequences."""
    return "\n".join(map(in_a_line, text.split("\n")))


def in_a_line(text: str) -> str:
    """Escape text as one terminal line, without truncation."""
    return printable(text, most=len(text))


UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def nbytes_text(nbytes: int) -> str:
    for unit, name in UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"


def seconds_text(seconds: float, digits: int = 4) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= unit:
            return f"{seconds / unit:.{digits}g} {name}"
    return f"{seconds * 1e6:.{digits}g} us"

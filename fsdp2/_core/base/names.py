"""Names of parameters without the wrappers around their modules, and modules by name.

Owns which parts of a name are a wrapper's, how a name is shown, and which class a user wrote. It
must not know states or files.

A wrapper of activation checkpointing, of the compiler or of torch's FSDP1 is a module between a
parent and its child, and so its attribute stands in the names of ``named_parameters()``. Torch's
own helpers for state dicts leave it out, and so do wrappers in ``state_dict()``; a checkpoint that
was taken with a wrapper then loads without it, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch.nn as nn

WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"})

V = TypeVar("V")


def class_name(module: object) -> str:
    """Return the name of the class that a user wrote; ``fully_shard`` makes one on top of it."""
    return getattr(type(module), "_fsdp2_original", type(module)).__name__


def printable(text: object, most: int = 200) -> str:
    """Return text of a file, or a name in it, as a terminal can show it: no escapes, one line."""
    shown = str(text)
    shown = shown if len(shown) <= most else f"{shown[:most]}..."
    if shown.isprintable():
        return shown
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def clean(name: str) -> str:
    """Return a name without the parts that are wrappers'."""
    if not any(wrapper in name for wrapper in WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def cleaned(mapping: Mapping[str, V]) -> dict[str, V]:
    """Return a mapping under clean names; two names that become one keep what they are."""
    found = {clean(name): value for name, value in mapping.items()}
    return found if len(found) == len(mapping) else dict(mapping)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by clean name, a tied one under its first."""
    return cleaned(dict(model.named_parameters()))


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules by clean name; what a wrapper wraps, not the wrapper."""
    return {clean(name): module for name, module in model.named_modules(remove_duplicate=False)}


def children_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module once, under its first name and after those in it, as registered."""
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
    """Return text for a terminal: names in it, of units, hosts and files, may hold escapes."""
    return "\n".join(map(in_a_line, text.split("\n")))


def in_a_line(text: str) -> str:
    """Return text for one line of a terminal, whole."""
    return printable(text, most=len(text))


# Sizes as people read them. Owns the words; it must not know what has the size.

UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def nbytes_text(nbytes: int) -> str:
    """Return a size with the unit that fits it."""
    for unit, name in UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:.4g} {name}"
    return f"{nbytes} B"

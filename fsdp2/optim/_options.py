"""Options of param groups: what ranks compare of them, and what a step has changed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def beside_of(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in state_dict.items() if k not in ("state", "param_groups")}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def own_options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return options for one round: it may write to a tensor among them, once a step."""
    return {
        key: value.detach().clone() if isinstance(value, Tensor) else value
        for key, value in options_of(group).items()
    }


PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def text_of(group: Mapping[str, Any]) -> list[str]:
    """Return a param group's options for comparison: of what is no plain value, its class."""

    def text(value: Any) -> str:
        if isinstance(value, PLAIN):
            return repr(value)
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(text, value))}]"
        return type(value).__name__

    return [f"{key}={text(value)}" for key, value in sorted(options_of(group).items())]


def short(value: object) -> str:
    """Return a text that is compared over ranks, and shown where it differs."""
    text = repr(value)
    return text if len(text) < 400 else f"{text[:200]}... ({zlib.crc32(text.encode()):x})"


def equal(one: Any, other: Any) -> bool:
    """Compare options: numbers and tensors by value, others as they compare."""
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype is other.dtype and torch.equal(one.cpu(), other.cpu())
    try:
        return bool(one == other)
    except Exception:  # what does not compare, as arrays
        return repr(one) == repr(other)


def changes_of(group: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a step has changed, among them new ones."""
    return {
        key: value
        for key, value in options_of(own).items()
        if key not in group or not equal(group[key], value)
    }

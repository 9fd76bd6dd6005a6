"""Whether what is to be loaded fits: values a dtype, an optimizer's state the optimizer.

Owns both questions, which are asked before anything is changed. It must not know files, nor how
tensors are sharded.

[Note: what an optimizer keeps]
A class of ``torch.optim`` is asked: one of the same options steps a tiny parameter on zeros, and
what it then keeps is what a state must have. So no list of ours has to follow torch. A class of
somebody else may do anything in a step, and is not run: its state is compared with what it holds
now.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from fsdp2._core.base.errors import ConfigError

SLICE_NUMEL = 1 << 20


def require_representable(what: str, name: str, value: Tensor, dtype: torch.dtype) -> None:
    """Raise ConfigError if a cast would make another value, which is more than rounding.

    A fraction, NaN or a number that is too large for integers; a complex one for real numbers.
    """
    if value.dtype is dtype or value.numel() == 0 or dtype.is_complex:
        return
    if dtype.is_floating_point and not value.is_complex():
        return
    for piece in value.detach().reshape(-1).split(SLICE_NUMEL):
        same = piece.to(dtype).to(piece.dtype) == piece
        if not same.all():
            raise ConfigError(
                "FS603",
                f"{what}: {name} is {dtype} in the model, and the state has {piece[~same][0]} of "
                f"{value.dtype}, which it cannot hold. Nothing was changed.",
            )


def check_state(
    what: str,
    optimizer: Optimizer,
    groups: Iterable[Mapping[str, Any]],
    names: Iterable[list[str]],
    state: Mapping[str, Any],
) -> None:
    """Check an optimizer's state under names, values of which may be on meta.

    Args:
        groups: the options that each param group will have.
        names: the parameters of each.

    Raises:
        ConfigError: it is that of another optimizer; a value has another shape.
    """
    kinds: dict[str, Kept | None] = {}
    for group, own, current in zip(groups, names, optimizer.param_groups, strict=True):
        options = repr(sorted((k, v) for k, v in group.items() if k != "params"))
        for name, param in zip(own, current["params"], strict=True):
            fields = {k: v for k, v in state.get(name, {}).items() if v is not None}
            if not fields:
                continue
            key = f"{param.dim()} {options}"
            if key not in kinds:
                kinds[key] = _kept_after_a_step(_class_of(optimizer), group, param.dim())
            kept = kinds[key]
            held = {k: v for k, v in optimizer.state.get(param, {}).items() if v is not None}
            _check_keys(what, name, optimizer, fields, held, kept)
            for field, value in fields.items():
                like = _is_like(param, held.get(field)) if kept is None else kept[field]
                _check_shape(what, f"{field} of {name}", value, tuple(param.shape), like)


def _check_keys(
    what: str,
    name: str,
    optimizer: Optimizer,
    fields: Mapping[str, Any],
    held: Mapping[str, Any],
    kept: Kept | None,
) -> None:
    expected = held if kept is None else kept
    lacking = [key for key in expected if key not in fields]
    foreign = [key for key in fields if key not in expected]
    if (lacking and foreign) if kept is None else (lacking or foreign):
        parts = [f"lacks {', '.join(lacking)}"] if lacking else []
        parts += [f"has {', '.join(foreign)}"] if foreign else []
        raise ConfigError(
            "FS608",
            f"{what}: the state of {name} is not of {_class_of(optimizer).__name__}: it "
            f"{' and '.join(parts)}. Load it into an optimizer of the class that was saved, or "
            "leave the optimizer out. Nothing was changed.",
        )


def _check_shape(
    what: str, name: str, value: Any, shape: tuple[int, ...], is_like: bool | None
) -> None:
    is_tensor = isinstance(value, Tensor)
    if is_like is None:
        return
    if not is_like and is_tensor and value.numel() != 1:
        raise ConfigError(
            "FS608",
            f"{what}: {name} in the optimizer's state: expected a number, found a tensor of shape "
            f"{tuple(value.shape)}. Nothing was changed.",
        )
    if is_like and (not is_tensor or tuple(value.shape) != shape):
        found = tuple(value.shape) if is_tensor else type(value).__name__
        raise ConfigError(
            "FS608",
            f"{what}: {name} in the optimizer's state: expected a tensor of shape {shape}, as the "
            f"parameter's, found {found}. Nothing was changed.",
        )


def check_options(what: str, optimizer: Optimizer, saved: Iterable[Mapping[str, Any]]) -> None:
    """Check the options of param groups that were saved.

    Raises:
        ConfigError: they are those of another class of ``torch.optim``.
    """
    own = set(optimizer.defaults)
    for group in saved:
        lacking = sorted(own - set(group))
        foreign = sorted((set(group) - own) & _all_options())
        if lacking and foreign:
            raise ConfigError(
                "FS608",
                f"{what}: the state is not of {_class_of(optimizer).__name__}, which has "
                f"{', '.join(lacking[:4])}: it was saved from an optimizer with "
                f"{', '.join(foreign[:4])}. Load it into one of that class, or leave the optimizer "
                "out. Nothing was changed.",
            )


def _class_of(optimizer: Optimizer) -> type[Optimizer]:
    plain: type[Optimizer] = getattr(optimizer, "_plain_class", type(optimizer))
    return plain


@functools.cache
def _all_options() -> frozenset[str]:
    """Return every option of every optimizer of torch."""
    classes = [c for c in vars(torch.optim).values() if isinstance(c, type)]
    made = [c for c in classes if issubclass(c, Optimizer) and c is not Optimizer]
    names = {name for c in made for name in inspect.signature(c).parameters}
    return frozenset(names - {"params", "lr"})


Kept = Mapping[str, bool | None]
"""Of each value that a class keeps: True if it has the parameter's shape, False if it is one
number, None otherwise."""


def _kept_after_a_step(cls: type[Optimizer], group: Mapping[str, Any], dim: int) -> Kept | None:
    """Return what a class of torch keeps. See [Note: what an optimizer keeps]."""
    if not cls.__module__.startswith("torch.optim"):
        return None
    options = {k: v for k, v in group.items() if k in inspect.signature(cls).parameters}
    options.pop("params", None)
    for flag in ("foreach", "fused", "capturable", "differentiable"):
        if flag in options:
            options[flag] = False
    try:
        with torch.no_grad(), torch.device("cpu"):
            shape = (2,) * dim
            param = nn.Parameter(torch.zeros(shape, dtype=torch.float32, device="cpu"))
            param.grad = torch.zeros(shape, dtype=torch.float32, device="cpu")
            made = cls([param], **options)
            inspect.unwrap(cls.step)(made)  # without hooks that somebody put around steps
        found = made.state[param]
    except Exception:  # options that it refuses, a class that wants a closure or sparse gradients
        return None
    return {key: _is_like(param, value) for key, value in found.items() if value is not None}


def numbers_of(optimizer: Optimizer) -> frozenset[str]:
    """Return the fields of its state that a class of torch keeps as one number a parameter."""
    kept = _kept_after_a_step(_class_of(optimizer), optimizer.param_groups[0], 1) or {}
    return frozenset(field for field, is_like in kept.items() if is_like is False)


def _is_like(param: Tensor, value: Any) -> bool | None:
    if not isinstance(value, Tensor):
        return None
    if param.dim() and value.shape == param.shape:
        return True
    return False if value.numel() == 1 else None

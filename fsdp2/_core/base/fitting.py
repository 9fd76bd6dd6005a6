"""Validate data before loading: values against a dtype, and optimizer states against an optimizer.

Both checks run before anything is changed. Contains no file or sharding code.

[Note: what an optimizer keeps]
For a class of ``torch.optim``, we create an instance with the same options, and step it on a tiny
parameter. The resulting state has the fields that the installed torch version expects. The step of
a third-party class may have side effects, so it is not run: the loaded state is compared with the
optimizer's current state.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from fsdp2._core.base.errors import ConfigError

SLICE_NUMEL = 1 << 20


def require_representable(
    what: str,
    name: str,
    value: Tensor,
    dtype: torch.dtype,
) -> None:
    """Raise ConfigError if ``dtype`` cannot represent a value: a complex number in a real dtype, or
    NaN, a fraction or a too large number in an integer dtype. Floating-point dtypes may round."""
    if value.dtype is dtype or value.numel() == 0 or dtype.is_complex:
        return
    if dtype.is_floating_point and not value.is_complex():
        return
    for piece in value.detach().reshape(-1).split(SLICE_NUMEL):
        same = piece.to(dtype).to(piece.dtype) == piece
        if not same.all():
            raise ConfigError(
                "FS603",
                f"{what}: {name} is {dtype} in the model. This dtype cannot represent the state's "
                f"value {piece[~same][0]} ({value.dtype}). Nothing was changed.",
            )


def check_state(
    what: str,
    optimizer: Optimizer,
    groups: Iterable[Mapping[str, Any]],
    names: Iterable[list[str]],
    state: Mapping[str, Any],
) -> None:
    """Check an optimizer's state, a dict by parameter name (tensors may be on the meta device).
    Raise ConfigError if the state was saved from another optimizer, or if a shape is wrong.
    ``groups`` has the options, and ``names`` the parameter names, of each param group to load."""
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
            f"{what}: the state of {name} was not saved from {_class_of(optimizer).__name__}: it "
            f"{' and '.join(parts)}. Load it into an optimizer of the saved class, or omit the "
            "optimizer. Nothing was changed.",
        )


def _check_shape(
    what: str,
    name: str,
    value: Any,
    shape: tuple[int, ...],
    is_like: bool | None,
) -> None:
    found = tuple(value.shape) if isinstance(value, Tensor) else None
    if is_like is False and found is not None and value.numel() != 1:
        difference = f"a number, found a tensor of shape {found}"
    elif is_like and found != shape:
        kind = type(value).__name__ if found is None else found
        difference = f"a tensor of the parameter's shape, {shape}, found {kind}"
    else:
        return
    raise ConfigError(
        "FS608",
        f"{what}: expected {name} in the optimizer's state to be {difference}. Nothing was "
        "changed.",
    )


def check_options(what: str, optimizer: Optimizer, saved: Iterable[Mapping[str, Any]]) -> None:
    """Raise ConfigError if param groups were saved from another class of ``torch.optim``."""
    own = set(optimizer.defaults)
    for group in saved:
        lacking = sorted(own - set(group))
        foreign = sorted((set(group) - own) & _all_options())
        if lacking and foreign:
            raise ConfigError(
                "FS608",
                f"{what}: the state was not saved from {_class_of(optimizer).__name__}: expected "
                f"the options {', '.join(lacking[:4])}, found {', '.join(foreign[:4])}. Load it "
                "into an optimizer of the saved class, or omit the optimizer. Nothing was changed.",
            )


def _class_of(optimizer: Optimizer) -> type[Optimizer]:
    return cast("type[Optimizer]", getattr(optimizer, "_plain_class", type(optimizer)))


@functools.cache
def _all_options() -> frozenset[str]:
    classes = [c for c in vars(torch.optim).values() if isinstance(c, type)]
    made = [c for c in classes if issubclass(c, Optimizer) and c is not Optimizer]
    names = {name for c in made for name in inspect.signature(c).parameters}
    return frozenset(names - {"params", "lr"})


Kept = Mapping[str, bool | None]
"""For each state field: True if it has the parameter's shape, False if a number, else None."""


def _kept_after_a_step(cls: type[Optimizer], group: Mapping[str, Any], dim: int) -> Kept | None:
    """Return the state fields of a torch class. See [Note: what an optimizer keeps]."""
    if not cls.__module__.startswith("torch.optim"):
        return None
    options = {k: v for k, v in group.items() if k in inspect.signature(cls).parameters}
    options.pop("params", None)
    flags = options.keys() & {"foreach", "fused", "capturable", "differentiable"}
    options |= dict.fromkeys(flags, False)
    try:
        with torch.no_grad(), torch.device("cpu"):
            shape = (2,) * dim
            param = nn.Parameter(torch.zeros(shape, dtype=torch.float32, device="cpu"))
            param.grad = torch.zeros(shape, dtype=torch.float32, device="cpu")
            made = cls([param], **options)
            inspect.unwrap(cls.step)(made)  # bypasses hooks around steps
        found = made.state[param]
    except Exception:  # invalid options, or the class requires a closure or sparse gradients
        return None
    return {key: _is_like(param, value) for key, value in found.items() if value is not None}


def numbers_of(optimizer: Optimizer) -> frozenset[str]:
    """Return the state fields that a torch class keeps as one number per parameter."""
    kept = _kept_after_a_step(_class_of(optimizer), optimizer.param_groups[0], 1) or {}
    return frozenset(field for field, is_like in kept.items() if is_like is False)


def _is_like(param: Tensor, value: Any) -> bool | None:
    if not isinstance(value, Tensor):
        return None
    if param.dim() and value.shape == param.shape:
        return True
    return False if value.numel() == 1 else None

"""Base of the optimizer wrappers ``local``, ``whole`` and ``offload_states``."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from fsdp2._core.base import torch_compiler, torch_dtensor
from fsdp2._core.base.errors import check_flag, check_function

State = dict[str, Any]
Table = dict[Tensor, State]
Groups = list[dict[str, Any]]


class Wrapped:
    """Base of wrappers around ``_stepped_class``; ``_plain_class`` is the caller's class."""

    _plain_class: type[Optimizer]
    _stepped_class: type[Optimizer]
    param_groups: Groups

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        self = object.__new__(cls)
        self._start()
        return self

    def _start(self) -> None:
        """Set the attributes that torch's constructor and unpickling need."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients: set them to None, or to zero in place."""
        if set_to_none is True:
            cast(Any, super()).zero_grad(True)
        else:
            zero_gradients(self.param_groups, set_to_none)

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "state" in state:
            self.state = state.pop("state")
        cast(Any, super()).__setstate__(state)


_classes: dict[tuple[type, type[Optimizer]], Any] = {}


def wrapped_class(
    prefix: str,
    wrapper: type,
    cls: type[Optimizer],
    **more: Any,
) -> Any:
    if (wrapper, cls) not in _classes:
        names = {
            "_plain_class": getattr(cls, "_plain_class", cls),
            "_stepped_class": cls,
            "__doc__": cls.__doc__,
            "__module__": wrapper.__module__,
        }
        made = type(f"{prefix}{cls.__name__}", (wrapper, cls), {**names, **more})
        _classes[wrapper, cls] = made
    return _classes[wrapper, cls]


def plain_step(cls: type[Optimizer]) -> Any:
    """Return the class's own ``step``, without the hooks that torch runs around it."""
    step: Any = cls.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """Run ``step``'s closure in grad mode, and return its result, or None without a closure."""
    check_function("step", "closure", closure)
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def params_of(groups: Iterable[Mapping[str, Any]]) -> list[Tensor]:
    return list(itertools.chain.from_iterable(group["params"] for group in groups))


def as_table(table: Mapping[Tensor, State]) -> Table:
    return table if isinstance(table, defaultdict) else defaultdict(dict, table)


def in_order(table: Table, groups: Groups) -> Table:
    ordered = {param: table[param] for param in params_of(groups) if param in table}
    return defaultdict(dict, {**ordered, **table})


def write_back(group: dict[str, Any], own: Mapping[str, Any], *but: str) -> None:
    """Copy values that a step changed in ``own``, a copy of a param group, back to the group."""
    for key, value in own.items():
        if key != "params" and key not in but and group.get(key) is not value:
            group[key] = value


@torch_compiler.always_eager
def zero_gradients(groups: Iterable[Mapping[str, Any]], set_to_none: bool) -> None:
    """Zero gradients. torch's kernel does not accept a mixture of sharded and plain gradients."""
    check_flag("zero_grad", "set_to_none", set_to_none)
    for param in params_of(groups):
        grad = param.grad
        if grad is None:
            continue
        if grad.grad_fn is not None:
            grad.detach_()
        else:
            grad.requires_grad_(False)
        with torch.no_grad():
            torch_dtensor.local_part(grad).zero_()

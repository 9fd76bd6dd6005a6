"""What bodies do to several units, optimizers or parameters, one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

import fsdp2
from tests.kit.parity import whole


def shard_each(*units: Any, library: Any = fsdp2, **kwargs: Any) -> Any:
    """Shard units in this order, with the same arguments, and return the last: often the root."""
    made = None
    for unit in units:
        made = library.fully_shard(unit, **kwargs)
    return made


def units_of(model: nn.Module) -> list[Any]:
    """Return the modules that `fully_shard` was called on, the root first if it is one."""
    return [module for module in model.modules() if isinstance(module, fsdp2.FSDPModule)]


def reshard_all(model: nn.Module) -> None:
    for unit in units_of(model):
        unit.reshard()


def advance(*optimizers: Any) -> None:
    """Step, and clear the gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def assert_tensors(found: Iterable[tuple[str, Any]], expected: Mapping[str, Any]) -> None:
    """Assert that tensors are equal to those of their names, each of them whole."""
    for name, value in found:
        assert torch.equal(whole(value), whole(expected[name])), name


def assert_same_bits(actual: nn.Module, expected: nn.Module) -> None:
    """Assert that the parameters of two models are equal, each of them whole."""
    for one, other in zip(actual.parameters(), expected.parameters(), strict=True):
        assert torch.equal(whole(one), whole(other))

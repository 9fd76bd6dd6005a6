"""What a call of ``fully_shard`` leaves alone: ``ignored_params`` and ``ignored_states``.

Owns how the two are read. It must not know who asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch.nn as nn
from torch import Tensor

from fsdp2._base.arguments import described
from fsdp2._base.errors import ConfigError, ConfigTypeError
from fsdp2._base.names import class_name
from fsdp2._engine.tree import unit_of


@dataclass(frozen=True)
class Ignored:
    """Parameters and buffers (``tensors``), and ``modules`` with all that is in them."""

    tensors: frozenset[Tensor]
    modules: frozenset[nn.Module]

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self.tensors

    @staticmethod
    def of(params: object, states: object) -> Ignored:
        """Read the arguments of ``fully_shard``.

        Raises:
            ConfigError: something else than parameters among ``params``; among ``states`` something
                else than modules and tensors, both of them, or a module that is sharded already.
        """
        tensors: set[Tensor] = set(_params(params))
        found = _listed(states)
        modules = [item for item in found if isinstance(item, nn.Module)]
        own = [item for item in found if isinstance(item, Tensor)]
        wrong = [item for item in found if not isinstance(item, nn.Module | Tensor)]
        if wrong:
            raise ConfigTypeError(
                "FS101",
                "fully_shard: expected ignored_states to hold modules, or parameters and buffers, "
                f"found {described(wrong[0])} in it. Pass the modules or tensors themselves, not "
                "their names.",
            )
        if modules and own:
            raise ConfigError(
                "FS212",
                f"fully_shard: found a {class_name(modules[0])} and a "
                f"{type(own[0]).__name__} of shape {tuple(own[0].shape)} in ignored_states. Pass "
                "modules only, or tensors only: for a mixture pass "
                "[*module.parameters(), *module.buffers()] in the place of each module.",
            )
        inside = {child for module in modules for child in module.modules()}
        for child in inside:
            if unit_of(child) is not None:
                raise ConfigError(
                    "FS212",
                    f"fully_shard: found a {class_name(child)} in ignored_states that "
                    "fully_shard was applied to, so its parameters are sharded already. "
                    "Leave it out: a call never takes what an earlier one took.",
                )
            tensors.update(p for p in child._parameters.values() if p is not None)
            tensors.update(b for b in child._buffers.values() if b is not None)
        return Ignored(frozenset(tensors.union(own)), frozenset(inside))


def _listed(states: object) -> list[object]:
    if states is None:
        return []
    is_one = isinstance(states, nn.Module | Tensor) or not isinstance(states, Iterable)
    return [states] if is_one else list(states)  # type: ignore[call-overload]  # an Iterable


def _params(ignored: object) -> list[nn.Parameter]:
    params = []
    for param in _listed(ignored):
        if not isinstance(param, nn.Parameter):
            raise ConfigTypeError(
                "FS101",
                f"fully_shard: expected ignored_params to be a set of nn.Parameter, found "
                f"{type(param).__name__} in it. Pass the parameters themselves; modules and "
                "buffers go into ignored_states.",
            )
        params.append(param)
    return params

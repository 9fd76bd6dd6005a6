"""Which modules a policy picks: classes, a function, or a policy of torch's.

A policy is asked about each module below a root once. It must not know what is done with them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.nn as nn
from torch import Tensor

from fsdp2._core.base import torch_modules
from fsdp2._core.base.arguments import described, wrong_type
from fsdp2._core.base.errors import ConfigError, ConfigTypeError
from fsdp2._core.base.names import class_name
from fsdp2._core.base.warn import warn
from fsdp2._core.engine.tree import unit_of

# What a call of ``fully_shard`` leaves alone: ``ignored_params`` and ``ignored_states``.


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


Choice = dict[str, Any]
Chosen = dict[nn.Module, Choice]
WrapPolicy = (
    Collection[type[nn.Module]]
    | torch_modules.CustomPolicy
    | Callable[[nn.Module], bool | Choice]
    | Callable[[nn.Module, bool, int], bool]
)


class Asking(NamedTuple):
    """Who asks a policy, for messages: a function, what comes of no module, what is an answer."""

    who: str
    if_none: str
    answers: str


def run_policy(policy: object, model: nn.Module, ignored: Ignored, asking: Asking) -> Chosen:
    """Ask the policy about every module below the root."""
    if isinstance(policy, torch_modules.CustomPolicy):
        return _ask(torch_modules.custom_policy_function(policy), model, ignored, asking)
    is_text = isinstance(policy, str | bytes | Tensor)
    if isinstance(policy, Iterable) and not is_text and not callable(policy):
        classes = tuple(policy)
        wrong = [c for c in classes if not (isinstance(c, type) and issubclass(c, nn.Module))]
        if wrong or not classes:
            found = f"{described(wrong[0])} in it" if wrong else "none"
            raise ConfigTypeError(
                "FS101",
                f"{asking.who}: expected classes of modules as policy, found {found}. Pass for "
                "example {TransformerBlock}.",
            )
        if not any(isinstance(module, classes) for module in model.modules()):
            names = ", ".join(sorted(c.__name__ for c in classes))
            _warn_of_nothing(model, f"of class {names}", asking)
        return _ask(lambda module: isinstance(module, classes), model, ignored, asking)
    if isinstance(policy, type | nn.Module) or not callable(policy):
        expected = "a set of module classes, a function, or a policy of torch.distributed.fsdp.wrap"
        raise wrong_type(asking.who, "policy", expected, policy)
    if _is_recursive(policy):
        chosen: Chosen = {}
        _recurse(policy, model, ignored, chosen)
        name = torch_modules.name_of_class_policy(policy)
        picks = functools.partial(policy, recurse=False, nonwrapped_numel=0)
        if name is not None and not any(picks(module=module) for module in model.modules()):
            _warn_of_nothing(model, f"what {name} names", asking)
        return chosen
    return _ask(policy, model, ignored, asking)


def _warn_of_nothing(model: nn.Module, what: str, asking: Asking) -> None:
    warn(
        "FS228",
        f"{asking.who}: no module of the {class_name(model)} is {what}, so {asking.if_none}. "
        "Pass the classes of the model's blocks.",
    )


def _is_recursive(policy: Callable[..., Any]) -> bool:
    """True for a policy of FSDP1, which takes ``(module, recurse, nonwrapped_numel)``."""
    try:
        inspect.signature(policy).bind(module=None, recurse=True, nonwrapped_numel=0)
    except (TypeError, ValueError):
        return False
    return True


def _ask(
    function: Callable[[nn.Module], Any], model: nn.Module, ignored: Ignored, asking: Asking
) -> Chosen:
    chosen: Chosen = {}
    for name, module in model.named_modules():
        if module is model or module in ignored.modules:
            continue
        answer = function(module)
        if not isinstance(answer, bool | dict):
            raise ConfigError(
                "FS213",
                f"{asking.who}: the policy returned {described(answer)} for {name}. Return "
                f"{asking.answers}.",
            )
        if answer:
            chosen[module] = answer if isinstance(answer, dict) else {}
    return chosen


def _recurse(
    policy: Callable[..., Any],
    module: nn.Module,
    ignored: Ignored,
    chosen: Chosen,
    is_root: bool = True,
) -> int:
    """Ask a recursive policy; return how many elements are in units at or below ``module``."""
    numel = sum(param.numel() for param in module.parameters() if param not in ignored)
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return 0
    taken = 0
    for child in module.children():
        if child not in ignored.modules and child not in chosen:
            taken += _recurse(policy, child, ignored, chosen, is_root=False)
    if is_root or not policy(module=module, recurse=False, nonwrapped_numel=numel - taken):
        return taken
    chosen[module] = {}
    return numel

"""What is put on modules so that their forwards are steps of units.

Owns the choice of hooks, and methods that unshard as ``forward`` does. What hooks do is in
``step``.
"""

from __future__ import annotations

from typing import Any

import torch.nn as nn

from fsdp2._core.base import torch_compiler
from fsdp2._core.engine.between_steps import StateHooks
from fsdp2._core.engine.step import ForwardHooks, forward_raised, post_forward, pre_forward
from fsdp2._core.engine.tree import UNIT_ATTRIBUTE, Unit


class ForwardMethod:
    """A method of a module that unshards as ``forward`` does."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module = module
        self.name = name
        self.replaced = module.__dict__.get(name)

    @torch_compiler.inlined_or_eager
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit = self.module.__dict__[UNIT_ATTRIBUTE]
        if unit.runner is not None:
            return unit.runner.call(self._run, args, kwargs)
        return self._call_eagerly(unit, args, kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if self.replaced is not None:
            return self.replaced(*args, **kwargs)
        return getattr(type(self.module), self.name)(self.module, *args, **kwargs)

    @torch_compiler.never_traced
    def _call_eagerly(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        depth = len(unit.calls.running)
        try:
            args, kwargs = pre_forward(unit, args, kwargs)
            return post_forward(unit, self.module, self._run(*args, **kwargs))
        except BaseException:
            forward_raised(unit, depth)
            raise


def register_hooks(unit: Unit) -> None:
    """Put the hooks onto a unit's modules, ours first before forward and last after it."""
    hooks = ForwardHooks(unit)
    for module in unit.modules:
        module.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True)
        module.register_forward_hook(hooks.after, prepend=False)
    StateHooks(unit).register()

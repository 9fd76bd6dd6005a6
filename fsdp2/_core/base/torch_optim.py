"""What torch's schedulers of learning rates leave on an optimizer: a ``step`` of its own.

A scheduler puts a function on the optimizer that notes a step, and runs the step of the class which
the optimizer had then. ``_wrapped_by_lr_sched`` marks it, ``_opt_called`` is the note; both are
private in torch 2.11 to 2.15, and nothing public tells of them.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch.optim import Optimizer


def steps_as_its_class(optimizer: Optimizer) -> bool:
    """True if an optimizer has no ``step`` of its own, or one that a scheduler put there."""
    own = vars(optimizer).get("step")
    return own is None or getattr(own, "_wrapped_by_lr_sched", False)


def step_as_new_class(optimizer: Any) -> None:
    """Let what a scheduler put on an optimizer run the step of the class that it has now."""
    if "step" not in vars(optimizer):
        return
    reference = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        found: Any = reference()
        found._opt_called = True
        return type(found).step(found, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # of a function
    optimizer.step = step

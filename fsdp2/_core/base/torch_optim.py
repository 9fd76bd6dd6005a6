"""Private torch API for optimizers and learning rate schedulers; the latter wrap ``step`` methods.

A scheduler's wrapper records each call, and runs the ``step`` of the optimizer's class at the time
of wrapping. ``_wrapped_by_lr_sched`` marks the wrapper, and ``_opt_called`` is the record.
Both are private in torch 2.11 to 2.15, without public equivalents.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch.optim import Optimizer


def steps_as_its_class(optimizer: Optimizer) -> bool:
    """Return True if an optimizer's ``step`` is its class's method or a scheduler's wrapper."""
    own = vars(optimizer).get("step")
    return own is None or getattr(own, "_wrapped_by_lr_sched", False)


def expect_eager_steps(optimizer: Any) -> None:
    """Suppress torch's warning about eager steps of a capturable optimizer (torch 2.11 to 2.15)."""
    optimizer._warned_capturable_if_run_uncaptured = True


def step_as_new_class(optimizer: Any) -> None:
    """Make a scheduler's wrapper run the ``step`` of the optimizer's current class."""
    if "step" not in vars(optimizer):
        return
    reference = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        found: Any = reference()
        found._opt_called = True
        return type(found).step(found, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # an attribute of a function
    optimizer.step = step

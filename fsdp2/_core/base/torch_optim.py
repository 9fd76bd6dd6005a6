"""Private torch API for optimizers, and learning rate schedulers, which wrap their ``step``.

A scheduler's wrapper records the call and runs the ``step`` of the class at the time of wrapping.
``_wrapped_by_lr_sched`` marks it, and ``_opt_called`` is the record; both are private in torch 2.11
to 2.15, without public equivalents.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from torch.optim import Optimizer


def steps_as_its_class(optimizer: Optimizer) -> bool:
    """Return True if an optimizer's ``step`` is its class's, or a scheduler's wrapper."""
    own = vars(optimizer).get("step")
    return own is None or getattr(own, "_wrapped_by_lr_sched", False)


def expect_eager_steps(optimizer: Any) -> None:
    """Suppress torch's warning if a capturable optimizer steps eagerly (torch 2.11 to 2.15)."""
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

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # of a function
    optimizer.step = step

"""Copies of parameters and states that a device makes beside compute: who writes waits for them.

Owns the events of these copies, and the hook of all optimizers that waits. It must not know what is
copied.

[Note: a copy of the moment]
What is saved in the background is the state at the moment of the call. On a device the copies run
on a stream of their own, beside the forward and the backward that come next; these only read what
is copied. The first write is an optimizer's step, as a rule. So before each step of any optimizer
of torch, and before each of our own functions that writes to parameters, the current stream waits
for the copies. The host waits for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class _Pending:
    """The copies that may be under way, and the hook while there are any."""

    events: list[torch.Event] = []  # noqa: RUF012  # one for the process
    hook: Any = None


def note_copies(event: torch.Event) -> None:
    """Let who writes next wait for an event of this device."""
    _Pending.events.append(event)
    if _Pending.hook is None:
        _Pending.hook = register_optimizer_step_pre_hook(_before_a_step)


def wait_for_copies() -> None:
    """Let what the current stream does next come after the copies."""
    for event in _Pending.events:
        event.wait()
    _Pending.events.clear()
    if _Pending.hook is not None:
        _Pending.hook.remove()
        _Pending.hook = None


def _before_a_step(*_: object) -> None:
    wait_for_copies()

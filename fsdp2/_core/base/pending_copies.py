"""Asynchronous copies of parameters and states: later writes wait for their events.

[Note: a copy of the moment]
A background save captures the state at the time of the call. On a device the copies run on a
separate stream and overlap the next forward and backward, which only read the copied tensors. So
before each step of any torch optimizer, and before each of our functions that write to parameters,
the current stream (not the host) waits for the copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class _Pending:
    """Events of copies in flight, and the hook while there are any."""

    events: list[torch.Event] = []  # noqa: RUF012  # one for the process
    hook: Any = None


def note_copies(event: torch.Event) -> None:
    """Make later writes wait for an event of this device."""
    _Pending.events.append(event)
    if _Pending.hook is None:
        _Pending.hook = register_optimizer_step_pre_hook(wait_for_copies)


def wait_for_copies(*_: object) -> None:
    """Order all later work of the current stream after the copies; also a hook before a step."""
    for event in _Pending.events:
        event.wait()
    _Pending.events.clear()
    if _Pending.hook is not None:
        _Pending.hook.remove()
        _Pending.hook = None

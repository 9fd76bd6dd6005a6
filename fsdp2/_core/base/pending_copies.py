"""Asynchronous copies of parameters and states: later writes wait for the copies' events.

[Note: a copy of the moment]
A background save captures the state at the time of the call. On a device, the copies run on a
separate stream and overlap the next forward and backward, which only read the copied tensors. The
current stream (not the host) waits for the copies before each step of a torch optimizer, and before
any function of fsdp2 writes to parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook


class _Pending:
    """Events of copies in flight, and an optimizer hook, registered while copies are in flight."""

    events: list[torch.Event] = []  # noqa: RUF012  # one list per process
    hook: Any = None


def note_copies(event: torch.Event) -> None:
    """Make later writes wait for an event that was recorded after copies."""
    _Pending.events.append(event)
    if _Pending.hook is None:
        _Pending.hook = register_optimizer_step_pre_hook(wait_for_copies)


def wait_for_copies(*_: object) -> None:
    """Order later work of the current stream after the copies. Also runs as a pre-step hook."""
    for event in _Pending.events:
        event.wait()
    _Pending.events.clear()
    if _Pending.hook is not None:
        _Pending.hook.remove()
        _Pending.hook = None

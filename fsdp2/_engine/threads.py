"""The thread that runs steps, and others that look at the state between them.

Owns who may look when. It must not know what a step is.

[Note: threads]
One thread runs steps. Another one may look at the state between them (``state_dict``): it holds the
lock meanwhile, and a step that begins waits for it. During a step it gets an error. What ranks do
together has one order on all of them, so only the thread of the steps may begin it.
"""

from __future__ import annotations

import threading

from fsdp2._base import torch_autograd


class StepThread:
    """The thread that runs the steps of one tree. See [Note: threads]."""

    def __init__(self) -> None:
        self.ident = 0  # of the thread that ran the last forward; 0: none did
        self.lock = threading.RLock()  # taken by who looks at parameters between steps

    @property
    def is_another(self) -> bool:
        """True if steps run in another thread than this one, and that lives."""
        if self.ident in (0, threading.get_ident()):
            return False
        if torch_autograd.graph_task_id() != -1:  # of a device, autograd's thread is in that step
            return False
        return any(one.ident == self.ident for one in threading.enumerate())

"""Handling of Ctrl-C. Imported before torch, so that it applies from the start; stdlib only.

In the process that the user starts, Ctrl-C ends the program with status 130. In a rank that trains,
it only sets a flag: the loop reads `is_requested` once a step, and all ranks agree on the step
after which they stop. A rank that does not train yet has nothing to save, and ends: it may be
waiting for a rank that is gone. torchrun passes SIGINT and SIGTERM on to the ranks and waits for
them.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
STATUS = 128 + signal.SIGINT

_requested = False


def is_rank() -> bool:
    """Return True in a process started by torchrun."""
    return "LOCAL_RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_requested() -> bool:
    """Return True once this rank was asked to stop."""
    return _requested


def _ask(signum: int, frame: FrameType | None) -> None:
    global _requested
    _requested = True


def _end(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


def only_ask() -> None:
    """Make signals set the flag of this rank instead of ending it."""
    for number in SIGNALS:
        signal.signal(number, _ask)


for _signal in SIGNALS:
    signal.signal(_signal, signal.SIG_DFL if is_rank() else _end)

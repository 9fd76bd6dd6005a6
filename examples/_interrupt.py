"""Handling of Ctrl-C. Imported before torch, so that it is active from the start; stdlib only.

In the process that the user starts, Ctrl-C exits with status 130. In a rank that is training, it
only sets a flag: the training loop reads `is_requested` in every step, and all ranks stop after the
same step. A rank that has not begun to train has nothing to save, so it exits: it may be waiting
for a rank that has exited. torchrun forwards SIGINT and SIGTERM to the ranks and waits for them.
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
    """Return True if this rank has received a signal to stop."""
    return _requested


def _ask(signum: int, frame: FrameType | None) -> None:
    global _requested
    _requested = True


def _end(signum: int, frame: FrameType | None) -> None:
    sys.exit(128 + signum)


def only_ask() -> None:
    """Make signals set this rank's flag instead of ending the process."""
    for number in SIGNALS:
        signal.signal(number, _ask)


for _signal in SIGNALS:
    signal.signal(_signal, signal.SIG_DFL if is_rank() else _end)

"""When Ctrl-C takes effect: not while other ranks wait for what this one sends.

Owns the handler of SIGINT during operations of all ranks outside of steps. It must not know ranks.

[Note: Ctrl-C waits]
Python raises KeyboardInterrupt wherever it is: between two collectives of a save it would leave the
other ranks in the second one, and what they meet there next is another operation. So while such an
operation runs, Ctrl-C is kept, until ranks tell each other of failures (then all of them raise), or
until the operation is done. A second one is raised at once. Only Python's own handler is replaced,
and only in the main thread, where it runs: who has a handler of their own decides for themselves.
"""

from __future__ import annotations

import contextlib
import importlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

_plain: Any = importlib.import_module("_signal")
"""What ``signal`` wraps, which looks each handler up among its enums: ten times as long."""


class _Kept:
    """Whether Ctrl-C was pressed, and has not been raised."""

    is_pending = False


def _keep(number: int, frame: FrameType | None) -> None:
    if _Kept.is_pending:
        signal.default_int_handler(number, frame)
    _Kept.is_pending = True


@contextlib.contextmanager
def kept_interrupts(*, leave_pending: bool = False) -> Iterator[None]:
    """Keep Ctrl-C inside, and raise it at the end, unless ranks were told of it before.

    ``leave_pending``: whoever calls goes on to tell them. Inside another one it does nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or _plain.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    _plain.signal(signal.SIGINT, _keep)
    try:
        yield
    finally:
        _plain.signal(signal.SIGINT, signal.default_int_handler)
        if not leave_pending:
            interrupt = take_interrupt()
            if interrupt is not None:
                raise interrupt


def take_interrupt() -> KeyboardInterrupt | None:
    """Return what was kept, for the caller to raise."""
    if not _Kept.is_pending or threading.current_thread() is not threading.main_thread():
        return None
    _Kept.is_pending = False
    return KeyboardInterrupt()

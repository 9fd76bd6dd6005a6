"""Defer Ctrl-C in collective operations outside of steps, while other ranks wait for this rank.

[Note: Ctrl-C waits]
A KeyboardInterrupt between two collectives of a save would leave the other ranks waiting in the
second one. Therefore, Ctrl-C during such an operation is deferred until the ranks exchange failures
(then all of them raise), or until the operation completes. A second Ctrl-C is raised immediately.
Only Python's default handler is replaced, not a user's handler, and only in the main thread, where
handlers run.
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
"""``signal`` without the conversions to enums, which make calls ten times slower."""


class _Kept:
    """Whether a Ctrl-C is pending."""

    is_pending = False


def _keep(number: int, frame: FrameType | None) -> None:
    if _Kept.is_pending:
        signal.default_int_handler(number, frame)
    _Kept.is_pending = True


@contextlib.contextmanager
def kept_interrupts(*, leave_pending: bool = False) -> Iterator[None]:
    """Defer Ctrl-C inside the context, and raise it on exit, unless it was reported to other ranks
    or is left pending for the caller to report. Nested contexts are no-ops."""
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
    """Return and clear a pending Ctrl-C, for the caller to raise."""
    if not _Kept.is_pending or threading.current_thread() is not threading.main_thread():
        return None
    _Kept.is_pending = False
    return KeyboardInterrupt()

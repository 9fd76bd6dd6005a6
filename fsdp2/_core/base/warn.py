"""Warnings: all ranks issue one, and one of them shows it.

Most warnings come on every rank, and as many copies as there are ranks hide what they say. So the
first rank shows one, and another rank shows only what the first one does not come to, as a warning
about one stage of a pipeline.

All ranks issue it all the same: where filters make errors of warnings, every rank must raise, or
the others would wait for it. And a rank whose program looks at warnings sees its own: one that
records them (``catch_warnings(record=True)``, ``pytest.warns``), replaced ``warnings.showwarning``
(as ``logging.captureWarnings`` does), or has a filter for this warning.

``FSDP2_WARNINGS=every_rank`` shows them everywhere, as where ranks are looked at one by one.
"""

from __future__ import annotations

import inspect
import io
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fsdp2._core.base import torch_comm
from fsdp2._core.base.errors import coded

EVERY_RANK = "every_rank"

PATIENCE_S = 0.5
"""How long another rank waits, once for each text, for the first one to show it."""

NOT_USERS = ("fsdp2", "torch", "contextlib")
"""Packages whose lines say nothing to a user. The last one runs our context managers."""

_shows: weakref.WeakKeyDictionary[Any, dict[str, bool]] = weakref.WeakKeyDictionary()
"""By process group, of which a job may make several one after the other: texts that came up, and
whether this rank shows them."""

_unreachable: weakref.WeakSet[Any] = weakref.WeakSet()
"""Process groups whose store cannot be asked: torch writes of each attempt at length."""


def warn(code: str, text: str, category: type[Warning] = UserWarning) -> None:
    """Do what ``warnings.warn`` does, on one rank for all. No rank needs another one for it.

    It names the line of the user's that led here.

    Args:
        code: of a paragraph in ``fsdp2/_core/errors``.
        text: what to show. Ranks that give the same one show it once.
        category: of the warning.
    """
    message, level = coded(code, text), _level_outside()
    if _is_shown_here(message) or _has_filter(message, category):
        warnings.warn(message, category, stacklevel=level)
        return
    silence = warnings.showwarning = _Silence(warnings.showwarning)
    try:
        warnings.warn(message, category, stacklevel=level)
    finally:
        silence.is_over = True
        if warnings.showwarning is silence:  # another thread may have put something there
            warnings.showwarning = silence.shown


def _level_outside() -> int:
    """Return how far above ``warn`` the first function is that is neither ours nor torch's."""
    frame, level = inspect.currentframe(), -1  # this function is one below ``warn``
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in NOT_USERS:
            break
        frame, level = frame.f_back, level + 1
    return level + 1


def _has_filter(message: str, category: type[Warning]) -> bool:
    """Return True if the program has a filter for a warning. Python has none for ours."""
    return any(
        issubclass(category, of) and (text is None or text.match(message))
        for _, text, of, _, _ in warnings.filters
    )


class _Silence:
    """In the place of ``warnings.showwarning``: prints nothing of this thread, until it is over.

    Another thread may find it there, and put it back when it is long over.
    """

    shown: Callable[..., Any]
    is_over: bool

    def __init__(self, shown: Callable[..., Any]) -> None:
        while isinstance(shown, _Silence) and shown.is_over:
            shown = shown.shown
        self.shown = shown
        self.thread = threading.get_ident()
        self.is_over = False

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if self.is_over or self.thread != threading.get_ident():
            self.shown(*args, **kwargs)
            return
        shown = self.shown
        while isinstance(shown, _Silence):  # of another thread
            shown = shown.shown
        if shown.__module__ == "warnings":
            # Python's own: it prints to a file that nobody reads, or appends to what is recorded
            shown(*args[:4], io.StringIO())
        else:
            shown(*args, **kwargs)


def _is_shown_here(message: str) -> bool:
    if os.environ.get("FSDP2_WARNINGS") == EVERY_RANK or not dist.is_initialized():
        return True
    group = dist.group.WORLD
    shows = _shows.setdefault(group, {})
    if message not in shows:
        shows[message] = group in _unreachable or _is_first(message)
    return shows[message]


def _is_first(message: str) -> bool:
    """Ask the ranks' store, which answers at once. Whoever cannot ask shows the warning."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks == 1:
        return True
    key = f"fsdp2/warned/{message}"
    try:
        store = torch_comm.default_store()
        if rank == 0:
            store.set(key, "")
            return True
        deadline = time.monotonic() + PATIENCE_S
        while not store.check([key]):
            if time.monotonic() > deadline:
                return bool(store.add(f"{key}/elsewhere", 1) == 1)
            time.sleep(0.02)
    except Exception:  # a store of a job that ends, or one that cannot do this
        _unreachable.add(dist.group.WORLD)
        return True
    return False

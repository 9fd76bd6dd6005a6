"""Warnings: all ranks issue a warning, but only one rank shows it.

Rank 0 shows all warnings that it issues. Other ranks show only those that rank 0 does not issue,
such as a warning about one stage of a pipeline. A rank that does not show a warning still issues it
if a filter applies: if filters turn warnings into errors, every rank must raise, or ranks would
wait for each other. A program that records warnings (``catch_warnings(record=True)``,
``pytest.warns``) or replaces ``warnings.showwarning`` (as ``logging.captureWarnings`` does)
receives all warnings of its rank, and its filters apply on every rank.
``FSDP2_WARNINGS=every_rank`` shows warnings on every rank.
"""

from __future__ import annotations

import inspect
import io
import os
import time
import warnings
import weakref
from typing import Any

import torch.distributed as dist

from fsdp2._core.base import torch_comm
from fsdp2._core.base.errors import coded

PATIENCE_S = 0.5  # how long other ranks wait for rank 0 to show a warning, once per text
NOT_USERS = ("fsdp2", "torch", "contextlib")  # contextlib runs our context managers

_shows: weakref.WeakKeyDictionary[Any, dict[str, bool]] = weakref.WeakKeyDictionary()
"""For each world (a job may create several): issued texts, and whether this rank shows them."""

_unreachable: weakref.WeakSet[Any] = weakref.WeakSet()
"""Process groups whose store failed: torch would log a long message at each new attempt."""


def warn(code: str, text: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning like ``warnings.warn``, but show it on only one of the ranks that pass the
    same text. Wait at most ``PATIENCE_S`` for rank 0. The warning points to the calling line of
    user code."""
    message, show = coded(code, text), warnings.showwarning
    frame, level = inspect.currentframe(), 1
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in NOT_USERS:
            break
        frame, level = frame.f_back, level + 1
    is_pythons = show.__module__ in ("warnings", "_py_warnings")  # the latter since Python 3.14
    if _is_shown_here(message) or _has_filter(message, category) or not is_pythons:
        warnings.warn(message, category, stacklevel=level)
        return
    # it appends to a log if the program records warnings, and otherwise prints to the file
    file, line = ("sys", 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    show(category(message), category, file, line, io.StringIO())


def _has_filter(message: str, category: type[Warning]) -> bool:
    """Return True if the program has a filter for a warning; Python's default ones do not match."""
    return any(
        issubclass(category, of) and (text is None or text.match(message))
        for _, text, of, _, _ in warnings.filters
    )


def _is_shown_here(message: str) -> bool:
    if os.environ.get("FSDP2_WARNINGS") == "every_rank" or not dist.is_initialized():
        return True
    group = dist.group.WORLD
    shows = _shows.setdefault(group, {})
    if message not in shows:
        shows[message] = group in _unreachable or _is_first(message)
    return shows[message]


def _is_first(message: str) -> bool:
    """Return True if no other rank shows the warning, or if the ranks' store cannot be queried."""
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
    except Exception:  # the job is ending, or the store lacks an operation
        _unreachable.add(dist.group.WORLD)
        return True
    return False

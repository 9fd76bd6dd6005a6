"""How much memory a call takes on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_of(run: Callable[[], Any]) -> int:
    """Return the most bytes that the CPU allocator gave out above the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    live = highest = 0
    assert profiler.profiler is not None
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            highest = max(highest, live)
    return highest

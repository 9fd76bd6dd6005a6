"""The reductions of a tree that are in flight, and how many of them there may be.

It must not know units, or when a group reduces: the runtime says so.
"""

from __future__ import annotations

from collections import deque

from fsdp2._comm.streams import StepContext
from fsdp2._param_group.group import ParamGroup
from fsdp2._param_group.reduction import Reduction

SMALL_NBYTES = 1 << 20
"""Bytes of a reduction's input below which its memory does not matter."""


class ReductionQueue:
    """Reductions in flight, the oldest first."""

    def __init__(self, context: StepContext, is_large: bool) -> None:
        self._context = context
        self._is_large = is_large  # a group of the tree has inputs whose memory matters
        self._running: deque[Reduction] = deque()

    def __bool__(self) -> bool:
        return bool(self._running)

    def start(self, group: ParamGroup, with_graph: bool) -> bool:
        """Reduce a group's gradients; False if they only accumulate, as its sync is off."""
        while self._is_full_for(group):
            self._complete_oldest()
        reduction = group.reduce(with_graph)
        if reduction is None:
            return False
        reduction.start()
        if not self._context.streams.async_op:
            reduction.advance()
            reduction.finish()
        self._running.append(reduction)
        if group.settings.input_buffers is None and group.settings.overlap.reductions == 0:
            self._complete_oldest()
        return True

    def _is_full_for(self, group: ParamGroup) -> bool:
        """True if the oldest reduction must end first: a group has one at a time, and all few."""
        running = self._running
        if not running:
            return False
        settings = group.settings
        limit = settings.input_buffers
        if limit is None:  # one more if that takes next to nothing: it waits for the link only
            limit = settings.overlap.reductions + (running[0].nbytes < SMALL_NBYTES)
        if len(running) >= limit:
            return True
        for reduction in running:  # noqa: SIM110  # each turn of a generator is a call
            if reduction.owner is group.reducer:
                return True
        return False

    def _complete_oldest(self) -> None:
        reduction = self._running.popleft()
        if self._context.streams.async_op:
            reduction.advance()
            reduction.finish()
        reduction.wait()

    def free_done(self) -> None:
        """Free what reductions hold that have ended: at other times on other ranks, so no more."""
        if self._is_large and self._context.streams.async_op:
            for reduction in self._running:
                reduction.free_if_done()

    def wait(self) -> None:
        """Make every reduced gradient safe to use."""
        if self._context.streams.async_op:
            for reduction in self._running:
                reduction.advance()
            for reduction in self._running:
                reduction.finish()
        while self._running:
            self._running.popleft().wait()

    def drop(self) -> None:
        """Wait for what is in flight; gradients that are not set by then never are."""
        while self._running:
            self._running.popleft().abandon()

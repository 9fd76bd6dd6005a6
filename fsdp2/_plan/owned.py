"""A step of owners among ranks that are not there: the optimizer's own rounds, on a clock.

Owns the crew that carries nothing. The rank that is planned has the place of its number; owners are
chosen so that the first rank is among the busiest.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp2._base import torch_modes
from fsdp2._comm.process_mesh import Grid
from fsdp2._plan.clock import Clock
from fsdp2._plan.lanes import KERNELS, LANES, LaneClock
from fsdp2._plan.watch import COMMUNICATION, MemoryWatch
from fsdp2._transfer.crew import Crew
from fsdp2._transfer.owners import Route
from fsdp2.optim._owned_step import WholeOptimizer


def imagine_crews(
    optimizer: WholeOptimizer, watch: MemoryWatch, clock: Clock | LaneClock | None
) -> None:
    """Let an optimizer exchange matrices with ranks that do not exist."""

    def crew_of(mesh: DeviceMesh) -> Crew:
        if mesh.size() == 1:
            return Crew.alone()
        with torch_modes.hidden_from_modes():  # numbers of ranks are no fakes
            ranks = sorted(mesh.mesh.flatten().tolist())
            me = ranks.index(int(mesh.mesh[tuple(mesh.get_coordinate() or ())]))
        carry = functools.partial(_carry, watch, clock, len(ranks), ranks[1] - ranks[0])
        return Crew(tuple(ranks), me, Grid(()), carry=carry)

    optimizer._crew_of = crew_of


def _carry(
    watch: MemoryWatch,
    clock: Clock | LaneClock | None,
    ranks: int,
    stride: int,
    received: Tensor,
    sent: Tensor,
    way: Route,
) -> Any:
    """Take the time of an all-to-all, and its memory."""
    for buffer in (received, sent):
        watch.tag(buffer, COMMUNICATION)
    if clock is None:
        return None
    # a rank's link carries what it sends to others, and what it receives, both ways at a time
    most = max(sum(way.sent_nbytes), sum(way.received_nbytes))
    if isinstance(clock, Clock):
        return clock.send("all_to_all", "matrices", most, ranks, stride)
    ready = clock.mark(KERNELS)
    clock.hold_back(LANES["all_reduce"], ready)
    with clock.on(LANES["all_reduce"]):
        clock.send("all_to_all", "matrices", most, ranks, stride)
        over = clock.mark()
    return _OnLane(clock, over)


class _OnLane:
    """A work on a lane of a device: whoever waits holds compute back."""

    def __init__(self, clock: LaneClock, over: int) -> None:
        self._clock, self._over = clock, over

    def wait(self) -> None:
        self._clock.hold_back(KERNELS, self._over)

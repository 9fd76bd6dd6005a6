"""An optimizer in a plan: made once, stepped once to see what it keeps, and once more to be told.

Owns these steps, on a rank's own parts or on whole matrices. It must not know what a unit does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fsdp2._core.base import torch_dtensor, torch_modes
from fsdp2._core.base.arguments import described, wrong_type
from fsdp2._core.base.containers import visit_tensors
from fsdp2._core.base.errors import ConfigError, FSDPError
from fsdp2._core.comm.process_mesh import Grid
from fsdp2._core.transfer.crew import Crew
from fsdp2._core.transfer.owners import Route
from fsdp2._tools.plan.clock import Clock
from fsdp2._tools.plan.lanes import KERNELS, LANES, LaneClock
from fsdp2._tools.plan.watch import COMMUNICATION, OPTIMIZER, MemoryWatch
from fsdp2.optim._owned_step import WholeOptimizer

# A step of owners among ranks that are not there: the optimizer's own rounds, on a clock.


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


OPTIMIZER_WANTED = "a class or function that makes an optimizer of parameters, or None"
MakeOptimizer = Callable[..., torch.optim.Optimizer]


class Stepped:
    """An optimizer in a plan. ``nbytes``: what it keeps, its state and copies of parameters."""

    nbytes = 0

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        """Step once.

        Raises:
            ConfigError: it needs values.
        """
        try:
            self._optimizer.step()
        except FSDPError:
            raise
        except Exception as error:
            raise ConfigError(
                "FS904",
                f"plan: a step of {type(self._optimizer).__name__} failed on tensors that have no "
                f"values ({type(error).__name__}: {error}). Plan without optimizer, and add what "
                "its state takes.",
            ) from error

    def _keep(self, kept: object, watch: MemoryWatch, is_away: bool) -> None:
        """Count what an optimizer keeps between steps."""
        tensors: list[Tensor] = []
        visit_tensors(tensors.append, kept)
        for tensor in tensors:
            if is_away:
                watch.leave_out(tensor)
            else:
                watch.tag(tensor, OPTIMIZER)
        self.nbytes = sum(tensor.nbytes for tensor in tensors)


class LocalOptimizer(Stepped):
    """An optimizer of a rank's own parts: plans of DTensor's operations take no memory there."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        watch: MemoryWatch,
        is_away: bool,
        is_on_device: bool,
    ) -> None:
        super().__init__(optimizer)
        self._locals = [
            (param, torch_dtensor.local_part(param).detach())
            for group in optimizer.param_groups
            for param in group["params"]
        ]
        local_of = dict(self._locals)
        for group in optimizer.param_groups:
            group["params"] = [local_of[param] for param in group["params"]]
            if is_on_device and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True  # what torch chooses there, and takes more memory
        self.step()  # the state is made in the first one
        self._keep([list(kept.values()) for kept in optimizer.state.values()], watch, is_away)

    def step(self) -> None:
        for param, local in self._locals:
            local.grad = None if param.grad is None else torch_dtensor.local_part(param.grad)
        super().step()
        for _, local in self._locals:
            local.grad = None


class OwnedOptimizer(Stepped):
    """An optimizer of whole matrices, as the rank has it that is planned."""

    def __init__(self, optimizer: WholeOptimizer, watch: MemoryWatch, is_away: bool) -> None:
        super().__init__(cast(torch.optim.Optimizer, optimizer))
        self.step()  # copies and states are made in the first one
        self._keep(optimizer.kept_tensors(), watch, is_away)


def make_stepped(
    optimizer: MakeOptimizer,
    parameters: Iterator[nn.Parameter],
    watch: MemoryWatch,
    clock: Clock | LaneClock | None,
    is_away: bool,
) -> list[Stepped]:
    """Return an optimizer that has stepped once; its members, if it is several.

    Raises:
        ConfigError: it cannot be made, or it needs values.
    """
    is_on_device = clock is not None and clock.hardware.device_type != "cpu"
    made = make_optimizer(optimizer, parameters)
    stepped: list[Stepped] = []
    for member in getattr(made, "_members", None) or [(made, [])]:
        if isinstance(member[0], WholeOptimizer):
            imagine_crews(member[0], watch, clock)
            stepped.append(OwnedOptimizer(member[0], watch, is_away))
        else:
            stepped.append(LocalOptimizer(member[0], watch, is_away, is_on_device))
    return stepped


def make_optimizer(
    optimizer: MakeOptimizer, parameters: Iterator[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return what a user's function makes of parameters.

    Raises:
        ConfigError: it fails, or makes something else.
    """
    try:
        made = optimizer(parameters)
    except Exception as error:
        raise ConfigError(
            "FS904",
            f"plan: expected optimizer to be {OPTIMIZER_WANTED}, found {described(optimizer)}, "
            f"which raised {type(error).__name__}: {error}",
        ) from error
    if not isinstance(made, torch.optim.Optimizer):
        raise wrong_type("plan", "optimizer", OPTIMIZER_WANTED, optimizer)
    return made

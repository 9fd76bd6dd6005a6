"""The optimizer of a plan. Its first step creates its state, and its second step is reported. It
updates a rank's own shards, or full matrices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from fsdp2._core.base import torch_dtensor, torch_modes
from fsdp2._core.base.errors import ConfigError, FSDPError, described, wrong_type
from fsdp2._core.comm.process_mesh import Grid
from fsdp2._core.transfer.owners import Route
from fsdp2._core.transfer.peers import Peers
from fsdp2._tools.plan.clock import AnyClock, Clock, tensors_in
from fsdp2._tools.plan.lanes import LANES, LaneFlight
from fsdp2._tools.plan.watch import COMMUNICATION, OPTIMIZER, MemoryWatch
from fsdp2.optim._whole import WholeOptimizer

OPTIMIZER_WANTED = "a class or function that creates an optimizer from parameters, or None"
MakeOptimizer = Callable[..., Optimizer]


def imagine_peers(optimizer: WholeOptimizer, watch: MemoryWatch, clock: AnyClock) -> None:
    """Connect an optimizer to simulated ranks, with which it exchanges matrices."""

    def peers_of(mesh: DeviceMesh) -> Peers:
        if mesh.size() == 1:
            return Peers.alone()
        with torch_modes.hidden_from_modes():  # rank numbers need real tensors
            ranks = sorted(mesh.mesh.flatten().tolist())
            me = ranks.index(int(mesh.mesh[tuple(mesh.get_coordinate() or ())]))

        def carry(received: Tensor, sent: Tensor, way: Route) -> Any:
            for buffer in (received, sent):
                watch.tag(buffer, COMMUNICATION)
            # links are full duplex, so the larger of sent and received bytes determines the time
            most = max(sum(way.sent_nbytes), sum(way.received_nbytes))
            return _send(clock, most, len(ranks), ranks[1] - ranks[0])

        return Peers(tuple(ranks), me, Grid(()), carry=carry)

    optimizer._peers_of = peers_of


def _send(clock: AnyClock, nbytes: int, ranks: int, stride: int) -> Any:
    send = functools.partial(clock.send, "all_to_all", "matrices", nbytes, ranks, stride)
    if isinstance(clock, Clock):
        return send()
    return LaneFlight((), clock, clock.run_in(LANES["all_reduce"], send))


class Stepped:
    """An optimizer in a plan. ``nbytes``: size of its state and of its copies of parameters."""

    nbytes = 0

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def step(self) -> None:
        """Run a step. Raise ConfigError if the step needs the values of tensors."""
        try:
            self._optimizer.step()
        except FSDPError:
            raise
        except Exception as error:
            raise ConfigError(
                "FS904",
                f"plan: a step of {type(self._optimizer).__name__} failed on tensors that have no "
                f"values ({type(error).__name__}: {error}). Plan without an optimizer, and add the "
                "size of its state yourself.",
            ) from error

    def keep(self, kept: object, watch: MemoryWatch, is_away: bool) -> None:
        tensors = tensors_in(kept)
        for tensor in tensors:
            if is_away:
                watch.leave_out(tensor)
            else:
                watch.tag(tensor, OPTIMIZER)
        self.nbytes = sum(tensor.nbytes for tensor in tensors)


class KnownOptimizer(Stepped):
    """An optimizer whose step was traced by another plan on the same shards."""

    def __init__(self, nbytes: int, watch: MemoryWatch, is_away: bool) -> None:
        self._state = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.keep(self._state, watch, is_away)


class LocalOptimizer(Stepped):
    """An optimizer that updates shards' local tensors, to use no memory for DTensor dispatch."""

    def __init__(
        self, optimizer: Optimizer, watch: MemoryWatch, is_away: bool, is_on_device: bool
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
                group["foreach"] = True  # torch's default on a device, which needs more memory
        self.step()  # the state is created in the first step
        self.keep([list(kept.values()) for kept in optimizer.state.values()], watch, is_away)

    def step(self) -> None:
        for param, local in self._locals:
            local.grad = None if param.grad is None else torch_dtensor.local_part(param.grad)
        super().step()
        for _, local in self._locals:
            local.grad = None


def make_stepped(
    optimizer: MakeOptimizer,
    parameters: Iterator[nn.Parameter],
    watch: MemoryWatch,
    clock: AnyClock,
    is_away: bool,
) -> list[Stepped]:
    """Return an optimizer's members, after one step of each. Raise ConfigError if a step fails."""
    is_on_device = clock.hardware.device_type != "cpu"
    made = make_optimizer(optimizer, parameters)
    stepped: list[Stepped] = []
    for member, *_ in getattr(made, "_members", None) or [(made,)]:
        if isinstance(member, WholeOptimizer):  # updates the matrices that this rank owns
            imagine_peers(member, watch, clock)
            one = Stepped(cast(Optimizer, member))
            one.step()  # copies and states are created in the first step
            one.keep(member.kept_tensors(), watch, is_away)
        else:
            one = LocalOptimizer(member, watch, is_away, is_on_device)
        stepped.append(one)
    return stepped


def step_all(stepped: Sequence[Stepped]) -> None:
    for one in stepped:
        one.step()


def make_optimizer(optimizer: MakeOptimizer, parameters: Iterator[nn.Parameter]) -> Optimizer:
    """Return the optimizer created by the user's function. Raise ConfigError if the call fails."""
    try:
        made = optimizer(parameters)
    except Exception as error:
        raise ConfigError(
            "FS904",
            f"plan: expected optimizer to be {OPTIMIZER_WANTED}, found {described(optimizer)}, "
            f"which raised {type(error).__name__}: {error}",
        ) from error
    if not isinstance(made, Optimizer):
        raise wrong_type("plan", "optimizer", OPTIMIZER_WANTED, optimizer)
    return made

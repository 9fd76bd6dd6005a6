"""What a trace of a block has, and the node of autograd that stands for a block.

Owns the values of a trace and their replay in both ways. It must not know how a trace is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from fsdp2._plan.clock import Clock
from fsdp2._plan.hardware import Hardware
from fsdp2._plan.lanes import LaneClock


@dataclass(frozen=True)
class Made:
    """A tensor that a block returns. ``is_kept``: its backward needs it."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_kept: bool


@dataclass(frozen=True)
class Phase:
    """What a forward or a backward takes: seconds of each kernel, and the most bytes above before.

    ``products``: seconds of products at the machine's peak.
    """

    kernels: tuple[float, ...]
    peak_nbytes: int
    products: float


@dataclass(frozen=True)
class Trace:
    """A block's forward and backward.

    ``held``, ``read``: places of inputs, and of parameters, that backward needs. ``has_grad``:
    which inputs and parameters get a gradient.
    """

    forward: Phase
    backward: Phase | None
    outputs: tuple[Made, ...]
    rebuild: Callable[[Sequence[Tensor]], Any]
    kept_nbytes: int
    held: tuple[int, ...]
    read: tuple[int, ...]
    has_grad: tuple[bool, ...]
    parameters: int


@dataclass(frozen=True)
class SteppedTrace:
    """An optimizer's step, and what it keeps between steps."""

    phase: Phase
    state_nbytes: int


@dataclass
class Traces:
    """What is known of a model's blocks. It outlives the plans that add to it."""

    known: dict[tuple[Any, ...], Trace | None] = field(default_factory=dict)
    optimizers: dict[tuple[Any, ...], SteppedTrace] = field(default_factory=dict)
    machines: list[Hardware] = field(default_factory=list)  # that keys name by their numbers

    def number_of(self, clock: Clock | LaneClock | None) -> int:
        """Return what stands for a clock's machine in keys."""
        return -1 if clock is None else self.machines.index(clock.hardware)


class Replays(Protocol):
    """Who takes a phase's memory and its time."""

    def replay(self, phase: Phase) -> None: ...


class Replayed(torch.autograd.Function):
    """A block: what it returns, what it keeps, and the time and memory of both ways."""

    @staticmethod
    def forward(ctx: Any, trace: Trace, replayer: Replays, *given: Tensor) -> tuple[Tensor, ...]:
        replayer.replay(trace.forward)
        device = given[0].device if given else torch.device("cpu")
        made = [
            torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device=device)
            for one in trace.outputs
        ]
        ctx.trace, ctx.replayer = trace, replayer
        ctx.like = [(one.shape, one.stride(), one.dtype) for one in given]
        ctx.held = [given[place] for place in trace.held]
        # as the block's own graph would: the engine looks whether anybody refers to parameters
        own = given[len(given) - trace.parameters :]
        ctx.save_for_backward(*(own[place] for place in trace.read))
        ctx.held += [
            one.detach() for one, how in zip(made, trace.outputs, strict=True) if how.is_kept
        ]
        if trace.kept_nbytes > 0:
            ctx.held.append(torch.empty(trace.kept_nbytes, dtype=torch.uint8, device=device))
        ctx.mark_non_differentiable(
            *(one for one, how in zip(made, trace.outputs, strict=True) if not how.requires_grad)
        )
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        trace: Trace = ctx.trace
        if trace.backward is not None:
            ctx.replayer.replay(trace.backward)
        ctx.held.clear()
        device = grads[0].device
        made = [
            torch.empty_strided(shape, stride, dtype=dtype, device=device) if has_grad else None
            for (shape, stride, dtype), has_grad in zip(ctx.like, trace.has_grad, strict=True)
        ]
        return None, None, *made

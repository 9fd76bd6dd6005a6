"""A step of the engine on tensors that are not there: what happens, what lives, how long it takes.

Owns the run of a few steps of one model, of which the last is told. It must not know how models are
copied, or what is made of what it found.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp2._core.api.activations import Activations
from fsdp2._core.api.host_memory import CopyLanes, HostBuffer, HostMemory
from fsdp2._core.base import events, torch_dtensor
from fsdp2._core.base.capabilities import capabilities
from fsdp2._core.base.containers import visit_tensors
from fsdp2._core.base.errors import ConfigError, FSDPError
from fsdp2._core.base.policy import CPUOffloadPolicy
from fsdp2._core.engine.between_steps import units_below
from fsdp2._core.params.group import ParamGroup
from fsdp2._tools.pages.content import KINDS
from fsdp2._tools.plan.batches import Arguments, Loss, tokens_of, vocabularies_of
from fsdp2._tools.plan.clock import Clock, ComputeTime
from fsdp2._tools.plan.hardware import Hardware
from fsdp2._tools.plan.imagined import Nowhere, groups_of
from fsdp2._tools.plan.lanes import BACK, KERNELS, OUT, ImaginedLanes, LaneClock
from fsdp2._tools.plan.seen import Seen, collectives_of, with_stamps
from fsdp2._tools.plan.stepped import LocalOptimizer, MakeOptimizer, Stepped, make_stepped
from fsdp2._tools.plan.traced import Replayer, TracedOptimizer, Traces
from fsdp2._tools.plan.values import StepPlan, describe
from fsdp2._tools.plan.watch import GATHERED, GRADIENTS, PARAMETERS, MemoryWatch

# Activations and states on the host of a machine that is not there: bytes, and copies on a clock.

MIN_NBYTES = 1 << 18
"""As ``offload_activations`` has it."""


class ImaginedMemory(HostMemory):
    """Pinned memory of which nothing is there but its size."""

    def _allocate(self, nbytes: int) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu")


class ImaginedCopies(CopyLanes):
    """Two lanes of a clock. Events are its marks."""

    def __init__(self, clock: LaneClock) -> None:
        self._clock = clock

    @property
    def compute(self) -> Any:
        return self

    def wait_event(self, mark: int) -> None:
        """Let compute wait for a copy."""
        self._clock.hold_back(KERNELS, mark)

    def send_out(self, source: Tensor, buffer: HostBuffer) -> Any:
        return self.move(OUT, source.numel())

    def send_storage(self, tensor: Tensor, buffer: HostBuffer) -> Any:
        return self.move(OUT, tensor.untyped_storage().nbytes())

    def view(
        self,
        held: Tensor,
        dtype: torch.dtype,
        size: torch.Size,
        stride: tuple[int, ...],
        offset: int,
    ) -> Tensor:
        """View memory without ``set_``: a mode of fake tensors remembers storages given to it."""
        of_dtype = held if held.dtype is dtype else held.view(dtype)
        return of_dtype.as_strided(size, stride, offset)

    def bring_back(self, buffer: HostBuffer, target: Tensor) -> Any:
        return self.move(BACK, target.numel())

    def move(self, lane: int, nbytes: int, after: int | None = None) -> int:
        """Copy so many bytes, behind compute or behind a mark; return when that is over."""
        clock = self._clock
        clock.hold_back(lane, clock.mark(KERNELS) if after is None else after)
        with clock.on(lane):
            clock.copy(nbytes)
        return clock.mark(lane)


class ImaginedActivations(Activations):
    """Activations of tensors without memory that leave a device which is not there."""

    def __init__(self, model: nn.Module, chosen: dict[nn.Module, bool], clock: LaneClock) -> None:
        self._copies = ImaginedCopies(clock)
        super().__init__(model, chosen, MIN_NBYTES)

    def _make_memory(self) -> HostMemory:
        return ImaginedMemory()

    def _lanes_of(self, device: torch.device) -> CopyLanes:
        return self._copies

    def _can_copy(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, DTensor)


# What a device computes in one kernel, and a host in several: a plan of a device has the one.


@contextmanager
def kernels_of_a_device() -> Iterator[None]:
    """Put stand-ins in the place of functions that a device has a kernel for, for a while."""
    plain = F.rms_norm

    def rms_norm(*args: Any, **kwargs: Any) -> Tensor:
        made = _fused_rms_norm(*args, **kwargs)
        return plain(*args, **kwargs) if made is None else made

    F.rms_norm = rms_norm  # modules of torch look it up there
    try:
        yield
    finally:
        F.rms_norm = plain


def _fused_rms_norm(
    input: Tensor,  # noqa: A002  # torch's name for it
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor | None:
    """Return what ``aten::_fused_rms_norm`` of a device gives; None where it is not used."""
    if weight is None or weight.dtype != input.dtype:
        return None
    width = normalized_shape if isinstance(normalized_shape, int) else math.prod(normalized_shape)
    made: Tensor = _RMSNorm.apply(input, weight, input.numel() // width)  # type: ignore[no-untyped-call]  # torch's own
    return made


class _RMSNorm(torch.autograd.Function):
    """Keeps its input, its weight and one number a row, as the kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: int) -> Tensor:
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, scale)
        return x.neg()  # reads and writes as much

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, _ = ctx.saved_tensors
        return grads[0].mul(x), weight.neg(), None


STEPS, MOST_STEPS = 2, 5
"""What is predicted is the last of so many: in the first one the engine learns, and in a few more
where a part of a root is read past its modules."""
UNITS_OF_STATES = 3
"""So many units' states are on the device at a time, if they are on the host otherwise."""


class StepRun:
    """The steps of one sharded model whose tensors are fake.

    Call under the fake mode that the model was copied in.
    """

    def __init__(self, model: nn.Module, hardware: Hardware | None) -> None:
        self.model = model
        self.watch = MemoryWatch()
        self.clock = None if hardware is None else _clock_for(hardware)
        self.groups: list[ParamGroup] = groups_of(model)
        self._seen = Seen(model, self.groups, self.watch, self.clock)
        self._is_in_backward = False
        self._replayer: Replayer | None = None
        self._optimizer_key: tuple[Any, ...] = ()
        self.watch.vocabularies = vocabularies_of(model)
        self._stepped: list[Stepped] = []
        self._memory: str | int | None = None
        self._is_again = False
        self._counted: tuple[bool, ...] | None = None  # which arguments are; None: no step yet
        self._activations: ImaginedActivations | None = None
        self._turn = 0  # the clock's mark where backward is over
        self._states_are_away = False
        if isinstance(self.clock, LaneClock):
            lanes = ImaginedLanes(self.clock)
            for unit in units_below(model):
                unit.streams = lanes
            for group in self.groups:
                group.reducer.has_streams = True
        for group in self.groups:
            group.reducer.wire = Nowhere(group, self.watch, self.clock, self._keeps_away(group))
            group.rewire()
            if hardware is not None:
                device = torch.device(hardware.device_type)
                group.send_zero_copy(capabilities(device).zero_copy(group.data.shard.size))

    def replay(self, traces: Traces) -> None:
        """Trace units without units inside once, and replay what is like them."""
        units = units_below(self.model)
        own = {module for unit in units for module in unit.modules}
        blocks = [
            module
            for module in own
            if module is not self.model
            and not any(part in own for part in module.modules() if part is not module)
        ]
        self._replayer = Replayer(traces, self.watch, self.clock)
        self._replayer.follow(self.model, blocks)

    def may_recompute(self) -> None:
        """Let ``choose`` say whether activations of units below the root are computed again."""
        for unit in units_below(self.model):
            for module in unit.modules:
                if module is not self.model:
                    module.forward = functools.partial(self._forward, module.forward)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._is_again:
            return forward(*args, **kwargs)
        computed = functools.partial(self._compute, forward)
        return checkpoint(computed, *args, use_reentrant=False, **kwargs)

    def _compute(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward inside of a checkpoint; in backward it is one that runs again."""
        replayer, clock = self._replayer, self.clock
        with contextlib.ExitStack() as inside:
            if replayer is not None:
                inside.enter_context(replayer.inside_a_checkpoint())
            if clock is None:
                return forward(*args, **kwargs)
            is_traced = replayer is not None and replayer.is_in_backward
            clock.products.are_again = self._is_in_backward or is_traced
            try:
                return forward(*args, **kwargs)
            finally:
                clock.products.are_again = False

    def keep_activations_away(self) -> None:
        """Keep on the host what the units below the root save, but for the last of them."""
        if not isinstance(self.clock, LaneClock):
            return  # on a CPU all stays where it is
        units = {module for unit in units_below(self.model) for module in unit.modules}
        chosen = [m for m in self.model.modules() if m in units and m is not self.model]
        stays = {module: module is chosen[-1] for module in chosen}
        self._activations = ImaginedActivations(self.model, stays, self.clock)

    def keep_states_away(self) -> None:
        """Keep the optimizer's states on the host between its steps."""
        self._states_are_away = isinstance(self.clock, LaneClock)

    def choose(self, memory: str | int | None, is_again: bool, loss_chunks: int) -> None:
        """Say how steps run from now on, also if there were others. ``is_again``: recompute."""
        if memory != self._memory:  # None is what a sharded model came with, and stays
            self.model.set_memory(memory)  # type: ignore[operator]  # it is sharded
        self._memory, self._is_again = memory, is_again
        self.watch.loss_chunks = loss_chunks
        if self._replayer is not None:
            self._replayer.begin_plan(is_again)

    def predict(
        self, given: Arguments, loss: Loss, optimizer: MakeOptimizer | None, micro_batches: int = 1
    ) -> StepPlan:
        """Run the steps; tell the last one. After others of this model it is one step."""
        args, kwargs = given
        watch, clock, seen = self.watch, self.clock, self._seen
        tensors: list[Tensor] = []
        visit_tensors(tensors.append, given)
        is_first = self._counted is None or len(self._counted) != len(tensors)
        steps = STEPS if is_first else 1
        with watch.following_resizes(), seen.following_units():
            self._tag_kept()
            for tensor, is_counted in zip(tensors, self._counted or (), strict=False):
                if is_counted:  # as in all steps of it but the first
                    watch.see(tensor)
            for number in itertools.count(1):
                self.model.zero_grad()
                start = seen.begin()
                with contextlib.ExitStack() as modes:
                    if clock is not None:
                        compute = modes.enter_context(ComputeTime(clock))
                        if self._replayer is not None:
                            self._replayer.compute = compute
                    if isinstance(clock, LaneClock):
                        modes.enter_context(kernels_of_a_device())
                    modes.enter_context(watch)
                    modes.enter_context(events.listen(seen.see_event))
                    for left in reversed(range(micro_batches)):
                        if micro_batches > 1:
                            self._sync(left == 0)
                        self._run(args, kwargs, loss)
                seen.see("the end of backward")
                if number == 1:
                    if is_first:
                        self._tag_made()
                    if optimizer is not None and self._prepare(optimizer):
                        steps = STEPS
                if number >= steps and (self._is_steady or number >= MOST_STEPS):
                    break
            products = 0.0
            if clock is not None:
                clock.finish()
                products = clock.products.seconds * clock.hardware.compute_share
            peak = seen.peak_nbytes
            highest = self._step_optimizer(self._stepped) if self._stepped else 0
        self._counted = tuple(map(watch.counts, tensors))
        told = self._told(start, peak, highest, sum(one.nbytes for one in self._stepped))
        return replace(told, product_seconds=products, tokens=tokens_of(given))

    def _told(self, start: int, peak: int, optimizer_peak: int, state_nbytes: int) -> StepPlan:
        if self.clock is not None:
            self.clock.finish()
        sizes = {group.fqn: describe(group) for group in self.groups}
        seen = self._seen
        over = tuple(seen.over)
        exact = tuple(map(with_stamps, seen.events, over, itertools.repeat(sizes)))
        return StepPlan(
            kinds=KINDS,
            collectives=tuple(collectives_of(zip(exact, over, strict=True), sizes)),
            events=exact,
            memory=tuple(seen.points()),
            start_nbytes=start,
            peak_nbytes=peak,
            optimizer_nbytes=state_nbytes,
            optimizer_peak_nbytes=optimizer_peak,
            host_nbytes=self._host_nbytes(state_nbytes),
            seconds=None if self.clock is None else self.clock.seconds,
            spans=() if self.clock is None else tuple(self.clock.spans),
        )

    def _host_nbytes(self, state_nbytes: int) -> int:
        found = state_nbytes if self._states_are_away else 0
        return found + (0 if self._activations is None else self._activations.memory.nbytes)

    def _prepare(self, optimizer: MakeOptimizer) -> bool:
        """Make the optimizer, and let it step once; False if it is made and has these shards."""
        shards = tuple(
            (torch_dtensor.local_part(p).shape, p.dtype, p.grad is not None)
            for p in self.model.parameters()
        )
        is_away = (self._states_are_away, *map(self._keeps_away, self.groups))
        key = (optimizer, shards, is_away)
        if key == self._optimizer_key:
            return False
        self._optimizer_key = key
        replayer = self._replayer
        trace = None if replayer is None else replayer.optimizer(key)
        if trace is None or replayer is None:
            self._stepped = make_stepped(
                optimizer, self.model.parameters(), self.watch, self.clock, any(is_away)
            )
        else:
            self._stepped = [TracedOptimizer(trace, replayer, self.watch, any(is_away))]
        return True

    @property
    def _is_steady(self) -> bool:
        """True if it is known of the large parts of roots whether backward reads them."""
        runtimes = [unit.runtime for unit in units_below(self.model) if unit.is_root]
        return all(r is None or r.parts is None or r.parts.are_known for r in runtimes)

    # What memory is for.

    def _tag_kept(self) -> None:
        """Count what a rank holds between steps: shards, parameters of nobody, and buffers."""
        kept: list[Tensor] = []
        for group in self.groups:
            group.inspect()
            assert group.buffers.home is not None  # it was looked at
            flat, is_away = group.buffers.home.flat, self._keeps_away(group)
            kept += [] if is_away else [flat]
            for param in group.params:
                local = torch_dtensor.local_part(param.sharded)
                if is_away or param.span is not None:  # a storage of its own, and part of the flat
                    self.watch.leave_out(local)
                else:
                    kept.append(local)
            if is_away:
                self.watch.leave_out(flat)
        kept += self.model.buffers()
        sharded = {param.sharded for group in self.groups for param in group.params}
        kept += [param for param in self.model.parameters() if param not in sharded]
        for tensor in kept:
            self.watch.tag(torch_dtensor.local_part(tensor), PARAMETERS)

    def _tag_made(self) -> None:
        """Say what the first step made that stays: memory of whole parameters, and gradients."""
        for group in self.groups:
            if group.buffers.whole_memory is not None:
                self.watch.tag(group.buffers.whole_memory, GATHERED)
        for group in self.groups:
            for grad in (param.sharded.grad for param in group.params):
                if grad is not None and self._keeps_away(group):
                    self.watch.leave_out(torch_dtensor.local_part(grad))
        for param in self.model.parameters():
            if param.grad is not None:
                self.watch.tag(torch_dtensor.local_part(param.grad), GRADIENTS)

    def _keeps_away(self, group: ParamGroup) -> bool:
        """True if a group's shards lie with the host of a described device (CPU offload)."""
        machine = None if self.clock is None else self.clock.hardware
        if machine is None or machine.device_type == "cpu":
            return False
        return isinstance(group.residence.offload, CPUOffloadPolicy)

    # What is run.

    def _sync(self, is_on: bool) -> None:
        for unit in units_below(self.model):
            unit.configure(**unit.settings.sharding.sync(is_on))

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], loss: Loss) -> None:
        try:
            made = loss(self.model(*args, **kwargs))
            self._is_in_backward = True
            made.backward()
        except FSDPError:
            raise
        except Exception as error:
            raise ConfigError(
                "FS902",
                "plan: a step of the model failed on this batch, with tensors that have no values "
                f"({type(error).__name__}: {error}). Pass what one rank's forward is given: a "
                "tensor, a tuple of arguments or a dict of keywords.",
            ) from error
        finally:
            self._is_in_backward = False

    def _step_optimizer(self, stepped: list[Stepped]) -> int:
        """Run an optimizer's step on what this rank steps; return the most bytes in it."""
        clock = self.clock
        if any(self._keeps_away(group) for group in self.groups):
            clock = None  # the host steps, and what it takes for that is not known
        if clock is not None:
            clock.label = "optimizer"
            self._turn = int(clock.mark())
        with contextlib.ExitStack() as modes:
            if clock is not None:
                compute = modes.enter_context(ComputeTime(clock))
                if self._replayer is not None:
                    self._replayer.compute = compute
            modes.enter_context(self.watch)
            if self._replayer is not None and all(type(o) is LocalOptimizer for o in stepped):
                self._replayer.step_optimizer(self._optimizer_key, stepped)
            else:
                for one in stepped:
                    one.step()
        here = 0
        if self._states_are_away:
            assert isinstance(clock, LaneClock)
            here = self._move_states(sum(one.nbytes for one in stepped), clock)
        if clock is not None:
            clock.finish()
        return self._seen.see("the optimizer's step") + here

    def _move_states(self, nbytes: int, clock: LaneClock) -> int:
        """Let states come and go beside the step; return how many are there at a time."""
        sizes = [sum(param.sharded.numel() for param in group.params) for group in self.groups]
        unit = nbytes * max(sizes, default=0) // max(sum(sizes), 1)
        copies = ImaginedCopies(clock)
        first = copies.move(BACK, unit, after=self._turn)
        copies.move(BACK, nbytes - unit, after=first)
        copies.wait_event(copies.move(OUT, nbytes, after=first))
        return min(UNITS_OF_STATES * unit, nbytes)


def _clock_for(hardware: Hardware) -> Clock | LaneClock:
    return Clock(hardware) if hardware.device_type == "cpu" else LaneClock(hardware)

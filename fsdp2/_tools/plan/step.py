"""Runs a few engine steps on fake tensors; reports events, memory and time of the last step."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdp2._core.base import events, torch_autograd, torch_dtensor
from fsdp2._core.base.capabilities import capabilities
from fsdp2._core.base.containers import map_tensors
from fsdp2._core.base.errors import ConfigError, FSDPError, wrong_type
from fsdp2._core.base.policy import CPUOffloadPolicy
from fsdp2._core.engine.between_steps import units_below
from fsdp2._core.params.group import ParamGroup
from fsdp2._tools.pages.content import KINDS
from fsdp2._tools.plan import lanes
from fsdp2._tools.plan.clock import AnyClock, Clock, ComputeTime, tensors_in
from fsdp2._tools.plan.hardware import UNTIMED, Hardware
from fsdp2._tools.plan.imagined import Nowhere, groups_of
from fsdp2._tools.plan.lanes import LaneClock
from fsdp2._tools.plan.seen import Seen, collectives_of, with_stamps
from fsdp2._tools.plan.stepped import KnownOptimizer, MakeOptimizer, Stepped, make_stepped, step_all
from fsdp2._tools.plan.traced import Arguments, Replayer, Traces
from fsdp2._tools.plan.values import StepPlan, describe
from fsdp2._tools.plan.watch import GATHERED, GRADIENTS, PARAMETERS, MemoryWatch, number_of

Loss = Callable[[Any], Tensor]

STEPS, MOST_STEPS = 2, 5
"""Usual and maximum number of steps. The last step is reported; the others bring the engine to its
steady state. More steps are needed if a large part of a root is read outside the part's modules."""
UNITS_OF_STATES = 3
"""Number of units whose offloaded optimizer states are on the device at the same time."""


def vocabularies_of(model: nn.Module) -> frozenset[int]:
    """Return the vocabulary sizes of embeddings, to recognize logits by their last dim."""
    sizes = {one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)}
    widths = {one.embedding_dim for one in model.modules() if isinstance(one, nn.Embedding)}
    return frozenset(sizes - widths)


def tokens_of(given: Arguments) -> int:
    """Return the number of elements of the first integer tensor, or 0 if there is none."""
    for tensor in tensors_in(given):
        if not tensor.is_floating_point() and not tensor.is_complex() and tensor.dim():
            return tensor.numel()
    return 0


def mean_of(output: Any) -> Tensor:
    """Return an output's ``loss``, or the sum of the means of its tensors that require grad."""
    found = getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    means = [tensor.float().mean() for tensor in tensors_in(output) if tensor.requires_grad]
    if not means:
        raise ConfigError(
            "FS903",
            "plan: the model's output has no tensor that requires grad. Pass loss, a function that "
            "computes a scalar from the output.",
        )
    return torch.stack(means).sum()


def check_batch(batch: object) -> None:
    """Raise ConfigError if the batch cannot be passed to a forward."""
    if not isinstance(batch, Tensor | tuple | Mapping):
        expected = "a tensor, a tuple of arguments or a dict of keywords"
        raise wrong_type("plan", "batch", expected, batch)


def arguments_of(batch: Any) -> Arguments:
    """Return positional and keyword arguments, with fake tensors in place of real ones."""
    faked = map_tensors(lambda t: torch.zeros(t.shape, dtype=t.dtype, device="cpu"), batch)
    if isinstance(faked, Mapping):
        return (), dict(faked)
    return (faked if isinstance(faked, tuple) else (faked,)), {}


@contextmanager
def kernels_of_a_device() -> Iterator[None]:
    """Temporarily replace functions that run one fused kernel on a device, but several on a CPU."""
    plain = F.rms_norm

    def rms_norm(
        input: Tensor,  # noqa: A002  # torch's name for it
        normalized_shape: Any,
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        if weight is None or weight.dtype != input.dtype:
            return plain(input, normalized_shape, weight, eps)
        whole = isinstance(normalized_shape, int)
        width = normalized_shape if whole else math.prod(normalized_shape)
        made: Tensor = _RMSNorm.apply(input, weight, input.numel() // width)  # type: ignore[no-untyped-call]  # torch's own
        return made

    F.rms_norm = rms_norm  # torch's modules look up the function in ``F``
    try:
        yield
    finally:
        F.rms_norm = plain


class _RMSNorm(torch.autograd.Function):
    """Imitates ``aten::_fused_rms_norm``, which saves its input, weight and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: int) -> Tensor:
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, scale)
        return x.neg()  # reads and writes the same number of bytes as the real kernel

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, _ = ctx.saved_tensors
        return grads[0].mul(x), weight.neg(), None


class StepRun:
    """Runs steps of a sharded copy of a model with fake tensors. Use it in the copy's fake mode."""

    def __init__(self, model: nn.Module, hardware: Hardware | None, traces: Traces) -> None:
        self.model = model
        self.watch = MemoryWatch()
        self._is_timed = hardware is not None
        machine = hardware or UNTIMED
        self.clock: AnyClock = (Clock if machine.device_type == "cpu" else LaneClock)(machine)
        self._compute_time = ComputeTime(self.clock)
        self._replayer = Replayer(traces, self.watch, self._compute_time)
        self.groups: list[ParamGroup] = groups_of(model)
        self._seen = Seen(model, self.watch, self.clock)
        self._optimizer_key: tuple[Any, ...] = ()
        self.watch.vocabularies = vocabularies_of(model)
        self._stepped: list[Stepped] = []
        self._memory: str | int | None = None
        self._is_again = False
        self._counted: tuple[bool, ...] | None = None  # per batch tensor: True if counted
        self._activations: lanes.ImaginedActivations | None = None
        self._states_are_away = False
        if isinstance(self.clock, LaneClock):
            streams = lanes.ImaginedLanes(self.clock)
            for unit in units_below(model):
                unit.streams = streams
            for group in self.groups:
                group.reducer.has_streams = True
        units = {module for unit in units_below(model) for module in unit.modules}
        self._below = [m for m in model.modules() if m in units and m is not model]
        for module in self._below:  # ``choose`` decides whether activations are recomputed
            module.forward = functools.partial(self._forward, module.forward)
        for group in self.groups:
            clock = self.clock if self._is_timed else None
            group.reducer.wire = Nowhere(group, self.watch, clock, self._keeps_away(group))
            group.rewire()
            if hardware is not None:
                device = torch.device(hardware.device_type)
                group.send_zero_copy(capabilities(device).zero_copy(group.data.shard.size))

    def replay(self) -> None:
        """Trace units without inner units, once per form, and replay the traces from then on."""
        own = set(self._below)
        blocks = [m for m in own if not any(part in own for part in m.modules() if part is not m)]
        self._replayer.follow(self.model, blocks)

    def _forward(
        self,
        forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not self._is_again:
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=self._contexts, **kwargs)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of a checkpoint's forward and of its recomputation."""
        return self._inside_a_checkpoint(), self._inside_a_checkpoint()

    @contextmanager
    def _inside_a_checkpoint(self) -> Iterator[None]:
        """Surround a forward inside a checkpoint. During backward, it is a recomputation."""
        self.clock.counts_products = torch_autograd.graph_task_id() == -1
        try:
            yield
        finally:
            self.clock.counts_products = True

    def keep_activations_away(self) -> None:
        """Offload the tensors that units below the root save, except those of the last unit."""
        if isinstance(self.clock, LaneClock):  # activations on a CPU are not offloaded
            stays = {module: module is self._below[-1] for module in self._below}
            self._activations = lanes.ImaginedActivations(self.model, stays, self.clock)

    def keep_states_away(self) -> None:
        self._states_are_away = isinstance(self.clock, LaneClock)

    def choose(
        self,
        memory: str | int | None,
        is_again: bool,
        loss_chunks: int,
    ) -> None:
        """Configure the following steps. ``is_again``: recompute activations."""
        if memory != self._memory:  # None for an already sharded model, which keeps its setting
            self.model.set_memory(memory)  # type: ignore[operator]  # the model is sharded
        self._memory, self._is_again = memory, is_again
        self.watch.loss_chunks = loss_chunks
        self._replayer.begin_plan(is_again)

    def predict(
        self, given: Arguments, loss: Loss, optimizer: MakeOptimizer | None, micro_batches: int = 1
    ) -> StepPlan:
        """Run a few steps and report the last. Later calls for the same model run only one step."""
        watch, clock, seen = self.watch, self.clock, self._seen
        tensors = tensors_in(given)
        is_first = self._counted is None or len(self._counted) != len(tensors)
        steps = STEPS if is_first else 1
        with watch.following_resizes():
            self._tag_kept()
            for tensor, is_counted in zip(tensors, self._counted or (), strict=False):
                if is_counted:  # as in earlier steps
                    watch.see(tensor)
            for number in itertools.count(1):
                start = self._take_step(given, loss, micro_batches)
                if number == 1:
                    if is_first:
                        self._tag_made()
                    if optimizer is not None and self._prepare(optimizer):
                        steps = STEPS
                if number >= steps and (self._is_steady or number >= MOST_STEPS):
                    break
            clock.finish()
            products = clock.products * clock.hardware.compute_share
            peak = seen.peak_nbytes
            highest = self._step_optimizer(self._stepped) if self._stepped else 0
            clock.finish()  # this also resolves the last mark
        self._counted = tuple(watch.is_alive(number_of(tensor)) for tensor in tensors)
        sizes = {group.fqn: describe(group) for group in self.groups}
        exact = [(with_stamps(event, over, sizes), over) for event, over in seen.events]
        state_nbytes = sum(one.nbytes for one in self._stepped)
        offloaded = 0 if self._activations is None else self._activations.memory.nbytes
        return StepPlan(
            kinds=KINDS,
            collectives=tuple(collectives_of(exact, sizes)),
            events=tuple(event for event, _ in exact),
            memory=tuple(seen.points()),
            start_nbytes=start,
            peak_nbytes=peak,
            optimizer_nbytes=state_nbytes,
            optimizer_peak_nbytes=highest,
            host_nbytes=offloaded + (state_nbytes if self._states_are_away else 0),
            seconds=clock.seconds if self._is_timed else None,
            spans=tuple(clock.spans) if self._is_timed else (),
            product_seconds=products,
            tokens=tokens_of(given),
        )

    def _prepare(self, optimizer: MakeOptimizer) -> bool:
        """Create the optimizer and run one step. Return False if the optimizer already exists."""
        shards = tuple(
            (torch_dtensor.local_part(p).shape, p.dtype, p.grad is not None)
            for p in self.model.parameters()
        )
        is_away = (self._states_are_away, *map(self._keeps_away, self.groups))
        key = (optimizer, shards, is_away)
        if key == self._optimizer_key:
            return False
        self._optimizer_key = key
        nbytes = self._replayer.state_nbytes_of(key) if self._replayer.is_used else None
        if nbytes is None:
            self._stepped = make_stepped(
                optimizer, self.model.parameters(), self.watch, self.clock, any(is_away)
            )
        else:
            self._stepped = [KnownOptimizer(nbytes, self.watch, any(is_away))]
        return True

    @property
    def _is_steady(self) -> bool:
        """Return True if the engine recorded whether backward reads each large part of a root."""
        runtimes = [unit.runtime for unit in units_below(self.model) if unit.is_root]
        return all(r is None or r.parts is None or r.parts.are_known for r in runtimes)

    def _tag_kept(self) -> None:
        """Tag memory that exists between steps: shards, parameters outside of units, buffers."""
        for group in self.groups:
            group.inspect()
            assert group.buffers.home is not None  # set by ``inspect``
            flat, is_away = group.buffers.home.flat, self._keeps_away(group)
            for param in group.params:
                # a real shard with a span is part of ``flat``; only a fake shard is separate
                if is_away or param.span is not None:
                    self.watch.leave_out(torch_dtensor.local_part(param.sharded))
            if is_away:
                self.watch.leave_out(flat)
            self.watch.tag(flat, PARAMETERS)
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            self.watch.tag(torch_dtensor.local_part(tensor), PARAMETERS)

    def _tag_made(self) -> None:
        """Tag memory that persists after the first step: unsharded parameters and gradients."""
        for group in self.groups:
            if group.buffers.whole_memory is not None:
                self.watch.tag(group.buffers.whole_memory, GATHERED)
            for param in group.params if self._keeps_away(group) else ():
                if param.sharded.grad is not None:
                    self.watch.leave_out(torch_dtensor.local_part(param.sharded.grad))
        for tensor in self.model.parameters():
            if tensor.grad is not None:
                self.watch.tag(torch_dtensor.local_part(tensor.grad), GRADIENTS)

    def _keeps_away(self, group: ParamGroup) -> bool:
        """Return True if a group's shards are on the host, and compute is on a device."""
        is_on_device = self.clock.hardware.device_type != "cpu"
        return is_on_device and isinstance(group.residence.offload, CPUOffloadPolicy)

    @contextmanager
    def _counting(self, is_timed: bool) -> Iterator[contextlib.ExitStack]:
        """Count the memory of operations in this context, and their time if ``is_timed``."""
        with contextlib.ExitStack() as modes:
            if is_timed:
                modes.enter_context(self._compute_time)
            modes.enter_context(self.watch)
            yield modes

    def _take_step(self, given: Arguments, loss: Loss, micro_batches: int) -> int:
        """Run forwards and backwards; return the memory at the start of the step, in bytes."""
        self.model.zero_grad()
        start = self._seen.begin()
        with self._counting(self._is_timed) as modes:
            if isinstance(self.clock, LaneClock):
                modes.enter_context(kernels_of_a_device())
            modes.enter_context(events.listen(self._seen.see_event))
            for left in reversed(range(micro_batches)):
                if micro_batches > 1:
                    for unit in units_below(self.model):
                        unit.configure(**unit.settings.sharding.sync(left == 0))
                self._run(given, loss)
        self._seen.see("the end of backward")
        return start

    def _run(self, given: Arguments, loss: Loss) -> None:
        args, kwargs = given
        try:
            loss(self.model(*args, **kwargs)).backward()
        except FSDPError:
            raise
        except Exception as error:
            raise ConfigError(
                "FS902",
                "plan: a step of the model failed on this batch, with tensors that have no values "
                f"({type(error).__name__}: {error}). Pass the inputs of one rank's forward: a "
                "tensor, a tuple of arguments or a dict of keywords.",
            ) from error

    def _step_optimizer(self, stepped: list[Stepped]) -> int:
        """Run the optimizer's step on this rank's shards; return its peak memory in bytes."""
        clock = self.clock
        # if the host runs the step, its duration is unknown
        is_timed = self._is_timed and not any(map(self._keeps_away, self.groups))
        clock.label = "optimizer"
        turn = int(clock.mark())  # the end of backward
        with self._counting(is_timed):
            # an optimizer that exchanges matrices is not replayed
            if self._replayer.is_used and all(type(one) is not Stepped for one in stepped):
                self._replayer.step_optimizer(self._optimizer_key, stepped)
            else:
                step_all(stepped)
        here = 0
        if self._states_are_away and is_timed:
            assert isinstance(clock, LaneClock)  # see ``keep_states_away``
            here = self._move_states(sum(one.nbytes for one in stepped), clock, turn)
        clock.finish()
        return self._seen.see("the optimizer's step") + here

    def _move_states(self, nbytes: int, clock: LaneClock, turn: int) -> int:
        """Overlap transfers of states with the step; return the peak device memory of states."""
        sizes = [sum(param.sharded.numel() for param in group.params) for group in self.groups]
        unit = nbytes * max(sizes, default=0) // max(sum(sizes), 1)
        copies = lanes.ImaginedCopies(clock)
        first = copies.move(lanes.BACK, unit, after=turn)
        copies.move(lanes.BACK, nbytes - unit, after=first)
        copies.wait_event(copies.move(lanes.OUT, nbytes, after=first))
        return min(UNITS_OF_STATES * unit, nbytes)

"""One trace of a block serves all blocks that are alike, in every plan of the same model.

Owns the trace of a unit's forward and backward (bytes, kernels, what is kept in between), and its
replay: one node of autograd that takes the same memory and the same time. What the engine does
around a unit is never replayed: it runs. It must not know what is made of a plan.

[Note: when a block is replayed]
Layers of a model do the same operations, and on tensors without values each takes as long to plan
as the first. A block is a module that is a unit with no unit inside. Its forward is run aside, once
as forward and once with its backward, and from then on a node stands for it. A block runs as it is
wherever a node could not: it returns what it was given, keeps something for later, changes its
attributes, reads parameters of others, takes or returns what is no tensor and no plain value, or
has forms of its own in most of its copies.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2._core.base import torch_autograd, torch_dtensor, torch_tensors
from fsdp2._tools.plan.blocks import (
    PLAIN,
    End,
    Unsuited,
    attributes_of,
    check_leaves,
    collected,
    fresh_like,
    number_of_storage,
    parameters_of,
    rebuilt,
    replaced,
    structure_of,
    with_own_parameters,
)
from fsdp2._tools.plan.clock import Clock, ComputeTime
from fsdp2._tools.plan.hardware import Hardware
from fsdp2._tools.plan.lanes import LaneClock, Products
from fsdp2._tools.plan.stepped import Stepped
from fsdp2._tools.plan.watch import MemoryWatch

# What a trace of a block has, and the node of autograd that stands for a block.


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


MOST_FORMS = 6
"""So many traces of a class are made for a plan; blocks that all differ run faster as they are."""


class Replayer:
    """Puts replays in the place of forwards, in one run."""

    def __init__(self, traces: Traces, watch: MemoryWatch, clock: Clock | LaneClock | None) -> None:
        self._traces, self._watch, self.clock = traces, watch, clock
        self._is_again = False
        self._checkpoints = 0  # that units run in now
        self._forms: Counter[type] = Counter()  # that were traced for one plan
        self.compute: ComputeTime | None = None  # what moves the clock, while a step runs
        self.is_in_backward = False
        self._structures: dict[int, tuple[Any, ...]] = {}
        self._names: dict[int, str] = {}
        if clock is not None and clock.hardware not in traces.machines:
            traces.machines.append(clock.hardware)

    def begin_plan(self, is_again: bool) -> None:
        """Another plan begins. ``is_again``: activations are computed again."""
        self._is_again = is_again
        self._forms.clear()

    @contextmanager
    def inside_a_checkpoint(self) -> Iterator[None]:
        """Say that a unit's forward runs in a checkpoint: units inside of it run as they are.

        A checkpoint counts what is saved in its forward, and a trace would save more.
        """
        self._checkpoints += 1
        try:
            yield
        finally:
            self._checkpoints -= 1

    def follow(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Replay these blocks of a model from now on."""
        self._names = {id(module): name for name, module in model.named_modules()}
        for block in blocks:
            block.forward = functools.partial(self._call, block, block.forward)

    def _call(
        self, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._checkpoints:
            return forward(*args, **kwargs)
        try:
            tensors, key = self._key_of(block, args, kwargs)
        except Unsuited:
            return forward(*args, **kwargs)
        known = self._traces.known
        if key not in known:
            if self._forms[type(block)] >= MOST_FORMS:
                return forward(*args, **kwargs)
            self._forms[type(block)] += 1
            try:
                known[key] = self._trace(block, forward, args, kwargs)
            except Unsuited:
                known[key] = None
        trace = known[key]
        if trace is None:
            return forward(*args, **kwargs)
        made = Replayed.apply(trace, self, *tensors, *parameters_of(block))  # type: ignore[no-untyped-call]  # torch's own
        return trace.rebuild(made)

    # Which blocks are alike.

    def _key_of(
        self, block: nn.Module, args: Any, kwargs: Any
    ) -> tuple[list[Tensor], tuple[Any, ...]]:
        tensors: list[Tensor] = []
        form = self._form_of((args, kwargs), tensors)
        if id(block) not in self._structures:
            self._structures[id(block)] = tuple(structure_of(block))
        own = tuple((p.shape, p.dtype, p.requires_grad) for p in parameters_of(block))
        machine = self._traces.number_of(self.clock)
        where = (machine, self._is_again, torch.is_grad_enabled())
        return tensors, (self._structures[id(block)], own, form, where)

    def _form_of(self, value: Any, tensors: list[Tensor]) -> Any:
        """Return what tells arguments from others, and add their tensors to a list."""
        if isinstance(value, Tensor):
            if torch_dtensor.is_among([type(value)]):
                raise Unsuited
            tensors.append(value)
            return (value.shape, value.stride(), value.dtype, value.requires_grad)
        if type(value) in (tuple, list):
            return (type(value), *(self._form_of(one, tensors) for one in value))
        if type(value) is dict:
            return tuple((str(key), self._form_of(one, tensors)) for key, one in value.items())
        if isinstance(value, nn.Module) and id(value) in self._names:
            return (nn.Module, self._names[id(value)])
        if isinstance(value, PLAIN):
            return value
        raise Unsuited

    # How a block is traced.

    def _trace(
        self, block: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Trace:
        with with_own_parameters(block) as parameters, self._aside():
            before, attributes = self._watch.nbytes, attributes_of(block)
            held = self._keep_of(forward, args, kwargs, parameters)
            found = self._measure(forward, args, kwargs, parameters, held)
            if self._watch.nbytes != before or attributes_of(block) != attributes:
                raise Unsuited  # something was kept for later
            return found

    def _keep_of(
        self, forward: Callable[..., Any], args: Any, kwargs: Any, parameters: Sequence[Tensor]
    ) -> _Kept:
        """Run a forward, forget what went in and came out, and look what is alive."""
        accumulators = torch_autograd.accumulators_of(parameters)  # which refer to them, too
        owners = [torch_tensors.owners_of(one) for one in parameters]
        fresh: list[Tensor] = []
        given = replaced((args, kwargs), lambda t: fresh_like(t, fresh))
        inputs = [number_of_storage(one) for one in fresh]
        out = forward(*given[0], **given[1])
        made: list[Tensor] = []
        collected(out, made)
        outputs = [number_of_storage(one) for one in made]
        if len({*inputs, *outputs}) != len(inputs) + len(outputs) or not made:
            raise Unsuited  # views of each other
        nodes = [one.grad_fn for one in made]
        given = out = None
        fresh.clear()
        made.clear()
        alive = self._watch.is_alive
        more = [torch_tensors.owners_of(one) for one in parameters]
        read = tuple(place for place, before in enumerate(owners) if more[place] > before)
        kept = _Kept(tuple(map(alive, inputs)), tuple(map(alive, outputs)), read)
        del nodes, accumulators
        return kept

    def _measure(
        self,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        parameters: Sequence[Tensor],
        kept: _Kept,
    ) -> Trace:
        fresh: list[Tensor] = []
        given = replaced((args, kwargs), lambda t: fresh_like(t, fresh))
        before = self._watch.nbytes
        out, first = self.timed(lambda: forward(*given[0], **given[1]))
        made: list[Tensor] = []
        rebuild = functools.partial(rebuilt, collected(out, made))
        sizes = [one.untyped_storage().nbytes() for one in made]
        if sizes != [one.nbytes for one in made]:
            raise Unsuited
        outputs = tuple(
            Made(one.shape, one.stride(), one.dtype, one.requires_grad, is_kept)
            for one, is_kept in zip(made, kept.outputs, strict=True)
        )
        kept_nbytes = self._watch.nbytes - before - sum(sizes)
        ends = [End.apply(one) for one in made if one.requires_grad]  # type: ignore[no-untyped-call]  # torch's own
        wanted = [one for one in (*fresh, *parameters) if one.requires_grad]
        second: Phase | None = None
        found: Iterator[bool] = iter(())
        if ends and wanted:
            check_leaves([one.grad_fn for one in made], [*fresh, *parameters])
            arriving = sum(one.nbytes for one in made if one.requires_grad)
            seeds = [torch.empty_like(end) for end in ends]
            del out, made, given
            self.is_in_backward = True
            try:
                grads, second = self.timed(
                    lambda: torch.autograd.grad(ends, wanted, seeds, allow_unused=True), arriving
                )
            finally:
                self.is_in_backward = False
            found = iter([grad is not None for grad in grads])
        has_grad = tuple(one.requires_grad and next(found) for one in (*fresh, *parameters))
        held = tuple(place for place, is_held in enumerate(kept.inputs) if is_held)
        return Trace(
            *(first, second, outputs, rebuild, kept_nbytes, held, kept.read, has_grad),
            parameters=len(parameters),
        )

    def timed(self, run: Callable[[], Any], arriving: int = 0) -> tuple[Any, Phase]:
        """Run something, and tell what it took. ``arriving``: bytes that are made at its start.

        Raises:
            Unsuited: it takes memory of several kinds.
        """
        watch, clock, recorder = self._watch, self.clock, _Recorder(self.clock)
        products = 0.0 if clock is None else clock.products.seconds
        before, kinds = watch.nbytes, list(watch.by_kind)
        watch.take_highest()
        if clock is not None:
            clock.products.seconds = 0.0  # a difference would depend on what was there
        with self._timed_by(recorder):
            made = run()
        highest = watch.take_highest()
        if any(now != then for now, then in zip(highest[:-2], kinds[:-2], strict=True)):
            raise Unsuited  # more than activations
        if highest[-1] != kinds[-1]:
            raise Unsuited  # logits, which are counted in their own way
        took = 0.0 if clock is None else clock.products.seconds
        if clock is not None:
            clock.products.seconds = products
        kernels = tuple(recorder.kernels)
        return made, Phase(kernels, max(sum(highest) - before - arriving, 0), took)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Leave no trace of a trace in what is counted, nor on the clock."""
        highest, clock = self._watch.highest, self.clock
        products = 0.0 if clock is None else clock.products.seconds
        try:
            with self._timed_by(_Recorder(clock)):
                yield
        finally:
            self._watch.highest = highest
            if clock is not None:
                clock.products.seconds = products

    @contextmanager
    def _timed_by(self, recorder: _Recorder) -> Iterator[None]:
        """Let another clock take the time of operations meanwhile."""
        compute = self.compute
        if compute is None:
            yield
            return
        before, compute.clock = compute.clock, recorder
        try:
            yield
        finally:
            compute.clock = before

    # How it is replayed.

    def replay(self, phase: Phase) -> None:
        """Take a phase's memory and its time."""
        self._watch.rise(phase.peak_nbytes)
        if self.clock is not None:
            for seconds in phase.kernels:
                self.clock.compute(seconds)
            self.clock.products.seconds += phase.products

    # Optimizers.

    def optimizer(self, key: tuple[Any, ...]) -> SteppedTrace | None:
        """Return what is known of an optimizer's step on these shards."""
        return self._traces.optimizers.get((self._traces.number_of(self.clock), *key))

    def step_optimizer(self, key: tuple[Any, ...], stepped: Sequence[Stepped]) -> None:
        """Step. What that takes is written down once, and is the same each time."""
        known = self.optimizer(key)
        if known is not None:
            self.replay(known.phase)
            return

        def step() -> None:
            for one in stepped:
                one.step()

        phase = self.timed(step)[1]
        trace = SteppedTrace(phase, sum(one.nbytes for one in stepped))
        place = (self._traces.number_of(self.clock), *key)
        self._traces.optimizers[place] = trace
        self.replay(phase)


class TracedOptimizer(Stepped):
    """An optimizer of which another plan has seen a step on the same shards."""

    def __init__(
        self, trace: SteppedTrace, replayer: Replayer, watch: MemoryWatch, is_away: bool
    ) -> None:
        self._trace, self._replayer = trace, replayer
        self._state = torch.empty(trace.state_nbytes, dtype=torch.uint8, device="cpu")
        self._keep(self._state, watch, is_away)

    def step(self) -> None:
        self._replayer.replay(self._trace.phase)


@dataclass(frozen=True)
class _Kept:
    """Which inputs and outputs the graph of a block keeps, and places of the parameters."""

    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    read: tuple[int, ...]


class _Recorder:
    """A clock that writes down what kernels take."""

    def __init__(self, clock: Clock | LaneClock | None) -> None:
        self.kernels: list[float] = []
        if clock is not None:
            self.hardware, self.products = clock.hardware, clock.products

    hardware: Hardware
    products: Products

    def compute(self, seconds: float) -> None:
        if seconds > 0.0:
            self.kernels.append(seconds)

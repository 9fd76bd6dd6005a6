"""A step of the engine on tensors that are not there: what happens, what lives, how long it takes.

Owns the run of a few steps of one model, of which the last is told. It must not know how models are
copied, or what is made of what it found.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fsdp2._base import events, torch_dtensor
from fsdp2._base.capabilities import capabilities
from fsdp2._base.containers import visit_tensors
from fsdp2._base.errors import ConfigError, FSDPError
from fsdp2._base.policy import CPUOffloadPolicy
from fsdp2._engine.between_steps import units_below
from fsdp2._engine.tree import Runtime, Unit, Visit
from fsdp2._pages.content import KINDS
from fsdp2._param_group.group import ParamGroup
from fsdp2._param_group.registration import SMALLER
from fsdp2._plan.away import ImaginedActivations, ImaginedCopies
from fsdp2._plan.clock import Clock, ComputeTime
from fsdp2._plan.groups import describe
from fsdp2._plan.hardware import Hardware
from fsdp2._plan.imagined import Nowhere, groups_of
from fsdp2._plan.kernels import kernels_of_a_device
from fsdp2._plan.lanes import BACK, OUT, ImaginedLanes, LaneClock
from fsdp2._plan.owned import imagine_crews
from fsdp2._plan.stepped import (
    LocalOptimizer,
    MakeOptimizer,
    OwnedOptimizer,
    Stepped,
    make_optimizer,
)
from fsdp2._plan.traced import Replayer, TracedOptimizer, Traces
from fsdp2._plan.values import Collective, GroupPlan, MemoryPoint, StepPlan
from fsdp2._plan.watch import GATHERED, GRADIENTS, PARAMETERS, MemoryWatch
from fsdp2.optim._owned_step import WholeOptimizer

STEPS, MOST_STEPS = 2, 5
"""What is predicted is the last of so many: in the first one the engine learns, and in a few more
where a part of a root is read past its modules."""
UNITS_OF_STATES = 3
"""So many units' states are on the device at a time, if they are on the host otherwise."""
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Loss = Callable[[Any], Tensor]


class StepRun:
    """The steps of one sharded model whose tensors are fake.

    Call under the fake mode that the model was copied in.
    """

    def __init__(self, model: nn.Module, hardware: Hardware | None) -> None:
        self.model = model
        self.watch = MemoryWatch()
        self._observed: set[Runtime] = set()
        self.clock = None if hardware is None else _clock_for(hardware)
        self.groups: list[ParamGroup] = groups_of(model)
        self._events: list[events.Event] = []
        self._over: list[_Over] = []  # for each event, who takes part in what it stands for
        self._points: list[tuple[MemoryPoint, float]] = []  # each with the clock's mark
        self._running: list[str] = []  # units, the innermost last
        self._is_in_backward = False
        self._replayer: Replayer | None = None
        self._optimizer_key: tuple[Any, ...] = ()
        self.watch.vocabularies = vocabularies_of(model)
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

    def replay(self, traces: Traces, is_again: bool) -> None:
        """Trace units without units inside once, and replay what is like them."""
        units = units_below(self.model)
        own = {module for unit in units for module in unit.modules}
        blocks = [
            module
            for module in own
            if module is not self.model
            and not any(part in own for part in module.modules() if part is not module)
        ]
        self._replayer = Replayer(traces, self.watch, self.clock, is_again)
        self._replayer.follow(self.model, blocks)

    def recompute(self) -> None:
        """Keep no activations of the units below the root: backward computes them again."""
        for unit in units_below(self.model):
            for module in unit.modules:
                if module is not self.model:
                    computed = functools.partial(self._compute, module.forward)
                    forward = functools.partial(checkpoint, computed, use_reentrant=False)
                    module.forward = forward

    def _compute(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a forward; in backward it is one that runs again."""
        if self.clock is None:
            return forward(*args, **kwargs)
        replayer = self._replayer
        is_traced = replayer is not None and replayer.is_in_backward
        self.clock.products.are_again = self._is_in_backward or is_traced
        try:
            return forward(*args, **kwargs)
        finally:
            self.clock.products.are_again = False

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

    def predict(
        self, given: Arguments, loss: Loss, optimizer: MakeOptimizer | None, micro_batches: int = 1
    ) -> StepPlan:
        """Run the steps; tell the last one."""
        args, kwargs = given
        watch, clock = self.watch, self.clock
        stepped: list[Stepped] = []
        with watch.following_resizes(), self._following_units():
            self._tag_kept()
            for number in itertools.count():
                self.model.zero_grad()
                start = self._begin_step()
                with contextlib.ExitStack() as modes:
                    if clock is not None:
                        compute = modes.enter_context(ComputeTime(clock))
                        if self._replayer is not None:
                            self._replayer.compute = compute
                    if isinstance(clock, LaneClock):
                        modes.enter_context(kernels_of_a_device())
                    modes.enter_context(watch)
                    modes.enter_context(events.listen(self._see_event))
                    for left in reversed(range(micro_batches)):
                        if micro_batches > 1:
                            self._sync(left == 0)
                        self._run(args, kwargs, loss)
                self._see("the end of backward")
                if number == 0:
                    self._tag_made()
                    if optimizer is not None:
                        stepped = self._prepare(optimizer)
                if number + 1 >= STEPS and (self._is_steady or number + 1 >= MOST_STEPS):
                    break
            products = 0.0
            if clock is not None:
                clock.finish()
                products = clock.products.seconds * clock.hardware.compute_share
            peak = max(point.peak_nbytes for point, _ in self._points)
            highest = self._step_optimizer(stepped) if stepped else 0
        told = self._told(start, peak, highest, sum(one.nbytes for one in stepped))
        return replace(told, product_seconds=products, tokens=tokens_of(given))

    def _told(self, start: int, peak: int, optimizer_peak: int, state_nbytes: int) -> StepPlan:
        if self.clock is not None:
            self.clock.finish()
        sizes = {group.fqn: describe(group) for group in self.groups}
        seen = list(zip(self._events, self._over, strict=True))
        exact = tuple(_with_stamps(event, over, sizes) for event, over in seen)
        return StepPlan(
            kinds=KINDS,
            collectives=tuple(_collectives(zip(exact, self._over, strict=True), sizes)),
            events=exact,
            memory=tuple(self._timed_points()),
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

    def _prepare(self, optimizer: MakeOptimizer) -> list[Stepped]:
        """Make the optimizer, and let it step once; its members, if it is several."""
        known = self._traced_optimizer(optimizer)
        if known is not None:
            return [known]
        is_away = self._states_are_away or any(map(self._keeps_away, self.groups))
        is_on_device = self.clock is not None and self.clock.hardware.device_type != "cpu"
        made = make_optimizer(optimizer, self.model.parameters())
        stepped: list[Stepped] = []
        for member in getattr(made, "_members", None) or [(made, [])]:
            if isinstance(member[0], WholeOptimizer):
                imagine_crews(member[0], self.watch, self.clock)
                stepped.append(OwnedOptimizer(member[0], self.watch, is_away))
            else:
                stepped.append(LocalOptimizer(member[0], self.watch, is_away, is_on_device))
        return stepped

    def _traced_optimizer(self, optimizer: MakeOptimizer) -> Stepped | None:
        """Return an optimizer that another plan has traced on the same shards."""
        if self._replayer is None:
            return None
        shards = tuple(
            (torch_dtensor.local_part(p).shape, p.dtype, p.grad is not None)
            for p in self.model.parameters()
        )
        is_away = (self._states_are_away, *map(self._keeps_away, self.groups))
        self._optimizer_key = (optimizer, shards, is_away)
        trace = self._replayer.optimizer(self._optimizer_key)
        if trace is None:
            return None
        return TracedOptimizer(trace, self._replayer, self.watch, any(is_away))

    # What is seen.

    def _begin_step(self) -> int:
        self._events.clear()
        self._over.clear()
        self._points.clear()
        self._running.clear()
        self._show()
        if self.clock is not None:
            self.clock.restart()
        self.watch.take_highest()
        if isinstance(self.clock, LaneClock):  # gradients are given back as a forward begins
            return self.watch.nbytes - self.watch.by_kind[GRADIENTS]
        return self.watch.nbytes

    def _see_event(self, event: events.Event) -> None:
        group = next((group for group in self.groups if group.fqn == event.fqn), None)
        self._events.append(event)
        self._over.append(_Over.of(group, event.kind) if group is not None else _Over())
        self._see(str(event))

    def _see(self, label: str) -> None:
        highest = self.watch.take_highest()
        mark = 0.0 if self.clock is None else self.clock.mark()
        kinds = tuple(self.watch.by_kind)
        point = MemoryPoint(label, 0.0, self.watch.nbytes, sum(highest), kinds, highest)
        self._points.append((point, mark))

    def _timed_points(self) -> Iterator[MemoryPoint]:
        for point, mark in self._points:
            time = 0.0 if self.clock is None else self.clock.time_of(mark)  # type: ignore[arg-type]
            yield replace(point, time=time)

    @property
    def _is_steady(self) -> bool:
        """True if it is known of the large parts of roots whether backward reads them."""
        runtimes = [unit.runtime for unit in units_below(self.model) if unit.is_root]
        return all(r is None or r.parts is None or r.parts.are_known for r in runtimes)

    @contextlib.contextmanager
    def _following_units(self) -> Iterator[None]:
        """Know which unit computes: the innermost whose forward or backward is running."""
        handles = []
        for unit in units_below(self.model):
            for module in unit.modules:
                entered = functools.partial(self._enter_forward, unit)
                handles.append(module.register_forward_pre_hook(entered))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter_forward(self, unit: Unit, *_: Any) -> None:
        runtime = unit.runtime
        assert runtime is not None
        if runtime not in self._observed:
            self._observed.add(runtime)
            runtime.observe(self)
        self._enter(unit, runtime.context.phase)

    def around(
        self, kind: str, source: Any, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Follow a backward into units and out of them."""
        if kind == "arrive":
            return self._arrive(call, *args)
        if kind == "depart":
            return self._depart(call, *args)
        return call(*args, **kwargs)

    def _enter(self, unit: Unit, phase: str) -> None:
        self._running.append(f"{unit.fqn or '<root>'} {phase}")
        self._show()

    def _leave(self, *_: Any) -> None:
        if self._running:
            self._running.pop()
        self._show()

    def _arrive(self, arrive: Callable[..., None], visit: Visit, *how: Any) -> None:
        was_open = visit.opened_in
        arrive(visit, *how)
        if visit.opened_in != was_open:
            self._enter(visit.unit, events.BACKWARD)

    def _depart(self, depart: Callable[[Visit], None], visit: Visit) -> None:
        was_open = visit.opened_in
        depart(visit)
        if visit.opened_in != was_open:
            self._leave()

    def _show(self) -> None:
        if self.clock is not None:
            self.clock.label = self._running[-1] if self._running else "outside of units"

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
                self._replayer.trace_optimizer(self._optimizer_key, stepped)
            else:
                for one in stepped:
                    one.step()
        here = 0
        if self._states_are_away:
            assert isinstance(clock, LaneClock)
            here = self._move_states(sum(one.nbytes for one in stepped), clock)
        if clock is not None:
            clock.finish()
        self._see("the optimizer's step")
        return self._points[-1][0].peak_nbytes + here

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


def vocabularies_of(model: nn.Module) -> frozenset[int]:
    """Return the sizes of embeddings: a last dim of that size has a number for each word."""
    sizes = {one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)}
    widths = {one.embedding_dim for one in model.modules() if isinstance(one, nn.Embedding)}
    return frozenset(sizes - widths)


def tokens_of(given: Arguments) -> int:
    """Return how many elements the first tensor of whole numbers has; 0 if there is none."""
    found: list[int] = []

    def take(tensor: Tensor) -> None:
        if not tensor.is_floating_point() and not tensor.is_complex() and tensor.dim():
            found.append(tensor.numel())

    visit_tensors(take, given)
    return found[0] if found else 0


def mean_of(output: Any) -> Tensor:
    """Return an output's ``loss``, or the mean of all floating-point tensors in it."""
    found = getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    means: list[Tensor] = []

    def take(tensor: Tensor) -> None:
        if tensor.requires_grad:
            means.append(tensor.float().mean())

    visit_tensors(take, output)
    if not means:
        raise ConfigError(
            "FS903",
            "plan: the model's output has no tensor with a gradient. Pass loss, a function that "
            "makes a scalar of the output.",
        )
    return torch.stack(means).sum()


@dataclass(frozen=True)
class _Over:
    """How many ranks take part in the collective of an event, and in one that follows at once."""

    ranks: int = 0
    then: int = 0
    is_smaller: bool = False

    @staticmethod
    def of(group: ParamGroup, kind: str) -> _Over:
        if kind != "unshard":
            then = group.data.summed.size if group.settings.all_reduce_grads else 0
            return _Over(group.data.scattered.size, then)
        smaller = group.buffers.post_forward.mesh
        if smaller is None or group.state is not SMALLER:
            return _Over(group.data.shard.size)
        return _Over(smaller.shard.size, is_smaller=True)


def _with_stamps(event: events.Event, over: _Over, sizes: Mapping[str, GroupPlan]) -> events.Event:
    """Return an event with the bytes that real ranks have: they send numbers along."""
    group = sizes.get(event.fqn)
    if group is None or not event.nbytes:
        return event
    nbytes = {
        "unshard": group.regather_nbytes if over.is_smaller else group.gather_nbytes,
        "reduce": group.reduce_nbytes,
        "reshard": group.whole_nbytes,
    }
    return replace(event, nbytes=nbytes.get(event.kind, event.nbytes))


def _collectives(
    seen: Iterable[tuple[events.Event, _Over]], sizes: Mapping[str, GroupPlan]
) -> Iterator[Collective]:
    for event, over in seen:
        phase, fqn = event.phase, event.fqn
        if event.kind == "unshard":
            yield Collective(phase, "all_gather", fqn, event.nbytes, over.ranks)
        elif event.kind == "reduce":
            yield Collective(phase, "reduce_scatter", fqn, event.nbytes, over.ranks)
            group = sizes[fqn]
            if over.then > 1 and group.all_reduce_nbytes > 0:
                nbytes, then = group.all_reduce_nbytes, over.then
                yield Collective(phase, "all_reduce", fqn, nbytes, then, over.ranks)
            elif over.then > 1:
                nbytes, then = group.outer_nbytes, over.then
                yield Collective(phase, "reduce_scatter", fqn, nbytes, then, over.ranks)

"""Units, and the runtime of a tree of units: the operations of a step.

A ``Unit`` is the result of one ``fully_shard`` call. A ``Runtime`` is the shared state of all units
below one root: phases, prefetch, the end of backward, recovery. ``attach`` creates the runtime.
This module contains no autograd or hook code: ``step`` decides when each operation runs.

Phases of a runtime::

    IDLE ──begin_forward──▶ FORWARD ──end_forward──▶ IDLE
    IDLE ──begin_backward─▶ BACKWARD ─end_backward─▶ IDLE      (a recomputed forward stays BACKWARD)
    FORWARD, BACKWARD ──recover (after an exception)──▶ IDLE

[Note: conditional units]
Some ranks may skip a conditional unit, so its hooks run no collectives. The *owning unit* is the
nearest enclosing unit that is not conditional. On every rank, it gathers, frees and reduces the
conditional unit's groups together with its own groups. ``own_groups`` are the groups of a unit's
``fully_shard`` call; ``groups`` are the groups that its hooks manage. Units inside a conditional
unit are conditional too.

[Note: the order of backward]
In forward, all ranks enter and leave units in the same order. Autograd runs younger nodes first, so
each rank's backward reaches these events in reverse order. It may miss some events: a unit gets no
gradient if the rank uses none of its parameters, returns its input, detaches an output, or updates
an input in place. When a backward reaches an event, it therefore first processes all missed events,
as if the units' gradients were zero. Every rank thus gathers and reduces the same units in the same
order, wherever its graph is cut. At the end of backward, the remaining events are processed.

*Within one root.* Each root records its own order. If a graph through several roots is cut on one
rank, this rank may process the events of two roots in a different order from other ranks. All ranks
then raise the error that reports different collectives.

*The first backward* of a forward processes all missed events. A later backward (``retain_graph``, a
second derivative, separate weight gradients of a pipeline) may visit only some nodes, in another
order. It processes a missed event only if the first backward also missed it (``Order._made_up``).

*Entered first.* The inputs of the first unit, and of its enclosing units, often do not require
grad. No mark then shows where backward leaves these units. Backward leaves them when it ends or
reaches another forward (a sum of two losses). ``Order.rest`` finds the first event with a mark;
units entered before this event stay open. The outermost unit stays unsharded until the end of
backward, because the other forward usually begins with the same unit.

[Note: manual finalization]
By default, the runtime reduces the remaining gradients, and waits for reductions, at the end of
backward. In manual mode, ``finalize_backward`` does both. Until then, a unit whose post-backward
did not run keeps its memory, and its gradients stay unreduced. The caller may wait for the
reductions later. Until the caller waits, lanes hold the buffers in flight, so no tree that shares
the streams may start a step.

[Note: a step is a transaction]
An exception leaves no state that affects the next step. An exception in a forward passes through
the unit that began the forward. This unit marks the runtime as failed. If backward raises, autograd
destroys the end-of-backward callback without calling it. The callback's ``__del__`` registers
shards immediately; a dead weak reference to the callback shows the failure. The next forward waits
for work in flight, reshards, and drops unreduced gradients. If all ranks failed, they all recover.

[Note: threads]
One thread runs steps. Another thread may read the state between steps (``state_dict``). It holds a
lock while it reads, and a new step waits for this lock. During a step, reads raise an error. All
ranks must issue collectives in the same order, so only the thread that runs steps may issue them.

[Note: until the next step]
After a backward without gradient sync, another backward follows before the optimizer step. Until
then, parameters may stay unsharded (``shard=``) or sharded over a smaller mesh. The first forward
after an optimizer step gathers the updated shards.

Writes through ``.data``, a NumPy array or a local tensor do not increment a version, and neither do
fused kernels on DTensors. A forward thus uses kept parameters only if all of these conditions hold:

- a backward without gradient sync kept them, and this forward is recorded by autograd;
- that backward left gradients, and they are still the same objects with the same versions (a
  backward that only computes gradients of inputs, such as forces, may belong to an evaluation);
- no optimizer has stepped, and no shard's version has changed.

Otherwise the parameters are freed when the forward begins, and gathered again unit by unit. One
case is not detected: a write that does not increment a version, between micro-batches of the same
step. Each condition has the same value on all ranks that run the same program.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
import torch.nn as nn

from fsdp2._core.base import events, torch_autograd, torch_compiler, torch_dtensor, torch_modes
from fsdp2._core.base.containers import Loan
from fsdp2._core.base.errors import StateError
from fsdp2._core.base.events import BACKWARD, FORWARD, IDLE, Observable
from fsdp2._core.base.policy import MixedPrecisionPolicy, Precision, Settings
from fsdp2._core.base.torch_autograd import version_of
from fsdp2._core.base.torch_modules import profiler_is_running
from fsdp2._core.comm.device_streams import streams_for
from fsdp2._core.comm.late_look import LateLook
from fsdp2._core.comm.wire import StepContext, Streams
from fsdp2._core.engine.parts import Parts
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.reduce import SMALL_NBYTES, ReductionQueue, may_hold
from fsdp2._core.params.registration import GATHERING, SHARDED, SMALLER, WHOLE, Serves


class Staying:
    """Groups that stay unsharded, or sharded over a smaller mesh, between micro-batches."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self.groups = groups  # including frozen groups, which have no gradients
        self._may_keep = any(group.may_stay for group in groups)
        self._kept: dict[ParamGroup, None] = {}  # an ordered set
        self._before: list[tuple[int, int]] = []  # gradients when the last backward began
        self._gradients: list[tuple[int, int]] | None = None  # at its end; None: no new gradients

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, groups: Iterable[ParamGroup]) -> None:
        """After a backward, record the groups that are kept for accumulation."""
        for group in groups:
            if group.registration.serves is Serves.ACCUMULATION:
                self._kept[group] = None

    def begin_backward(self) -> None:
        if self._may_keep:
            self._before = self._look()

    def note_gradients(self) -> None:
        found = self._look()
        self._gradients = None if found == self._before else found or None

    def begin_forward(self) -> None:
        """Reshard groups that may be stale. See [Note: until the next step]."""
        is_evaluation = not torch.is_grad_enabled()
        is_over = is_evaluation or self._gradients is None or self._look() != self._gradients
        for group in list(self._kept):
            registration = group.registration
            if registration.values is not None and registration.serves is Serves.ACCUMULATION:
                if not is_over and not registration.were_written:
                    continue
                group.reshard()
            del self._kept[group]

    def _look(self) -> list[tuple[int, int]]:
        """Return ids and versions of all gradients, including unreduced ones. The results
        change at the same points on all ranks that run the same program."""
        found: list[tuple[int, int]] = []
        with torch_dtensor.DisableTorchFunctionSubclass():  # halves the cost of DTensor attributes
            for group in self.groups:
                reducer, before = group.reducer, len(found)
                if reducer.unreduced.own_sums:
                    found.append((0, reducer.unreduced.own_sums))
                for param in group.params:
                    for form in (param.sharded, param.unsharded):
                        grad = None if form is None else form.grad
                        if grad is not None:  # use its id: a reference would prevent buffer reuse
                            found.append((id(grad), version_of(grad)))
                if len(found) > before:  # adding to a DTensor does not increment its version
                    found.append((0, reducer.deliveries))
        return found


class Looks:
    """The ``LateLook`` objects of a tree's groups; none on a CPU."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._groups = groups
        self._count = 0  # ``LateLook.count`` when these were collected
        self._found: tuple[LateLook, ...] = ()

    @property
    def all(self) -> tuple[LateLook, ...]:
        if self._count != LateLook.count:
            looks = dict.fromkeys(
                one.late for group in self._groups for one in group.ids.agreements
            )
            self._found = tuple(look for look in looks if look is not None)
            self._count = LateLook.count
        return self._found


class StepThread:
    """The thread that runs the steps of one tree. See [Note: threads]."""

    def __init__(self) -> None:
        self.ident = 0  # ident of the thread that ran the last forward; 0: none
        self.lock = threading.RLock()  # protects reads of parameters between steps

    @property
    def is_another(self) -> bool:
        """Return True if another live thread runs the steps."""
        if self.ident in (0, threading.get_ident()):
            return False
        if torch_autograd.graph_task_id() != -1:  # an autograd thread of the step
            return False
        return any(one.ident == self.ident for one in threading.enumerate())


UNIT_ATTRIBUTE = "_fsdp2_unit"


class Runner(Protocol):
    """Temporarily replaces the engine's hooks on a unit. A compiler that traces the module also
    traces ``call``, unless ``call`` is ``never_traced``."""

    def call(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


@dataclass(eq=False)
class Calls:
    """The forwards of a unit, and the progress of backwards through them."""

    running: list[Any] = field(default_factory=list)  # ``step.Call`` or None; innermost last
    # replaced tensors, with the number of calls that were running
    lent: list[tuple[int, Loan]] = field(default_factory=list)
    ran: set[nn.Module] = field(default_factory=set)  # modules that ran in this forward
    recorded: int = 0  # number of forwards with a live graph
    open: int = 0  # number of recorded forwards without a post-backward yet
    active: int = 0  # number of forwards that the running backward has entered but not left
    # attributes that hold outputs; None until the first forward has been inspected
    kept_on: list[tuple[nn.Module, str]] | None = None
    hides: bool = False  # keep parameter memory, because a backward may start at an unmarked tensor
    saves_by_hooks: bool = False  # our hooks save parameters; unpacking a parameter acts as a mark

    def lend(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Loan:
        """Replace tensors in the caller's containers during the innermost call."""
        loan = Loan(function)
        self.lent.append((len(self.running), loan))
        return loan

    def take_back(self) -> Loan | None:
        """Restore the tensors replaced for the finished call, if any."""
        if not self.lent or self.lent[-1][0] <= len(self.running):
            return None
        _, loan = self.lent.pop()
        loan.give_back()
        return loan

    def give_up(self, depth: int) -> None:
        """Drop all running calls except the outermost ``depth``."""
        for marks in reversed(self.running[depth:]):
            if marks is not None:
                marks.let_go()
        del self.running[depth:]
        while self.take_back() is not None:
            pass

    def abandon(self) -> None:
        self.give_up(0)
        self.ran.clear()
        self.open = self.active = 0


@dataclass(eq=False, repr=False)
class Unit:
    """The modules, groups and settings of one ``fully_shard`` call."""

    modules: tuple[nn.Module, ...]
    precision: Precision
    settings: Settings
    device: torch.device  # compute device of the unit, if it has parameters
    conditional: bool = False
    own_groups: list[ParamGroup] = field(default_factory=list)
    fqn: str = ""  # name in the tree, set by the first forward
    owner: Unit | None = None  # the owning unit, if this one is conditional
    runtime: Runtime | None = None  # set by the first forward
    streams: Streams | None = None  # for the runtime, if chosen before the first forward
    post_optim_event: torch.Event | None = None  # the root's next forward waits for it
    calls: Calls = field(default_factory=Calls)
    may_lose_gradients: bool = False  # see ``note_unsynced_backward``
    runner: Runner | None = None  # replaces the hooks
    # in summon_full_params: the ranks with full parameters ("all" or "first"); otherwise ""
    summoned_on: str = ""

    def __post_init__(self) -> None:
        # groups that the unit's hooks manage; ``attach`` adds those of conditional units
        self.groups: list[ParamGroup] = self.own_groups

    @property
    def trains(self) -> bool:
        return any(param.trainable for group in self.groups for param in group.params)

    @property
    def is_root(self) -> bool:
        return self.runtime is not None and self.runtime.root is self

    @property
    def lanes(self) -> Streams:
        """The streams of the tree, chosen before the first forward if a manual gather uses them."""
        if self.runtime is not None:
            return self.runtime.context.streams
        self.streams = self.streams or streams_for(self.device)
        return self.streams

    def take_names(self, names: Mapping[nn.Module, str]) -> None:
        """Set the full names of the unit and its parameters, given the names of modules."""
        self.fqn = next((names[module] for module in self.modules if module in names), self.fqn)
        for group in self.own_groups:
            group.fqn = ".".join(filter(None, (self.fqn, group.early.part)))
            for param in group.params:
                for site in param.sites:
                    if site.module in names:
                        param.fqn = ".".join(filter(None, (names[site.module], site.name)))
                        break

    def configure(self, **changes: Any) -> None:
        """Replace settings. A misspelt name raises TypeError."""
        self.settings = dataclasses.replace(self.settings, **changes)
        for group in self.own_groups:
            group.settings = self.settings

    def keeps_after_forward(self, with_grad: bool) -> bool:
        """Return True if parameters stay unsharded after forward; by default, only a root's do."""
        settings, choice = self.settings, self.settings.reshard_after_forward
        if settings.sharding.keeps_whole and not with_grad:
            return settings.keeps_in_evaluation
        return choice is False or (choice is None and self.is_root and with_grad)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor uses the memory of the unit's unsharded parameters."""
        plain = (torch.Tensor, nn.Parameter)
        local = tensor if type(tensor) in plain else torch_dtensor.local_part(tensor)
        if type(local) not in plain or torch_modes.transforms_are_active():
            return False  # wrapper tensors may have no memory
        storage = local.untyped_storage()
        return any(group.buffers.lies_in(storage) for group in self.groups)

    def keep(self) -> None:
        """Keep unsharded parameters after a forward. Later writes to shards are detected."""
        is_pipelined = self.runtime is not None and self.runtime.is_pipelined
        serves = Serves.BACKWARDS
        if is_pipelined and self.settings.reshard_after_forward is False:
            serves = Serves.FORWARDS
        elif self.settings.keeps_in_evaluation and not torch.is_grad_enabled():
            serves = Serves.EVALUATIONS
        for group in self.groups:
            if group.is_unsharded:
                group.keep(serves)

    def stop_hiding(self) -> None:
        """Stop keeping parameter memory for a backward that starts at an unmarked tensor."""
        if self.calls.hides:
            self.calls.hides = False
            for group in self.groups:
                group.keep_memory(False)

    def reshard(self) -> None:
        for group in self.groups:
            group.reshard()

    def reshard_after_backward(self) -> None:
        """Reshard, but keep groups unsharded or on a smaller mesh until the next micro-batch, if
        their settings allow it."""
        for group in self.groups:
            if group.settings.accumulates and group.stays:
                if group.state is WHOLE and not group.settings.sharding.keeps_whole:
                    group.reshard_post_forward()
                if group.state is WHOLE or group.state is SMALLER:
                    group.registration.is_held = False
                    group.keep(Serves.ACCUMULATION)
                    continue
            group.reshard()

    def show_shards(self) -> None:
        """Register sharded parameters, but free nothing. See [Note: between steps] in ``group``."""
        for group in self.groups:
            if group.state is not SHARDED:
                group.registration.show_shards()

    def reshard_unless_gathering(self) -> None:
        """Reshard after a failure. Do not wait for gathers: other ranks may never issue them."""
        for group in self.groups:
            group.registration.forget_placeholders()
            group.registration.forget_whole_writes()
            # during a gather, shards on a smaller mesh may still be registered
            if group.state is GATHERING:
                group.registration.show_shards()
            else:
                group.reshard()

    @property
    def is_unsharded(self) -> bool:
        return all(group.is_unsharded for group in self.groups)

    def note_unsynced_backward(self) -> None:
        """Check a backward without gradient sync that found this unit's parameters sharded. If the
        backward only computes gradients of inputs, a pipeline stage later computes gradients of the
        parameters registered after forward. If these are shards, the gradients are lost."""
        trainable = [p.unsharded for g in self.groups for p in g.params if p.trainable]
        if trainable and not any(
            p is not None and torch_autograd.computes_gradient(p) for p in trainable
        ):
            self.may_lose_gradients = True

    def __getstate__(self) -> dict[str, Any]:
        """Copy only the configuration: a copy is initialised again in its first forward."""
        kept = ["modules", "precision", "settings", "device", "conditional", "own_groups", "fqn"]
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # __init__ of an existing object
        self.precision.choose_input_dtype(is_root=False)


@torch_compiler.always_eager
def unit_of(module: nn.Module) -> Unit | None:
    return module.__dict__.get(UNIT_ATTRIBUTE)


class Schedule:
    """Predicts the order of units from the last forward that began at the same unit. If a forward
    deviates, prediction stops, and this forward's order replaces the recorded one."""

    def __init__(self) -> None:
        self._recorded: dict[int, list[Unit]] = {}
        self._expected: list[Unit] = []  # empty: no prediction
        self._running: list[Unit] = []
        self._entry: int | None = None

    def begin(self, entry: Unit) -> None:
        self._entry = id(entry)
        self._expected = self._recorded.get(self._entry, [])
        self._running = []

    def visit(self, unit: Unit, count: int) -> list[Unit]:
        """Record a unit's forward; return up to ``count`` units that are predicted after it."""
        expected, running = self._expected, self._running
        running.append(unit)
        place = len(running)
        if place > len(expected) or expected[place - 1] is not unit:
            self._expected = []
            return []
        return expected[place : place + count]

    def end(self) -> None:
        if self._entry is not None:
            self._recorded[self._entry] = self._running
        self.abandon()

    def abandon(self) -> None:
        self._entry, self._running, self._expected = None, [], []


@dataclass(eq=False, slots=True)
class Visit:
    """One forward of a unit, and the state of backward through it."""

    unit: Unit
    policy: MixedPrecisionPolicy  # the unit's, in this forward
    stream: torch.Stream | None  # stream of the forward, and thus of its backward
    order: Order | None = None  # None for a recomputation
    # positions in order; left is -1 if no backward can reach it
    entered: int = -1
    left: int = -1
    previous: tuple[Unit, ...] = ()  # units whose forwards ended before this one, latest first
    marks_input: bool = False  # an input has a mark, at which backward leaves the unit
    opened_in: int = 0  # number of the backward that is inside this visit; 0: none
    closed_in: int = 0  # number of the last backward that left this visit
    closed_by: int = -1  # id of the autograd run that closed it; runs may be nested

    def was_passed(self) -> bool:
        """Return True if the current autograd run has closed this visit. If another gradient
        arrives in this run, it comes from a node with two marks, and needs no parameters. In a
        nested or enclosing run, a gradient belongs to a new backward through the forward."""
        return self.closed_by == torch_autograd.graph_task_id()


class Order:
    """The order in which visits began and ended in one outermost forward."""

    __slots__ = ("_made_up", "backward", "events", "is_first", "place")

    def __init__(self) -> None:
        self.events: list[Visit] = []
        self.backward = 0  # number of the last backward that reached this forward
        self.is_first = True
        self.place = 0  # the running backward has processed events from this place on
        self._made_up: set[int] = set()

    def begin(self, number: int) -> None:
        """Start a backward through this forward, unless it has already started."""
        if number != self.backward:
            self.is_first = self.backward == 0
            self.backward = number
            self.place = len(self.events)

    def missed(self, place: int) -> Iterator[tuple[Visit, bool]]:
        """Advance to just after ``place``; yield visits, with True to arrive or False to depart."""
        while self.place > place + 1:
            self.place -= 1
            at, visit = self.place, self.events[self.place]
            if visit.left < 0:  # no backward can reach it
                continue
            if self.is_first:
                self._made_up.add(at)
            elif at not in self._made_up:
                continue
            yield visit, at == visit.left

    def rest(self) -> Iterator[tuple[Visit, bool]]:
        """Advance to the end of a backward. See *Entered first* in the module docstring."""
        first = next((at for at, visit in enumerate(self.events) if visit.left == at), 0)
        left = self.events[: self.place]  # events that backward has not processed
        lowest = self.place
        for at, visit in enumerate(left):
            if at == visit.entered and visit.left >= 0 and (at > first or visit.marks_input):
                lowest = at
                break
        for visit, opens in self.missed(-1):
            if opens or visit.entered >= lowest:  # inner visits end before outer ones
                yield visit, opens


class EndOfBackward:
    """A callback that autograd calls at the end of the running backward, and then destroys. If it
    is destroyed without being called, the backward failed."""

    def __init__(self, ended: Callable[[], None], failed: Callable[[], None]) -> None:
        self._ended, self._failed = ended, failed
        self._was_called = False
        torch_autograd.queue_callback(self)

    @torch_compiler.always_eager
    def __call__(self) -> None:
        self._was_called = True
        self._ended()

    @torch_compiler.always_eager
    def __del__(self) -> None:
        if not self._was_called:
            self._failed()


class Backward:
    def __init__(self) -> None:
        self.number = 1  # number of the running or last backward; in a visit, 0 means none
        self.order: Order | None = None  # order of the forward that backward is processing
        self.open: list[Visit] = []  # visits that backward has reached
        self.with_graph = False  # the backward creates a graph (create_graph=True)
        # whether backwards since the last finalization began in manual mode; None: no backward
        self.began_manual: bool | None = None
        # None or a dead reference if no backward is running
        self.callback: weakref.ref[EndOfBackward] | None = None
        self.dropping = threading.RLock()  # an autograd thread may destroy a failed backward

    def forget_places(self) -> None:
        self.open.clear()
        self.order = None


class Prefetches(Observable):
    """Prefetches of units, predicted from the order of earlier forwards."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        self._schedule = Schedule()
        self._last: tuple[Unit, ...] = ()  # units that ran before this point, latest first
        self._gathered: list[Unit] = []  # prefetched, but possibly not used

    def begin(self, entry: Unit) -> None:
        self._last = ()
        self._schedule.begin(entry)

    def forward(self, unit: Unit) -> None:
        """Unshard the units after ``unit``, overlapped with its compute."""
        settings = unit.settings
        expected = self._schedule.visit(unit, settings.overlap.prefetch)
        chosen = settings.prefetch.forward
        for other in expected if chosen is None else chosen:
            self.gather(other)

    def backward(self, unit: Unit, previous: tuple[Unit, ...]) -> None:
        """Unshard the units that backward needs after ``unit``."""
        following = unit.settings.prefetch.backward
        if following is None:
            following = previous[: unit.settings.overlap.prefetch]
        for other in following:
            if other is not unit:
                self.gather(other)

    def gather(self, unit: Unit) -> None:
        if unit.calls.active:  # in use: do not gather early-released parts again
            return
        is_backward = self._context.phase is BACKWARD
        for group in unit.groups:
            if is_backward and (
                group.early.skips_backward or not group.settings.unshard_in_backward
            ):
                continue
            if events.listeners and group.state not in (GATHERING, WHOLE):
                events.emit("prefetch", unit.fqn, self._context.phase)
            group.unshard()
        self._gathered.append(unit)

    def follow(self, unit: Unit) -> tuple[Unit, ...]:
        """End a recorded forward of a unit; return the units that ran before it, latest first."""
        before, depth = self._last, unit.settings.overlap.prefetch
        self._last = (unit,) if depth < 2 else (unit, *before[: depth - 1])
        return before

    def end(self) -> None:
        """End a forward: record its order, and reshard units whose prefetch was not used."""
        self._schedule.end()
        for unit in self._gathered:
            for group in unit.groups:
                if group.state is GATHERING:
                    group.reshard()
        self._gathered.clear()

    def forget(self) -> None:
        self._gathered.clear()

    def abandon(self) -> None:
        self._gathered.clear()
        self._schedule.abandon()
        self._last = ()

    observed_as: ClassVar[Mapping[str, Callable[..., Any]]] = {"prefetch": gather}


class HiddenOutputs:
    """Units with hidden outputs. See [Note: hidden outputs] in ``step``."""

    def __init__(self) -> None:
        self.unmarked: set[Unit] = set()  # units that ran without marked outputs
        self.saving: Any = None  # the active ``SavedByHooks``, innermost

    def note_unmarked(self, unit: Unit) -> None:
        """Record a forward of a trainable unit that has no marked output."""
        self.unmarked.add(unit)
        for group in unit.groups:
            may_hold[id(group.reducer)] = group.reducer

    def note_hidden(self, unit: Unit, units: list[Unit], keeps_memory: bool) -> None:
        """Record that backward may read parameters before any mark. ``units``: the whole tree."""
        if keeps_memory:
            unit.calls.hides = True
            for group in unit.groups:
                group.keep_memory(True)
        if not unit.calls.saves_by_hooks:
            kinds = {type(module) for module in unit.modules}
            for other in units:
                if not kinds.isdisjoint(map(type, other.modules)):
                    other.calls.saves_by_hooks = True

    def refuse(self) -> None:
        """Raise StateError if backward ran through an unmarked forward; else clear the records."""
        for unit in self.unmarked:
            for group in unit.groups:
                group.reducer.refuse_hidden()
        self.forget()

    def forget(self) -> None:
        for unit in self.unmarked:
            if not unit.calls.recorded:
                unit.stop_hiding()
        self.unmarked.clear()


class Runtime(Observable):
    """State of a tree of units. The first unit to run a forward becomes the root."""

    def __init__(self, root: Unit, units: list[Unit]) -> None:
        self.root = root
        self.units = units
        groups = [group for unit in units for group in unit.own_groups]
        self.context = StepContext(root.lanes)
        self.forward_root: Unit | None = None  # the unit that began the running forward
        self.failed = False  # the last forward raised; the next one recovers
        self.is_pipelined = False  # a pipeline runs many forwards before their backwards
        self.thread = StepThread()
        self.backward = Backward()
        self.order = Order()  # order of the running or last forward
        self.prefetches = Prefetches(self.context)
        self.hidden = HiddenOutputs()
        self.staying = Staying(groups)
        self.looks = Looks(groups)
        self.parts: Parts | None = None  # None: the tree has no large parts
        sizes = [sum(param.nbytes for param in group.params) for group in groups]
        self.reductions = ReductionQueue(self.context, max(sizes, default=0) >= SMALL_NBYTES)

    # Forward.

    def begin_forward(self, entry: Unit) -> None:
        self.refuse_pending("forward")
        self.recover_if_failed()
        if self.hidden.unmarked:
            self.hidden.refuse()
        if not self.is_pipelined:
            for unit in self.units:
                # the unit's backward may run before its next forward checks requires_grad
                if unit.calls.open:
                    for group in unit.groups:
                        toggled = [param for param in group.params if param.is_toggled]
                        if toggled:
                            group.reducer.toggle(toggled, group.settings)
        self.context.streams.look_late(self.looks.all)
        logs, profiles = events.logger.isEnabledFor(logging.DEBUG), profiler_is_running()
        if logs or profiles or events.listeners:
            events.follow(events.profile_event, profiles)
            events.follow(events.log_event, logs)
        if self.staying:
            self.staying.begin_forward()
        event, self.root.post_optim_event = self.root.post_optim_event, None
        if event is None:
            self.context.streams.order_after_compute("gather")
            if not self.context.streams.async_op:
                for group in self.staying.groups:
                    group.reducer.release_gradients()
        else:  # the optimizer may still read gradients that are no longer referenced
            self.context.streams.order_after_event("gather", event)
        self.thread.ident = threading.get_ident()
        with self.thread.lock:
            self.context.phase = FORWARD
        self.forward_root = entry
        self.order = Order()
        self.prefetches.begin(entry)

    def end_forward(self) -> None:
        self.context.phase = IDLE
        self.forward_root = None
        self.prefetches.end()
        self.context.streams.drain("gather")
        is_recorded = False
        for unit in self.units:
            if unit.calls.ran:  # only some of its modules ran in this forward
                unit.calls.ran.clear()
                if unit.keeps_after_forward(torch.is_grad_enabled()):
                    unit.keep()
                else:
                    unit.reshard()
            if unit.calls.recorded:
                is_recorded = True
            else:  # no backward can reach it
                unit.show_shards()
        if not is_recorded:
            self.context.streams.finish_host_reads()
            self.context.streams.note_late(self.looks.all)

    def lose_graph(self, unit: Unit) -> None:
        """Handle the loss of a recorded forward's graph: no backward can reach the forward now."""
        unit.calls.recorded -= 1
        if not unit.calls.recorded:
            unit.stop_hiding()
        if not unit.calls.recorded and self.context.phase is IDLE:
            unit.show_shards()
            self.context.streams.finish_host_reads()

    # Backward.

    @property
    def is_recomputing(self) -> bool:
        """Return True if a forward that starts now is a recomputation inside a backward."""
        return self.context.phase is not FORWARD and torch_autograd.graph_task_id() != -1

    def begin_backward(self) -> None:
        """Start a backward when its first gradient reaches a unit."""
        backward = self.backward
        if self.context.phase is BACKWARD:
            if backward.callback is not None and backward.callback() is not None:
                return
            self.recover()
        backward.number += 1
        failed = functools.partial(self._drop_backward, backward.number)
        backward.callback = weakref.ref(EndOfBackward(self._finish_backward, failed))
        backward.with_graph = torch.is_grad_enabled()
        with self.thread.lock:
            self.context.phase = BACKWARD
        self.staying.begin_backward()
        if backward.began_manual is None:
            backward.began_manual = self.root.settings.manual_finalization
        if self.parts is not None:
            self.parts.begin()

    def arrive(self, visit: Visit, is_in_order: bool = True) -> None:
        """Make a unit's parameters available when backward reaches one of its forwards.
        ``is_in_order``: False in a backward through gradients that another backward computed."""
        number = self.backward.number
        if visit.opened_in == number:
            return
        is_again = visit.closed_in == number
        order = visit.order
        if order is not None and is_in_order and not is_again:
            if order is not self.backward.order or order.place != visit.left + 1:
                self._catch_up(order, visit.left)
            order.place = visit.left
        unit = visit.unit
        visit.opened_in = number
        unit.calls.active += 1
        self.backward.open.append(visit)
        if is_again:
            # reached again in this backward: reduce at the end of backward
            unit.calls.open = unit.calls.open or 1
        loses = not unit.settings.reduce_grads and not unit.is_unsharded
        wanted = [
            group
            for group in unit.groups
            if group.settings.unshard_in_backward and not group.early.skips_backward
        ]
        if self.parts is not None and not all(group.is_unsharded for group in wanted):
            self.parts.pass_event()
        if self.reductions.is_large:
            self.reductions.free_done()
        for group in wanted:
            group.unshard()
        for group in wanted:
            group.wait_for_unshard()
        if not is_again:  # an implicit layer may reach the same unit many times
            self.prefetches.backward(unit, visit.previous)
        if loses:
            unit.note_unsynced_backward()

    def depart(self, visit: Visit) -> None:
        """Leave a unit's forward in backward: reshard, and reduce if no other call is open."""
        number = self.backward.number
        if visit.opened_in != number:
            return
        order = visit.order
        if order is not None and visit.closed_in != number:
            if order is not self.backward.order or order.place != visit.entered + 1:
                self._catch_up(order, visit.entered)
            order.place = visit.entered
        unit = visit.unit
        self._count_closed(visit)
        if unit.calls.active:
            return
        # needed by another forward (see *Entered first*) or another module of the unit
        is_needed_again = unit.calls.open and (visit.entered == 0 or len(unit.modules) > 1)
        if unit.settings.reshard_after_backward and not is_needed_again:
            unit.reshard_after_backward()
        if not unit.calls.open:
            self.reduce(unit)

    def _count_closed(self, visit: Visit) -> None:
        calls, number = visit.unit.calls, self.backward.number
        visit.opened_in = 0
        calls.active -= 1
        if visit.closed_in != number:
            visit.closed_in, visit.closed_by = number, torch_autograd.graph_task_id()
            if calls.open:
                calls.open -= 1

    def _catch_up(self, order: Order, place: int) -> None:
        """Process the events that backward missed on its way to a position in a forward's order."""
        if order is not self.backward.order:
            if self.backward.order is not None:
                self._go_through(self.backward.order.missed(-1))
            order.begin(self.backward.number)
            self.backward.order = order
        self._go_through(order.missed(place))

    def _go_through(self, missed: Iterable[tuple[Visit, bool]]) -> None:
        """Process events that no gradient reached on this rank."""
        for visit, opens in missed:
            with self.context.streams.on(visit.stream):  # the stream of the unit's gradients
                if not opens:
                    self.depart(visit)
                elif visit.closed_in != self.backward.number:
                    self.arrive(visit)

    def end_call(self, visit: Visit) -> None:
        """End a unit's forward that a backward may reach, on this rank or another."""
        unit = visit.unit
        unit.calls.open += 1
        visit.previous = self.prefetches.follow(unit)
        visit.left = len(self.order.events)
        self.order.events.append(visit)

    def reduce(self, unit: Unit) -> None:
        """Reduce a unit's gradients, or accumulate them if its gradient sync is off."""
        parts = self.parts
        if parts is not None and any(
            group.settings.reduce_grads and group.reducer.plan().members for group in unit.groups
        ):
            parts.pass_event()  # a reduction is an event on every rank
        for group in unit.groups:
            if parts is None or not parts.tells_of_more(group):
                self.reduce_group(group)

    def reduce_group(self, group: ParamGroup) -> None:
        has_begun = self.reductions.reduce(group.reducer, group.settings, self.backward.with_graph)
        if has_begun and self.parts is not None:
            self.parts.note_reduced(group)

    def end_backward(self) -> None:
        """Reduce the remaining gradients, finish work in flight, and reshard."""
        if self.backward.order is not None:
            self._go_through(self.backward.order.rest())
        ran = {unit for unit in self.units if unit.calls.open or unit.calls.active}
        for visit in self.backward.open:
            if visit.opened_in == self.backward.number:
                self._count_closed(visit)
        self.backward.forget_places()
        is_manual = self.root.settings.manual_finalization
        is_last = not is_manual and all(unit.settings.is_last_backward for unit in self.units)
        self.reduce_the_rest(ran, is_last, is_manual)
        self.context.streams.drain("gather")
        self.hidden.forget()
        if is_last:
            self.end_reductions()
        else:
            self.reductions.settle()
            self.context.streams.note_late(self.looks.all)
            if self.staying:
                self.staying.note_gradients()
        self.context.phase = IDLE if self.forward_root is None else FORWARD
        self.backward.callback = None

    def reduce_the_rest(
        self,
        ran: set[Unit],
        is_last: bool,
        is_manual: bool,
    ) -> None:
        """Reduce the remaining gradients, and reshard, unless manual mode does this later. ``ran``:
        the units that ran in this backward; they are reduced even without gradients."""
        for unit in reversed(self.units):
            has_to = bool(unit.groups) and self._has_to_reduce(unit, unit in ran)
            is_late = has_to and is_manual and unit.settings.reduce_grads
            if is_late or (unit in ran and not has_to):
                for group in unit.groups:
                    group.reducer.unreduced.is_owed = True
            elif has_to:
                self.reduce(unit)
            unit.calls.open = 0
            if not is_late:
                self._reshard_after_backward(unit, is_last)
        self.prefetches.forget()
        if self.parts is not None:
            self.parts.end()

    def end_reductions(self) -> None:
        """Finish all reductions, so that gradients are safe to use."""
        self.wait_for_reductions()
        self._flush_partial()
        if self.staying:
            self.staying.note_gradients()
        self.context.streams.note_late(self.looks.all)
        self.context.streams.finish_host_reads()
        self.backward.began_manual = None

    def refuse_pending(self, who: str) -> None:
        """Raise StateError if a reduction in flight has not been waited for."""
        pending = self.context.streams.pending
        if pending is not None:
            pending.refuse(who, self)

    def _has_to_reduce(self, unit: Unit, has_run: bool) -> bool:
        """Return True if a unit ran (on all ranks), but no post-backward reduced its gradients. A
        rank that used none of the unit's parameters reduces zeros."""
        for group in unit.groups:
            if self.parts is None or not self.parts.tells_of_more(group):
                owes = has_run or group.reducer.unreduced.is_owed
                if group.reducer.has_local_gradients or (group.settings.reduce_grads and owes):
                    return True
        return False

    def _reshard_after_backward(self, unit: Unit, is_last: bool) -> None:
        """Reshard, unless a running forward or a later backward needs the parameters."""
        if unit.calls.running:
            return
        keeps = not unit.settings.reshard_after_backward
        if not keeps and not (self.backward.with_graph and unit.is_unsharded):
            unit.reshard_after_backward()
            if not unit.settings.accumulates:
                return
        else:
            for group in unit.groups:
                group.registration.is_held = False
                if group.is_unsharded:
                    group.keep(Serves.FORWARDS if keeps else Serves.BACKWARDS)
        self.staying.keep(unit.groups)
        if is_last and self.forward_root is None:
            unit.show_shards()

    def _flush_partial(self) -> None:
        """All-reduce gradients that earlier backwards reduced only over the shard axis."""
        for unit in reversed(self.units):
            for group in unit.groups:
                if group.reducer.unreduced.partial is not None and group.settings.all_reduce_grads:
                    self.reduce(unit)
                    break
        if self.reductions:
            self.wait_for_reductions()

    def wait_for_reductions(self) -> None:
        self.reductions.wait()
        if events.listeners:
            events.emit("wait_for_reduce", self.root.fqn, self.context.phase)

    # Recovery.

    def fail(self) -> None:
        """Handle an exception in forward: reshard now; the next forward recovers."""
        self.failed = True
        self.forward_root = None
        self.context.phase = IDLE
        for unit in self.units:
            unit.reshard_unless_gathering()

    def _finish_backward(self) -> None:
        try:
            aside(self.end_backward)
        except BaseException:
            self.abandon_backward()
            raise

    def _drop_backward(self, number: int) -> None:
        with self.backward.dropping:
            if number == self.backward.number:
                self.abandon_backward()

    def abandon_backward(self) -> None:
        """Handle an exception in backward: reshard now; the next forward recovers. Does not wait
        for gathers in flight, because they have not registered parameters yet."""
        for unit in self.units:
            unit.reshard_unless_gathering()

    @property
    def is_in_other_thread(self) -> bool:
        """Return True if another thread is inside a forward or backward. See [Note: threads]."""
        phase = self.context.phase
        if phase is IDLE or self.failed or not self.thread.is_another:
            return False
        callback = self.backward.callback
        return phase is FORWARD or (callback is not None and callback() is not None)

    def forget_flights(self) -> None:
        """Drop all work in flight without waiting: the work was captured, but never ran."""
        self.reductions.drop(has_run=False)
        self.context.streams.forget()
        for group in self.staying.groups:
            group.drop_gather(has_run=False)

    def recover_if_failed(self) -> None:
        seems_dead = self.context.phase is BACKWARD and torch_autograd.graph_task_id() == -1
        if (self.failed or seems_dead) and not self.is_in_other_thread:
            self.recover()

    def recover(self) -> None:
        """Return to a clean state. See [Note: a step is a transaction]."""
        pending = self.context.streams.pending
        if pending is not None and pending.tree is not self:
            pending.refuse("reset_iter_state", self)
        self.context.streams.pending = self.backward.began_manual = None
        if events.listeners:
            events.emit("recover", self.root.fqn, self.context.phase)
        broken = next((g.ids.broken for g in self.staying.groups if g.ids.broken is not None), None)
        if broken is not None:  # work in flight may never finish
            self.fail()
            for group in self.staying.groups:
                group.reducer.discard()
                group.registration.forget_placeholders()
            raise StateError("FS401", broken)
        with self.backward.dropping:  # a late autograd thread must not drop the new state
            self.backward.number += 1
        self.reductions.drop()
        self.backward.forget_places()
        for unit in self.units:
            unit.calls.abandon()
            unit.stop_hiding()
            unit.reshard()
            for group in unit.groups:
                group.reducer.discard()
                group.registration.forget_placeholders()
        self.context.streams.reset()
        self.hidden.forget()
        self.hidden.saving = None
        self.prefetches.abandon()
        if self.parts is not None:
            self.parts.forget()
        self.forward_root = self.backward.callback = None
        self.failed = False
        self.context.phase = IDLE

    observed_as: ClassVar[Mapping[str, Callable[..., Any]]] = {
        "begin_forward": begin_forward,
        "end_forward": end_forward,
        "arrive": arrive,
        "depart": depart,
        "close": _count_closed,
        "reduce": reduce,
        "end_backward": end_backward,
        "end_reductions": end_reductions,
        "wait_for_reductions": wait_for_reductions,
        "fail": fail,
        "abandon_backward": abandon_backward,
        "recover": recover,
    }


def aside(function: Callable[..., object], *args: Any) -> None:
    """Run engine code outside the user's modes and transforms."""
    if torch_modes.count_modes() or torch_modes.transforms_are_active():
        torch_modes.run_aside(function, *args)
    else:
        function(*args)


def enter(unit: Unit) -> None:
    """Begin a unit's forward: unshard its parameters."""
    runtime, owner = unit.runtime, unit.owner
    assert runtime is not None
    if owner is not None and unit.own_groups and not (owner.calls.running or owner.calls.active):
        raise StateError(
            "FS305",
            f"{unit.fqn}: is conditional, but was called outside the forward of its enclosing "
            "module, which gathers its parameters. Call it from that forward, or apply fully_shard "
            "to it without conditional.",
        )
    recomputing = runtime.context.phase is not FORWARD and runtime.is_recomputing
    if not recomputing and runtime.forward_root is None:
        runtime.begin_forward(unit)
    for group in unit.groups:
        group.inspect(recomputing)
    for group in unit.groups:
        group.unshard()
    for group in unit.groups:
        group.wait_for_unshard()
    if not recomputing and owner is None:
        runtime.prefetches.forward(unit)


def leave(unit: Unit, module: nn.Module, recomputing: bool) -> None:
    """End a unit's forward: reshard, depending on its settings."""
    runtime, with_grad = unit.runtime, torch.is_grad_enabled()
    assert runtime is not None
    is_over = not (unit.calls.active or (recomputing and with_grad))
    if is_over and len(unit.modules) > 1:
        unit.calls.ran.add(module)
        is_over = len(unit.calls.ran) == len(unit.modules)
        if is_over:
            unit.calls.ran.clear()
    if is_over:
        if runtime.parts is not None:
            runtime.parts.end_forward(unit, with_grad)
        if unit.keeps_after_forward(with_grad):
            unit.keep()
        elif with_grad:
            for group in unit.groups:
                if not group.early.skips_backward:
                    group.reshard_post_forward()
        else:
            unit.reshard()
    for group in unit.groups:
        if group.registration.placed:
            group.registration.return_placeholders()
    if runtime.forward_root is unit:
        runtime.end_forward()

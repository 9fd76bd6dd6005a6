"""Units, and the runtime of a tree of units: what is done in a step.

Owns what one call of ``fully_shard`` made (``Unit``), and the state that the units below one root
share (``Runtime``): phases, prefetch, the end of backward, recovery. It must not know autograd's
nodes or hooks of modules: ``step`` says when each thing is done. ``attach`` makes a runtime.

Map: ``Calls`` and ``Unit``; ``Schedule``, which predicts a forward from the last one; ``Visit`` and
``Order``, which keep the place of a backward in its forward; ``EndOfBackward`` and ``Backward``;
``Prefetches`` and ``HiddenOutputs``; ``Runtime``; ``enter`` and ``leave``, around each forward.

Phases of a runtime::

    IDLE ──begin_forward──▶ FORWARD ──end_forward──▶ IDLE
    IDLE ──begin_backward─▶ BACKWARD ─end_backward─▶ IDLE      (a recomputed forward stays BACKWARD)
    FORWARD, BACKWARD ──recover (an exception left it there)──▶ IDLE

[Note: conditional units]
Some ranks may skip a conditional unit. So its hooks move nothing: the nearest unit above it that is
not conditional, its *owning unit*, moves its groups with its own, on every rank. ``own_groups`` is
what the call of ``fully_shard`` made, ``groups`` is what this unit's hooks move. A unit inside a
conditional one is conditional too.

[Note: the order of backward]
Ranks enter and leave units in the same order in forward. Autograd runs younger nodes first, so each
rank's backward meets the same events in the reverse order; but not all of them. A rank may leave
parameters out, return a unit's input, detach an output, or update an input in place, and no
gradient reaches a unit there. So whatever a backward meets, it first goes through the events in
between, as if a gradient that is zero had come by: every rank gathers and reduces the same units in
the same order, wherever its graph is cut. The events before the last that it meets come at its end.

*Within one root.* Each root has orders of its own. Where a rank's graph is cut that goes through
several roots, it makes up for one root's events after those of another. Ranks are out of step
then, and get the error of ranks that issue different collectives.

*The first backward* of a forward does so. A later one (``retain_graph``, a second derivative, the
weights of a pipeline stage on their own) may be about a few nodes, and in another order. It makes
up for exactly those events that the first one had to make up for (``Order._made_up``).

*Entered first.* If the inputs of the first unit of a forward, and of those around it, need no
gradient, nothing marks the place where backward leaves them. It leaves them at its end, or when it
comes to another forward (a sum of two losses). ``Order.rest`` finds the lowest event that has a
mark; units entered before it stay open. The outermost stays whole until then, because the other
forward begins with it as a rule.

[Note: manual finalization]
A backward ends by itself: what no post-backward reduced is reduced, and reductions are waited for.
In manual mode it leaves both to ``finalize``. A unit whose post-backward did not come keeps its
memory until then, and owes its gradients. The caller may wait for the reductions later. Until then
nothing of a tree that shares the streams may start: lanes hold the buffers of what is in flight.

[Note: a step is a transaction]
An exception leaves no trace that the next step could meet. A forward that raises passes through
the unit that began it, which marks the runtime. A backward that raises never calls its callback,
and autograd drops it, which registers shards at once. A dead reference to the callback, outside of
any backward, says that the last backward failed. The next forward then waits for what is in flight,
reshards, drops unreduced gradients and starts clean. All ranks do so if all ranks failed, which is
what their collectives need.

[Note: threads]
One thread runs steps. Another one may look at the state between them (``state_dict``): it holds the
lock meanwhile, and a step that begins waits for it. During a step it gets an error. What ranks do
together has one order on all of them, so only the thread of the steps may begin it.

[Note: until the next step]
A backward without gradient sync says that another one follows before the optimizer's step. After it
parameters may stay whole (``shard``), or sharded over a smaller mesh, for the forward of the next
micro-batch. The first forward after a step gathers them from the shards that the optimizer wrote.

What is written to ``.data``, a NumPy array or a local tensor counts no version, and a fused kernel
on DTensors counts none either. So a forward uses what stayed only if all of this holds:

- a backward without gradient sync left it there, and this forward is recorded;
- it left gradients, and they are there: the same objects, of the same versions. One that computed
  gradients of inputs alone, as for forces, left none: it may have been an evaluation;
- no optimizer has stepped, and no shard has another version.

Otherwise memory is freed when the forward begins, and gathered again unit by unit. Not seen is only
a write that counts no version in the middle of an accumulation that goes on afterwards. Nothing
that is asked here differs between ranks that run alike.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
import torch.nn as nn

from fsdp2._core.base import (
    events,
    torch_autograd,
    torch_compiler,
    torch_dtensor,
    torch_modes,
)
from fsdp2._core.base.containers import Loan
from fsdp2._core.base.errors import StateError
from fsdp2._core.base.events import BACKWARD, FORWARD, IDLE, Observable
from fsdp2._core.base.policy import MixedPrecisionPolicy, Settings
from fsdp2._core.base.torch_autograd import version_of
from fsdp2._core.base.torch_modules import profiler_is_running
from fsdp2._core.comm.device_streams import streams_for
from fsdp2._core.comm.late_look import LateLook
from fsdp2._core.comm.wire import StepContext, Streams
from fsdp2._core.engine.parts import Parts
from fsdp2._core.engine.precision import Precision
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.reduce import SMALL_NBYTES, ReductionQueue, may_hold
from fsdp2._core.params.registration import GATHERING, SHARDED, WHOLE, Serves

# What backwards leave in memory for the forwards of one accumulation, and until when it is valid.


class Staying:
    """The groups of a tree that stay as they are from a backward to the forwards after it."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._all = groups  # of the tree: a frozen group has no gradients of its own
        self._may_keep = any(group.may_stay for group in groups)
        self._kept: dict[ParamGroup, None] = {}  # in the order in which they were kept
        # the gradients that there were when the last backward began
        self._before: list[tuple[int, int]] = []
        # the gradients that it left; None: it left none
        self._gradients: list[tuple[int, int]] | None = None

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, groups: Iterable[ParamGroup]) -> None:
        """Let groups stay, of which the values were noted, after a backward."""
        for group in groups:
            if group.registration.serves is Serves.ACCUMULATION:
                self._kept[group] = None

    def begin_backward(self) -> None:
        """See which gradients there are before a backward leaves more."""
        if self._may_keep:
            self._before = self._look()

    def note_gradients(self) -> None:
        """A backward is over: see which gradients there are now."""
        found = self._look()
        self._gradients = None if found == self._before else found or None

    def begin_forward(self) -> None:
        """Free what must not be used any more. See [Note: until the next step]."""
        is_evaluation = not torch.is_grad_enabled()
        is_over = is_evaluation or self._gradients is None or self._look() != self._gradients
        for group in list(self._kept):
            registration = group.registration
            stays = registration.values is not None
            if stays and registration.serves is Serves.ACCUMULATION:
                if not is_over and not registration.were_written:
                    continue
                group.reshard()
            del self._kept[group]

    def _look(self) -> list[tuple[int, int]]:
        """Return what tells gradients from others, those included that wait for a reduction.

        The same on ranks that run alike, or different from what it was on each of them.
        """
        found: list[tuple[int, int]] = []
        with torch_dtensor.DisableTorchFunctionSubclass():  # halves what reads of a DTensor cost
            for group in self._all:
                reducer, before = group.reducer, len(found)
                if reducer.unreduced.own_sums:
                    found.append((0, reducer.unreduced.own_sums))
                for param in group.params:
                    for form in (param.sharded, param.unsharded):
                        grad = None if form is None else form.grad
                        if grad is not None:  # not held: a buffer that nobody holds is filled again
                            found.append((id(grad), version_of(grad)))
                if len(found) > before:  # what is added to a DTensor counts no version there
                    found.append((0, reducer.deliveries))
        return found


# The thread that runs steps, and others that look at the state between them.


class StepThread:
    """The thread that runs the steps of one tree. See [Note: threads]."""

    def __init__(self) -> None:
        self.ident = 0  # of the thread that ran the last forward; 0: none did
        self.lock = threading.RLock()  # taken by who looks at parameters between steps

    @property
    def is_another(self) -> bool:
        """True if steps run in another thread than this one, and that lives."""
        if self.ident in (0, threading.get_ident()):
            return False
        if torch_autograd.graph_task_id() != -1:  # of a device, autograd's thread is in that step
            return False
        return any(one.ident == self.ident for one in threading.enumerate())


UNIT_ATTRIBUTE = "_fsdp2_unit"


class Runner(Protocol):
    """What runs a unit's modules in place of the engine's hooks, for a while.

    A compiler that traces the module traces ``call`` too, unless that is ``never_traced``.
    """

    def call(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


class Calls:
    """The forwards of a unit, and where backwards are in them."""

    def __init__(self) -> None:
        # Of each running forward its ``step.Call``, or None; the innermost last.
        self.running: list[Any] = []
        # tensors lent to a call, with the number of calls running then
        self.lent: list[tuple[int, Loan]] = []
        self.ran: set[nn.Module] = set()  # the modules of the unit that ran in this forward
        self.recorded = 0  # how many forwards have a graph that lives: a backward may come
        self.open = 0  # how many recorded forwards are not past their post-backward
        self.active = 0  # how many forwards the running backward has entered and not left
        # attributes that hold outputs; None until the first forward has been looked at
        self.kept_on: list[tuple[nn.Module, str]] | None = None
        # parameters keep their memory: a backward may begin at a tensor that has no mark
        self.hides = False
        self.saves_by_hooks = False  # nodes save parameters by our hooks, so reading one is a mark

    def lend(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Loan:
        """Let the innermost call have other tensors in the caller's containers."""
        loan = Loan(function)
        self.lent.append((len(self.running), loan))
        return loan

    def take_back(self) -> Loan | None:
        """Give the caller back what was lent to the call that is over, if anything was."""
        if not self.lent or self.lent[-1][0] <= len(self.running):
            return None
        _, loan = self.lent.pop()
        loan.give_back()
        return loan

    def give_up(self, depth: int) -> None:
        """Forget the calls that run inside of this many."""
        for marks in reversed(self.running[depth:]):
            if marks is not None:
                marks.let_go()
        del self.running[depth:]
        while self.take_back() is not None:
            pass

    def abandon(self) -> None:
        """Forget what an unfinished step left."""
        self.give_up(0)
        self.ran.clear()
        self.open = self.active = 0


class Unit:
    """What one call of ``fully_shard`` made: its modules, its groups, its settings."""

    def __init__(
        self,
        modules: tuple[nn.Module, ...],
        precision: Precision,
        settings: Settings,
        device: torch.device,
        conditional: bool = False,
    ) -> None:
        self.modules = modules
        self.precision = precision
        self.settings = settings
        self.device = device  # the device that the unit computes on, if it has parameters
        self.conditional = conditional
        self.own_groups: list[ParamGroup] = []
        # the groups that the unit's hooks move; ``take_over`` adds those of conditional units
        self.groups: list[ParamGroup] = self.own_groups
        # the unit whose hooks move the groups of this one, if it is conditional
        self.owner: Unit | None = None
        self.fqn = ""  # its name in the tree, known from the first forward on
        self.runtime: Runtime | None = None  # made by the first forward
        # lanes that share_comm_ctx gave it; the runtime takes them over
        self.streams: Streams | None = None
        # an event of the user's that the next forward of the root waits for
        self.post_optim_event: torch.Event | None = None
        self.calls = Calls()
        # ``note_unsynced_backward`` found that a pipeline stage may lose gradients
        self.may_lose_gradients = False
        # what runs the modules in place of the hooks; None: the hooks do
        self.runner: Runner | None = None
        # which ranks have whole parameters in summon_full_params: "all", "first"; "" outside of it
        self.summoned_on = ""

    @property
    def trains(self) -> bool:
        """True if a parameter that the unit's hooks move is trained."""
        return any(param.trainable for group in self.groups for param in group.params)

    @property
    def is_root(self) -> bool:
        return self.runtime is not None and self.runtime.root is self

    def configure(self, **changes: Any) -> None:
        """Replace settings; a misspelt name is a TypeError."""
        self.settings = dataclasses.replace(self.settings, **changes)
        for group in self.own_groups:
            group.settings = self.settings

    def keeps_after_forward(self, with_grad: bool) -> bool:
        """True if parameters stay unsharded after a forward.

        A root that was given no choice keeps them for its backward only: after a forward without
        gradients ``parameters()`` are sharded again.
        """
        settings, choice = self.settings, self.settings.reshard_after_forward
        if settings.sharding.keeps_whole and not with_grad:
            return settings.keeps_in_evaluation
        return choice is False or (choice is None and self.is_root and with_grad)

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if a tensor lies in memory of whole parameters that the unit's hooks move."""
        plain = (torch.Tensor, nn.Parameter)
        local = tensor if type(tensor) in plain else torch_dtensor.local_part(tensor)
        if type(local) not in plain or torch_modes.transforms_are_active():
            return False  # a tensor that is made of other tensors may have no memory of its own
        storage = local.untyped_storage()
        return any(group.buffers.lies_in(storage) for group in self.groups)

    def keep(self) -> None:
        """Let whole parameters stay after a forward; who writes to the shards is noticed."""
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
        """Keep memory no longer for a backward that may begin where it has no mark."""
        if self.calls.hides:
            self.calls.hides = False
            for group in self.groups:
                group.keep_memory(False)

    def reshard(self) -> None:
        for group in self.groups:
            group.reshard()

    def show_shards(self) -> None:
        """Register sharded parameters; whole ones may stay. [Note: between steps] in ``group``."""
        for group in self.groups:
            if group.state is not SHARDED:
                group.registration.show_shards()

    def reshard_unless_gathering(self) -> None:
        """Reshard what is whole. After a failure nothing may be waited for: ranks may differ."""
        for group in self.groups:
            group.registration.forget_stand_ins()
            group.registration.forget_whole_writes()
            # shards over a smaller mesh may be registered while it gathers from them
            if group.state is GATHERING:
                group.registration.show_shards()
            else:
                group.reshard()

    @property
    def is_unsharded(self) -> bool:
        return all(group.is_unsharded for group in self.groups)

    def note_unsynced_backward(self) -> None:
        """A backward without sync reached this unit and found its parameters sharded.

        If it computes gradients of inputs only, a pipeline stage means to compute those of
        parameters later, of the parameters that it saw registered before: gradients may be lost.
        """
        trainable = [p.unsharded for g in self.groups for p in g.params if p.trainable]
        if trainable and not any(
            p is not None and torch_autograd.computes_gradient(p) for p in trainable
        ):
            self.may_lose_gradients = True

    def __getstate__(self) -> dict[str, Any]:
        """Copies carry the recipe; a copy is initialised again at its first forward."""
        kept = ["modules", "precision", "settings", "device", "conditional", "own_groups", "fqn"]
        return {name: getattr(self, name) for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        first = state["modules"], state["precision"], state["settings"], state["device"]
        self.__init__(*first)  # type: ignore[misc]  # not a new object
        vars(self).update(state)
        self.precision.choose_input_dtype(is_root=False)
        self.groups = self.own_groups


@torch_compiler.always_eager
def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit that ``fully_shard`` made of a module."""
    return module.__dict__.get(UNIT_ATTRIBUTE)


class Schedule:
    """Predict a forward from the last one that began at the same unit.

    Several entry points (``forward``, ``generate``) have an order each. A forward that leaves the
    recorded order is not predicted any further; what it does is the record for the next time.
    """

    def __init__(self) -> None:
        self._recorded: dict[int, list[Unit]] = {}
        self._expected: list[Unit] = []
        self._running: list[Unit] = []
        self._entry: int | None = None
        self._on_track = False

    def begin(self, entry: Unit) -> None:
        """Start to record a forward whose first unit is ``entry``."""
        self._entry = id(entry)
        self._expected = self._recorded.get(self._entry, [])
        self._running = []
        self._on_track = bool(self._expected)

    def visit(self, unit: Unit) -> Unit | None:
        """Record a unit's forward; return the one that is expected to follow."""
        position = len(self._running)
        self._running.append(unit)
        expected = self._expected
        if not self._on_track:
            return None
        if position >= len(expected) or expected[position] is not unit:
            self._on_track = False
            return None
        return expected[position + 1] if position + 1 < len(expected) else None

    def upcoming(self, count: int) -> list[Unit]:
        """Return up to ``count`` units that are expected after the last one that was visited."""
        if not self._on_track:
            return []
        position = len(self._running)
        return self._expected[position : position + count]

    def end(self) -> None:
        """Keep the order of the forward that is over."""
        if self._entry is not None:
            self._recorded[self._entry] = self._running
        self._entry, self._running = None, []

    def abandon(self) -> None:
        """Forget the running forward; it did not end."""
        self._entry, self._running, self._on_track = None, [], False


class Visit:
    """One forward of a unit, and the backwards that have been through it."""

    __slots__ = (
        "closed_by",
        "closed_in",
        "entered",
        "left",
        "marks_input",
        "opened_in",
        "order",
        "policy",
        "previous",
        "stream",
        "unit",
    )

    def __init__(self, unit: Unit, order: Order | None, stream: torch.Stream | None) -> None:
        self.unit = unit
        self.policy: MixedPrecisionPolicy = unit.precision.policy
        # the units whose forwards ended before this one, the last one first
        self.previous: tuple[Unit, ...] = ()
        # an input has a mark, so a gradient tells when backward leaves the visit
        self.marks_input = False
        self.opened_in = 0  # the number of the backward that is in the visit; 0 while none is
        self.closed_in = 0  # the number of the last backward that went through the visit
        # autograd's number of the run that closed it; runs may lie inside each other
        self.closed_by = -1
        self.stream = stream  # the stream of the forward, in which autograd goes back, too
        # the order of its forward; None for a recomputation, which has no place in one
        self.order = order
        # its two places in the order; left stays -1 if no backward can come
        self.entered = self.left = -1
        if order is not None:
            self.entered = len(order.events)
            order.events.append(self)

    def was_passed(self) -> bool:
        """True if the run of autograd that is under way has closed this visit.

        A gradient that comes then is of a node that has two marks, and needs no parameters. One of
        another run, inside or around the one that closed it, differentiates the forward again.
        """
        return self.closed_by == torch_autograd.graph_task_id()


class Order:
    """What one forward, begun outside of any other, entered and left."""

    __slots__ = ("_made_up", "backward", "events", "is_first", "place")

    def __init__(self) -> None:
        self.events: list[Visit] = []
        self.backward = 0  # the number of the last backward that came to this forward
        self.is_first = True
        self.place = 0  # where the running backward is: this event and those after it are over
        self._made_up: set[int] = set()

    def begin(self, number: int) -> None:
        """A backward comes here, for the first time unless it was here before."""
        if number != self.backward:
            self.is_first = self.backward == 0
            self.backward = number
            self.place = len(self.events)

    def missed(self, place: int) -> Iterator[tuple[Visit, bool]]:
        """Go on to just after ``place``; yield the visits to come to (True) or to leave (False)."""
        while self.place > place + 1:
            self.place -= 1
            at, visit = self.place, self.events[self.place]
            if visit.left < 0:  # it trains nothing, and its output needed no gradient
                continue
            if self.is_first:
                self._made_up.add(at)
            elif at not in self._made_up:
                continue
            yield visit, at == visit.left

    def rest(self) -> Iterator[tuple[Visit, bool]]:
        """Go to the end of a backward. See *entered first* in [Note: the order of backward]."""
        first = next((at for at, visit in enumerate(self.events) if visit.left == at), 0)
        left = self.events[: self.place]  # the events that backward has yet to leave
        lowest = self.place
        for at, visit in enumerate(left):
            if at == visit.entered and visit.left >= 0 and (at > first or visit.marks_input):
                lowest = at
                break
        for visit, opens in self.missed(-1):
            if opens or visit.entered >= lowest:  # what is inside of one is left before it
                yield visit, opens


class EndOfBackward:
    """What autograd's engine calls once the running backward is over.

    It lives exactly as long as that backward. Dropped without a call it tells, at once, that the
    backward failed.
    """

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
    """The backward that is running, or ran last."""

    def __init__(self) -> None:
        self.number = 1  # the number of this backward, which its visits carry; no backward has 0
        self.order: Order | None = None  # the order of the forward that this backward is in
        self.open: list[Visit] = []  # the visits that this backward has come to
        self.with_graph = False  # the backward creates a graph (create_graph=True)
        # the mode in which backwards began since the last end; None: there was none
        self.began_manual: bool | None = None
        # what the engine calls at the end; None or dead while no backward runs
        self.callback: weakref.ref[EndOfBackward] | None = None
        # taken while a backward is let go of, which autograd's own thread may do on a device
        self.dropping = threading.RLock()

    def forget_places(self) -> None:
        self.open.clear()
        self.order = None


class Prefetches(Observable):
    """What is gathered ahead, and the orders of units that predict it."""

    def __init__(self, context: StepContext) -> None:
        self._context = context
        # the order of units in the last forward, by which the next one is predicted
        self._schedule = Schedule()
        # the units that ran before this point, the last one first
        self._last: tuple[Unit, ...] = ()
        self._gathered: list[Unit] = []  # ahead, and they may not have been used

    def begin(self, entry: Unit) -> None:
        """A forward begins outside of any other."""
        self._last = ()
        self._schedule.begin(entry)

    def forward(self, unit: Unit) -> None:
        """Issue the unshard of what follows ``unit``, to overlap with its compute."""
        expected = self._schedule.visit(unit)
        settings = unit.settings
        depth = settings.overlap.prefetch
        following: Iterable[Unit]
        if settings.forward_prefetch is not None:
            following = settings.forward_prefetch
        elif depth == 1:
            following = () if expected is None else (expected,)
        else:
            following = self._schedule.upcoming(depth)
        for other in following:  # its own forward will look at what is registered
            self.gather(other)

    def backward(self, unit: Unit, previous: tuple[Unit, ...]) -> None:
        """Issue the unshard of what backward needs after ``unit``."""
        following = unit.settings.backward_prefetch
        if following is None:
            following = previous[: unit.settings.overlap.prefetch]
        for other in following:
            if other is not unit:
                self.gather(other)

    def gather(self, unit: Unit) -> None:
        """Issue the unshard of a unit whose turn is yet to come."""
        if unit.calls.active:  # it has what it needs, and reads what counts as released early
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
        """A recorded forward of a unit is over; return the units before it, the last one first."""
        before, depth = self._last, unit.settings.overlap.prefetch
        self._last = (unit,) if depth < 2 else (unit, *before[: depth - 1])
        return before

    def end(self) -> None:
        """The forward is over. Keep its order, and give back what was gathered and not used."""
        self._schedule.end()
        for unit in self._gathered:
            for group in unit.groups:
                if group.state is GATHERING:
                    group.reshard()
        self._gathered.clear()

    def forget(self) -> None:
        """A backward is over: what was gathered for it was used, or is resharded now."""
        self._gathered.clear()

    def abandon(self) -> None:
        """Forget a step that did not end."""
        self._gathered.clear()
        self._schedule.abandon()
        self._last = ()

    observed_as: ClassVar[Mapping[str, Callable[..., Any]]] = {"prefetch": gather}


class HiddenOutputs:
    """Forwards that left outputs where nobody sees them. See the note on these in ``step``."""

    def __init__(self) -> None:
        self.unmarked: set[Unit] = set()  # units that ran, and no output of theirs has a mark
        # the hooks of the innermost forward whose nodes save by some, a ``SavedByHooks``
        self.saving: Any = None

    def note_unmarked(self, unit: Unit) -> None:
        """A forward that trains is over, and no output of it has a mark."""
        self.unmarked.add(unit)
        for group in unit.groups:
            may_hold.add(group.reducer)

    def note_hidden(self, unit: Unit, units: list[Unit], keeps_memory: bool) -> None:
        """A backward may read parameters of a forward before it comes to a mark of it.

        ``units``: those of its tree.
        """
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
        """Raise StateError if a backward came to one that had no mark; else forget them."""
        for unit in self.unmarked:
            for group in unit.groups:
                group.reducer.refuse_hidden()
        self.forget()

    def forget(self) -> None:
        """A backward is over, or another forward begins."""
        for unit in self.unmarked:
            if not unit.calls.recorded:
                unit.stop_hiding()
        self.unmarked.clear()


class Runtime(Observable):
    """State of a tree of units. The first unit that runs a forward becomes its root."""

    def __init__(self, root: Unit, units: list[Unit]) -> None:
        self.root = root
        self.units = units
        # units of several modules, of which a forward may run some
        self._several = [unit for unit in units if len(unit.modules) > 1]
        self._groups = [group for unit in units for group in unit.own_groups]
        self.context = StepContext(root.streams or streams_for(root.device))
        # the unit whose forward began outside of any other, while it runs
        self.forward_root: Unit | None = None
        self.failed = False  # the last forward raised; the next one recovers
        # a pipeline runs many forwards before their backwards, and ends these
        self.is_pipelined = False
        self.thread = StepThread()
        self.backward = Backward()
        self.order = Order()  # the order of the forward that runs, or ran last
        self.prefetches = Prefetches(self.context)
        self.hidden = HiddenOutputs()
        self.staying = Staying(self._groups)
        self.parts: Parts | None = None  # None: the tree has no large part of a root
        sizes = [sum(param.nbytes for param in group.params) for group in self._groups]
        self.reductions = ReductionQueue(self.context, max(sizes, default=0) >= SMALL_NBYTES)
        # the looks of this tree, and how many existed when they were collected
        self._known_looks: tuple[int, tuple[LateLook, ...]] = (0, ())

    # Forward.

    def begin_forward(self, entry: Unit) -> None:
        """A unit's forward starts outside of any other's."""
        if self.context.streams.pending is not None:
            self.refuse_pending("forward")
        self.recover_if_failed()
        if self.hidden.unmarked:
            self.hidden.refuse()
        if not self.is_pipelined:
            for unit in self.units:
                # its backward may still come, without a forward that looks at requires_grad before
                if unit.calls.open:
                    for group in unit.groups:
                        toggled = [param for param in group.params if param.is_toggled]
                        if toggled:
                            group.toggle(toggled)
        self.context.streams.look_late(self._looks())
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
                for group in self._groups:
                    group.reducer.release_gradients()
        else:  # an optimizer beside the compute may still read gradients that nobody holds
            self.context.streams.order_after_event("gather", event)
        self.thread.ident = threading.get_ident()
        with self.thread.lock:
            self.context.phase = FORWARD
        self.forward_root = entry
        self.order = Order()
        self.prefetches.begin(entry)

    def _looks(self) -> tuple[LateLook, ...]:
        """Return what looks later at what ranks sent along; nothing does on a CPU."""
        if self._known_looks[0] != LateLook.count:
            looks = dict.fromkeys(look for group in self._groups for look in group.ids.looks)
            self._known_looks = LateLook.count, tuple(looks)
        return self._known_looks[1]

    def end_forward(self) -> None:
        """The forward that began outside of any other is over."""
        self.context.phase = IDLE
        self.forward_root = None
        self.prefetches.end()
        self.context.streams.drain("gather")
        for unit in self._several:
            if unit.calls.ran:  # not all of its modules ran in this forward
                unit.calls.ran.clear()
                if unit.keeps_after_forward(torch.is_grad_enabled()):
                    unit.keep()
                else:
                    unit.reshard()
        is_recorded = False
        for unit in self.units:
            if unit.calls.recorded:
                is_recorded = True
            else:  # no backward of this forward can come
                unit.show_shards()
        if not is_recorded:
            self.context.streams.finish_host_reads()
            self.context.streams.note_late(self._looks())

    def lose_graph(self, unit: Unit) -> None:
        """A recorded forward of a unit is gone: no backward through it can come any more."""
        unit.calls.recorded -= 1
        if not unit.calls.recorded:
            unit.stop_hiding()
        if not unit.calls.recorded and self.context.phase is IDLE:
            unit.show_shards()
            if self.context.streams.host_read is not None:
                self.context.streams.finish_host_reads()

    # Backward.

    @property
    def is_recomputing(self) -> bool:
        """True if a forward that starts now is a recomputation inside a backward."""
        return self.context.phase is not FORWARD and torch_autograd.graph_task_id() != -1

    def begin_backward(self) -> None:
        """The first gradient of a backward reached a unit."""
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
        """Backward comes to a forward of a unit: make its parameters whole.

        ``is_in_order``: through the forward. Through gradients that another backward made, it comes
        in an order of its own, and through the forward afterwards.
        """
        number = self.backward.number
        if visit.opened_in == number:
            return
        is_again = visit.closed_in == number
        order = visit.order
        # Mostly nothing was missed: this event is the next one.
        if order is not None and is_in_order and not is_again:
            if order is not self.backward.order or order.place != visit.left + 1:
                self._catch_up(order, visit.left)
            order.place = visit.left
        unit = visit.unit
        visit.opened_in = number
        unit.calls.active += 1
        self.backward.open.append(visit)
        if is_again:
            # a unit that is differentiated again is reduced at the end
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
        if not is_again:  # a solver comes many times to one unit
            self.prefetches.backward(unit, visit.previous)
        if loses:
            unit.note_unsynced_backward()

    def depart(self, visit: Visit) -> None:
        """Backward leaves a forward of a unit: give parameters back, reduce if it was the last."""
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
        # the outermost unit of one of several forwards: see *entered first*; or the gradient of
        # one module of a unit is on its way to the next one
        is_needed_again = unit.calls.open and (visit.entered == 0 or len(unit.modules) > 1)
        if unit.settings.reshard_after_backward and not is_needed_again:
            for group in unit.groups:
                if group.settings.accumulates:
                    group.reshard_after_backward()
                else:
                    group.reshard()
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
        """Do first what backward missed before a place of a forward's order."""
        if order is not self.backward.order:
            if self.backward.order is not None:
                self._go_through(self.backward.order.missed(-1))
            order.begin(self.backward.number)
            self.backward.order = order
        self._go_through(order.missed(place))

    def _go_through(self, missed: Iterable[tuple[Visit, bool]]) -> None:
        """Do what is due at events that no gradient reached on this rank."""
        for visit, opens in missed:
            with self.context.streams.on(visit.stream):  # gradients of the unit are ordered there
                if not opens:
                    self.depart(visit)
                elif visit.closed_in != self.backward.number:
                    self.arrive(visit)

    def end_call(self, visit: Visit) -> None:
        """A unit's forward is over, and a backward may come to it, here or on another rank."""
        unit = visit.unit
        unit.calls.open += 1
        visit.previous = self.prefetches.follow(unit)
        visit.left = len(self.order.events)
        self.order.events.append(visit)

    def reduce(self, unit: Unit) -> None:
        """Reduce a unit's gradients, or accumulate them while its sync is off."""
        parts = self.parts
        if parts is not None and any(
            group.settings.reduce_grads and group.reducer.plan().members for group in unit.groups
        ):
            parts.pass_event()  # the reduction is a collective, in which every rank takes part
        for group in unit.groups:
            if parts is None or not parts.tells_of_more(group):
                self.reduce_group(group)

    def reduce_group(self, group: ParamGroup) -> None:
        """Reduce the gradients of one group, or accumulate them."""
        with_graph = self.backward.with_graph
        has_begun = self.reductions.reduce(group.reducer, group.settings, with_graph)
        if has_begun and self.parts is not None:
            self.parts.note_reduced(group)

    def end_backward(self) -> None:
        """Reduce what no post-backward reduced, finish what is in flight, reshard."""
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
        if self.hidden.unmarked:
            self.hidden.forget()
        if is_last:
            self.end_reductions()
        else:
            self.reductions.settle()
            self.context.streams.note_late(self._looks())
            if self.staying:
                self.staying.note_gradients()
        self.context.phase = IDLE if self.forward_root is None else FORWARD
        self.backward.callback = None

    def reduce_the_rest(self, ran: set[Unit], is_last: bool, is_manual: bool) -> None:
        """Reduce what no post-backward did, and reshard; in manual mode leave that for later.

        ``ran``: units of this backward. Whoever had no gradient in it owes one too.
        """
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
        """Make every gradient safe to use: backwards are complete."""
        self.wait_for_reductions()
        self._flush_partial()
        if self.staying:
            self.staying.note_gradients()
        self.context.streams.note_late(self._looks())
        self.context.streams.finish_host_reads()
        self.backward.began_manual = None

    def refuse_pending(self, who: str) -> None:
        """Raise StateError while gradients are being reduced that somebody has to wait for."""
        pending = self.context.streams.pending
        if pending is not None:
            pending.refuse(who, self)

    def _has_to_reduce(self, unit: Unit, has_run: bool) -> bool:
        """True if a unit that ran, here and so on every rank, was not reduced by a post-backward.

        A rank on which none of its parameters was used reduces zeros: others may have gradients.
        """
        for group in unit.groups:
            if self.parts is None or not self.parts.tells_of_more(group):
                owes = has_run or group.reducer.unreduced.is_owed
                if group.reducer.has_local_gradients or (group.settings.reduce_grads and owes):
                    return True
        return False

    def _reshard_after_backward(self, unit: Unit, is_last: bool) -> None:
        """Reshard, unless a forward around this backward, or a backward through it, needs more."""
        if unit.calls.running:
            return
        keeps = not unit.settings.reshard_after_backward
        if not keeps and not (self.backward.with_graph and unit.is_unsharded):
            for group in unit.groups:
                if group.settings.accumulates:
                    group.reshard_after_backward()
                else:
                    group.reshard()
            if not unit.settings.accumulates:
                return
        else:
            for group in unit.groups:
                group.registration.is_held = False
                if group.is_unsharded:
                    group.keep(Serves.FORWARDS if keeps else Serves.BACKWARDS)
        self.staying.keep(unit.groups)
        if is_last and self.forward_root is None:  # else the step goes on
            unit.show_shards()

    def _flush_partial(self) -> None:
        """Reduce over replicas what earlier backwards reduced over shards only."""
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
        """The running forward raised. The next one recovers; parameters are sharded at once."""
        self.failed = True
        self.forward_root = None
        self.context.phase = IDLE
        for unit in self.units:
            unit.reshard_unless_gathering()

    def _finish_backward(self) -> None:
        try:
            if torch_modes.count_modes() or torch_modes.transforms_are_active():
                torch_modes.run_aside(self.end_backward)
            else:
                self.end_backward()
        except BaseException:
            self.abandon_backward()
            raise

    def _drop_backward(self, number: int) -> None:
        with self.backward.dropping:
            if number == self.backward.number:
                self.abandon_backward()

    def abandon_backward(self) -> None:
        """The running backward raised. The next forward recovers; parameters are sharded at once.

        Also where nothing may be waited for: a gather in flight has registered nothing.
        """
        for unit in self.units:
            unit.reshard_unless_gathering()

    @property
    def is_in_other_thread(self) -> bool:
        """True if another thread is inside of a forward or a backward. See [Note: threads]."""
        phase = self.context.phase
        if phase is IDLE or self.failed or not self.thread.is_another:
            return False
        callback = self.backward.callback
        return phase is FORWARD or (callback is not None and callback() is not None)

    def recover_if_failed(self) -> None:
        """Recover from a forward or a backward that raised, if one did."""
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
        broken = next((g.ids.broken for g in self._groups if g.ids.broken is not None), None)
        if broken is not None:  # what is in flight may never end
            self.fail()
            for group in self._groups:
                group.reducer.discard()
                group.registration.forget_stand_ins()
            raise StateError("FS401", broken)
        with self.backward.dropping:  # that thread may be late: what it drops is over by now
            self.backward.number += 1
        self.reductions.drop()
        self.backward.forget_places()
        for unit in self.units:
            unit.calls.abandon()
            unit.stop_hiding()
            unit.reshard()
            for group in unit.groups:
                group.reducer.discard()
                group.registration.forget_stand_ins()
        self.context.streams.reset()
        if self.hidden.unmarked:
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


def enter(unit: Unit) -> None:
    """A forward of a unit begins: make its parameters whole."""
    runtime, owner = unit.runtime, unit.owner
    assert runtime is not None
    if owner is not None and unit.own_groups and not (owner.calls.running or owner.calls.active):
        raise StateError(
            "FS305",
            f"{unit.fqn}: is conditional, and was called outside of the module above it, "
            "which gathers its parameters. Call it from that module's forward, or apply "
            "fully_shard to it without conditional.",
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


def leave(unit: Unit, runtime: Runtime, module: nn.Module, recomputing: bool) -> None:
    """A forward of a unit is over: give parameters back, as its settings say."""
    with_grad = torch.is_grad_enabled()
    if not (unit.calls.active or (recomputing and with_grad)):
        _reshard_after(unit, runtime, module, with_grad)
    for group in unit.groups:
        if group.registration.placed:
            group.registration.return_stand_ins()
    if runtime.forward_root is unit:
        runtime.end_forward()


def _reshard_after(unit: Unit, runtime: Runtime, module: nn.Module, with_grad: bool) -> None:
    if len(unit.modules) > 1:
        unit.calls.ran.add(module)
        if len(unit.calls.ran) < len(unit.modules):
            return
        unit.calls.ran.clear()
    if runtime.parts is not None:
        runtime.parts.end_forward(unit, with_grad)
    if unit.keeps_after_forward(with_grad):
        unit.keep()
        return
    if with_grad:
        for group in unit.groups:
            if not group.early.skips_backward:
                group.reshard_post_forward()
    else:
        unit.reshard()

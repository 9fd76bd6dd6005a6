"""``Recorder``: observes a model and writes its events as rows of a ledger. It tracks forwards and
backwards of units, passes of roots, steps, and events of the engine.

[Note: events of this model]
Events identify units by name, but the root of every model is named ``<root>``. An event is
recorded only while this model is active, under the unit's name in the model passed to ``record``.

[Note: definition of a step]
A step begins with a root's forward that records a graph, and ends after the wait for a backward's
reductions. A backward without reductions (``no_sync``) does not end a step, so accumulated
microbatches are one step. A step also continues while another root that ran still needs a backward.
A forward without gradients that runs between steps belongs to no step; its rows have step number 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from fsdp2._core.base import events, torch_autograd, torch_modules
from fsdp2._core.base.events import FORWARD, Event, Observable
from fsdp2._core.comm.wire import Streams
from fsdp2._core.engine import observed
from fsdp2._core.engine.tree import EndOfBackward, Runtime, Unit, Visit
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.reduce import Reducer
from fsdp2._core.params.registration import GATHERING, WHOLE
from fsdp2._tools.record.flights import Flights
from fsdp2._tools.record.ledger import Ledger, Row
from fsdp2._tools.record.memory import Entry

RAISED = ',"raised":true'
Do = Callable[..., Any]
"""An observed method, to be called by the observer."""


class Tree:
    """A root: its name and its current state."""

    def __init__(self, runtime: Runtime, name: str) -> None:
        self.runtime = runtime
        self.name = name
        self.running: Row | None = None  # the current forward, backward, or wait for reductions
        self.forget_step()
        self.backwards: dict[Visit, Row] = {}
        self.is_inside = False  # True inside another root's backward: see ``Passes.begin_outer``

    def forget_step(self) -> None:
        self.ran = False  # True once the root's forward has begun in this step
        self.has_reduced = False
        self.accumulates = False  # True after a backward without reductions: another must follow
        self.is_done = False  # True after the wait for the root's reductions

    @property
    def owes(self) -> bool:
        """Return True if this step still needs a backward of this root, or its reductions."""
        is_recorded = any(unit.calls.recorded for unit in self.runtime.units)
        return not self.is_done and (self.accumulates or self.has_reduced or is_recorded)


class Passes:
    """Passes and steps of the roots of a model, as rows of a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.trees: dict[Runtime, Tree] = {}

    def begin(self, tree: Tree, phase: str, begin: Any = None) -> None:
        """Begin a forward, a backward, or a wait for reductions."""
        ledger = self._ledger
        ledger.profiles = torch_modules.profiler_is_running()
        tree.running = ledger.begin("pass", tree.name, phase, begin=begin)

    def end(self, tree: Tree, extra: str = "") -> None:
        row, tree.running = tree.running, None
        if row is not None:
            self._ledger.end(row, extra=extra, account=row.step.add_pass)

    def begin_outer(self, tree: Tree) -> None:
        """Begin a backward that recomputes a unit without a recorded forward, as reentrant
        checkpointing does. Each unit inside has a separate backward, which ends when the unit is
        reduced. All these backwards form one pass, which ends with the outer backward."""
        tree.is_inside = True
        self.begin(tree, "backward")
        ended = partial(self._end_outer, tree)
        EndOfBackward(ended, ended)

    def _end_outer(self, tree: Tree) -> None:
        if tree.is_inside:
            tree.is_inside = False
            self.end(tree)
            self.end_step_if_over()

    def end_step_if_over(self) -> None:
        """End the step unless it still needs a backward or reductions of a root that ran."""
        if any(tree.is_inside for tree in self.trees.values()):
            return
        ran = [tree for tree in self.trees.values() if tree.ran]
        if any(tree.is_done for tree in ran) and not any(tree.owes for tree in ran):
            for tree in ran:
                tree.forget_step()
            self._ledger.end_step()
            self._ledger.writer.flush()

    def end_all(self, tree: Tree) -> None:
        """End all rows of a tree, after an exception or at the end of the recording."""
        tree.is_inside = False
        while tree.backwards:
            self._ledger.end(tree.backwards.popitem()[1], extra=RAISED)
        self.end(tree, RAISED)


@contextmanager
def _during(one: object, **values: Any) -> Iterator[None]:
    before = {name: getattr(one, name) for name in values}
    vars(one).update(values)
    try:
        yield
    finally:
        vars(one).update(before)


class Recorder:
    def __init__(
        self,
        names: Mapping[Unit, str],
        entries: Sequence[Entry],
        ledger: Ledger,
    ) -> None:
        self._names = names
        self._entries = entries
        self._ledger = ledger
        self._observed: dict[Observable, None] = {}
        self._entry_of: dict[ParamGroup | Reducer, Entry] = {}
        self._flights = Flights(ledger, self._entry_of)
        self._passes = Passes(ledger)
        self._forwards: dict[Unit, list[Row | None]] = {}
        self._entry: Entry | None = None  # the active unit's group, if one is active
        self._since: Any = None  # start of the wait that a later event ends

    def start(self) -> None:
        """Observe the model's units, groups and roots. See [Note: observers] in ``events``."""
        for unit in self._names:
            observed.observe(unit, self)
            self._forwards[unit] = [None] * len(unit.calls.running)
            self._meet(unit)
        for entry in self._entries:
            self._ledger.memory.look(entry)
            for one in (entry.group, entry.group.reducer):
                self._entry_of[one] = entry
                self._observe(one)
        events.listeners.append(self._hear)

    def stop(self) -> None:
        """Stop observing; unfinished rows get no end time."""
        events.listeners.remove(self._hear)
        for one in self._observed:
            one.leave(self)
        self._observed.clear()
        for unit in self._names:
            observed.leave(unit, self)
        self._flights.finish()
        for unit, rows in self._forwards.items():
            while rows:
                self.drop_forward(unit)
        for tree in self._passes.trees.values():
            self._passes.end_all(tree)

    def _observe(self, source: Observable) -> None:
        if source not in self._observed:
            self._observed[source] = None
            source.observe(self)

    def _meet(self, unit: Unit) -> None:
        """Observe the runtime of the unit's root, if it already exists."""
        runtime = unit.runtime
        if runtime is not None and runtime not in self._passes.trees:
            self._passes.trees[runtime] = Tree(runtime, self._names.get(runtime.root, ""))
            self._observe(runtime)
            self._observe(runtime.prefetches)

    def around(
        self,
        kind: str,
        source: Any,
        call: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if isinstance(source, Streams):
            return self._flights.around_launch(call, *args, **kwargs)
        if kwargs:
            call = partial(call, **kwargs)
        if kind == "prefetch":
            return self._around_prefetch(call, *args)
        if isinstance(source, Runtime):
            around: Do | None = getattr(self, f"_around_{kind}", None)
            if around is None:
                return call(*args)
            return around(self._passes.trees[source], call, *args)
        entry = self._entry_of.get(source)
        if entry is None:
            return call(*args)
        if kind == "enroll":  # the tree is being attached: its first forward has just begun
            call(*args)
            return self._meet(entry.unit)
        if kind == "unshard":
            return self._around_unshard(entry, call)
        if kind == "wait_for_unshard":
            return self._around_wait(entry, call)
        return self._act(entry.name, entry, call, *args)

    def _hear(self, event: Event) -> None:
        """Record an event. See [Note: events of this model]."""
        name, entry, kind = self._flights.active, self._entry, event.kind
        if name is None:
            return
        if entry is not None and kind in ("unshard", "reduce"):
            entry.events[kind] = event  # the row begins at the launch
            is_gather = kind == "unshard"
            self._ledger.step.nbytes["gathered" if is_gather else "reduced"] += event.nbytes
            for tree in () if is_gather else self._passes.trees.values():
                if tree.runtime.context is entry.group.context:
                    tree.has_reduced = True
        elif kind in ("wait_for_unshard", "wait_for_reduce"):  # waits have rows with a duration
            self._ended_wait(name, event)
        elif entry is not None or kind in ("prefetch", "recover"):
            if entry is not None:
                self._ledger.memory.look(entry)
            self._ledger.mark(kind, name, event.phase, event.nbytes)

    def _ended_wait(self, name: str, event: Event) -> None:
        """Write the row of the wait that the event ends."""
        if self._entry is not None:
            self._ledger.memory.look(self._entry)
        elif event.kind == "wait_for_unshard":  # the group is not recorded
            return
        self._ledger.end(self._ledger.begin(event.kind, name, event.phase, 0, self._since))

    def _act(self, name: str, entry: Entry | None, call: Do, *args: Any) -> Any:
        """Call a function on behalf of a unit: events during the call belong to the unit."""
        flights = self._flights
        before = flights.active, self._entry
        flights.active, self._entry = name, entry
        try:
            return call(*args)
        finally:
            flights.active, self._entry = before
            if entry is not None:
                self._ledger.memory.look(entry)

    def _around_unshard(self, entry: Entry, unshard: Do) -> None:
        if entry.group.state in (GATHERING, WHOLE):  # nothing to unshard
            unshard()
            return
        self._observe(entry.group.context.streams)
        with _during(self._flights, gathering=entry):
            self._act(entry.name, entry, unshard)

    def _around_wait(self, entry: Entry, wait: Do) -> None:
        if entry.group.is_unsharded:  # nothing to wait for
            wait()
            return
        with _during(entry, needs=True):
            self._wait(entry.name, entry, wait)

    def _wait(self, name: str, entry: Entry | None, wait: Do) -> None:
        """Call a function that waits for collectives; an event reports the end of the wait."""
        self._flights.look()
        with _during(self, _since=self._ledger.clock.now()):
            self._act(name, entry, wait)

    # ``_around_KIND`` wraps a runtime's method of this kind. See [Note: definition of a step].

    def _around_begin_forward(
        self,
        tree: Tree,
        begin_forward: Do,
        unit: Unit,
    ) -> None:
        ledger = self._ledger
        ledger.resolve()
        ledger.clock.begin_step()
        ledger.round = tree.runtime.backward.number
        begin = ledger.clock.now()
        self._act(tree.name, None, begin_forward, unit)
        if torch.is_grad_enabled():
            if ledger.step.number == 0:
                ledger.begin_step()
                for other in self._passes.trees.values():
                    other.forget_step()
            tree.ran = True
        self._passes.begin(tree, FORWARD, begin)

    def _around_end_forward(self, tree: Tree, end_forward: Do) -> None:
        self._act(tree.name, None, end_forward)
        self._passes.end(tree)

    def _around_end_backward(self, tree: Tree, end_backward: Do) -> None:
        self._act(tree.name, None, end_backward)
        # otherwise an enclosing pass continues
        if tree.runtime.forward_root is None and not tree.is_inside:
            self._passes.end(tree)
        self._passes.end_step_if_over()

    def _around_end_reductions(self, tree: Tree, end_reductions: Do) -> None:
        is_late = tree.running is None  # the caller waits after the backward
        if is_late:
            self._passes.begin(tree, "backward")
        self._act(tree.name, None, end_reductions)
        if tree.has_reduced or not any(unit.trains for unit in tree.runtime.units):
            tree.is_done = True
        else:
            tree.accumulates = True
        if is_late:
            self._passes.end(tree)
            self._passes.end_step_if_over()

    def _around_wait_for_reductions(self, tree: Tree, wait: Do) -> None:
        self._wait(tree.name, None, wait)

    def _around_recover(self, tree: Tree, recover: Do) -> None:
        self._passes.end_all(tree)
        self._act(tree.name, None, recover)

    def _around_fail(self, tree: Tree, fail: Do) -> None:
        self._act(tree.name, None, fail)
        self._passes.end_all(tree)
        self._ledger.end_step(failed=True)
        self._ledger.writer.flush()

    _around_abandon_backward = _around_fail

    def _around_prefetch(self, prefetch: Do, unit: Unit) -> None:
        if unit not in self._names:  # the unit contains the recorded model
            prefetch(unit)
            return
        with _during(self._flights, is_prefetching=True):
            self._act(self._names[unit], None, prefetch, unit)

    def enter_forward(self, unit: Unit) -> None:
        """Called when parameters are unsharded, immediately before the module's own forward."""
        runtime = unit.runtime
        is_first = runtime is None or runtime.context.phase is FORWARD
        kind = "forward" if is_first else "recompute"
        if kind == "recompute" and torch_autograd.graph_task_id() != -1:
            tree = None if runtime is None else self._passes.trees.get(runtime)
            if tree is not None and tree.running is None:
                self._passes.begin_outer(tree)
        self._forwards[unit].append(self._begin_unit(unit, kind))

    def _begin_unit(self, unit: Unit, kind: str) -> Row:
        ledger, name = self._ledger, self._names[unit]
        phase = FORWARD if unit.runtime is None else unit.runtime.context.phase
        row = ledger.begin(kind, name, phase)
        if ledger.profiles:
            ledger.show(row, f"{kind} {name or '<root>'}")
        return row

    def leave_forward(self, unit: Unit, extra: str = "") -> None:
        rows = self._forwards[unit]
        row = rows.pop() if rows else None
        if row is not None:
            self._ledger.end(row, extra=extra)

    def drop_forward(self, unit: Unit) -> None:
        """Called if the module's forward raised, as in a recomputation that stops early."""
        self.leave_forward(unit, RAISED)

    def _around_arrive(
        self,
        tree: Tree,
        arrive: Do,
        visit: Visit,
        *how: Any,
    ) -> None:
        """Record a unit's backward, which begins with the first ``arrive`` in a backward pass."""
        number = tree.runtime.backward.number
        if visit.opened_in == number:
            arrive(visit, *how)
            return
        self._ledger.round = number
        if tree.running is None:
            self._passes.begin(tree, "backward")
        unit = visit.unit
        self._act(self._names.get(unit, unit.fqn), None, arrive, visit, *how)
        if visit.opened_in == number and unit in self._names:
            tree.backwards[visit] = self._begin_unit(unit, "backward")

    def _around_close(self, tree: Tree, close: Do, visit: Visit) -> None:
        row = tree.backwards.pop(visit, None)
        if row is not None:
            self._ledger.end(row)
        close(visit)

    def _around_reduce(self, tree: Tree, reduce: Do, unit: Unit) -> None:
        self._act(self._names.get(unit, unit.fqn), None, reduce, unit)

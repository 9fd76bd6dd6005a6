"""``Recorder``: what an observer hears of a model, as rows of a ledger.

Owns what the model is doing right now: forwards and backwards of units, passes of roots, steps, and
events of the engine. It must not know files, or how rows get their times.

[Note: whose event]
``events`` names units, and every model has a ``<root>``. So an event is taken only inside of what
this model does, and gets the name that the unit has in what ``record`` was given.

[Note: what a step is]
It begins with a root's forward that records a graph, and ends when the reductions of a backward
were waited for. A backward that reduces nothing (``no_sync``) does not end it, so microbatches that
accumulate are one step; nor does a backward while another root that ran owes one. A forward without
gradients outside of a step is none, and its rows have the number 0.

[Note: what a step is] says what counts as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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

# Passes and steps of the roots of a model, as rows of a ledger.

RAISED = ',"raised":true'


class Tree:
    """A root that ran, or will: its name, and what it is doing."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.running: Row | None = None  # its forward, backward, or wait for reductions
        self.forget_step()
        self.backwards: dict[Visit, Row] = {}
        self.is_inside = False  # of a backward that is not its own, see ``Passes.begin_outer``

    def forget_step(self) -> None:
        self.ran = False  # a forward of it began in this step
        self.has_reduced = False
        self.accumulates = False  # a backward of it reduced nothing, and another will
        self.is_done = False  # its reductions were waited for


class Passes:
    """What the roots of a recorded model are doing."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.trees: dict[Runtime, Tree] = {}

    def begin(self, tree: Tree, phase: str, begin: Any = None) -> None:
        """A forward, a backward, or a wait for reductions begins."""
        ledger = self._ledger
        ledger.profiles = torch_modules.profiler_is_running()
        tree.running = ledger.begin("pass", tree.name, phase, begin=begin)

    def end(self, tree: Tree, extra: str = "") -> None:
        """It is over, if one is under way."""
        row, tree.running = tree.running, None
        if row is not None:
            self._ledger.end(row, extra=extra, account=row.step.add_pass)

    def begin_outer(self, tree: Tree) -> None:
        """A backward recomputes a unit that no forward recorded (reentrant checkpointing).

        Inside it each unit has a backward of its own, at whose end it is reduced. All of them are
        one pass, which ends with the outer one.
        """
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
        """End the step unless a root that ran in it has a backward, or reductions, to come."""
        if any(tree.is_inside for tree in self.trees.values()):
            return
        ran = [(runtime, tree) for runtime, tree in self.trees.items() if tree.ran]
        waits = any(
            tree.accumulates or tree.has_reduced or any(u.calls.recorded for u in runtime.units)
            for runtime, tree in ran
            if not tree.is_done
        )
        if any(tree.is_done for _, tree in ran) and not waits:
            for _, tree in ran:
                tree.forget_step()
            self._ledger.end_step()
            self._ledger.writer.flush()

    def end_all(self, tree: Tree) -> None:
        """Nothing of a tree goes on any more: it raised, or is not heard any longer."""
        tree.is_inside = False
        while tree.backwards:
            self.end_raised(tree.backwards.popitem()[1])
        self.end(tree, RAISED)

    def end_raised(self, row: Row | None) -> None:
        """What a row tells of has ended, because something raised."""
        if row is not None:
            self._ledger.end(row, extra=RAISED)


Do = Callable[..., Any]
"""What an observed object does."""


class Recorder:
    """Hears one model, from ``start`` to ``stop``."""

    def __init__(
        self,
        units: Sequence[Unit],
        names: Mapping[Unit, str],
        entries: Sequence[Entry],
        ledger: Ledger,
    ) -> None:
        self._units = units
        self._names = names
        self._entries = entries
        self._ledger = ledger
        self._flights = Flights(ledger, {entry.group.reducer: entry for entry in entries})
        self._observed: dict[Observable, None] = {}
        self._unit_of: dict[ParamGroup, Unit] = {}
        self._entry_of: dict[ParamGroup | Reducer, Entry] = {}
        self._of_runtimes: dict[str, Callable[..., Any]] = {
            "begin_forward": self._around_begin_forward,
            "end_forward": self._around_end_forward,
            "arrive": self._around_arrive,
            "close": self._around_close,
            "reduce": self._around_reduce,
            "end_backward": self._around_end_backward,
            "end_reductions": self._around_end_reductions,
            "wait_for_reductions": self._around_wait_for_reductions,
            "fail": self._around_failure,
            "abandon_backward": self._around_failure,
            "recover": self._around_recover,
        }
        self._passes = Passes(ledger)
        self._forwards: dict[Unit, list[Row | None]] = {unit: [] for unit in units}
        self._active: str | None = None  # the unit for which something is done
        self._entry: Entry | None = None  # the group that does it
        self._since: Any = None  # when the wait began that an event will tell of

    def start(self) -> None:
        """Observe the model's units, groups and roots. See [Note: observers] in ``events``."""
        for unit in self._units:
            observed.observe(unit, self)
            self._forwards[unit] = [None] * len(unit.calls.running)
            self._meet(unit)
            for group in unit.own_groups:
                self._unit_of[group] = unit
                self._observe(group)
                self._observe(group.reducer)
        for entry in self._entries:
            self._ledger.memory.look(entry)
            self._entry_of[entry.group] = self._entry_of[entry.group.reducer] = entry
            self._observe(entry.group)
            self._observe(entry.group.reducer)
        events.listeners.append(self._hear)

    def stop(self) -> None:
        """Observe nothing any more; what has no end yet does not get one."""
        events.listeners.remove(self._hear)
        for one in self._observed:
            one.leave(self)
        self._observed.clear()
        for unit in self._units:
            observed.leave(unit, self)
        self._flights.finish()
        for rows in self._forwards.values():
            while rows:
                self._passes.end_raised(rows.pop())
        for tree in self._passes.trees.values():
            self._passes.end_all(tree)

    def _observe(self, source: Observable) -> None:
        if source not in self._observed:
            self._observed[source] = None
            source.observe(self)

    def _meet(self, unit: Unit) -> None:
        """Observe the root's runtime, if the unit has one already."""
        runtime = unit.runtime
        if runtime is not None and runtime not in self._passes.trees:
            self._passes.trees[runtime] = Tree(self._names.get(runtime.root, ""))
            self._observe(runtime)
            self._observe(runtime.prefetches)

    def around(
        self, kind: str, source: Any, call: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Note what an observed object does."""
        if isinstance(source, Streams):
            return self._flights.around_launch(call, *args, **kwargs)
        if kwargs:
            call = partial(call, **kwargs)
        if kind == "prefetch":
            return self._around_prefetch(call, *args)
        if isinstance(source, Runtime):
            around = self._of_runtimes.get(kind)
            if around is None:
                return call(*args)
            return around(source, self._passes.trees[source], call, *args)
        if kind == "enroll":  # the tree is being attached: its first forward has just begun
            call(*args)
            unit = self._unit_of.get(source)
            if unit is not None:
                self._meet(unit)
            return None
        entry = self._entry_of.get(source)
        if entry is None:
            return call(*args)
        if kind == "unshard":
            return self._around_unshard(entry, call)
        if kind == "wait_for_unshard":
            return self._around_wait(entry, call)
        return self._act(entry.name, entry, call, *args)

    # Events. See [Note: whose event].

    def _hear(self, event: Event) -> None:
        if self._active is None:
            return
        entry, kind = self._entry, event.kind
        if entry is not None and kind == "unshard":
            entry.unshard_event = event  # its row begins when it is launched
            self._ledger.step.gathered_nbytes += event.nbytes
        elif entry is not None and kind == "reduce":
            entry.reduce_event = event
            self._ledger.step.reduced_nbytes += event.nbytes
            for runtime, tree in self._passes.trees.items():
                if runtime.context is entry.group.context:
                    tree.has_reduced = True
        elif kind in ("wait_for_unshard", "wait_for_reduce"):  # these have a begin
            self._ended_wait(event)
        elif entry is not None or kind in ("prefetch", "recover"):
            if entry is not None:
                self._ledger.memory.look(entry)
            self._ledger.mark(kind, self._active, event.phase, event.nbytes)

    def _ended_wait(self, event: Event) -> None:
        """Write an event that tells the end of a wait, with its begin."""
        assert self._active is not None
        if self._entry is not None:
            self._ledger.memory.look(self._entry)
        elif event.kind == "wait_for_unshard":  # of a group that is not recorded
            return
        row = self._ledger.begin(event.kind, self._active, event.phase, 0, self._since)
        self._ledger.end(row)

    # Groups.

    def _act(self, name: str, entry: Entry | None, call: Do, *args: Any) -> Any:
        """Do something for a unit: what is heard meanwhile is about it."""
        flights = self._flights
        before = self._active, self._entry, flights.waiter
        self._active, self._entry, flights.waiter = name, entry, name
        try:
            return call(*args)
        finally:
            self._active, self._entry, flights.waiter = before
            if entry is not None:
                self._ledger.memory.look(entry)

    def _around_unshard(self, entry: Entry, unshard: Do) -> None:
        group, flights = entry.group, self._flights
        if group.state in (GATHERING, WHOLE):  # nothing will be done
            unshard()
            return
        streams = group.context.streams
        self._observe(streams)
        before, flights.gathering = flights.gathering, entry
        try:
            self._act(entry.name, entry, unshard)
        finally:
            flights.gathering = before

    def _around_wait(self, entry: Entry, wait: Do) -> None:
        if entry.group.is_unsharded:  # nothing to wait for
            wait()
            return
        ledger = self._ledger
        self._flights.look()
        before, self._since, entry.needs = self._since, ledger.clock.now(), True
        try:
            self._act(entry.name, entry, wait)
        finally:
            self._since, entry.needs = before, False

    # Roots: passes and steps. See [Note: what a step is].

    def _around_begin_forward(
        self, runtime: Runtime, tree: Tree, begin_forward: Do, unit: Unit
    ) -> None:
        ledger = self._ledger
        ledger.resolve()
        ledger.clock.begin_step()
        ledger.round = runtime.backward.number
        begin = ledger.clock.now()
        self._act(tree.name, None, begin_forward, unit)
        if torch.is_grad_enabled():
            if ledger.step.number == 0:
                ledger.begin_step()
                for other in self._passes.trees.values():
                    other.forget_step()
            tree.ran = True
        self._passes.begin(tree, FORWARD, begin)

    def _around_end_forward(self, runtime: Runtime, tree: Tree, end_forward: Do) -> None:
        self._act(tree.name, None, end_forward)
        self._passes.end(tree)

    def _around_end_backward(self, runtime: Runtime, tree: Tree, end_backward: Do) -> None:
        self._act(tree.name, None, end_backward)
        if runtime.forward_root is None and not tree.is_inside:  # else what is around it goes on
            self._passes.end(tree)
        self._passes.end_step_if_over()

    def _around_end_reductions(self, runtime: Runtime, tree: Tree, end_reductions: Do) -> None:
        is_late = tree.running is None  # the caller waits, after backward
        if is_late:
            self._passes.begin(tree, "backward")
        self._act(tree.name, None, end_reductions)
        if tree.has_reduced or not any(unit.trains for unit in runtime.units):
            tree.is_done = True
        else:
            tree.accumulates = True
        if is_late:
            self._passes.end(tree)
            self._passes.end_step_if_over()

    def _around_wait_for_reductions(self, runtime: Runtime, tree: Tree, wait: Do) -> None:
        self._flights.look()
        before, self._since = self._since, self._ledger.clock.now()
        try:
            self._act(tree.name, None, wait)
        finally:
            self._since = before

    def _around_recover(self, runtime: Runtime, tree: Tree, recover: Do) -> None:
        self._passes.end_all(tree)
        self._act(tree.name, None, recover)

    def _around_failure(self, runtime: Runtime, tree: Tree, fail: Do) -> None:
        self._act(tree.name, None, fail)
        self._passes.end_all(tree)
        self._ledger.end_step(failed=True)
        self._ledger.writer.flush()

    # Units: when their own code runs.

    def _around_prefetch(self, prefetch: Do, unit: Unit) -> None:
        if unit not in self._names:  # above what is recorded
            prefetch(unit)
            return
        flights = self._flights
        before, flights.is_prefetching = flights.is_prefetching, True
        try:
            self._act(self._names[unit], None, prefetch, unit)
        finally:
            flights.is_prefetching = before

    def enter_forward(self, unit: Unit) -> None:
        """The parameters are whole, and the module's own forward is about to run."""
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

    def leave_forward(self, unit: Unit) -> None:
        """The module's own forward has returned."""
        rows = self._forwards[unit]
        row = rows.pop() if rows else None
        if row is not None:
            self._ledger.end(row)

    def drop_forward(self, unit: Unit) -> None:
        """The module's forward raised; a recomputation that has all it needs does so, too."""
        rows = self._forwards[unit]
        self._passes.end_raised(rows.pop() if rows else None)

    def _around_arrive(
        self, runtime: Runtime, tree: Tree, arrive: Do, visit: Visit, *how: Any
    ) -> None:
        """Backward comes to a unit: if for the first time, its parameters are made whole."""
        number = runtime.backward.number
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

    def _around_close(self, runtime: Runtime, tree: Tree, close: Do, visit: Visit) -> None:
        row = tree.backwards.pop(visit, None)
        if row is not None:
            self._ledger.end(row)
        close(visit)

    def _around_reduce(self, runtime: Runtime, tree: Tree, reduce: Do, unit: Unit) -> None:
        self._act(self._names.get(unit, unit.fqn), None, reduce, unit)

"""The engine's host state before and after replaying a captured step.

Owns the preconditions of a replay and its effects on host state: unreduced gradients, the predicted
sequence of collectives, and received stamps. Contains no capture code.

[Note: a replay is a step]
A device graph runs kernels and collectives, but no Python code. A replay is therefore allowed only
if an eager step would issue the same operations on the same addresses and need no extra exchange
between ranks. Some ranks can then replay a step while others run it eagerly, because all ranks
issue the same collectives with the same stamps. The stamp buffers are part of the capture. As in
eager steps, other ranks' stamps are copied to the host after each replay, and checked before the
next replay (``LateLook``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn as nn
from torch import Tensor

from fsdp2._core.agreement.agreement import Agreement, Rehearsal
from fsdp2._core.base import events, torch_dtensor
from fsdp2._core.base.events import IDLE
from fsdp2._core.base.pending_copies import wait_for_copies
from fsdp2._core.engine.tree import Runtime, Unit
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.planning import Unreduced
from fsdp2._core.params.reduce import is_bare, may_hold
from fsdp2._core.params.registration import SHARDED

GRADIENTS_ELSEWHERE = "gradients of earlier micro-batches are not at the captured addresses"
OTHER_COLLECTIVES = "different collectives ran before this step than before the captured one"


@dataclass(frozen=True, eq=False)
class Waiting:
    """A snapshot of one group's unreduced gradients."""

    grads: list[Tensor | None]
    unreduced: Unreduced
    has_waited: bool

    @classmethod
    def of(cls, group: ParamGroup) -> Waiting:
        reducer = group.reducer
        grads = [p.unsharded.grad if p.unsharded is not None else None for p in group.params]
        return cls(grads, dataclasses.replace(reducer.unreduced), reducer.has_waited)

    def is_in(self, group: ParamGroup) -> bool:
        """Return True if the group still has these gradient tensors."""
        now = Waiting.of(group)
        same = all(mine is its for mine, its in zip(self.grads, now.grads, strict=True))
        return same and now.unreduced.partial is self.unreduced.partial

    def put(self, group: ParamGroup) -> None:
        """Restore these gradients in the group."""
        for param, grad in zip(group.params, self.grads, strict=True):
            if param.unsharded is not None and param.unsharded.grad is not grad:
                param.unsharded.grad = grad
        reducer = group.reducer
        reducer.unreduced.become(self.unreduced)
        reducer.has_waited = self.has_waited
        if self.unreduced.is_owed or self.unreduced.partial is not None:
            may_hold[id(reducer)] = reducer


class Trees:
    """The trees of units below a model, between steps."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self.units = units
        self.params = list(model.parameters())  # sharded parameters, and parameters in no unit
        self.groups = [group for unit in units for group in unit.own_groups]
        self.runtimes: list[Runtime] = list(
            dict.fromkeys(unit.runtime for unit in units if unit.runtime is not None)
        )
        stamps = (one for group in self.groups for one in group.ids.agreements)
        self.agreements: list[Agreement] = list(dict.fromkeys(stamps))

    @property
    def are_current(self) -> bool:
        """Return True if all units with parameters still use the runtimes found in ``__init__``."""
        return all(unit.runtime in self.runtimes for unit in self.units if unit.own_groups)

    @property
    def are_waiting(self) -> bool:
        return any(group.reducer.unreduced.is_waiting for group in self.groups)

    def why_not(self) -> str:
        """Return the reason why the next step must run eagerly, or "" if a replay is allowed."""
        if any(unit.runtime is None for unit in self.units if unit.own_groups):
            return "the model has not run yet"
        if events.listeners or any(runtime.is_observed for runtime in self.runtimes):
            return "the step is being recorded"
        for runtime in self.runtimes:
            if runtime.failed or runtime.context.phase is not IDLE:
                return "the last step failed or has not ended"
            if runtime.staying:
                return "parameters stay unsharded between micro-batches"
            if runtime.reductions or runtime.context.streams.pending is not None:
                return "gradients are being reduced"
        if any(unit.summoned_on for unit in self.units):
            return "summon_full_params is active"
        for group in self.groups:
            if group.state is not SHARDED:
                return f"parameters of {group.fqn or '<root>'} are unsharded"
            changes = group.registration.detect_changes()
            if changes.toggled or changes.cast or changes.replaced or changes.placeholders:
                return f"parameters of {group.fqn or '<root>'} were replaced, frozen or cast"
        if not is_bare(self.params):
            return "parameters have gradients or hooks"
        return ""

    @property
    def objects(self) -> list[Any]:
        """The objects that a captured step depends on. A change replaces the affected object."""
        found: list[Any] = []
        for group in self.groups:
            reducer = group.reducer
            found += (reducer.current_plan, reducer.wire, reducer.hook, group.policy)
        return found

    @property
    def values(self) -> list[Any]:
        """The settings of all groups, and the addresses of their shards."""
        found: list[Any] = [group.settings for group in self.groups]
        homes = [group.buffers.home for group in self.groups]
        return found + [0 if home is None else home.flat.data_ptr() for home in homes]

    def clear_gradients(self) -> None:
        with torch_dtensor.DisableTorchFunctionSubclass():  # faster attribute access
            for param in self.params:
                param.grad = None

    def look(self) -> None:
        """Wait for external events that a step depends on, and check the stamps received in earlier
        steps. A graph cannot contain these waits, because each step has different events.
        StateError: ranks issued different gathers."""
        wait_for_copies()  # of background saves; eager steps wait in a hook of the optimizer
        for runtime in self.runtimes:
            runtime.context.streams.look_late(runtime.looks.all)
            event, runtime.root.post_optim_event = runtime.root.post_optim_event, None
            if event is not None:
                event.wait()

    def note(self) -> None:
        """Copy other ranks' stamps to the host, as at the end of a backward."""
        for runtime in self.runtimes:
            runtime.context.streams.note_late(runtime.looks.all)

    def give_up(self) -> None:
        """Drop the state of a failed capture: the captured operations never run."""
        for runtime in self.runtimes:
            runtime.forget_flights()
            runtime.fail()
            runtime.recover()


class Replayed:
    """The host-side preconditions and effects of one captured step."""

    def __init__(self, trees: Trees) -> None:
        self._trees = trees
        self._before = self._waiting()
        self._after = self._before
        self._rehearsals: list[Rehearsal] = []
        self._objects, self._values = trees.objects, trees.values

    def _waiting(self) -> list[Waiting]:
        return [Waiting.of(group) for group in self._trees.groups]

    @contextlib.contextmanager
    def captured(self) -> Iterator[None]:
        """Record the operations that are captured inside the context."""
        with contextlib.ExitStack() as stack:
            for agreement in self._trees.agreements:
                self._rehearsals.append(stack.enter_context(agreement.rehearse()))
            yield
        self._after = self._waiting()

    def undo(self) -> None:
        """Restore the gradients from before the capture, which executed nothing."""
        for waiting, group in zip(self._before, self._trees.groups, strict=True):
            waiting.put(group)

    @property
    def finds_gradients(self) -> bool:
        """Return True if gradients of earlier micro-batches are at the captured addresses."""
        pairs = zip(self._before, self._trees.groups, strict=True)
        return all(waiting.is_in(group) for waiting, group in pairs)

    @property
    def is_expected(self) -> bool:
        """Return True if the captured collectives are predicted to come next."""
        return all(one.expects(noted) for one, noted in self._noted)

    @property
    def is_planned(self) -> bool:
        """Return True if plans, settings and addresses have not changed since the capture."""
        same = all(map(operator.is_, self._objects, self._trees.objects))
        return same and self._values == self._trees.values

    def why_not(self) -> str:
        """Return the reason why this step cannot be replayed, or "" if it can."""
        if not self.finds_gradients:
            return GRADIENTS_ELSEWHERE
        return "" if self.is_expected else OTHER_COLLECTIVES

    def end(self) -> None:
        """Update the host state as an eager step would."""
        for agreement, noted in self._noted:
            agreement.follow(noted)
        for waiting, group in zip(self._after, self._trees.groups, strict=True):
            waiting.put(group)
        self._trees.note()

    @property
    def _noted(self) -> Iterable[tuple[Agreement, Rehearsal]]:
        return zip(self._trees.agreements, self._rehearsals, strict=True)

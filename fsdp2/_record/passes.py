"""Passes and steps of the roots of a model, as rows of a ledger.

Owns when a pass (a forward, a backward, a wait for reductions) and a step begin and end. What is
heard in between, ``recorder`` notes; its [Note: what a step is] says what counts as one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fsdp2._base import torch_modules
from fsdp2._engine.tree import EndOfBackward, Runtime, Visit
from fsdp2._record.ledger import Ledger, Row

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

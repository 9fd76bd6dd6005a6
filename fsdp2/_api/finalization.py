"""Backwards that end when the caller says so. See [Note: manual finalization] in the runtime."""

from __future__ import annotations

from fsdp2._base import torch_autograd, torch_modules
from fsdp2._base.errors import StateError
from fsdp2._comm.wire import PendingReduction
from fsdp2._engine.between_steps import finish
from fsdp2._engine.tree import Runtime, Unit


class GradientReductionHandle(torch_modules.GradientReductionHandle):  # type: ignore[misc]  # Any
    """A ``finalize_backward(async_op=True)`` under way. ``finalize_backward`` makes it."""

    def __init__(self, runtime: Runtime | None, pending: PendingReduction | None) -> None:
        self._runtime, self._pending = runtime, pending

    def wait(self) -> None:
        """Wait until gradients are reduced, and free what they took. Does nothing a second time.

        Raises:
            StateError: ``reset_iter_state()`` came before it, and dropped the gradients.
        """
        runtime = self._runtime
        if runtime is None:
            return
        streams = runtime.context.streams
        if streams.pending is not self._pending:
            raise StateError(
                "FS311",
                "GradientReductionHandle.wait: reset_iter_state() dropped the reduction that this "
                "handle is of. Run the backward again.",
            )
        self._runtime = self._pending = streams.pending = None
        runtime.end_reductions()


def set_manual(unit: Unit, enabled: bool) -> None:
    """Change the mode of the tree that ``unit`` is, or will be, the root of.

    Raises:
        StateError: a backward is running, or one that began in the other mode did not end.
    """
    who = "set_manual_backward_finalization"
    if enabled is not unit.settings.manual_finalization and torch_autograd.graph_task_id() != -1:
        raise StateError("FS301", f"{who}: called during a backward. Call it before the forward.")
    began = None if unit.runtime is None else unit.runtime.backward.began_manual
    if began is not None and enabled is not began:
        raise StateError(
            "FS310",
            f"{who}: found a backward that began in the other mode and has not ended. Call "
            "finalize_backward() first, or reset_iter_state() to drop it.",
        )
    unit.configure(manual_finalization=enabled)


def finalize(runtime: Runtime, async_op: bool) -> GradientReductionHandle | None:
    """End what backwards of a tree began. Nothing is changed by a call that raises.

    Raises:
        StateError: this is not the moment, see ``FSDPModule.finalize_backward``.
    """
    _check(runtime)
    if not async_op:
        finish(runtime)
        runtime.end_reductions()
        return None
    pending = PendingReduction(runtime)
    finish(runtime)
    runtime.context.streams.pending = pending
    return GradientReductionHandle(runtime, pending)


def _check(runtime: Runtime) -> None:
    who = "finalize_backward"
    runtime.refuse_pending(who)
    if not runtime.root.settings.manual_finalization:
        raise StateError(
            "FS310",
            f"{who}: backwards end by themselves here. Call "
            "set_manual_backward_finalization(True) on the root before the forward.",
        )
    if torch_autograd.graph_task_id() != -1:
        raise StateError(
            "FS301", f"{who}: called during a backward. Call it when backward has returned."
        )
    for unit in runtime.units:
        for group in unit.own_groups:
            is_split = group.data.summed.size > 1 and not group.settings.all_reduce_grads
            is_partial = group.reducer.unreduced.partial is not None
            if is_split or (is_partial and not group.settings.sharding.scatters_always):
                raise StateError(
                    "FS310",
                    f"{who}: {group.fqn or '<root>'} is to leave its gradients unreduced over the "
                    "replicate axis, which cannot be finalized by hand. Call "
                    "set_requires_all_reduce(True), or let backwards end by themselves.",
                )

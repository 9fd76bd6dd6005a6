"""``StageState``: what ``torch.distributed.pipelining`` finds when it asks torch for our state.

Owns the answer to one question of torch's stages, *reduce what this step accumulated*. It must not
know schedules, microbatches or torch's state objects.

[Note: what a stage does with a module of ours]
A stage whose module is a ``torch.distributed.fsdp.FSDPModule`` sets ``is_last_backward``,
``reshard_after_backward`` and ``requires_gradient_sync`` to False before each backward of a
microbatch, so gradients stay on the unsharded parameters. After the last one it sets all three to
True, asks ``torch.distributed.fsdp.fully_shard.state(module)`` for the state of the tree, calls
``post_backward`` on each group that it finds under ``_state_ctx.all_states``, and then
``_root_post_backward_final_callback``. No backward runs at that time, so no hook of ours would. The
order of reductions is the runtime's to choose: the list of states is empty, and the callback is the
end of a backward.
"""

from __future__ import annotations

from types import SimpleNamespace

from fsdp2._base.errors import StateError
from fsdp2._engine.runtime import Runtime
from fsdp2._engine.unit import Unit


class StageState:
    """Stands for a unit where torch's pipelining expects the state of its own ``fully_shard``."""

    _state_ctx = SimpleNamespace(all_states=())

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def _root_post_backward_final_callback(self) -> None:
        """Reduce what the step accumulated, wait for it, and reshard, as the settings say.

        Raises:
            StateError: a unit's part of the gradient is lost. See ``Unit.note_unsynced_backward``.
        """
        runtime = self._unit.runtime
        if not isinstance(runtime, Runtime):  # no forward yet
            return
        lost = [
            unit
            for unit in runtime.units
            if unit.may_lose_gradients
            and not any(g.reducer.has_local_gradients for g in unit.groups)
        ]
        for unit in runtime.units:
            unit.may_lose_gradients = False
        if lost:
            raise StateError(
                f"{lost[0].fqn or '<root>'}: found no gradient after a step of a pipeline whose "
                "schedule computes gradients of inputs first and those of parameters later. Such a "
                "schedule looks for the parameters between forward and backward, when this unit "
                f"({len(lost)} in this stage) had freed them. Apply fully_shard to the modules of "
                "a stage with reshard_after_forward=False."
            )
        if runtime.parts is not None:
            runtime.parts.is_off = True  # a stage runs several forwards before their backwards
        runtime.end_backward()

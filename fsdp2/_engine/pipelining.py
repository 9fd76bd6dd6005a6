"""``StageState``: what ``torch.distributed.pipelining`` finds when it asks torch for our state.

Owns the answer to one question of torch's stages, *reduce what this step accumulated*. It must not
know schedules, microbatches or torch's state objects.

[Note: what a stage does with a module of ours]
From torch 2.15 on a stage whose module is a ``torch.distributed.fsdp.FSDPModule`` uses public
methods: ``set_manual_backward_finalization``, ``finalize_backward``, and the settings below. With
``defer_reduce_grad_wait`` it compares ``_get_fsdp_state()._comm_ctx`` of its stages.
Up to torch 2.14 it sets ``is_last_backward``, ``reshard_after_backward`` and
``requires_gradient_sync`` to False before each backward of a microbatch, so gradients stay on the
unsharded parameters. After the last one it sets all three to True, asks
``torch.distributed.fsdp.fully_shard.state(module)`` for the state of the tree, calls
``post_backward`` on each group that it finds under ``_state_ctx.all_states``, and then
``_root_post_backward_final_callback``. No backward runs at that time, so no hook of ours would. The
order of reductions is the runtime's to choose: the list of states is empty, and the callback is the
end of a backward.
"""

from __future__ import annotations

from types import SimpleNamespace

from fsdp2._comm.streams import Streams, streams_for
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
        if isinstance(runtime, Runtime):  # else no forward ran yet
            runtime.finalize()
            runtime.end_reductions()

    @property
    def _comm_ctx(self) -> Streams:
        """An object that is another one for each root, unless roots share their streams."""
        unit = self._unit
        if unit.runtime is not None:
            return unit.runtime.context.streams
        if unit.streams is None:
            unit.streams = streams_for(unit.device)
        return unit.streams

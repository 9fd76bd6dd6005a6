"""``offload_activations``: which modules keep on the host what their backward needs.

Owns the choice of modules. What travels, and when, is in ``_offload/activations``.
"""

from __future__ import annotations

import torch.nn as nn

from fsdp2._api.checks import is_container
from fsdp2._api.ignored import Ignored
from fsdp2._api.settings import refuse_during_step
from fsdp2._base.arguments import check_count, check_module
from fsdp2._base.names import WRAPPERS
from fsdp2._engine.between_steps import units_below
from fsdp2._offload.activations import Activations
from fsdp2.wrap import Asking, WrapPolicy, run_policy

ATTRIBUTE = "_fsdp2_activations"
_ASKING = Asking("offload_activations", "nothing is offloaded", "True or False")


def offload_activations(
    model: nn.Module, policy: WrapPolicy, *, keep_last: int = 1, min_bytes: int = 1 << 18
) -> list[str]:
    """Keep on the host what backward needs of the modules that a policy picks.

    What autograd saves in a call of such a module is copied to pinned memory while the forward goes
    on, and comes back while backward is in the module that ran after it. Numbers do not change.

    Parameters, buffers and memory of gathered parameters stay, as do small tensors. The same bytes
    travel once, whoever saves them. Pinned memory is used again from step to step, and belongs to
    the model.

    A module that is wrapped by activation checkpointing or by ``torch.compile`` is picked with its
    wrapper: of a checkpoint only what goes in is saved, and that travels. Call this when wrappers
    are on; it does not matter whether ``fully_shard`` comes before or after.

    Args:
        model: what the modules are in, sharded or not. Its forward and its backward do not change.
        policy: what picks modules below ``model``, as in ``fsdp2.wrap.shard_model``: classes, a
            function of a module, or a policy of torch's. A function that returns False for every
            module switches off what an earlier call chose.
        keep_last: in so many of the picked modules, the last ones in ``model.modules()``, all
            stays on the device: backward begins there, and the ones before come back meanwhile.
        min_bytes: a tensor that is smaller stays.

    Returns:
        The names of the picked modules, in the order of ``model.modules()``.

    On a CPU, and where a device has no streams of its own, all stays where it is. In a step of
    ``fsdp2.compile`` the compiler decides what is saved, and nothing is offloaded.

    Raises:
        ConfigError: not a policy, or not a number.
        StateError: during a step.
    """
    check_module("offload_activations", "model", model)
    check_count("offload_activations", "keep_last", keep_last, low=0)
    check_count("offload_activations", "min_bytes", min_bytes)
    refuse_during_step("offload_activations", units_below(model))
    picked: dict[nn.Module, None] = {}
    outer = _wrappers(model)
    for module in run_policy(policy, model, Ignored.of(None, None), _ASKING):
        _pick(module, outer, picked)
    found = [(name, module) for name, module in model.named_modules() if module in picked]
    before: Activations | None = vars(model).pop(ATTRIBUTE, None)
    if before is not None:
        before.remove()
    if found:
        offloaded = len(found) - keep_last
        chosen = {module: place >= offloaded for place, (_, module) in enumerate(found)}
        vars(model)[ATTRIBUTE] = Activations(model, chosen, min_bytes)
    return [name for name, _ in found]


def _pick(
    module: nn.Module, outer: dict[nn.Module, nn.Module], picked: dict[nn.Module, None]
) -> None:
    """Take a module with its wrappers, or what is in it if it has no forward."""
    if is_container(module):
        for child in module.children():
            _pick(child, outer, picked)
        return
    while module in outer:
        module = outer[module]
    picked[module] = None


def _wrappers(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """Return what is around each module that a wrapper is around."""
    return {
        child: module
        for module in model.modules()
        for name, child in module.named_children()
        if name in WRAPPERS
    }

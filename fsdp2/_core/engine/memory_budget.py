"""Memory settings: translates a named setting or a byte budget into an ``Overlap``.

Everything is computed from shapes and dtypes, so the result is the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp2._core.base.errors import ConfigError, wrong_type, wrong_value
from fsdp2._core.base.policy import Overlap
from fsdp2._core.engine.tree import Unit
from fsdp2._core.params.group import ParamGroup

NAMED = {
    "low": Overlap(prefetch=0, reductions=0, synchronizes=True),
    "balanced": Overlap(),
    "fast": Overlap(prefetch=2, reductions=3, keeps_parts=True),
}

LADDER = [
    Overlap(prefetch, reductions, synchronizes=True)
    for prefetch, reductions in ((0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3))
]
"""Candidates for a byte budget, in order of increasing memory use."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a group's unsharded parameters, gradients and reduction inputs, in bytes."""

    whole: int
    gradients: int
    reduced: int

    @staticmethod
    def of(group: ParamGroup) -> Sizes:
        gradients = reduced = 0
        for param in group.params:
            if param.trainable:
                numel = math.prod(param.sharded.shape)
                gradients += numel * param.backward_dtype.itemsize
                reduced += numel * param.accumulated_dtype.itemsize
        return Sizes(group.buffers.whole_nbytes, gradients, reduced)


def overlap_for(memory: object, units: Sequence[Unit]) -> Overlap:
    """Return the ``Overlap`` for the user's setting. ``units``: the units of a tree, root first.
    ConfigError: the setting is invalid, or the budget is too small even without overlap."""
    if isinstance(memory, str) and memory in NAMED:
        return NAMED[memory]
    expected = f"{', '.join(map(repr, NAMED))} or a number of bytes"
    if isinstance(memory, bool) or not isinstance(memory, int | str):
        raise wrong_type("set_memory", "memory", expected, memory)
    if isinstance(memory, str) or memory <= 0:
        raise wrong_value("set_memory", "memory", expected, memory)
    needs = [bytes_needed(units, overlap) for overlap in LADDER]
    if memory < needs[0]:
        raise ConfigError(
            "FS504",
            f"set_memory: {memory} bytes are not enough: even without overlap, the parameters and "
            f"gradients that are unsharded at the same time take {needs[0]} bytes. Pass at "
            "least that number, or apply fully_shard to smaller modules.",
        )
    return [overlap for overlap, need in zip(LADDER, needs, strict=True) if need <= memory][-1]


def bytes_needed(units: Sequence[Unit], overlap: Overlap) -> int:
    """Return the peak total size of unsharded parameters, gathers in flight, unreduced gradients
    and reduction inputs in a typical step. Excludes shards, activations and reduced gradients.
    ``units[0]`` is the root, which stays unsharded for the whole step."""
    root = [Sizes.of(group) for group in units[0].own_groups]
    others = []
    for unit in units[1:]:
        sizes = [Sizes.of(group) for group in unit.own_groups]
        if unit.conditional:  # the enclosing unit unshards it
            root += sizes
        else:
            others.append(sizes)
    own = sum(sizes.whole for sizes in root)
    wholes = sorted((sum(sizes.whole for sizes in unit) for unit in others), reverse=True)
    inputs = sorted((sizes.reduced for unit in others for sizes in unit), reverse=True)
    gradients = max((sum(s.gradients for s in unit) for unit in others), default=0)
    ahead, running = 1 + overlap.prefetch, max(1, overlap.reductions)
    forward = own + sum(wholes[: max(2, ahead)])  # 2: gathered data and its copy
    backward = own + sum(wholes[:ahead]) + gradients + sum(inputs[:running])
    start = own + max((sizes.whole for sizes in root), default=0)
    parts = max((sizes.gradients + sizes.reduced for sizes in root), default=0)
    end = own + parts + sum(inputs[: overlap.reductions])
    early = own + sum(wholes[: overlap.prefetch]) + parts
    return max(start, forward, backward, end, early)

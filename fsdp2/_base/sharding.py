"""What a unit shards, and so what stays whole on each rank: values, which the engine reads.

Owns what ``fully_shard(shard=..., shard_outer=...)`` stands for. It must not know when anything
happens: each value says one thing about one moment of a step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """What is divided over ranks. Optimizer states always are: between steps users see shards.

    ``name`` is what the user wrote. ``keeps_whole``: parameters stay whole from the first forward
    after an optimizer step to the backward that the next one follows. ``scatters_always``: a
    backward without gradient sync reduces over the first axis all the same, so that no whole
    gradient stays. What it puts off is the reduction over the second one.
    """

    name: str
    keeps_whole: bool = False
    scatters_always: bool = False

    def sync(self, is_on: bool) -> dict[str, bool]:
        """Return the settings that gradient sync stands for."""
        return {"reduce_grads": is_on or self.scatters_always, "all_reduce_grads": is_on}


PARAMETERS = Sharding('shard="parameters"')

SHARDINGS = {
    "parameters": PARAMETERS,
    "gradients": Sharding('shard="gradients"', keeps_whole=True, scatters_always=True),
    "optimizer": Sharding('shard="optimizer"', keeps_whole=True),
}

OUTER = {
    None: PARAMETERS,
    "optimizer": Sharding('shard_outer="optimizer"', scatters_always=True),
}
"""What may be said of the outer dim of a mesh; None: it replicates."""

"""What a unit shards, and so what stays whole on each rank: values, which the engine reads.

Owns the modes of ``fully_shard(shard=...)`` and of ``shard_outer``. It must not know when
anything happens: each value says one thing about one moment of a step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sharding:
    """What is divided over ranks. Optimizer states always are: between steps users see shards.

    ``keeps_whole``: parameters stay whole in memory, from one optimizer step to the next.
    ``keeps_smaller``: they stay sharded over the smaller mesh, for as long.
    ``scatters_always``: a backward without gradient sync reduces over the shard axis all the same,
    so that no whole gradient stays. What it puts off is what follows: the sum over replicas.
    """

    name: str
    keeps_whole: bool = False
    keeps_smaller: bool = False
    scatters_always: bool = False

    def sync(self, is_on: bool) -> dict[str, bool]:
        """Return the settings that gradient sync stands for."""
        return {"reduce_grads": is_on or self.scatters_always, "all_reduce_grads": is_on}


PARAMETERS = Sharding("parameters")
GRADIENTS = Sharding("gradients", keeps_whole=True, scatters_always=True)
OPTIMIZER = Sharding("optimizer", keeps_whole=True)

SHARDINGS = {sharding.name: sharding for sharding in (PARAMETERS, GRADIENTS, OPTIMIZER)}

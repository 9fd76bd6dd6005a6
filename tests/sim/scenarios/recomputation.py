"""Activation checkpointing: units are gathered again for what backward recomputes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from tests.kit.models import WIDTH, Block
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import sets, train, trained


class Recomputed(nn.Module):
    """Blocks that are recomputed, by either implementation of torch's."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant, preserve_rng_state=False)
        return x


trained("recomputed", make=lambda: Recomputed(False))
trained("recomputed_reentrant", make=lambda: Recomputed(True))


@scenario(2, slow=True)
def recomputed_with_random_numbers(world: World) -> Values:
    """The state of the device's generator is kept for the recomputation."""

    class Dropping(Recomputed):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.inp(x)

    return train(world, lambda: Dropping(False))


trained(
    "recomputed_and_kept_whole",
    make=lambda: Recomputed(False),
    slow=True,
    reshard_after_forward=False,
    microbatches=2,
)
trained(
    "recomputed_without_copies",
    make=lambda: Recomputed(False),
    slow=True,
    set_up=sets(copy_free_min_bytes=1, memory="low"),
)


@scenario(2, slow=True)
def wrapped_for_recomputation(world: World) -> Values:
    """The wrapper is inside the unit: what is recomputed is a part of it."""

    def prepare(model: Any) -> None:
        for block in model.blocks:
            block.up = checkpoint_wrapper(block.up, CheckpointImpl.NO_REENTRANT)

    return train(world, prepare=prepare)


@scenario(2)
def selective_recomputation(world: World) -> Values:
    """A policy keeps products of matrices, and recomputes the rest."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    class Selective(Recomputed):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block in self.blocks:
                x = checkpoint(
                    block,
                    x,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=lambda: create_selective_checkpoint_contexts(policy),
                )
            return x

    return train(world, lambda: Selective(False))

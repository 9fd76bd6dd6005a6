"""Promise: `same_bits` names the unit, slot and step at which two runs part, on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

import fsdp2
from fsdp2.debug import record_bits, same_bits
from tests.kit.in_turn import shard_each
from tests.kit.meshes import shared_mesh
from tests.kit.models import seeded
from tests.kit.pool import ranks
from tests.kit.slots import SLOTS, Net, adamw, batch_of, loss_of

STEPS = 2
BAD_SLOT = 6
"""The third slot of rank 1 of 2; the slot in which harm is done."""


class Run:
    """Trains for two steps on the ranks of a mesh, and records digests."""

    def __init__(self, path: Path, shape: tuple[int, ...]) -> None:
        self.model: Any = seeded(Net)
        mesh = shared_mesh(shape, ("replicate", "shard")[-len(shape) :])
        self.prepare()
        shard_each(*self.model.blocks, self.model, mesh=mesh)
        self.mine = fsdp2.reproducible(self.model, slots=SLOTS)
        self.optimizer = adamw(self.model.parameters())
        self.is_bad = False  # harm is to be done in the slot under way
        with record_bits(self.model, str(path)):
            for step in range(STEPS):
                self.train(step)
        dist.barrier()

    def train(self, step: int) -> None:
        for slot in self.mine:
            self.is_bad = step == 1 and slot == BAD_SLOT
            self.run_slot(batch_of(step)[slot])
        self.update(step)

    def prepare(self) -> None: ...

    def run_slot(self, tokens: Tensor) -> None:
        loss_of(self.model, tokens).backward()

    def update(self, step: int) -> None:
        fsdp2.clip_grad_norm_(self.model.parameters(), 0.3)
        self.optimizer.step()
        self.optimizer.zero_grad()


class WrongScale(Run):
    def run_slot(self, tokens: Tensor) -> None:
        loss = loss_of(self.model, tokens)
        (loss * 1.0001 if self.is_bad else loss).backward()


class LostBatch(Run):
    """A micro-batch is skipped, and another one runs in its place."""

    def run_slot(self, tokens: Tensor) -> None:
        super().run_slot(tokens.flip(0) * 0 if self.is_bad else tokens)


class Inside(Run):
    """A module of the second block computes something else."""

    def prepare(self) -> None:
        self.model.blocks[1].up.register_forward_hook(self.change)

    def change(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output


class Kernel(Inside):
    """A kernel that is not deterministic: the last bits of its output."""

    def change(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not self.is_bad:
            return output
        return output * (1 + 2.0**-20)


class DropoutByRank(Inside):
    def change(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self.is_bad:
            torch.manual_seed(dist.get_rank() + 1)
        return output


class Stale(Inside):
    """A layer computes with weights that were there a step before."""

    def change(self, module: Any, args: Any, output: Tensor) -> Tensor:
        if not self.is_bad:
            self.kept = module.weight.detach().clone() if not hasattr(self, "kept") else self.kept
            return output
        return torch.nn.functional.linear(args[0], self.kept, module.bias)


class Backward(Inside):
    """Only the backward of a module is wrong."""

    def change(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self.is_bad:
            output.register_hook(lambda grad: grad * 1.5)
        return output


class StaleShard(Run):
    """A rank loses the update of one parameter after the optimizer's step."""

    def update(self, step: int) -> None:
        local = self.model.blocks[1].up.weight.to_local()
        before = local.detach().clone()
        super().update(step)
        if step == 0 and self.mine[-1] == SLOTS - 1:
            with torch.no_grad():
                local.copy_(before)


class Clipped(Run):
    """A rank halves some gradients before they are clipped."""

    def update(self, step: int) -> None:
        if step == 1 and self.mine[-1] == SLOTS - 1:
            for param in self.model.blocks[0].parameters():
                if param.grad is not None:
                    param.grad.to_local().mul_(0.5)
        super().update(step)


class LearningRate(Run):
    def update(self, step: int) -> None:
        if step == 1 and self.mine[-1] == SLOTS - 1:
            self.optimizer.param_groups[0]["lr"] = 3e-2
        super().update(step)


class Input(Run):
    """A rank reads another token."""

    def run_slot(self, tokens: Tensor) -> None:
        if self.is_bad:
            tokens = tokens.clone()
            tokens[1, 2] += 1 if tokens[1, 2] == 0 else -1
        super().run_slot(tokens)


DEFECTS: dict[type[Run], tuple[int | None, str, str]] = {
    WrongScale: (BAD_SLOT, "blocks.1", "gradient"),  # the first unit that backward leaves
    LostBatch: (BAD_SLOT, "blocks.0", "output"),
    Kernel: (BAD_SLOT, "blocks.1", "output"),
    DropoutByRank: (BAD_SLOT, "blocks.1", "output"),
    Stale: (BAD_SLOT, "blocks.1", "output"),
    Backward: (BAD_SLOT, "blocks.1", "gradient"),
    Clipped: (None, "<root>", "summed gradient"),  # a norm changes all units
    LearningRate: (None, "<root>", "update"),
    StaleShard: (0, "blocks.1", "output"),
    Input: (BAD_SLOT, "blocks.0", "output"),
}


@pytest.mark.parametrize("kind", DEFECTS, ids=lambda kind: kind.__name__)
@ranks(2)
def test_a_planted_defect_is_found_at_its_unit_slot_and_step(
    kind: type[Run], tmp_path: Path
) -> None:
    Run(tmp_path / "right", (2,))
    kind(tmp_path / "wrong", (2,))
    found = same_bits(tmp_path / "right", tmp_path / "wrong")
    assert not found
    assert found.step == 1
    assert (found.slot, found.unit, found.what) == DEFECTS[kind], str(found)


@ranks(2)
def test_replicas_have_the_digests_of_shards(tmp_path: Path) -> None:
    Run(tmp_path / "shards", (2,))
    Run(tmp_path / "replicas", (2, 1))
    found = same_bits(tmp_path / "shards", tmp_path / "replicas")
    assert found, str(found)
    assert (found.step, found.slot, found.unit, found.what) == (None, None, None, None)

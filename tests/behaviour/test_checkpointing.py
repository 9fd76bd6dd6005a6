"""Promise: activation checkpointing of either kind composes, inside and outside of units."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

from tests._models import WIDTH, Block, Case, Inner, PartlyFrozen, Stack, each_block, floats
from tests._parity import Pair, assert_same_gradients, make_mesh
from tests._pool import ranks

KINDS = {"reentrant": True, "non_reentrant": False}


class CheckpointedInside(nn.Module):
    """A unit whose inner block is recomputed."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x * self.scale, use_reentrant=self.reentrant)


class ReentrantInside(CheckpointedInside):
    reentrant = True


class CheckpointedOutside(Stack):
    """A stack that recomputes whole units."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x)


class ReentrantOutside(CheckpointedOutside):
    reentrant = True


class SpansUnits(Stack):
    """One checkpoint around several units, and one unit outside."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.front, self.inp(x), use_reentrant=self.reentrant)
        return self.out(self.blocks[2](x))

    def front(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


class ReentrantSpansUnits(SpansUnits):
    reentrant = True


def inside(reentrant: bool) -> Callable[[], nn.Module]:
    return lambda: Stack(ReentrantInside if reentrant else CheckpointedInside)


def inside_nested(reentrant: bool) -> Callable[[], nn.Module]:
    """A checkpoint inside a unit inside a checkpoint."""
    block = ReentrantInside if reentrant else CheckpointedInside
    outer = ReentrantOutside if reentrant else CheckpointedOutside
    return lambda: outer(block)


BUILDERS: dict[str, Callable[[bool], Callable[[], nn.Module]]] = {
    "inside": inside,
    "outside": lambda reentrant: ReentrantOutside if reentrant else CheckpointedOutside,
    "spanning": lambda reentrant: ReentrantSpansUnits if reentrant else SpansUnits,
    "both": inside_nested,
}


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", BUILDERS)
@ranks(2)
def test_checkpointing(where: str, kind: str, reshard_after_forward: bool) -> None:
    case = Case(BUILDERS[where](KINDS[kind]), each_block, floats)
    Pair(case, reshard_after_forward=reshard_after_forward).train(steps=2)


@pytest.mark.parametrize("kind", KINDS)
@ranks(2)
def test_inner_units_of_a_checkpointed_unit(kind: str) -> None:
    """The inner block is a unit of its own, recomputed inside the outer unit."""

    def units(model: nn.Module) -> list[nn.Module]:
        return [m for block in model.blocks for m in (block.inner, block)]

    Pair(Case(inside(KINDS[kind]), units, floats)).train(steps=2)


@pytest.mark.parametrize("kind", KINDS)
@ranks(2)
def test_nested_units_under_one_checkpoint(kind: str) -> None:
    outer = ReentrantOutside if KINDS[kind] else CheckpointedOutside

    def units(model: nn.Module) -> list[nn.Module]:
        return [m for block in model.blocks for m in (block.first, block.second, block)]

    Pair(Case(lambda: outer(Inner, 2), units, floats)).train(steps=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", BUILDERS)
@ranks(2)
def test_two_forwards_in_one_backward(where: str, kind: str) -> None:
    pair = Pair(Case(BUILDERS[where](KINDS[kind]), each_block, floats))
    for _ in range(2):
        first, expected_first = pair.losses(pair.batch())
        second, expected_second = pair.losses(pair.batch())
        (first + 2 * second).backward()
        (expected_first + 2 * expected_second).backward()
        pair.step()
    pair.check()


@pytest.mark.parametrize("kind", KINDS)
@ranks(2)
def test_checkpointed_frozen_parts(kind: str) -> None:
    outer = ReentrantOutside if KINDS[kind] else CheckpointedOutside
    Pair(Case(lambda: outer(PartlyFrozen), each_block, floats)).train(steps=2)


@pytest.mark.parametrize("kind", KINDS)
@ranks(2)
def test_accumulation_under_checkpointing(kind: str) -> None:
    outer = ReentrantOutside if KINDS[kind] else CheckpointedOutside
    pair = Pair(Case(outer, each_block, floats))
    for micro in range(3):
        pair.model.set_requires_gradient_sync(micro == 2)
        pair.backward()
    pair.step()
    pair.check()


@pytest.mark.parametrize("impl", CheckpointImpl)
@ranks(2)
def test_the_wrapper_of_torch_around_units(impl: CheckpointImpl) -> None:
    """Units inside wrappers, as trainers apply them, under names that the wrapper keeps."""

    def wrap(model: nn.Module) -> Any:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=impl)

    Pair("stack", prepare=wrap).train(steps=2)


@ranks(4)
def test_checkpointing_on_a_replicate_axis_and_a_smaller_mesh() -> None:
    case = Case(CheckpointedOutside, each_block, floats)
    Pair(case, mesh=make_mesh(2, 2)).train(steps=2)
    Pair(case, reshard_after_forward=2).train(steps=2)


@ranks(2)
def test_recomputed_dropout_is_the_same() -> None:
    """Random state is kept over the recomputation."""

    class Dropping(CheckpointedOutside):
        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block in self.blocks:
                x = checkpoint(self.drop, block, x, use_reentrant=False)
            return self.out(x)

        def drop(self, block: nn.Module, x: Tensor) -> Tensor:
            return nn.functional.dropout(block(x), 0.3)

    pair = Pair(Case(Dropping, each_block, floats))
    x = torch.randn(
        6, WIDTH
    )  # the same on both ranks, so that the mean gradient is each rank's own
    for model in (pair.model, pair.reference):
        torch.manual_seed(5)
        model(x).square().mean().backward()
    assert_same_gradients(pair.model, pair.reference)

"""Promise: after an exception on all ranks the next step trains as if it had never been."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2._core.engine.tree import unit_of
from tests.kit.in_turn import assert_tensors
from tests.kit.models import Block, Case, Stack, each_block, floats
from tests.kit.parity import Pair, assert_sharded, make_mesh
from tests.kit.pool import ranks
from tests.kit.products import products


class ProvokedError(Exception):
    """What the tests raise on purpose."""


class Fuse(torch.autograd.Function):
    """An identity that raises in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise ProvokedError("backward")


@contextmanager
def failing(module: nn.Module, phase: str) -> Iterator[None]:
    """Make `module` raise at either end of its forward, or in the backward of its output."""

    def before(module: nn.Module, args: Any) -> None:
        raise ProvokedError(phase)

    def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if phase == "after forward":
            raise ProvokedError(phase)
        return Fuse.apply(output)

    handle = (
        module.register_forward_pre_hook(before)
        if phase == "before forward"
        else module.register_forward_hook(after)
    )
    try:
        yield
    finally:
        handle.remove()


def fail(pair: Pair, where: str, phase: str) -> None:
    """Run a step of the sharded model that raises; clear what it may have left in the gradients."""
    with failing(pair.model.get_submodule(where), phase), pytest.raises(ProvokedError):
        pair.run(pair.model, pair.local(pair.batch())).backward()
    pair.optimizer.zero_grad()


PHASES = ["before forward", "after forward", "backward"]
PLACES = ["blocks.0", "blocks.1.mid", "out"]


@products(
    [
        ("before forward", "blocks.1.mid"),
        ("after forward", "blocks.0"),
        ("after forward", "out"),
        ("backward", "blocks.0"),
        ("backward", "blocks.1.mid"),
        ("backward", "out"),
    ],
    phase=PHASES,
    where=PLACES,
)
@ranks(2)
def test_training_goes_on_after_an_exception(phase: str, where: str) -> None:
    pair = Pair("stack")
    pair.train(steps=1)
    fail(pair, where, phase)
    pair.train(steps=2)


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("phase", PHASES)
@ranks(2)
def test_an_exception_in_the_first_step(phase: str, resets: bool) -> None:
    """`reset_iter_state` shards at once."""
    pair = Pair("stack")
    fail(pair, "blocks.1", phase)
    if resets:
        pair.model.reset_iter_state()
        assert_sharded(pair.model)
    pair.train(steps=2)


@products(
    [
        ("after forward", "nested_units", False),
        ("after forward", "partly_frozen", True),
        ("backward", "nested_units", True),
        ("backward", "tied_lm", True),
        ("backward", "partly_frozen", False),
    ],
    phase=["after forward", "backward"],
    name=["nested_units", "tied_lm", "partly_frozen"],
    reshard_after_forward=[True, False],
)
@ranks(2)
def test_recovery_of_other_models(phase: str, name: str, reshard_after_forward: bool) -> None:
    pair = Pair(name, reshard_after_forward=reshard_after_forward)
    fail(pair, "blocks.1", phase)
    pair.train(steps=2)


@pytest.mark.parametrize("replicates", [False, True])
@ranks(4)
def test_recovery_from_the_smaller_mesh_and_on_replicas(replicates: bool) -> None:
    how = {"mesh": make_mesh(2, 2)} if replicates else {"reshard_after_forward": 2}
    pair = Pair("stack", **how)
    for phase in PHASES:
        fail(pair, "blocks.1", phase)
        pair.train(steps=1)


@ranks(2)
def test_several_exceptions_in_a_row() -> None:
    pair = Pair("stack")
    for phase in PHASES * 2:
        fail(pair, "blocks.1", phase)
    pair.train(steps=2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@ranks(2)
def test_an_exception_in_evaluation(mode: Any) -> None:
    pair = Pair("stack")
    with mode(), failing(pair.model.blocks[1], "after forward"), pytest.raises(ProvokedError):
        pair.run(pair.model, pair.local(pair.batch()))
    pair.train(steps=2)
    with mode():
        pair.run(pair.model, pair.local(pair.batch()))
    pair.check()


@pytest.mark.parametrize("phase", PHASES)
@ranks(2)
def test_the_failed_step_drops_unsynced_gradients(phase: str) -> None:
    """What was gathered without sync belongs to the step that failed."""
    pair = Pair("stack")
    pair.model.set_requires_gradient_sync(False)
    pair.run(pair.model, pair.local(pair.batch())).backward()
    pair.model.set_requires_gradient_sync(True)
    fail(pair, "blocks.1", phase)
    pair.model.reset_iter_state()
    pair.train(steps=2)


@ranks(2)
def test_reset_iter_state_of_a_healthy_model_changes_nothing() -> None:
    pair = Pair("stack")
    pair.model.reset_iter_state()
    pair.train(steps=1)
    pair.model.reset_iter_state()
    pair.train(steps=1)


@pytest.mark.parametrize("reentrant", [True, False])
@ranks(2)
def test_an_exception_in_a_recomputation(reentrant: bool) -> None:
    class Fragile(Block):
        fails_at = -1
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            if type(self).calls == type(self).fails_at:
                raise ProvokedError("recomputation")
            return super().forward(x)

    class Checkpointed(Stack):
        def __init__(self) -> None:
            super().__init__(Fragile)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.out(x)

    pair = Pair(Case(Checkpointed, each_block, floats))
    Fragile.calls, Fragile.fails_at = 0, 5  # three forwards, then the second recomputation
    with pytest.raises(ProvokedError):
        pair.run(pair.model, pair.local(pair.batch())).backward()
    pair.optimizer.zero_grad()
    Fragile.fails_at = -1
    pair.train(steps=2)


@ranks(2)
def test_an_exception_in_a_hook_of_a_sharded_parameter() -> None:
    pair = Pair("stack")

    def raise_boom(parameter: Tensor) -> None:
        raise ProvokedError("hook")

    handle = pair.model.blocks[1].up.weight.register_post_accumulate_grad_hook(raise_boom)
    with pytest.raises(ProvokedError):
        pair.run(pair.model, pair.local(pair.batch())).backward()
    handle.remove()
    pair.optimizer.zero_grad()
    pair.train(steps=2)


@pytest.mark.parametrize("where", ["inp", "blocks.1.mid"])
@ranks(2)
def test_an_interrupt_in_a_forward(where: str) -> None:
    """Ctrl-C is no Exception, and leaves the model as able to train as any other error."""
    pair = Pair("stack")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        handle = pair.model.get_submodule(where).register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            pair.run(pair.model, pair.local(pair.batch()))
        handle.remove()
        pair.train(steps=2)


@pytest.mark.parametrize("phase", PHASES)
@ranks(2)
def test_what_wants_an_idle_model_recovers_a_failed_one(phase: str, rank: int) -> None:
    """After a step that raised, every function that gives whole parameters gives them."""
    pair = Pair("stack")
    expected = dict(pair.reference.named_parameters())
    fail(pair, "blocks.1", phase)
    assert_tensors(fsdp2.full_params(pair.model, max_bytes=10**6), expected)
    fail(pair, "blocks.1", phase)
    with fsdp2.summon_full_params(pair.model):
        assert_tensors(pair.model.named_parameters(), expected)
    fail(pair, "blocks.1", phase)
    full = fsdp2.checkpoint.full_state(pair.model).get("model", {})
    assert set(full) == (set(expected) if rank == 0 else set())
    assert all(torch.equal(tensor, expected[name].cpu()) for name, tensor in full.items())
    fail(pair, "blocks.1", phase)
    fsdp2.register_comm_hook(pair.model, None)
    fail(pair, "blocks.1", phase)
    with pytest.warns(UserWarning, match="skipped"), fsdp2.debug.without_communication(pair.model):
        pass
    fail(pair, "blocks.1", phase)
    with fsdp2.no_sync(pair.model):
        pass
    pair.train(steps=2)


@ranks(2)
def test_a_failed_backward_that_is_dropped_late() -> None:
    """On a device another thread lets go of it, perhaps while the next forward runs already."""
    pair = Pair("stack", mesh=make_mesh())
    pair.train(1)
    runtime = unit_of(pair.model).runtime
    with failing(pair.model.blocks[1], "backward"), pytest.raises(ProvokedError):
        pair.run(pair.model, pair.local(pair.batch())).backward()
    number = runtime.backward.number
    pair.model.zero_grad()
    dropped = []

    def drop(*_: Any) -> None:
        runtime._drop_backward(number)
        dropped.append(number)

    handle = pair.model.inp.register_forward_pre_hook(drop)
    pair.train(1)
    handle.remove()
    assert dropped

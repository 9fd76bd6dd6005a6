"""Ops that go wrong on purpose: on all ranks, or on one. Run on a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

import fsdp2
from fsdp2._core.engine.tree import unit_of
from tests.behaviour.test_recovery import Fuse, ProvokedError
from tests.fuzz._pair import MismatchError, Pair
from tests.fuzz._program import Call, Diverge, Fail
from tests.kit.meshes import DEVICE


@contextlib.contextmanager
def failing(layer: nn.Module, phase: str) -> Iterator[None]:
    calls = 0

    def before(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if phase == "before" or (phase == "recompute" and calls == 2):
            raise ProvokedError(phase)

    def burn(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: burn(item) for key, item in value.items()}
        return Fuse.apply(value) if isinstance(value, Tensor) else value

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if phase == "after":
            raise ProvokedError(phase)
        return burn(output) if phase == "backward" else None

    handles = [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def fail(pair: Pair, op: Fail) -> None:
    for tree in pair.model.trees:
        tree.set_requires_gradient_sync(True)
    parts = pair.batch(op.call)
    raised = []
    ways = op.call.ways_of(pair.index)
    for model, run in ((pair.model, pair.run), (pair.reference, pair.run_reference)):
        layer = model.layers()[op.layer % len(model.layers())]
        with failing(layer, op.phase):
            try:
                run(parts[pair.index], ways).backward()
                raised.append(False)
            except ProvokedError:
                raised.append(True)
    if raised[0] is not raised[1]:
        raise MismatchError(f"an exception {'came' if raised[0] else 'did not come'} through\n{op}")
    if op.then == "new":
        pair.make_optimizers()
    elif op.then == "reset":
        for tree in pair.model.trees:
            tree.reset_iter_state()
    pair.zero("optimizer" if op.then in ("optimizer", "new") and raised[0] else "model")
    pair.unsynced.clear()
    # Before the first forward of a tree, a copy's for one, a reset does nothing.
    have_run = all(unit_of(tree).runtime is not None for tree in pair.model.trees)
    is_reset = op.then == "reset" and have_run
    if not raised[0] or is_reset or len(pair.model.trees) == 1:
        pair.is_whole = False  # else what unshard() holds in a tree behind the exception stays
    elif any(layer.block.checkpoint != "no" for layer in pair.model.layers()):
        # A gather in flight holds the hooks of checkpointing, and they the graph of all trees.
        pair.is_whole = True


def diverge(pair: Pair, op: Diverge) -> None:
    """One rank does something else in a step. All are told, or none, and then numbers are right."""
    if op.way == "fail" and DEVICE != "cpu":
        return  # who waits is told on a host only
    judges = dist.new_group()
    pair.zero("model")
    for tree in pair.model.trees:
        tree.set_requires_gradient_sync(True)
    odd = Call(ways=((op.rank, op.layer % len(pair.model.layers()), op.way),))
    calls = [odd if op.way != "fail" else Call(), Call(), Call()]
    batches = [pair.batch(call) for call in calls]
    told = ""
    for index, (call, parts) in enumerate(zip(calls, batches, strict=True)):
        raises = index == 0 and op.way == "fail" and op.rank == pair.index
        try:
            if raises:  # beside the others' number of whole steps: a rank may be a step behind
                one_step(pair, parts[pair.index], call, op.layer)
            one_step(pair, parts[pair.index], call, None)
        except fsdp2.StateError as error:
            told = str(error)
            break
    everybody: list[Any] = [None] * pair.setup.ranks
    dist.all_gather_object(everybody, told, group=judges)
    if any(everybody) and not all(everybody):
        raise MismatchError(f"only some ranks got a StateError\n{everybody}")
    if told:
        for _ in range(2):
            try:
                pair.model(batches[0][pair.index], {})
            except fsdp2.StateError:
                continue
            raise MismatchError("a forward after a StateError of divergence raises none")
        pair.is_whole = False
    elif op.way != "fail":
        for call, parts in zip(calls, batches, strict=True):
            losses = [pair.run_reference(x, call.ways_of(r)) for r, x in enumerate(parts)]
            pair.mean(losses).backward()
        pair.check_gradients()
    pair.zero("model")


def one_step(pair: Pair, x: Tensor, call: Call, raises_before: int | None) -> None:
    with contextlib.ExitStack() as stack:
        if raises_before is not None:
            layers = pair.model.layers()
            stack.enter_context(contextlib.suppress(ProvokedError))
            stack.enter_context(failing(layers[raises_before % len(layers)], "before"))
        pair.run(x, call.ways_of(pair.index)).backward()

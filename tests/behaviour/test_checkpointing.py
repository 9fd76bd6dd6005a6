"""Promise: activation checkpointing of either kind composes, inside and outside of units."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import fsdp2
from tests.kit.collectives import Gather
from tests.kit.models import (
    WIDTH,
    Block,
    Case,
    Inner,
    PartlyFrozen,
    Stack,
    Units,
    each_block,
    floats,
)
from tests.kit.parity import Pair, assert_same, assert_same_gradients, make_mesh
from tests.kit.pool import ranks
from tests.kit.slow import with_slow

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


class CheckpointedOutside(Stack):
    """A stack that recomputes whole units."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(x)


class SpansUnits(Stack):
    """One checkpoint around several units, and one unit outside."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.front, self.inp(x), use_reentrant=self.reentrant)
        return self.out(self.blocks[2](x))

    def front(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


class RecomputedTwice(Stack):
    """One unit is called twice, in a checkpoint each time."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.out(self.blocks[2](x))


def units_inside(*names: str) -> Units:
    """Return what gives blocks as units, after some modules of each."""
    return lambda model: [
        m for block in model.blocks for m in (*map(block.get_submodule, names), block)
    ]


CASES: dict[str, tuple[type[Stack], type[nn.Module], Units]] = {
    "inside": (Stack, CheckpointedInside, each_block),
    "outside": (CheckpointedOutside, Block, each_block),
    "spanning": (SpansUnits, Block, each_block),
    "both": (CheckpointedOutside, CheckpointedInside, each_block),  # a checkpoint in another one
    "inner units": (Stack, CheckpointedInside, units_inside("inner")),
    "nested units": (CheckpointedOutside, Inner, units_inside("first", "second")),
    "twice in a backward": (RecomputedTwice, Block, each_block),
    "frozen parts": (CheckpointedOutside, PartlyFrozen, each_block),
}


def case_of(where: str, kind: str) -> Case:
    outer, block, units = CASES[where]
    how = {"reentrant": KINDS[kind]}
    build = type(outer.__name__, (outer,), how)
    return Case(lambda: build(type(block.__name__, (block,), how)), units, floats)


@pytest.mark.parametrize(
    ("where", "kind", "reshard_after_forward"),
    with_slow(
        itertools.product(CASES, KINDS, [True, False]),
        [
            ("inside", "reentrant", True),
            ("outside", "non_reentrant", False),
            ("spanning", "reentrant", False),
            ("spanning", "non_reentrant", True),
            ("both", "non_reentrant", True),
            ("inner units", "reentrant", True),
            ("inner units", "non_reentrant", True),
            ("nested units", "reentrant", True),
            ("twice in a backward", "reentrant", True),
            ("frozen parts", "reentrant", True),
            ("frozen parts", "non_reentrant", True),
        ],
    ),
)
@ranks(2)
def test_checkpointing(where: str, kind: str, reshard_after_forward: bool) -> None:
    Pair(case_of(where, kind), reshard_after_forward=reshard_after_forward).train(steps=2)


@pytest.mark.parametrize(
    ("where", "kind"),
    with_slow(
        itertools.product(CASES, KINDS),
        [("outside", "reentrant"), ("spanning", "non_reentrant")],
    ),
)
@ranks(2)
def test_two_forwards_in_one_backward(where: str, kind: str) -> None:
    Pair(case_of(where, kind)).train_on_sums()


@pytest.mark.parametrize("kind", KINDS)
@ranks(2)
def test_accumulation_under_checkpointing(kind: str) -> None:
    pair = Pair(case_of("outside", kind))
    pair.accumulate(3)
    pair.finish()


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
    selective = Case(lambda: Selective("outside", "all"), each_block, floats)
    Pair(selective, reshard_after_forward=2).train(steps=2)
    case = case_of("outside", "non_reentrant")
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


@pytest.mark.parametrize(
    ("impl", "order"),
    with_slow(
        itertools.product(CheckpointImpl, ["before", "after"]),
        [(CheckpointImpl.REENTRANT, "after"), (CheckpointImpl.NO_REENTRANT, "before")],
    ),
)
@ranks(2)
def test_checkpointing_applied_to_a_class(impl: CheckpointImpl, order: str) -> None:
    """`apply_activation_checkpointing` wraps units, or modules that become parts of units."""

    def apply(model: nn.Module) -> None:
        apply_activation_checkpointing(
            model,
            checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper, checkpoint_impl=impl),
            check_fn=lambda module: isinstance(module, Block),
        )

    if order == "before":
        Pair("stack", prepare=apply).train(steps=2)
        return
    pair = Pair("stack")
    apply(pair.model)
    apply(pair.reference)
    assert isinstance(pair.model.blocks[0]._checkpoint_wrapped_module, fsdp2.FSDPModule)
    pair.train(steps=2)


@pytest.mark.parametrize(
    ("reshard_after_forward", "order"),
    with_slow(
        itertools.product([True, False], ["before", "after"]), [(True, "before"), (False, "after")]
    ),
)
@ranks(2)
def test_composable_checkpointing(order: str, reshard_after_forward: bool) -> None:
    """Torch's composable `checkpoint` and ours go on the same module, in either order."""

    def apply(model: nn.Module) -> None:
        for block in model.blocks:
            composable_checkpoint(block)

    prepare = apply if order == "before" else None
    pair = Pair("stack", prepare=prepare, reshard_after_forward=reshard_after_forward)
    if order == "after":
        apply(pair.model)
    pair.train(steps=2)


class Policy:
    """A policy of selective checkpointing that notes what it sees."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: list[str] = []

    def one_region(self) -> Callable[..., CheckpointPolicy]:
        """Return a policy that counts from 0, in forward and (torch 2.11) in recomputation."""
        return functools.partial(self.decide, {False: 0, True: 0})

    def decide(
        self, counts: dict[bool, int], context: Any, op: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        counts[context.is_recompute] += 1
        if not context.is_recompute:
            self.seen.append(str(op))
        saves = {
            "all": True,
            "none": False,
            "every_second": counts[context.is_recompute] % 2 == 0,
            "matmuls": op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default),
        }
        return CheckpointPolicy.MUST_SAVE if saves[self.name] else CheckpointPolicy.MUST_RECOMPUTE


class Selective(Stack):
    """A stack that recomputes units (or parts of them) by a policy."""

    def __init__(self, where: str, policy: str) -> None:
        super().__init__(SelectiveBlock if where == "inside" else Block)
        self.where = where
        self.policy = Policy(policy)
        for block in self.blocks:
            block.policy = self.policy

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        if self.where == "spanning":
            return self.out(selectively(self.policy, nn.Sequential.forward, self.blocks, x))
        for block in self.blocks:
            x = selectively(self.policy, block, x) if self.where == "outside" else block(x)
        return self.out(x)


class SelectiveBlock(Block):
    policy: Policy

    def forward(self, x: Tensor) -> Tensor:
        return selectively(self.policy, super().forward, x)


def selectively(policy: Policy, function: Callable[..., Tensor], *args: Any) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, policy.one_region())
    return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)


PLACES = ["inside", "outside", "spanning"]
POLICIES = ["all", "none", "every_second", "matmuls"]


@pytest.mark.parametrize(
    ("where", "policy", "reshard_after_forward"),
    with_slow(
        itertools.product(PLACES, POLICIES, [True, False]),
        [
            ("inside", "matmuls", True),
            ("outside", "every_second", False),
            ("spanning", "all", True),
        ],
    ),
)
@ranks(2)
def test_selective_checkpointing(where: str, policy: str, reshard_after_forward: bool) -> None:
    """A policy counts the operations of the plain model, whatever the engine does meanwhile."""
    case = Case(lambda: Selective(where, policy), each_block, floats)
    pair = Pair(case, reshard_after_forward=reshard_after_forward)
    for _ in range(3):
        pair.model.policy.seen.clear()
        pair.reference.policy.seen.clear()
        pair.backward()
        pair.step()
        seen, expected = pair.model.policy.seen, pair.reference.policy.seen
        assert seen * 2 == expected  # the reference runs the parts of two ranks
    pair.check()


@ranks(2)
def test_selective_checkpointing_in_mixed_precision() -> None:
    """Inputs are cast alike in forward and recomputation."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    plain = Pair("stack", mp_policy=policy)
    for name in ("all", "every_second"):
        case = Case(lambda name=name: Selective("outside", name), each_block, floats)
        pair = Pair(case, mp_policy=policy)
        batch = pair.local(pair.batch())
        losses = [p.run(p.model, batch) for p in (pair, plain)]
        for loss in losses:
            loss.backward()
        assert_same(losses[0], losses[1], "loss")
        assert_same_gradients(pair.model, plain.model)
        plain.optimizer.zero_grad()


@ranks(2)
def test_collectives_stay_visible_under_selective_checkpointing() -> None:
    """`CommDebugMode` sees the engine's collectives also while a policy does not."""
    counts = []
    for where in ("plain", "outside", "inside", "spanning"):
        case = Case(lambda where=where: Selective(where, "all"), each_block, floats)
        pair = Pair(case)
        for _ in range(2):
            with CommDebugMode() as mode:
                batch = pair.local(pair.batch())
                pair.run(pair.model, batch).backward()
        counts.append({str(op): n for op, n in mode.get_comm_counts().items()})
        assert not any("c10d" in op for op in pair.model.policy.seen)
    assert counts[0]
    assert all(count == counts[0] for count in counts), counts


# --- what a collective in flight holds ------------------------------------------------------------


class Asks(Gather):
    """Records a graph of one node where a gather is issued."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.enable_grad():
            torch.ones(1, requires_grad=True).exp()
        return super().__call__(*args, **kwargs)


@ranks(2)
def test_a_collective_holds_no_hooks_on_saved_tensors() -> None:
    """Its work keeps the hooks of the thread that issues it, and they own a graph."""
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fsdp2.fully_shard(layer, mesh=make_mesh())
        layer.set_custom_all_gather(Asks())
    for _ in range(2):
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = model(torch.ones(2, 4))
        assert packed, "the model's own"
        assert all(tensor.numel() > 1 for tensor in packed)
        output.sum().backward()

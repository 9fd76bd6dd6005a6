"""Promise: ranks that run different units get an error at once; if they said so, they train."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2._core.engine.tree import unit_of
from fsdp2._core.params.registration import GATHERING, WHOLE
from tests.kit.collectives import Gather
from tests.kit.in_turn import advance, shard_each
from tests.kit.meshes import DEVICE
from tests.kit.models import seeded
from tests.kit.parity import (
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    make_mesh,
    replicas_of_four,
)
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

QUICK_S = 10.0
WAYS = {
    "swap": "bac",
    "skip": "ac",
    "skip_first": "bc",
    "skip_last": "ab",
    "twice": "abbc",
    "none": "",
}


class Paths(nn.Module):
    """Three blocks, of which a call names those to run, and a head in the root."""

    def __init__(self, alike: bool = True) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        wide = nn.Sequential(nn.Linear(8, 13), nn.Linear(13, 8))
        self.b = nn.Linear(8, 8) if alike else wide
        self.c = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, path: str = "abc", used: str = "abc") -> Tensor:
        for name in path:
            y = getattr(self, name)(x)
            x = y if name in used else x + 0 * y.detach()
        return self.head(x)


def sharded(alike: bool = True, mesh: Any = None, **kwargs: Any) -> nn.Module:
    model = seeded(lambda: Paths(alike))
    shard_each(
        model.a, model.b, model.c, model, mesh=make_mesh() if mesh is None else mesh, **kwargs
    )
    return model


def train(model: nn.Module, steps: int, *args: Any) -> None:
    for _ in range(steps):
        model(torch.randn(2, 8), *args).square().sum().backward()
        model.zero_grad()


STEPS = 2 if DEVICE == "cpu" else 6
"""Until all are told: a rank that did less has to do something to be noticed, and what a device
received is looked at mostly a step later."""


def run_on(model: nn.Module, *args: Any) -> None:
    for _ in range(STEPS):
        output = model(torch.randn(2, 8), *args)
        if output.requires_grad:
            output.square().sum().backward()
        if DEVICE != "cpu":  # else a host is done with all steps before the device is with one
            torch.accelerator.synchronize()


@contextlib.contextmanager
def told_soon(match: str | None = None) -> Iterator[pytest.ExceptionInfo[fsdp2.StateError]]:
    begin = time.monotonic()
    with pytest.raises(fsdp2.StateError, match=match) as caught:
        yield caught
    assert time.monotonic() - begin < QUICK_S


def assert_out_of_step(model: nn.Module, *args: Any, grad: bool = True) -> str:
    """Run a step in which ranks differ: expect the error, soon, and again at once afterwards."""
    shards = list(model.parameters())
    with torch.set_grad_enabled(grad), told_soon() as caught:
        run_on(model, *args)
    message = str(caught.value)
    assert message.index("`if rank == 0:`") < message.index("conditional=True")  # common, then rare
    for rank in range(dist.get_world_size()):
        assert f"rank {rank}: " in message, message
    assert all(p.grad is None for p in shards), "a gradient was stored"
    begin = time.monotonic()
    for _ in range(2):
        with pytest.raises(fsdp2.StateError):
            model(torch.randn(2, 8))
    assert time.monotonic() - begin < 1.0
    assert all(isinstance(p, DTensor) and p.grad is None for p in model.parameters())
    return message


def backward_of_all(
    model: nn.Module, reference: nn.Module, ways: Sequence[tuple[str, ...]]
) -> None:
    """Run a rank's own way in the model, and the ways of all ranks in the reference."""
    size, rank = dist.get_world_size(), dist.get_rank()
    parts = torch.randn(2 * size, 8).chunk(size)
    model(parts[rank], *ways[rank]).square().mean().backward()
    losses = [reference(part, *way).square().mean() for part, way in zip(parts, ways, strict=True)]
    (sum(losses) / size).backward()


def compare(model: nn.Module, reference: nn.Module, rtol: float) -> None:
    """Compare the gradients, and clear them."""
    assert_same_gradients(model, reference, rtol)
    model.zero_grad()
    reference.zero_grad()


# --- undeclared -----------------------------------------------------------------------------------

SORTS: dict[str, dict[str, Any]] = {
    "alike": {},
    "other sizes": {"alike": False},  # collectives of different sizes never meet: gloo would abort
    "owned": {"shard_placement_fn": lambda p: fsdp2.Whole() if p.dim() > 1 else None},
}


def take_another_way(sort: str, way: str, steps: int, rank: int) -> None:
    model = sharded(**SORTS[sort])
    train(model, steps)
    message = assert_out_of_step(model, WAYS[way] if rank == 1 else "abc")
    assert "(all-gather)" in message or "(reduce-scatter)" in message


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize(
    ("sort", "way"),
    [*(("alike", way) for way in WAYS)]
    + [("other sizes", way) for way in ("swap", "skip", "skip_last")],
)
@ranks(2, limit_s=30)
def test_one_of_two_ranks_takes_another_way(sort: str, way: str, steps: int, rank: int) -> None:
    """In the first step, or once every order is known: both are told who did what."""
    take_another_way(sort, way, steps, rank)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("way", ["swap", "skip"])
@pytest.mark.parametrize("sort", ["alike", "owned"])
@ranks(3, slow(4), limit_s=60)
def test_one_of_many_ranks_takes_another_way(sort: str, way: str, steps: int, rank: int) -> None:
    """The ranks that agree with each other learn of the one that does not.

    Where parameters are owned, who follows the others sends pieces as long as theirs, with a number
    that says it left.
    """
    take_another_way(sort, way, steps, rank)


@ranks(2, limit_s=30)
def test_an_evaluation_on_one_rank(rank: int) -> None:
    """Rank 0 gets to its end, with what the other gathers to train: the next step is an error."""
    model = sharded()
    train(model, 3)
    if rank == 0:
        with torch.no_grad():
            model(torch.randn(2, 8))
    assert_out_of_step(model)


@ranks(3, limit_s=30)
def test_every_rank_takes_a_way_of_its_own(rank: int) -> None:
    """Each rank is told of all the others."""
    assert_out_of_step(sharded(), ("abc", "bca", "cab")[rank])


@pytest.mark.parametrize(
    ("way", "steps"), [("swap", 0), ("swap", 3), ("skip", 0), ("skip", 3), ("skip_last", 0)]
)
@ranks(2, limit_s=30)
def test_evaluation(way: str, steps: int, rank: int) -> None:
    """Without gradients too; a rank that did less is noticed when it goes on."""
    model = sharded()
    with torch.no_grad():
        for _ in range(steps):
            model(torch.randn(2, 8))
    assert_out_of_step(model, WAYS[way] if rank == 1 else "abc", grad=False)


@pytest.mark.parametrize("asynchronous", [True, False])
@ranks(2, limit_s=30)
def test_units_that_were_gathered_by_hand_before(asynchronous: bool, rank: int) -> None:
    """What was on its way when collectives got numbers has none, which says nothing of others."""
    model = sharded()
    for module in (model.a, model.b, model.c):
        module.unshard(async_op=asynchronous)
    train(model, 2)
    assert_out_of_step(model, WAYS["swap"] if rank == 1 else "abc")


@ranks(2, limit_s=30)
def test_a_rank_may_not_need_what_all_prefetched(rank: int) -> None:
    """Ranks that issue the same collectives are in step, whatever they compute."""
    model, reference = sharded(), seeded(Paths)
    x = torch.randn(2, 8)
    with torch.no_grad():
        for path in ("abc", "abc", "ab" if rank == 1 else "abc", "abc"):
            torch.testing.assert_close(model(x, path), reference(x, path))


@pytest.mark.parametrize(
    ("used", "reshard_after_forward"),
    with_slow(
        itertools.product(["ab", "ac", "bc", "c"], [True, False]),
        [("ab", True), ("ac", False), ("bc", False), ("c", True)],
    ),
)
@ranks(slow(2), 3, limit_s=30)
def test_one_rank_does_not_use_an_output(
    used: str, reshard_after_forward: bool, world_size: int
) -> None:
    """Forward is alike; backward reaches not all units of one rank, and takes none for reached."""
    model, reference = sharded(reshard_after_forward=reshard_after_forward), seeded(Paths)
    for step in range(4):
        ways = [("abc", "abc")] * world_size
        if step != 1:
            ways[1] = ("abc", used)
        backward_of_all(model, reference, ways)
        compare(model, reference, 4e-6)


@pytest.mark.parametrize("steps", [0, 2])
@ranks(4, limit_s=30)
def test_one_rank_of_replicas(steps: int, rank: int) -> None:
    """The replicas of its shards wait for it in another collective, and are told as well."""
    model = sharded(mesh=make_mesh(2, 2))
    train(model, steps)
    with told_soon():
        run_on(model, "acb" if rank == 1 else "abc")


# --- over several process groups ------------------------------------------------------------------


def run_each(model: nn.Module, *steps: tuple[str, bool]) -> None:
    """Run a step for each path, with or without a backward."""
    for path, has_backward in steps:
        output = model(torch.randn(2, 8), path)
        if has_backward:
            output.square().sum().backward()
            model.zero_grad()


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("reshard_after_forward", [False, True])
@ranks(2, slow(3), limit_s=30)
def test_one_rank_reduces_where_another_gathers(
    reshard_after_forward: bool, steps: int, rank: int
) -> None:
    """Reductions have a process group of their own, in which nobody comes to meet them."""
    model = sharded(reshard_after_forward=reshard_after_forward)
    model.set_separate_reduce_scatter_group()
    train(model, steps)
    with told_soon():
        run_each(model, ("abc", rank == 1), ("abc", True))


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("way", ["evaluates", "skip", "swap"])
@ranks(4, limit_s=30)
def test_ranks_that_are_no_neighbours_are_told(way: str, steps: int, rank: int) -> None:
    """Backward gathers from neighbours: only these see that one of them goes another way."""
    model = sharded(reshard_after_forward=2)
    model.set_separate_reduce_scatter_group()
    train(model, steps)
    step = ("abc", True)
    others = [("abc", False), step] if way == "evaluates" else [step, (WAYS[way], True)]
    with told_soon():
        run_each(model, *others if rank == 1 else [step, step], step)


@ranks(4, limit_s=30)
def test_all_ranks_may_leave_backward_out_where_neighbours_would_gather(rank: int) -> None:
    """All stand in for the neighbours' gathers that nobody needs, once, and go on alike."""
    model, reference = sharded(reshard_after_forward=2), seeded(Paths)
    model.set_separate_reduce_scatter_group()
    x = torch.randn(2, 8)
    for path, backward in (("abc", True),) * 4 + (("abc", False), ("ac", True)) * 3:
        outputs = [m(x, path) for m in (model, reference)]
        torch.testing.assert_close(*outputs)
        if backward:
            for output in outputs:
                output.square().sum().backward()
            compare(model, reference, 4e-6)


# --- sent differently -----------------------------------------------------------------------------


SETTINGS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "copy_free": (lambda m: m.set_copy_free_min_bytes(1), "2 sent separately.*set_copy_free"),
    "wire_dtype": (
        lambda m: m.set_gradient_wire_dtype(torch.bfloat16),
        "reduce-scatter.*dtypes that are sent .*set_gradient_wire_dtype",
    ),
    "dtype": (lambda m: m.c.half(), r"c \(all-gather\).*sends float16"),
    "carrier": (
        lambda m: m.b.set_custom_all_gather(Gather()),
        r"b \(all-gather\).*user-supplied function",
    ),
    "memory": (lambda m: m.set_memory("low"), "different collectives"),
}


def assert_told(model: nn.Module, match: str, steps: int = 3) -> None:
    """Expect the error on every rank, soon; nothing of the gathered parameters stays."""
    with told_soon(match):
        train(model, steps)
    for unit in model.modules():
        state = unit_of(unit)
        for group in () if state is None else state.own_groups:
            waiting = group.state in (GATHERING, WHOLE)
            assert waiting or group.buffers.full is None or not group.buffers.full.has_memory


@pytest.mark.parametrize("steps", with_slow([0, 3], [3]))
@pytest.mark.parametrize("name", list(SETTINGS))
@ranks(slow(2), 3, limit_s=30)
def test_one_rank_sends_differently(name: str, steps: int, rank: int) -> None:
    """A setting of one rank alone: an error that says which, before sizes that differ meet."""
    change, match = SETTINGS[name]
    model = sharded(alike=False)
    train(model, steps)
    if rank == 1:
        change(model)
    assert_told(model, match)


@ranks(2, 3, limit_s=30)
def test_one_rank_reduces_differently(rank: int) -> None:
    """What is set between forward and backward is seen in the reduction."""
    model = sharded(alike=False, reshard_after_forward=False)
    train(model, 2)
    loss = model(torch.randn(2, 8)).square().sum()
    if rank == 1:
        model.c.set_gradient_wire_dtype(torch.bfloat16)
    with pytest.raises(fsdp2.StateError, match=r"c \(reduce-scatter\).*: ranks send it differ"):
        loss.backward()


@pytest.mark.parametrize("steps", [0, 3])
@ranks(4, limit_s=30)
def test_one_rank_leaves_out_its_replicas(steps: int, rank: int) -> None:
    """Process groups that wait for each other in a circle would all wait: no rank gets there."""
    model = sharded(mesh=make_mesh(2, 2))
    train(model, steps)
    if rank == 1:
        model.set_requires_all_reduce(False)
    assert_told(model, "set_requires_all_reduce")


@ranks(2, limit_s=30)
def test_one_rank_changes_what_is_sent_and_all_do_so_later(rank: int) -> None:
    """Settings that all ranks change, at any time, are followed; one left behind is told."""
    model = sharded(alike=False)
    for nbytes in (None, 1, None, 1):
        model.set_copy_free_min_bytes(nbytes)
        train(model, 2)
        model.set_gradient_wire_dtype(torch.bfloat16 if nbytes else None)
        train(model, 2)
    if rank == 1:
        model.set_copy_free_min_bytes(None)
    assert_told(model, "0 sent separately")


@pytest.mark.parametrize("where", ["forward", "sync"])
@ranks(2, limit_s=30)
def test_a_wire_that_changes_while_something_waits(where: str) -> None:
    """A gather in flight, and gradients that accumulate, carry the number of before."""
    policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = sharded(mp_policy=policy)
    train(model, 2)
    model.set_requires_gradient_sync(where != "sync")
    model(torch.randn(2, 8)).square().sum().backward()
    model.a.unshard(async_op=True)
    model.set_gradient_wire_dtype(torch.bfloat16)
    model.set_custom_all_gather(Gather())
    model.a.set_custom_all_gather(Gather())
    model.set_requires_gradient_sync(True)
    model(torch.randn(2, 8)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# --- declared -------------------------------------------------------------------------------------


class Inner(nn.Module):
    """A block with a unit inside, a parameter of its own, and one that is used at times."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.sub = nn.Linear(8, 8)
        self.rare = nn.Linear(8, 8)

    def forward(self, x: Tensor, with_rare: bool = False) -> Tensor:
        x = x + torch.tanh(self.sub(x * self.scale))
        return x + self.rare(x) if with_rare else x


class Choosing(nn.Module):
    """Three blocks; each rank runs those that it is told to, in their order."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Inner() for _ in range(3))
        self.out = nn.Linear(8, 3)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, chosen: str) -> Tensor:
        x = self.inp(x)
        for name in chosen:
            block, with_rare = self.blocks[int(name) % 3], int(name) >= 3
            if self.checkpointed:
                x = checkpoint(block, x, with_rare, use_reentrant=False)
            else:
                x = block(x, with_rare)
        return self.out(x)


CHOICES = ["012", "02", "", "1", "0124", "5", "21", "00", "34", "2", "0", "01"]


class Chosen:
    """A model whose ranks choose, and an unsharded one that does what all of them did."""

    def __init__(
        self, mesh: Any = None, checkpointed: bool = False, nested: bool = False, **kwargs: Any
    ) -> None:
        mesh = make_mesh() if mesh is None else mesh
        self.reference = seeded(lambda: Choosing(checkpointed))
        self.model = seeded(lambda: Choosing(checkpointed))
        for block in self.model.blocks:
            if nested:
                fsdp2.fully_shard(block.sub, mesh=mesh, **kwargs)
            fsdp2.fully_shard(block, mesh=mesh, conditional=True, **kwargs)
        fsdp2.fully_shard(self.model, mesh=mesh, **kwargs)
        self.optimizers = [
            torch.optim.SGD(m.parameters(), lr=0.05) for m in (self.model, self.reference)
        ]

    def backward(self, step: int) -> None:
        size = dist.get_world_size()
        chosen = [CHOICES[(step * size + index * 5) % len(CHOICES)] for index in range(size)]
        backward_of_all(self.model, self.reference, [(names,) for names in chosen])

    def step(self) -> None:
        assert_same_gradients(self.model, self.reference, 1e-5)
        advance(*self.optimizers)

    def train(self, steps: int = 4) -> None:
        for step in range(steps):
            self.backward(step)
            self.step()
        assert_same_parameters(self.model, self.reference, 1e-5)


@pytest.mark.parametrize("nested", with_slow([False, True], [True]))
@ranks(slow(2), 3, limit_s=30)
def test_ranks_choose_blocks(nested: bool) -> None:
    """Declared, any rank may skip any block; a block that no rank ran has no gradient."""
    chosen = Chosen(nested=nested)
    chosen.train(steps=6)
    chosen.model(torch.randn(2, 8), "").sum().backward()
    assert all(p.grad is None for block in chosen.model.blocks for p in block.parameters())
    assert chosen.model.inp.weight.grad is not None


@pytest.mark.parametrize(
    ("shape", "setting"),
    [
        slow((), {"reshard_after_forward": True}),
        slow((), {"reshard_after_forward": False}),
        ((), {"reshard_after_forward": 2}),
        ((2, 2), {"nested": True}),
        ((), {"nested": True, "checkpointed": True}),
        slow((), {"checkpointed": True}),
    ],
)
@ranks(4, limit_s=30)
def test_ranks_choose_blocks_however_they_reshard(
    shape: tuple[int, ...], setting: dict[str, Any]
) -> None:
    """With every way to reshard after forward, the smaller mesh too; and with a replicate axis.

    Also with activation checkpointing of each block: the unit above gathers for recomputation too.
    """
    Chosen(mesh=make_mesh(*shape), **setting).train()


@ranks(2, limit_s=30)
def test_ranks_choose_blocks_and_accumulate() -> None:
    """Ranks may use different blocks in each backward without sync."""
    chosen = Chosen()
    for first in (0, 3):
        for micro in range(3):
            chosen.model.set_requires_gradient_sync(micro == 2)
            chosen.backward(first + micro)
        chosen.step()
    assert_same_parameters(chosen.model, chosen.reference, 1e-5)


@ranks(2, limit_s=30)
def test_ranks_choose_blocks_in_mixed_precision() -> None:
    """bf16 compute, reduced in fp32: gradients for the same parameters, near the exact ones."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    chosen = Chosen(mp_policy=policy)
    for step in range(4):
        chosen.backward(step)
        compare(chosen.model, chosen.reference, 0.2)


@ranks(2, limit_s=30)
def test_ranks_choose_blocks_in_evaluation(rank: int) -> None:
    """Without gradients, between training steps."""
    chosen = Chosen()
    for step in range(3):
        x = torch.randn(2, 8)
        with torch.no_grad():
            actual = chosen.model(x, CHOICES[step + 3 * rank])
            expected = chosen.reference(x, CHOICES[step + 3 * rank])
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        chosen.train(steps=1)


@ranks(2, limit_s=30)
def test_a_copy_keeps_what_was_declared() -> None:
    """A deepcopy, before and after training, is conditional too."""
    chosen = Chosen()
    for _ in range(2):
        chosen.model = copy.deepcopy(chosen.model)
        chosen.optimizers[0] = torch.optim.SGD(chosen.model.parameters(), lr=0.05)
        chosen.train(steps=2)
    assert unit_of(chosen.model.blocks[0]).conditional


@ranks(2, limit_s=30)
def test_a_conditional_unit_outside_of_the_one_above_it() -> None:
    """Nobody gathered its parameters: the error says where to call it."""
    chosen = Chosen()
    chosen.model(torch.randn(2, 8), "01").sum().backward()
    for _ in range(2):
        with pytest.raises(fsdp2.StateError, match=r"blocks\.0: is conditional"):
            chosen.model.blocks[0](torch.randn(2, 8))
    chosen.model.zero_grad()
    chosen.train(steps=1)
    root = fsdp2.fully_shard(seeded(Inner), conditional=True)  # no unit above it could gather it
    with pytest.raises(fsdp2.StateError, match="conditional"):
        root(torch.randn(2, 8))
    with pytest.raises(fsdp2.ConfigError, match="conditional"):
        fsdp2.fully_shard(Inner(), conditional="yes")  # type: ignore[arg-type]  # the point


@ranks(1, limit_s=30)
def test_a_conditional_unit_without_parameters_is_recomputed() -> None:
    """There is nothing to gather in it, nor in the unit around it, so nothing is amiss."""
    inner = fsdp2.fully_shard(nn.Tanh(), conditional=True)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(checkpoint_wrapper(inner)))
    reference = nn.Sequential(copy.deepcopy(model[0]), nn.Tanh())
    shard_each(model[1], model)
    x = torch.randn(2, 8)
    for m in (model, reference):
        m(x).sum().backward()
    assert_same_gradients(model, reference)


# --- within a unit --------------------------------------------------------------------------------


class Branches(nn.Module):
    """A block with two branches, and a path around both."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        if branch == "none":
            return x * 2
        return x + torch.tanh(getattr(self, branch)(x))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(8, 8)
        self.block = Branches()
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return self.out(self.block(self.inp(x), branch))


@pytest.mark.parametrize(
    "branches",
    [("left", "right", "left", "right"), ("none", "left", "none", "none"), ("none",) * 4],
    ids=["different parameters", "none on some ranks", "none on any rank"],
)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@ranks(2, slow(4), limit_s=30)
def test_ranks_use_different_parameters_of_a_unit(
    branches: tuple[str, ...], reshard_after_forward: bool, world_size: int
) -> None:
    """Nothing has to be declared for that: the unit runs on every rank, and reduces all it has."""
    reference, model = seeded(Branching), seeded(Branching)
    how = {"mesh": replicas_of_four(), "reshard_after_forward": reshard_after_forward}
    shard_each(model.block, model, **how)
    for step in range(3):
        ways = (branches[step:] + branches[:step])[:world_size]
        backward_of_all(model, reference, [(way,) for way in ways])
        compare(model, reference, 1e-5)


# --- at random ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
@ranks(2, 3, 4, limit_s=30)
def test_any_divergence_is_an_error_on_all_ranks_or_none(seed: int, world_size: int) -> None:
    """Random ways, alike for some steps and then not: no hang, no mixture, no lone failure."""
    choose = random.Random(seed)
    mesh = make_mesh(2, 2) if world_size == 4 and seed % 2 else make_mesh()
    # No ints: a rank may then wait on the smaller mesh for one that waits for it on the whole, and
    # both learn it from the process group's timeout.
    reshard = choose.choice([None, True, False])
    alike = choose.random() < 0.7
    model = sharded(alike, mesh=mesh, reshard_after_forward=reshard)
    reference = seeded(lambda: Paths(alike))
    judges = dist.new_group()
    routes = ["abc", "acb", "ab", "bc", "", "aabc", "cb"]
    usual = [choose.choice(routes[:2]) for _ in range(choose.randint(0, 5))]
    odd = choose.randrange(world_size)
    message = ""
    begin = time.monotonic()
    for step, route in enumerate([*usual, "", *usual[:2], "abc"]):
        ways = [(route, "abc")] * world_size
        if step == len(usual):
            ways = [("abc", "abc")] * world_size
            ways[odd] = (choose.choice(routes), choose.choice(["abc", "ab", "bc", "ac", "c"]))
        try:
            backward_of_all(model, reference, ways)
        except fsdp2.StateError as error:
            message = str(error)
            break
        assert_sharded(model)
        compare(model, reference, 1e-4)
    assert time.monotonic() - begin < QUICK_S
    failed: list[Any] = [None] * world_size
    dist.all_gather_object(failed, message, group=judges)
    assert all(failed) or not any(failed), failed

"""Promise: a step holds no more than the memory setting says, and computes what it always did.

The models have an embedding and a head of more than a MiB in the root, so these are *parts*: groups
of their own (decision note 0012).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2._core.base import events
from fsdp2._core.base.events import Event
from fsdp2._core.engine.parts import Parts
from fsdp2._core.engine.tree import unit_of
from fsdp2._core.params.reduce import Reduction
from fsdp2._core.params.registration import GATHERING, WHOLE
from tests.behaviour.test_recovery import fail
from tests.kit.in_turn import shard_each
from tests.kit.models import Batch, Case, loss_of, seeded
from tests.kit.parity import Pair, assert_same_gradients, make_mesh, train_alike
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

VOCAB, WIDTH, HIDDEN = 601, 449, 29  # the embedding is just above a MiB
SETTINGS = ("low", "balanced", "fast", 64_000_000)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Language(nn.Module):
    """An embedding, blocks, a norm and a head with a bias.

    A call says how the head is used: ``"yes"``, ``"no"``, ``"twice"`` (before the blocks too, so
    that its gradient is complete after theirs) or ``"checkpoint"``.
    """

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: Tensor, head: str = "yes") -> Tensor:
        x = self.embed(ids)
        early = self.head(x) if head == "twice" else 0.0
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if head == "no":
            return x
        if head == "checkpoint":
            return checkpoint(self.head, x, use_reentrant=False)
        return self.head(x) + early


class TiedLanguage(Language):
    """Reads the embedding's weight beside the embedding, if it is told to."""

    tie = False

    def forward(self, ids: Tensor, head: str = "yes") -> Tensor:
        y = super().forward(ids, head)
        return y + F.linear(self.norm.weight, self.embed.weight) if self.tie else y


def batch(rows: int) -> Batch:
    return Batch((torch.randint(0, VOCAB, (rows, 2)),), {})


CASE = Case(Language, lambda m: list(m.blocks), batch)


@contextmanager
def recording() -> Iterator[list[Event]]:
    seen: list[Event] = []
    with events.listen(seen.append):
        yield seen


def moves(seen: list[Event], kind: str, phase: str | None = None) -> Counter[str]:
    """Count seen of a kind by the name of their group."""
    return Counter(e.fqn for e in seen if e.kind == kind and phase in (None, e.phase))


def gathers_of(pair: Pair, part: str) -> int:
    """Step, and return how often a part was gathered."""
    with recording() as seen:
        pair.backward()
    pair.step()
    return moves(seen, "unshard")[part]


def gradients_of(pair: Pair, *heads: str) -> None:
    """Run a step in which rank ``i`` uses the head as ``heads[i]`` says; compare gradients."""
    count, whole = dist.get_world_size(), pair.batch()
    parts = [whole.chunk(index, count).args[0] for index in range(count)]
    loss_of(pair.model(parts[dist.get_rank()], heads[dist.get_rank()])).backward()
    losses = [loss_of(pair.reference(p, h)) for p, h in zip(parts, heads, strict=True)]
    torch.stack(losses).mean().backward()
    pair.step()


# --- the same training ----------------------------------------------------------------------------


@pytest.mark.parametrize("memory", with_slow(SETTINGS, ["balanced"]))
@ranks(3)
def test_every_setting_trains_as_the_plain_model(memory: str | int) -> None:
    pair = Pair(CASE)
    pair.model.set_memory(memory)
    pair.train(steps=4)


@pytest.mark.parametrize("reshard", with_slow([True, False], [True]))
@ranks(2)
def test_with_a_root_that_frees_or_keeps_its_parameters(reshard: bool) -> None:
    Pair(CASE, reshard_after_forward=reshard).train(steps=4)


@ranks(4)
def test_on_a_replicate_axis() -> None:
    pair = Pair(CASE, mesh=make_mesh(2, 2))
    pair.train(steps=3)
    pair.later_rtol = 4e-6  # two axes add in another order than the reference; some CPUs show it
    heads = ("no", "yes", "yes", "no")
    for _ in range(2):
        gradients_of(pair, *heads)
    gradients_of(pair, "yes", "yes", "twice", "yes")
    pair.check()


@ranks(2)
def test_in_mixed_precision() -> None:
    """Gradients of bf16 parameters are reduced in fp32: as torch's own fully_shard does it."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    train_alike(CASE, mp_policy=policy, steps=4)


@ranks(2)
def test_settings_may_change_between_steps() -> None:
    pair = Pair(CASE)
    for memory in (*SETTINGS, *SETTINGS):
        pair.model.set_memory(memory)
        pair.backward()
        pair.step()
    pair.check()


# --- what backward does not read ------------------------------------------------------------------


@pytest.mark.parametrize("reshard", with_slow([True, None], [None]))
@ranks(2)
def test_backward_does_not_gather_the_embedding(reshard: bool | None) -> None:
    """From the second step on, when ranks know of each other that nobody reads it."""
    pair = Pair(CASE, reshard_after_forward=reshard)
    pair.train(steps=2)
    loss = pair.run(pair.model, pair.local(pair.batch()))
    assert isinstance(pair.model.embed.weight, DTensor)
    assert isinstance(pair.model.head.weight, DTensor) == (reshard is True)
    with recording() as seen:
        loss.backward()
    gathered = moves(seen, "unshard")
    assert gathered["embed"] == 0
    assert gathered["head"] == (reshard is True)
    assert moves(seen, "reduce")["embed"] == 1
    pair.model.zero_grad()
    pair.train(steps=1)


@ranks(2)
def test_an_embedding_that_is_a_unit_is_not_gathered_either() -> None:
    pair = Pair(Case(Language, lambda m: [m.embed, *m.blocks, m.head], batch))
    pair.train(steps=2)
    with recording() as seen:
        pair.backward()
    assert moves(seen, "unshard")["embed"] == 1
    assert moves(seen, "unshard")["head"] == 2
    pair.step()
    pair.check()


def tied_losses(pair: Pair, readers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Run both forwards, in which some of two ranks read the embedding's weight behind its back."""
    whole, expected = pair.batch(), []
    for index in range(2):
        pair.reference.tie = index in readers
        expected.append(pair.run(pair.reference, whole.chunk(index, 2)))
    pair.model.tie = dist.get_rank() in readers
    return pair.run(pair.model, pair.local(whole)), torch.stack(expected).mean()


@ranks(2)
def test_what_backward_reads_stays_or_is_gathered() -> None:
    """A weight that a rank starts to read, behind the embedding's back, is there for backward."""
    pair = Pair(Case(TiedLanguage, lambda m: list(m.blocks), batch))
    pair.train(steps=2)
    for readers in ((), (1,), (0, 1), (1,)):
        for loss in tied_losses(pair, readers):
            loss.backward()
        pair.step()
    pair.check()


@ranks(2)
def test_a_rank_keeps_a_part_that_two_forwards_released() -> None:
    """Reduced in the middle of the backward of a sum: whoever freed it or not, all gather alike."""
    pair = Pair(Case(TiedLanguage, lambda m: list(m.blocks), batch))
    pair.train(steps=2)
    first, second = tied_losses(pair, (1,)), tied_losses(pair, (1,))
    for losses in zip(first, second, strict=True):
        torch.stack(losses).sum().backward()
    pair.step()
    pair.check()


@pytest.mark.parametrize("order", with_slow(["together", "apart"], ["together"]))
@ranks(2)
def test_two_forwards_before_backward(order: str) -> None:
    pair = Pair(CASE)
    pair.train(steps=2)
    for _ in range(2):
        batches = pair.batch(), pair.batch()
        losses = [pair.losses(b) for b in batches]
        if order == "together":
            sum(loss for loss, _ in losses).backward()  # type: ignore[union-attr]
        else:
            for loss, _ in losses:
                loss.backward()
        sum(expected for _, expected in losses).backward()  # type: ignore[union-attr]
        pair.step()
    pair.check()


@pytest.mark.parametrize("reshard", with_slow([None, True, False], [True]))
@ranks(2, slow(3))
def test_a_head_that_is_a_unit_runs_twice_before_a_backward(reshard: bool | None) -> None:
    """When its gradient is complete was learnt from steps with one forward."""
    case = Case(lambda: Language(1), lambda m: [*m.blocks, m.head], batch)
    pair = Pair(case, reshard_after_forward=reshard)
    pair.train(steps=2)
    for count in (2, 3, 1, 2):
        losses = [pair.losses(pair.batch()) for _ in range(count)]
        for side in (0, 1):
            torch.stack([both[side] for both in losses]).sum().backward()
        del losses
        pair.step()
    pair.check()


@ranks(2)
def test_two_backwards_of_one_forward() -> None:
    pair = Pair(CASE)
    pair.train(steps=2)
    loss, expected = pair.losses(pair.batch())
    for retain in (True, False):
        loss.backward(retain_graph=retain)
        expected.backward(retain_graph=retain)
    pair.step()
    pair.check()


@pytest.mark.parametrize("reentrant", with_slow([True, False], [False]))
@ranks(2)
def test_a_part_under_checkpointing_is_whole_when_it_is_recomputed(reentrant: bool) -> None:
    class Checkpointed(Language):
        def forward(self, ids: Tensor, head: str = "yes") -> Tensor:
            x = checkpoint(self.embed, ids, use_reentrant=False)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return checkpoint(self.head, self.norm(x), use_reentrant=reentrant)

    Pair(Case(Checkpointed, lambda m: list(m.blocks), batch)).train(steps=4)


@ranks(2)
def test_parts_in_checkpoint_wrappers() -> None:
    """The wrapper runs outside of the checkpoint, the module that holds the weight inside."""

    class Wrapped(Language):
        def __init__(self) -> None:
            super().__init__()
            self.embed = checkpoint_wrapper(self.embed)
            self.head = checkpoint_wrapper(nn.Sequential(nn.Linear(WIDTH, WIDTH), self.head))

    Pair(Case(Wrapped, lambda m: list(m.blocks), batch)).train(steps=4)


@ranks(2)
def test_a_frozen_embedding() -> None:
    pair = Pair(CASE, prepare=lambda m: m.embed.requires_grad_(False))
    pair.train(steps=3)
    assert gathers_of(pair, "embed") == 1


@ranks(2)
def test_evaluation_before_and_between_steps() -> None:
    pair = Pair(CASE)
    with torch.inference_mode():
        pair.losses(pair.batch())
    for _ in range(2):
        pair.train(steps=2)
        with torch.no_grad():
            pair.losses(pair.batch())
        pair.check()
    assert gathers_of(pair, "embed") == 1


@ranks(2)
def test_a_double_backward_through_gradients_of_inputs() -> None:
    class Floats(Language):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(VOCAB, WIDTH)

    pair = Pair(
        Case(Floats, lambda m: list(m.blocks), lambda n: Batch((torch.randn(n, VOCAB),), {}))
    )
    pair.train(steps=2)
    for _ in range(2):
        whole = pair.batch()
        losses = []
        for model, parts in ((pair.model, [dist.get_rank()]), (pair.reference, [0, 1])):
            found = []
            for index in parts:
                x = whole.chunk(index, 2).args[0].requires_grad_()
                loss = pair.run(model, Batch((x,), {}))
                (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
                found.append(loss + gradient.square().sum())
            losses.append(torch.stack(found).mean())
        for loss in losses:
            loss.backward()
        pair.step()
    pair.train(steps=1)


# --- reduced early --------------------------------------------------------------------------------


@ranks(2)
def test_the_head_is_reduced_before_the_blocks() -> None:
    """Its gradient is complete before theirs. The embedding's is not."""
    pair = Pair(CASE)
    for step in range(3):
        with recording() as seen:
            pair.backward()
        order = [e.fqn for e in seen if e.kind == "reduce"]
        blocks = ["blocks.2", "blocks.1", "blocks.0"]
        expected = ["head", *blocks, "embed", ""] if step else [*blocks, "embed", "head", ""]
        assert order == expected
        pair.step()


@ranks(2, slow(3))
def test_ranks_may_differ_in_their_use_of_a_part(rank: int, world_size: int) -> None:
    """One rank does not use the head, or uses it late: gradients are right in every step."""
    pair = Pair(CASE)
    pair.train(steps=2)
    others = ["yes"] * (world_size - 1)
    for heads in (["no", *others], [*others, "no"], ["no"] * world_size, [*others, "twice"]):
        with recording() as seen:
            gradients_of(pair, *heads)
        late = heads[-1] == "twice"
        assert moves(seen, "reduce")["head"] == (2 if late else 1), heads
    for _ in range(2):  # now known to be late: reduced once again
        with recording() as seen:
            gradients_of(pair, *others, "twice")
        assert moves(seen, "reduce")["head"] == 1
    pair.train(steps=1)


@ranks(2)
def test_late_gradients_of_parts_where_ranks_do_not_tell() -> None:
    """As on a device: the second backward reduces the unit after each of its two modules."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.large = nn.Linear(WIDTH, VOCAB)
            self.back = nn.Linear(VOCAB, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.back(torch.tanh(self.large(self.inner(x)))))

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(13, WIDTH), Wide(), Wide())

    reference, x = seeded(build), torch.randn(6, 13)
    model = copy.deepcopy(reference)
    shard_each(model[1].inner, model[2].inner)
    fsdp2.fully_shard([model[1], model[2]])
    fsdp2.fully_shard(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Parts, "_agrees", False)
        for _ in range(3):
            for m, rows in ((model, x.chunk(2)[dist.get_rank()]), (reference, x)):
                loss = loss_of(m(rows))
                loss.backward(retain_graph=True)
                loss.backward()
            assert_same_gradients(model, reference, 1e-5)
            model.zero_grad()
            reference.zero_grad()


@ranks(2)
def test_the_use_of_a_part_may_alternate() -> None:
    pair = Pair(CASE)
    for head in ("no", "yes", "twice", "no", "yes", "checkpoint", "yes"):
        gradients_of(pair, head, "yes")
    pair.check()


class Around(nn.Module):
    """A large part of a unit, and a unit inside of that one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(520, 520)
        self.inner = nn.Linear(520, 520)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(torch.tanh(self.large(x)))
        return y


class MaySkip(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(520))
        self.around = Around()
        self.last = nn.Linear(520, 520)

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        y: Tensor = self.around(x * self.gain)
        return y if skip else self.last(y)


@pytest.mark.parametrize("skips", ["first", "later"])
@ranks(1)
def test_a_unit_is_not_prefetched_into_its_own_backward(skips: str) -> None:
    """Its part was taken for reduced, since another step had another order; it is still read."""
    reference, model = seeded(MaySkip), seeded(MaySkip)
    shard_each(model.around.inner, model.around, model.last, model, mesh=make_mesh())
    model.around.inner.set_modules_to_backward_prefetch([model.around])
    for step in range(3):
        x, skip = torch.randn(3, 520), (step == 0) is (skips == "first")
        for m in (model, reference):
            m.zero_grad()
            m(x, skip).square().mean().backward()
        assert_same_gradients(model, reference)


@pytest.mark.parametrize("setting", ["set_requires_gradient_sync", "set_is_last_backward"])
@ranks(2)
def test_accumulation(setting: str) -> None:
    pair = Pair(CASE)
    for _ in range(3):
        pair.accumulate(2, setting)
        pair.step()
    pair.check()


@ranks(2)
def test_hooks_of_the_user_run_once_a_backward() -> None:
    """Those on sharded parameters: gradients that hooks wait for are set during backward."""
    pair = Pair(CASE)
    seen: Counter[str] = Counter()
    for name, param in pair.model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _p, name=name: seen.update([name]))
    pair.train(steps=3)
    assert set(seen.values()) == {3}


@pytest.mark.parametrize("phase", with_slow(["after forward", "backward"], ["backward"]))
@ranks(2)
def test_training_goes_on_after_an_exception(phase: str) -> None:
    pair = Pair(CASE)
    pair.train(steps=2)
    fail(pair, "blocks.1", phase)
    pair.train(steps=3)


@ranks(2)
def test_a_copy_has_parts_of_its_own() -> None:
    pair = Pair(CASE)
    pair.train(steps=2)
    other = copy.deepcopy(pair.model)
    ids = pair.local(pair.batch())
    for model in (pair.model, other, pair.model, other):
        model.zero_grad()
        pair.run(model, ids).backward()
    assert_same_gradients(other, copy.deepcopy(pair.model))
    unit, copied = unit_of(pair.model), unit_of(other)
    assert [g.early.part for g in copied.own_groups] == [g.early.part for g in unit.own_groups]
    hooks = other.embed._forward_pre_hooks.values()
    assert [hook.readers for hook in hooks] == [copied.own_groups[0].early.readers]


# --- which groups there are -----------------------------------------------------------------------


@ranks(2)
def test_what_is_a_part() -> None:
    """Large submodules of a unit that contains units; never the parameters of a tie."""

    class Outer(nn.Module):
        def __init__(self, tie: bool = False) -> None:
            super().__init__()
            self.inner = Language(1)
            self.small = nn.Linear(3, 3)
            if tie:
                self.inner.head.weight = self.inner.embed.weight

    def parts(model: nn.Module, *units: nn.Module) -> list[str]:
        shard_each(*units)
        root = unit_of(fsdp2.fully_shard(model))
        return [group.early.part for group in root.own_groups]

    model = Outer()
    assert parts(model, model.inner.blocks[0]) == ["inner.embed", "inner.head", ""]
    assert parts(Outer()) == [""]
    model = Outer(tie=True)
    assert parts(model, model.inner.blocks[0]) == [""]


# --- the setting ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("memory", "limit"), [slow("low", 1), ("balanced", 2), slow("fast", 3)])
@ranks(2)
def test_never_more_units_are_whole_than_the_setting_says(memory: str, limit: int) -> None:
    """Counted at every event: units below the root that are whole, or on their way."""
    pair = Pair(Case(lambda: Language(6), lambda m: list(m.blocks), batch))
    pair.model.set_memory(memory)
    units = [unit_of(block) for block in pair.model.blocks]
    groups = [group for unit in units if unit is not None for group in unit.own_groups]
    counts: list[int] = []

    def count(*_: Any) -> None:
        counts.append(sum(group.state in (GATHERING, WHOLE) for group in groups))

    for block in pair.model.blocks:
        block.up.register_forward_pre_hook(count)
        block.up.register_full_backward_hook(count)
    with events.listen(count):
        pair.train(steps=3)
    assert max(counts) == limit


@pytest.mark.parametrize(("memory", "running"), [slow("low", 0), ("balanced", 1), ("fast", 3)])
@ranks(2)
def test_never_more_reductions_hold_their_inputs(memory: str, running: int) -> None:
    """Seen whenever something is gathered or reduced. One more may, if the oldest is small."""
    pair = Pair(Case(lambda: Language(6), lambda m: list(m.blocks), batch))
    pair.model.set_memory(memory)
    pair.backward()
    root = unit_of(pair.model)
    counts: list[int] = []
    large: list[int] = []
    queue = root.runtime.reductions

    def running_now() -> list[Reduction]:
        return list(queue._running)

    def count(_: Event) -> None:
        counts.append(len(running_now()))
        large.append(sum(reduction.nbytes >= 1 << 20 for reduction in running_now()))

    with events.listen(count):
        pair.backward()
    assert max(counts) == (running + 1 if running else 0)
    assert max(large) <= max(1, running) if running else not any(large)
    assert not running_now()


@ranks(2)
def test_a_budget_buys_overlap() -> None:
    """More bytes never give less; too few name what is needed, and change nothing."""
    model = Pair(CASE).model
    unit = unit_of(model)
    with pytest.raises(fsdp2.ConfigError, match="bytes are not enough") as caught:
        model.set_memory(1000)
    least = int(str(caught.value).split(" take ")[1].split()[0])
    assert least > 2 * VOCAB * WIDTH * 4
    found = []
    for budget in (least, least + 100_000, least + 200_000, 10 * least):
        model.set_memory(budget)
        overlap = unit.settings.overlap
        assert all(u.settings.overlap == overlap for u in map(unit_of, model.blocks))
        found.append((overlap.prefetch, overlap.reductions))
    assert found == sorted(found)
    assert found[0] == (0, 0)
    assert found[-1] == (2, 3)


@ranks(2)
def test_a_budget_counts_gradients_as_they_are_reduced() -> None:
    """Gradients of the embedding (2 bytes each) are cast for their reduction (4 bytes)."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Pair(CASE, mp_policy=policy).model
    root = 2 * VOCAB * WIDTH * 2  # the embedding and the head are whole all the time
    with pytest.raises(fsdp2.ConfigError, match="bytes are not enough"):
        model.set_memory(root + VOCAB * WIDTH * (2 + 4))

"""Promise: the calls that steer a sharded model do what they say, in any order."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import fsdp2
from fsdp2._core.base.events import Event, listen
from fsdp2._core.engine.tree import unit_of
from tests.kit.in_turn import advance, reshard_all, units_of
from tests.kit.models import (
    CASES,
    WIDTH,
    Block,
    Case,
    Stack,
    each_block,
    floats,
    loss_of,
    seeded,
    stack,
)
from tests.kit.parity import (
    Pair,
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    assert_sharded,
    make_mesh,
    names_of,
    shard,
)
from tests.kit.pool import ranks
from tests.kit.slow import with_slow


def is_whole(module: nn.Module) -> bool:
    """True if the module's own parameters are plain tensors now; they must not be mixed."""
    (is_sharded,) = {isinstance(p, DTensor) for p in module.parameters()}
    return not is_sharded


# --- what fully_shard makes of a module -----------------------------------------------------------


@ranks(1, 2)
def test_the_class_is_a_subclass_of_both() -> None:
    model = Stack()
    same = fsdp2.fully_shard(model)
    assert same is model
    assert isinstance(model, fsdp2.FSDPModule)
    assert isinstance(model, Stack)
    assert not isinstance(model.blocks[0], fsdp2.FSDPModule)
    other = Stack()
    assert not isinstance(other, fsdp2.FSDPModule)
    fsdp2.fully_shard(other)
    assert type(other) is type(model)


@ranks(2)
def test_a_list_gives_a_list_back() -> None:
    first, second = Block(), Block()
    result = fsdp2.fully_shard([first, second])
    assert list(result) == [first, second]
    assert isinstance(first, fsdp2.FSDPModule)
    assert isinstance(second, fsdp2.FSDPModule)


@ranks(2)
def test_a_unit_of_several_modules_is_gathered_once_a_pass() -> None:
    """It stays whole between its modules, in backward too, and is reduced once."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))
    reference = copy.deepcopy(model)
    fsdp2.fully_shard([model[1], model[2], model[3]])
    fsdp2.fully_shard(model)
    x = torch.randn(4, WIDTH)
    heard: list[Event] = []
    for _ in range(2):
        model.zero_grad()
        with listen(heard.append):
            model(x).square().mean().backward()
    reference(x).square().mean().backward()
    assert_same_gradients(model, reference, 2e-6)
    moves = [(e.kind, e.phase) for e in heard if e.fqn == "1" and e.nbytes]
    assert moves.count(("unshard", "forward")) == moves.count(("unshard", "backward")) == 2
    assert moves.count(("reduce", "backward")) == 2


@ranks(2)
def test_a_module_inside_another_of_the_list_is_no_unit_of_its_own() -> None:
    """The list is one unit: what lies inside a module of it belongs to that module."""
    model, reference = seeded(Stack), seeded(Stack)
    block = model.blocks[0]
    inner = [module for module in block.children() if list(module.parameters())]
    fsdp2.fully_shard([*inner, block])
    fsdp2.fully_shard(model)
    assert isinstance(block, fsdp2.FSDPModule)
    assert not any(isinstance(module, fsdp2.FSDPModule) for module in inner)
    x = torch.randn(4, WIDTH)
    for m in (model, reference):
        m(x).square().mean().backward()
    assert_same_gradients(model, reference, 2e-6)


@ranks(2)
def test_slicing_a_container_gives_the_plain_class() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 29), nn.Tanh(), nn.Linear(29, 7))
    fsdp2.fully_shard(model)
    assert isinstance(model, fsdp2.FSDPModule)
    part = model[:2]
    assert type(part) is nn.Sequential
    assert part[0] is model[0]
    assert len(part) == 2
    assert len(model) == 3


@ranks(2)
def test_the_state_is_in_the_composable_registry() -> None:
    model = Stack()
    fsdp2.fully_shard(model.blocks[0])
    assert unit_of(model.blocks[0]) is not None
    assert unit_of(model.blocks[1]) is None
    from torch.distributed._composable.contract import _get_registry

    registry = _get_registry(model.blocks[0])
    assert registry is not None
    assert "fully_shard" in registry
    assert not _get_registry(model.blocks[1])


# --- what is registered when ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "meant"), [(None, None), (True, True), (False, False), (1, False), (2, True)]
)
@ranks(2)
def test_what_is_registered_after_forward(choice: bool | int | None, meant: bool | None) -> None:
    """As in torch's own, 1 is False and the number of ranks is True."""
    pair = Pair("stack", reshard_after_forward=choice)
    for _ in range(2):
        assert_sharded(pair.model)
        losses = pair.losses()
        assert is_whole(pair.model.blocks[0]) is (meant is False)
        assert is_whole(pair.model.inp) is (meant is not True)
        losses.backward()
        assert_sharded(pair.model)
        pair.step()
        with torch.no_grad():
            pair.run(pair.model, pair.local(pair.batch()))
        assert is_whole(pair.model.blocks[0]) is (meant is False)
        assert is_whole(pair.model.inp) is (meant is False)
        reshard_all(pair.model)


@ranks(4)
def test_an_int_leaves_shards_of_the_smaller_mesh(rank: int) -> None:
    pair = Pair("stack", reshard_after_forward=2)
    full = names_of(pair.reference)["blocks.0.up.weight"]
    losses = pair.losses()
    registered = pair.model.blocks[0].up.weight
    assert registered.full_tensor().shape == (29, 13)
    assert torch.equal(registered.to_local(), full.chunk(2)[rank % 2])
    losses.backward()
    assert torch.equal(pair.model.blocks[0].up.weight.to_local(), full.chunk(4)[rank])
    pair.finish()


# --- unshard and reshard --------------------------------------------------------------------------


@pytest.mark.parametrize("async_op", [False, True])
@ranks(2)
def test_unshard_and_reshard_by_hand(async_op: bool) -> None:
    pair = Pair("stack")
    for _ in range(2):
        for block in pair.model.blocks:
            handle = block.unshard(async_op=async_op)
            if async_op:
                assert isinstance(handle, fsdp2.UnshardHandle)
                handle.wait()
                handle.wait()
            else:
                assert handle is None
            assert is_whole(block)
        for fqn in ("blocks.0.up.weight", "blocks.2.down.bias"):
            assert torch.equal(names_of(pair.model)[fqn], names_of(pair.reference)[fqn]), fqn
        assert not is_whole(pair.model.inp)
        for block in pair.model.blocks:
            block.reshard()
            block.reshard()
        assert_sharded(pair.model)
        pair.train(steps=1)


@ranks(2)
def test_an_unshard_that_nobody_waits_for() -> None:
    """The forward waits, or the reshard drops it."""
    pair = Pair("stack")
    pair.model.blocks[0].unshard(async_op=True)
    pair.model.blocks[1].unshard(async_op=True)
    pair.model.blocks[1].reshard()
    pair.train(steps=1)
    pair.model.unshard(async_op=True)
    pair.train(steps=1)


@pytest.mark.parametrize(("choice", "gives_up"), [(False, False), (2, False), (2, True)])
@ranks(4)
def test_reshard_between_forward_and_backward(choice: bool | int, gives_up: bool) -> None:
    """A user who keeps parameters after forward, or shards of a smaller mesh, may free them.

    He may also give the smaller mesh up: unsharded parameters lie where they lay, so what the graph
    saved stays valid.
    """
    pair = Pair("stack", reshard_after_forward=choice)
    for _ in range(2):
        losses = pair.losses()
        for block in pair.model.blocks:
            if gives_up:
                block.set_reshard_after_forward(True)
            else:
                block.reshard()
                assert block.up.weight.to_local().shape[0] < 9  # of 29 rows, a quarter
        if not gives_up:
            pair.model.reshard()
            assert_sharded(pair.model)
        losses.backward()
        pair.finish()


@ranks(2)
def test_weights_are_whole_inside_unshard() -> None:
    """A loss that reads `.weight` of a module outside of its forward."""
    pair = Pair("untied_lm")
    for _ in range(2):
        pair.model.head.unshard()
        for model, part in pair.each():
            weight = model.head.proj.weight
            assert not isinstance(weight, DTensor)
            norm = weight.detach().square().sum()
            (loss_of(model(*part.args)) * norm).backward()
        assert_same_gradients(pair.model, pair.reference, 3e-6)
        pair.zero_grad()


# --- settings at run time -------------------------------------------------------------------------


@ranks(2)
def test_set_reshard_after_forward() -> None:
    pair = Pair("stack")
    for choice in (False, True, False):
        pair.model.set_reshard_after_forward(choice)
        loss, expected = pair.losses(pair.batch())
        assert is_whole(pair.model.blocks[0]) is not choice
        assert is_whole(pair.model.inp) is not choice
        loss.backward()
        expected.backward()
        pair.step()
    pair.model.set_reshard_after_forward(True, recurse=False)
    pair.losses(pair.batch())[0].backward()
    loss, _ = pair.losses(pair.batch())
    assert is_whole(pair.model.blocks[0])
    assert not is_whole(pair.model.inp)


@ranks(2)
def test_set_reshard_after_backward() -> None:
    pair = Pair("stack")
    pair.model.set_reshard_after_backward(False)
    pair.backward()
    assert {group.state for unit in fsdp2.units(pair.model) for group in unit.groups} == {
        "unsharded"
    }
    assert_sharded(pair.model)  # an optimizer that is made here trains
    batch = pair.batch()
    with CommDebugMode() as comm:
        pair.run(pair.model, pair.local(batch))
    assert comm.get_total_counts() == 0, "whole parameters were gathered again"
    reshard_all(pair.model)
    pair.model.set_reshard_after_backward(True)
    pair.step()
    pair.train(steps=2)


@pytest.mark.parametrize("depth", with_slow([1, 2, 3], [2]))
@ranks(2)
def test_prefetch_lists(depth: int) -> None:
    pair = Pair(Case(stack(count=4), each_block, floats))
    blocks = list(pair.model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 1 + depth])
        block.set_modules_to_backward_prefetch(blocks[:index][::-1][:depth])
    pair.model.set_modules_to_forward_prefetch(blocks[:depth])
    pair.train(steps=3)


@ranks(2)
def test_prefetching_what_then_does_not_run() -> None:
    """A unit that was prefetched and not used is sharded again, and the step is right."""
    pair = Pair("unused_parts")
    blocks = list(pair.model.blocks)
    blocks[0].set_modules_to_forward_prefetch([blocks[2]])
    blocks[1].set_modules_to_backward_prefetch([blocks[2], blocks[0]])
    pair.train(steps=2)
    assert not is_whole(blocks[2])


@ranks(2)
def test_units_may_run_in_another_order_each_step() -> None:
    """The recorded order is a guess of what comes next, never a condition."""

    class Shuffled(Stack):
        order: tuple[int, ...] = (0, 1, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.inp(x)
            for index in self.order:
                x = self.blocks[index](x)
            return self.out(x)

    pair = Pair(Case(Shuffled, each_block, floats))
    for order in ((0, 1, 2), (2, 0, 1), (1,), (0, 0, 2), (2, 1, 0, 1), (0, 1, 2)):
        pair.model.order = pair.reference.order = order
        pair.backward()
        pair.step()
    pair.check()


# --- methods other than forward -------------------------------------------------------------------


class Methods(Stack):
    """A model with ways in other than its forward."""

    def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Return the hidden state."""
        return self.blocks[0](self.inp(x)) * scale

    def generate(self, x: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            x = torch.tanh(self.blocks[1](self.encode(x)))
        return self.out(x)


@ranks(2)
def test_registered_methods_gather_like_forward() -> None:
    pair = Pair(Case(Methods, each_block, floats))
    for name in ("encode", "generate"):
        fsdp2.register_fsdp_forward_method(pair.model, name)
    for _ in range(2):
        for model, part in pair.each():
            model.encode(*part.args, scale=2.0).square().mean().backward()
        assert_same_gradients(pair.model, pair.reference, 2e-6)
        pair.zero_grad()
        pair.train(steps=1)
        args = pair.local(pair.batch()).args
        with torch.no_grad():
            outputs = [m.generate(*args, steps=3) for m in (pair.model, pair.reference)]
        assert_same(*outputs, "generated", 2e-6)
        assert_sharded(pair.model)


@ranks(2)
def test_a_registered_method_of_a_block() -> None:
    class WithProject(Block):
        def project(self, x: Tensor) -> Tensor:
            return self.down(self.mid(self.up(x)))

    class Projecting(Stack):
        def __init__(self) -> None:
            super().__init__(WithProject)

        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0].project(self.inp(x))
            return self.out(self.blocks[2](self.blocks[1].project(x)))

    pair = Pair(Case(Projecting, each_block, floats))
    for block in pair.model.blocks:
        fsdp2.register_fsdp_forward_method(block, "project")
    pair.train(steps=2)


@ranks(2)
def test_registering_on_a_plain_module_does_nothing() -> None:
    model = seeded(Methods)
    before = dict(vars(model))
    fsdp2.register_fsdp_forward_method(model, "encode")
    assert dict(vars(model)) == before


# --- groups of several modules --------------------------------------------------------------------


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@ranks(2)
def test_several_modules_in_one_group(reshard_after_forward: bool) -> None:
    Pair("one_group", reshard_after_forward=reshard_after_forward).train()


class HeadApart(nn.Module):
    """Its forward ends in the norm; what calls it uses the head."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 29)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.block(x))


def norm_with_head(model: nn.Module) -> list[Any]:
    return [model.block, [model.norm, model.head]]


@ranks(2)
def test_norm_and_head_as_one_group_with_a_loss_in_chunks() -> None:
    """The main forward runs the norm; the head runs later, chunk by chunk."""

    pair = Pair(Case(HeadApart, norm_with_head, floats))
    for _ in range(2):
        for model, part in pair.each():
            hidden = model(*part.args)
            for chunk in hidden.chunk(2):
                (model.head(chunk).square().mean() / 2).backward(retain_graph=True)
        assert_same_gradients(pair.model, pair.reference, 3e-6)
        advance(pair.optimizer, pair.reference_optimizer)
    assert_same_parameters(pair.model, pair.reference, 3e-6)


class _Product(torch.autograd.Function):
    """Saves a weight itself, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight[:], grads[0].t() @ x  # a view of the weight: it must be whole


@pytest.mark.parametrize("sync_each", [True, False])
@ranks(2)
def test_a_group_that_ran_in_part_stays_whole_if_it_is_told_to(sync_each: bool) -> None:
    """With `reshard_after_forward=False` a loss may use a head's weight without calling the head.

    Its backward comes before that of the norm, which would gather the group again.
    """

    class Fused(HeadApart):
        def __init__(self) -> None:
            super().__init__()
            self.head.bias = None

        def forward(self, x: Tensor) -> Tensor:
            return _Product.apply(super().forward(x), self.head.weight)  # type: ignore[no-any-return]  # of torch

    pair = Pair(Case(Fused, norm_with_head, floats), reshard_after_forward=False)
    for _ in range(3):
        for last in (False, True):
            pair.model.set_requires_gradient_sync(last or sync_each)
            pair.backward()
        pair.step()
        batch = pair.batch()
        with torch.no_grad():  # the group stays whole here too, and sees the next step's values
            assert_same(pair.model(*batch.args), pair.reference(*batch.args), "output", 3e-6)
    pair.check()
    assert_sharded(pair.model)


@pytest.mark.parametrize("by_call", [True, False])
@ranks(2)
def test_evaluations_gather_once_if_that_was_asked_for(by_call: bool) -> None:
    """The setter is what torch names for evaluations; the argument is for backward alone."""
    pair = Pair("stack", reshard_after_forward=False)
    if by_call:
        pair.model.set_reshard_after_forward(False)
    count = len(fsdp2.units(pair.model))

    def evaluate() -> int:
        batch = pair.batch()
        with CommDebugMode() as comm, torch.no_grad():
            assert_same(pair.model(*batch.args), pair.reference(*batch.args), "output", 3e-6)
        return comm.get_total_counts()

    evaluate()
    assert [evaluate(), evaluate()] == [0 if by_call else count] * 2
    params = [*pair.model.parameters(), *pair.reference.parameters()]
    with torch.no_grad():
        for param in params:
            param.mul_(0.5)  # counts a version
    assert [evaluate(), evaluate()] == [count, 0 if by_call else count]
    for param in params:
        local = param.to_local() if isinstance(param, DTensor) else param
        local.data.mul_(0.5)  # counts none: a forward that trains gathers again
    pair.train(steps=2)
    assert [evaluate(), evaluate()] == [count, 0 if by_call else count]
    pair.model.set_reshard_after_forward(True)
    evaluate()
    assert evaluate() == count


@ranks(2)
def test_ignored_parameters_are_left_to_the_user() -> None:
    model, reference = seeded(Stack), seeded(Stack)
    ignored = {model.inp.weight, model.blocks[1].up.weight}
    shard(model, CASES["stack"], ignored_params=ignored)
    assert {model.inp.weight, model.blocks[1].up.weight} == ignored
    x = torch.randn(6, WIDTH)  # the same on both ranks: local gradients are the mean already
    for one in (model, reference):
        loss_of(one(x)).backward()
    for fqn, parameter in names_of(model).items():
        assert isinstance(parameter, DTensor) is (parameter not in ignored), fqn
    assert_same_gradients(model, reference)


@ranks(2)
def test_hsdp_units_in_a_tree_of_several_meshes() -> None:
    """Blocks may have meshes of their own; the root shards over all ranks."""
    mesh, single = make_mesh(), make_mesh(2, 1)
    pair_reference, model = seeded(Stack), seeded(Stack)
    fsdp2.fully_shard(model.blocks[0], mesh=mesh)
    fsdp2.fully_shard(model.blocks[1], mesh=single)
    fsdp2.fully_shard(model, mesh=mesh)
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=0.1, foreach=False) for m in (model, pair_reference)
    ]
    x = torch.randn(6, WIDTH)
    for _ in range(2):
        for m in (model, pair_reference):
            loss_of(m(x)).backward()
        assert_same_gradients(model, pair_reference)
        advance(*optimizers)


@ranks(2)
def test_calling_a_unit_on_its_own_after_the_root_ran() -> None:
    """Once the root is known, one of its blocks may run alone."""
    pair = Pair("stack")
    pair.train(steps=1)
    x = torch.randn(4, WIDTH)
    for model in (pair.model, pair.reference):
        model.blocks[1](x).square().mean().backward()
    assert pair.model.inp.weight.grad is None
    assert_same_gradients(pair.model, pair.reference)
    assert_sharded(pair.model)
    pair.zero_grad()
    pair.train(steps=1)


@ranks(2)
def test_a_divide_factor_may_change_between_steps() -> None:
    """Gradients are the sum divided by what is set now, whatever earlier steps divided by."""
    pair = Pair("stack")
    for factor in (2.0, 1.0, 4.0):
        for unit in units_of(pair.model):
            unit.set_gradient_divide_factor(factor)
        pair.backward()
        for parameter in pair.reference.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(dist.get_world_size() / factor)
        pair.step()
    pair.check()


@pytest.mark.parametrize("flat", [False, True])
@ranks(2)
def test_units_that_stay_whole_see_every_step(flat: bool) -> None:
    """Whole parameters that outlive a step are gathered again after each one, fused steps too."""
    pair = Pair("stack", reshard_after_forward=False)
    pair.model.set_reshard_after_backward(False)
    if flat:
        pair.optimizer = fsdp2.optim.local(
            torch.optim.AdamW, list(pair.model.parameters()), lr=0.1, eps=1e-4, fused=True
        )
        pair.reference_optimizer = torch.optim.AdamW(
            pair.reference.parameters(), lr=0.1, eps=1e-4, fused=True
        )
        pair.later_rtol = 1e-4
    pair.first_rtol = pair.later_rtol
    for _ in range(4):
        pair.backward()  # compares the losses
        advance(pair.optimizer, pair.reference_optimizer)

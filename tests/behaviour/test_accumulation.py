"""Promise: gradients accumulate as in an unsharded model, however reductions are put off."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import fsdp2
from fsdp2 import MixedPrecisionPolicy
from fsdp2._core.params.reduce import Reduction
from tests.kit.in_turn import shard_each
from tests.kit.models import CASES, WIDTH, Case, floats, loss_of, seeded
from tests.kit.parity import (
    Pair,
    assert_same,
    assert_same_gradients,
    global_mean,
    make_mesh,
    names_of,
    shard,
    whole,
)
from tests.kit.pool import ranks
from tests.kit.slow import with_slow

REDUCTIONS = ("reduce_scatter", "all_reduce", "alltoall")


def reduces_in_backward(pair: Pair, names: tuple[str, ...] = REDUCTIONS) -> bool:
    """Run forward and backward of both models; say if operations of such names were in ours."""
    losses = pair.losses()
    with CommDebugMode() as comm:
        losses.backward()
    counts = comm.get_comm_counts().items()
    return any(count and name in str(op) for op, count in counts for name in names)


@pytest.mark.parametrize(
    "name",
    with_slow(["stack", "partly_frozen", "tied_lm", "aux_output"], ["tied_lm"]),
)
@ranks(2)
def test_accumulation_with_every_reduction(name: str) -> None:
    pair = Pair(name)
    for _ in range(2):
        for _ in range(3):
            pair.backward(scale=1 / 3)
        pair.step()
    pair.check()


@pytest.mark.parametrize(
    ("name", "reshard_after_forward"),
    with_slow(
        itertools.product(["stack", "scalars", "shared_block"], [None, True, False]),
        [("stack", True), ("scalars", None), ("shared_block", False)],
    ),
)
@ranks(2)
def test_accumulation_with_one_reduction(name: str, reshard_after_forward: bool | None) -> None:
    pair = Pair(name, reshard_after_forward=reshard_after_forward)
    accumulate_and_look(pair, "set_requires_gradient_sync", REDUCTIONS)


def accumulate_and_look(pair: Pair, setting: str, names: tuple[str, ...]) -> None:
    """Expect operations with such names in the last of three backwards, and in no other one."""
    for _ in range(2):
        for is_last in (False, False, True):
            getattr(pair.model, setting)(is_last)
            assert reduces_in_backward(pair, names) is is_last
            assert all(p.grad is None for p in pair.model.parameters()) is not is_last
        pair.step()
    pair.check()


@ranks(2)
def test_accumulation_may_reduce_first_and_then_not() -> None:
    """Any order of synced and unsynced backwards adds up at the last synced one."""
    pair = Pair("stack")
    for sync in (True, False, False, True):
        pair.model.set_requires_gradient_sync(sync)
        pair.backward()
    pair.step()
    pair.train(steps=1)


@ranks(2)
def test_one_unit_may_accumulate_alone() -> None:
    pair = Pair("stack")
    unit = pair.model.blocks[1]
    unit.set_requires_gradient_sync(False, recurse=False)
    pair.backward()
    assert pair.model.blocks[0].up.weight.grad is not None
    assert pair.model.blocks[1].up.weight.grad is None
    unit.set_requires_gradient_sync(True)
    pair.backward()
    pair.finish()


@ranks(2)
def test_parameters_may_stay_unsharded_while_accumulating() -> None:
    pair = Pair("stack", reshard_after_forward=False)
    pair.model.set_reshard_after_backward(False)
    pair.model.set_requires_gradient_sync(False)
    pair.backward()
    batch = pair.batch()
    with CommDebugMode() as comm:
        pair.run(pair.model, pair.local(batch)).backward()
    assert comm.get_total_counts() == 0
    pair.run_reference(batch).backward()
    pair.model.set_reshard_after_backward(True)
    pair.model.set_requires_gradient_sync(True)
    pair.backward()
    pair.finish()


@pytest.mark.parametrize("name", with_slow(["stack", "partly_frozen"], ["partly_frozen"]))
@ranks(4)
def test_the_replicate_axis_may_be_reduced_last(name: str) -> None:
    pair = Pair(name, mesh=make_mesh(2, 2))
    accumulate_and_look(pair, "set_requires_all_reduce", ("allreduce", "all_reduce"))


@ranks(4)
def test_partial_sums_that_the_host_looks_at_late() -> None:
    """As on a device where a gradient misses: nothing is there to be set before the replicas."""
    pair = Pair("stack", mesh=make_mesh(2, 2))
    begin = Reduction.__init__

    def look_late(reduction: Reduction, *args: Any) -> None:
        begin(reduction, *args)
        reduction._waits_for_copy = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reduction, "__init__", look_late)
        pair.accumulate(2, "set_requires_all_reduce")
        pair.step()
    pair.check()


@ranks(4)
def test_a_replicate_axis_accumulates_without_any_reduction() -> None:
    pair = Pair("stack", mesh=make_mesh(2, 2))
    pair.accumulate(3)
    pair.finish()


@pytest.mark.parametrize("sync_each", with_slow([True, False], [False]))
@ranks(2)
def test_accumulation_happens_in_the_reduce_dtype(sync_each: bool) -> None:
    """bf16 gradients add up in fp32: the sum is exact where one in bf16 is not."""
    case = CASES["stack"]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(seeded(case.build), case, mp_policy=policy)
    low = seeded(case.build).bfloat16()
    exact: dict[str, Tensor] = {}
    count = 16
    for micro in range(count):
        model.set_requires_gradient_sync(sync_each or micro == count - 1)
        batch = case.batch(4).chunk(dist.get_rank(), 2)
        loss_of(model(*batch.args)).backward()
        loss_of(low(batch.args[0].bfloat16())).backward()
        for name, parameter in low.named_parameters():
            exact[name] = exact.get(name, torch.zeros(())) + parameter.grad.float()
            parameter.grad = None
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype is torch.float32
        assert_same(parameter.grad, global_mean(exact[name]), name, 2e-6)


@ranks(2)
def test_is_last_backward_puts_off_what_ends_a_step() -> None:
    """Several backwards of one step, of which only the last is declared the last."""
    pair = Pair("stack")
    for _ in range(2):
        for last in (False, False, True):
            pair.model.set_is_last_backward(last)
            pair.model.set_requires_gradient_sync(last)
            pair.backward()
        pair.step()
    pair.check()


@pytest.mark.parametrize(
    ("name", "reshard_after_forward"),
    with_slow(
        itertools.product(
            ["stack", "tied_lm", "nested_units", "partly_frozen", "containers"], [True, False]
        ),
        [
            ("tied_lm", False),
            ("nested_units", True),
            ("partly_frozen", True),
            ("containers", False),
        ],
    ),
)
@ranks(2)
def test_several_forwards_before_one_backward(name: str, reshard_after_forward: bool) -> None:
    Pair(name, reshard_after_forward=reshard_after_forward).train_on_sums()


@pytest.mark.parametrize(
    ("reshard_after_forward", "order"),
    with_slow(
        itertools.product([True, False], [(0, 1, 2), (2, 1, 0), (1, 0, 2)]),
        [(True, (0, 1, 2)), (True, (2, 1, 0)), (False, (1, 0, 2))],
    ),
)
@ranks(2)
def test_several_forwards_then_backwards_in_any_order(
    order: tuple[int, ...], reshard_after_forward: bool
) -> None:
    pair = Pair("stack", reshard_after_forward=reshard_after_forward)
    losses = [pair.losses() for _ in order]
    for index in order:
        losses[index].backward()
        assert_same_gradients(pair.model, pair.reference)
    pair.step()
    pair.train(steps=1)


@pytest.mark.parametrize(
    ("name", "reshard_after_forward"),
    with_slow(
        itertools.product(["stack", "nested_units", "tied_blocks"], [True, False]),
        [("stack", False), ("nested_units", True), ("tied_blocks", True)],
    ),
)
@ranks(2)
def test_several_backwards_after_one_forward(name: str, reshard_after_forward: bool) -> None:
    pair = Pair(name, reshard_after_forward=reshard_after_forward)
    losses = pair.losses()
    for retain in (True, True, False):
        losses.backward(retain_graph=retain)
        assert_same_gradients(pair.model, pair.reference)
    pair.step()
    pair.train(steps=1)


@ranks(2)
def test_two_losses_of_one_forward() -> None:
    pair = Pair("aux_output")
    for _ in range(2):
        for model, part in pair.each():
            main, aux = model(*part.args)
            aux.mean().backward(retain_graph=True)
            main.square().mean().backward()
        assert_same_gradients(pair.model, pair.reference, 3e-6)
        pair.zero_grad()


@ranks(2)
def test_gradients_set_to_zero_are_added_to() -> None:
    pair = Pair("stack")
    for _ in range(3):
        pair.backward()
        assert_same_gradients(pair.model, pair.reference)
        for optimizer in (pair.optimizer, pair.reference_optimizer):
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    pair.check()


@ranks(2)
def test_a_gradient_that_the_user_keeps_is_not_overwritten() -> None:
    pair = Pair("stack")
    pair.backward()
    kept = {name: p.grad for name, p in names_of(pair.model).items()}
    values = {name: whole(g).clone() for name, g in kept.items()}
    pair.step()
    for _ in range(2):
        pair.backward()
        for name, parameter in names_of(pair.model).items():
            assert parameter.grad is not kept[name], name
            assert torch.equal(whole(kept[name]), values[name]), name
        pair.step()


@ranks(2)
def test_a_gradient_that_the_user_assigns_is_added_to() -> None:
    pair = Pair("stack")
    pair.backward()
    for model, kind in ((pair.model, DTensor), (pair.reference, Tensor)):
        for parameter in model.parameters():
            assert isinstance(parameter.grad, kind)
            parameter.grad = parameter.grad * 3
    pair.backward()
    pair.finish()


class EitherOrBoth(nn.Module):
    """Two units, of which a forward runs those that are chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.chosen = [0, 1]

    def forward(self, x: Tensor) -> Tensor:
        for index in self.chosen:
            x = x + torch.tanh(self.parts[index](x))
        return x


@ranks(2)
def test_a_unit_may_be_frozen_before_an_accumulation_that_leaves_it_out() -> None:
    """A forward that nobody differentiates makes it owe gradients; it was frozen before."""
    model, reference = seeded(EitherOrBoth), seeded(EitherOrBoth)
    shard_each(*model.parts, model, mesh=make_mesh())
    x = torch.randn(4, WIDTH)
    for one in (model, reference):
        one(x)
        one.parts[0].weight.requires_grad_(False)
        one.chosen = [1]
    for sync in (False, True):
        model.set_requires_gradient_sync(sync)
        for one in (model, reference):
            one(x).square().sum().backward()
            one.chosen = [0, 1]
    assert model.parts[0].weight.grad is None
    assert_same_gradients(model, reference)


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True, weight_decay=0.1)


@ranks(2)
def test_accumulation_under_an_optimizer_with_state() -> None:
    pair = Pair("stack", optimizer=momentum)
    for _ in range(3):
        pair.accumulate(2, scale=0.5)
        pair.step()
    pair.check()


@ranks(2)
def test_gradients_without_sync_survive_a_replaced_parameter() -> None:
    """A new plan keeps the first microbatch's gradients, but those of the replaced one."""
    pair = Pair("stack")
    batch = pair.batch()
    pair.model.set_requires_gradient_sync(False)
    pair.backward(batch)
    with torch.no_grad():
        old = pair.model.inp.weight
        pair.model.inp.weight = nn.Parameter(old.full_tensor().clone())  # type: ignore[attr-defined]
        pair.reference.inp.weight = nn.Parameter(pair.reference.inp.weight.clone())
    pair.model.set_requires_gradient_sync(True)
    pair.backward(batch)
    assert_same_gradients(pair.model, pair.reference, 4e-6)


@ranks(2)
def test_freezing_with_gradients_without_sync_is_refused() -> None:
    pair = Pair("stack")
    batch = pair.batch()
    pair.model.set_requires_gradient_sync(False)
    pair.backward(batch)
    pair.model.inp.weight.requires_grad_(False)
    with pytest.raises(fsdp2.StateError, match=r"inp\.weight.*gradient sync"):
        pair.run(pair.model, pair.local(batch))


@ranks(2)
def test_leaving_no_sync_puts_back_what_was_set() -> None:
    """Inside a context, or where sync was off before, leaving another context does not reduce."""
    pair = Pair("stack")
    pair.model.set_requires_gradient_sync(False)
    with fsdp2.no_sync(pair.model):
        pair.backward()
    assert not reduces_in_backward(pair)
    pair.model.set_requires_gradient_sync(True)
    with fsdp2.no_sync(pair.model):
        with fsdp2.no_sync(pair.model):
            pair.backward()
        assert not reduces_in_backward(pair)
    assert reduces_in_backward(pair)
    pair.finish()


def clear_what_waits(pair: Pair, setting: str) -> None:
    """Clear gradients after a backward without a reduction; the next one has its own alone."""
    getattr(pair.model, setting)(False)
    pair.backward()
    for model in (pair.model, pair.reference):
        model.zero_grad()
    pair.model.set_reshard_after_backward(True)
    getattr(pair.model, setting)(True)
    pair.backward()
    pair.finish()


@pytest.mark.parametrize("reshards", [True, False])
@ranks(2)
def test_zero_grad_of_the_model_clears_what_waits_for_sync(reshards: bool) -> None:
    """Torch's own keeps it while units are sharded, and adds it to the next gradients."""
    pair = Pair("stack")
    pair.model.set_reshard_after_backward(reshards)
    clear_what_waits(pair, "set_requires_gradient_sync")


@ranks(4)
def test_clearing_gradients_clears_those_that_wait_for_the_replicate_axis() -> None:
    clear_what_waits(Pair("stack", mesh=make_mesh(2, 2)), "set_requires_all_reduce")


@ranks(4)
def test_what_waits_for_the_replicate_axis_is_reduced_by_a_backward_without_it() -> None:
    """The last backward all-reduces units too that only the earlier ones used."""
    pair = Pair(
        Case(EitherOrBoth, lambda model: list(model.parts), floats),
        mesh=make_mesh(2, 2),
    )
    pair.model.set_requires_all_reduce(False)
    pair.backward()
    pair.model.set_requires_all_reduce(True)
    pair.model.chosen = pair.reference.chosen = [0]  # type: ignore[assignment]
    pair.backward()
    pair.finish()

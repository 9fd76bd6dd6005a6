"""Promise: autograd works as on a plain module: modes, unused and frozen parts, views, hooks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

import fsdp2
from tests.kit.models import WIDTH, Block, Case, Stack, each_block, floats, stack
from tests.kit.parity import (
    Pair,
    assert_same,
    assert_same_gradients,
    assert_sharded,
    global_mean,
    make_mesh,
    names_of,
    whole,
)
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

MODES: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


def evaluate(pair: Pair, mode: str) -> None:
    batch = pair.batch()
    pair.model.eval()
    with MODES[mode]():
        actual = pair.model(*pair.local(batch).args)
    pair.model.train()
    with torch.no_grad():
        assert_same(actual.clone(), pair.reference(*pair.local(batch).args), "output", 2e-6)


@pytest.mark.parametrize(
    ("mode", "reshard_after_forward"),
    with_slow(
        itertools.product(MODES, [None, True, False]),
        [("no_grad", None), ("no_grad", False), ("inference", True)],
    ),
)
@ranks(2)
def test_evaluation_between_training_steps(mode: str, reshard_after_forward: bool | None) -> None:
    pair = Pair("stack", reshard_after_forward=reshard_after_forward)
    for _ in range(2):
        evaluate(pair, mode)
        evaluate(pair, mode)
        pair.backward()
        pair.step()
    evaluate(pair, mode)
    if reshard_after_forward is not False:
        pair.check()


@pytest.mark.parametrize("mode", MODES)
@ranks(2)
def test_evaluation_between_forward_and_backward(mode: str) -> None:
    pair = Pair("stack")
    for _ in range(2):
        losses = pair.losses()
        evaluate(pair, mode)
        losses.backward()
        pair.step()
    pair.check()


@ranks(2)
def test_no_grad_around_one_block_only() -> None:
    class Half(Stack):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.blocks[0](self.inp(x))
            return self.out(self.blocks[2](self.blocks[1](x)))

    pair = Pair(Case(Half, each_block, floats))
    for _ in range(2):
        pair.backward()
        assert pair.model.blocks[0].up.weight.grad is None
        pair.step()
    pair.check()


@ranks(2)
def test_unused_modules_and_parameters_have_no_gradient() -> None:
    pair = Pair("unused_parts")
    for _ in range(2):
        pair.backward()
        names = {n for n, p in names_of(pair.model).items() if p.grad is None}
        expected = {n for n in names_of(pair.model) if n.startswith("blocks.2.")}
        assert names == expected | {"unused", "blocks.1.spare.weight", "blocks.1.spare.bias"}
        pair.step()
    pair.check()


class TwoHeads(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.blocks[0](self.inp(x))
        return self.out(self.blocks[1](hidden)), self.blocks[2](hidden)


@pytest.mark.parametrize("used", [0, 1])
@ranks(2)
def test_unused_outputs(used: int) -> None:
    """A unit whose output has no part in the loss has no gradient, and reshards all the same."""
    pair = Pair(Case(TwoHeads, each_block, floats))
    for _ in range(2):
        for model, part in pair.each():
            model(*part.args)[used].square().mean().backward()
        missing = "blocks.2" if used == 0 else "blocks.1"
        assert pair.model.get_submodule(missing).up.weight.grad is None
        assert_sharded(pair.model)
        assert_same_gradients(pair.model, pair.reference, 2e-6)
        pair.zero_grad()
    pair.model(*pair.local(pair.batch()).args)


@ranks(2)
def test_freezing_and_unfreezing_between_steps() -> None:
    pair = Pair("stack")

    def freeze(frozen: Callable[[str], bool]) -> None:
        for model in (pair.model, pair.reference):
            for name, parameter in names_of(model).items():
                parameter.requires_grad_(not frozen(name))

    for frozen in (
        lambda name: False,
        lambda name: name.startswith("blocks.1"),
        lambda name: "up" in name,
        lambda name: name.startswith(("inp", "blocks.0", "blocks.1")),
        lambda name: not name.endswith("out.weight"),
        lambda name: False,
    ):
        freeze(frozen)
        pair.backward()
        assert {n for n, p in names_of(pair.model).items() if p.grad is None} == {
            n for n in names_of(pair.model) if frozen(n)
        }
        pair.step()
    pair.check()


@ranks(2)
def test_the_gradient_of_an_input() -> None:
    pair = Pair("stack")
    x = torch.randn(6, WIDTH, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    pair.model(x).square().sum().backward()
    pair.reference(y).square().sum().backward()
    assert_same(x.grad, y.grad, "input gradient")


@ranks(2)
def test_all_frozen_with_a_trainable_input() -> None:
    """A prompt is trained through a frozen model."""
    pair = Pair("stack", prepare=lambda m: m.blocks.requires_grad_(False) and None)
    pair.model.requires_grad_(False)
    x = torch.randn(4, WIDTH, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    for _ in range(2):
        pair.model(x).square().sum().backward()
        pair.reference(y).square().sum().backward()
    assert_same(x.grad, y.grad, "prompt gradient")
    assert all(p.grad is None for p in pair.model.parameters())
    assert_sharded(pair.model)


@ranks(2)
def test_autograd_grad_of_an_input_leaves_parameters_alone() -> None:
    pair = Pair("stack")
    x = torch.randn(4, WIDTH, requires_grad=True)
    (actual,) = torch.autograd.grad(pair.model(x).square().sum(), x)
    (expected,) = torch.autograd.grad(pair.reference(x).square().sum(), x)
    assert_same(actual, expected, "input gradient")
    pair.optimizer.zero_grad()
    pair.train(steps=2)


class ViewBlock(Block):
    """Returns a view of its own result."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(x.shape)


class TupleOfViews(Block):
    """Returns parts of one tensor, as an attention projection that is split does."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]  # another output
        return super().forward(x).split((5, 8), dim=-1)


class ReturnsItsInput(Block):
    """Updates its input in place and returns a view of it."""

    def forward(self, x: Tensor) -> Tensor:
        x += super().forward(x.clone())
        return x.view_as(x)


VIEWS: dict[str, tuple[type[Block], Callable[[Any], Tensor], Callable[[Any], Tensor]]] = {
    "of a result": (ViewBlock, lambda x: x, lambda x: x.add_(1).mul_(0.5)),
    "of an input": (ReturnsItsInput, lambda x: x.view(-1, WIDTH), lambda x: x.mul_(0.5)),
    "parts": (TupleOfViews, lambda x: x, lambda x: torch.cat([x[0] * 2, x[1].sin()], dim=-1)),
}
"""By what is returned, what is done with the input of each unit, and with its output."""


class Updating(Stack):
    """Updates in place what its units return, and what they are given."""

    def __init__(self, of: str) -> None:
        block, self.before, self.after = VIEWS[of]
        super().__init__(block)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = self.after(block(self.before(x)))
        return self.out(x)


@pytest.mark.parametrize(
    ("reshard_after_forward", "views"),
    with_slow(
        itertools.product([True, False], VIEWS),
        [(True, "of a result"), (True, "of an input"), (False, "parts")],
    ),
)
@ranks(2)
def test_views_in_and_out_of_units_may_be_updated_in_place(
    views: str, reshard_after_forward: bool
) -> None:
    case = Case(lambda: Updating(views), each_block, floats)
    Pair(case, reshard_after_forward=reshard_after_forward).train(steps=2)


@ranks(2)
def test_the_roots_output_may_be_updated_in_place() -> None:
    class View(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).unflatten(-1, (7, 1))

    pair = Pair(Case(View, each_block, floats))
    for model, part in pair.each():
        output = model(*part.args)
        output.mul_(2)
        output[:, 0] = 0
        output.square().mean().backward()
    assert_same_gradients(pair.model, pair.reference, 2e-6)


@ranks(2)
def test_views_of_parameters_may_be_returned() -> None:
    """A unit that returns its weight, which its caller multiplies with after the unit has ended."""

    class GivesWeight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

        def forward(self) -> Tensor:
            return self.weight.t()

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([GivesWeight(), GivesWeight()])

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = torch.tanh(x @ block())
            return x

    Pair(Case(Uses, each_block, floats), reshard_after_forward=False).train(steps=2)


@ranks(2)
def test_hooks_on_modules_see_whole_parameters_and_fire_once() -> None:
    pair = Pair("stack")
    events: list[str] = []
    block = pair.model.blocks[1]

    def pre(module: nn.Module, args: Any) -> None:
        weight = module.up.weight
        events.append(f"pre {tuple(weight.shape)} {isinstance(weight, DTensor)}")

    block.register_forward_pre_hook(pre)
    block.up.register_forward_hook(lambda m, args, out: events.append("up"))
    block.register_forward_hook(lambda m, args, out: events.append("post"))
    block.register_full_backward_hook(lambda m, gin, gout: events.append("backward"))
    block.register_full_backward_pre_hook(lambda m, gout: events.append("pre backward"))
    for count in (1, 2):
        pair.backward()
        expected = ["pre (29, 13) False", "up", "post", "pre backward", "backward"]
        assert events == expected * count
        pair.finish()


@ranks(2)
def test_autograd_does_not_find_shards_by_name() -> None:
    """docs/differences.md says so. torch's own does the same, and a step after it is right."""
    pair = Pair("stack")
    params = list(pair.model.parameters())
    (x,) = pair.local(pair.batch()).args
    found = torch.autograd.grad(pair.model(x).sum(), params, allow_unused=True)
    assert found == (None,) * len(params)
    with pytest.raises(RuntimeError, match="allow_unused"):
        torch.autograd.grad(pair.model(x).sum(), params)
    pair.model(x).sum().backward(inputs=params)
    assert all(param.grad is None for param in params)
    pair.train(steps=2)


@ranks(2)
def test_forward_hooks_may_change_inputs_and_outputs() -> None:
    pair = Pair("stack")
    for model in (pair.model, pair.reference):
        block = model.blocks[1]
        block.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
        block.register_forward_hook(lambda m, args, out: out.sin() + 1)
    pair.train(steps=2)


@ranks(2)
def test_hooks_on_tensors() -> None:
    pair = Pair("stack")
    counts: list[int] = []

    def double(model: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: counts.append(1) or gradient * 2)

    for model in (pair.model, pair.reference):
        model.blocks[1].register_forward_hook(double)
    pair.backward()
    assert len(counts) == 1 + 2  # one sharded forward, two parts of the reference
    pair.step()


@ranks(2)
def test_post_accumulate_hooks_on_sharded_parameters_fire_once_a_backward() -> None:
    pair = Pair("tied_within", reshard_after_forward=True)
    fired: dict[str, list[Tensor]] = {}
    for name, parameter in pair.model.named_parameters():

        def note(parameter: Tensor, name: str = name) -> None:
            assert isinstance(parameter, DTensor)
            assert isinstance(parameter.grad, DTensor)
            fired.setdefault(name, []).append(whole(parameter.grad).clone())

        parameter.register_post_accumulate_grad_hook(note)
    for count in (1, 2):
        pair.backward()
        expected = dict(pair.reference.named_parameters())
        assert set(fired) == set(expected)
        for name, seen in fired.items():
            assert len(seen) == count, name
            assert_same(seen[-1], expected[name].grad, name)
        pair.step()


@ranks(2)
def test_post_accumulate_hooks_wait_for_the_reduction() -> None:
    pair = Pair("stack")
    fired: list[int] = []
    pair.model.inp.weight.register_post_accumulate_grad_hook(lambda p: fired.append(1))
    pair.model.set_requires_gradient_sync(False)
    pair.backward()
    assert fired == []
    pair.model.set_requires_gradient_sync(True)
    pair.backward()
    assert fired == [1]
    pair.step()


@ranks(2)
def test_functional_call_with_the_models_own_parameters() -> None:
    pair = Pair("stack")
    for _ in range(2):
        for model, part in pair.each():
            own = dict(model.named_parameters())
            torch.func.functional_call(model, own, part.args).square().mean().backward()
        assert_same_gradients(pair.model, pair.reference, 2e-6)
        pair.zero_grad()
    pair.train(steps=1)


@ranks(slow(2), 3)
def test_functional_call_with_modified_parameters() -> None:
    check_functional_call_with_modified_parameters()


@pytest.mark.parametrize("shape", [(2, 2), slow((4, 1))])
@ranks(4)
def test_functional_call_on_a_replicate_axis(shape: tuple[int, int]) -> None:
    """The gradient of a shard that stands in is a mean over the replicas too."""
    check_functional_call_with_modified_parameters(mesh=make_mesh(*shape))


def check_functional_call_with_modified_parameters(**kwargs: Any) -> None:
    pair = Pair("stack", **kwargs)
    losses = []
    for model, part in pair.each():
        scaled = {name: parameter * 0.5 for name, parameter in model.named_parameters()}
        losses.append(torch.func.functional_call(model, scaled, part.args).square().mean())
        losses[-1].backward()
    assert_same(global_mean(losses[0]), losses[1], "loss", 2e-6)
    assert_same_gradients(pair.model, pair.reference, 2e-6)
    assert_sharded(pair.model)


@ranks(2)
def test_double_backward_is_right_or_refused() -> None:
    """A gradient penalty on the input; refused, it must leave the model able to train."""
    pair = Pair("stack")
    batch = pair.batch()

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        return gradient.square().sum() / 4

    try:
        penalty(pair.model, pair.local(batch).args[0]).backward()
    except fsdp2.UnsupportedError:
        pair.optimizer.zero_grad()
    else:
        parts = [penalty(pair.reference, batch.chunk(i, 2).args[0]) for i in range(2)]
        (sum(parts) / 2).backward()
        assert_same_gradients(pair.model, pair.reference, 5e-6)
        pair.zero_grad()
    pair.train(steps=2)


@ranks(4)
def test_frozen_and_unused_parts_on_a_replicate_axis() -> None:
    for name in ("partly_frozen", "unused_parts"):
        Pair(name, mesh=make_mesh(2, 2)).train(steps=2)


@ranks(2)
def test_a_backward_that_does_not_reach_the_root() -> None:
    """The loss is taken from a block's output, caught by a hook; the root's own head is unused."""
    pair = Pair("stack")
    for _ in range(2):
        caught: list[Tensor] = []
        handles = [
            m.blocks[1].register_forward_hook(lambda m, args, out, to=caught: to.append(out))
            for m in (pair.model, pair.reference)
        ]
        for model, part in pair.each():
            model(*part.args)
            caught.pop().square().mean().backward()
        assert pair.model.out.weight.grad is None
        assert pair.model.blocks[2].up.weight.grad is None
        assert_same_gradients(pair.model, pair.reference, 2e-6)
        assert_sharded(pair.model)
        pair.zero_grad()
        for handle in handles:
            handle.remove()
    pair.train(steps=1)


@ranks(2)
def test_a_unit_without_parameters_of_its_own() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()
            self.dropout = nn.Dropout(0.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.dropout(self.inner(x))

    def units(model: nn.Module) -> list[nn.Module]:
        return [m for b in model.blocks for m in (b.inner, b.dropout, b)]

    Pair(Case(stack(Wrapper, 2), units, floats)).train(steps=2)

"""Promise: checkpointing that no compiler traced may lie anywhere in a compiled model.

Modules then run again in backward, when the functional step is over: units, parts of them, and
modules whose parameters another unit gathers. `disable=True` runs what graph breaks leave.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from tests.behaviour.test_recovery import ProvokedError, failing
from tests.kit.models import (
    HIDDEN,
    WIDTH,
    Batch,
    Block,
    Case,
    Scalars,
    Stack,
    floats,
    loss_of,
    seeded,
)
from tests.kit.parity import Pair, assert_same_gradients, assert_sharded, make_mesh
from tests.kit.pool import ranks
from tests.kit.products import products
from tests.kit.slow import slow, with_slow
from tests.kit.tensor_parallel import FeedForward, Twin, colwise_then_rowwise, mesh_of
from tests.kit.traced import TracedPair

KINDS = [True, False]  # of `use_reentrant`


class Wrapped(nn.Module):
    """Runs what is inside of it under checkpointing: a module, or a function of its own."""

    def __init__(self, inside: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inside = inside
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=self.reentrant)


class Layered(nn.Module):
    """A plain layer around others; it looks at its parameters, as layers that cast do."""

    def __init__(self, *inside: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inside = nn.ModuleList(inside)
        self.gain = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        dtype = next(self.norm.parameters()).dtype
        y = self.norm(x.to(dtype))
        torch._dynamo.graph_break()  # nothing, where no compiler is looking
        for module in self.inside:
            y = module(y.to(dtype))
        return x + y * self.gain


class OfRaw(nn.Module):
    """Recomputes a function of its own parameters, in two pieces: no module is called in it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN) / 4)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self._widen, x, use_reentrant=self.reentrant)
        y = y * self.scale  # outside of both, of the same unit
        return x + checkpoint(lambda y: y @ self.down.t(), y, use_reentrant=self.reentrant)

    def _widen(self, x: Tensor) -> Tensor:
        y = x @ self.up.t()
        torch._dynamo.graph_break()
        return torch.tanh(y)


def of_one_weight(reentrant: bool) -> nn.Sequential:
    """Two recomputed layers of one weight: as units each loses it to the unit above both."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
    layers[1].weight = layers[0].weight
    return nn.Sequential(*(Wrapped(nn.Sequential(layer), reentrant) for layer in layers))


Built = Callable[[bool], nn.Sequential]
Shard = Callable[[Any], Sequence[nn.Module | list[nn.Module]]]

# What is recomputed, and the units below the root; of "conditional" ones the call says so.
MODELS: dict[str, tuple[Built, Shard]] = {
    "first_of_a_list": (
        lambda kind: nn.Sequential(Wrapped(Block(), kind), Block(), Block()),
        lambda m: [[m[0].inside, m[1]], m[2]],
    ),
    "last_of_a_list": (
        lambda kind: nn.Sequential(Block(), Wrapped(Block(), kind), Scalars()),
        lambda m: [[m[0], m[1].inside, m[2]]],
    ),
    "around_a_list": (
        lambda kind: nn.Sequential(Wrapped(nn.Sequential(Block(), Block()), kind), Block()),
        lambda m: [[m[0].inside[0], m[0].inside[1]]],
    ),
    "unit": (
        lambda kind: nn.Sequential(Wrapped(Scalars(), kind), Wrapped(Block(), kind)),
        lambda m: [m[0].inside, m[1].inside],
    ),
    "layer_of_a_unit": (
        lambda kind: nn.Sequential(Layered(Wrapped(Layered(Block()), kind)), Block()),
        lambda m: [m[0], m[1]],
    ),
    "layer_with_units_in_it": (
        lambda kind: nn.Sequential(Layered(Wrapped(Layered(Block(), Layered(Scalars())), kind))),
        lambda m: [m[0].inside[0].inside.inside[0], m[0].inside[0].inside.inside[1], m[0]],
    ),
    "units_that_lost_a_tie": (of_one_weight, lambda m: [m[0].inside, m[1].inside]),
    "functions": (
        lambda kind: nn.Sequential(OfRaw(kind), OfRaw(kind)),
        lambda m: [m[0]],
    ),
    "nested": (
        lambda kind: nn.Sequential(
            Wrapped(Layered(Wrapped(Layered(Wrapped(Block(), kind)), kind)), kind), Block()
        ),
        lambda m: [m[0].inside.inside[0].inside.inside[0].inside, m[0].inside],
    ),
    "nested_of_both_kinds": (
        lambda kind: nn.Sequential(
            Wrapped(Layered(Wrapped(Layered(Block()), not kind)), kind), Wrapped(Block(), kind)
        ),
        lambda m: [m[0].inside.inside[0].inside.inside[0], m[0].inside],
    ),
}


def gained(model: nn.Sequential) -> nn.Sequential:
    """Put a layer before all others: reentrant checkpointing wants an input with a gradient."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *model)


def case_of(name: str, reentrant: bool) -> Case:
    build, units = MODELS[name]
    return Case(lambda: gained(build(reentrant)), lambda m: units(m[1:]), floats)  # type: ignore[index]  # a Sequential


class Uncompiled(Pair):
    """A model that is compiled, but for the compiler, beside an unsharded one."""

    def __init__(self, case: Case, **kwargs: Any) -> None:
        super().__init__(case, **kwargs)
        self.compiled = fsdp2.compile(self.model, disable=True)

    def run(self, model: nn.Module, batch: Batch) -> Tensor:
        return super().run(self.compiled if model is self.model else model, batch)


@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("name", MODELS)
@ranks(2, slow(3))
def test_what_is_recomputed(name: str, reentrant: bool) -> None:
    """Gradients are those of the unsharded model; in between and afterwards there are shards."""
    pair = Uncompiled(case_of(name, reentrant))
    pair.backward()
    assert_sharded(pair.model)
    pair.step()
    pair.train(steps=2)


@pytest.mark.parametrize("reentrant", with_slow(KINDS, default=[True]))
@ranks(4)
def test_over_replicas_and_neighbours(reentrant: bool) -> None:
    for name in ("first_of_a_list", "layer_with_units_in_it"):
        Uncompiled(case_of(name, reentrant), mesh=make_mesh(2, 2)).train(steps=1)
        Uncompiled(case_of(name, reentrant), reshard_after_forward=2).train(steps=1)


@pytest.mark.parametrize("reentrant", KINDS)
@pytest.mark.parametrize("name", ["conditional", "inside_a_conditional", "inside_a_unit"])
@ranks(slow(2), 3)
def test_conditional_units(name: str, reentrant: bool) -> None:
    """What the unit above moves is there when a conditional one is recomputed."""
    case = case_of("nested", reentrant)
    pair = Uncompiled(Case(case.build, lambda m: [], floats))
    model = seeded(case.build)
    outer, block = model[1].inside, model[1].inside.inside[0].inside.inside[0].inside  # type: ignore[index, union-attr]  # a Sequential
    fsdp2.fully_shard(block, conditional=name != "inside_a_conditional")
    if name != "conditional":
        fsdp2.fully_shard(outer, conditional=name == "inside_a_conditional")
    fsdp2.fully_shard(model)
    compiled = fsdp2.compile(model, disable=True)
    for _ in range(2):
        batch = pair.batch()
        loss_of(compiled(*pair.local(batch).args)).backward()
        pair.run_reference(batch).backward()
        assert_same_gradients(model, pair.reference, pair.rtol)
    assert_sharded(model)


@pytest.mark.parametrize("reentrant", KINDS)
@ranks(2)
def test_in_low_precision(reentrant: bool) -> None:
    """Layers that ask their parameters for a dtype are told that of the whole ones, as before."""
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name in ("layer_of_a_unit", "nested", "first_of_a_list"):
        case = case_of(name, reentrant)
        pair = Uncompiled(case, mp_policy=policy)
        pair.first_rtol = pair.later_rtol = 5e-2
        pair.backward()
        pair.step()


class CheckpointedFeedForward(FeedForward):
    def __init__(self, width: int, hidden: int, reentrant: bool) -> None:
        super().__init__(width, hidden)
        self.first = nn.Linear(width, width)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, self.first(x), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", with_slow(KINDS, default=[False]))
@ranks(4)
def test_dtensor_parameters(reentrant: bool) -> None:
    """Over their own axes they are DTensors in a recomputation, too."""
    model = CheckpointedFeedForward(12, 29, reentrant)
    twin = Twin(model, mesh_of(data=2, tensor=2), colwise_then_rowwise)
    twin.model = fsdp2.compile(twin.model, disable=True)
    twin.train(steps=2)


@products(name=[name for name in MODELS if name != "unit"], reentrant=KINDS)
@ranks(2, limit_s=300)
def test_after_graph_breaks(name: str, reentrant: bool) -> None:
    """What is in graphs runs in forward only, and what they hold is recomputed outside of them."""
    pair = TracedPair(case_of(name, reentrant), fullgraph=False)
    pair.backward()
    assert_sharded(pair.model)
    pair.step()
    pair.train(steps=1)


# --- what else happens in such a backward ---------------------------------------------------------


def layered(reentrant: bool = True, **kwargs: Any) -> Uncompiled:
    return Uncompiled(case_of("layer_with_units_in_it", reentrant), **kwargs)


@pytest.mark.parametrize("reentrant", KINDS)
@ranks(2)
def test_a_backward_that_fails(reentrant: bool) -> None:
    """It leaves shards, and the next step is right, compiled or not."""
    for eagerly in (False, True):
        pair = layered(reentrant)
        loss = pair.losses(pair.batch())[0]
        inner = pair.model[1].inside[0].inside  # type: ignore[index, union-attr]  # a Sequential
        with failing(inner.norm, "after forward"), pytest.raises(ProvokedError):  # type: ignore[arg-type, union-attr]
            loss.backward()
        assert_sharded(pair.model)
        assert isinstance(inner.norm.weight, DTensor)  # type: ignore[union-attr]
        for model in (pair.model, pair.reference):
            model.zero_grad()
        if eagerly:
            pair.compiled = pair.model  # type: ignore[assignment]  # the same call
        pair.train(steps=2)


@ranks(2)
def test_a_backward_that_is_over_before_the_step_inside_of_it() -> None:
    """The engine may drop a failed backward late: then nothing is put back of it."""
    pair = layered()
    pair.train(steps=1)
    step = pair.compiled.__dict__["_compiled_model"]
    backward, units = step._backward, [traced.unit for traced in step._units]
    runners = []

    def end(*_: Any) -> None:
        backward.end(backward._number)
        runners.append([unit.runner for unit in units])

    def run(grad: Tensor) -> Tensor:
        backward.begin(())
        assert backward._open
        handle = pair.model[0].register_forward_hook(end)  # type: ignore[index, operator]
        with torch.no_grad():
            pair.compiled(*pair.local(pair.batch()).args)
        handle.remove()
        return grad

    root = torch.ones(1, requires_grad=True)
    root.register_hook(run)
    (root * 2).sum().backward()
    assert runners == [step._units]  # the step went on
    assert all(unit.runner is None for unit in units)
    assert_sharded(pair.model)
    pair.train(steps=1)


@ranks(2)
def test_parameters_are_shards_for_hooks_and_copies() -> None:
    """Between recomputations ``parameters()`` gives shards, and a rank may look at them alone."""
    for reentrant in KINDS:
        pair = layered(reentrant)
        seen: list[str] = []

        def look(_grad: Any, model: nn.Module = pair.model, seen: list[str] = seen) -> None:
            if torch.distributed.get_rank() == 0:
                assert_sharded(model)
                assert all(type(v) is DTensor for v in model.state_dict().values())
                assert_sharded(copy.deepcopy(model))
                assert type(copy.deepcopy(model[1].norm)._parameters) is dict  # type: ignore[index, union-attr]
                seen.append("shards")

        loss, expected = pair.losses(pair.batch())
        next(pair.model[1].parameters()).register_hook(look)  # type: ignore[index]
        loss.backward()
        expected.backward()
        assert seen or torch.distributed.get_rank()
        pair.step()
        pair.check()


@pytest.mark.parametrize("reentrant", with_slow(KINDS, default=[False]))
@ranks(2)
def test_one_backward_through_an_eager_and_a_compiled_forward(reentrant: bool) -> None:
    """The engine moves units in the same backward; every gradient arrives once."""
    for name in ("unit", "layer_of_a_unit", "first_of_a_list", "layer_with_units_in_it"):
        for order in ((True, False), (False, True)):
            pair = Uncompiled(case_of(name, reentrant))
            losses, compiled = [], pair.compiled
            for eagerly in order:
                pair.compiled = pair.model if eagerly else compiled  # type: ignore[assignment]
                losses.append(pair.losses(pair.batch()))
            sum(loss for loss, _ in losses).backward()  # type: ignore[union-attr]
            sum(expected for _, expected in losses).backward()  # type: ignore[union-attr]
            pair.compiled = compiled
            pair.step()
            assert_sharded(pair.model)
            pair.train(steps=1)


@ranks(2)
def test_two_compiled_models_of_one() -> None:
    """Their losses may have one backward, and that may be repeated."""
    for reentrant in KINDS:
        pair = layered(reentrant)
        first, second = pair.compiled, fsdp2.compile(pair.model, disable=True)
        losses = []
        for pair.compiled in (first, second):
            losses.append(pair.losses(pair.batch()))
        for again in (True, False):
            for position in (0, 1):
                sum(both[position] for both in losses).backward(retain_graph=again)
        pair.step()
        pair.check()


@ranks(2)
def test_made_whole_by_hand_before_the_backward() -> None:
    for reentrant in KINDS:
        pair = layered(reentrant)
        loss, expected = pair.losses(pair.batch())
        for module in pair.model.modules():
            if isinstance(module, fsdp2.FSDPModule):
                module.unshard()
        loss.backward()
        expected.backward()
        pair.step()
        pair.check()


@ranks(2)
def test_whole_parameters_to_look_at_are_not_trained() -> None:
    """Neither modules nor functions are recomputed on what ``summon_full_params`` shows."""
    found = {
        "functions": "<root>: the backward of a compiled",
        "layer_with_units_in_it": "its forward",
    }
    for name, reentrant in itertools.product(found, KINDS):
        pair = Uncompiled(case_of(name, reentrant))
        loss, _ = pair.losses(pair.batch())
        with (
            fsdp2.summon_full_params(pair.model),
            pytest.raises(fsdp2.StateError, match=found[name]),
        ):
            loss.backward()
        assert_sharded(pair.model)


@ranks(2)
def test_other_parameters_in_the_next_step() -> None:
    """What is read is what is registered then: loaded by assignment, frozen, or of another copy."""
    for reentrant in KINDS:
        pair = layered(reentrant)
        pair.train(steps=1)
        state = {name: p.detach().clone() for name, p in pair.model.named_parameters()}
        pair.compiled.load_state_dict(state, assign=True)
        pair.optimizer, pair.reference_optimizer = pair._optimizers()
        pair.train(steps=1)
        for model in (pair.model, pair.reference):
            model[1].norm.weight.requires_grad_(False)  # type: ignore[index, union-attr]
        pair.train(steps=1)
        pair.compiled = copy.deepcopy(pair.compiled)
        pair.model = pair.compiled.__dict__["_compiled_model"].model
        pair.optimizer, pair.reference_optimizer = pair._optimizers()
        pair.train(steps=1)


class Viewed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(-1)


class UpdatedInPlace(Uncompiled):
    def run(self, model: nn.Module, batch: Batch) -> Tensor:
        output = (self.compiled if model is self.model else model)(*batch.args)
        output.mul_(2)
        return loss_of(output)


@ranks(2)
def test_an_output_that_is_updated_in_place() -> None:
    """A view that is updated has another node than it had when the forward ended."""
    for reentrant in KINDS:
        build = MODELS["layer_of_a_unit"][0]
        case = Case(lambda: Viewed(lambda: build(reentrant)), lambda m: list(m.blocks), floats)  # type: ignore[arg-type, call-overload]  # noqa: B023  # at once
        UpdatedInPlace(case).train(steps=1)


@pytest.mark.parametrize("reentrant", KINDS)
@ranks(slow(2), limit_s=200)
def test_around_a_compiled_model(reentrant: bool) -> None:
    """The graphs of a step that runs again in backward are those of its forward."""
    pair = TracedPair("stack", fullgraph=False)
    pair.compiled = _Around(pair.compiled, reentrant)  # type: ignore[assignment]  # a module
    pair.train(steps=2)
    assert pair.graphs.counts == ("2 forward, 1 backward" if reentrant else "1 forward, 1 backward")


class _Around(nn.Module):
    def __init__(self, inside: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inside, self.reentrant = [inside], reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside[0], x.requires_grad_(), use_reentrant=self.reentrant)


@ranks(2)
def test_a_conditional_unit_is_not_compiled_alone() -> None:
    """What gathers for it would not run."""
    model = Stack(count=1)
    block = model.blocks[0]
    fsdp2.fully_shard(block, conditional=True)
    fsdp2.fully_shard(model)
    x = torch.randn(2, WIDTH)
    loss_of(model(x)).backward()
    with pytest.raises(fsdp2.StateError, match=r"blocks\.0 is conditional, but was compiled"):
        fsdp2.compile(block, disable=True)(x)
    assert_sharded(model)


# --- gathered without gradients, used with them ---------------------------------------------------


class FirstWithoutGradients(nn.Module):
    """Of the units that it calls, the first runs in a mode of its own."""

    def __init__(self, mode: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        with self.mode():
            y = self.first(x)
        return self.second(y.clone() + x)


MODES = {"no_grad": torch.no_grad, "inference": torch.inference_mode}


def learns_what_has_gradients(mode: str, alone: bool, **options: Any) -> None:
    build = functools.partial(FirstWithoutGradients, MODES[mode])
    units: Shard = (lambda m: [m.first, m.second]) if alone else (lambda m: [[m.first, m.second]])
    pair = Uncompiled(Case(build, units, floats))
    pair.compiled = fsdp2.compile(pair.model, **options)
    pair.backward()
    assert next(pair.reference.first.parameters()).grad is None  # type: ignore[union-attr]
    pair.train(steps=1)


@pytest.mark.parametrize("mode", MODES)
@ranks(2)
def test_units_that_are_called_first_without_gradients(mode: str) -> None:
    for alone in (True, False):
        learns_what_has_gradients(mode, alone, disable=True)


@products([("no_grad", False)], mode=MODES, alone=[False, True])
@ranks(2, limit_s=200)
def test_the_same_in_graphs(mode: str, alone: bool) -> None:
    learns_what_has_gradients(mode, alone, backend="aot_eager", fullgraph=True)

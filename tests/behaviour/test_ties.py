"""Promise: a tied parameter stays one, within a group and across groups, with one gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

import fsdp2
from fsdp2._core.base.events import listen
from fsdp2._core.engine.tree import unit_of
from tests.kit.models import (
    CASES,
    WIDTH,
    Case,
    blocks_and_head,
    floats,
    seeded,
    tokens,
)
from tests.kit.parity import Pair, assert_same, names_of
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

TIED = ["tied_within", "tied_lm", "tied_blocks", "shared_block"]


def ties(model: nn.Module) -> set[frozenset[str]]:
    """Return the sets of names that are one object."""
    names: dict[int, set[str]] = {}
    for name, parameter in names_of(model).items():
        names.setdefault(id(parameter), set()).add(name)
    return {frozenset(group) for group in names.values() if len(group) > 1}


@pytest.mark.parametrize("name", with_slow(TIED, ["tied_lm", "shared_block"]))
@ranks(2)
def test_tied_names_are_one_object_before_and_after_steps(name: str) -> None:
    pair = Pair(name)
    expected = ties(pair.reference)
    assert expected
    assert ties(pair.model) == expected
    count = len(list(pair.reference.parameters()))
    assert len(list(pair.model.parameters())) == count
    pair.train(steps=2)
    assert ties(pair.model) == expected
    assert set(pair.model.state_dict()) == set(pair.reference.state_dict())
    pair.model.eval()
    with torch.no_grad():
        pair.losses(pair.batch())
    assert ties(pair.model) == expected


@pytest.mark.parametrize("name", TIED)
@ranks(2)
def test_tied_names_are_one_object_inside_forward(name: str) -> None:
    pair = Pair(name, reshard_after_forward=False)
    found: list[set[frozenset[str]]] = []
    pair.model.register_forward_hook(lambda m, args, out: found.append(ties(m)), prepend=True)
    pair.backward()
    assert found == [ties(pair.reference)]
    assert all(isinstance(p, DTensor) for p in pair.model.parameters())


@ranks(3)
def test_the_tied_gradient_is_the_sum_of_both_uses() -> None:
    """The gradient of the tied weight must differ from that of either use alone."""
    pair = Pair("tied_lm")
    batch = pair.batch()
    pair.backward(batch)
    tied = pair.model.embed.weight
    assert tied is pair.model.head.proj.weight
    assert_same(tied.grad, pair.reference.embed.weight.grad, "tied gradient")
    alone = seeded(CASES["untied_lm"].build)
    alone.load_state_dict(seeded(pair.case.build).state_dict())
    pair.run(alone, batch).backward()
    both = alone.embed.weight.grad + alone.head.proj.weight.grad
    assert_same(tied.grad, both, "sum of both uses", 1e-5)
    assert alone.embed.weight.grad.abs().max() > 0
    assert alone.head.proj.weight.grad.abs().max() > 0


@ranks(2)
def test_a_tie_may_have_a_frozen_owner_and_be_unfrozen_later() -> None:
    def freeze(model: nn.Module) -> None:
        model.embed.weight.requires_grad_(False)

    pair = Pair("tied_lm", prepare=freeze)
    pair.backward()
    assert pair.model.head.proj.weight.grad is None
    pair.step()
    for model in (pair.model, pair.reference):
        model.embed.weight.requires_grad_(True)
    pair.backward()
    assert pair.model.head.proj.weight.grad is not None
    pair.step()


@ranks(2)
def test_ties_of_root_and_head_without_blocks_as_units() -> None:
    case = Case(CASES["tied_lm"].build, lambda m: [m.embed, m.head], tokens)
    pair = Pair(case)
    assert pair.model.embed.weight is pair.model.head.proj.weight
    pair.train(steps=2)


@ranks(2)
def test_three_names_in_three_groups() -> None:
    def tie(model: nn.Module) -> None:
        for block in model.blocks[1:]:
            block.down.bias = model.blocks[0].down.bias
        model.inp.bias = model.blocks[0].down.bias

    pair = Pair("stack", prepare=tie)
    assert len(ties(pair.model)) == 1
    assert len(next(iter(ties(pair.model)))) == 4
    pair.train()


@ranks(2)
def test_a_unit_that_gives_all_it_has_up_gathers_nothing() -> None:
    """The root takes the one weight of two layers, each of which is a unit."""

    def build() -> nn.Module:
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
        layers[1].weight = layers[0].weight
        return nn.Sequential(*layers, nn.Linear(WIDTH, 3))

    pair = Pair(Case(build, list, floats))
    units = [unit_of(layer) for layer in pair.model]
    assert [len(unit.own_groups) for unit in units] == [0, 0, 1]
    pair.train(steps=2)
    gathers = []
    with listen(lambda event: gathers.append(event.fqn) if event.kind == "unshard" else None):
        pair.backward()
    assert sorted(set(gathers)) == ["", "2"]


def _used_around(*inner: nn.Module) -> nn.Module:
    """Two modules in a block, and each in another block as well."""
    return nn.Sequential(
        nn.Sequential(*inner), *map(nn.Sequential, inner), nn.Linear(WIDTH, 3, bias=False)
    )


def _tied_layers() -> nn.Module:
    one, other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    other.weight = one.weight
    return _used_around(one, other)


def _layer_of_two_units() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    return _used_around(nn.Sequential(layer), nn.Sequential(layer))


@pytest.mark.parametrize("build", [_tied_layers, slow(_layer_of_two_units)])
@ranks(2)
def test_a_tie_moves_to_the_unit_around_every_path_to_it(build: Any) -> None:
    """The block contains both modules, and is a unit; but two other blocks use them, too."""
    pair = Pair(Case(build, lambda model: [*model[0], model[0]], floats))
    units = [unit_of(module) for module in (*pair.model[0], pair.model[0], pair.model)]
    names = [[p.fqn for group in unit.own_groups for p in group.params] for unit in units]
    assert any("weight" in name for name in names[3])
    assert not any("weight" in name for own in names[:3] for name in own)
    pair.train(steps=2)


@ranks(2)
def test_a_step_counts_a_tied_parameter_once() -> None:
    """An optimizer with momentum would see a parameter twice if two objects were registered."""

    def optimizer(parameters: Any, lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=0.01)

    pair = Pair(Case(CASES["tied_lm"].build, blocks_and_head, tokens), optimizer=optimizer)
    pair.train(steps=3)
    assert len(pair.optimizer.state) == len(pair.reference_optimizer.state)


@ranks(2)
def test_ignoring_a_module_ignores_what_its_children_share() -> None:
    """A parameter of a child of an ignored module, tied to a module outside, is left alone."""
    model = nn.Sequential(nn.Sequential(nn.Linear(5, 5)), nn.Linear(5, 5))
    inner, outer = model[0][0], model[1]  # type: ignore[index]
    shared = outer.weight = inner.weight
    fsdp2.fully_shard(model, ignored_states=[model[0]])
    assert outer.weight is shared
    assert inner.weight is shared
    assert isinstance(outer.bias, DTensor)

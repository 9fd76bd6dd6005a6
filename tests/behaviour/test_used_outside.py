"""Promise: a sharded parameter used outside of its module's forward is an error that names it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fsdp2
from fsdp2._core.engine.between_steps import explained
from tests.kit.in_turn import shard_each
from tests.kit.models import seeded
from tests.kit.pool import ranks
from tests.kit.slow import slow

WIDTH = 13


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


class Model(nn.Module):
    """Two blocks that are units, between layers of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(29, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 29)

    def forward(
        self, tokens: Tensor, inner: Callable[[Model, Tensor], Tensor] | None = None
    ) -> Any:
        x = self.emb(tokens)
        for block in self.blocks:
            x = block(x)
        if inner is not None:
            x = inner(self, x)
        return self.head(x)

    def generate(self, tokens: Tensor) -> Tensor:
        return self.head(self.emb(tokens))


class Trainer:
    def __init__(self, model: Model) -> None:
        self.model = model

    def loss(self, x: Tensor) -> Tensor:
        return F.linear(
            x,
            self.model.head.weight,
        )


def sharded() -> Model:
    model = seeded(Model)
    shard_each(*model.blocks, model)
    return model


def features() -> Tensor:
    return torch.randn(3, WIDTH)


def tokens() -> Tensor:
    return torch.tensor([1, 2, 28])


def read_weight(model: Model) -> Tensor:
    rows = features()
    return rows @ model.blocks[1].mlp[0].weight


FORMS: dict[str, tuple[Callable[[Model], Any], str, str]] = {
    "a layer of a unit": (
        lambda m: m.blocks[0].mlp(features()), "blocks.0.mlp.0.weight", "blocks.0.mlp.0 too"
    ),
    "a layer of the root": (lambda m: m.head(features()), "head.weight", "head too"),
    "an embedding": (lambda m: m.emb(tokens()), "emb.weight", "emb too"),
    "a method that is not forward": (
        lambda m: m.generate(tokens()), "emb.weight", "register_fsdp_forward_method"
    ),
    "a weight in an expression": (read_weight, "blocks.1.mlp.0.weight", "summon_full_params"),
    "a weight in a loss": (lambda m: Trainer(m).loss(features()), "head.weight", "head too"),
    "a norm": (lambda m: m.blocks[1].norm(features()), "blocks.1.norm.weight", "blocks.1 (Block)"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@ranks(slow(2))
def test_outside_of_every_forward(form: str) -> None:
    """torch's error comes as it is, and what is said behind its traceback names the parameter."""
    call, name, way = FORMS[form]
    model = sharded()
    for is_copied in (False, False, True):  # before the first step, after it, and of a copy
        if is_copied:
            model = copy.deepcopy(model)
            model(tokens()).sum().backward()
        with pytest.raises(RuntimeError, match="got mixed") as caught:
            call(model)
        found = explained(caught.value)
        assert found.code == "FS326"
        assert str(found).startswith(f"{name}: used while it is sharded")
        assert way in str(found)
        model(tokens()).sum().backward()
        model.zero_grad()


INSIDE: dict[str, tuple[Callable[[Model, Tensor], Tensor], str]] = {
    "a layer of another unit": (lambda m, x: m.blocks[0].mlp(x), "blocks.0.mlp.0.weight"),
    "a weight of another unit": (lambda m, x: x @ m.blocks[1].norm.weight, "blocks.1.norm.weight"),
}  # fmt: skip


@pytest.mark.parametrize("form", INSIDE)
@ranks(2)
def test_inside_of_a_forward_of_another_unit(form: str) -> None:
    call, name = INSIDE[form]
    model = sharded()
    with pytest.raises(fsdp2.StateError, match=rf"^{name}: used while it is sharded") as caught:
        model(tokens(), call)
    assert caught.value.code == "FS326"
    model(tokens()).sum().backward()  # the model goes on


@ranks(2)
def test_other_errors_stay_as_they_are() -> None:
    model = sharded()
    with pytest.raises(RuntimeError, match="shapes") as caught:
        model(tokens(), lambda _, x: x @ x)
    assert explained(caught.value) is None
    assert explained(RuntimeError("got mixed torch.Tensor and DTensor")) is None  # of nobody's


@ranks(2)
def test_an_error_that_nobody_catches_says_more() -> None:
    """Python's last words are as they were, and ours stand behind them."""
    model = sharded()
    said: list[str] = []

    class Wire:
        def write(self, text: str) -> int:
            said.append(text)
            return len(text)

        def flush(self) -> None: ...

    with pytest.raises(RuntimeError) as caught:
        model.head(features())
    error = caught.value
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", Wire())
        sys.excepthook(type(error), error, error.__traceback__)
    text = "".join(said)
    assert text.index("got mixed") < text.index("fsdp2: head.weight: used while it is sharded")
    assert text.rstrip().endswith("[FS326]")

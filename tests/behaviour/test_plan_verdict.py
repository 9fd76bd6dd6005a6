"""Promise: a plan decides. It says first whether a step fits, and what would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import ConfigError
from fsdp2._tools.plan import shapes, traced
from fsdp2._tools.plan.hardware import hardware_for
from fsdp2._tools.plan.shown import of_each, place_before, rows
from tests.behaviour.test_plan import LENGTH, Block, Model

MIB, GIB = 1 << 20, 1 << 30
TOKENS = torch.zeros(16, LENGTH, dtype=torch.long)


class Speaks(nn.Module):
    """A decoder whose logits are most of what a step takes."""

    def __init__(self, width: int = 32, vocabulary: int = 4001, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def plan(model: nn.Module | None = None, **given: Any) -> fsdp2.plans.Plan:
    asked = {"mesh": 8, "policy": {Block}, "batch": TOKENS, "hardware": "h100", **given}
    return fsdp2.plan(model or Model(), **asked)


def peak_of(found: fsdp2.plans.Plan) -> Any:
    return found.step.highest_nbytes


def test_a_verdict_stands_first() -> None:
    found = plan()
    first = str(found).splitlines()[0]
    assert first == str(found.verdict())
    assert first.startswith("fits: ")
    assert " of 79.1 GiB at " in first
    assert found.verdict().fits is True
    verdict = found.verdict(peak_of(found))
    assert verdict.fits is True
    assert verdict.is_tight
    assert "little is left" in str(verdict)
    page = found.page()
    assert (page.headline.text, page.headline.kind) == (first, "good")
    assert [fact.name for fact in page.facts][:4] == [
        "peak of a step",
        "speed of a rank",
        "MFU",
        "a step",
    ]


def test_what_would_fit_is_said_and_fits() -> None:
    found = plan()
    smaller = peak_of(found.changed(batch=TOKENS[:1], memory="low"))
    for budget in (int(0.9 * peak_of(found)), smaller, smaller // 2):
        verdict = found.verdict(budget)
        assert verdict.fits is False
        assert str(verdict).startswith("does not fit: ")
        fits = next((one for one in found.suggest(budget) if one.fits), None)
        assert verdict.way_out.endswith("more ranks are needed") is (fits is None)
        if fits is not None:
            assert f"{fits.code.split(',')[0].split()[-1]}" in str(found.suggest(budget))
            assert peak_of(found.changed(**fits.changes)) <= budget


def test_no_capacity_is_known() -> None:
    found = plan(hardware=None)
    assert found.verdict().fits is None
    assert str(found.verdict()).endswith("pass hardware or a budget to check if it fits")
    with pytest.raises(ConfigError, match="without a batch"):
        plan(batch=None).verdict()


def test_speed() -> None:
    step = plan(mesh=2).step
    assert step.tokens == TOKENS.numel()
    assert step.tokens_per_second == TOKENS.numel() / step.seconds
    again = plan(mesh=2, activation_checkpointing=True).step
    # products that are computed again are no work of the model
    assert again.product_seconds == pytest.approx(step.product_seconds)
    assert again.seconds > step.seconds
    assert 0 < (again.mfu or 0) < (step.mfu or 0) < 1
    host = plan(hardware=None).step
    assert (host.tokens_per_second, host.mfu) == (None, None)


def test_cheap_ways_come_before_offload() -> None:
    found = plan(Speaks())
    base = peak_of(found)
    logits = max(one.peak_by_kind[-1] for one in found.step.memory)  # type: ignore[union-attr]
    assert logits >= 2 * 4 * TOKENS.numel() * 4001
    chunked = found.changed(loss_chunks=8)
    assert peak_of(chunked) < base - logits // 2
    tried = found.suggest(peak_of(chunked) + MIB)
    assert not any("offload_policy" in one.changes for one in tried)
    names = [set(one.changes) for one in tried if one.fits]
    assert {"loss_chunks"} in names
    assert {"batch"} in names
    figures = [(one.peak_nbytes, one.seconds, one.batch) for one in tried]
    assert len(figures) == len(set(figures))
    for one in tried:
        assert peak_of(found.changed(**one.changes)) == one.peak_nbytes
    least = found.suggest(1)
    offloaded = [one for one in least if "offload_policy" in one.changes]
    assert offloaded
    assert all("excluding the optimizer's step" in str(one) for one in offloaded)


def test_offload_takes_the_time_of_copies() -> None:
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)])
    given = {"mesh": 2, "policy": {nn.Linear}, "batch": torch.zeros(2, 2048), "hardware": "h100"}
    near = fsdp2.plan(model, **given).step
    away = fsdp2.plan(model, **given, offload_policy=fsdp2.CPUOffloadPolicy()).step
    assert (away.seconds or 0) > (near.seconds or 0) + 4 * (2048 * 2049 * 4 / 2) / 50e9


@pytest.mark.parametrize("device", ["h100", None])
@pytest.mark.parametrize("is_again", [False, True])
def test_a_replayed_block_takes_what_it_takes(
    monkeypatch: pytest.MonkeyPatch, device: str | None, is_again: bool
) -> None:
    """Plans with traces and without are the same, whichever plan made the traces."""
    build = lambda: Model(157, 2003)  # noqa: E731  # short
    given: dict[str, Any] = {
        "mesh": 4,
        "policy": {Block},
        "batch": TOKENS[:3],
        "hardware": device,
        "optimizer": torch.optim.AdamW,
        "activation_checkpointing": is_again,
    }
    first = fsdp2.plan(build(), **given)
    found = {memory: first.changed(memory=memory).step for memory in ("balanced", "fast", "low")}
    monkeypatch.setattr(traced, "MOST_FORMS", 0)  # no trace is made
    for memory, step in found.items():
        plain = fsdp2.plan(build(), **given, memory=memory).step
        assert step.events == plain.events
        assert (step.seconds or 0.0) == pytest.approx(plain.seconds or 0.0, rel=1e-3)
        assert step.product_seconds == pytest.approx(plain.product_seconds)
        assert step.highest_nbytes == pytest.approx(plain.highest_nbytes, rel=5e-3)
        for one, other in zip(step.memory, plain.memory, strict=True):
            assert one.label == other.label
            assert one.nbytes == pytest.approx(other.nbytes, rel=5e-3, abs=4096)


@pytest.mark.parametrize("device", ["h100", None])
def test_a_replayed_block_refers_to_what_its_backward_reads(
    monkeypatch: pytest.MonkeyPatch, device: str | None
) -> None:
    """The first layer's input needs no gradient, so its backward reads no weight: no gather."""
    build = lambda: nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024))  # noqa: E731  # short
    given: dict[str, Any] = {"mesh": 64, "policy": {nn.Linear}, "batch": torch.zeros(16, 1024)}
    one = fsdp2.plan(build(), **given, hardware=device).step
    monkeypatch.setattr(traced, "MOST_FORMS", 0)
    other = fsdp2.plan(build(), **given, hardware=device).step
    assert (one.events, one.memory) == (other.events, other.memory)
    assert sum(event.kind == "unshard" for event in one.events) == 3


class Shares(Block):
    """A block that reads a parameter of another one."""

    other: list[Any]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.other[0].scale


class Keeps(Block):
    """A block that keeps what it returned."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = super().forward(x)
        return self.seen


class Hands(Block):
    """A block that returns what it is given."""

    def forward(self, x: Tensor) -> Any:
        super().forward(x)
        return x


@pytest.mark.parametrize("kind", [Shares, Keeps, Hands])
def test_what_no_node_can_stand_for_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, kind: type[Block]
) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(32))
            self.inside = nn.Linear(32, 32)
            self.layers = nn.ModuleList(kind(32) for _ in range(3))
            for layer in self.layers:
                layer.__dict__["other"] = [self]

        def forward(self, x: Tensor) -> Tensor:
            x = self.inside(x)
            for layer in self.layers:
                x = layer(x)
            return x

    given: dict[str, Any] = {"mesh": 2, "policy": {kind}, "batch": torch.zeros(4, 32)}
    found = []
    for _ in range(2):
        try:
            found.append(fsdp2.plan(Whole(), **given).step)
        except ConfigError:
            found.append(None)
        monkeypatch.setattr(traced, "MOST_FORMS", 0)
    assert found[0] == found[1]


class Outer(nn.Module):
    """A checkpoint around a block that is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(32)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def test_checkpoints_of_the_model_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint counts what is saved, so a block inside of it is not traced."""
    build = lambda: nn.Sequential(nn.Linear(32, 32), *(Outer() for _ in range(3)))  # noqa: E731  # short
    given: dict[str, Any] = {"mesh": 2, "policy": {Block}, "batch": torch.zeros(4, 32)}
    one = fsdp2.plan(build(), **given).step
    monkeypatch.setattr(traced, "MOST_FORMS", 0)
    assert one == fsdp2.plan(build(), **given).step


def test_capacities_are_those_that_torch_reports() -> None:
    for name, least, most in (("h100", 79.0, 79.7), ("h200", 139.5, 141.0), ("a100", 79.0, 79.7)):
        machine = hardware_for(name)
        assert least <= (machine.memory_nbytes or 0) / GIB <= most
        assert machine.name == f"{name}-nvlink-ib"
    with pytest.raises(ConfigError, match="h100-nvlink-ib"):
        hardware_for("h")


def test_words() -> None:
    assert place_before("backward: reduce head") == "the reduction of head in backward"
    assert place_before("forward: unshard <root>") == "the gather of <root> in forward"
    assert place_before("the optimizer's step") == "the optimizer's step"
    assert of_each(81 * GIB, 79 * GIB) == ("81.0", "79.0 GiB")
    assert of_each(3 * MIB, 79 * GIB) == ("3 MiB", "79.0 GiB")


def test_rows_have_names_of_modules() -> None:
    names = [name for name, _ in rows(plan().groups)]
    assert "embedding, head" in names
    assert "blocks.0 (3 times)" in names


def test_who_shares_the_model_is_said() -> None:
    text = str(plan(mesh=(4, 8)))
    assert "4 replicas, each sharded over 8 ranks; mesh=32 (--mesh 32) shards over all 32" in text
    assert "replicas" not in str(plan(mesh=32))
    assert "replicas" not in str(plan(mesh=(1, 8)))


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 172,
    "vocab_size": 1009,
}


@pytest.mark.parametrize(
    ("changes", "numel"),
    [
        ({}, 2 * 1009 * 64 + 64),
        ({"tie_word_embeddings": True}, 1009 * 64 + 64),
        ({"model_type": "qwen2"}, 2 * 1009 * 64 + 64 + 3 * (64 + 2 * 32)),
    ],
)
def test_a_hugging_face_config(tmp_path: Path, changes: dict[str, Any], numel: int) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, **changes}))
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 172 + 2 * 64
    for name in (path, tmp_path):
        shape = shapes.shape_for(str(name))
        with torch.device("meta"):
            model = shapes.Decoder(shape)
        assert sum(param.numel() for param in model.parameters()) == numel + 3 * layer


def test_known_shapes_have_their_parameters() -> None:
    """In billions, as their makers count them."""
    known = {
        "llama3-1b": 1.24,
        "llama3-3b": 3.21,
        "llama3-8b": 8.03,
        "llama3-70b": 70.55,
        "llama2-7b": 6.74,
        "mistral-7b": 7.24,
        "qwen2.5-7b": 7.62,
        "qwen3-8b": 8.19,
        "qwen3-32b": 32.8,
    }
    for name, billions in known.items():
        with torch.device("meta"):
            model = shapes.Decoder(shapes.SHAPES[name])
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[1]", "is not a model config"),
        ("{", "cannot be read"),
        (json.dumps({**CONFIG, "model_type": "gpt2"}), "model_type 'gpt2'"),
        (json.dumps({**CONFIG, "vocab_size": -1}), "vocab_size -1"),
        (json.dumps({**CONFIG, "num_key_value_heads": 3}), "do not divide"),
    ],
)
def test_a_config_that_is_not_known(tmp_path: Path, text: str, found: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=found):
        shapes.shape_for(str(path))
    with pytest.raises(ValueError, match="cannot be read"):
        shapes.shape_for(str(tmp_path / "nowhere.json"))
    assert shapes.shape_for("package.module:name") is None

"""`weights.tensor_parallel`: the layouts of vLLM and SGLang, and how much each trainer sends."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.kit.decoder_shapes import DECODERS, Decoder
from benchmarks.kit.engine_rules import LLAMA, QWEN3_MOE, QWEN3_MOE_STACKED
from fsdp2 import weights
from fsdp2._core.base.errors import ConfigError
from fsdp2._core.transfer.chunk_plan import Blocks, CutOf
from fsdp2.weights import Box, Figures, Spec
from fsdp2.weights._route import Route, Source

BF16 = torch.bfloat16


def sharded(shapes: dict[str, tuple[int, ...]], counts: tuple[int, ...]) -> list[Source]:
    """Return sources in bf16, sharded over the last axis: the others have replicas."""
    cuts = (CutOf(len(counts) - 1, 0),)
    ranks = tuple(range(math.prod(counts)))
    return [
        Source(name, shape, BF16, Blocks(shape, counts, cuts), ranks)
        for name, shape in shapes.items()
    ]


def test_llama_as_engines_lay_it_out() -> None:
    decoder = Decoder(1, 64, 96, 8, 2, 8, 100)
    shapes = decoder.shapes()
    first, second, *_ = weights.tensor_parallel(decoder, 4, LLAMA, shapes=shapes)
    layer = "model.layers.0."
    assert first[f"{layer}self_attn.qkv_proj.weight"] == Spec(
        (16 + 8 + 8, 64),
        BF16,
        [
            Spec((16, 64), BF16, [Box(f"{layer}self_attn.q_proj.weight", (0, 0), (16, 64))]),
            Spec((8, 64), BF16, [Box(f"{layer}self_attn.k_proj.weight", (0, 0), (8, 64))]),
            Spec((8, 64), BF16, [Box(f"{layer}self_attn.v_proj.weight", (0, 0), (8, 64))]),
        ],
    )
    # two ranks have one head of keys
    assert (
        second[f"{layer}self_attn.qkv_proj.weight"].boxes[1:]
        == (first[f"{layer}self_attn.qkv_proj.weight"].boxes[1:])
    )
    assert second[f"{layer}mlp.down_proj.weight"].boxes == (
        Box(f"{layer}mlp.down_proj.weight", (0, 24), (64, 24)),
    )
    assert first[f"{layer}mlp.gate_up_proj.weight"].shape == (48, 64)
    last = weights.tensor_parallel(decoder, 4, LLAMA, shapes=shapes)[3]
    assert last["lm_head.weight"].boxes == (
        Box("lm_head.weight", (96, 0), (4, 64)), Box(None, (), (28, 64))
    )  # fmt: skip
    assert first["model.norm.weight"].shape == (64,)
    assert set(first) == set(last)
    assert len(first) == 9


def test_stacked_experts_of_qwen3() -> None:
    decoder = Decoder(2, 64, 32, 4, 2, 16, 64, experts=12, has_head_norms=True)
    shapes = decoder.shapes()
    _, second = weights.tensor_parallel(decoder, 2, QWEN3_MOE, shapes=shapes)
    layer = "model.layers.1.mlp.experts."
    stacked = second[f"{layer}w13_weight"]
    assert stacked.shape == (12, 32, 64)
    assert second[f"{layer}w2_weight"].shape == (12, 64, 16)
    expert = stacked.boxes[10]
    assert isinstance(expert, Spec)
    assert [part.boxes for part in expert.boxes if isinstance(part, Spec)] == [
        (Box(f"{layer}10.{name}_proj.weight", (16, 0), (16, 64)),) for name in ("gate", "up")
    ]
    route = Route(
        sharded(shapes, (4,)),
        weights.tensor_parallel(decoder, 2, QWEN3_MOE, shapes=shapes),
        trainers=4,
        max_bytes=1 << 20,
    )
    assert set(route.wires) == set(shapes)


def test_experts_that_the_trainer_keeps_in_one_parameter() -> None:
    at = "model.layers.1.mlp.experts."
    shapes = {f"{at}gate_up_proj": (4, 2 * 13, 7), f"{at}down_proj": (4, 7, 13)}
    first, second = weights.tensor_parallel(None, 2, QWEN3_MOE_STACKED, shapes=shapes)
    assert first[f"{at}w13_weight"].shape == (4, 14, 7)
    assert second[f"{at}w13_weight"].boxes == (
        Box(f"{at}gate_up_proj", (0, 7, 0), (4, 6, 7)),
        Box(f"{at}gate_up_proj", (0, 20, 0), (4, 6, 7)),
    )
    assert second[f"{at}w2_weight"].boxes == (Box(f"{at}down_proj", (0, 0, 7), (4, 7, 6)),)
    rules = {"w": weights.Cut(f"{at}*", 1, parts=3)}
    with pytest.raises(ConfigError, match="parts"):
        weights.tensor_parallel(None, 2, rules, shapes=shapes)


def test_what_no_rule_names_is_told() -> None:
    decoder = Decoder(1, 64, 96, 8, 2, 8, 128)
    shapes = decoder.shapes() | {"head.extra": (3,)}
    with pytest.raises(ConfigError, match=r"no rule matches head.extra \(1 in total\)"):
        weights.tensor_parallel(decoder, 2, LLAMA, shapes=shapes)
    with pytest.raises(ConfigError, match=r"heads of model.layers.0.self_attn.k_proj.weight"):
        weights.tensor_parallel(decoder, 3, LLAMA, shapes=shapes)


def test_a_config_alone_is_made_a_model_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Auto:
        @staticmethod
        def from_config(config: SimpleNamespace) -> torch.nn.Module:
            made.append(torch.nn.Sequential(torch.nn.Linear(config.hidden_size, 15, bias=False)))
            return made[0]

    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoModelForCausalLM=Auto))
    config = SimpleNamespace(model_type="llama", hidden_size=7, num_attention_heads=5)
    rules = {"q": weights.Cut("0.weight", 0, heads="num_attention_heads")}
    layout = weights.tensor_parallel(config, 3, rules)
    assert [one["q"].shape for one in layout] == [(6, 7), (6, 7), (3, 7)]
    assert made[0][0].weight.is_meta


def test_wrong_arguments_are_refused_by_name() -> None:
    model, cut = torch.nn.Linear(13, 29, bias=False), weights.Cut("weight", 0)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"size": 4097}, "size to be at most 4096 ranks, found 4097"),
        ({"size": 1 << 70}, r"size to be an int below 2\*\*63"),
        ({"rules": {"w": 1}}, r"rules\['w'\] to be a Cut or a non-empty list of Cuts"),
        ({"rules": {"w": []}}, "a non-empty list of Cuts"),
        (
            {"rules": {"w": weights.Cut("weight", 2)}},
            r"dim to be a dim of weight, of shape \(29, 13",
        ),
        ({"rules": {"w": weights.Cut("weight", 0, heads="no")}}, "heads \\('no' of the config"),
        ({"shapes": {"weight": 13}}, r"shapes\['weight'\] to be a sequence of ints"),
    ]
    for change, message in wrong:
        given = {"size": 2, "rules": {"w": cut}, **change}
        with pytest.raises(ConfigError, match=message):
            weights.tensor_parallel(model, **given)
    for change in ({"name": 1}, {"heads": -1}, {"pad": 1.5}, {"parts": 0}):
        with pytest.raises(ConfigError, match=f"Cut: expected {next(iter(change))} to be"):
            weights.Cut(**{"name": "weight", **change})


@pytest.mark.parametrize("counts", [(8,), (64,), (2, 8)])
def test_trainers_of_llama_8b_send_alike(counts: tuple[int, ...]) -> None:
    decoder = replace(DECODERS["8B"], layers=2)
    shapes = decoder.shapes()
    layout = weights.tensor_parallel(decoder, 8, LLAMA, shapes=shapes)
    route = Route(sharded(shapes, counts), layout, trainers=math.prod(counts), max_bytes=256 << 20)
    assert Figures(route).busiest < 1.1

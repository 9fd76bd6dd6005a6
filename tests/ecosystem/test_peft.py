"""Promise: adapters of `peft` train on a frozen, sharded base as on a plain one."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from fsdp2._core.agreement.agreement import STAMP_NUMEL
from fsdp2._core.base.capabilities import ROW_NBYTES
from fsdp2._core.base.events import Event, listen
from fsdp2._core.engine.tree import unit_of
from fsdp2._core.params.layout import align
from tests.ecosystem._programs import Program, each_layer, full_state, tiny_llama, tokens
from tests.kit.models import Case, seeded
from tests.kit.parity import assert_same, bits, names_of, whole
from tests.kit.pool import ranks

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.ecosystem

BF16, FP32 = torch.bfloat16, torch.float32
TARGETS = ["q_proj", "v_proj", "down_proj"]


def build(dtype: torch.dtype = FP32, adapters: int = 1, **options: Any) -> nn.Module:
    """Put low-rank adapters on a Llama of `dtype`; their initial values are all random."""
    base = tiny_llama().to(dtype)
    options = {"target_modules": TARGETS, "init_lora_weights": False} | options
    config = peft.LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(base, config)
    for index in range(1, adapters):
        model.add_adapter(f"adapter_{index}", config)
    return model


def lora(*args: Any, **options: Any) -> Case:
    return Case(
        partial(build, *args, **options), lambda model: each_layer(model.get_base_model()), tokens
    )


def assert_base_untouched(program: Program) -> None:
    """Assert that frozen parameters kept every bit and have no gradient, and that some moved."""
    before = names_of(seeded(program.case.build))
    for name, parameter in names_of(program.model).items():
        same = torch.equal(bits(whole(parameter)), bits(before[name]))
        assert same != parameter.requires_grad, name
        assert parameter.requires_grad == ("lora_" in name or "modules_to_save" in name), name


@pytest.mark.parametrize(
    "options",
    [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}],
    ids=["lora", "dora", "modules_to_save"],
)
@ranks(2, 3)
def test_adapters_train_like_the_unsharded_model(options: dict[str, Any]) -> None:
    """Adapters get the plain model's gradients and weights; the base keeps every bit."""
    program = Program(lora(**options))
    for _ in range(4):
        program.backward()
        for name, parameter in names_of(program.model).items():
            assert (parameter.grad is not None) == parameter.requires_grad, name
        program.step()
    program.check()
    assert_base_untouched(program)


@ranks(2, 3)
def test_fp32_adapters_on_a_bf16_base(world_size: int) -> None:
    """One unit holds a bf16 base and fp32 adapters, each in its dtype, and trains as the plain."""
    program = Program(lora(BF16), in_parts=True, rtol=1e-6)
    if world_size == 3:  # sums in another order: in the next step bf16 may round the other way
        program.later_rtol = 5e-2
    assert {p.dtype for p in each_layer(program.model.get_base_model())[0].parameters()} == {
        BF16,
        FP32,
    }
    program.train(steps=4)
    for name, parameter in names_of(program.model).items():
        assert parameter.dtype is (FP32 if "lora_" in name else BF16), name
    assert_base_untouched(program)


@pytest.mark.parametrize("reentrant", [True, False])
@ranks(2)
def test_adapters_train_with_gradient_checkpointing(reentrant: bool) -> None:
    """Recomputed layers of a frozen base give the adapters the plain model's gradients."""
    program = Program(
        lora(),
        prepare=lambda model: model.gradient_checkpointing_enable({"use_reentrant": reentrant}),
    )
    program.train(steps=3)
    assert_base_untouched(program)


@ranks(2, 3)
def test_frozen_parameters_have_no_part_in_a_reduction(world_size: int) -> None:
    """A reduction carries the adapters' shards, counts and a stamp; a frozen root has none."""
    program = Program(lora())
    layers = each_layer(program.model.get_base_model())
    heard: list[Event] = []
    with listen(heard.append):
        program.backward()
    reductions = [event for event in heard if event.kind == "reduce"]
    assert len(reductions) == len(layers) == 3
    for layer, event in zip(reversed(layers), reductions, strict=True):
        adapters = [p for name, p in layer.named_parameters() if "lora_" in name]
        assert len(adapters) == 6
        rows = [-(-p.shape[0] // world_size) for p in adapters]
        numel = sum(count * p.shape[1] for count, p in zip(rows, adapters, strict=True))
        assert event.fqn == unit_of(layer).fqn
        row_nbytes = 4 * (numel + len(adapters) + STAMP_NUMEL)
        assert event.nbytes == world_size * align(row_nbytes, ROW_NBYTES)
    assert unit_of(program.model).fqn == ""


@ranks(2)
def test_a_disabled_adapter_leaves_the_base(rank: int) -> None:
    """`disable_adapter` gives the base model's logits; training goes on afterwards as before."""
    program = Program(lora())
    base = seeded(program.case.build).unload()
    for _ in range(2):
        ids = program.batch().kwargs["input_ids"]
        with torch.no_grad(), program.model.disable_adapter():
            found = program.model(input_ids=ids).logits
            expected = base(input_ids=ids).logits
        assert torch.equal(found, expected)
        assert not torch.equal(program.model(input_ids=ids).logits, expected)
        program.backward()
        program.step()
    program.check()
    assert_base_untouched(program)


@ranks(2)
def test_adapters_take_turns() -> None:
    """`set_adapter` moves training from one adapter to the other; the first one then stays."""
    program = Program(lora(adapters=2))
    for name in ("default", "adapter_1", "default"):
        for model in (program.model, program.reference):
            model.set_adapter(name)
        program.optimizer, program.reference_optimizer = program._optimizers()
        before = {n: whole(p).clone() for n, p in names_of(program.model).items()}
        for _ in range(2):
            program.backward()
            program.step()
        for fqn, parameter in names_of(program.model).items():
            moved = not torch.equal(whole(parameter), before[fqn])
            assert moved == (f".{name}." in fqn), fqn
        program.check()


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@ranks(2)
def test_a_saved_adapter_loads_and_merges_on_a_plain_base(
    dtype: torch.dtype, rank: int, tmp_path: Path
) -> None:
    """The adapter's file equals the shards bit for bit, and merges into a plain base."""
    program = Program(lora(dtype), in_parts=True)
    program.train(steps=2)
    state = full_state(program.model)
    sharded = {name: whole(p) for name, p in names_of(program.model).items()}
    if rank == 0:
        adapter = peft.get_peft_model_state_dict(program.model, state_dict=state)
        assert len(adapter) == 18
        for name, value in adapter.items():
            trained = sharded[name.replace(".weight", ".default.weight")]
            assert torch.equal(bits(value), bits(trained)), name
        program.model.save_pretrained(tmp_path, state_dict=state)
    dist.barrier()
    base = seeded(lambda: tiny_llama().to(dtype))
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    for name, parameter in names_of(loaded).items():
        assert torch.equal(bits(parameter), bits(sharded[name])), name
    ids = program.batch().kwargs["input_ids"]
    with torch.no_grad():
        found = program.model.eval()(input_ids=ids).logits
        assert torch.equal(loaded.eval()(input_ids=ids).logits, found)
        merged = loaded.merge_and_unload()
        assert not any("lora" in name for name, _ in merged.named_parameters())
        assert_same(merged(input_ids=ids).logits, found, "logits", 1e-5 if dtype is FP32 else 3e-2)

"""Promise: language models of `transformers`, sharded and compiled whole, train like eager ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import fsdp2
from tests.ecosystem._programs import each_layer, transformers
from tests.kit.compiled_pair import MANY_STEPS, RTOL_BF16, STEPS, CompiledPair
from tests.kit.models import Batch, Case
from tests.kit.parity import make_mesh
from tests.kit.pool import ranks
from tests.kit.slow import slow

pytestmark = pytest.mark.ecosystem

BF16, FP32 = torch.bfloat16, torch.float32
VOCABULARY = 61


def llama(tied: bool = False, checkpointed: bool = False) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def gpt2() -> nn.Module:
    """Build a GPT-2, whose head is its embedding and whose layers are `Conv1D`s."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=36,
        n_layer=2,
        n_head=4,
        n_positions=32,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # else its forward logs that it takes this, which ends a graph
    return model


def mixtral(kernel: str) -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        num_local_experts=3,
        num_experts_per_tok=2,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config._experts_implementation = kernel
    return transformers.MixtralForCausalLM(config)


def adapted(dtype: torch.dtype) -> nn.Module:
    """Put adapters of rank 3 on a frozen Llama of some dtype."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=3,
        lora_alpha=6,
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj", "down_proj"],
        init_lora_weights=False,
    )
    return peft.get_peft_model(llama().to(dtype), config)


def batch_of(rows: int, length: int = 7) -> Batch:
    ids = torch.randint(3, VOCABULARY, (rows, length))  # 0 to 2 are padding, begin and end
    return Batch((), {"input_ids": ids, "labels": ids})


def each_gpt2_layer(model: Any) -> Sequence[nn.Module]:
    return list(model.transformer.h)


def each_adapted_layer(model: Any) -> Sequence[nn.Module]:
    return each_layer(model.get_base_model())


MODELS = {
    "llama": Case(llama, each_layer, batch_of),
    "tied_llama": Case(partial(llama, tied=True), each_layer, batch_of),
    "checkpointed_llama": Case(partial(llama, checkpointed=True), each_layer, batch_of),
    "gpt2": Case(gpt2, each_gpt2_layer, batch_of),
    "mixtral_grouped": Case(partial(mixtral, "grouped_mm"), each_layer, batch_of),
    "mixtral_batched": Case(partial(mixtral, "batched_mm"), each_layer, batch_of),
    "adapted_fp32": Case(partial(adapted, FP32), each_adapted_layer, batch_of),
    "adapted_bf16": Case(partial(adapted, BF16), each_adapted_layer, batch_of),
}


ROUNDS_OTHERWISE = "adapted_bf16"  # torch.compile of the plain model does too, by as much


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch.kwargs).loss


def pair_of(name: str, **kwargs: Any) -> CompiledPair:
    if name == ROUNDS_OTHERWISE:
        kwargs["rtol"] = RTOL_BF16
    return CompiledPair(MODELS[name], loss=own_loss, **kwargs)


@pytest.mark.parametrize("name", ["tied_llama", "gpt2"])
@ranks(2, limit_s=120)
def test_a_few_steps(name: str) -> None:
    pair_of(name).train(steps=4)


@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor")])
@pytest.mark.parametrize("name", MODELS)
@ranks(slow(2), limit_s=300)
def test_many_steps(name: str, backend: str) -> None:
    """Losses and parameters are the eager model's, from one graph that the first step made."""
    pair_of(name, backend=backend).train(MANY_STEPS if name == "llama" else STEPS)


@ranks(slow(2), limit_s=300)
def test_experts_one_after_the_other() -> None:
    """Mixtral's plain kernel loops over the experts that rows chose: graphs end there."""
    case = Case(partial(mixtral, "eager"), each_layer, batch_of)
    CompiledPair(case, loss=own_loss, fullgraph=False).train(MANY_STEPS, warm_up=12)


@ranks(slow(3), limit_s=300)
def test_three_ranks() -> None:
    pair_of("tied_llama").train()


@ranks(slow(4), limit_s=300)
def test_hybrid_sharding() -> None:
    pair_of("llama", mesh=make_mesh(2, 2)).train()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@ranks(slow(2), limit_s=300)
def test_bf16(name: str) -> None:
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    pair_of(name, mp_policy=policy, rtol=RTOL_BF16).train()


@ranks(slow(2), limit_s=300)
def test_batches_and_lengths_that_change() -> None:
    """With ``dynamic=True`` one graph serves all sizes."""
    batches = [batch_of(rows, length) for rows, length in [(12, 7), (4, 9), (8, 5), (16, 11)]]
    pair = pair_of("llama", batches=batches, compiling={"dynamic": True})
    pair.train(2 * len(batches))

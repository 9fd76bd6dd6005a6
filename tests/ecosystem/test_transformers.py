"""Promise: a language model of `transformers` trains, generates and saves as it does unsharded."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

import fsdp2
from benchmarks.kit.engine_rules import LLAMA, QWEN3, QWEN3_MOE_STACKED
from fsdp2 import MixedPrecisionPolicy, register_fsdp_forward_method, weights
from tests.ecosystem._programs import (
    VOCABULARY,
    Program,
    each_layer,
    full_state,
    llama,
    tokens,
    transformers,
)
from tests.kit.models import seeded
from tests.kit.parity import (
    assert_same,
    assert_same_gradients,
    assert_same_parameters,
    bits,
    names_of,
    shard,
    train_alike,
    whole,
)
from tests.kit.pool import ranks

pytestmark = pytest.mark.ecosystem

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("tied", [False, True])
@ranks(2, 3)
def test_llama_trains_like_the_unsharded_model(tied: bool) -> None:
    """Losses, gradients and weights of four AdamW steps are those of the unsharded model."""
    Program(llama(tied)).train(steps=4)


@ranks(2)
def test_a_loop_with_accumulation_and_clipping_trains_like_the_unsharded_model() -> None:
    """Accumulating without sync, clipping and a schedule give the unsharded model's weights."""
    program = Program(llama())
    schedules = [
        torch.optim.lr_scheduler.LinearLR(o, 0.25, total_iters=3)
        for o in (program.optimizer, program.reference_optimizer)
    ]
    for _ in range(3):
        for last in (False, True):
            program.model.set_requires_gradient_sync(last)
            program.backward(scale=0.5)
        norm, expected = (
            nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            for m in (program.model, program.reference)
        )
        assert expected > 0.5
        assert_same(norm, expected, "norm", program.rtol)
        program.step()
        for schedule in schedules:
            schedule.step()
    program.check()


@pytest.mark.parametrize("tied", [False, True])
@ranks(2)
def test_llama_in_bf16_trains_like_torch(tied: bool) -> None:
    """bf16 compute with fp32 reductions gives the losses, gradients and weights of torch's own."""
    train_alike(llama(tied), mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32))


@ranks(2)
def test_outputs_are_cast_inside_a_model_output() -> None:
    """The root's `output_dtype` casts what a `ModelOutput` holds; it stays one, and as torch's."""
    outputs = []
    for library in (fsdp2, torch_fsdp):
        model = seeded(llama().build)
        layers = library.MixedPrecisionPolicy(param_dtype=BF16)
        for layer in each_layer(model):
            library.fully_shard(layer, mp_policy=layers)
        root = library.MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32)
        library.fully_shard(model, mp_policy=root)
        torch.manual_seed(3)
        output = model(**tokens(2).kwargs)
        output.loss.backward()
        outputs.append(output)
        assert type(output).__name__ == "CausalLMOutputWithPast"
        assert output.logits.dtype is FP32
        assert output["logits"] is output.logits
        assert output.to_tuple()[1] is output.logits
        assert all(p.grad is not None for p in model.parameters())
    ours, theirs = outputs
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(ours.logits, theirs.logits)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("reentrant", [True, False])
@ranks(2)
def test_gradient_checkpointing_trains_like_the_unsharded_model(reentrant: bool, when: str) -> None:
    """Recomputed layers give the unsharded model's training, switched on before or after."""

    def enable(model: nn.Module) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    program = Program(llama(), prepare=enable if when == "before" else None)
    if when == "after":
        enable(program.model)
    runs = 0

    def count(module: nn.Module, args: object) -> None:
        nonlocal runs
        runs += 1

    program.model.model.layers[1].mlp.register_forward_pre_hook(count)
    program.train(steps=3)
    assert runs == 6


def prompts(rows: int) -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (rows, 4))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def without_end(model: nn.Module) -> nn.Module:
    """Let greedy generation run to its full length."""
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("registered", [True, False])
@ranks(2, 3)
def test_generate_gives_the_unsharded_models_tokens(registered: bool) -> None:
    """Greedy `generate` gives every rank the plain model's tokens, between two training steps."""
    program = Program(llama(), prepare=without_end)
    if registered:
        register_fsdp_forward_method(program.model, "generate")
    for _ in range(2):
        given = prompts(3)
        expected = program.reference.generate(**given, max_new_tokens=9, do_sample=False)
        assert expected.shape == (3, 13)
        assert len(expected[:, 4:].unique()) > 3, "a model that repeats itself tests nothing"
        found = program.model.generate(**given, max_new_tokens=9, do_sample=False)
        assert torch.equal(found, expected)
        program.backward()
        program.step()
    program.check()


@ranks(2)
def test_ranks_generate_from_prompts_of_their_own(rank: int) -> None:
    """With `synced_gpus`, ranks whose answers differ in length get the plain model's answers."""
    reference = without_end(seeded(llama().build)).eval()
    model = shard(without_end(seeded(llama().build)), llama()).eval()
    both = [prompts(1), prompts(1)]
    answers = [reference.generate(**p, max_new_tokens=9, do_sample=False)[0, 4:] for p in both]
    end = next(t for t in answers[0].tolist() if t not in answers[1].tolist())  # ends the first
    expected = reference.generate(**both[rank], max_new_tokens=9, do_sample=False, eos_token_id=end)
    found = model.generate(
        **both[rank], max_new_tokens=9, do_sample=False, eos_token_id=end, synced_gpus=True
    )
    assert torch.equal(found, expected)
    lengths = [None, None]
    dist.all_gather_object(lengths, found.shape[1])
    assert lengths[0] < lengths[1] == 13


@pytest.mark.parametrize("tied", [False, True])
@ranks(2, 3)
def test_a_saved_model_loads_in_plain_transformers(tied: bool, rank: int, tmp_path: Path) -> None:
    """`save_pretrained` of the full state loads with `from_pretrained`, bit for bit the same."""
    program = Program(llama(tied))
    program.train(steps=2)
    state = full_state(program.model)
    if rank == 0:
        program.model.save_pretrained(tmp_path, state_dict=state)
    dist.barrier()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    sharded = names_of(program.model)
    assert list(sharded) == list(names_of(loaded))
    for name, parameter in names_of(loaded).items():
        assert torch.equal(bits(parameter), bits(whole(sharded[name]))), name


@pytest.mark.parametrize("max_file_bytes", [10**9, 20_000])
@pytest.mark.parametrize("tied", [False, True])
@ranks(2)
def test_safetensors_go_to_transformers_and_back(
    tied: bool, max_file_bytes: int, rank: int, tmp_path: Path
) -> None:
    """`from_pretrained` reads what was streamed, and what `save_pretrained` wrote is scattered."""
    case = llama(tied)
    model = shard(seeded(case.build), case)
    fsdp2.checkpoint.save_safetensors(
        tmp_path, model, max_bytes=9_000, max_file_bytes=max_file_bytes
    )
    if rank == 0:
        plain = seeded(case.build, seed=5)
        plain.config.save_pretrained(tmp_path)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        for name, parameter in names_of(seeded(case.build)).items():
            assert torch.equal(names_of(loaded)[name], parameter), name
        plain.save_pretrained(tmp_path / "plain", max_shard_size=max_file_bytes)
    dist.barrier()
    keys = fsdp2.checkpoint.load_safetensors(tmp_path / "plain", model, max_bytes=9_000)
    assert keys == ([], [])
    for name, parameter in names_of(seeded(case.build, seed=5)).items():
        assert torch.equal(whole(names_of(model)[name]), parameter), name


@ranks(2)
def test_rank_0_loads_and_broadcasts(rank: int, tmp_path: Path) -> None:
    """Weights that only rank 0 loaded with `from_pretrained` reach all, and train as plain ones."""
    program = Program(llama())
    if rank == 0:
        program.reference.save_pretrained(tmp_path)
        state = transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    else:
        state = {}
    with torch.no_grad():
        for parameter in program.model.parameters():
            parameter.zero_()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(program.model, state, options=options)
    assert_same_parameters(program.model, program.reference, rtol=0.0)
    program.train(steps=2)


@ranks(2)
def test_a_model_built_on_meta_is_filled_and_trains() -> None:
    """A Llama built on `meta`, sharded, emptied onto the CPU and loaded trains as the plain one."""
    program = Program(llama())
    with torch.device("meta"):
        model = llama().build()
    shard(model, llama())
    buffers = dict(program.reference.named_buffers())
    model.to_empty(device="cpu")
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])  # `inv_freq` is in no state dict
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, copy.deepcopy(program.reference.state_dict()), options=options)
    program.model = model
    program.optimizer, program.reference_optimizer = program._optimizers()
    program.train(steps=2)


@ranks(2)
def test_padded_batches_of_ranks_train_alike() -> None:
    """Attention masks and ignored labels pass through a unit, whatever each rank's padding."""
    program = Program(llama())
    batch = program.batch()
    mask = torch.ones_like(batch.kwargs["input_ids"])
    mask[::2, -2:] = 0  # as many padded rows on each rank: the loss is a mean over labels
    labels = batch.kwargs["labels"].masked_fill(mask == 0, -100)
    batch.kwargs.update(attention_mask=mask, labels=labels)
    program.backward(batch)
    assert_same_gradients(program.model, program.reference, program.rtol)
    program.step()
    program.check()


@pytest.mark.parametrize("kind", ["LlamaConfig", "Qwen3Config", "Qwen3MoeConfig"])
def test_an_engine_is_laid_out_from_a_config_alone(kind: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 100}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    experts = {"num_experts": 4, "moe_intermediate_size": 24} if "Moe" in kind else {}
    config = getattr(transformers, kind)(**sizes, **heads, **experts)
    rules = {"L": LLAMA, "Q": QWEN3}[kind[0]] if not experts else QWEN3_MOE_STACKED
    layout = weights.tensor_parallel(config, 4, rules)
    at = "model.layers.1."
    assert layout[3][f"{at}self_attn.qkv_proj.weight"].shape == (16 + 8 + 8, 64)
    if experts:
        assert layout[3][f"{at}mlp.experts.w13_weight"].shape == (4, 2 * 6, 64)

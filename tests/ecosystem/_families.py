"""Families of models of `transformers`, built tiny from configs, and their training on ranks.

A family is a kind of model in one of four tasks. `tiny` makes its config: a field's size follows
from its name (`SIZES`), and `EXCEPTIONS` has what a family needs otherwise. `train` runs two steps
beside the unsharded model and returns the largest difference.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

import fsdp2
from tests.kit.local_sgd import LocalSGD
from tests.kit.models import seeded
from tests.kit.parity import make_mesh, names_of

pytest.importorskip("transformers")

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TASKS = {
    "causal": ("CAUSAL_LM", "AutoModelForCausalLM"),
    "masked": ("MASKED_LM", "AutoModelForMaskedLM"),
    "sequence": ("SEQ_TO_SEQ_CAUSAL_LM", "AutoModelForSeq2SeqLM"),
    "images": ("IMAGE_CLASSIFICATION", "AutoModelForImageClassification"),
}
"""For each task: the name of the table of its classes, and the class that reads it."""

LIBRARIES = {"fsdp2": fsdp2, "torch": torch_fsdp}
ROWS, LENGTH, STEPS = 2, 8, 2  # rows of each rank
VOCABULARY, WIDTH, HEADS = 83, 32, 4  # two ranks do not divide the rows of an embedding
TOKENS = (8, 32)  # ids of batches: no special token, and in each vocabulary


class Family(NamedTuple):
    """A kind of model in one task."""

    name: str
    task: str

    def __str__(self) -> str:
        return f"{self.name}-{self.task}"

    @classmethod
    def parse(cls, text: str) -> Family:
        return cls(*text.rsplit("-", 1))


def mapping(task: str) -> dict[str, Any]:
    """Return the names of a task's classes by the names of families."""
    return dict(getattr(modeling_auto, f"MODEL_FOR_{TASKS[task][0]}_MAPPING_NAMES"))


NEEDS_TIMM, NEEDS_NATTEN = "needs the package timm", "needs the package natten"
DECODER = "its config is that of the whole; the decoder is built from a part of it"
ASSISTANT = "an assistant: its forward takes states of another model"
UNTRIED = {
    Family("gemma3n", "causal"): NEEDS_TIMM,
    Family("gemma4_assistant", "causal"): ASSISTANT,
    Family("gemma4_unified_assistant", "causal"): ASSISTANT,
    Family("musicgen", "causal"): DECODER,
    Family("musicgen_melody", "causal"): DECODER,
    Family("nemo_speechlm", "sequence"): "its parts ask for sizes of each other",
    Family("voxtral_realtime", "sequence"): "its forward takes sound beside text",
    Family("dinat", "images"): NEEDS_NATTEN,
    Family("shieldgemma2", "images"): "its forward takes prompts with places for images",
    Family("timm_wrapper", "images"): NEEDS_TIMM,
}
"""Families that are not built here, with the reason."""
NOT_BUILT = (ImportError, ValueError, AttributeError, StrictDataclassError)
"""What is raised then."""

ALL = [Family(name, task) for task in TASKS for name in mapping(task)]
REFUSED = {
    # With torch's own each is a `RuntimeError` about plain tensors and `DTensor`s.
    Family("modernvbert", "masked"): fsdp2.StateError,  # calls the embedding inside of a unit
    Family("squeezebert", "masked"): fsdp2.StateError,  # calls `layer.forward`
    Family("reformer", "causal"): RuntimeError,  # runs layers in a backward of its own
    Family("reformer", "masked"): RuntimeError,
}
"""Families that use weights of a unit outside of its forward, and what is raised."""
FAMILIES = [family for family in ALL if family not in UNTRIED]

LAYERS = r"(num|n|t2u|decoder|encoder|speech|text|mtp)?(_|num|hidden|encoder|decoder)*_layers?"
SIZES = {
    # The first pattern that matches a field's whole name decides. None leaves the default.
    r"type_vocab_size": None,
    r".*vocab_size.*": VOCABULARY,
    r"codebook_size": 64,
    r"max_position_embeddings|n_positions|max_seq_len|n_ctx|max_(source|target)_positions|"
    r"model_max_length|max_pos_emb": 64,
    r"hidden_size|d_model|n_embd|embedding_size|embed_dim|width|dim|emb_dim|embedding_dim|"
    r"true_hidden_size|text_hidden_size|attention_hidden_size|hidden_size_global|hidden_dim|"
    r"word_embed_proj_dim|pooler_hidden_size|projection_dim|projection_size|input_size|"
    r"output_dim|out_hidden_size|vision_output_dim|cross_attention_hidden_size|codebook_dim|"
    r"prediction_head_size|intra_bottleneck_size|adapter_(in|out)_dim|adapter_input_size": WIDTH,
    r"(.*_)?intermediate_size(_mlp)?|d_ff|(.*_)?ffn_dim|n_inner|dff|dim_ff|d_inner|"
    r"(expert_)?ffn_hidden_size": 44,
    LAYERS + r"|n_layer|depth|num_blocks": 2,
    r"(.*_)?(attention_heads|num_heads|n_heads?|linear_num_value_heads)": HEADS,
    r"(.*_)?(num_key_value_heads|num_kv_heads|linear_num_key_heads)": 2,
    r"num_global_key_value_heads": 2,
    r"(.*_)?(head_dim|head_size)|d_kv|d_head|kv_channels": WIDTH // HEADS,
    r"rotary_dim": WIDTH // HEADS // 2,
    r"(q|kv|o)_lora_rank": 12,
    r"(moe_)?num_experts|num_local_experts|n_routed_experts|moe_num_experts": 4,
    r"num_experts_per_tok(en)?|(moe_)?top_?k|moe_k|zero_expert_num": 2,
    r"n_group|topk_group|num_expert_group|n_groups|mamba_n_?groups": 1,
    r"image_size": 32,
    r"pad_token_id": 0,
    r"(bos|decoder_start)_token_id": 1,
    r"eos_token_id|forced_eos_token_id": 2,
    r".*token_(id|index)": VOCABULARY - 1,
}
RULES = [(re.compile(pattern), size) for pattern, size in SIZES.items()]
RANDOM = r"drop|jitter|noise"  # what a field is named that makes a forward random

HYBRID = ["linear_attention", "hybrid"]
ZAMBA = {"layers_block_type": HYBRID * 2, "num_hidden_layers": 4}  # two share weights
ZAMBA |= {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 16}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
ATTENTION = ["full_attention", "sliding_attention"]
WINDOWS = {"embed_dim": 24, "image_size": 64, "window_size": 2}  # of 3, 6, 12 and 24 heads
INDEXER = {"indexer_budget": 4, "indexer_compress_ratio": 2, "indexer_head_dim": 8}
INDEXER |= {"indexer_n_heads": HEADS, "indexer_kv_heads": 1}
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bit": {"num_groups": 4},
    "blt": {"encoder_hash_byte_group_vocab": VOCABULARY},
    "cohere_compass_text": {
        "layer_types": ATTENTION,
        "rope_parameters": {name: dict(ROPE) for name in ATTENTION},
    },
    "cvt": {"depth": [1, 2, 3], "embed_dim": [16, 48, 96], "drop_path_rate": [0.0] * 3},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "donut-swin": WINDOWS,
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 44,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    },
    "dots3_note_text": {"num_key_value_heads": HEADS},
    "efficientnet": {"width_coefficient": 0.5, "depth_coefficient": 0.3, "hidden_dim": 640},
    "encoder-decoder": {"decoder_start_token_id": 1, "pad_token_id": 0},
    "esm": {"vocab_size": VOCABULARY, "pad_token_id": 0, "mask_token_id": 3},
    "esmc": {"num_key_value_heads": HEADS},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granite_speech": {"encoder_config": {"context_size": 20}},
    "granite_speech_plus": {"encoder_config": {"context_size": 20}},
    "hgnet_v2": {"hidden_sizes": [256, 512, 1024, 2048]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"qk_head_dim": None},
    "longt5": {"decoder_start_token_id": 1},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "mobilevitv2": {"image_size": 128},
    "moshi": {"audio_vocab_size": VOCABULARY},
    "nemotron": {"num_key_value_heads": 2},
    "neomme": {"head_dim": 16, "hidden_size": 64},
    "perceiver": {
        "max_position_embeddings": LENGTH,
        "d_latents": WIDTH,
        "num_latents": 16,
        "num_self_attends_per_block": 2,
    },
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [2, 4]},
    "siglip2": {"vision_config": {"patch_size": 4}},
    "swin": WINDOWS,
    "swinv2": WINDOWS,
    "switch_transformers": {"decoder_start_token_id": 1},
    "t5": {"decoder_start_token_id": 1},
    "textnet": {"hidden_sizes": [64, 64, 128, 256, 512], "image_size": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": ZAMBA,
    "zamba2": ZAMBA,
    "zaya": {"num_experts_per_tok": 1},
}


def tiny(family: Family) -> Any:
    """Return the config of a family, with small sizes and nothing that is random."""
    default = CONFIG_MAPPING[family.name]
    try:
        given = _shrunk(default())
    except ValueError:  # the default is only a form for two configs
        part = CONFIG_MAPPING["bert"]
        given = {name: _shrunk(part()) | {"model_type": "bert"} for name in ("encoder", "decoder")}
    given = _merged(given, EXCEPTIONS.get(family.name, {}))
    if family == ("reformer", "causal"):
        given["is_decoder"] = True
    config = default(**given)
    classes = mapping(family.task)[family.name]
    if not isinstance(classes, str):  # the class that reads the table asks the config which
        config.architectures = [classes[0]]
    return config


def _shrunk(default: Any) -> dict[str, Any]:
    """Return arguments that make a config like this one small; parts of it are dicts."""
    values = default.to_dict()
    given: dict[str, Any] = {"use_cache": False} if "use_cache" in values else {}
    layers = 2
    for name in ("layer_types", "layers_block_type"):
        kinds = list(dict.fromkeys(values.get(name) or ()))
        if len(kinds) > 1:
            given[name], layers = kinds, len(kinds)  # one of each
    for name, value in values.items():
        if name in getattr(type(default), "attribute_map", {}):
            continue  # another name of a field
        if name == "mlp_layer_types" and value:
            kinds = list(dict.fromkeys(value))
            given[name] = [kinds[-1 - index % len(kinds)] for index in range(layers)][::-1]
        elif name == "depths" and isinstance(value, (list, tuple)):
            given[name] = [1] * len(value)
        elif name == "hidden_sizes":
            given[name] = [size // 4 if size >= 64 else size for size in value]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            if re.search(RANDOM, name):
                given[name] = type(value)(0)
            else:
                size = next((s for pattern, s in RULES if pattern.fullmatch(name)), None)
                if size == 2 and "layer" in name:
                    size = layers
                if size is not None and (value > size or size < 3):
                    given[name] = size
    if "kv_lora_rank" in given and "num_key_value_heads" in given:
        given["num_key_value_heads"] = HEADS  # keys of all heads come from the small ones
    for name in getattr(default, "sub_configs", {}):
        part = getattr(default, name, None)
        if isinstance(part, transformers.PreTrainedConfig):
            given[name] = {**_shrunk(part), "model_type": part.model_type}
    return given


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {**one, **other}
    for name in one.keys() & other.keys():
        if isinstance(one[name], dict):
            both[name] = _merged(one[name], other[name])
    return both


def build(family: Family) -> nn.Module:
    """Build a tiny model whose forward is not random."""
    model = getattr(transformers, TASKS[family.task][1]).from_config(tiny(family))
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0  # some families give a number of their own
    if model.loss_type is None:
        model.loss_type = "ForCausalLM"  # else a forward logs that it takes this: no graph has that
    return model.train()


def batch_of(model: Any, family: Family, rows: int) -> dict[str, Tensor]:
    """Return a random batch for the forward of a model."""
    ids = torch.randint(*TOKENS, (rows, LENGTH))
    config = getattr(model.config, "vision_config", model.config)
    size = getattr(config, "image_size", 64)
    size = size if isinstance(size, int) else size[0]
    image = torch.randn(rows, 3, size, size)
    if family.task != "images":
        given = {"input_ids": ids, "labels": ids}
        return given | ({"pixel_values": image} if family.name == "git" else {})
    labels = {"labels": torch.randint(2, (rows,))}
    if family.name == "siglip2":  # patches, of images of different shapes
        return labels | {
            "pixel_values": torch.randn(rows, 4, 3 * config.patch_size**2),
            "pixel_attention_mask": torch.ones(rows, 4, dtype=torch.long),
            "spatial_shapes": torch.full((rows, 2), 2),
        }
    if family.name == "imagegpt":  # colours as tokens
        return labels | {"input_ids": ids}
    return labels | {"pixel_values": image}


def units_of(model: Any) -> list[nn.Module]:
    """Return the modules that a model wants whole, inner ones first.

    Where it names no classes, its longest list of modules stands in for them.
    """
    classes = set(model._no_split_modules or ())
    depths = {module: name.count(".") for name, module in model.named_modules() if name}
    units = [module for module in depths if type(module).__name__ in classes]
    if not units:
        lists = [module for module in depths if isinstance(module, nn.ModuleList)]
        units = list(max(lists, key=len, default=()))
    units = [unit for unit in units if any(True for _ in unit.parameters())]
    return sorted(units, key=depths.__getitem__, reverse=True)


class Trained(NamedTuple):
    """What came of a training beside the unsharded model."""

    blocks: int  # units without the root
    difference: float  # the largest one, relative
    where: str  # what it was


def loss_of(model: nn.Module, batch: dict[str, Tensor], seed: int) -> Tensor:
    """Return the loss; what still draws random numbers draws the same ones for a seed."""
    transformers.set_seed(seed)
    output = model(**{name: value.clone() for name, value in batch.items()})  # FSMT writes to them
    loss = output.get("loss")
    return nn.functional.cross_entropy(output[0], batch["labels"]) if loss is None else loss


def train(family: Family, library: str, compiled: bool = False) -> Trained:
    """Train a sharded model for two steps, beside the unsharded one on every rank's rows.

    The unsharded model runs the ranks' rows one after the other, so that each kernel has the same
    shapes in both models. Where no order of sums differs, bits are the same.
    """
    model, reference = (seeded(partial(build, family)) for _ in range(2))
    units, mesh = units_of(model), make_mesh()
    for unit in (*units, model):
        LIBRARIES[library].fully_shard(unit, mesh=mesh)
    optimizers = [LocalSGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    run = fsdp2.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    rank, size = dist.get_rank(), dist.get_world_size()
    found, least = [(0.0, "")], 0.0
    for step in range(STEPS):
        torch.manual_seed(step)
        parts = [batch_of(reference, family, ROWS) for _ in range(size)]
        seeds = [size * step + index for index in range(size)]
        loss = loss_of(run, parts[rank], seeds[rank])
        loss.backward()
        for index in range(size):
            expected = loss_of(reference, parts[index], seeds[index])
            (expected / size).backward()
            if index == rank:
                found.append((_difference(loss, expected), f"loss {step}"))
        # Some gradients are sums that cancel, and some parameters are only the sums of those, of
        # earlier steps too.
        least = max(least, 1e-3 * _largest_gradient(reference))
        found += _differences(model, reference, f"gradient {step}", least)
        for optimizer in optimizers:
            optimizer.step()
        found += _differences(model, reference, f"parameter {step}", least)
        for optimizer in optimizers:
            optimizer.zero_grad()
    return Trained(len(units), *_largest_of_ranks(found))


def _largest_gradient(model: nn.Module) -> float:
    grads = [p.grad for p in model.parameters() if p.grad is not None and p.grad.numel()]
    return max((grad.abs().max().item() for grad in grads), default=0.0)


def _differences(
    model: nn.Module, reference: nn.Module, kind: str, least: float
) -> Iterator[tuple[float, str]]:
    """Yield the differences of gradients or parameters, by name."""
    given, expected = names_of(model), names_of(reference)
    assert list(given) == list(expected)
    pairs = {name: (given[name], parameter) for name, parameter in expected.items()}
    if kind.startswith("gradient"):
        pairs = {name: (mine.grad, theirs.grad) for name, (mine, theirs) in pairs.items()}
    for name, (mine, theirs) in pairs.items():
        if mine is not None and theirs is not None:
            yield _difference(mine, theirs, least), f"{kind} of {name}"
        else:  # None is a gradient of zeros
            there = _held(mine) if theirs is None else theirs
            assert there is None or not there.any(), f"only one model has a {kind} of {name}"


def _difference(actual: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Return the largest difference of what this rank holds.

    It is relative to the largest element of the whole tensor, or to `least`.
    """
    if not expected.numel():
        return 0.0
    scale = max(expected.abs().max().item(), least)
    if isinstance(actual, DTensor) and actual.placements == (Shard(0),):
        parts = expected.chunk(dist.get_world_size())
        rank = dist.get_rank()
        expected = parts[rank] if rank < len(parts) else expected[:0]
    actual = _held(actual).detach()
    assert actual.shape == expected.shape
    if not expected.numel():
        return 0.0
    apart = (actual - expected.detach()).abs().max().item()
    assert math.isfinite(apart), "a number that is not finite"
    return apart / scale if apart else 0.0


def _held(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _largest_of_ranks(found: list[tuple[float, str]]) -> tuple[float, str]:
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, max(found))
    return max(everywhere)


def step_compiled(family: Family) -> None:
    """Run forward and backward of the compiled unsharded model; raise if it is not one graph."""
    model = seeded(partial(build, family))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss_of(compiled, batch_of(model, family, ROWS), 0).backward()


def tell_of_trainings(families: Sequence[str], library: str, compiled: bool) -> None:
    """On a rank: train these families one after the other, and hand on what was found."""
    found = []
    for family in families:
        try:
            found.append(train(Family.parse(family), library, compiled))
        except Exception as error:  # on each rank, or the others are waited for in vain
            name, text = type(error).__name__, str(error).strip().partition("\n")[0]
            found.append(Trained(0, math.inf, f"{name}: {text}"))
    pytest.skip(json.dumps(found))


def tell_of_compiling(family: str) -> None:
    """On a rank: compile the unsharded model; the body fails if it is not one graph."""
    step_compiled(Family.parse(family))
    pytest.skip(json.dumps([Trained(0, 0.0, "")]))


tell_of_trainings.body = tell_of_trainings  # type: ignore[attr-defined]  # what a rank looks for
tell_of_compiling.body = tell_of_compiling  # type: ignore[attr-defined]  # the same

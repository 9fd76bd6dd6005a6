"""How vLLM lays out Llama, Qwen3 and Qwen3-MoE: rules for `weights.tensor_parallel`.

Source: vLLM's `QKVParallelLinear`, `MergedColumnParallelLinear`, `VocabParallelEmbedding` (rows are
filled up to a multiple of 64) and `FusedMoE`. SGLang names and divides tensors in the same way.
"""

from __future__ import annotations

from fsdp2.weights import Cut

_LAYER = "model.layers.*."
_HEADS, _KV_HEADS = "num_attention_heads", "num_key_value_heads"


def _fused_attention(kind: str) -> list[Cut]:
    heads = {"q": _HEADS, "k": _KV_HEADS, "v": _KV_HEADS}
    return [Cut(f"{_LAYER}self_attn.{n}_proj.{kind}", 0, heads[n]) for n in "qkv"]


def _same(name: str, dim: int | None = None, heads: int | str = 0, pad: int = 0) -> dict[str, Cut]:
    return {name: Cut(name, dim, heads, pad)}


LLAMA: dict[str, Cut | list[Cut]] = {
    **_same("model.embed_tokens.weight", 0, pad=64),
    **_same("lm_head.weight", 0, pad=64),
    **_same("model.norm.weight"),
    **_same(f"{_LAYER}*_layernorm.weight"),
    f"{_LAYER}self_attn.qkv_proj.weight": _fused_attention("weight"),
    f"{_LAYER}self_attn.qkv_proj.bias": _fused_attention("bias"),
    **_same(f"{_LAYER}self_attn.o_proj.weight", 1, _HEADS),
    f"{_LAYER}mlp.gate_up_proj.weight": [
        Cut(f"{_LAYER}mlp.{name}_proj.weight", 0) for name in ("gate", "up")
    ],
    **_same(f"{_LAYER}mlp.down_proj.weight", 1),
}
QWEN3: dict[str, Cut | list[Cut]] = {**LLAMA, **_same(f"{_LAYER}self_attn.*_norm.weight")}
QWEN3_MOE: dict[str, Cut | list[Cut]] = {
    **QWEN3,
    **_same(f"{_LAYER}mlp.gate.weight"),
    f"{_LAYER}mlp.experts.w13_weight": [
        Cut(f"{_LAYER}mlp.experts.#.{name}_proj.weight", 0) for name in ("gate", "up")
    ],
    f"{_LAYER}mlp.experts.w2_weight": Cut(f"{_LAYER}mlp.experts.#.down_proj.weight", 1),
}
QWEN3_MOE_STACKED: dict[str, Cut | list[Cut]] = {
    **QWEN3_MOE,
    f"{_LAYER}mlp.experts.w13_weight": Cut(f"{_LAYER}mlp.experts.gate_up_proj", 1, parts=2),
    f"{_LAYER}mlp.experts.w2_weight": Cut(f"{_LAYER}mlp.experts.down_proj", 2),
}
"""For trainers that keep the experts of a layer in one parameter, as transformers 5 does."""

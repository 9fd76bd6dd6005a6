"""Shapes of decoders as transformers names their parameters; integers and names only."""

from __future__ import annotations

from dataclasses import dataclass

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Decoder:
    """Sizes of a decoder. Heads have the names of a config of transformers, for rules."""

    layers: int
    hidden: int
    feed: int
    num_attention_heads: int
    num_key_value_heads: int
    head: int = 128
    vocabulary: int = 128256
    experts: int = 0
    has_head_norms: bool = False

    def shapes(self) -> Shapes:
        """Return the parameters (transformers 4.57: experts are modules of their own)."""
        found: Shapes = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            found |= self._block(f"model.layers.{layer}.")
        head = {"lm_head.weight": (self.vocabulary, self.hidden)}
        return found | {"model.norm.weight": (self.hidden,)} | head

    def _block(self, at: str) -> Shapes:
        queries = self.num_attention_heads * self.head
        keys = self.num_key_value_heads * self.head
        found: Shapes = {
            f"{at}self_attn.q_proj.weight": (queries, self.hidden),
            f"{at}self_attn.k_proj.weight": (keys, self.hidden),
            f"{at}self_attn.v_proj.weight": (keys, self.hidden),
            f"{at}self_attn.o_proj.weight": (self.hidden, queries),
            f"{at}input_layernorm.weight": (self.hidden,),
            f"{at}post_attention_layernorm.weight": (self.hidden,),
        }
        if self.has_head_norms:
            found |= {f"{at}self_attn.{name}_norm.weight": (self.head,) for name in "qk"}
        if self.experts:
            found[f"{at}mlp.gate.weight"] = (self.experts, self.hidden)
        places = [f"mlp.experts.{e}." for e in range(self.experts)] or ["mlp."]
        for place in places:
            for name in ("gate", "up"):
                found[f"{at}{place}{name}_proj.weight"] = (self.feed, self.hidden)
            found[f"{at}{place}down_proj.weight"] = (self.hidden, self.feed)
        return found


DECODERS = {  # "The Llama 3 Herd of Models" (2024), table 3
    "8B": Decoder(32, 4096, 14336, 32, 8),
    "70B": Decoder(80, 8192, 28672, 64, 8),
}

"""What the tests with other libraries share: tiny configs, token batches, the loss of a language
model, and `Program`, which trains a sharded model beside its plain twin as a user's program does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from tests.kit.models import Batch, Case
from tests.kit.parity import Pair, assert_same, global_mean

transformers = pytest.importorskip("transformers")

LENGTH, VOCABULARY = 7, 83


def tokens(rows: int, vocabulary: int = VOCABULARY) -> Batch:
    """Return token ids, which are their own labels."""
    ids = torch.randint(3, vocabulary, (rows, LENGTH))  # 0 to 2 are padding, begin and end
    return Batch((), {"input_ids": ids, "labels": ids})


def tiny_llama(tied: bool = False) -> nn.Module:
    """Build a Llama of three layers with sizes that two and three ranks do not divide."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=30,
        intermediate_size=37,
        num_hidden_layers=3,
        num_attention_heads=5,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


def each_layer(model: nn.Module) -> Sequence[nn.Module]:
    """Return the decoder layers of a causal language model."""
    return list(model.model.layers)  # type: ignore[union-attr, arg-type]  # a ModuleList


def llama(tied: bool = False) -> Case:
    """Return the tiny Llama whose units are its decoder layers."""
    return Case(partial(tiny_llama, tied), each_layer, tokens)


def adamw(parameters: list[nn.Parameter], lr: float = 1e-2) -> torch.optim.Optimizer:
    """Make AdamW with an epsilon far above rounding: it divides by gradients, small ones too."""
    return torch.optim.AdamW(parameters, lr=lr / 10, weight_decay=0.01, eps=1e-4)


class Program(Pair):
    """A `Pair` on the model's own loss, with AdamW, beside one forward of the global batch."""

    def __init__(
        self,
        case: Case,
        *,
        optimizer: Callable[..., torch.optim.Optimizer] = adamw,
        rtol: float = 2e-5,
        in_parts: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(case, optimizer=optimizer, **kwargs)
        # AdamW divides by gradients: what rounding moved in one step is several times more in the
        # next, and how it rounds depends on the CPU.
        self.first_rtol, self.later_rtol = rtol, 4 * rtol
        self.in_parts = in_parts  # the reference runs each rank's rows apart: bf16 rounds alike

    def run(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(*batch.args, **batch.kwargs).loss

    def run_reference(self, batch: Batch) -> Tensor:
        return self.run(self.reference, batch)

    def run_parts(self, batch: Batch) -> list[Tensor]:
        """Return the reference's loss on each rank's part."""
        count = dist.get_world_size()
        return [self.run(self.reference, batch.chunk(index, count)) for index in range(count)]

    def backward(self, batch: Batch | None = None, scale: float = 1.0) -> None:
        """Run forward and backward of both and compare the losses."""
        if not self.in_parts:
            return super().backward(batch, scale)
        batch = self.batch() if batch is None else batch
        loss = self.run(self.model, self.local(batch))
        (loss * scale).backward()
        parts = self.run_parts(batch)
        for part in parts:
            (part * scale).backward()
        for parameter in self.reference.parameters():
            if parameter.grad is not None:
                parameter.grad /= len(parts)
        assert_same(global_mean(loss), torch.stack(parts).mean(), "loss", self.rtol)
        return None


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the full state dict, as a user's program asks torch for it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return get_model_state_dict(model, options=options)

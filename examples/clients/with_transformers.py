"""Load a model of transformers in shards, train it, save it shard by shard, and load it again.

    torchrun --nproc-per-node 2 examples/clients/with_transformers.py FOLDER

The last line says whose `FSDPModule` the model has.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, DistributedConfig, LlamaConfig, PreTrainedModel

PLAN = {"model.embed_tokens": "free_full_weight", "model.layers.*": "free_full_weight"}


def load(folder: str) -> PreTrainedModel:
    config = DistributedConfig(fsdp_size=dist.get_world_size(), fsdp_plan=PLAN)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)


def train(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in tokens.to(model.device).chunk(4):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"loss {loss.item():.6f}", flush=True)


def main(folder: str) -> None:
    dist.init_process_group()
    if dist.get_rank() == 0:  # in place of a download
        config = LlamaConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(f"{folder}/initial")
    dist.barrier()
    torch.manual_seed(dist.get_rank())  # each rank has its own rows
    tokens = torch.randint(3, 100, (16, 12))
    model = load(f"{folder}/initial")
    train(model, tokens)
    model.save_pretrained(f"{folder}/shards", distributed_checkpoint=True)
    model = load(f"{folder}/shards")
    train(model, tokens)
    model.save_pretrained(f"{folder}/whole")  # one file, for anybody
    if dist.get_rank() == 0:
        home = next(c for c in type(model).__mro__ if c.__name__ == "FSDPModule").__module__
        print(f"sharded by {home}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

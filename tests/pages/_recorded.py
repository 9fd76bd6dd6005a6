"""One rank of a short recorded run, for ``scripts/pictures``: torchrun starts four of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fsdp2

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from _model import ModelConfig, Transformer

STEPS = 4


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Transformer(ModelConfig(width=256, layers=6, heads=4, sequence_length=128))
    for block in model.blocks:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 255, (2, 128))
    record: Any = fsdp2.record
    with record(model, folder):
        for _ in range(STEPS):
            model(tokens, tokens).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()  # gloo may abort a rank whose peer has gone
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

"""Train a small model, and record digests of its values: see docs/guides/same-bits.md."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import fsdp2

SLOTS = 8
folder, *defects = sys.argv[1:]
if "RANK" in os.environ:
    dist.init_process_group()
else:  # without torchrun: one rank
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
torch.set_num_threads(1)  # the same number of threads in every run
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.dropout(F.gelu(self.up(self.norm(x))), 0.1)
        if "kernel" in defects and clock == (3, 5):
            hidden = hidden * (1 + 1e-6)  # simulates a kernel that sums in another order
        return x + self.down(hidden)


model = nn.Sequential(nn.Embedding(64, 32), Block(), Block(), nn.Linear(32, 64))
fsdp2.fully_shard(model[1])
fsdp2.fully_shard(model[2])
fsdp2.fully_shard(model)
mine = fsdp2.reproducible(model, slots=SLOTS)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

with fsdp2.debug.record_bits(model, folder) as bits:
    for step in range(5):
        batch = torch.randint(64, (SLOTS, 4, 9), generator=torch.Generator().manual_seed(step))
        losses = []
        for slot in mine:
            clock = step, slot
            logits = model(batch[slot, :, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[slot, :, 1:].flatten())
            loss.backward()
            bits.note("loss", loss)
            losses.append(loss.detach())
        fsdp2.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = fsdp2.mean_over_slots(model, losses)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item():.4f}")
dist.destroy_process_group()

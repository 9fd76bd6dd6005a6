"""Step 3: stop after some steps, and go on later, on another number of ranks."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import fully_shard
from parts import Model, loss_of, make_batch, mean_over_ranks, say, say_memory

steps = int(sys.argv[1])
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
rank, ranks = mesh.get_rank(), mesh.size()

torch.manual_seed(0)
model = Model()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

begin = 0
if os.path.exists("checkpoint"):
    begin = fsdp2.checkpoint.load("checkpoint", model, optimizer)["step"]
    say(f"go on at step {begin}, on {ranks} ranks")

for step in range(begin, steps):
    loss = loss_of(model, make_batch(step, rank, ranks))
    loss.backward()
    optimizer.step()
    if step == begin:
        say_memory(model, optimizer)
    optimizer.zero_grad()
    mean = mean_over_ranks(loss)
    if step % 10 == 9:
        say(f"step {step}: loss {mean:.2f}")
fsdp2.checkpoint.save("checkpoint", model, optimizer, extra={"step": steps})
dist.destroy_process_group()

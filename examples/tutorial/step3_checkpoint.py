"""Step 3: stop after some steps, and resume later on a different number of ranks."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import fully_shard
from parts import Model, loss_of, make_batch, mean_over_ranks, say, say_memory

steps, folder = int(sys.argv[1]), "runs/tutorial"
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
rank, ranks = mesh.get_rank(), mesh.size()

torch.manual_seed(0)
model = Model()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

begin = 0
if os.path.exists(folder):  # all ranks see the same files, so all load or none does
    begin = fsdp2.checkpoint.load(folder, model, optimizer)["step"]
    say(f"go on at step {begin}, on {ranks} ranks")

for step in range(begin, steps):
    loss = loss_of(model, make_batch(step, rank, ranks))
    loss.backward()
    optimizer.step()
    if step == begin:
        say_memory(model, optimizer)
    optimizer.zero_grad()
    if step % 10 == 9:
        mean = mean_over_ranks(loss)
        say(f"step {step}: loss {mean:.2f}")
# Not under `if rank == 0:`. Every rank writes its part.
if steps > begin:
    fsdp2.checkpoint.save(folder, model, optimizer, extra={"step": steps})
    say(f"saved {sum(name.endswith('.distcp') for name in os.listdir(folder))} files")
dist.destroy_process_group()

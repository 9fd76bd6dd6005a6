"""Step 1: the same loop, with the model sharded over the ranks."""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import fully_shard
from parts import Block, Model, loss_of, make_batch, mean_over_ranks, say, say_memory, say_plan

# Join the ranks that torchrun started. WORLD_SIZE is their number.
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
rank, ranks = mesh.get_rank(), mesh.size()

# Every rank builds the same model.
torch.manual_seed(0)
model = Model()
batch = make_batch(0, rank, ranks)[:, :-1]
# Each Block will be a unit. Nothing is sharded yet.
plan = fsdp2.plan(model, mesh=ranks, policy={Block}, batch=batch, optimizer=torch.optim.AdamW)
say_plan(plan)

for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
# After fully_shard, because it replaces the parameters.
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(30):
    loss = loss_of(model, make_batch(step, rank, ranks))
    loss.backward()
    optimizer.step()
    if step == 0:
        say_memory(model, optimizer)
    optimizer.zero_grad()
    if step % 10 == 9:
        # Every rank takes part in the mean. Then one of them prints.
        mean = mean_over_ranks(loss)
        say(f"step {step}: loss {mean:.2f}")
dist.destroy_process_group()

"""Step 1: the same loop, with the model sharded over the ranks."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import fully_shard
from parts import Block, Model, loss_of, make_batch, mean_over_ranks, say, say_memory, say_wire

mesh = init_device_mesh("cpu", (2,))  # joins the ranks that torchrun started
rank, ranks = mesh.get_rank(), mesh.size()

torch.manual_seed(0)  # every rank builds the same model
model = Model()
batch = make_batch(0, rank, ranks)[:, :-1]
plan = fsdp2.plan(model, mesh=ranks, policy={Block}, batch=batch)  # before anything is sharded
say_wire(plan.step.collectives)

for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after fully_shard

for step in range(30):
    loss = loss_of(model, make_batch(step, rank, ranks))
    loss.backward()
    optimizer.step()
    if step == 0:
        say_memory(model, optimizer)
    optimizer.zero_grad()
    mean = mean_over_ranks(loss)
    if step % 10 == 9:
        say(f"step {step}: loss {mean:.2f}")
dist.destroy_process_group()

"""Step 2: compute in bf16, and two backwards per optimizer step."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import MixedPrecisionPolicy, fully_shard
from parts import Block, Model, loss_of, make_batch, mean_over_ranks, say, say_memory, say_plan

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
rank, ranks = mesh.get_rank(), mesh.size()

torch.manual_seed(0)
model = Model()
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
micro_batch = make_batch(0, rank, ranks).chunk(2)[0][:, :-1]
plan = fsdp2.plan(
    model,
    mesh=ranks,
    policy={Block},
    batch=micro_batch,
    mp_policy=precision,
    optimizer=torch.optim.AdamW,
)
say_plan(plan)

for block in model.blocks:
    fully_shard(block, mesh=mesh, mp_policy=precision)
fully_shard(model, mesh=mesh, mp_policy=precision)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(30):
    first, last = make_batch(step, rank, ranks).chunk(2)
    total = torch.zeros(())
    for micro_batch in (first, last):
        with fsdp2.no_sync(model) if micro_batch is first else nullcontext():
            loss = loss_of(model, micro_batch) / 2
            loss.backward()
        total += loss.detach()
    optimizer.step()
    if step == 0:
        say_memory(model, optimizer)
        weight = model.head.weight
        say(f"a parameter is {weight.dtype}, its gradient {weight.grad.dtype}")
    optimizer.zero_grad()
    if step % 10 == 9:
        mean = mean_over_ranks(total)
        say(f"step {step}: loss {mean:.2f}")
dist.destroy_process_group()

"""Step 5: compile the whole sharded model, including its collectives."""

import os

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from fsdp2 import fully_shard
from parts import Model, loss_of, make_batch, mean_over_ranks, say, say_memory

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
rank, ranks = mesh.get_rank(), mesh.size()

torch.manual_seed(0)
model = Model()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

# The default, inductor, generates fast code with a C++ compiler. "aot_eager" needs none.
compiled = fsdp2.compile(model, fullgraph=True, backend="aot_eager")

for step in range(30):
    loss = loss_of(compiled, make_batch(step, rank, ranks))
    loss.backward()
    optimizer.step()
    if step == 0:
        say_memory(model, optimizer)
    optimizer.zero_grad()
    if step % 10 == 9:
        mean = mean_over_ranks(loss)
        say(f"step {step}: loss {mean:.2f}")
say(f"graphs compiled: {counters['stats']['unique_graphs']}")

with torch.profiler.profile() as seen:  # of one more forward and backward
    loss_of(compiled, make_batch(30, rank, ranks)).backward()
sent = [event.name for event in seen.events() if event.name.startswith("c10d::")]
say(f"all_gather: {sum('allgather' in name for name in sent)} times")
say(f"reduce_scatter: {sum('reduce_scatter' in name for name in sent)} times")
dist.destroy_process_group()

"""Step 4: also split each block over two ranks, on a mesh of two by two."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fsdp2
from fsdp2 import fully_shard
from parts import Model, loss_of, make_batch, mean_over_ranks, say, say_memory, say_plan

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
data, tensor = mesh["data"], mesh["tensor"]

torch.manual_seed(0)
model = Model()
by_columns, by_rows = ColwiseParallel(), RowwiseParallel()
for block in model.blocks:
    cuts = {f"attention.{name}": by_columns for name in ("query", "key", "value")}
    cuts |= {"attention.out": by_rows, "feed_forward.up": by_columns, "feed_forward.down": by_rows}
    parallelize_module(block, tensor, cuts)  # first: split the computation
    fully_shard(block, mesh=data)  # then: split the storage
fully_shard(model, mesh=data)
optimizer = fsdp2.optim.local(torch.optim.AdamW, model.parameters(), lr=3e-3)

weight = model.blocks[0].attention.query.weight
say(f"a weight of {tuple(weight.shape)}, here {tuple(weight.to_local().shape)}")
# The rank along `data`, not the global rank: ranks along `tensor` need the same rows.
rank, ranks = data.get_local_rank(), data.size()
batch = make_batch(0, rank, ranks)[:, :-1]
say_plan(fsdp2.plan(model, batch=batch, optimizer=torch.optim.AdamW))

for step in range(30):
    loss = loss_of(model, make_batch(step, rank, ranks))
    loss.backward()
    norm = fsdp2.clip_grad_norm_(model.parameters(), max_norm=10.0)
    optimizer.step()
    if step == 0:
        say_memory(model, optimizer)
        say(f"norm of the gradients: {norm:.2f}")
    optimizer.zero_grad()
    if step % 10 == 9:
        mean = mean_over_ranks(loss)
        say(f"step {step}: loss {mean:.2f}")

with torch.no_grad(), CommDebugMode() as seen:  # counts collectives
    model(make_batch(30, rank, ranks)[:, :-1])
sums = seen.get_comm_counts()[torch.ops.c10d_functional.all_reduce]
say(f"sums over the tensor axis in a forward: {sums}")
dist.destroy_process_group()

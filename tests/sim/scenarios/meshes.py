"""Meshes: replicas with and without partial sums, smaller meshes, tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import Shard

from fsdp2 import DataParallelMeshDims, MixedPrecisionPolicy, ShardPlacementResult
from tests.kit.in_turn import advance, shard_each
from tests.kit.meshes import shared_mesh
from tests.kit.models import loss_of
from tests.kit.tensor_parallel import FeedForward, colwise_then_rowwise
from tests.sim._world import Values, World, scenario
from tests.sim.scenarios._training import (
    LR,
    SGD,
    STACK,
    each_block,
    learn,
    train,
    trained,
    training,
)

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


trained("uneven_ranks", 3)
trained("one_rank", 1)
trained("replicas", 4, mesh=(2, 2))


def summed_late(world: World, **kwargs: Any) -> Values:
    """Train with an all-reduce that comes with the last of three backwards only."""
    run = training(world, microbatches=3, **kwargs)
    for step in run.steps():
        run.accumulate(step, "set_requires_all_reduce")
    return run.values()


@scenario(4)
def replicas_summed_late(world: World) -> Values:
    return summed_late(world, mesh=world.mesh(2, 2))


@scenario(4, slow=True)
def replicas_summed_late_in_fp64(world: World) -> Values:
    """Partial sums lie in memory of the reduce lane, and are cloned in another one."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    return summed_late(world, mesh=world.mesh(2, 2), mp_policy=policy)


@scenario(2, slow=True)
def replicas_only_summed_late(world: World) -> Values:
    """Shards of size one: what is reduced is what was packed."""
    return summed_late(world, mesh=world.mesh(2, 1))


trained("replicas_without_sync", 4, slow=True, mesh=(2, 2), microbatches=3)
trained("replicas_only", slow=True, mesh=(2, 1))


@scenario(2, slow=True)
def data_parallel(world: World) -> Values:
    """Plain data parallelism: no dim shards."""
    mesh = shared_mesh((2,), ("data",))
    return train(world, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(replicate="data"))


trained("smaller_mesh_after_forward", 4, slow=True, reshard_after_forward=2)
trained(
    "smaller_mesh_in_bf16",
    4,
    slow=True,
    tolerance=2e-2,
    reshard_after_forward=2,
    mp_policy=BF16,
    microbatches=2,
)
trained("smaller_mesh_and_replicas", 4, slow=True, mesh=(1, 4), reshard_after_forward=2)
# Gradients of such parameters travel with that dim first.
trained(
    "sharded_on_dim_one",
    shard_placement_fn=lambda param: Shard(param.dim() - 1) if param.dim() else None,
)
trained(
    "sharded_on_dim_one_by_one_rank", 1, shard_placement_fn=lambda param: Shard(param.dim() - 1)
)


@scenario(4, slow=True)
def parameters_on_other_meshes(world: World) -> Values:
    """Weights of blocks are sharded by two ranks and replicated, all else by four."""
    small = shared_mesh((2, 2), ("replicate", "shard"))

    def place(param: nn.Parameter) -> Any:
        return ShardPlacementResult(None, small) if param.dim() == 2 else None

    model: Any = world.build(STACK)
    shard_each(*each_block(model), mesh=world.mesh(4), shard_placement_fn=place)
    world.shard(model, mesh=world.mesh(4))
    optim = SGD(model.parameters(), lr=LR, foreach=False)
    inputs = [world.tensor(3, 13, seed=step) for step in range(4)]
    for step in world.steps(4):
        learn(model, inputs[step])
        advance(optim)
    return world.values(model)


class Feeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FeedForward(12, 30) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def tensor_parallel(world: World, **kwargs: Any) -> Values:
    mesh = shared_mesh((2, 2), ("data", "tensor"))

    def prepare(model: Any) -> None:
        for block in model.blocks:
            colwise_then_rowwise(block, mesh["tensor"])

    rank = mesh.get_local_rank("data")
    run = training(world, Feeds, prepare=prepare, mesh=mesh["data"], batch=(3, 12), **kwargs)
    # Ranks of one model-parallel group are given the same batch.
    inputs = [world.tensor(3, 12, seed=10 * step + rank, by_rank=False) for step in range(4)]
    for step in run.steps():
        loss_of(run.model(inputs[step])).backward()
        run.update()
    return run.values()


@scenario(4, slow=True)
def tensor_parallel_inside(world: World) -> Values:
    """TP 2 x FSDP 2."""
    return tensor_parallel(world)


@scenario(4, slow=True, tolerance=2e-2)
def tensor_parallel_inside_in_bf16(world: World) -> Values:
    return tensor_parallel(world, mp_policy=BF16)

"""Train by Lightning Fabric with `ModelParallelStrategy` on two ranks, save, and load again.

torchrun --nproc-per-node 2 with_lightning_fabric.py FOLDER
"""

import sys

import lightning as L
import torch
import torch.nn as nn
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WIDTH, STEPS = 32, 6


def build() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mesh=mesh["data_parallel"], mp_policy=policy)
    return fully_shard(model, mesh=mesh["data_parallel"], mp_policy=policy)


def train(fabric: L.Fabric, state: dict, until: int) -> None:
    model, optimizer = state["model"], state["optimizer"]
    while state["step"] < until:
        source = torch.Generator().manual_seed(2 * state["step"] + fabric.global_rank)
        inputs = torch.randn(8, WIDTH, generator=source)
        loss = nn.functional.mse_loss(model(inputs).float(), inputs.flip(1).tanh())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        mean = fabric.all_reduce(loss.detach(), reduce_op="mean")
        if fabric.global_rank == 0:
            print(f"loss {mean.item():.6f}", flush=True)


def main(folder: str) -> None:
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    for until in (STEPS // 2, STEPS):
        fabric.seed_everything(until, verbose=False)
        model = fabric.setup_module(build())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        state = {"model": model, "optimizer": optimizer, "step": 0}
        if until == STEPS:
            fabric.load(folder, state)
        train(fabric, state, until)
        fabric.save(folder, state)
    if fabric.global_rank == 0:
        kinds = type(model.module).__mro__
        print("sharded by", next(c.__module__ for c in kinds if c.__name__ == "FSDPModule"))


main(sys.argv[1])

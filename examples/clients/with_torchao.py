"""Train with torchao's float8 linear layers, whose weights are gathered in float8; save and load.

torchrun --nproc-per-node 2 with_torchao.py FOLDER
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

WIDTH, STEPS = 32, 6


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH))
    config = Float8LinearConfig(
        enable_fsdp_float8_all_gather=True, emulate=True
    )  # a CPU has no float8
    convert_to_float8_training(model, config=config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        source = torch.Generator().manual_seed(2 * step + dist.get_rank())
        inputs = torch.randn(16, WIDTH, generator=source)
        loss = nn.functional.mse_loss(model(inputs.bfloat16()).float(), inputs.flip(1).tanh())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(model)  # one all-reduce for all weights
        dist.all_reduce(mean := loss.detach() / dist.get_world_size())
        if dist.get_rank() == 0:
            print(f"loss {mean.item():.6f}", flush=True)


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, optimizer = build()
    train(model, optimizer, range(STEPS // 2))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    model, optimizer = build()
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    train(model, optimizer, range(STEPS // 2, STEPS))
    if dist.get_rank() == 0:
        kinds = type(model).__mro__
        print("sharded by", next(c.__module__ for c in kinds if c.__name__ == "FSDPModule"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

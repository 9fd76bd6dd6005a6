"""Trains a model sharded by torch's `fully_shard` with an optimizer that needs no schedule.

torchrun --nproc-per-node 2 with_schedulefree.py FOLDER
torchrun --nproc-per-node 2 -m fsdp2 with_schedulefree.py FOLDER
"""

from __future__ import annotations

import sys

import schedulefree
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard


def make() -> tuple[nn.Module, schedulefree.AdamWScheduleFree]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 29), nn.Tanh(), nn.Linear(29, 7))
    fully_shard(model[0])
    fully_shard(model)
    return model, schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: schedulefree.AdamWScheduleFree, steps: range) -> None:
    optimizer.train()
    for step in steps:
        torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
        loss = model(torch.randn(4, 13)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = loss.detach() / dist.get_world_size()
        dist.all_reduce(whole)
        if dist.get_rank() == 0:
            print(f"loss {whole.item():.6f}", flush=True)


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    model, optimizer = make()
    train(model, optimizer, range(3))
    optimizer.eval()  # the weights to keep and to use
    saved = get_state_dict(model, optimizer)
    dcp.save({"model": saved[0], "optimizer": saved[1]}, checkpoint_id=folder)

    model, optimizer = make()
    optimizer.train()  # torch's helper takes a step to make states, which another mode refuses,
    optimizer.state.clear()  # and makes none beside the empty ones that `train` leaves
    found = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
    )
    train(model, optimizer, range(3, 6))
    if dist.get_rank() == 0:
        assert isinstance(model, FSDPModule)
        (home,) = [c.__module__ for c in type(model).__mro__ if c.__name__ == "FSDPModule"][:1]
        print(f"sharded by {home.split('.')[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

"""Train the example's model with `fsdp2.reproducible`, and print each loss and a digest of the end.

``torchrun --nproc-per-node 4 tests/kit/slots_program.py --steps 100 --dtype bf16 --mesh 2x2``
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp2

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "examples"))

from _model import VOCABULARY, ModelConfig, Transformer  # noqa: E402

SLOTS = 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--mesh", default="")
    parser.add_argument("--load")
    parser.add_argument("--save")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    shape = tuple(map(int, given.mesh.split("x"))) if given.mesh else (dist.get_world_size(),)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    policy = fsdp2.MixedPrecisionPolicy()
    if given.dtype == "bf16":
        policy = fsdp2.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    torch.manual_seed(0)
    model = Transformer(ModelConfig(width=64, layers=2, heads=4, sequence_length=16))
    for block in model.blocks:
        fsdp2.fully_shard(block, mesh=mesh, mp_policy=policy)
    fsdp2.fully_shard(model, mesh=mesh, mp_policy=policy)
    mine = fsdp2.reproducible(model, slots=SLOTS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    first = fsdp2.checkpoint.load(given.load, model, optimizer) if given.load else 0
    for step in range(first, given.steps):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randint(VOCABULARY, (SLOTS, 2, 17), generator=generator)
        losses = []
        for slot in mine:
            loss = model(batch[slot, :, :-1], batch[slot, :, 1:])
            loss.backward()
            losses.append(loss.detach())
        norm = fsdp2.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = fsdp2.mean_over_slots(model, losses)
        if dist.get_rank() == 0:
            print(step, mean.item().hex(), norm.item().hex())
    if given.save:
        fsdp2.checkpoint.save(given.save, model, optimizer, extra=given.steps)
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.full_tensor().detach().numpy().tobytes())
    if dist.get_rank() == 0:
        print(digest.hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a small model with accelerate's FSDP2, save its state, and go on from it.

    torchrun --nproc-per-node 2 examples/clients/with_accelerate.py FOLDER

Each loss is that of both ranks. The last line says whose `FSDPModule` the model has.
"""

from __future__ import annotations

import sys

import torch
import torch.nn as nn
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def main(folder: str) -> None:
    if not torch.cuda.is_available():  # accelerate shards on accelerators only: call gloo one
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(
        mixed_precision="bf16",
        gradient_accumulation_steps=2,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
        ),
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 20), *[Block(20) for _ in range(3)], nn.Linear(20, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(64, 10)
    data = torch.utils.data.TensorDataset(inputs, inputs.prod(dim=1, keepdim=True).tanh())
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def epoch() -> None:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x).float(), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.print(f"loss {accelerator.reduce(loss.detach(), 'mean').item():.6f}")

    epoch()
    accelerator.save_state(folder)
    epoch()
    accelerator.load_state(folder)  # the second epoch once more
    epoch()
    home = next(c for c in type(model).__mro__ if c.__name__ == "FSDPModule").__module__
    accelerator.print(f"sharded by {home}")
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])

"""Train by Lightning's Trainer with `ModelParallelStrategy` on two ranks, save, and load again.

torchrun --nproc-per-node 2 with_lightning.py FOLDER
"""

import sys
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.nn as nn
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
WIDTH, STEPS = 32, 6


class Learner(L.LightningModule):
    """Learn a linear map by a stack of residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)],
            nn.Linear(WIDTH, WIDTH),
        )

    def configure_model(self) -> None:
        """Shard the model: Lightning calls this with the device mesh at hand."""
        if isinstance(self.blocks, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.blocks, mesh=mesh, mp_policy=policy)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.blocks(inputs).float(), targets)
        mean = self.all_gather(loss.detach()).mean()
        if self.global_rank == 0:
            print(f"loss {mean.item():.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(8 * 2 * STEPS, WIDTH, generator=generator)
    targets = inputs @ torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
    return DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=False)


def trainer(folder: Path, steps: int) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=STEPS // 2)],
    )


def main(folder: Path) -> None:
    L.seed_everything(0, verbose=False)
    trainer(folder, STEPS // 2).fit(Learner(), data())
    resumed = Learner()
    trainer(folder, STEPS).fit(resumed, data(), ckpt_path=folder / f"step={STEPS // 2}.ckpt")
    if resumed.global_rank == 0:
        by = next(c.__module__ for c in type(resumed.blocks).__mro__ if c.__name__ == "FSDPModule")
        print("sharded by", by)


main(Path(sys.argv[1]))

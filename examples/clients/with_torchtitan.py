"""Train torchtitan's Llama 3 debug model by torchtitan's trainer, save, and load again.

torchrun --nproc-per-node 2 with_torchtitan.py FOLDER [parallelism.tensor_parallel_degree=2 ...]
"""

import ast
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import _torchtitan_on_cpu  # noqa: F401  # the one part that a user with GPUs leaves out
import torch
import torch.distributed as dist
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

LENGTH, STEPS = 64, 6


class Numbers(BaseTokenizer):
    """The data are token ids already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return 2048


class RandomTokens(BaseDataLoader):
    """Sequences that count up from a random token."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self.rank, self.shape, self.count = dp_rank, (local_batch_size, seq_len + 1), 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            source = torch.Generator().manual_seed(1000 * self.rank + self.count)
            self.count += 1
            starts = torch.randint(0, 2048, (self.shape[0], 1), generator=source)
            tokens = (starts + torch.arange(self.shape[1])) % 2048
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class Losses(MetricsProcessor):
    """Print losses alone."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, global_avg_loss: float, *_: Any, **__: Any) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:  # it has a pipeline's last stage
            print(f"loss {global_avg_loss:.6f}", flush=True)


def config(folder: str, options: Sequence[str]) -> Trainer.Config:
    made = llama3_debugmodel()
    for _, _, parent, name in list(made.model_spec.model.traverse(FlexAttention.Config)):
        setattr(parent, name, ScaledDotProductAttention.Config())  # flex has no backward on CPUs
    made.dump_folder = folder
    made.tokenizer, made.dataloader = Numbers.Config(), RandomTokens.Config()
    made.metrics = Losses.Config(log_freq=1)
    made.validator.enable = False
    made.training.local_batch_size, made.training.seq_len = 2, LENGTH
    made.training.steps, made.training.disable_cuda_graphs = STEPS, True
    made.checkpoint = CheckpointManager.Config(
        enable=True, interval=STEPS // 2, last_save_model_only=False
    )
    made.debug.seed = 0
    for option in options:
        name, value = option.split("=", 1)
        *path, name = name.split(".")
        part = made
        for inner in path:
            part = getattr(part, inner)
        setattr(part, name, ast.literal_eval(value))
    return made


def main(folder: str, *options: str) -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    trainer = Trainer(config(folder, options))
    trainer.train()
    with torch.no_grad():
        for part in trainer.model_parts:
            for parameter in part.parameters():
                parameter.zero_()
    trainer.config.checkpoint.load_step = STEPS // 2
    trainer.train()  # loads what was saved half-way, and so computes the same losses again
    trainer.close()
    if dist.get_rank() == 0:
        classes = type(trainer.model_parts[0]).__mro__
        by = next(c.__module__ for c in classes if c.__name__ == "FSDPModule")
        print("sharded by", by)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

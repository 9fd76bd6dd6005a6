"""Train a model by the Trainer of transformers in shards, and go on from its checkpoint.

    torchrun --nproc-per-node 2 examples/clients/with_trainer.py FOLDER

The last line says whose `FSDPModule` the model has.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback
from transformers import TrainingArguments as Arguments


class PrintLoss(TrainerCallback):
    def on_log(self, args: Arguments, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if state.is_world_process_zero and "loss" in logs:
            print(f"loss {float(logs['loss']):.6f}", flush=True)


def make_trainer(folder: str) -> Trainer:
    arguments = Arguments(
        folder,
        fsdp=True,
        fsdp_config={"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "version": 2},
        use_cpu=not torch.cuda.is_available(),
        max_steps=8,
        save_steps=4,
        logging_steps=1,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        disable_tqdm=True,
        report_to=[],
    )
    if arguments.use_cpu:  # accelerate shards on accelerators only: call gloo one
        arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, 100, (64, 12))]
    return Trainer(model, arguments, train_dataset=rows, callbacks=[PrintLoss()])


def main(folder: str) -> None:
    make_trainer(folder).train()
    trainer = make_trainer(folder)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4")  # the last four steps again
    trainer.save_model(f"{folder}/whole")
    kinds = type(trainer.model_wrapped).__mro__
    home = next(kind for kind in kinds if kind.__name__ == "FSDPModule").__module__
    trainer.accelerator.print(f"sharded by {home}")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])

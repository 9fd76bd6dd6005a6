"""Train LoRA adapters by TRL's SFTTrainer over a model in shards, and go on from a checkpoint.

    torchrun --nproc-per-node 2 examples/clients/with_trl.py FOLDER

The last line says whose `FSDPModule` the model has.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from accelerate.utils import DistributedType
from datasets import Dataset
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    TrainerCallback,
)
from trl import SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(98))]


class PrintLoss(TrainerCallback):
    def on_log(self, args: SFTConfig, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if state.is_world_process_zero and "loss" in logs:
            print(f"loss {float(logs['loss']):.6f}", flush=True)


def make_model() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def make_trainer(folder: str) -> SFTTrainer:
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, "<pad>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    choose = random.Random(0)
    rows = [{"text": " ".join(choose.choices(WORDS[2:], k=12))} for _ in range(64)]
    arguments = SFTConfig(
        folder,
        fsdp=True,
        fsdp_config={"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "version": 2},
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        max_steps=8,
        save_steps=4,
        logging_steps=1,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        disable_tqdm=True,
        report_to=[],
    )
    if arguments.use_cpu:  # accelerate shards on accelerators only: call gloo one
        arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU
    return SFTTrainer(
        make_model(),
        arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        callbacks=[PrintLoss()],
    )


def main(folder: str) -> None:
    make_trainer(folder).train()
    trainer = make_trainer(folder)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4")  # the last four steps again
    trainer.save_model(f"{folder}/adapters")
    if trainer.accelerator.is_main_process:
        PeftModel.from_pretrained(make_model(), f"{folder}/adapters")  # in one process
    kinds = type(trainer.model_wrapped).__mro__
    home = next(kind for kind in kinds if kind.__name__ == "FSDPModule").__module__
    trainer.accelerator.print(f"sharded by {home}")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])

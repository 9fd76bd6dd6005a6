"""Promise: TRL's `SFTTrainer`, alone and with LoRA of `peft`, does with `fsdp2.replace_torch()`
what it does with torch's own FSDP2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from tests.ecosystem._clients import LIBRARIES, run_program
from tests.ecosystem._hugging_face import Rows, arguments, check, fit
from tests.ecosystem._programs import VOCABULARY, tiny_llama, transformers
from tests.kit.models import seeded
from tests.kit.parity import assert_same, names_of
from tests.kit.pool import ranks

pytest.importorskip("peft")
pytest.importorskip("trl")

import peft
from safetensors.torch import load_file

pytestmark = pytest.mark.ecosystem


def make_sft(
    model: nn.Module, folder: Path, config: dict[str, Any], lora: bool, **settings: Any
) -> Any:
    """Make an `SFTTrainer` on rows that are tokens already."""
    import datasets
    import tokenizers
    import trl

    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0")),
        pad_token="w0",
        eos_token="w2",
    )
    rows = [{"input_ids": row["input_ids"].tolist()} for row in Rows()]
    adapters = peft.LoraConfig(
        r=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.0
    )
    torch.manual_seed(3)  # for the values of the adapters
    return trl.SFTTrainer(
        model,
        arguments(folder, config, trl.SFTConfig, **{"bf16": False, **settings}),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        peft_config=adapters if lora else None,
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {"lora": False},
    "whole, tied": {"lora": False, "tied": True},
    "adapters": {"lora": True},
    "adapters, bf16": {"lora": True, "bf16": True},
    "adapters, checkpointing": {
        "lora": True,
        "activation_checkpointing": False,
        "config": {"activation_checkpointing": True},
    },
    "adapters, one loader": {"lora": True, "config": {"cpu_ram_efficient_loading": True}},
}


def test_the_program_trains_saves_and_loads_as_with_torchs_own(tmp_path: Path) -> None:
    """`with_trl.py` gives the losses of torch's own, in both orders of imports."""
    torchs = run_program("with_trl", "torch", str(tmp_path / "torch"))
    assert torchs.implementation == "torch"
    assert torchs.losses[4:8] == torchs.losses[8:]
    for way in ("-m fsdp2", "imported before"):
        ours = run_program("with_trl", way, str(tmp_path / way), client="trl.trainer.sft_trainer")
        assert ours.implementation == "fsdp2"
        assert ours.losses == pytest.approx(torchs.losses, rel=1e-5)


@pytest.mark.parametrize("setting", SETTINGS)
@ranks(2)
def test_fine_tuning_is_that_with_torchs_own(setting: str, tmp_path: Path) -> None:
    """Logs and weights are those of torch's own, and what is saved loads in one process."""
    settings = {"learning_rate": 1e-2, **SETTINGS[setting]}
    ours, theirs = (fit(library, tmp_path, make=make_sft, **settings) for library in LIBRARIES)
    check(ours, theirs)
    dist.barrier()
    names = [list(load_file(path)) for path in sorted(tmp_path.glob("*-saved/*.safetensors"))]
    assert len(names) == 2
    assert names[0] == names[1]
    if setting == "adapters, checkpointing":  # peft does not find the names that accelerate makes
        assert not names[0]
        return
    saved = tmp_path / "fsdp2-saved"
    if settings["lora"]:
        model = peft.PeftModel.from_pretrained(seeded(tiny_llama), saved)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(saved)
    loaded = names_of(model)
    assert list(loaded) == list(ours[1])
    for name, value in loaded.items():
        assert_same(value.detach(), ours[1][name].to(value.dtype), name)


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@ranks(2)
def test_adapters_go_on_from_a_checkpoint_of_either_library(kind: str, tmp_path: Path) -> None:
    """The second half of a training of adapters is the same from a checkpoint of either."""
    settings: dict[str, Any] = {"make": make_sft, "lora": True, "learning_rate": 1e-2}
    config = {"state_dict_type": kind}
    unbroken = {name: fit(name, tmp_path / "all", config, **settings) for name in LIBRARIES}
    check(unbroken["fsdp2"], unbroken["torch"])
    for library, source in (("fsdp2", "torch"), ("torch", "fsdp2")):
        halfway = tmp_path / "all" / source / "checkpoint-2"
        target = tmp_path / f"{library}-{source}"
        check(fit(library, target, config, resume=halfway, **settings), unbroken[source])

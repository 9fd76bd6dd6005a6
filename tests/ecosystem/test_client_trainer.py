"""Promise: the `Trainer` of `transformers` does with `fsdp2.replace_torch()` what it does with
torch's own FSDP2: by its `fsdp_config`, and with models that were sharded at load time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fsdp2
from tests.ecosystem._clients import LIBRARIES, run_program
from tests.ecosystem._hugging_face import (
    Rows,
    arguments,
    check,
    client,
    fit,
    result_of,
)
from tests.ecosystem._programs import tiny_llama, transformers
from tests.kit.models import seeded
from tests.kit.parity import names_of
from tests.kit.pool import ranks

pytestmark = pytest.mark.ecosystem

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "bf16": {"bf16": True},
    "checkpointing": {"config": {"activation_checkpointing": True}},
    "one loader": {"config": {"cpu_ram_efficient_loading": True}},
    "kept": {"config": {"reshard_after_forward": False}},
}


def test_the_program_trains_saves_and_loads_as_with_torchs_own(tmp_path: Path) -> None:
    """`with_trainer.py` gives the losses of torch's own, in both orders of imports."""
    torchs = run_program("with_trainer", "torch", str(tmp_path / "torch"))
    assert torchs.implementation == "torch"
    assert torchs.losses[4:8] == torchs.losses[8:]
    for way in ("-m fsdp2", "imported before"):
        ours = run_program("with_trainer", way, str(tmp_path / way), client="transformers.trainer")
        assert ours.implementation == "fsdp2"
        assert ours.losses == pytest.approx(torchs.losses, rel=1e-5)
        assert (tmp_path / way / "whole" / "model.safetensors").exists()


@pytest.mark.parametrize("setting", SETTINGS)
@ranks(2)
def test_the_trainer_trains_as_with_torchs_own(setting: str, tmp_path: Path) -> None:
    """Accumulation, clipping and AdamW give the log and weights of torch's own, saved whole."""
    ours, theirs = (fit(library, tmp_path, **SETTINGS[setting]) for library in LIBRARIES)
    check(ours, theirs)
    dist.barrier()
    kind = transformers.AutoModelForCausalLM
    for name, value in names_of(kind.from_pretrained(tmp_path / "fsdp2-saved")).items():
        assert torch.equal(value, ours[1][name].to(value.dtype)), name


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@ranks(2)
def test_the_trainer_resumes_from_a_checkpoint_of_either_library(kind: str, tmp_path: Path) -> None:
    """The second half of a training is the same from a checkpoint of either library."""
    config = {"state_dict_type": kind}
    unbroken = {library: fit(library, tmp_path / "all", config) for library in LIBRARIES}
    check(unbroken["fsdp2"], unbroken["torch"])
    for library, source in (("fsdp2", "fsdp2"), ("fsdp2", "torch"), ("torch", "fsdp2")):
        halfway = tmp_path / "all" / source / "checkpoint-2"
        target = tmp_path / f"{library}-{source}"
        check(fit(library, target, config, seed=2, resume=halfway), unbroken[source])


@pytest.mark.parametrize("replicas", [1, 2])
@ranks(4)
def test_the_trainer_takes_a_model_sharded_at_load(replicas: int, tmp_path: Path) -> None:
    """Accumulation without reductions, or with those inside a replica, is that of torch's own."""
    if dist.get_rank() == 0:
        seeded(tiny_llama).save_pretrained(tmp_path / "source")
    dist.barrier()
    results = []
    for library in LIBRARIES:
        with client(library):
            config = transformers.DistributedConfig(
                fsdp_size=4 // replicas,
                dp_replicate_size=replicas,
                fsdp_plan={"model.layers.*": "free_full_weight"},
            )
            model = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path / "source", distributed_config=config
            )
            assert isinstance(model, fsdp2.FSDPModule) == (library == "fsdp2")
            given = arguments(tmp_path / library, None, save_strategy="no")
            tool = transformers.Trainer(model, given, train_dataset=Rows())
            tool.train()
            results.append(result_of(tool))
            del model, tool
    check(*results)

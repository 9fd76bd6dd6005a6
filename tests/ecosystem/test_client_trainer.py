"""Promise: the `Trainer` of `transformers` does with `fsdp2.replace_torch()` what it does with
torch's own FSDP2: by its `fsdp_config`, and with models that were sharded at load time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.utils.data import Dataset

import fsdp2
from tests._models import seeded
from tests._parity import assert_same, names_of, whole
from tests._pool import ranks
from tests.ecosystem._programs import tiny_llama, tokens, transformers

pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType

pytestmark = pytest.mark.ecosystem

LIBRARIES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "fsdp2": fsdp2.replace_torch,
    "torch": nullcontext,
}


class Rows(Dataset[dict[str, Tensor]]):
    """Eighty rows of random tokens."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.ids = tokens(80).kwargs["input_ids"]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


@contextmanager
def client(library: str) -> Iterator[None]:
    """Let transformers have the FSDP2 of a library, and forget its settings afterwards."""
    environment = dict(os.environ)
    try:
        with LIBRARIES[library]():
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(environment)


def trainer(model: nn.Module, folder: Path, config: dict[str, Any] | None, **settings: Any) -> Any:
    """Make a `Trainer` that logs each step and saves every second one."""
    chosen: dict[str, Any] = {
        "max_steps": 4,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.3,
        "adam_epsilon": 1e-4,
    }
    if config is not None:
        chosen |= {"fsdp": True, "fsdp_config": config}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **{**chosen, **settings},
    )
    # The one line that is lifted: accelerate turns a `MULTI_CPU` world into no FSDP one.
    arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU
    return transformers.Trainer(model, arguments, train_dataset=Rows())


def logged(tool: Any) -> list[dict[str, float]]:
    return [
        {name: entry[name] for name in ("loss", "grad_norm")}
        for entry in tool.state.log_history
        if "loss" in entry
    ]


Result = tuple[list[dict[str, float]], dict[str, Tensor]]


def fit(
    library: str,
    folder: Path,
    config: dict[str, Any] | None = None,
    *,
    tied: bool = False,
    resume: Path | None = None,
    **settings: Any,
) -> Result:
    """Train by the `Trainer` from the start, or from a checkpoint; return the log and weights."""
    with client(library):
        model = seeded(partial(tiny_llama, tied), seed=1 if resume is None else 2)
        config = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "version": 2} | (config or {})
        tool = trainer(model, folder / library, config, **settings)
        tool.train(resume_from_checkpoint=None if resume is None else str(resume))
        trained = tool.model_wrapped
        assert isinstance(trained, fsdp2.FSDPModule) == (library == "fsdp2")
        weights = {
            name.replace("_checkpoint_wrapped_module.", ""): whole(p).clone()
            for name, p in names_of(tool.model).items()
        }
        tool.save_model(str(folder / f"{library}-whole"))
        return logged(tool), weights


def check(ours: Result, theirs: Result) -> None:
    assert len(ours[0]) == len(theirs[0])
    for step, (one, other) in enumerate(zip(ours[0], theirs[0], strict=True)):
        assert one == pytest.approx(other, rel=1e-4), step  # the log is rounded to four digits
    assert list(ours[1]) == list(theirs[1])
    for name, value in theirs[1].items():
        assert_same(ours[1][name], value, name, 1e-5)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True},
    "bf16": {"bf16": True},
    "checkpointing": {"config": {"activation_checkpointing": True}},
    "one loader": {"config": {"cpu_ram_efficient_loading": True}},
    "kept": {"config": {"reshard_after_forward": False}},
}


@pytest.mark.parametrize("setting", SETTINGS)
@ranks(2)
def test_the_trainer_trains_as_with_torchs_own(setting: str, tmp_path: Path) -> None:
    """Accumulation, clipping and AdamW give the log and weights of torch's own, saved whole."""
    ours, theirs = (fit(library, tmp_path, **SETTINGS[setting]) for library in LIBRARIES)
    check(ours, theirs)
    dist.barrier()
    kind = transformers.AutoModelForCausalLM
    for name, value in names_of(kind.from_pretrained(tmp_path / "fsdp2-whole")).items():
        assert torch.equal(value, ours[1][name].to(value.dtype)), name


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@ranks(2)
def test_the_trainer_resumes_from_a_checkpoint_of_either_library(kind: str, tmp_path: Path) -> None:
    """The second half of a training is the same from a checkpoint of either library."""
    config = {"state_dict_type": kind}
    whole_run = {library: fit(library, tmp_path / "all", config) for library in LIBRARIES}
    check(whole_run["fsdp2"], whole_run["torch"])
    for library, source in (("fsdp2", "fsdp2"), ("fsdp2", "torch"), ("torch", "fsdp2")):
        halfway = tmp_path / "all" / source / "checkpoint-2"
        resumed = fit(library, tmp_path / f"{library}-{source}", config, resume=halfway)
        check(resumed, whole_run[source])


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
            tool = trainer(model, tmp_path / library, None, save_strategy="no")
            tool.train()
            weights = {name: whole(p).clone() for name, p in names_of(model).items()}
            results.append((logged(tool), weights))
            del model, tool
    check(*results)

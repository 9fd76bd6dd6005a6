"""What the tests with accelerate and what is built on it share: its states, and trainings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.data import Dataset

import fsdp2
from tests.ecosystem._clients import LIBRARIES
from tests.ecosystem._programs import tiny_llama, tokens, transformers
from tests.kit.models import seeded
from tests.kit.parity import assert_same, names_of, whole

pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType

CHECKPOINTED = "_checkpoint_wrapped_module."  # in names, where accelerate recomputes


@contextmanager
def client(library: str) -> Iterator[None]:
    """Let accelerate have the FSDP2 of a library, and forget its settings afterwards."""
    environment = dict(os.environ)
    try:
        with LIBRARIES[library]():
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(environment)


def lift(state: PartialState) -> None:
    """Let accelerate shard on a CPU: it makes no FSDP world of what it calls `MULTI_CPU`."""
    state.distributed_type = DistributedType.MULTI_GPU


class Rows(Dataset[dict[str, Tensor]]):
    """Eighty rows of random tokens."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.ids = tokens(80).kwargs["input_ids"]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def arguments(
    folder: Path, config: dict[str, Any] | None, kind: Any = None, **settings: Any
) -> Any:
    """Make arguments of a `Trainer` that logs each step and saves every second one."""
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
        chosen |= {"fsdp": True, "fsdp_config": dict(config)}
    made = (kind or transformers.TrainingArguments)(
        output_dir=str(folder),
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        **{**chosen, **settings},
    )
    lift(made.distributed_state)
    return made


Result = tuple[list[dict[str, float]], dict[str, Tensor]]
"""What a training logged, and its weights."""


def make_trainer(model: nn.Module, folder: Path, config: dict[str, Any], **settings: Any) -> Any:
    given = arguments(folder, config, **settings)
    return transformers.Trainer(model, given, train_dataset=Rows())


def result_of(tool: Any) -> Result:
    log = [
        {name: entry[name] for name in ("loss", "grad_norm")}
        for entry in tool.state.log_history
        if "loss" in entry
    ]
    named = names_of(tool.model).items()
    return log, {name.replace(CHECKPOINTED, ""): whole(p).clone() for name, p in named}


def fit(
    library: str,
    folder: Path,
    config: dict[str, Any] | None = None,
    *,
    tied: bool = False,
    seed: int = 1,
    resume: Path | None = None,
    make: Callable[..., Any] = make_trainer,
    **settings: Any,
) -> Result:
    """Train by a `Trainer` from the start, or from a checkpoint, and save what it saves."""
    with client(library):
        model = seeded(partial(tiny_llama, tied), seed)
        config = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "version": 2} | (config or {})
        tool = make(model, folder / library, config, **settings)
        tool.train(resume_from_checkpoint=None if resume is None else str(resume))
        assert isinstance(tool.model_wrapped, fsdp2.FSDPModule) == (library == "fsdp2")
        tool.save_model(str(folder / f"{library}-saved"))
        return result_of(tool)


def check(ours: Result, theirs: Result) -> None:
    """Compare logs, which are rounded to four digits, and weights."""
    assert len(ours[0]) == len(theirs[0])
    for step, (one, other) in enumerate(zip(ours[0], theirs[0], strict=True)):
        assert one == pytest.approx(other, rel=1e-4), step
    assert list(ours[1]) == list(theirs[1])
    for name, value in theirs[1].items():
        assert_same(ours[1][name], value, name, 1e-5)

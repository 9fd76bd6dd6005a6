"""Promise: `accelerate` with `fsdp_version=2` does with `fsdp2.replace_torch()` what it does with
torch's own FSDP2, or with the plain model where torch's own cannot.

accelerate takes FSDP for accelerators only: see `_hugging_face.lift`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

import fsdp2
from tests.ecosystem._clients import LIBRARIES, PROGRAMS, run, run_program
from tests.ecosystem._programs import adamw, tiny_llama, tokens
from tests.kit.models import seeded
from tests.kit.parity import assert_same, whole
from tests.kit.pool import find_free_port, ranks

pytest.importorskip("accelerate")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import (
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    merge_fsdp_weights,
)
from safetensors.torch import load_file

from tests.ecosystem._hugging_face import client, lift

pytestmark = pytest.mark.ecosystem


def accelerator(plugin: dict[str, Any] | None = None, **settings: Any) -> Any:
    """Make an `Accelerator` that wraps decoder layers by FSDP2 on gloo ranks."""
    for state in (AcceleratorState, PartialState):
        state._reset_state()
    GradientState._reset_state()
    lift(PartialState(cpu=True))
    chosen = {"auto_wrap_policy": "transformer_based_wrap"} | (plugin or {})
    return Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **chosen), **settings
    )


@dataclass
class Run:
    """What a training gave."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)

    def check(self, expected: Run, rtol: float) -> None:
        for name in ("losses", "norms"):
            pairs = zip(getattr(self, name), getattr(expected, name), strict=True)
            for step, (one, other) in enumerate(pairs):
                assert_same(one, other, f"{name}[{step}]", rtol)
        assert list(self.state) == list(expected.state)
        for name, value in expected.state.items():
            assert_same(self.state[name], value, name, rtol)


def batch(step: int, rank: int) -> dict[str, Tensor]:
    """Return a rank's rows of a step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 * step + rank)
        return tokens(2).kwargs


def steps(tool: Any, model: nn.Module, optimizer: Any, run: Run, numbers: range) -> None:
    """Train; each step has two parts with `accumulate`, and is clipped."""
    for number in numbers:
        with tool.accumulate(model):
            loss = model(**batch(number, dist.get_rank())).loss
            tool.backward(loss)
            if tool.sync_gradients:
                run.norms.append(whole(tool.clip_grad_norm_(model.parameters(), 0.3)).clone())
            optimizer.step()
            optimizer.zero_grad()
        run.losses.append(loss.detach())


def kinds_of(model: nn.Module) -> set[str]:
    """Return whose `FSDPModule` the units have."""
    return {
        next(base for base in type(unit).__mro__ if base.__name__ == "FSDPModule").__module__
        for unit in model.modules()
        if isinstance(unit, torch_fsdp.FSDPModule)
    }


def train(
    library: str,
    build: Callable[[], nn.Module],
    plugin: dict[str, Any] | None = None,
    *,
    seed: int = 1,
    **settings: Any,
) -> Run:
    """Train a model as a user of accelerate does; return losses, norms and the full state."""
    run = Run()
    with client(library):
        tool = accelerator(plugin, gradient_accumulation_steps=2, **settings)
        model = seeded(build, seed)
        model, optimizer = tool.prepare(model, adamw(list(model.parameters())))
        run.kinds = kinds_of(model)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        steps(tool, model, optimizer, run, range(6))
        run.state = tool.get_state_dict(model)
        tool.free_memory(model, optimizer)
    return run


def check(ours: Run, theirs: Run) -> None:
    assert ours.kinds == {fsdp2.FSDPModule.__module__}
    assert theirs.kinds == {torch_fsdp.FSDPModule.__module__}
    ours.check(theirs, 1e-5)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"mixed_precision": "bf16"},
    "kept": {"plugin": {"reshard_after_forward": False}},
    "checkpointing": {"plugin": {"activation_checkpointing": True}},
}


def test_the_program_trains_saves_and_loads_as_with_torchs_own(tmp_path: Path) -> None:
    """`with_accelerate.py` gives the losses of torch's own: both orders of imports, both launchers.

    `accelerate launch` starts it by `-m fsdp2`, and `python -m fsdp2` starts `accelerate launch`.
    """
    name = "with_accelerate"
    torchs = run_program(name, "torch", str(tmp_path / "torch"))
    assert torchs.implementation == "torch"
    assert torchs.losses[8:16] == torchs.losses[16:]
    launch = ["accelerate.commands.launch", "--num_processes=2", "--num_machines=1"]
    launch += ["--mixed_precision=no", "--dynamo_backend=no", "--use_fsdp", "--fsdp_version=2"]
    launch += [f"--main_process_port={find_free_port()}"]
    program = str(PROGRAMS / f"{name}.py")
    runs = [
        run_program(name, "imported before", str(tmp_path / "before"), client="accelerate"),
        run([sys.executable, "-m", *launch, "-m", "fsdp2", program, str(tmp_path / "inside")]),
        run([sys.executable, "-m", "fsdp2", "-m", *launch, program, str(tmp_path / "outside")]),
    ]
    for ours in (run_program(name, "-m fsdp2", str(tmp_path / "ours")), *runs):
        assert ours.implementation == "fsdp2"
        assert ours.losses == pytest.approx(torchs.losses, rel=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
@ranks(2)
def test_training_is_that_with_torchs_own(setting: str, tied: bool) -> None:
    """`accumulate`, `clip_grad_norm_` and `get_state_dict` give the values of torch's own."""
    build = partial(tiny_llama, tied)
    check(*(train(library, build, **SETTINGS[setting]) for library in LIBRARIES))


@pytest.mark.parametrize("tied", [False, True])
@ranks(2)
def test_one_rank_loads_the_weights(tied: bool, rank: int) -> None:
    """With `cpu_ram_efficient_loading` all ranks train on the values of rank 0, as torch's own."""
    build, plugin = partial(tiny_llama, tied), {"cpu_ram_efficient_loading": True}
    ours, theirs = (train(library, build, plugin, seed=1 + rank) for library in LIBRARIES)
    check(ours, theirs)
    ours.check(train("fsdp2", build), 1e-5)


@ranks(2)
def test_offload_trains_as_without() -> None:
    """`cpu_offload` gives the values of torch's own without it, which cannot offload on a CPU."""
    check(train("fsdp2", tiny_llama, {"cpu_offload": True}), train("torch", tiny_llama))
    with pytest.raises(RuntimeError, match="accelerator"):
        train("torch", tiny_llama, {"cpu_offload": True})


@ranks(4)
def test_training_on_two_by_two_ranks_is_that_with_torchs_own() -> None:
    """`ParallelismConfig` with two replicas of two shards gives the values of torch's own."""
    mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    check(*(train(library, tiny_llama, parallelism_config=mesh) for library in LIBRARIES))


@pytest.mark.parametrize("library", LIBRARIES)
@ranks(2)
def test_a_list_is_no_unit(library: str) -> None:
    """`size_based_wrap` picks the list of layers too: both libraries refuse it."""
    plugin = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 3000}
    with pytest.raises(ValueError, match="ModuleList"):
        train(library, tiny_llama, plugin)


class Session:
    """A prepared model that trains on, saves and loads."""

    def __init__(self, kind: str, tied: bool, seed: int = 1) -> None:
        self.tool = accelerator({"state_dict_type": kind}, gradient_accumulation_steps=2)
        model = seeded(partial(tiny_llama, tied), seed)
        self.model, self.optimizer = self.tool.prepare(model, adamw(list(model.parameters())))

    def train(self, numbers: range) -> Run:
        run = Run()
        steps(self.tool, self.model, self.optimizer, run, numbers)
        run.state = self.tool.get_state_dict(self.model)
        return run


def save_and_go_on(library: str, kind: str, tied: bool, folder: Path) -> Run:
    with client(library):
        session = Session(kind, tied)
        session.train(range(4))
        session.tool.save_state(str(folder / library))
        return session.train(range(4, 6))


def load_and_go_on(library: str, kind: str, tied: bool, folder: Path) -> Run:
    with client(library):
        session = Session(kind, tied, seed=2)
        session.train(range(2))  # moments of its own
        session.tool.load_state(str(folder))
        return session.train(range(4, 6))


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
@pytest.mark.parametrize("tied", [False, True])
@ranks(2)
def test_states_go_between_both_libraries(kind: str, tied: bool, tmp_path: Path) -> None:
    """What one saves by `save_state` the other loads by `load_state`, and trains on alike."""
    later = {name: save_and_go_on(name, kind, tied, tmp_path) for name in LIBRARIES}
    for library, source in (("fsdp2", "fsdp2"), ("fsdp2", "torch"), ("torch", "fsdp2")):
        load_and_go_on(library, kind, tied, tmp_path / source).check(later[source], 1e-5)


@pytest.mark.parametrize("tied", [False, True])
@ranks(2)
def test_what_is_saved_whole_is_the_model(tied: bool, tmp_path: Path, rank: int) -> None:
    """`save_model` and `merge_fsdp_weights` write the values of `get_state_dict`."""
    with client("fsdp2"):
        session = Session("SHARDED_STATE_DICT", tied)
        state = session.train(range(2)).state
        session.tool.save_state(str(tmp_path / "state"))
        session.tool.save_model(session.model, str(tmp_path / "model"))
        shards = tmp_path / "state" / "pytorch_model_fsdp_0"
        merge_fsdp_weights(str(shards), str(tmp_path / "merged"))
        session.tool.wait_for_everyone()
    if rank != 0:
        assert state == {}
        return
    may_lack = {"lm_head.weight"} if tied else set()
    for name in ("model", "merged"):
        saved = load_file(tmp_path / name / "model.safetensors")
        assert set(state) - may_lack <= set(saved) <= set(state), name
        for key, value in saved.items():
            assert torch.equal(value, state[key]), f"{name}: {key}"

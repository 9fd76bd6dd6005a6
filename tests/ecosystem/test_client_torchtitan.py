"""Promise: torchtitan's trainer shards its Llama 3 debug model by fsdp2, and trains, saves, loads.

The model goes through torchtitan's own `parallelize_llama`, in each of its three representations of
shardings. `examples/clients/_torchtitan_on_cpu.py` says what is lifted for CPUs.
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import fsdp2
from tests.ecosystem._clients import PROGRAMS, Ran, run_program
from tests.kit.pool import ranks
from tests.kit.slow import slow

pytest.importorskip("torchtitan", reason="the package torchtitan is not installed")
pytest.importorskip("triton", reason="the package triton, which torchtitan imports, is missing")
if not hasattr(dist, "set_timeout"):
    pytest.skip("torchtitan 0.3.0 needs torch 2.14 or newer", allow_module_level=True)

pytestmark = pytest.mark.ecosystem

CPU_LINES = "_torchtitan_on_cpu"  # imports torchtitan, after its device is chosen


@functools.cache
def torchs_own() -> Ran:
    with tempfile.TemporaryDirectory() as folder:
        return run_program("with_torchtitan", "torch", folder)


@pytest.mark.parametrize("way", ["-m fsdp2", slow("imported before")])
def test_the_program_trains_as_with_torchs_own(way: str, tmp_path: Path) -> None:
    """Six steps, three of them once more from the checkpoint; whatever is imported first."""
    ours = run_program("with_torchtitan", way, str(tmp_path), client=CPU_LINES)
    theirs = torchs_own()
    assert (theirs.implementation, ours.implementation) == ("torch", "fsdp2")
    assert ours.losses == theirs.losses
    assert ours.losses[3:6] == ours.losses[6:9]


@contextmanager
def program() -> Iterator[Any]:
    """Import the example, which a rank that served other bodies then forgets all of."""
    sys.path.insert(0, str(PROGRAMS))
    threads = torch.autograd.is_multithreading_enabled()
    logging.disable(logging.WARNING)
    try:
        made = importlib.import_module("with_torchtitan")
        titan = importlib.import_module("torchtitan.trainer")
        clock = {"perf_counter": titan.time.perf_counter, "sleep": lambda seconds: None}
        titan.time = types.SimpleNamespace(**clock)  # it gives other ranks two seconds
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield made
    finally:
        sys.path.remove(str(PROGRAMS))
        logging.disable(logging.NOTSET)
        torch.autograd.set_multithreading_enabled(threads)
        gc.enable()


def forget_plans() -> None:
    """Let DTensor forget meshes: torch's own asks for one object, and plans have an equal one."""
    debug = importlib.import_module("torch.distributed.tensor.debug")
    debug._clear_sharding_prop_cache()
    redistribute = importlib.import_module("torch.distributed.tensor._redistribute")
    redistribute.clear_redistribute_planner_cache()
    plans = getattr(redistribute, "_gen_transform_infos", None)
    if plans is not None:
        plans.cache_clear()


def train(made: Any, folder: Path, *options: str) -> dict[str, Any]:
    """Train with the options of the program's command line; return losses and shards."""
    losses: list[float] = []
    config = made.config(str(folder), options)
    trainer = made.Trainer(config)
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
    trainer.train()
    with torch.no_grad():
        for part in trainer.model_parts:
            for parameter in part.parameters():
                parameter.zero_()
    config.checkpoint.load_step = made.STEPS // 2
    trainer.train()
    trainer.close()
    assert losses[3:6] == losses[6:9]
    return {
        "losses": losses,
        "units": [len(fsdp2.units(part)) for part in trainer.model_parts],
        "norm": [part.norm is not None for part in trainer.model_parts],
        "shards": {
            name: (value.to_local() if isinstance(value, DTensor) else value).clone()
            for part in trainer.model_parts
            for name, value in part.state_dict().items()
        },
    }


def of_both(folder: Path, *options: str) -> None:
    """Losses, and the weights that the checkpoint led to, are those of torch's own."""
    with program() as made:
        with fsdp2.replace_torch():
            ours = train(made, folder / "ours", *options)
        gc.collect()
        forget_plans()
        theirs = train(made, folder / "theirs", *options)
        gc.collect()
        forget_plans()
    assert all(ours["units"])
    assert not any(theirs["units"])
    assert ours["losses"] == theirs["losses"]
    assert ours["shards"].keys() == theirs["shards"].keys()
    for name, expected in theirs["shards"].items():
        assert torch.equal(ours["shards"][name], expected), name


@pytest.mark.parametrize("backend", ["partial_dtensor", "full_dtensor", "spmd_types"])
@ranks(2, limit_s=120)
def test_representations_of_shardings(backend: str, tmp_path: Path) -> None:
    """Parameters are plain, DTensors on the whole mesh, or plain with annotations."""
    of_both(tmp_path, f"parallelism.spmd_backend={backend!r}")


@pytest.mark.parametrize("backend", [slow("partial_dtensor"), "spmd_types"])
@ranks(2, slow(4), limit_s=120)
def test_tensor_parallelism(backend: str, tmp_path: Path) -> None:
    """Two ranks split each block; with four there are two such pairs."""
    of_both(
        tmp_path, f"parallelism.spmd_backend={backend!r}", "parallelism.tensor_parallel_degree=2"
    )


@ranks(4, limit_s=120)
def test_replicas_of_shards(tmp_path: Path) -> None:
    """HSDP: two replicas of a model that two ranks shard."""
    of_both(tmp_path, "parallelism.data_parallel_replicate_degree=2")


@pytest.mark.parametrize("schedule", ["1F1B", slow("Interleaved1F1B")])
@ranks(2, slow(4), limit_s=120)
def test_pipelines(schedule: str, tmp_path: Path) -> None:
    """Two stages, of one part or of two; with four ranks each stage is sharded."""
    of_both(
        tmp_path,
        "parallelism.pipeline_parallel_degree=2",
        f"parallelism.pipeline_parallel_schedule={schedule!r}",
        "training.local_batch_size=4",
    )


@pytest.mark.parametrize("kind", ["FullAC", slow("none")])
@ranks(2, limit_s=120)
def test_activation_checkpointing(kind: str, tmp_path: Path) -> None:
    """The debug model has selective checkpointing; here all is recomputed, or nothing."""
    with program() as made:
        checkpointing = importlib.import_module("torchtitan.distributed.activation_checkpoint")
        plain = made.config

        def config(folder: str, options: tuple[str, ...]) -> Any:
            changed = plain(folder, options)
            chosen = getattr(checkpointing, kind, None)
            changed.activation_checkpoint = chosen and chosen.Config()
            return changed

        made.config = config
        try:
            of_both(tmp_path)
        finally:
            made.config = plain


@pytest.mark.parametrize(
    "option",
    [
        "parallelism.fsdp_reshard_after_forward='never'",
        slow("parallelism.fsdp_reshard_after_forward='always'"),
        "training.global_batch_size=8",
        slow("training.mixed_precision_param='float32'"),
        "checkpoint.async_mode='async'",
    ],
)
@ranks(2, limit_s=120)
def test_options(option: str, tmp_path: Path) -> None:
    """Units that stay whole, accumulated gradients, fp32, and a checkpoint written meanwhile."""
    of_both(tmp_path, option)


@pytest.mark.parametrize("backend", [slow("eager"), slow("inductor")])
@ranks(2, limit_s=300)
def test_compiled_blocks(backend: str, tmp_path: Path) -> None:
    """torchtitan compiles each block as one graph, and then shards it."""
    of_both(
        tmp_path,
        "compile.enable=True",
        "compile.components=['model']",
        f"compile.backend={backend!r}",
    )


@ranks(2, limit_s=120)
def test_a_second_trainer_in_one_process(tmp_path: Path) -> None:
    """Meshes that are equal are as good as one. Torch's own refuses what a DTensor's plan holds."""
    with program() as made:
        option = "parallelism.spmd_backend='full_dtensor'"
        with fsdp2.replace_torch():
            first = train(made, tmp_path / "0", option)
            second = train(made, tmp_path / "1", option)
        assert first["losses"] == second["losses"]
        gc.collect()
        with pytest.raises(ValueError, match="different mesh objects"):
            train(made, tmp_path / "2", option)
    gc.collect()
    forget_plans()

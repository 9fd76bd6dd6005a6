"""Promise: Lightning's `ModelParallelStrategy` shards by fsdp2, and trains, clips, saves and loads.

The programs run as their users start them; the rest compares with torch's own in one process, where
`fsdp2.replace_torch()` holds for as long as ours is trained.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

import fsdp2
from tests.ecosystem._clients import PROGRAMS, Ran, run, run_program
from tests.kit.models import seeded
from tests.kit.pool import ranks
from tests.kit.slow import slow

pytest.importorskip("lightning", reason="the package lightning is not installed")

import lightning
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.fabric.strategies import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy

pytestmark = pytest.mark.ecosystem

WIDTH, ROWS = 12, 4


@functools.cache
def torchs_own(name: str) -> Ran:
    with tempfile.TemporaryDirectory() as folder:
        return run_program(name, "torch", folder)


@pytest.mark.parametrize("way", ["-m fsdp2", "imported before"])
@pytest.mark.parametrize("name", ["with_lightning", slow("with_lightning_fabric")])
def test_a_program_trains_as_with_torchs_own(name: str, way: str, tmp_path: Path) -> None:
    """Losses before and after a checkpoint are those of torch's own, whatever is imported first."""
    theirs = torchs_own(name)
    ours = run_program(name, way, str(tmp_path / "ours"), client="lightning.pytorch")
    assert (theirs.implementation, ours.implementation) == ("torch", "fsdp2")
    assert ours.losses == pytest.approx(theirs.losses, rel=1e-5)
    assert len(ours.losses) >= 6


@pytest.mark.parametrize("name", [slow("with_lightning"), slow("with_lightning_fabric")])
def test_the_ranks_that_lightning_starts_itself(name: str, tmp_path: Path) -> None:
    """Without torchrun it starts the program again for the second rank, which has ours as well."""
    program = str(PROGRAMS / f"{name}.py")
    ours = run([sys.executable, "-m", "fsdp2", program, str(tmp_path / "ours")])
    assert ours.implementation == "fsdp2"
    assert ours.losses == pytest.approx(torchs_own(name).losses, rel=1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def build() -> nn.Module:
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 5))


def parallelize(module: nn.Module, mesh: DeviceMesh, **kwargs: Any) -> nn.Module:
    """Shard as a user's function does: tensor parallelism where there is any, then FSDP."""
    if mesh["tensor_parallel"].size() > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in module[:2]:  # type: ignore[index]  # a Sequential
            parallelize_module(block, mesh["tensor_parallel"], plan)
    data = mesh["data_parallel"]
    for part in module[:2]:  # type: ignore[index]
        torch_fsdp.fully_shard(part, mesh=data, **kwargs)
    torch_fsdp.fully_shard(module, mesh=data, **kwargs)
    return module


def batch(step: int, rows: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(step)
    inputs = torch.randn(2 * rows, WIDTH, generator=source)[:rows]
    return inputs, torch.randn(rows, 5, generator=source)


@dataclass
class Trained:
    """What a run leaves to be compared."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    units: int = 0

    def keep(self, model: nn.Module) -> None:
        self.units = len(fsdp2.units(model))
        self.state = {
            name: value.full_tensor().clone() if isinstance(value, DTensor) else value.clone()
            for name, value in model.state_dict().items()
        }


def of_both(run: Callable[[], Trained], units: int = 3) -> None:
    """Run with ours and with torch's own, and compare the bits."""
    logging.getLogger("lightning").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with fsdp2.replace_torch():
            ours = run()
        theirs = run()
    gc.collect()
    assert (ours.units, theirs.units) == (units, 0)
    assert len(ours.losses) == len(theirs.losses) > 0
    for kind in ("losses", "norms"):
        pairs = zip(getattr(ours, kind), getattr(theirs, kind), strict=True)
        assert all(torch.equal(mine, expected) for mine, expected in pairs), kind
    assert ours.state.keys() == theirs.state.keys()
    for name, expected in theirs.state.items():
        assert torch.equal(ours.state[name], expected), name


def fabric(
    shard: Callable[..., nn.Module] = parallelize,
    precision: Any = None,
    tensor_parallel: int = 1,
    **kwargs: Any,
) -> lightning.Fabric:
    world = dist.get_world_size()
    strategy = FabricStrategy(
        shard,
        data_parallel_size=world // tensor_parallel,
        tensor_parallel_size=tensor_parallel,
        **kwargs,
    )
    made = lightning.Fabric(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        precision=precision,
        plugins=[TorchElasticEnvironment()],
    )
    made.launch()
    return made


def rows_of(made: lightning.Fabric, step: int) -> tuple[Tensor, Tensor]:
    """Return this data-parallel rank's rows of a step."""
    place = made.strategy.distributed_sampler_kwargs
    inputs, targets = batch(step, ROWS * place["num_replicas"])
    mine = slice(ROWS * place["rank"], ROWS * (place["rank"] + 1))
    return inputs[mine], targets[mine]


def fabric_steps(
    made: lightning.Fabric,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    trained: Trained,
    *,
    micro_batches: int = 1,
    clip: dict[str, float] | None = None,
) -> None:
    for step in steps:
        for index in range(micro_batches):
            inputs, targets = rows_of(made, 10 * step + index)
            with made.no_backward_sync(model, enabled=index + 1 < micro_batches):
                loss = nn.functional.mse_loss(model(inputs).float(), targets)
                made.backward(loss / micro_batches)
            trained.losses.append(loss.detach())
        if clip is not None:
            norm = made.clip_gradients(model, optimizer, **clip)
            if norm is not None:
                trained.norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        optimizer.step()
        optimizer.zero_grad()


def fabric_run(steps: dict[str, Any], **options: Any) -> Trained:
    made, trained = fabric(**options), Trained()
    model = seeded(build)
    model = made.setup_module(model)
    optimizer = made.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4))
    fabric_steps(made, model, optimizer, range(3), trained, **steps)
    trained.keep(model.module)
    return trained


BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def in_bf16(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize(module, mesh, mp_policy=torch_fsdp.MixedPrecisionPolicy(**BF16))


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, {"clip": {"max_norm": 0.1}}),
        ({}, {"clip": {"clip_val": 0.01}, "micro_batches": 2}),
        ({"precision": "bf16-true"}, {}),
        ({"precision": "bf16-mixed"}, {}),
        ({"shard": in_bf16}, {"clip": {"max_norm": 0.1}, "micro_batches": 2}),
    ],
    ids=["norm", "value_and_accumulation", "bf16_true", "bf16_mixed", "policy"],
)
@ranks(2)
def test_fabric_trains_with_the_same_bits(options: dict[str, Any], steps: dict[str, Any]) -> None:
    """Precision, clipping and accumulation without sync: losses, norms and weights."""
    of_both(functools.partial(fabric_run, steps, **options))


@ranks(4)
def test_fabric_with_tensor_parallelism() -> None:
    """The strategy's own mesh of two axes: blocks are split over both."""
    of_both(functools.partial(fabric_run, {}, tensor_parallel=2))


@ranks(2)
def test_an_optimizer_made_before_the_setup_says_so() -> None:
    """`setup(model, optimizer)` shards after the optimizer was made: torch's own trains nothing."""

    def run() -> Trained:
        made, trained = fabric(), Trained()
        model = seeded(build)
        model, optimizer = made.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        fabric_steps(made, model, optimizer, range(1), trained)
        trained.keep(model.module)
        return trained

    with fsdp2.replace_torch(), pytest.raises(fsdp2.StateError, match="Create optimizers after"):
        run()
    state = run().state
    assert all(
        torch.equal(state[name], value) for name, value in seeded(build).state_dict().items()
    )


def prepared(made: lightning.Fabric, on_meta: bool = False) -> tuple[nn.Module, Any]:
    with made.init_module(empty_init=on_meta):
        model = seeded(build)
    model = made.setup_module(model)
    return model, made.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "full"])
@ranks(2)
def test_fabric_saves_and_loads(sharded: bool, tmp_path: Path) -> None:
    """A model on meta resumes bit for bit, and each library reads the other's files."""
    paths: list[Path] = []

    def save_and_resume() -> Trained:
        trained, path = Trained(), tmp_path / f"{len(paths)}"
        made = fabric(save_distributed_checkpoint=sharded)
        model, optimizer = prepared(made)
        fabric_steps(made, model, optimizer, range(2), trained)
        made.save(path, {"model": model, "optimizer": optimizer, "step": 2})
        paths.append(path)
        fabric_steps(made, model, optimizer, range(2, 4), trained)
        read(path, trained)
        assert all(map(torch.equal, trained.losses[2:4], trained.losses[4:6]))
        return trained

    def read(path: Path, trained: Trained) -> None:
        made = fabric(save_distributed_checkpoint=sharded)
        model, optimizer = prepared(made, on_meta=True)
        state = {"model": model, "optimizer": optimizer, "step": 0}
        made.load(path, state)
        assert state["step"] == 2
        fabric_steps(made, model, optimizer, range(2, 4), trained)
        trained.keep(model.module)

    def read_the_others() -> Trained:
        trained = Trained()
        read(paths.pop(), trained)  # ours reads torch's, then torch's reads ours
        return trained

    of_both(save_and_resume)
    of_both(read_the_others)


@ranks(2)
def test_fabric_reads_a_plain_state_dict(tmp_path: Path) -> None:
    """`load_raw` fills shards of a sharded model from the file of a plain one."""
    plain = seeded(build)
    if dist.get_rank() == 0:
        torch.save(plain.state_dict(), tmp_path / "plain.pt")
    dist.barrier()

    def run() -> Trained:
        made, trained = fabric(), Trained()
        model = made.setup_module(build())
        optimizer = made.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
        made.load_raw(tmp_path / "plain.pt", model)
        fabric_steps(made, model, optimizer, range(1), trained)
        trained.keep(model.module)
        return trained

    of_both(run)


class Learner(lightning.LightningModule):
    """What a user writes for the `Trainer`."""

    def __init__(self, trained: Trained, **kwargs: Any) -> None:
        super().__init__()
        self.trained, self.kwargs = trained, kwargs
        self.model = seeded(build)

    def configure_model(self) -> None:
        if not isinstance(self.model, torch_fsdp.FSDPModule):
            parallelize(self.model, self.device_mesh, **self.kwargs)

    def training_step(self, rows: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.mse_loss(self.model(rows[0]).float(), rows[1])
        self.trained.losses.append(loss.detach())
        return loss

    def validation_step(self, rows: list[Tensor], index: int) -> None:
        loss = nn.functional.mse_loss(self.model(rows[0]).float(), rows[1])
        self.trained.losses.append(loss.detach())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


def rows(steps: int) -> DataLoader:
    inputs, targets = zip(*[batch(step, 2 * ROWS) for step in range(steps)], strict=True)
    return DataLoader(TensorDataset(torch.cat(inputs), torch.cat(targets)), batch_size=ROWS)


def trainer(folder: Path, *, sharded: bool = True, **kwargs: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(2, 1, save_distributed_checkpoint=sharded),
        plugins=[TorchElasticEnvironment()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        **{"max_steps": 4, **kwargs},
    )


@pytest.mark.parametrize(
    ("options", "kwargs"),
    [
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}, {}),
        ({"precision": "bf16-true"}, {}),
        ({"precision": "bf16-mixed"}, {}),
        ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, {"with_policy": True}),
    ],
    ids=["norm_and_accumulation", "bf16_true", "bf16_mixed", "policy"],
)
@ranks(2)
def test_the_trainer_trains_with_the_same_bits(
    options: dict[str, Any], kwargs: dict[str, Any], tmp_path: Path
) -> None:
    """Fit, with validation at its end."""

    def run() -> Trained:
        trained = Trained()
        policy = torch_fsdp.MixedPrecisionPolicy(**BF16) if kwargs else None
        learner = Learner(trained, **({"mp_policy": policy} if policy else {}))
        made = trainer(tmp_path, num_sanity_val_steps=0, **options)
        made.fit(learner, rows(8), rows(2))
        assert made.global_step == 4
        made.validate(learner, rows(2), verbose=False)
        trained.keep(learner.model)
        return trained

    of_both(run)


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "full"])
@ranks(2)
def test_the_trainer_saves_and_resumes(sharded: bool, tmp_path: Path) -> None:
    """What it resumes from a file trains on bit for bit, and either library reads the other's."""
    paths: list[Path] = []

    def save() -> Trained:
        trained, path = Trained(), tmp_path / f"{len(paths)}.ckpt"
        learner = Learner(trained)
        made = trainer(tmp_path, sharded=sharded, max_steps=2)
        made.fit(learner, rows(8))
        made.save_checkpoint(path)
        paths.append(path)
        resume(path, trained)
        return trained

    def resume(path: Path, trained: Trained) -> None:
        learner = Learner(trained)
        made = trainer(tmp_path, sharded=sharded)
        made.fit(learner, rows(8), ckpt_path=path)
        assert made.global_step == 4
        trained.keep(learner.model)

    def resume_the_others() -> Trained:
        trained = Trained()
        resume(paths.pop(), trained)
        return trained

    of_both(save)
    of_both(resume_the_others)

"""Promise: torch.distributed.checkpoint reads and writes a sharded model as it does a plain one.

A checkpoint written on one layout loads on any other, bit for bit, and training goes on as if
nothing had happened. `write` and `read` are two jobs of different world sizes that meet in a folder
only; the tests below the matrix run in one job.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

import fsdp2
from tests._models import VOCAB, WIDTH, seeded
from tests._parity import bits, global_mean, names_of, whole
from tests._pool import RankPool, ranks

HIDDEN = 30  # torch's ColwiseParallel computes with equal parts only: two ranks hold 15 rows each
FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


# --- a model with one parameter of every kind -----------------------------------------------------


class OddBlock(nn.Module):
    """One row, fewer rows than ranks, frozen, buffers; and the kinds that torch's own refuses."""

    def __init__(self, for_torch: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.row = nn.Parameter(torch.randn(1, WIDTH) / 4)
        self.few = nn.Parameter(torch.randn(2, WIDTH) / 4)
        self.frozen = nn.Parameter(torch.randn(WIDTH) / 4, requires_grad=False)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scratch", torch.rand(3), persistent=False)
        turned = (torch.randn(29, WIDTH) / 4).t()
        gains = torch.linspace(0.5, 1.5, WIDTH)
        if for_torch:
            self.scale = nn.Parameter(torch.full((1,), 0.7))
            self.turned = nn.Parameter(turned.contiguous())
            self.gains = nn.Parameter(gains)
        else:
            self.scale = nn.Parameter(torch.tensor(0.7))
            self.turned = nn.Parameter(turned)
            self.gains = nn.Parameter(gains.bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale + self.row + self.frozen
        x = x + torch.tanh(x @ self.few.t()) @ self.few
        x = x + 0.1 * torch.tanh(x @ self.turned) @ self.turned.t()
        return x * self.gains.float()


class OddModel(nn.Module):
    """Odd blocks between an embedding and a head in a unit of its own; the two are tied."""

    def __init__(self, for_torch: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(OddBlock(for_torch) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False))
        if not for_torch:
            self.head[1].weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def columns(parameter: nn.Parameter) -> Placement | None:
    """Matrices on dim 1, vectors whole on every rank."""
    return Shard(1) if parameter.dim() == 2 else Replicate()


@dataclass(frozen=True)
class Layout:
    """How a model lies over a job: plain (no mesh), sharded by `library`, or by rows and TP."""

    world_size: int = 1
    mesh: tuple[int, ...] = ()
    tensor_parallel: bool = False
    placement: Callable[[nn.Parameter], Placement | None] | None = None
    library: types.ModuleType = fsdp2


LAYOUTS = {
    "plain": Layout(),
    "1": Layout(1, (1,)),
    "2": Layout(2, (2,)),
    "3": Layout(3, (3,)),
    "4": Layout(4, (4,)),
    "2x2": Layout(4, (2, 2)),
    "1x3": Layout(3, (1, 3)),
    "tensor": Layout(4, (2, 2), tensor_parallel=True),
    "columns": Layout(3, (3,), placement=columns),
    "torch": Layout(3, (3,), library=torch_fsdp),
    "torch2x2": Layout(4, (2, 2), library=torch_fsdp),
    "torch_tensor": Layout(4, (2, 2), tensor_parallel=True, library=torch_fsdp),
}


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


def momentum(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


OPTIMIZERS = {"adamw": adamw, "momentum": momentum}


class Run:
    """A model on a layout with its optimizer, and the batches that it trains on."""

    def __init__(
        self,
        layout: str = "2",
        optimizer: str = "adamw",
        *,
        for_torch: bool = False,
        seed: int = 1,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        plan = LAYOUTS[layout]
        model = seeded(lambda: OddModel(for_torch), seed) if model is None else model
        self.model, self.optimizer_name = model, optimizer
        self.data: DeviceMesh | None = None
        if plan.mesh:
            self._shard(plan, kwargs)
        self.optimizer = self.make_optimizer()

    def _shard(self, plan: Layout, kwargs: dict[str, Any]) -> None:
        mesh = data = init_device_mesh("cpu", plan.mesh, mesh_dim_names=("a", "b")[-len(plan.mesh) :])
        if plan.tensor_parallel:
            data = mesh["a"]
            for block in self.model.blocks:  # type: ignore[union-attr]  # a ModuleList
                parallelize_module(
                    block, mesh["b"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
                )
        self.data = data
        if plan.placement is not None:
            kwargs = {"shard_placement_fn": plan.placement, **kwargs}
        # a sum in fp64 rounds to the same gradients in any order: replicas of a scalar stay equal
        policy = plan.library.MixedPrecisionPolicy(reduce_dtype=torch.float64)
        kwargs = {"mp_policy": policy, **kwargs}
        for unit in (*self.model.blocks, self.model.head, self.model):  # type: ignore[misc]
            plan.library.fully_shard(unit, mesh=data, **kwargs)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Return an optimizer of two groups; frozen parameters are in them too."""
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "lr": 0.02, "weight_decay": 0.0},
        ]
        return OPTIMIZERS[self.optimizer_name](groups)

    def batch(self, step: int) -> Tensor:
        """Return this rank's rows of the global batch of a step."""
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, VOCAB, (12, 5), generator=generator)
        if self.data is None:
            return ids
        index = 0
        for size, place in zip(self.data.shape, self.data.get_coordinate(), strict=True):
            index = index * size + place
        return ids.chunk(self.data.size())[index]

    def loss(self, step: int) -> Tensor:
        ids = self.batch(step)
        return F.cross_entropy(self.model(ids).flatten(0, 1), ids.flatten())

    def train(self, first: int, steps: int) -> list[Tensor]:
        """Train some steps; return their global losses."""
        losses = []
        for step in range(first, first + steps):
            loss = self.loss(step)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.detach() if self.data is None else global_mean(loss))
        return losses

    def snapshot(self) -> dict[str, Any]:
        """Return copies of all values, whole, read from the objects themselves."""
        state = self.optimizer.state
        return {
            "parameters": {n: whole(p).clone() for n, p in names_of(self.model).items()},
            "buffers": {n: b.clone() for n, b in self.model.named_buffers()},
            "state": {
                name: {key: whole(value).clone() for key, value in state[p].items()}
                for name, p in names_of(self.model).items()
                if p in state
            },
            "groups": [
                {key: value for key, value in group.items() if key != "params"}
                for group in self.optimizer.param_groups
            ],
        }


def assert_equal(actual: dict[str, Any], expected: dict[str, Any], skip: str = "scratch") -> None:
    """Assert that two snapshots agree bit for bit; non-persistent buffers are not in a checkpoint."""
    for part in ("parameters", "buffers"):
        assert list(actual[part]) == list(expected[part])
        for name, value in expected[part].items():
            if not name.endswith(skip):
                assert_bitwise(actual[part][name], value, name)
    assert set(actual["state"]) == set(expected["state"])
    for name, state in expected["state"].items():
        assert set(actual["state"][name]) == set(state), name
        for key, value in state.items():
            assert_bitwise(actual["state"][name][key], value, f"{key} of {name}")
    assert actual["groups"] == expected["groups"]


def assert_bitwise(actual: Tensor, expected: Tensor, what: str) -> None:
    assert actual.dtype == expected.dtype, what
    assert actual.shape == expected.shape, what
    assert torch.equal(bits(actual), bits(expected)), f"{what} differs"


def differs(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return any(not torch.equal(v, b["parameters"][n]) for n, v in a["parameters"].items())


# --- written by one job, read by another ----------------------------------------------------------


def job(body: Callable[..., None]) -> Callable[..., None]:
    """Let ranks find a body that is no test by itself."""
    body.body = body  # type: ignore[attr-defined]  # what a rank looks for
    return body


@job
def write(layout: str, optimizer: str, for_torch: bool, folder: str) -> None:
    """Train, save, write down what was saved, and train on."""
    run = Run(layout, optimizer, for_torch=for_torch)
    run.train(0, 2)
    model, optim = get_state_dict(run.model, run.optimizer)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=f"{folder}/saved")
    snapshot = run.snapshot()
    losses = run.train(2, 3)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save({"snapshot": snapshot, "losses": losses}, f"{folder}/expected.pt")


@job
def read(layout: str, optimizer: str, for_torch: bool, folder: str, loss_rtol: float) -> None:
    """Load into another model, compare with what the writer wrote down, and train on."""
    expected = torch.load(f"{folder}/expected.pt")
    run = Run(layout, optimizer, for_torch=for_torch, seed=5)
    scratch = run.model.blocks[0].scratch.clone()
    assert differs(run.snapshot(), expected["snapshot"])
    model, optim = get_state_dict(run.model, run.optimizer)
    dcp.load({"model": model, "optim": optim}, checkpoint_id=f"{folder}/saved")
    set_state_dict(run.model, run.optimizer, model_state_dict=model, optim_state_dict=optim)
    assert_equal(run.snapshot(), expected["snapshot"])
    assert torch.equal(run.model.blocks[0].scratch, scratch)
    losses = run.train(2, 3)
    # the first loss follows from what was loaded, the next ones from gradients in bf16 too
    rtols = [min(loss_rtol, 1e-6), loss_rtol, loss_rtol]
    for loss, other, rtol in zip(losses, expected["losses"], rtols, strict=True):
        torch.testing.assert_close(loss, other, rtol=rtol, atol=0)


def write_and_read(
    pool: RankPool,
    folder: Path,
    source: str,
    target: str,
    optimizer: str,
    *,
    for_torch: bool = False,
    loss_rtol: float = 0.0,
) -> None:
    given = {"optimizer": optimizer, "for_torch": for_torch, "folder": str(folder)}
    for body, layout, more in (
        (write, source, {}),
        (read, target, {"loss_rtol": loss_rtol}),
    ):
        pool.run(
            body,
            LAYOUTS[layout].world_size,
            {"layout": layout, **given, **more},
            name=f"{body.__name__} {layout}",
            limit_s=60.0,
            with_process_group=layout != "plain",
        )


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize("layout", ["2", "3", "columns", "2x2", "tensor"])
def test_training_resumes_bit_for_bit(
    rank_pool: RankPool, tmp_path: Path, layout: str, optimizer: str
) -> None:
    """Loaded on the layout that wrote it, a checkpoint continues with the same losses, all bits."""
    write_and_read(rank_pool, tmp_path, layout, layout, optimizer)


@pytest.mark.parametrize(
    ("source", "target", "optimizer"),
    [
        ("2", "4", "adamw"),
        ("4", "3", "momentum"),
        ("3", "2x2", "adamw"),
        ("2x2", "3", "momentum"),
        ("2", "tensor", "adamw"),
        ("tensor", "3", "adamw"),
        ("4", "columns", "adamw"),
        ("columns", "2x2", "momentum"),
        ("plain", "3", "adamw"),
        ("4", "plain", "adamw"),
        ("tensor", "plain", "momentum"),
        ("plain", "tensor", "momentum"),
    ],
)
def test_a_checkpoint_moves_to_another_layout(
    rank_pool: RankPool, tmp_path: Path, source: str, target: str, optimizer: str
) -> None:
    """What one layout saved is loaded on another bit for bit, and training goes on from there."""
    write_and_read(rank_pool, tmp_path, source, target, optimizer, loss_rtol=1e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "momentum"])
@pytest.mark.parametrize(
    ("source", "target"),
    [("torch", "4"), ("torch2x2", "3"), ("3", "torch"), ("2x2", "torch2x2"), ("columns", "torch")],
)
def test_checkpoints_are_those_of_torch(
    rank_pool: RankPool, tmp_path: Path, source: str, target: str, optimizer: str
) -> None:
    """Files that torch's own fully_shard wrote load here, files from here load there, all bits."""
    write_and_read(
        rank_pool, tmp_path, source, target, optimizer, for_torch=True, loss_rtol=1e-6
    )

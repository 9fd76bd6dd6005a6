"""Promise: `fsdp2.checkpoint` moves state between meshes, libraries and files, whole or not at all.

Everything is compared with a plain model and optimizer, or with what torch's own FSDP1, FSDP2 and
`torch.distributed.checkpoint` read and write.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1

import fsdp2
from fsdp2 import checkpoint
from fsdp2._core.comm.process_mesh import Grid
from tests.kit.allocations import peak_of
from tests.kit.collectives import Sent
from tests.kit.in_turn import advance, assert_same_bits
from tests.kit.meshes import DEVICE, random_numbers
from tests.kit.models import VOCAB, WIDTH, Batch, Case, seeded
from tests.kit.parity import assert_values, bits, make_mesh, names_of, shard, values_of, whole
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow


class Odd(nn.Module):
    """A tie, a scalar, one row, a frozen parameter, buffers and extra state."""

    def __init__(self, scalar: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full(() if scalar else (1,), 0.7))
        self.row = nn.Parameter(torch.randn(1, WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=not scalar)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.rand(3), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        self.count += 1
        x = self.embed(ids) + self.row * self.scale + self.frozen
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


class WithExtra(nn.Linear):
    """A layer whose state is more than tensors."""

    steps = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


ODD = Case(Odd, lambda model: list(model.blocks), lambda rows: Batch((), {}))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        model = Odd()
    return shard(model, ODD)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1 and p.requires_grad]
    return torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )


def simple_optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return one with a single group: FSDP1's parameters are flat, so their dims tell nothing."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def batch(step: int) -> Tensor:
    return torch.randint(0, VOCAB, (12, 5), generator=random_numbers(step))


def train(model: nn.Module, optimizer: Any, steps: range, is_alone: bool = False) -> None:
    """Train on the global batch, each rank with its part."""
    for step in steps:
        parts = batch(step).chunk(1 if is_alone else dist.get_world_size())
        model(parts[0 if is_alone else dist.get_rank()]).square().mean().backward()
        advance(optimizer)


class Trained:
    """A model, plain or sharded, and its optimizer, after some steps on the global batch."""

    def __init__(
        self, mesh: Any = None, seed: int = 1, steps: int = 0, scalar: bool = True
    ) -> None:
        self.mesh = mesh
        self.model: nn.Module = seeded(lambda: Odd(scalar), seed)
        if mesh is not None:
            shard(self.model, ODD, mesh=mesh)
        self.optimizer = optimizer_of(self.model) if scalar else simple_optimizer_of(self.model)
        self.train(range(steps))

    def train(self, steps: range) -> None:
        train(self.model, self.optimizer, steps, is_alone=self.mesh is None)


def moved(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [dict(optimizer.state[p]) for g in optimizer.param_groups for p in g["params"]]


def assert_equal_runs(actual: Trained, expected: Trained) -> None:
    """Assert that parameters, buffers, and optimizer states are the same bits."""
    for name, parameter in names_of(expected.model).items():
        assert torch.equal(bits(whole(names_of(actual.model)[name])), bits(whole(parameter))), name
    for name, buffer in expected.model.named_buffers():
        if name != "scratch":
            assert torch.equal(actual.model.get_buffer(name), buffer), name
    for found, wanted in zip(moved(actual.optimizer), moved(expected.optimizer), strict=True):
        assert set(found) == set(wanted)
        for key, value in wanted.items():
            assert torch.equal(whole(found[key]), whole(value)), key
    groups = zip(actual.optimizer.param_groups, expected.optimizer.param_groups, strict=True)
    for mine, theirs in groups:
        assert {**mine, "params": 0} == {**theirs, "params": 0}


def meshes_of(world_size: int) -> list[tuple[int, ...]]:
    return [(world_size,), (2, 2)] if world_size == 4 else [(world_size,)]


# --- full -----------------------------------------------------------------------------------------


@ranks(slow(1), 3, slow(4))
def test_a_full_state_is_that_of_one_process(world_size: int, rank: int) -> None:
    """Names, order, values, ties; under ids it is what the plain optimizer loads."""
    for shape in meshes_of(world_size):
        run = Trained(make_mesh(*shape), steps=2)
        state = checkpoint.full_state(run.model, run.optimizer, optim_keys="id", max_bytes=2000)
        if rank != 0:
            assert state == {}
            continue
        plain = Trained(seed=9)
        assert list(state["model"]) == list(plain.model.state_dict())
        assert state["model"]["head.weight"] is state["model"]["embed.weight"]
        assert {type(value) for value in state["model"].values()} == {Tensor}
        plain.model.load_state_dict(state["model"])
        plain.optimizer.load_state_dict(state["optimizer"])
        for name, value in state["model"].items():
            assert torch.equal(plain.model.state_dict()[name], value)
        plain.train(range(2, 3))
    everywhere = checkpoint.full_state(run.model, run.optimizer, rank0_only=False)
    assert whole(run.model.row).tolist() == everywhere["model"]["row"].tolist()
    named = everywhere["optimizer"]
    assert named["param_groups"][1]["params"][-1] == "scale" or "scale" in named["state"]
    assert set(named["state"]) == {n for n, p in run.model.named_parameters() if p.requires_grad}


@ranks(3, slow(4))
def test_a_full_state_is_scattered_from_rank_0(world_size: int, rank: int) -> None:
    """From a plain run, and from one sharded otherwise, under names or ids, into a stepped one."""
    plain = Trained(steps=2)
    ids = {"model": plain.model.state_dict(), "optimizer": plain.optimizer.state_dict()}
    for shape in meshes_of(world_size):
        for keys in ("id", "name"):
            state: Any = ids if keys == "id" else dict(ids)
            if keys == "name":
                state["optimizer"] = checkpoint.rekey(
                    ids["optimizer"], "name", model=plain.model, optimizer=plain.optimizer
                )
                assert "embed.weight" in state["optimizer"]["state"]
            run = Trained(make_mesh(*shape), seed=3, steps=1 if keys == "id" else 0)
            given = state if rank == 0 else None
            checkpoint.load_full_state(run.model, given, run.optimizer, max_bytes=700)
            assert_equal_runs(run, plain)
            exp_avg = run.optimizer.state[run.model.embed.weight]["exp_avg"]
            assert exp_avg.placements == run.model.embed.weight.placements
        checkpoint.load_full_state(run.model, ids, run.optimizer, from_rank0=False)
        assert_equal_runs(run, plain)
        run.train(range(2, 4))
        whole_run = checkpoint.full_state(run.model, run.optimizer, rank0_only=False)
    plain.train(range(2, 4))
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(whole_run["model"][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["full", "sharded"])
@ranks(2)
def test_a_state_loads_onto_meta(form: str, rank: int) -> None:
    run = Trained(make_mesh() if form == "sharded" else None, steps=1)
    model = on_meta()
    if form == "full":
        state = {"model": run.model.state_dict()} if rank == 0 else None
        checkpoint.load_full_state(model, state)
    else:
        with pytest.raises(fsdp2.StateError, match=r"fsdp2\.materialize first"):
            checkpoint.load_local_state(model, checkpoint.local_state(run.model))
        keys = checkpoint.load_sharded_state(model, checkpoint.sharded_state(run.model))
        assert not any(keys)
    assert_same_bits(model, run.model)
    assert model.count.item() == 1
    assert model.scratch.is_meta
    model.scratch = torch.rand(3)
    model(batch(0)).sum().backward()
    assert names_of(model)["head.weight"] is names_of(model)["embed.weight"]


@pytest.mark.parametrize("flag", ["strict", "verify", "trust"])
@ranks(1)
def test_a_word_is_no_flag(flag: str, tmp_path: Path) -> None:
    """Every word is true, "no" as well."""
    model = Trained(make_mesh()).model
    checkpoint.save(tmp_path / "a", model)
    checkpoint.save_safetensors(tmp_path / "b", model)
    options: dict[str, Any] = {flag: "no"}
    with pytest.raises(fsdp2.ConfigError, match=f"{flag} to be a bool"):
        checkpoint.load(tmp_path / "a", model, **options)
    with pytest.raises(fsdp2.ConfigError, match=f"{flag} to be a bool"):
        checkpoint.load_safetensors(tmp_path / "b", model, **options)


class Broken(dict[str, Any]):
    """A state whose values cannot be read (a file that ends too early)."""

    def __getitem__(self, key: str) -> Any:
        raise OSError(f"cannot read {key}")


@ranks(2)
def test_errors_are_the_same_on_every_rank(rank: int) -> None:
    run = Trained(make_mesh(), steps=1)
    before = values_of(run.model)
    full = checkpoint.full_state(run.model, run.optimizer)

    def changed(change: Any) -> Any:
        if rank != 0:
            return None
        state = {"model": dict(full["model"]), "optimizer": dict(full["optimizer"])}
        change(state)
        return state

    cases = [
        (lambda s: s["model"].pop("row"), r"1 missing names: row\. To load only what fits"),
        (lambda s: s["model"].update(more=torch.ones(1)), "1 names that the model lacks: more"),
        (
            lambda s: s["model"].update(row=torch.ones(2, 3)),
            r"row: \(1, 13\) in the model, \(2, 3\)",
        ),
        (lambda s: s.pop("optimizer"), "has no 'optimizer'"),
        (lambda s: s.pop("model"), "expected {'model'"),
        (lambda s: s["optimizer"].update(param_groups=[]), "no param group with"),
    ]
    for change, message in cases:
        with pytest.raises(fsdp2.ConfigError, match=message):
            checkpoint.load_full_state(run.model, changed(change), run.optimizer)
    with pytest.raises(fsdp2.ConfigError, match="several groups"):
        checkpoint.load_full_state(run.model, full or None, simple_optimizer_of(run.model))
    assert_values(run.model, before)
    keys = checkpoint.load_full_state(
        run.model,
        changed(lambda s: (s["model"].pop("row"), s["model"].pop("head.weight"))),
        strict=False,
    )
    assert keys == (["row"], [])
    other = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1)
    with pytest.raises(fsdp2.ConfigError, match="is not a parameter of the model"):
        checkpoint.full_state(run.model, other)
    with pytest.raises(fsdp2.ConfigError, match="expected 'name' or 'id'"):
        checkpoint.full_state(run.model, optim_keys="names")  # type: ignore[arg-type]
    state = {"model": Broken(full["model"])} if rank == 0 else None
    with pytest.raises(fsdp2.StateError, match="rank 0 failed with OSError: cannot read"):
        checkpoint.load_full_state(run.model, state)


@ranks(2, slow(3))
def test_only_the_writer_holds_more_than_the_cap(rank: int) -> None:
    """No file, no collective and no conversion may hold more on a rank that does not write."""
    model = nn.Sequential(*(nn.Linear(200, 300, bias=False) for _ in range(6)))
    model.append(nn.Linear(200, 900, bias=False))
    fsdp2.fully_shard(model, mesh=make_mesh())
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for max_bytes in (100_000, 500_000):
        state: dict[str, Any] = {}

        def take(cap: int = max_bytes, into: dict[str, Any] = state) -> None:
            into.update(checkpoint.full_state(model, optimizer, max_bytes=cap))

        taken = peak_of(take)
        fresh: Any = torch.optim.Adam(model.parameters())
        shards = sum(p.to_local().nbytes for p in model.parameters())
        given = peak_of(
            lambda: checkpoint.load_full_state(model, state or None, fresh, max_bytes=max_bytes)  # noqa: B023  # at once
        )
        if rank != 0:
            assert taken <= max_bytes
            assert given <= 2 * shards + 1.05 * max_bytes  # the new optimizer's two moments


# --- sharded and rank-local -----------------------------------------------------------------------


@ranks(2)
def test_sharded_and_local_states_load_back(rank: int) -> None:
    run, other = Trained(make_mesh(), steps=2), Trained(make_mesh(), seed=4)
    state = checkpoint.sharded_state(run.model, run.optimizer)
    assert state["model"]["row"].to_local().data_ptr() == run.model.row.to_local().data_ptr()
    checkpoint.load_sharded_state(other.model, state, other.optimizer)
    assert_equal_runs(other, run)
    local = checkpoint.local_state(run.model, run.optimizer)
    file = io.BytesIO()
    torch.save(local, file)
    file.seek(0)
    third = Trained(make_mesh(), seed=5, steps=1)
    again = torch.load(file)
    for _ in range(2):  # training does not go on in the memory of what was loaded
        checkpoint.load_local_state(third.model, again, third.optimizer)
        assert_equal_runs(third, run)
        third.train(range(2, 3))
    run.train(range(2, 3))
    assert_equal_runs(third, run)
    elsewhere = Trained(make_mesh(2, 1))
    with pytest.raises(fsdp2.ConfigError, match=r"loads only on the same ranks and meshes"):
        checkpoint.load_local_state(elsewhere.model, local)
    with pytest.raises(fsdp2.ConfigError, match=r"Use save and load, or the full state"):
        checkpoint.load_sharded_state(elsewhere.model, state)


# --- files ----------------------------------------------------------------------------------------


@ranks(3)
def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    run = Trained(make_mesh(), steps=2)
    checkpoint.save(path, run.model, run.optimizer, extra={"step": 2, "rates": [1.0, 0.5]})
    other = Trained(make_mesh(), seed=4, steps=1)
    extra = checkpoint.load(path, other.model, other.optimizer)
    assert extra == {"step": 2, "rates": [1.0, 0.5]}
    assert_equal_runs(other, run)
    run.train(range(2, 3))
    checkpoint.save(path, run.model, run.optimizer)
    assert checkpoint.load(path, other.model, other.optimizer) is None
    assert_equal_runs(other, run)
    assert os.listdir(tmp_path) == ["checkpoint"]
    model = on_meta()
    checkpoint.load(path, model)
    assert torch.equal(whole(model.row), whole(run.model.row))
    with pytest.raises(fsdp2.ConfigError, match=r"no checkpoint at"):
        checkpoint.load(tmp_path / "nothing", run.model)
    narrow = nn.Linear(2, 2)
    fsdp2.fully_shard(narrow, mesh=make_mesh())
    with pytest.raises(fsdp2.ConfigError, match=r"missing names: weight"):
        checkpoint.load(path, narrow)


class Running(nn.Module):
    """Buffers, and a parameter that is not sharded: each rank has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(*(nn.BatchNorm1d(5) for _ in range(4)))
        self.own = nn.Parameter(torch.zeros(7))

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for tensor in (*self.buffers(), self.own):
                tensor.fill_(value)


@ranks(3)
def test_a_save_keeps_what_the_first_rank_has(tmp_path: Path, rank: int) -> None:
    """As ``full_state`` does. DCP took each buffer from another rank: a mean of one, a variance of
    the next; and the moments of a plain parameter from a third.
    """
    model = Running()
    fsdp2.fully_shard(model, ignored_params={model.own}, mesh=make_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + rank)
    optimizer.step()
    moment = optimizer.state[model.own]["exp_avg"].fill_(10.0 + rank)
    model.fill(10.0 + rank)
    checkpoint.save(tmp_path / "saved", model, optimizer)
    model.fill(-1.0)
    moment.fill_(-1.0)
    checkpoint.load(tmp_path / "saved", model, optimizer)
    for tensor in (*model.buffers(), model.own, optimizer.state[model.own]["exp_avg"]):
        assert torch.equal(tensor, torch.full_like(tensor, 10.0))


@ranks(4)
def test_stages_of_a_pipeline_save_by_themselves(tmp_path: Path, rank: int) -> None:
    """DCP took all ranks of the job for one model's: a stage's checkpoint had no metadata."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("pipe", "data"))
    stage = mesh["pipe"].get_local_rank()
    model = nn.ModuleDict({f"stage{stage}": nn.BatchNorm1d(5)})
    fsdp2.fully_shard(model[f"stage{stage}"], mesh=mesh["data"])
    for buffer in model.buffers():
        buffer.fill_(rank)
    checkpoint.save(tmp_path / f"stage{stage}", model)
    for buffer in model.buffers():
        buffer.fill_(-1)
    checkpoint.load(tmp_path / f"stage{stage}", model)
    assert {buffer.max().item() for buffer in model.buffers()} == {mesh["data"].mesh[0].item()}


@ranks(4)
def test_objects_of_a_grid_of_ranks(rank: int) -> None:
    """Over each axis in turn, without a process group of all: a stage's ranks may have none."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    for grid, ranks_ in (
        (Grid.of(mesh), [0, 1, 2, 3]),
        (Grid.of(mesh["shard"]), [rank // 2 * 2, rank // 2 * 2 + 1]),
        (Grid.of(mesh["replicate"]), [rank % 2, rank % 2 + 2]),
        (Grid(()), [rank]),
    ):
        gathered = grid.gather(f"rank {rank}")
        assert gathered == ([f"rank {each}" for each in ranks_] if rank == ranks_[0] else None)
        assert grid.scatter(gathered) == f"rank {rank}"


@ranks(4)
def test_replicas_write_each_shard_once(tmp_path: Path, rank: int) -> None:
    """On a mesh of two dims; torch reads it, without ranks."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Linear(5, 13)
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    fsdp2.fully_shard(model, mesh=mesh)
    checkpoint.save(tmp_path / "saved", model)
    found = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load({"model": found}, checkpoint_id=tmp_path / "saved", no_dist=True)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    written = dcp.FileSystemReader(tmp_path / "saved").read_metadata().storage_data
    assert sorted((index.fqn, tuple(index.offset)) for index in written) == [
        ("model.bias", (0,)),
        ("model.bias", (7,)),
        ("model.weight", (0, 0)),
        ("model.weight", (7, 0)),
    ]


@ranks(4)
def test_a_model_on_some_ranks_of_a_job(tmp_path: Path, rank: int) -> None:
    """The other ranks take no part; one may have a mesh alone."""
    three, alone = DeviceMesh(DEVICE, [0, 1, 2]), DeviceMesh(DEVICE, [3])
    model = nn.Linear(3, 13)
    fsdp2.fully_shard(model, mesh=three if rank < 3 else alone)
    name = "three" if rank < 3 else "alone"
    before = model.weight.full_tensor()
    for _ in range(3):
        checkpoint.save(tmp_path / name, model)
    with torch.no_grad():
        model.weight.zero_()
    checkpoint.load(tmp_path / name, model)
    assert torch.equal(model.weight.full_tensor(), before)


@ranks(2)
def test_a_save_sends_no_parameters(tmp_path: Path) -> None:
    """The tutorial says so. What travels is who writes what: names and shapes."""
    model = fsdp2.fully_shard(nn.Linear(400, 400), mesh=make_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 400)).sum().backward()
    optimizer.step()
    with Sent() as sent:
        checkpoint.save(tmp_path / "saved", model, optimizer)
    files = [file.stat().st_size for file in (tmp_path / "saved").glob("*.distcp")]
    assert len(files) == dist.get_world_size()
    whole_nbytes = 3 * 4 * 400 * 401  # the parameters, and two moments
    assert min(files) > 0.49 * whole_nbytes
    assert 0 < sent.nbytes < 0.05 * whole_nbytes


@pytest.mark.parametrize("failing", with_slow([0, 1], [1]))
@ranks(2)
def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path, failing: int, rank: int) -> None:
    """A disk that is full on one rank: every rank raises, and the old checkpoint loads."""
    path = tmp_path / "checkpoint"
    run = Trained(make_mesh(), steps=1)
    checkpoint.save(path, run.model, run.optimizer)
    saved = values_of(run.model)
    run.train(range(1, 2))
    error = OSError("No space left on device")
    full_disk = mock.patch.object(torch, "save", side_effect=error)  # which torch's writer calls
    with (
        full_disk if rank == failing else contextlib.nullcontext(),
        pytest.raises(fsdp2.StateError, match="No space left on device"),
    ):
        checkpoint.save(path, run.model, run.optimizer)
    dist.barrier()  # rank 0 removes what it has written
    assert os.listdir(tmp_path) == ["checkpoint"]
    checkpoint.load(path, run.model, run.optimizer)
    assert_values(run.model, saved)


@ranks(2)
def test_what_else_is_in_the_folder_stays(tmp_path: Path, rank: int) -> None:
    """Files of others survive saves, stopped ones too, and a link to a folder stays a link."""
    real, link = tmp_path / "real", tmp_path / "latest[1]"
    run = Trained(make_mesh(), steps=1)
    if rank == 0:
        real.mkdir()
        link.symlink_to(real)
    dist.barrier()
    for _ in range(2):
        checkpoint.save(link, run.model)
        checkpoint.load(link, run.model)
        dist.barrier()
        if rank == 0:
            (real / "notes.txt").write_text("mine")
            (real / "logs").mkdir(exist_ok=True)
        dist.barrier()
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["latest[1]", "real"]
    assert (real / "notes.txt").read_text() == "mine"
    assert (real / "logs").is_dir()
    dist.barrier()
    if rank == 0:  # stopped between its renames; somebody made the folder again
        os.rename(real, tmp_path / ".real.old")
        real.mkdir()
        (real / "new.txt").write_text("mine too")
    dist.barrier()
    checkpoint.load(link, run.model)
    checkpoint.save(link, run.model)
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["latest[1]", "real"]
    assert {"notes.txt", "logs", "new.txt", ".metadata"} <= set(os.listdir(real))
    with pytest.raises(fsdp2.ConfigError, match=r"notes.txt is a file"):
        checkpoint.save(real / "notes.txt", run.model)


@ranks(2)
def test_extra_comes_back_as_it_was_on_the_first_rank(tmp_path: Path, rank: int) -> None:
    run = Trained(make_mesh())
    average = fsdp2.optim.EMA(run.model, 0.9).state_dict()
    row, scale = run.model.row.detach(), run.model.scale.detach()
    plain = {"numbers": {0: "a", 1: "b"}, "empty": [{}, [], None, ()]}
    extra = plain | {
        "pair": (1, torch.full((3,), float(rank))),
        "deep": [{"rank": rank, 3: {4: complex(rank)}}],
        "ema": average,
        "places": [row, torch.arange(3), scale, {"last": torch.ones(2), "row": row}],
    }
    checkpoint.save(tmp_path / "step", run.model, extra=extra)
    found = checkpoint.load(tmp_path / "step", run.model)
    assert {k: found[k] for k in plain} == plain
    assert found["deep"] == [{"rank": 0, 3: {4: 0j}}]
    assert found["pair"][0] == 1
    assert not found["pair"][1].any()
    for name, value in average["averages"].items():
        assert torch.equal(found["ema"]["averages"][name], whole(value)), name
    fsdp2.optim.EMA(run.model, 0.9).load_state_dict(found["ema"])
    *first, last = found["places"]
    wanted = [row, torch.arange(3), scale, torch.ones(2), row]
    for value, expected in zip([*first, last["last"], last["row"]], wanted, strict=True):
        assert torch.equal(value, whole(expected))


class Preconditioned(torch.optim.Optimizer):
    """Keeps tensors in lists and dicts, as some second-order optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "betas": (0.9, 0.99)})

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            factors = [param.detach() + 1, torch.arange(3.0), {"of": [param.detach() * 2]}]
            self.state[param] = {"step": 3, "factors": factors, "none": None}


@pytest.mark.parametrize(
    "form", with_slow(["files", "full", "local", "sharded"], ["files", "local", "sharded"])
)
@ranks(2)
def test_optimizers_that_keep_tensors_in_containers(tmp_path: Path, form: str, rank: int) -> None:
    def made(seed: int) -> tuple[nn.Module, Preconditioned]:
        model = shard(seeded(Odd, seed), ODD)
        return model, Preconditioned(model.parameters())

    (model, optimizer), other = made(1), made(2)
    optimizer.step()
    if form == "files":
        checkpoint.save(tmp_path / "step", model, optimizer)
        checkpoint.load(tmp_path / "step", *other)
    else:
        capped = {"max_bytes": 100} if form == "full" else {}
        state = getattr(checkpoint, f"{form}_state")(model, optimizer, **capped)
        if form != "sharded" and state:
            row = state["optimizer"]["state"]["row"]["factors"]
            assert all(type(t) is Tensor for t in (*row[:2], row[2]["of"][0]))
        load = getattr(checkpoint, f"load_{form}_state")
        load(other[0], state or None, other[1], **capped)
    for mine, theirs in zip(model.parameters(), other[0].parameters(), strict=True):
        expected, found = optimizer.state[mine], other[1].state[theirs]
        assert (found["step"], found["none"]) == (3, None)
        assert isinstance(found["factors"], list)
        assert torch.equal(whole(found["factors"][0]), whole(expected["factors"][0]))
        assert torch.equal(found["factors"][1], torch.arange(3.0))
        inner = found["factors"][2]["of"][0]
        assert inner.placements == theirs.placements
        assert torch.equal(whole(inner), whole(expected["factors"][2]["of"][0]))


@ranks(2)
def test_a_checkpoint_of_plain_state_dicts(tmp_path: Path) -> None:
    """The optimizer's own, under ids, of which ``torch.distributed.checkpoint`` makes strings."""
    run, other = Trained(make_mesh(), steps=2), Trained(make_mesh(), seed=4)
    states = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    dcp.save(states, checkpoint_id=tmp_path / "step")
    checkpoint.load(tmp_path / "step", other.model, other.optimizer)
    assert_equal_runs(other, run)


KILLED = """
import os, sys, torch, torch.nn as nn
from fsdp2 import checkpoint
model = nn.Linear(3, 3)
nn.init.constant_(model.weight, 1.0)
checkpoint.save(sys.argv[1], model)
nn.init.constant_(model.weight, 2.0)
write = torch.save
def die(value, file, *args, **kwargs):
    file.write(b"half of a tensor")
    file.flush()
    os._exit(9)
torch.save = die
checkpoint.save(sys.argv[1], model)
"""


def test_a_save_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    """The process ends in the middle of a file; a process alone can save and load, too."""
    path = tmp_path / "checkpoint"
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED, str(path)], check=False)
    assert ended.returncode == 9
    assert len(os.listdir(tmp_path)) == 2
    model = nn.Linear(3, 3)
    checkpoint.load(path, model)
    assert model.weight.unique().tolist() == [1.0]
    checkpoint.save(path, model)
    assert os.listdir(tmp_path) == ["checkpoint"]


@pytest.mark.parametrize("max_file_bytes", with_slow([10**9, 2000], [2000]))
@ranks(2)
def test_safetensors(tmp_path: Path, max_file_bytes: int, rank: int) -> None:
    """One file or several with an index; a tie once; an older one's files go."""
    safetensors = pytest.importorskip("safetensors")
    run = Trained(make_mesh(), steps=1)
    for _ in range(2):
        checkpoint.save_safetensors(
            tmp_path, run.model, max_file_bytes=max_file_bytes, max_bytes=900
        )
    files = sorted(path.name for path in tmp_path.iterdir())
    tensors: dict[str, Tensor] = {}
    for name in files:
        if name.endswith(".safetensors"):
            with safetensors.safe_open(str(tmp_path / name), framework="pt") as file:
                assert file.metadata()["format"] == "pt"
                tensors.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
    if max_file_bytes == 10**9:
        assert files == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == files[:-1]
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    expected = {n: t for n, t in Trained().model.state_dict().items() if n != "head.weight"}
    assert set(tensors) == set(expected)
    full = checkpoint.full_state(run.model, rank0_only=False)["model"]
    for name, tensor in tensors.items():
        assert torch.equal(tensor, full[name]), name
    if max_file_bytes < 10**9:  # stopped among its renames, a save leaves the one before
        kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        dist.barrier()
        full_disk = mock.patch.object(Path, "write_text", side_effect=OSError("No space left"))
        spoilt = Trained(make_mesh(), seed=5).model
        with full_disk, pytest.raises(fsdp2.StateError, match="No space left"):
            checkpoint.save_safetensors(tmp_path, spoilt, max_file_bytes=max_file_bytes)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept
    other = Trained(make_mesh(), seed=4)
    assert checkpoint.load_safetensors(tmp_path, other.model) == ([], [])
    assert_same_bits(other.model, run.model)
    dist.barrier()
    checkpoint.save_safetensors(tmp_path, run.model, dtype=torch.bfloat16)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    with safetensors.safe_open(str(tmp_path / "model.safetensors"), framework="pt") as file:
        assert torch.equal(file.get_tensor("row"), full["row"].bfloat16())
        assert file.get_tensor("count").dtype is torch.int64
    with pytest.raises(fsdp2.ConfigError, match=r"neither model.safetensors nor"):
        checkpoint.load_safetensors(tmp_path / "nothing", run.model)


@ranks(2)
def test_safetensors_is_optional(tmp_path: Path) -> None:
    run = Trained(make_mesh())
    with mock.patch.dict(sys.modules, {"safetensors": None}):  # as if it were not installed
        for call in (checkpoint.save_safetensors, checkpoint.load_safetensors):
            with pytest.raises(fsdp2.ConfigError, match="pip install safetensors"):
                call(tmp_path, run.model)


# --- torch's own ----------------------------------------------------------------------------------


class InFsdp1:
    """The model under torch's FSDP1, trained alike."""

    def __init__(self, seed: int, steps: int, use_orig_params: bool) -> None:
        self.model = Fsdp1(
            seeded(lambda: Odd(scalar=False), seed),
            use_orig_params=use_orig_params,
            device_id=torch.device("cpu"),
        )
        self.optimizer = simple_optimizer_of(self.model)
        train(self.model, self.optimizer, range(steps))

    def kind(self, name: str, offload: bool = False) -> Any:
        if name == "full":
            # a CPU's state that is offloaded too shares its memory, see the test of that
            optim = FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=offload)
            configs: Any = (FullStateDictConfig(), optim)
            return Fsdp1.state_dict_type(self.model, StateDictType.FULL_STATE_DICT, *configs)
        configs = (ShardedStateDictConfig(), ShardedOptimStateDictConfig())
        return Fsdp1.state_dict_type(self.model, StateDictType.SHARDED_STATE_DICT, *configs)

    def state(self, name: str, offload: bool = False) -> dict[str, Any]:
        with self.kind(name, offload):
            return {
                "model": self.model.state_dict(),
                "optimizer": Fsdp1.optim_state_dict(self.model, self.optimizer),
            }


def assert_same_states(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected["model"].items():
        if not isinstance(value, Tensor):
            assert actual["model"][name] == value
            continue
        assert torch.equal(whole(actual["model"][name]), whole(value)), name
    for name, fields in expected["optimizer"]["state"].items():
        for key, value in fields.items():
            found = whole(torch.as_tensor(actual["optimizer"]["state"][name][key]))
            assert torch.equal(found.float(), whole(torch.as_tensor(value)).float()), (name, key)


@pytest.mark.parametrize("use_orig_params", with_slow([False, True], [False]))
@ranks(2)
def test_full_checkpoints_of_fsdp1_in_both_directions(use_orig_params: bool, rank: int) -> None:
    theirs = InFsdp1(1, 2, use_orig_params)
    state = theirs.state("full")
    ours = Trained(make_mesh(), seed=3, scalar=False)
    checkpoint.load_full_state(ours.model, state if rank == 0 else None, ours.optimizer)
    back = checkpoint.full_state(ours.model, ours.optimizer, rank0_only=False)
    assert_same_states(back, state)
    ours.train(range(2, 3))
    mine = checkpoint.full_state(ours.model, ours.optimizer, rank0_only=False)
    with theirs.kind("full"):
        theirs.model.load_state_dict(mine["model"])
        loaded = Fsdp1.optim_state_dict_to_load(theirs.model, theirs.optimizer, mine["optimizer"])
        theirs.optimizer.load_state_dict(loaded)
    assert_same_states(theirs.state("full"), mine)


@ranks(2)
def test_a_state_whose_moments_share_memory_is_refused(rank: int) -> None:
    """FSDP1 with ``use_orig_params=True`` returns one on a CPU: both moments are the second."""
    state = InFsdp1(1, 2, use_orig_params=True).state("full", offload=True)
    moments = next(iter(state["optimizer"]["state"].values()))
    if moments["exp_avg"].data_ptr() != moments["exp_avg_sq"].data_ptr():
        pytest.skip("this torch does not")
    ours = Trained(make_mesh(), seed=3, scalar=False)
    before = checkpoint.full_state(ours.model, ours.optimizer, rank0_only=False)
    with pytest.raises(fsdp2.ConfigError, match=r"exp_avg\w* and exp_avg\w* .* share memory"):
        checkpoint.load_full_state(ours.model, state if rank == 0 else None, ours.optimizer)
    assert_same_states(checkpoint.full_state(ours.model, ours.optimizer, rank0_only=False), before)


@pytest.mark.parametrize("use_orig_params", with_slow([False, True], [True]))
@ranks(2)
def test_sharded_checkpoints_of_fsdp1_in_both_directions(
    use_orig_params: bool, tmp_path: Path, rank: int
) -> None:
    theirs = InFsdp1(1, 2, use_orig_params)
    written = theirs.state("sharded")
    written["optim"] = written.pop("optimizer")
    dcp.save(written, checkpoint_id=tmp_path / "theirs")
    ours = Trained(make_mesh(), seed=3, scalar=False)
    checkpoint.load(tmp_path / "theirs", ours.model, ours.optimizer, optim_key="optim")
    mine = checkpoint.full_state(ours.model, ours.optimizer, rank0_only=False)
    assert_same_states(mine, theirs.state("full"))
    ours.train(range(2, 3))
    checkpoint.save(tmp_path / "ours", ours.model, ours.optimizer)
    with theirs.kind("sharded"):
        state = {"model": theirs.model.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / "ours")
        theirs.model.load_state_dict(state["model"])
        current = Fsdp1.optim_state_dict(theirs.model, theirs.optimizer)
        optim = {"optimizer": {"state": current["state"]}}  # its groups are on rank 0 only
        dcp.load(optim, checkpoint_id=tmp_path / "ours")
        groups = checkpoint.sharded_state(ours.model, ours.optimizer)["optimizer"]["param_groups"]
        loaded = Fsdp1.optim_state_dict_to_load(
            theirs.model, theirs.optimizer, {**optim["optimizer"], "param_groups": groups}
        )
        theirs.optimizer.load_state_dict(loaded)
    mine = checkpoint.full_state(ours.model, ours.optimizer, rank0_only=False)
    assert_same_states(theirs.state("full"), mine)


@ranks(2)
def test_checkpoints_of_torchs_fsdp2_in_both_directions(tmp_path: Path) -> None:
    class Untied(Odd):
        def __init__(self) -> None:
            super().__init__(scalar=False)
            self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def made(library: Any, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = shard(seeded(Untied, seed), ODD, library)
        optimizer = optimizer_of(model)
        train(model, optimizer, range(2))
        return model, optimizer

    theirs, ours = made(torch_fsdp, 1), made(fsdp2, 2)
    sharded = get_state_dict(*theirs)
    dcp.save({"model": sharded[0], "optim": sharded[1]}, checkpoint_id=tmp_path / "theirs")
    checkpoint.load(tmp_path / "theirs", *ours, optim_key="optim")
    full = get_state_dict(*theirs, options=StateDictOptions(full_state_dict=True))
    expected = {"model": full[0], "optimizer": full[1]}
    mine = checkpoint.full_state(*ours, rank0_only=False)
    assert_same_states(mine, expected)
    checkpoint.load_full_state(*(ours[0], expected, ours[1]))
    again = made(torch_fsdp, 5)
    set_state_dict(
        *again,
        model_state_dict=mine["model"],
        optim_state_dict=mine["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )
    full = get_state_dict(*again, options=StateDictOptions(full_state_dict=True))
    assert_same_states({"model": full[0], "optimizer": full[1]}, mine)


@ranks(2)
def test_extra_state_and_local_optimizers(tmp_path: Path, rank: int) -> None:
    def made(seed: int, steps: int) -> tuple[nn.Module, Any]:
        model = seeded(lambda: nn.Sequential(WithExtra(WIDTH, WIDTH), nn.Linear(WIDTH, 3)), seed)
        model[0].steps = steps
        fsdp2.fully_shard(model, mesh=make_mesh())
        optimizer = fsdp2.optim.local(torch.optim.AdamW, model.parameters(), lr=0.1)
        for _ in range(steps):
            model(torch.ones(2, WIDTH)).sum().backward()
            advance(optimizer)
        return model, optimizer

    source, target, third = made(1, 2), made(2, 0), made(3, 1)
    state = checkpoint.full_state(*source)
    checkpoint.load_full_state(target[0], state or None, target[1])
    checkpoint.save(tmp_path / "saved", *source)
    checkpoint.load(tmp_path / "saved", *third)
    for model, optimizer in (target, third):
        assert model[0].steps == 2
        found = checkpoint.full_state(model, optimizer, rank0_only=False)
        assert_same_states(found, checkpoint.full_state(*source, rank0_only=False))


def test_rekey() -> None:
    plain = Trained(steps=1)
    ids = plain.optimizer.state_dict()
    names = checkpoint.rekey(ids, "name", model=plain.model, optimizer=plain.optimizer)
    assert names["param_groups"][0]["params"][:2] == ["row", "embed.weight"]
    for back in (
        checkpoint.rekey(names, "id", model=plain.model, optimizer=plain.optimizer),
        checkpoint.rekey(names, "id"),
    ):
        assert list(back["state"]) == list(ids["state"])
        assert [g["params"] for g in back["param_groups"]] == [
            g["params"] for g in ids["param_groups"]
        ]
    simple = torch.optim.SGD(plain.model.parameters(), lr=1.0)
    named = checkpoint.rekey(simple.state_dict(), "name", model=plain.model)
    assert named["param_groups"][0]["params"] == [n for n, _ in plain.model.named_parameters()]
    assert checkpoint.rekey(named, "name") == named
    with pytest.raises(fsdp2.ConfigError, match="Pass model="):
        checkpoint.rekey(ids, "name")
    with pytest.raises(fsdp2.ConfigError, match="which the model does not have"):
        checkpoint.rekey(ids, "name", model=nn.Linear(2, 2))


@ranks(2)
def test_options_of_groups_are_those_that_were_saved(tmp_path: Path) -> None:
    run = Trained(make_mesh(), steps=1)
    for index, group in enumerate(run.optimizer.param_groups):
        group["lr"], group["betas"] = 0.5 + index, (0.3, 0.4)
    checkpoint.save(tmp_path / "step", run.model, run.optimizer)
    full = checkpoint.full_state(run.model, run.optimizer)
    sharded = checkpoint.sharded_state(run.model, run.optimizer)
    loads: list[Callable[[Any, Any], Any]] = [
        lambda model, optimizer: checkpoint.load(tmp_path / "step", model, optimizer),
        lambda model, optimizer: checkpoint.load_sharded_state(model, sharded, optimizer),
        lambda model, optimizer: checkpoint.load_full_state(model, full, optimizer),
    ]
    for load in loads:
        other = Trained(make_mesh(), seed=4)
        load(other.model, other.optimizer)
        for index, group in enumerate(other.optimizer.param_groups):
            assert (group["lr"], group["betas"]) == (0.5 + index, (0.3, 0.4))

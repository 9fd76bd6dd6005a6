"""Promise: a save in the background is the state at its call, whole or not there; nobody waits.

The writing thread is held back where a test needs the save to be under way.
"""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp2
from fsdp2 import checkpoint
from fsdp2._core.base.torch_dtensor import imagined_mesh
from fsdp2._core.transfer.redistribute import Grids
from fsdp2.checkpoint import _place, _save
from fsdp2.checkpoint._contents import Contents, flat
from fsdp2.checkpoint._files import HEAD, REPORT, ROW, SUM
from tests.kit import hosts
from tests.kit.in_turn import advance
from tests.kit.models import seeded
from tests.kit.parity import make_mesh
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

WIDTH = 29


def make(mesh: Any = None) -> nn.Module:
    def build() -> nn.Module:
        odd = nn.Linear(13, 1)
        return nn.Sequential(nn.Linear(WIDTH, 13), nn.BatchNorm1d(13), nn.ReLU(), odd)

    model = seeded(build, 3)
    fsdp2.fully_shard(model[0], mesh=mesh or make_mesh())
    fsdp2.fully_shard(model, mesh=mesh or make_mesh())
    return model


def step(model: nn.Module, optimizer: Any, seed: int = 0) -> None:
    torch.manual_seed(seed + dist.get_rank())
    model(torch.randn(5, WIDTH)).square().mean().backward()
    advance(optimizer)


def state_of(model: nn.Module, optimizer: Any) -> dict[Any, Any]:
    """Return the whole state on the first rank, by paths."""
    state = checkpoint.full_state(model, optimizer)
    return {path: v.clone() if isinstance(v, Tensor) else v for path, v in flat(state).items()}


def require_equal(found: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        same = torch.equal if isinstance(value, Tensor) else operator.eq
        assert same(value, found[path]), path


@contextlib.contextmanager
def held_back(name: str = "write_part") -> Iterator[threading.Event]:
    """Let a writing thread wait until the event is set."""
    go_on, call = threading.Event(), getattr(_save, name)

    def later(*args: Any) -> Any:
        go_on.wait()
        return call(*args)

    with mock.patch.object(_save, name, later):
        yield go_on
        go_on.set()


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "adamw capturable lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1)),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "local": lambda params: fsdp2.optim.local(torch.optim.AdamW, params, lr=0.1),
    "whole": lambda params: fsdp2.optim.whole(torch.optim.Adafactor, params, lr=0.1),
}


@pytest.mark.parametrize(
    ("optimizer", "form"),
    [("adamw", "replicas"), *(slow(name, "flat") for name in OPTIMIZERS)],
)
@ranks(4)
def test_what_is_saved_is_the_moment_of_the_call(tmp_path: Path, optimizer: str, form: str) -> None:
    """Steps, other values, another learning rate: none of it gets into the save."""
    shape = (4,) if form == "flat" else (2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    model = make(mesh)
    optim = OPTIMIZERS[optimizer](model.parameters())
    for seed in range(2):
        step(model, optim, seed)
    wanted = state_of(model, optim)
    extra = {"step": 2, "ids": [1, 2]}
    with held_back() as go_on:
        handle = checkpoint.save(tmp_path / "saved", model, optim, extra=extra, background=True)
        extra["ids"].append(3)
        for seed in range(2):
            step(model, optim, seed + 7)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(3)
        optim.param_groups[0]["lr"] = 7.0
        model[1].running_mean.zero_()
        assert not handle.done()
        assert not (tmp_path / "saved").exists()
        go_on.set()
        handle.wait()
    assert handle.done()
    assert handle.progress == 1.0
    other = make(mesh)
    its = OPTIMIZERS[optimizer](other.parameters())
    assert checkpoint.load(tmp_path / "saved", other, its) == {"step": 2, "ids": [1, 2]}
    require_equal(state_of(other, its), wanted)
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["saved"]
    assert {n for n in os.listdir(tmp_path / "saved") if not n.endswith(".distcp")} == {".metadata"}


@ranks(2)
def test_one_at_a_time(tmp_path: Path, rank: int) -> None:
    """A second save is refused, or waits, on all ranks: also where only one still writes."""
    model = make()
    with held_back() if rank == 1 else contextlib.nullcontext() as go_on:
        handle = checkpoint.save(tmp_path / "one", model, background=True)
        with pytest.raises(fsdp2.StateError, match="FS628"):
            checkpoint.save(tmp_path / "two", model, background=True, when_busy="refuse")
        with pytest.raises(fsdp2.StateError, match="FS628"):
            checkpoint.save(tmp_path / "two", model, when_busy="refuse")
        with pytest.raises(TimeoutError, match="one is still being written"):
            handle.wait(0)
        if go_on is not None:
            threading.Timer(0.1, go_on.set).start()
        checkpoint.save(tmp_path / "two", model, background=True).wait()
        assert handle.done()
    dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["one", "two"]


HARM: dict[str, Callable[[Path], None]] = {
    "disk full": lambda folder: None,
    "folder removed": lambda folder: shutil.rmtree(folder),
    "file removed": lambda folder: (folder / "__1_0.distcp").unlink(),
    "file cut": lambda folder: os.truncate(folder / "__1_0.distcp", 10),
}


@pytest.mark.parametrize("harm", with_slow(HARM, ["disk full"]))
@ranks(3)
def test_a_failure_ends_no_training(tmp_path: Path, harm: str, rank: int) -> None:
    """Of one rank: every rank is told at the next save, which is whole; so is the one before."""
    model = make()
    optim = OPTIMIZERS["adamw"](model.parameters())
    place, is_harmed = tmp_path / "saved", tmp_path.with_suffix(".harmed")
    checkpoint.save(place, model, optim, extra=1)
    write = _save.write_part

    def harmed(folder: Path, *rest: Any) -> None:
        if rank == 1 and harm == "disk full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if rank == 2 and harm == "disk full":  # it still writes when the first rank gives up
            while folder.exists():
                with contextlib.suppress(OSError):
                    (folder / f"more-{len(os.listdir(folder))}").touch()
        write(folder, *rest)
        if rank == 1:
            try:
                HARM[harm](folder)
            finally:
                is_harmed.touch()
        if rank == 0 and harm != "disk full":  # it would otherwise rename a folder that is whole
            hosts.wait_for(is_harmed.exists, "the harm", 60)

    with mock.patch.object(_save, "write_part", harmed):
        handle = checkpoint.save(place, model, optim, extra=2, background=True)
        step(model, optim)
        handle._done.wait()  # whoever asks for the error is not warned of it
    assert isinstance(handle.exception(), fsdp2.StateError)
    step(model, optim)
    other = make()
    its = OPTIMIZERS["adamw"](other.parameters())
    assert checkpoint.load(place, other, its) == 1
    with pytest.warns(UserWarning, match="in the background failed|FS613") as told:
        checkpoint.save(place, model, optim, extra=3, background=True).wait()
    if harm == "disk full":
        assert any("rank 1: No space left on device" in str(one.message) for one in told)
    assert checkpoint.load(place, other, its) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.save(place, model, optim)
    with pytest.raises(fsdp2.StateError):
        handle.wait()
    dist.barrier()
    assert os.listdir(tmp_path) == ["saved"]


def slowly(*args: Any) -> None:
    time.sleep(0.1)
    _place.keep_newest(*args)


@ranks(2)
def test_a_series_keeps_the_newest(tmp_path: Path, rank: int) -> None:
    """And nothing else that is there; ``latest`` leads to a whole one at any time."""
    model = make()
    checkpoint.save(tmp_path / "base", model, extra="base")
    (tmp_path / "notes.txt").write_text("mine")
    if rank == 0:  # a save was killed, whose place nobody saves to any more
        (tmp_path / ".step-9.tmp-0a").mkdir()
        os.close(_place.own(tmp_path / ".step-9.tmp-0a" / _place.OWNER))
    for number in range(4):
        name = f"step-{number}"
        slow = mock.patch.object(_save, "keep_newest", slowly)
        how = {"extra": number, "background": True, "keep_last": 2}
        with slow if rank == 0 else contextlib.nullcontext():  # the other rank waits for the link
            checkpoint.save(tmp_path / name, model, **how).wait()
        assert os.readlink(tmp_path / "latest") == name
        assert checkpoint.load(tmp_path / "latest", model) == number
        dist.barrier()
    assert sorted(os.listdir(tmp_path)) == ["base", "latest", "notes.txt", "step-2", "step-3"]
    assert checkpoint.load_latest(tmp_path, model) == 3
    with (tmp_path / "step-3" / "__1_0.distcp").open("r+b") as file:
        file.seek(300)
        file.write(b"damage")
    with pytest.warns(UserWarning, match="skipping step-3"):
        assert checkpoint.load_latest(tmp_path, model) == 2
    checkpoint.save(tmp_path / "step-4", model, extra=4, background=True)
    assert checkpoint.load_latest(tmp_path, model, default=9) == 4
    assert checkpoint.load_latest(tmp_path / "nothing", model, default=9) == 9
    dist.barrier()
    if rank == 0:
        (tmp_path / "latest").unlink()
        (tmp_path / "latest").mkdir()
    dist.barrier()
    with pytest.raises(fsdp2.ConfigError, match="latest is reserved for the link"):
        checkpoint.save(tmp_path / "step-5", model, keep_last=1)


@ranks(2)
def test_one_folder_that_each_save_replaces(tmp_path: Path) -> None:
    """Its newest is found too, and where a save was killed between its two renames."""
    model = make()
    for number in range(2):
        checkpoint.save(tmp_path / "run", model, extra=number, background=True).wait()
        assert checkpoint.load_latest(tmp_path / "run", model) == number
    dist.barrier()
    if dist.get_rank() == 0:
        os.rename(tmp_path / "run", tmp_path / ".run.old-abc-0")
    dist.barrier()
    assert checkpoint.load_latest(tmp_path / "run", model) == 1
    assert checkpoint.load_latest(tmp_path, model) == 1


@ranks(slow(2))
def test_states_that_one_rank_lacks(tmp_path: Path, rank: int) -> None:
    """What only some ranks have is described in their reports, and loads."""
    model = make()
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optim)
    first = model[0].weight
    if rank == 0:
        del optim.state[first]
    handle = checkpoint.save(tmp_path / "saved", model, optim, extra={"a": 1}, background=True)
    handle.wait()
    dist.barrier()
    found = dcp.FileSystemReader(tmp_path / "saved").read_metadata()
    (chunk,) = found.state_dict_metadata["optimizer.state.0.weight.momentum_buffer"].chunks
    assert tuple(chunk.offsets) == (7, 0)
    assert len(found.state_dict_metadata["model.0.weight"].chunks) == 2


@pytest.mark.slow
def test_keys_are_those_of_torch(tmp_path: Path) -> None:
    """Of dicts, lists, tuples, numbers as keys, and what is empty."""
    one = torch.ones(1)
    tree = {
        "a": {1: one, "b": [one, {"c": 2}], "d": (one, 3), "e": [], "f": {}, "g": [[1], [one]]},
        "h": [1, 2],
        "i": None,
    }
    dcp.save(tree, checkpoint_id=tmp_path / "theirs")
    theirs = dcp.FileSystemReader(tmp_path / "theirs").read_metadata().planner_data
    assert {".".join(map(str, path)): path for path in flat(tree)} == theirs


@pytest.mark.parametrize("count", with_slow([8, 64, 1024], [8]))
def test_what_the_first_rank_gets_from_each_rank(tmp_path: Path, count: int) -> None:
    """Twelve bytes a value that a rank writes, and no object, on any number of ranks.

    Each rank divides the contents by itself, so the ranks are imagined one after another.
    """
    for number in sorted({0, 1, count // 2, count - 1}):
        mesh = imagined_mesh((count // 4, 4), ("replicate", "shard"), number)
        tensors: dict[str, Any] = {
            f"{name}.weight": DTensor.from_local(
                torch.zeros(3, 2), mesh, (Replicate(), Shard(0)), run_check=False
            )
            for name in range(9)
        }
        tensors["mean"] = torch.zeros(13)
        contents = Contents.of({"model": tensors, "step": 5}, Grids([*tensors.values()]))
        pieces = [*contents.pieces()]
        shares = [(c.path, region) for c, region, who in contents.writers() if who == number]
        assert [(p.content.path, p.region) for p in pieces] == shares
        _save.write_part(tmp_path, contents, pieces, _save.Progress())
        nbytes = (tmp_path / f"{REPORT}{number}").stat().st_size
        assert (len(pieces) == 0) == (number >= 36)  # blocks are dealt to replicas in turn
        assert nbytes == HEAD.size + ROW.size * len(pieces) + len(b"[]") + SUM.size


PROGRAM = """
import os, signal, sys
import torch, torch.distributed as dist, torch.nn as nn
import fsdp2
from fsdp2.checkpoint import _save

rank, folder, what = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
model = fsdp2.fully_shard(nn.Linear(13, 29))
write = _save.write_part

def ends(*args):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL if what == "killed" else signal.SIGSTOP)
    write(*args)

if what != "ends":
    _save.write_part = ends
_save.LEFT_AFTER_S = 0.5
handle = fsdp2.checkpoint.save(f"{folder}/saved", model, extra=5, background=True)
if what == "killed" and rank == 0:
    try:
        handle.wait()
    except fsdp2.StateError as error:
        print(error)
if what == "stopped" and rank == 0:
    raise SystemError("an error of the user's")
dist.destroy_process_group()
"""


def start(folder: Path, what: str) -> list[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM]
    both: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [subprocess.Popen([*command, str(rank), str(folder), what], **both) for rank in range(2)]


@pytest.mark.slow
def test_a_failed_process_does_not_wait_for_one_that_is_stopped(tmp_path: Path) -> None:
    """Which holds its lock: the other one ends, so that a launcher can start both again."""
    first, second = start(tmp_path, "stopped")
    try:
        said = first.communicate(timeout=120)[0]
    finally:
        second.kill()
        second.communicate()
    assert first.returncode == 1
    assert "SystemError: an error of the user's" in said
    assert "rank 1: nothing was written for 0 s, and its part is missing" in said
    assert not [name for name in os.listdir(tmp_path) if "saved" in name]


@pytest.mark.parametrize("what", ["killed", "ends"])
@pytest.mark.slow
def test_processes_that_end(tmp_path: Path, what: str) -> None:
    """One that is killed is noticed by its lock; one that ends, without groups, saves first."""
    started = start(tmp_path, what)
    said = [process.communicate(timeout=120)[0] for process in started]
    if what == "killed":
        assert started[1].returncode == -signal.SIGKILL
        assert "rank 1: it has exited, and its part is missing" in said[0]
        assert not (tmp_path / "saved").exists()
    else:
        assert [process.returncode for process in started] == [0, 0]
        assert checkpoint.load(tmp_path / "saved", nn.Linear(13, 29)) == 5
    assert not [name for name in os.listdir(tmp_path) if "tmp" in name]

"""Promise: the loss of a host costs no more steps than lie between two copies at neighbours.

Each rank has a folder of its own, as a host has its memory. ``python -m
tests.accidents.lost_hosts`` does the same with processes that are killed, and with fewer ranks
after it.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

import fsdp2
from fsdp2 import checkpoint
from fsdp2.checkpoint import _neighbours
from tests.accidents import lost_hosts
from tests.behaviour.test_background_saves import OPTIMIZERS, make, require_equal, state_of, step
from tests.kit.models import seeded
from tests.kit.parity import make_mesh
from tests.kit.pool import ranks
from tests.kit.slow import slow, with_slow

LOST: dict[str, tuple[int, ...]] = {
    "nobody": (),
    "one": (1,),
    "two neighbours": (1, 2),
}


@pytest.mark.parametrize("lost", with_slow(LOST, ["one", "two neighbours"]))
@ranks(3)
def test_hosts_are_lost(tmp_path: Path, lost: str, rank: int) -> None:
    """What one host keeps is enough; if copies are lost, the file counts, and all ranks say so."""
    memory = tmp_path / f"host{rank}"
    model = make()
    optim = OPTIMIZERS["adamw"](model.parameters())
    copies = checkpoint.NeighbourCopies("tried", memory=memory)
    step(model, optim)
    checkpoint.save(tmp_path / "run" / "step-1", model, optim, extra=1)
    in_file = state_of(model, optim)
    for number in (2, 3, 4):
        step(model, optim, number)
        copies.save(model, optim, extra=number)
        wanted = state_of(model, optim)
    copies.wait()
    assert copies.sent_nbytes > 0
    dist.barrier()
    if rank in LOST[lost]:
        shutil.rmtree(memory)
    dist.barrier()
    other = make()
    its = OPTIMIZERS["adamw"](other.parameters())
    again = checkpoint.NeighbourCopies("tried", memory=memory)
    is_lost = lost == "two neighbours"
    with pytest.warns(UserWarning, match="of ranks 1 are lost") if is_lost else quiet():
        found = checkpoint.load_latest(tmp_path / "run", other, its, copies=again)
    assert found == (1 if is_lost else 4)
    require_equal(state_of(other, its), in_file if is_lost else wanted)
    step(other, its)
    again.save(other, its)
    again.wait()
    again.remove()
    dist.barrier()
    assert [*tmp_path.glob("host*/*")] == []


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@ranks(slow(2))
def test_a_file_that_is_newer_counts(tmp_path: Path, rank: int) -> None:
    """And of two generations in memory the newest that is whole: a part of one was not sent."""
    copies = checkpoint.NeighbourCopies("tried", memory=tmp_path / f"host{rank}")
    model = make()
    for number in (1, 2):
        copies.save(model, extra=number)
    copies.wait()
    dist.barrier()
    if rank == 0:
        newest = max((tmp_path / "host0" / "fsdp2-tried").iterdir())
        for path in tmp_path.glob(f"host*/*/{newest.name}/.told-1"):
            path.unlink()
    dist.barrier()
    assert checkpoint.load_latest(tmp_path / "run", model, copies=copies) == 1
    checkpoint.save(tmp_path / "run" / "step-3", model, extra=3)
    assert checkpoint.load_latest(tmp_path / "run", model, copies=copies) == 3
    copies.save(model, extra=4)
    assert checkpoint.load_latest(tmp_path / "run", model, copies=copies) == 4


@ranks(1, slow(2))
def test_a_load_waits_for_copies_that_are_not_written_yet(tmp_path: Path, rank: int) -> None:
    copies = checkpoint.NeighbourCopies("tried", memory=tmp_path / f"host{rank}")
    model, goes_on, write = make(), threading.Event(), _neighbours.write_part

    def held(*args: Any) -> None:
        assert goes_on.wait(60)
        write(*args)

    checkpoint.save(tmp_path / "run" / "step-1", model, extra=1)
    with mock.patch.object(_neighbours, "write_part", held), quiet():
        copies.save(model, extra=2)
        threading.Timer(1.0, goes_on.set).start()
        assert checkpoint.load_latest(tmp_path / "run", model, copies=copies) == 2


@ranks(slow(2))
def test_damage_is_passed_over(tmp_path: Path, rank: int) -> None:
    copies = checkpoint.NeighbourCopies("tried", memory=tmp_path / f"host{rank}")
    model = seeded(lambda: nn.Linear(13, 29), 1)
    fsdp2.fully_shard(model, mesh=make_mesh())
    checkpoint.save(tmp_path / "run", model, extra=1)
    copies.save(model, extra=2)
    copies.wait()
    dist.barrier()
    for path in (tmp_path / f"host{rank}").glob("*/*/__1_0.distcp"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    before = model.weight.to_local().clone()
    with pytest.warns(UserWarning, match="skipping copies in memory"):
        assert checkpoint.load_latest(tmp_path / "run", model, copies=copies) == 1
    assert torch.equal(before, model.weight.to_local())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one host, three ranks go on", "two neighbours"])
def test_processes_are_killed_and_hosts_lost(name: str) -> None:
    given: Any = SimpleNamespace(width=29, layers=2)
    right = lost_hosts.wanted(given)
    found, remains = lost_hosts.tried(name, given)
    assert found.began_at == (2 if name == "two neighbours" else 8)
    assert all(abs(loss / right[step] - 1) < 1e-5 for step, loss in found.losses.items())
    assert sorted(found.losses) == [*range(found.began_at, lost_hosts.STEPS)]
    assert remains == []

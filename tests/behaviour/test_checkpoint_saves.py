"""Promise: what stands at a path is one save's, whole; a save takes nothing that is not its own.

Two jobs that save to one path are two threads here, each alone with a plain model: what a save
knows of others it knows through files.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
import torch.nn as nn

import fsdp2
from fsdp2 import checkpoint
from fsdp2.checkpoint import _place, _save
from tests.kit.parity import make_mesh
from tests.kit.pool import ranks
from tests.kit.slow import slow

Call = Callable[[Path, nn.Module], Any]
SAVE_SEVERAL = functools.partial(checkpoint.save_safetensors, max_file_bytes=2000)


def model_of(value: float) -> nn.Module:
    model = nn.Sequential(*(nn.Linear(29, 13) for _ in range(4)))
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def save_either(folder: Path, model: nn.Module) -> None:
    """As one file or as several, by turns."""
    is_even = int(next(model.parameters()).flatten()[0]) % 2 == 0
    (SAVE_SEVERAL if is_even else checkpoint.save_safetensors)(folder, model)


FORMS: dict[str, tuple[Call, Call]] = {
    "sharded": (checkpoint.save, checkpoint.load),
    "one file": (checkpoint.save_safetensors, checkpoint.load_safetensors),
    "several files": (SAVE_SEVERAL, checkpoint.load_safetensors),
    "either": (save_either, checkpoint.load_safetensors),
}


def save_twice(save: Call, place: Path, rounds: int) -> list[BaseException]:
    """Save from two jobs at once, each time other values; return what they met."""
    errors: list[BaseException] = []

    def job(first: int) -> None:
        try:
            for number in range(rounds):
                save(place, model_of(first + number))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=job, args=(1000 * n,)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def values_at(place: Path, load: Call) -> set[float]:
    model = model_of(-1)
    load(place, model)
    return {v for p in model.parameters() for v in p.detach().flatten().tolist()}


def last_of(rounds: int) -> list[set[float]]:
    return [{1000.0 * n + rounds - 1} for n in (1, 2)]


@pytest.mark.parametrize("rounds", [4, slow(40)])
def test_two_jobs_where_there_are_no_locks(tmp_path: Path, rounds: int) -> None:
    place = tmp_path / "saved"
    with mock.patch.object(_place, "fcntl", None):
        assert not save_twice(checkpoint.save, place, rounds)
    assert values_at(place, checkpoint.load) in last_of(rounds)


@pytest.mark.parametrize("rounds", [6, slow(40)])
@pytest.mark.parametrize("form", FORMS)
def test_two_jobs_save_to_one_path(tmp_path: Path, form: str, rounds: int) -> None:
    """Neither fails; a third that loads all the while sees one of theirs, or says what it met."""
    save, load = FORMS[form]
    place = tmp_path / "saved"
    save(place, model_of(0))
    errors: list[BaseException] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            try:
                values = values_at(place, load)
            except fsdp2.FSDPError:
                continue
            except BaseException as error:
                errors.append(error)
                return
            if len(values) != 1:
                errors.append(AssertionError(f"mixed: {values}"))

    reader = threading.Thread(target=look)
    reader.start()
    errors += save_twice(save, place, rounds)
    ended.set()
    reader.join()
    assert not errors, errors
    assert values_at(place, load) in last_of(rounds)
    left = [path for path in tmp_path.rglob("*") if path.name.startswith(".")]
    assert [path.name for path in left] == ([".metadata"] if form == "sharded" else [])
    if form != "sharded":
        names = sorted(path.name for path in place.iterdir())
        assert len(names) in (1, 5), names


def workspace(place: Path, name: str) -> _place.Workspace:
    made = _place.Workspace(place, name)
    made.make()
    return made


@contextlib.contextmanager
def at_every_line(modules: set[str], call: Callable[[], None]) -> Iterator[None]:
    """Call something before every line of some modules that this thread runs."""

    def trace(frame: Any, event: str, _: object) -> Any:
        if frame.f_globals.get("__name__") not in modules:
            return None
        if event == "line":
            sys.settrace(None)
            try:
                call()
            finally:
                sys.settrace(trace)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("form", FORMS)
def test_another_save_begins_at_any_moment_of_one(tmp_path: Path, form: str) -> None:
    """It removes what dead saves left: never what the one that runs is about to write or name."""
    save, load = FORMS[form]
    place = tmp_path / "saved"
    save(place, model_of(0))
    beside = place if form == "sharded" else place / "model.safetensors"
    begun = 0

    def begin() -> None:
        nonlocal begun
        workspace(beside, f"other-{begun}").remove()
        begun += 1

    with at_every_line({"fsdp2.checkpoint._place", "fsdp2.checkpoint._safetensors"}, begin):
        save(place, model_of(1))
    assert begun > 20
    assert values_at(place, load) == {1.0}


def test_a_save_that_ends_while_another_one_looks(tmp_path: Path) -> None:
    """Its owner's file was opened by the other one before, and is free after: it is not dead."""
    live = workspace(tmp_path / "saved", "live")
    lock = _place._lock

    def late(descriptor: int) -> None:
        live.release()
        lock(descriptor)

    with mock.patch.object(_place, "_lock", late):
        workspace(tmp_path / "saved", "other")
    assert live.path.is_dir()


def test_what_stands_there_is_renamed_while_a_save_looks(tmp_path: Path) -> None:
    """Between two names of other saves there is nothing, or a checkpoint: room for one more."""
    place, kept = tmp_path / "saved", tmp_path / "kept"
    checkpoint.save(kept, model_of(0))
    moves = 0

    def move() -> None:
        nonlocal moves
        moves += 1
        if place.exists():
            os.rename(place, tmp_path / f"gone-{moves}")
        else:
            shutil.copytree(kept, tmp_path / "made")
            os.rename(tmp_path / "made", place)

    for is_there in (False, True):
        if place.exists() is not is_there:
            move()
        with at_every_line({"fsdp2.checkpoint._place"}, move):
            _place.require_room(place)
    assert moves > 4
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    (place / "thesis.tex").write_text("all of it")
    with pytest.raises(fsdp2.ConfigError, match="a folder with other files, not a checkpoint"):
        _place.require_room(place)


def test_files_of_others_stay_if_their_heir_is_renamed(tmp_path: Path) -> None:
    old, heir = tmp_path / ".saved.old-1", tmp_path / "saved"
    checkpoint.save(old, model_of(0))
    (old / "config.json").write_text("{}")
    _place.retire(old, heir)
    assert (old / "config.json").exists()
    checkpoint.save(heir, model_of(1))
    assert os.listdir(tmp_path) == ["saved"]
    assert (heir / "config.json").exists()


def test_what_another_save_is_writing_is_not_removed(tmp_path: Path) -> None:
    """Remains of a dead one go: at once if that can be told, after an hour otherwise."""
    place = tmp_path / "saved"
    live, dead, elsewhere, old = (
        workspace(place, name) for name in ("live", "dead", "elsewhere", "old")
    )
    for one in (live, dead):
        (one.path / "__0_0.distcp").write_bytes(b"half")
    for one in (elsewhere, old):
        (one.path / ".owner").write_text("another host")
    hour = time.time() - 2 * _place.ABANDONED_AFTER_S
    for path in (old.path / ".owner", old.path):
        os.utime(path, (hour, hour))
    for one in (dead, elsewhere, old):
        assert one._lock is not None
        os.close(one._lock)  # as the end of its process does
    checkpoint.save(place, model_of(1))
    assert sorted(os.listdir(tmp_path)) == [".saved.tmp-elsewhere", ".saved.tmp-live", "saved"]
    live.remove()
    elsewhere._lock = None
    elsewhere.remove()


def test_the_newest_of_what_stopped_saves_left_is_loaded(tmp_path: Path) -> None:
    place = tmp_path / "saved"
    for number in range(3):
        checkpoint.save(place, model_of(number))
        stamp = 1000.0 + (number + 1) % 3
        os.utime(place / ".metadata", (stamp, stamp))
        os.rename(place, tmp_path / f"kept-{number}")
    for number in range(3):
        os.rename(tmp_path / f"kept-{number}", tmp_path / f".saved.old-{number}")
    remains = tmp_path / ".saved.tmp-1234"  # of a version that did not lock it
    remains.mkdir()
    os.utime(remains, (1, 1))
    assert values_at(place, checkpoint.load) == {1.0}
    checkpoint.save(place, model_of(7))
    assert os.listdir(tmp_path) == ["saved"]


def test_a_save_replaces_no_folder_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(1)
    monkeypatch.chdir(tmp_path)
    inode = tmp_path.stat().st_ino
    for path in (".", tmp_path, "../" + tmp_path.name):
        with pytest.raises(fsdp2.ConfigError, match="is the working directory"):
            checkpoint.save(path, model)
    work = tmp_path / "work"
    (work / "deep").mkdir(parents=True)
    (work / "thesis.tex").write_text("all of it")
    with pytest.raises(fsdp2.ConfigError, match="a folder with other files, not a checkpoint"):
        checkpoint.save(work, model)
    with pytest.raises(fsdp2.ConfigError, match=r"is a mount point|is the working directory"):
        checkpoint.save("/proc", model)
    assert tmp_path.stat().st_ino == inode
    assert sorted(os.listdir(tmp_path)) == ["work"]
    assert (work / "thesis.tex").read_text() == "all of it"
    empty = tmp_path / "empty"
    empty.mkdir()
    checkpoint.save(empty, model)
    (empty / "config.json").write_text("{}")
    checkpoint.save(empty, model)
    assert (empty / "config.json").exists()


@ranks(2)
def test_ranks_without_a_common_file_system(tmp_path: Path, rank: int) -> None:
    """Each has a disk of its own: the checkpoint before stays, and all ranks say why."""
    own = tmp_path / f"disk{rank}"
    own.mkdir()
    common = tmp_path / "saved"
    model = fsdp2.fully_shard(nn.Linear(13, 29), mesh=make_mesh())
    checkpoint.save(common, model)
    said = "does not see .*on a file system that all ranks share"
    with pytest.raises(fsdp2.StateError, match=said):
        checkpoint.save(own / "saved", model)
    dist.barrier()
    assert os.listdir(own) == []
    checkpoint.load(common, model)


def test_a_model_without_tensors_is_saved_twice(tmp_path: Path) -> None:
    """No file of the first save is left over, because both have the same name."""
    for _ in range(2):
        checkpoint.save_safetensors(tmp_path, nn.ReLU())
        assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("how", ["missing", "short"])
@ranks(2)
def test_files_that_the_first_rank_does_not_see(tmp_path: Path, how: str, rank: int) -> None:
    """Written and gone, or cut: it is noticed before the checkpoint before is retired."""
    model = fsdp2.fully_shard(nn.Linear(13, 29), mesh=make_mesh())
    place = tmp_path / "saved"
    checkpoint.save(place, model)
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    write = _save.write_part

    def lose(folder: Path, *rest: Any) -> None:
        write(folder, *rest)
        path = folder / "__1_0.distcp"
        if rank == 1:
            path.unlink() if how == "missing" else os.truncate(path, 10)

    with (
        mock.patch.object(_save, "write_part", lose),
        pytest.raises(fsdp2.StateError, match=r"__1_0\.distcp, which a rank wrote with \d+ bytes"),
    ):
        checkpoint.save(place, model)
    dist.barrier()
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    assert os.listdir(tmp_path) == ["saved"]
    checkpoint.load(place, model)

"""Promise: loading a file executes nothing, and touches nothing outside of its folder.

Each way in which a file could do so is tried with a real payload: it would make a file, or remove
one. What is plain data comes back by itself, everything else with `trust=True`.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import io
import json
import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn

import fsdp2
from fsdp2 import checkpoint
from fsdp2.checkpoint._checksums import tail_of
from fsdp2.checkpoint._pickle_machine import RefusedError, plain_names, unpickle
from tests.kit.models import seeded
from tests.kit.parity import make_mesh
from tests.kit.pool import ranks

safetensors = pytest.importorskip("safetensors.torch")


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def model_of(seed: int = 0) -> nn.Linear:
    return seeded(lambda: nn.Linear(3, 5), seed)  # type: ignore[no-any-return]  # what it builds


def values_of(model: nn.Module) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in model.parameters()]


@contextlib.contextmanager
def refused(said: str) -> Iterator[nn.Module]:
    """Give a model into which a load is refused, and which it leaves as it was."""
    model = model_of(1)
    before = values_of(model)
    with pytest.raises(fsdp2.ConfigError, match=said):
        yield model
    assert values_of(model) == before


def hostile_extra(folder: Path, ran: Path) -> None:
    checkpoint.save(folder, model_of(), extra={"step": Payload(ran)})


def hostile_extra_beside_torch(folder: Path, ran: Path) -> None:
    """Not within ours: an entry called `extra`, as `torch.distributed.checkpoint` pickles it."""
    dcp.save({"model": model_of().state_dict(), "extra": Payload(ran)}, checkpoint_id=folder)


def hostile_option(folder: Path, ran: Path) -> None:
    """In a param group of the optimizer."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["note"] = Payload(ran)
    checkpoint.save(folder, model, optimizer)


def hostile_metadata(folder: Path, ran: Path) -> None:
    checkpoint.save(folder, model_of())
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(ran)))


def hostile_planner_data(folder: Path, ran: Path) -> None:
    """Inside of metadata that is right otherwise, with checksums that are right."""
    checkpoint.save(folder, model_of())
    metadata = dcp.FileSystemReader(folder).read_metadata()
    told = {"__0_0.distcp": {"size": (folder / "__0_0.distcp").stat().st_size, "sums": []}}
    metadata.planner_data["more"] = Payload(ran)
    content = pickle.dumps(metadata)
    (folder / ".metadata").write_bytes(content + tail_of(content, told))


IN_VALUES = [hostile_extra, hostile_extra_beside_torch, hostile_option]
IN_METADATA = [hostile_metadata, hostile_planner_data]


@pytest.mark.parametrize("write", [*IN_VALUES, *IN_METADATA])
def test_loading_runs_nothing(tmp_path: Path, write: Callable[[Path, Path], None]) -> None:
    folder, ran = tmp_path / "checkpoint", tmp_path / "ran"
    write(folder, ran)
    with refused(r"(posix|nt|os)\.mkdir.*trust=True") as model:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if write is hostile_option else None
        checkpoint.load(folder, model, optimizer)
    assert not ran.exists()
    if write in IN_VALUES:
        checkpoint.load(folder, model, optimizer, trust=True)
        assert ran.exists()  # the payload is a real one
        assert values_of(model) == values_of(model_of())


@pytest.mark.parametrize("name", ["../other.distcp", "/other.distcp", "link.distcp"])
def test_data_files_lie_in_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "checkpoint"
    checkpoint.save(folder, model_of())
    outside = tmp_path / "other.distcp"
    os.rename(folder / "__0_0.distcp", outside)
    (folder / "link.distcp").symlink_to(outside)
    name = name.replace("/other", f"{tmp_path}/other") if name.startswith("/") else name
    metadata = dcp.FileSystemReader(folder).read_metadata()
    for info in metadata.storage_data.values():
        info.relative_path = name
    metadata.storage_meta.save_id = None
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with refused(r"not a plain file name|is a link to") as model:
        checkpoint.load(folder, model)


def hostile_index(folder: Path, name: str) -> None:
    index = {"metadata": {}, "weight_map": {"weight": name, "bias": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("how", ["above", "absolute", "link", "dots", "number"])
def test_an_index_names_files_of_its_folder(tmp_path: Path, how: str) -> None:
    """Neither loading nor saving follows a name that leads out: a save removes old files."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    victim = tmp_path / "victim.safetensors"
    safetensors.save_file(model_of().state_dict(), str(victim))
    names: dict[str, Any] = {
        "above": "../victim.safetensors",
        "absolute": str(victim),
        "link": "link.safetensors",
        "dots": "..",
        "number": 7,
    }
    (folder / "link.safetensors").symlink_to(victim)
    (folder / "notes.txt").write_text("mine")
    hostile_index(folder, names[how])
    with refused(r"not a plain file name|is a link to") as model:
        checkpoint.load_safetensors(folder, model)
    checkpoint.save_safetensors(folder, model)
    assert victim.exists()
    checkpoint.load_safetensors(folder, model)
    hostile_index(folder, "notes.txt")
    checkpoint.save_safetensors(folder, model)
    assert (folder / "notes.txt").read_text() == "mine"


def test_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    """`snapshots/REVISION/model.safetensors` is a link to `blobs/HASH` there."""
    folder = tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    for made in (folder, blobs):
        made.mkdir(parents=True)
    safetensors.save_file(model_of().state_dict(), str(blobs / "0123"))
    (folder / "model.safetensors").symlink_to(Path("../../blobs/0123"))
    model = model_of(1)
    checkpoint.load_safetensors(folder, model)
    assert values_of(model) == values_of(model_of())
    (folder / "model.safetensors").unlink()
    os.rename(blobs / "0123", tmp_path / "0123")
    (folder / "model.safetensors").symlink_to(tmp_path / "0123")
    with pytest.raises(fsdp2.ConfigError, match="is a link to"):
        checkpoint.load_safetensors(folder, model)
    checkpoint.load_safetensors(folder, model, trust=True)


def test_plain_data_comes_back_without_trust(tmp_path: Path) -> None:
    """What training programs keep: states of schedulers, of random numbers, containers."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    extra = {
        "scheduler": scheduler.state_dict(),
        "rng": (random.getstate(), torch.get_rng_state()),
        "counts": collections.Counter("abca"),
        "ordered": collections.OrderedDict(b=1, a=2),
        "lists": collections.defaultdict(list, {"a": [1]}),
        "recent": collections.deque([1, 2], maxlen=2),
        "sets": [{1, 2}, frozenset({3}), range(3), slice(1, 2), 1j, b"x", bytearray(b"y"), ...],
        "torch": [torch.float16, torch.Size([2]), torch.device("cpu")],
    }
    checkpoint.save(tmp_path / "saved", model, extra=extra)
    found = checkpoint.load(tmp_path / "saved", model)
    assert torch.equal(found["rng"][1], extra["rng"][1])  # type: ignore[index]  # a tuple
    assert found["rng"][0] == random.getstate()
    for key in ("scheduler", "counts", "ordered", "lists", "recent", "sets", "torch"):
        assert found[key] == extra[key], key
        assert type(found[key]) is type(extra[key]), key
    found["lists"]["new"].append(1)


def test_classes_that_the_user_allowed_are_loaded(tmp_path: Path) -> None:
    extra = {"when": datetime.timedelta(3)}
    checkpoint.save(tmp_path / "saved", model_of(), extra=extra)
    with pytest.raises(fsdp2.ConfigError, match=r"not plain data: it needs datetime.timedelta"):
        checkpoint.load(tmp_path / "saved", model_of())
    with torch.serialization.safe_globals([datetime.timedelta]):
        assert checkpoint.load(tmp_path / "saved", model_of()) == extra
    assert checkpoint.load(tmp_path / "saved", model_of(), trust=True) == extra


@ranks(2)
def test_what_one_rank_refuses_all_refuse(tmp_path: Path, rank: int) -> None:
    model = model_of()
    fsdp2.fully_shard(model, mesh=make_mesh())
    checkpoint.save(tmp_path / "saved", model, extra=Payload(tmp_path / f"ran{rank}"))
    with pytest.raises(fsdp2.ConfigError, match="trust=True"):
        checkpoint.load(tmp_path / "saved", model)
    assert os.listdir(tmp_path) == ["saved"]


def test_what_a_pickle_fetches_is_nobody_elses() -> None:
    """Attributes that a pickle sets on what it names are set on nothing that is used."""
    pollute = b"\x80\x04\x8c\x0bcollections\x8c\x07Counter\x93N}\x8c\x05stuckK\x01s\x86b."  # BUILD
    pickle.Unpickler(io.BytesIO(pollute)).load()
    assert collections.Counter.stuck == 1  # type: ignore[attr-defined]  # what pickle would do
    del collections.Counter.stuck  # type: ignore[attr-defined]  # as above
    with pytest.raises(RefusedError, match="other code uses"):
        unpickle(pollute, plain_names())
    assert not hasattr(collections.Counter, "stuck")
    for code in (b"cos\nsystem\n.", b"cbuiltins\neval\n.", b"ctorch\nload\n.", b"ctorch\nnn\n."):
        with pytest.raises(RefusedError):
            unpickle(code, plain_names())


def test_checkpoints_without_sums_load(tmp_path: Path) -> None:
    """Those of 0.1.0 and of torch: the file of metadata ends with its pickle."""
    checkpoint.save(tmp_path / "saved", model_of(), extra={"step": 3})
    metadata = dcp.FileSystemReader(tmp_path / "saved").read_metadata()
    metadata.storage_meta.save_id = "somebody's"
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(metadata))
    model = model_of(1)
    assert checkpoint.load(tmp_path / "saved", model) == {"step": 3}
    assert values_of(model) == values_of(model_of())

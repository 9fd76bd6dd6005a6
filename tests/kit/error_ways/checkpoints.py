"""Ways to the messages of ``fsdp2/_core/errors/checkpoints.md``."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gzip
import json
import os
import shutil
import sys
import tempfile
import threading
import warnings
from typing import IO, Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import fsdp2
from fsdp2 import checkpoint, weights
from fsdp2.checkpoint import _dcp, _place, _save
from tests.kit.error_ways._programs import WIDTH, Net, build, shared_folder, trained, x
from tests.kit.error_ways._way import way
from tests.kit.meshes import DEVICE


@way("FS602", "'optimizer'", "optim_key=")
def _(mended: bool) -> None:
    model, path = build(), shared_folder() / "saved"
    optimizer = trained(model)
    torch.distributed.checkpoint.save(
        {
            "model": model.state_dict(),
            "optim": checkpoint.sharded_state(model, optimizer)["optimizer"],
        },
        checkpoint_id=path,
    )
    given = {"optim_key": "optim"} if mended else {}
    checkpoint.load(path, model, optimizer, **given)


@way("FS607", "rekey", "param_groups")
def _(mended: bool) -> None:
    model = build()
    optimizer = trained(model)
    state = optimizer.state_dict() if mended else model.state_dict()
    checkpoint.rekey(state, "name", model=model)


@way("FS607", "'state'", name="state")
def _(mended: bool) -> None:
    model = build()
    optimizer = trained(model)
    state = optimizer.state_dict()
    if not mended:
        state["state"] = list(state["state"].values())
    checkpoint.rekey(state, "name", model=model)


@way("FS611", "rekey", "model=")
def _(mended: bool) -> None:
    model = build()
    optimizer = trained(model)
    state = checkpoint.sharded_state(model, optimizer)["optimizer"]
    checkpoint.rekey(state, "id", model=model if mended else None, optimizer=optimizer)


@way("FS614", "locked")
def _(mended: bool) -> None:
    """Another job gives names to its files, and hangs meanwhile."""
    model, path = build(), shared_folder() / "saved"
    hangs = not mended and dist.get_rank() == 0
    with _place.exclusive(path) if hangs else contextlib.nullcontext():
        dist.barrier()
        with mock.patch.object(_place, "LOCK_WITHIN_S", 0.1):
            checkpoint.save(path, model)


@way("FS624", "0.kept", "placements")
def _(mended: bool) -> None:
    model = build()
    mesh = model[0].weight.device_mesh
    rows = 2 if mended else (1, 3)[dist.get_rank()]
    uneven = DTensor.from_local(
        torch.ones(rows, WIDTH), mesh, [Shard(0)], shape=torch.Size((4, WIDTH)), stride=(WIDTH, 1)
    )
    model[0].register_buffer("kept", uneven)
    checkpoint.full_state(model)


@way("FS618", "model-00001", "does not contain it")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder() / "saved"
    checkpoint.save_safetensors(folder, model, max_file_bytes=90)
    dist.barrier()
    index = folder / "model.safetensors.index.json"
    if dist.get_rank() == 0 and not mended:
        found = json.loads(index.read_text())
        found["weight_map"]["1.bias"] = found["weight_map"]["0.weight"]
        index.write_text(json.dumps(found))
    dist.barrier()
    checkpoint.load_safetensors(folder, model, verify=mended)


@way("FS626", "replaced", "Call load again")
def _(mended: bool) -> None:
    """Another job gives its own checkpoint the name, after this one has read what there is."""
    model, path = build(), shared_folder() / "saved"
    checkpoint.save(path, model)
    read = _dcp.read

    def read_before_it_is_replaced(*args: Any, **named: Any) -> Any:
        found = read(*args, **named)
        dist.barrier()
        if dist.get_rank() == 0 and not mended:
            os.rename(path, path.with_name("replaced"))
        dist.barrier()
        return found

    with mock.patch.object(_dcp, "read", read_before_it_is_replaced):
        checkpoint.load(path, model)


@way("FS627", "rank 1", "No space left on device")
def _(mended: bool) -> None:
    model, path = build(), shared_folder() / "saved"
    write = _save.write_part

    def fail(*args: Any) -> None:
        if dist.get_rank() == 1 and not mended:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*args)

    with mock.patch.object(_save, "write_part", fail):
        handle = checkpoint.save(path, model, background=True)
        handle._done.wait()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        checkpoint.save(path, model)
    for one in told:
        raise fsdp2.StateError("FS627", str(one.message).removesuffix(" [FS627]"))


@way("FS628", "a save in the background", "when_busy='wait'")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    write, go_on = _save.write_part, threading.Event()

    def held_back(*args: Any) -> None:
        go_on.wait()
        write(*args)

    with mock.patch.object(_save, "write_part", held_back):
        handle = checkpoint.save(folder / "one", model, background=True)
        if mended:
            go_on.set()
            handle.wait()
        try:
            checkpoint.save(folder / "two", model, when_busy="refuse")
        finally:
            go_on.set()
            handle.wait()


@way("FS629", "cannot create", "memory=")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    (folder / "file").touch()
    copies = checkpoint.NeighbourCopies("tried", memory=folder if mended else folder / "file")
    copies.save(model)
    copies.remove()


@way("FS630", "of ranks 1 are lost", "loaded from files")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    memory = folder / f"host{dist.get_rank()}"
    copies = checkpoint.NeighbourCopies("tried", memory=memory)
    copies.save(model)
    copies.wait()
    dist.barrier()
    for path in memory.glob("*/*/.told-1"):
        if not mended:
            path.unlink()
    dist.barrier()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        checkpoint.load_latest(folder / "run", model, copies=copies)
    for one in told:
        raise fsdp2.StateError("FS630", str(one.message).removesuffix(" [FS630]"))


# States in memory.


def taken(kind: type[torch.optim.Optimizer] = torch.optim.SGD, **given: Any) -> Any:
    """Return a whole state of a trained model and its optimizer, on each rank."""
    model = build()
    optimizer = kind(model.parameters(), **given)
    model(x()).sum().backward()
    optimizer.step()
    return checkpoint.full_state(model, optimizer, rank0_only=False)


@way("FS601", "load_full_state", "under 'model'")
def _(mended: bool) -> None:
    state = Net().state_dict()
    checkpoint.load_full_state(build(), {"model": state} if mended else state)


@way("FS603", "2.weight", "strict=False")
def _(mended: bool) -> None:
    """A new head, which the state lacks."""
    model = fsdp2.fully_shard(nn.Sequential(*Net(), nn.Linear(WIDTH, 1)))
    checkpoint.load_full_state(model, {"model": Net().state_dict()}, strict=not mended)


@way("FS603", "0.weight", "net.0.weight", name="prefix")
def _(mended: bool) -> None:
    state = {f"net.{name}": value for name, value in Net().state_dict().items()}
    if mended:
        state = {name.removeprefix("net."): value for name, value in state.items()}
    checkpoint.load_full_state(build(), {"model": state})


@way("FS603", "0.weight", "(4, 4)", "(8, 4)", name="shape")
def _(mended: bool) -> None:
    saved = Net() if mended else nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH))
    checkpoint.load_full_state(build(), {"model": saved.state_dict()})


@way("FS604", "2 names", "strict=False")
def _(mended: bool) -> None:
    state = taken(lr=0.1, momentum=0.9)
    model = fsdp2.fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state["model"] = {name: v for name, v in state["model"].items() if name.startswith("0.")}
    checkpoint.load_full_state(model, state, optimizer, strict=not mended)


@way("FS604", "[2, 3", "which the optimizer does not have", name="numbers")
def _(mended: bool) -> None:
    """Some parameters are frozen now, and the state calls them by numbers."""
    model, other = build(), build()
    state = checkpoint.full_state(model, trained(model), rank0_only=False, optim_keys="id")
    optimizer = torch.optim.SGD(other[0].parameters(), lr=0.1, momentum=0.9)
    if mended:
        state["optimizer"] = checkpoint.rekey(state["optimizer"], "name", model=other)
    checkpoint.load_full_state(other, state, optimizer)
    assert len(optimizer.state) == 2


@way("FS605", "0.weight", "materialize")
def _(mended: bool) -> None:
    state = taken(lr=0.1, momentum=0.9)
    with torch.device("meta"):
        model = build()
    if mended:
        fsdp2.materialize(model, DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoint.load_full_state(model, state, optimizer)


@way("FS606", "exp_avg", "0.weight", "clone")
def _(mended: bool) -> None:
    state = taken(torch.optim.Adam)
    fields = state["optimizer"]["state"]["0.weight"]
    fields["exp_avg_sq"] = fields["exp_avg"].clone() if mended else fields["exp_avg"]
    model = build()
    checkpoint.load_full_state(model, state, torch.optim.Adam(model.parameters()))


@way("FS608", "AdamW")
def _(mended: bool) -> None:
    state = taken(lr=0.1, momentum=0.9)
    model = build()
    if mended:
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoint.load_full_state(model, state, optimizer)


@way("FS608", "AdamW", name="anew")
def _(mended: bool) -> None:
    state = taken(lr=0.1, momentum=0.9)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    checkpoint.load_full_state(model, state, None if mended else optimizer)


@way("FS608", "no param group with 0.weight", name="fewer parameters")
def _(mended: bool) -> None:
    """Some parameters were frozen when it was saved."""
    model, other = build(), build()
    state = checkpoint.full_state(model, trained(model[1]))
    params = other[1].parameters() if mended else other.parameters()
    checkpoint.load_full_state(other, state, torch.optim.SGD(params, lr=0.1, momentum=0.9))


@way("FS609", "0.weight", "same groups")
def _(mended: bool) -> None:
    def make(model: Any, groups: bool) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        weights = [p for name, p in named.items() if name.endswith("weight")]
        biases = [p for name, p in named.items() if name.endswith("bias")]
        parts: Any = [{"params": weights, "weight_decay": 0.1}, {"params": biases}]
        return torch.optim.SGD(parts if groups else model.parameters(), lr=0.1)

    model, other = build(), build()
    state = checkpoint.full_state(model, make(model, True))
    checkpoint.load_full_state(other, state, make(other, mended))


@way("FS610", "parameter 0", "after fully_shard")
def _(mended: bool) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp2.fully_shard(model)
    if mended:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoint.full_state(model, optimizer)


@way("FS621", "0.weight", "sharded")
def _(mended: bool) -> None:
    """A rank's file was exchanged for the other's."""
    model = build()
    states: list[Any] = [None, None]
    dist.all_gather_object(states, checkpoint.local_state(model))
    checkpoint.load_local_state(model, states[dist.get_rank() if mended else 1 - dist.get_rank()])


@way("FS622", "0.weight", "full state")
def _(mended: bool) -> None:
    model, other = build(), build(shard_placement_fn=lambda p: Shard(p.dim() - 1))
    if mended:
        checkpoint.load_full_state(other, checkpoint.full_state(model))
    else:
        checkpoint.load_sharded_state(other, checkpoint.sharded_state(model))


@way("FS623", "0.weight", "load_full_state")
def _(mended: bool) -> None:
    model, state = build(), Net().state_dict()
    if mended:
        checkpoint.load_full_state(model, {"model": state})
    else:
        model.load_state_dict(state)


# Files.


@way("FS612", "no checkpoint")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    checkpoint.save(folder / "saved", model)
    checkpoint.load(folder / "saved" if mended else folder, model)


@way("FS612", "model.safetensors", name="safetensors")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    checkpoint.save_safetensors(folder / "saved", model)
    checkpoint.load_safetensors(folder / "saved" if mended else folder, model)


@way("FS613", "the first rank")
def _(mended: bool) -> None:
    """A disk of each machine: the path is the same, and what it leads to is not."""
    model, shared = build(), shared_folder()
    own = shared / f"disk{dist.get_rank()}"
    own.mkdir()
    checkpoint.save((shared if mended else own) / "saved", model)


@way("FS615", "other files")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    (folder / "notes.txt").write_text("lr 0.1")
    checkpoint.save(folder / "saved" if mended else folder, model)


@dataclasses.dataclass
class Progress:
    """What a program keeps of its run."""

    step: int


@way("FS616", "Progress", "trust=True")
def _(mended: bool) -> None:
    model, path = build(), shared_folder() / "saved"
    checkpoint.save(path, model, extra=Progress(3))
    assert checkpoint.load(path, model, trust=mended).step == 3


@way("FS616", "Progress", "plain data", name="plain")
def _(mended: bool) -> None:
    model, path = build(), shared_folder() / "saved"
    progress = Progress(3)
    checkpoint.save(path, model, extra=dataclasses.asdict(progress) if mended else progress)
    assert checkpoint.load(path, model)["step"] == 3


@way("FS616", "Progress", "add_safe_globals", name="allowed")
def _(mended: bool) -> None:
    model, path = build(), shared_folder() / "saved"
    checkpoint.save(path, model, extra=Progress(3))
    with torch.serialization.safe_globals([Progress] if mended else []):
        assert checkpoint.load(path, model).step == 3


@way("FS617", "model.safetensors", "link")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    checkpoint.save_safetensors(folder / "saved", model)
    if dist.get_rank() == 0:
        file = folder / "saved" / "model.safetensors"
        (folder / "here").mkdir()
        (shutil.copy if mended else os.symlink)(file, folder / "here" / file.name)
    dist.barrier()
    checkpoint.load_safetensors(folder / "here", model)


@way("FS617", "model.safetensors.index.json", "plain file name", name="index")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    checkpoint.save_safetensors(folder / "saved", model)
    if dist.get_rank() == 0:
        name = "model.safetensors"
        shutil.copy(folder / "saved" / name, folder)
        names = dict.fromkeys(Net().state_dict(), name if mended else f"saved/{name}")
        (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": names}))
    dist.barrier()
    checkpoint.load_safetensors(folder, model)


class Gzip(StreamTransformExtension):
    @staticmethod
    def from_descriptor(version: str) -> Gzip:
        return Gzip()

    @staticmethod
    def registry_name() -> str:
        return "gzip"

    def get_descriptor(self) -> str:
        return "gzip/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        return gzip.GzipFile(fileobj=output, mode="wb")  # type: ignore[return-value]  # like one

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002  # torch's name for it
        return gzip.GzipFile(fileobj=input)  # type: ignore[return-value]  # like one


@way("FS619", "gzip", "torch.distributed.checkpoint")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    state = checkpoint.sharded_state(model)
    writer = FileSystemWriter(folder / "packed", _extensions=[Gzip()])
    torch.distributed.checkpoint.save(state, storage_writer=writer)
    if not mended:
        checkpoint.load(folder / "packed", model)
        return
    extensions = ExtensionRegistry()
    extensions.extensions["gzip"] = Gzip
    reader = FileSystemReader(folder / "packed", _extension_registry=extensions)
    torch.distributed.checkpoint.load(state, storage_reader=reader)
    torch.distributed.checkpoint.save(state, checkpoint_id=folder / "plain")
    checkpoint.load(folder / "plain", model)


@way("FS620", "pip install safetensors")
def _(mended: bool) -> None:
    model, folder = build(), shared_folder()
    missing = {} if mended else {"safetensors": None, "safetensors.torch": None}
    with mock.patch.dict(sys.modules, missing):
        checkpoint.save_safetensors(folder, model)


@way("FS625", "rank 1", "which does not contain this rank", on=(1,))
def _(mended: bool) -> None:
    mesh = DeviceMesh(DEVICE, [0])
    model = nn.Linear(WIDTH, WIDTH)
    model.weight = nn.Parameter(distribute_tensor(model.weight, mesh, [Replicate()]))
    if not mended or dist.get_rank() == 0:
        checkpoint.full_state(model)


@way("FS625", "rank 1", "which does not contain this rank", name="one tensor")
def _(mended: bool) -> None:
    """Ranks of a mesh that all are on do not wait for the one that has the error."""
    model = build()
    mesh = model[0].weight.device_mesh if mended else DeviceMesh(DEVICE, [0])
    model[0].register_buffer("kept", distribute_tensor(torch.ones(WIDTH), mesh, [Replicate()]))
    checkpoint.full_state(model)


def _asks(*boxes: weights.Box, dtype: torch.dtype = torch.bfloat16) -> None:
    """Plan for one engine rank that has the rows of one parameter."""
    spec = weights.Spec((WIDTH, WIDTH), dtype, boxes)
    weights.plan(nn.Linear(WIDTH, WIDTH), [{"there": spec}])


@way("FS631", "there of engine rank 0", "which the model does not have", alone=True)
def _(mended: bool) -> None:
    _asks(weights.Box("weight" if mended else "0.weight", (0, 0), (WIDTH, WIDTH)))


@way("FS632", "there of engine rank 0", "along dim 0", alone=True)
def _(mended: bool) -> None:
    first = weights.Box("weight", (0, 0), (1, WIDTH))
    rest = weights.Box("weight", (1, 0), (WIDTH - 1, WIDTH))
    _asks(*((first, rest) if mended else (first,)))


@way("FS633", "there of engine rank 0", "torch.int64", alone=True)
def _(mended: bool) -> None:
    dtype = torch.float16 if mended else torch.int64
    _asks(weights.Box("weight", (0, 0), (WIDTH, WIDTH)), dtype=dtype)


@way("FS634", "weight was planned as torch.float32", alone=True)
def _(mended: bool) -> None:
    model, spec = (
        nn.Linear(2, 2),
        weights.Spec((2, 2), torch.float32, [weights.Box("weight", (0, 0), (2, 2))]),
    )
    plan = weights.plan(model, [{"there": spec}])
    model.double()
    if mended:
        plan = weights.plan(model, [])
    plan.send(weights.Files(tempfile.mkdtemp(), timeout=0.0))


@way("FS635", "the new version is incomplete", "trainer 0 failed", on=(1,))
def _(mended: bool) -> None:
    def callback(name: str, start: tuple[int, ...], values: torch.Tensor) -> torch.Tensor:
        return values if mended else values.missing

    mesh, text = DeviceMesh("cpu", [0]), [""]
    if dist.get_rank() == 0:
        model = fsdp2.fully_shard(nn.Linear(2, 2), mesh=mesh)
        spec = weights.Spec((2, 2), torch.float32, [weights.Box("weight", (0, 0), (2, 2))])
        plan = weights.plan(model, [{"there": spec}])
        text = [plan.to_json()]
    dist.broadcast_object_list(text, src=0)
    if dist.get_rank() == 0:
        with contextlib.suppress(AttributeError):
            plan.send(dist.group.WORLD, [1], callback=callback)
    else:
        weights.Receiver(text[0], 0).receive(dist.group.WORLD)


@way("FS636", "a background update failed", alone=True)
def _(mended: bool) -> None:
    spec = weights.Spec((2, 2), torch.float32, [weights.Box("weight", (0, 0), (2, 2))])
    plan = weights.plan(nn.Linear(2, 2), [{"there": spec}])
    nowhere = weights.Files(tempfile.mkdtemp(), timeout=0.0)
    handle = plan.send(nowhere, background=True)
    with contextlib.suppress(fsdp2.LostRank):
        if mended:
            handle.wait()
    with contextlib.suppress(fsdp2.LostRank):
        plan.send(nowhere)

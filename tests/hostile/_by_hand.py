"""Files that somebody made to do harm, one by one: ways to alter a program, or to exhaust it."""

from __future__ import annotations

import copyreg
import enum
import functools
import io
import os
import pickle
import socket
import struct
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.tensor._dtensor_spec import DTensorSpec

import fsdp2
from fsdp2 import checkpoint
from tests.kit.models import seeded

INDEX = "model.safetensors.index.json"
Writes = Callable[[Path], None]


def model_of(seed: int = 0) -> nn.Module:
    return seeded(lambda: nn.Linear(3, 5), seed)  # type: ignore[no-any-return]  # what it builds


def values_of(model: nn.Module) -> list[bytes]:
    return [p.detach().numpy().tobytes() for p in model.parameters()]


def saved(value: Any) -> bytes:
    """Return what ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def with_extra(folder: Path, pickled: bytes) -> None:
    """Write a checkpoint whose ``extra`` is this pickle, without checksums."""
    with_entry(folder, saved(saved({"pickled": pickled, "tensors": {}})))


def with_entry(folder: Path, content: bytes) -> None:
    """Write a checkpoint whose entry for ``extra`` is this file of ``torch.save``."""
    checkpoint.save(folder, model_of(), extra=1)
    (folder / "__9_0.distcp").write_bytes(content)

    def change(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "fsdp2_extra":
                info.relative_path, info.offset, info.length = "__9_0.distcp", 0, len(content)

    rewrite(folder, change)


def rewrite(folder: Path, change: Callable[[Any], None]) -> None:
    """Change the metadata of a checkpoint, which loses its checksums."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    change(metadata)
    metadata.storage_meta.save_id = None
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


# Pickles.

HEAD = b"\x80\x04"


def name(module: str, of: str) -> bytes:
    return b"c" + f"{module}\n{of}\n".encode()


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def called(module: str, of: str, *args: bytes) -> bytes:
    return name(module, of) + b"(" + b"".join(args) + b"tR"


RANGE = called("builtins", "range", number(3 * 10**8))

MEMORY = {
    "LONG_BINPUT": b"\x80\x04Nr\xff\xff\xff\x0f.",
    "LONG_BINPUT, 4 G": b"\x80\x04Nr\xff\xff\xff\xff.",
    "LONG4": b"\x80\x04\x8b\xff\xff\xff\x7f.",
    "LONG4, negative": b"\x80\x04\x8b\xff\xff\xff\xff.",
    "BINUNICODE8": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 36) + b".",
    "BINBYTES8": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 36) + b".",
    "BYTEARRAY8": b"\x80\x05\x96" + struct.pack("<Q", 1 << 36) + b".",
    "FRAME": b"\x80\x04\x95" + struct.pack("<Q", 1 << 36) + b"N.",
    "list of a range": HEAD + called("builtins", "list", RANGE) + b".",
    "set of a range": HEAD + called("builtins", "set", RANGE) + b".",
    "Counter of a range": HEAD + called("collections", "Counter", RANGE) + b".",
    "deque of a range": HEAD + called("collections", "deque", RANGE) + b".",
    "Size of a range": HEAD + called("torch", "Size", RANGE) + b".",
    "bytearray of a number": HEAD + called("builtins", "bytearray", number(3 * 10**9)) + b".",
    "lists of one text": HEAD
    + (b"X" + struct.pack("<I", 10**6) + b"\xc4\x80" * 500_000 + b"q\x00")
    + (b"(" + (name("builtins", "list") + b"h\x00\x85R") * 300 + b"t."),
    "a key of keys": HEAD + b"})" + b"\x85" * 10**6 + b"Ns.",
    "a key of twice a key": HEAD + b"})" + b"2\x86" * 60 + b"Ns.",
    "bytes through a codec": HEAD
    + called("_codecs", "encode", b"X\x01\x00\x00\x00a", b"X\x08\x00\x00\x00punycode")
    + b".",
}


# What lives in this process.


class Colour(enum.Enum):
    RED = 1


class Held:
    """A class that the user has allowed."""

    limit = 3


SHARED: dict[str, int] = {"limit": 3}
LISTED: list[int] = [3]


def shared() -> dict[str, int]:
    return SHARED


def listed() -> list[int]:
    return LISTED


def the_class() -> type:
    return Held


ALLOWED = (Colour, Held, shared, listed, the_class)
HERE = __name__
STATE = b"}X\x05\x00\x00\x00limitK\x07sb"
"""BUILD with ``{"limit": 7}``."""

copyreg.add_extension(HERE, "Held", 0xFD)

ALTERING = {
    "BUILD on a class of torch": HEAD
    + (name("torch.distributed.tensor._dtensor_spec", "DTensorSpec") + STATE + b"."),
    "BUILD on slots of a class of torch": HEAD
    + (name("torch.distributed.tensor._dtensor_spec", "DTensorSpec"))
    + b"N}X\x05\x00\x00\x00shapeK\x07s\x86b.",
    "BUILD on slots of a class": HEAD
    + (name(HERE, "Held") + b"N}X\x05\x00\x00\x00limitK\x07s\x86b."),
    "BUILD on an allowed class": HEAD + name(HERE, "Held") + STATE + b".",
    "BUILD on a function": HEAD + name(HERE, "shared") + STATE + b".",
    "BUILD on a class that a call returns": HEAD + called(HERE, "the_class") + STATE + b".",
    "BUILD on a member of an enum": HEAD + called(HERE, "Colour", number(1)) + STATE + b".",
    "NEWOBJ of a member": HEAD + name(HERE, "Colour") + number(1) + b"\x85\x81" + STATE + b".",
    "SETITEM": HEAD + called(HERE, "shared") + b"X\x05\x00\x00\x00limitK\x07s.",
    "SETITEMS": HEAD + called(HERE, "shared") + b"(X\x05\x00\x00\x00limitK\x07u.",
    "APPEND": HEAD + called(HERE, "listed") + b"K\x07a.",
    "APPENDS": HEAD + called(HERE, "listed") + b"(K\x07e.",
    "BUILD on a dtype": HEAD + name("torch", "float32") + STATE + b".",
    "BUILD on a device": HEAD + called("torch", "device", b"X\x03\x00\x00\x00cpu") + STATE + b".",
    "BUILD on a builtin": HEAD + name("builtins", "list") + STATE + b".",
    "BUILD on a Counter": HEAD + name("collections", "Counter") + STATE + b".",
    "EXT1": HEAD + b"\x82\xfd" + STATE + b".",
    "INST": HEAD + b"(i" + f"{HERE}\nHeld\n".encode() + b".",
    "OBJ": HEAD + b"(" + name(HERE, "Held") + b"o" + STATE + b".",
    "a persistent id": HEAD + b"K\x00Q" + STATE + b".",
    "a call of what is no name": HEAD + called(HERE, "the_class") + b")R" + STATE + b".",
    "NEWOBJ of what a call returns": HEAD + called(HERE, "the_class") + b")\x81" + STATE + b".",
    "DeviceMesh": HEAD
    + called("torch.distributed.device_mesh", "DeviceMesh", b"X\x03\x00\x00\x00cpu", b"](K\x00e")
    + b".",
}


def living() -> dict[str, Any]:
    """Return what a pickle could have altered."""
    return {
        "DTensorSpec": dict(vars(DTensorSpec)),
        "Held": dict(vars(Held)),
        "Colour": {member: dict(vars(member)) for member in Colour},
        "SHARED": dict(SHARED),
        "LISTED": [*LISTED],
        "shared": dict(vars(shared)),
        "float32": str(torch.float32),
    }


# Archives.

LONG_TEXT = b"\x80\x02X" + struct.pack("<I", 1 << 30)


def deflated(value: bytes, entry: str) -> bytes:
    """Return a file of ``torch.save`` with one entry compressed, another one put in its place."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(torch.ones(2)))) as before,
        zipfile.ZipFile(file, "w") as after,
    ):
        for one in before.infolist():
            is_it = one.filename.endswith(entry)
            kind = zipfile.ZIP_DEFLATED if is_it else zipfile.ZIP_STORED
            after.writestr(one.filename, value if is_it else before.read(one), kind)
    return file.getvalue()


def repacked(**changed: bytes) -> bytes:
    """Return a file of ``torch.save`` with other entries, all stored."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(torch.ones(2)))) as before,
        zipfile.ZipFile(file, "w") as after,
    ):
        for one in before.infolist():
            last = one.filename.rpartition("/")[2].replace(".", "_")
            after.writestr(one.filename, changed.get(last, before.read(one)))
    return file.getvalue()


def larger_than_its_storage() -> bytes:
    """torch would make the storage larger."""
    with zipfile.ZipFile(io.BytesIO(saved(torch.ones(2)))) as archive:
        data = archive.read("archive/data.pkl")
    return repacked(data_pkl=data.replace(b"K\x02\x85", number(10**10) + b"\x85", 1))


def one_entry_twice() -> bytes:
    """Let two entries of the list name the same bytes."""
    content = bytearray(saved(torch.ones(1000)))
    first = content.index(b"PK\x01\x02")
    second = content.index(b"PK\x01\x02", first + 4)
    content[second + 42 : second + 46] = content[first + 42 : first + 46]
    content[second + 20 : second + 28] = content[first + 20 : first + 28]
    return bytes(content)


ARCHIVES: dict[str, Callable[[], bytes]] = {
    "a compressed pickle": lambda: deflated(
        b"\x80\x02X" + b"\xff" * 4 + bytes(3 << 30), "data.pkl"
    ),
    "a compressed storage": lambda: deflated(bytes(3 << 30), "data/0"),
    "a tensor larger than its storage": larger_than_its_storage,
    "one entry twice": one_entry_twice,
}


# What stands in the place of a file.


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _holes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def _long_text_of_holes(path: Path) -> None:
    """A pickle of one text, a terabyte of zeros."""
    path.write_bytes(b"\x80\x04\x8d" + struct.pack("<Q", (1 << 40) - 100))
    os.truncate(path, 1 << 40)


def _folder(path: Path) -> None:
    path.mkdir()


PLACES: dict[str, Callable[[Path], None]] = {
    "a pipe": _pipe,
    "a socket": _socket,
    "/dev/zero": _endless,
    "holes": _holes,
    "a text of holes": _long_text_of_holes,
    "a folder": _folder,
}


def sharded(folder: Path) -> str:
    checkpoint.save(folder, model_of(), extra={"step": 3})
    return "__0_0.distcp"


def one_file(folder: Path) -> str:
    checkpoint.save_safetensors(folder, model_of())
    return "model.safetensors"


def several(folder: Path) -> str:
    checkpoint.save_safetensors(folder, model_of(), max_file_bytes=30)
    return INDEX


FILES: dict[str, Callable[[Path], str]] = {
    ".metadata": lambda folder: sharded(folder) and ".metadata",
    ".distcp": sharded,
    "safetensors": one_file,
    "index": several,
}


def _replaced(make: Callable[[Path], str], place: Callable[[Path], None]) -> Writes:
    def write(folder: Path) -> None:
        path = folder / make(folder)
        path.unlink()
        place(path)

    return write


# What metadata says.


def a_link_out(make: Callable[[Path], str]) -> Writes:
    def write(folder: Path) -> None:
        path = folder / make(folder)
        outside = folder.with_name("outside")
        path.rename(outside)
        path.symlink_to(outside)

    return write


def half_twice(folder: Path) -> None:
    """Two parts of the weight have five rows together, and none has the last two of five."""
    checkpoint.save(folder, model_of())
    contents = {0: saved(torch.zeros(3, 3)), 1: saved(torch.zeros(2, 3))}
    (folder / "__9_0.distcp").write_bytes(b"".join(contents.values()))

    def change(metadata: Any) -> None:
        chunks = metadata.state_dict_metadata["model.weight"].chunks
        stored = metadata.storage_data
        index = next(key for key in stored if key.fqn == "model.weight")
        told, chunk = stored.pop(index), chunks.pop()
        begin = 0
        for first, rows in ((0, 3), (1, 2)):
            start, length = torch.Size((first, 0)), len(contents[first])
            chunks.append(replace(chunk, offsets=start, sizes=torch.Size((rows, 3))))
            stored[replace(index, offset=start, index=first)] = replace(
                told, relative_path="__9_0.distcp", offset=begin, length=length
            )
            begin += length

    rewrite(folder, change)


def a_huge_extra(folder: Path) -> None:
    """A tensor beside the model with any number of elements, in parts that say the same bytes."""
    dcp.save({"model": model_of().state_dict(), "extra": torch.ones(1 << 20)}, checkpoint_id=folder)

    def change(metadata: Any) -> None:
        extra = metadata.state_dict_metadata["extra"]
        extra.size = torch.Size((1 << 30,))
        chunk = extra.chunks[0]
        index = next(key for key in metadata.storage_data if key.fqn == "extra")
        extra.chunks[:] = []
        for place in range(1 << 10):
            offsets = torch.Size((place << 20,))
            extra.chunks.append(replace(chunk, offsets=offsets))
            key = replace(index, offset=offsets, index=place)
            metadata.storage_data[key] = metadata.storage_data[index]

    rewrite(folder, change)


def a_value_of_itself(folder: Path) -> None:
    """A dict of twice a dict of twice a dict: years to walk through."""
    value: Any = {}
    for _ in range(60):
        value = {0: value, 1: value}
    with_entry(folder, saved(value))


SAID: dict[str, Writes] = {
    "half of a tensor twice": half_twice,
    "a thousand parts in the same bytes": a_huge_extra,
    "a value that seems huge": a_value_of_itself,
    ".metadata is a link out": a_link_out(lambda folder: sharded(folder) and ".metadata"),
    "the index is a link out": a_link_out(several),
}


def _metadata_of(content: bytes) -> Writes:
    def write(folder: Path) -> None:
        checkpoint.save(folder, model_of())
        (folder / ".metadata").write_bytes(content)

    return write


def trials() -> dict[str, Writes]:
    """Return all by name: what each writes into a folder."""
    found: dict[str, Writes] = dict(SAID)
    for what, pickled in MEMORY.items():
        found[f"{what} in .metadata"] = _metadata_of(pickled)
        found[f"{what} in extra"] = functools.partial(with_extra, pickled=pickled)
    for what, pickled in ALTERING.items():
        found[f"{what} in extra"] = functools.partial(with_extra, pickled=pickled)
        content = repacked(data_pkl=pickled)
        found[f"{what} in a value"] = functools.partial(with_entry, content=content)
    for what, make in ARCHIVES.items():
        found[what] = functools.partial(_with_made, make=make)
    for kind, make_file in FILES.items():
        for what, place in PLACES.items():
            found[f"{what} as {kind}"] = _replaced(make_file, place)
    return found


def _with_made(folder: Path, make: Callable[[], bytes]) -> None:
    with_entry(folder, make())


def load(folder: Path) -> str:
    """Load what is in a folder; say whether anything was changed if it is refused."""
    before, target = living(), model_of(1)
    old = values_of(target)
    is_sharded = os.path.lexists(folder / ".metadata")
    try:
        with torch.serialization.safe_globals(list(ALLOWED)):
            if is_sharded:
                checkpoint.load(folder, target)
            else:
                checkpoint.load_safetensors(folder, target)
    except fsdp2.FSDPError:
        if values_of(target) != old:
            return "changed the model, and was refused"
        if living() != before:
            return "altered what lives here"
        raise
    if living() != before:
        return "altered what lives here"
    return "loaded"

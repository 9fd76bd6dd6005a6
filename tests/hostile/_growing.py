"""Files of any size that are made to take more than their size: time and memory must grow with it.

``WRITES`` has what each writes into a folder, for a size that is about a number of elements.
"""

from __future__ import annotations

import json
import pickle
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import fsdp2
from fsdp2 import checkpoint
from fsdp2.checkpoint._checksums import FOOTER, MAGIC
from tests.hostile._by_hand import HEAD, INDEX, model_of, name, rewrite, saved, several, with_extra

Grows = Callable[[Path, int], None]
METADATA = "torch.distributed.checkpoint.metadata"


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def load(folder: Path) -> str:
    """Load what is in a folder into a model and an optimizer."""
    model = model_of(1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    try:
        if (folder / ".metadata").exists():
            has_optimizer = b"param_groups" in (folder / ".metadata").read_bytes()
            checkpoint.load(folder, model, optimizer_of(model) if has_optimizer else None)
        else:
            checkpoint.load_safetensors(folder, model)
    except fsdp2.FSDPError:
        if any(not torch.equal(value, before[name]) for name, value in model.state_dict().items()):
            return "changed the model, and was refused"
        raise
    return "loaded"


def _saved(change: Callable[[Any, int], None]) -> Grows:
    """Change the metadata of a checkpoint."""

    def write(folder: Path, size: int) -> None:
        model = model_of()
        checkpoint.save(folder, model, optimizer_of(model))
        rewrite(folder, lambda metadata: change(metadata, size))

    return write


def _tensor(size: Any, chunks: list[Any]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(torch.float32), size, chunks)


def _stored(metadata: Any, key: str, offset: Any, place: int, length: int = 4096) -> None:
    """Say where a part lies: in bytes of its own, behind all that is there."""
    told = next(iter(metadata.storage_data.values()))
    begin = (1 << 40) + place * length
    metadata.storage_data[MetadataIndex(key, offset)] = replace(told, offset=begin, length=length)


def a_deep_path(metadata: Any, size: int) -> None:
    metadata.planner_data["model.weight"] = ("model",) * size + ("weight",)


def one_deep_path_of_many(metadata: Any, size: int) -> None:
    path = ["model"] * size
    for place in range(size):
        key = str(place)
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.planner_data[key] = path
        _stored(metadata, key, None, place)


def deep_paths(metadata: Any, size: int) -> None:
    for place in range(size // 100):
        key = str(place)
        metadata.state_dict_metadata[key] = _tensor(torch.Size((0,)), [])
        metadata.planner_data[key] = ("model", *["a"] * (place % 95), "b", place)


def _long_names(*before: str) -> Callable[[Any, int], None]:
    def change(metadata: Any, size: int) -> None:
        long = "1" * size
        for place in range(size):
            key = str(place)
            metadata.state_dict_metadata[key] = _tensor(torch.Size((0,)), [])
            metadata.planner_data[key] = (*before, long, key)

    return change


def a_text_as_paths(metadata: Any, size: int) -> None:
    text = "a" * size
    for place in range(size):
        key = str(place)
        metadata.state_dict_metadata[key] = _tensor(torch.Size((0,)), [])
        metadata.planner_data[key] = text


def one_shape_of_many(metadata: Any, size: int) -> None:
    shape = [0] * size
    for place in range(size):
        metadata.state_dict_metadata[str(place)] = _tensor(shape, [])


def one_offset_of_many(metadata: Any, size: int) -> None:
    offset = (0,) * size
    for place in range(size):
        _stored(metadata, str(place), None, place)
    for index in metadata.storage_data:
        object.__setattr__(index, "offset", offset)


def one_list_of_parts(metadata: Any, size: int) -> None:
    empty = ChunkStorageMetadata(torch.Size((0,)), torch.Size((0,)))
    chunks = [empty] * size
    for place in range(size):
        metadata.state_dict_metadata[str(place)] = _tensor(torch.Size((0,)), chunks)


def one_part_of_many(metadata: Any, size: int) -> None:
    chunks = [ChunkStorageMetadata(torch.Size((0,)), torch.Size((1,)))] * size
    for place in range(size // 10):
        key = str(place)
        metadata.state_dict_metadata[key] = _tensor(torch.Size((1,)), chunks)
        _stored(metadata, key, torch.Size((0,)), place)


def strips(metadata: Any, size: int) -> None:
    """Parts that each share rows with every other, and no element."""
    told = metadata.state_dict_metadata["extra"] = _tensor(torch.Size((2 * size, size)), [])
    for place in range(size):
        offset = torch.Size((place, place))
        told.chunks.append(ChunkStorageMetadata(offset, torch.Size((size, 1))))
        _stored(metadata, "extra", offset, place, 4 * size)


def parts_on_a_grid(metadata: Any, size: int) -> None:
    """Parts that are cut on more dims than any mesh has."""
    dims = 24
    told = metadata.state_dict_metadata["extra"] = _tensor(torch.Size((2,) * dims), [])
    for place in range(size // dims):
        offset = torch.Size((place >> dim) & 1 for dim in range(dims))
        told.chunks.append(ChunkStorageMetadata(offset, torch.Size((1,) * dims)))
        _stored(metadata, "extra", offset, place)


def long_sizes(metadata: Any, size: int) -> None:
    long = (1 << (8 * size)) - 1
    told = metadata.state_dict_metadata["model.weight"]
    chunk = ChunkStorageMetadata([0] * 50, [long] * 50)
    told.size, told.chunks[:] = [long] * 50, [chunk]


def many_keys(metadata: Any, size: int) -> None:
    for place in range(size):
        key = f"key {place}"
        metadata.state_dict_metadata[key] = _tensor(torch.Size((0,)), [])
        metadata.planner_data[key] = (key,)


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def one_state_of_many(size: int) -> bytes:
    """BUILD of many objects with one dict."""
    items = b"".join(_text(str(place)) + b"N" for place in range(size))
    made = b"h\x01)\x81h\x00b0" * size
    return (
        HEAD + b"}(" + items + b"uq\x000" + name(METADATA, "StorageMeta") + b"q\x010" + made + b"N."
    )


def kept_states(size: int) -> bytes:
    return one_state_of_many(size).replace(b"h\x01)\x81h\x00b0", b"h\x01)\x81h\x00b")


def one_tuple_of_arguments(size: int) -> bytes:
    """Many calls with one tuple."""
    begin = HEAD + b"(" + b"N" * size + b"tq\x000" + name(METADATA, "StorageMeta") + b"q\x010"
    return begin + b"h\x01h\x00\x81" * size + b"N."


def a_long_number_as_keys(size: int) -> bytes:
    long = b"\x8b" + struct.pack("<i", size) + b"\x7f" * size
    return HEAD + long + b"q\x000" + b"}h\x00Ns" * size + b"."


def a_long_number_in_keys(size: int) -> bytes:
    long = b"\x8b" + struct.pack("<i", size) + b"\x7f" * size
    return HEAD + long + b"\x85q\x000" + b"}h\x00Ns" * size + b"."


def deep_lists(size: int) -> bytes:
    return HEAD + b"]" * size + b"a" * (size - 1) + b"."


def a_key_of_keys(size: int) -> bytes:
    return HEAD + b"})" + b"\x85" * size + b"Ns."


def marks(size: int) -> bytes:
    return HEAD + b"(" * size + b"."


PICKLES = (one_state_of_many, kept_states, one_tuple_of_arguments, a_long_number_as_keys,
           a_long_number_in_keys, deep_lists, a_key_of_keys, marks)  # fmt: skip


def _as_metadata(make: Callable[[int], bytes]) -> Grows:
    def write(folder: Path, size: int) -> None:
        checkpoint.save(folder, model_of())
        (folder / ".metadata").write_bytes(make(size))

    return write


def _params(folder: Path, size: int) -> None:
    """One long name, listed again and again in a param group."""
    model = model_of()
    checkpoint.save(folder, model, optimizer_of(model))
    long = "_orig_mod." * (size // 10)
    content = saved([long] * size)
    (folder / "__9_0.distcp").write_bytes(content)

    def change(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "optimizer.param_groups.0.params":
                info.relative_path, info.offset, info.length = "__9_0.distcp", 0, len(content)

    rewrite(folder, change)


def _nested(size: int) -> str:
    return "[" * size + "]" * size


def a_deep_index(folder: Path, size: int) -> None:
    several(folder)
    (folder / INDEX).write_text(_nested(size))


def a_wide_index(folder: Path, size: int) -> None:
    several(folder)
    found = json.loads((folder / INDEX).read_text())
    file = next(iter(found["weight_map"].values()))
    found["weight_map"] |= {f"name {place}": file for place in range(size)}
    (folder / INDEX).write_text(json.dumps({"weight_map": found["weight_map"]}))


def _with_header(header: bytes, content: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + content


def a_deep_header(folder: Path, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    header = b'{"a":' + _nested(size).encode() + b"}"
    (folder / "model.safetensors").write_bytes(_with_header(header, b""))


def a_wide_header(folder: Path, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    told = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"name {place}": told for place in range(size)}).encode()
    (folder / "model.safetensors").write_bytes(_with_header(header, b""))


def a_deep_text_in_a_header(folder: Path, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"__metadata__": {"fsdp2": _nested(size)}}).encode()
    (folder / "model.safetensors").write_bytes(_with_header(header, b""))


def deep_checksums(folder: Path, size: int) -> None:
    """Checksums behind the metadata that are deeper than JSON is read."""
    checkpoint.save(folder, model_of())
    content, body = pickle.dumps(None), _nested(size).encode()
    length = struct.pack("<Q", len(body))
    end = FOOTER.pack(len(body), zlib.crc32(content + body + length), MAGIC)
    (folder / ".metadata").write_bytes(content + body + end)


WRITES: dict[str, Grows] = {
    "a deep path": _saved(a_deep_path),
    "one deep path of many": _saved(one_deep_path_of_many),
    "deep paths": _saved(deep_paths),
    "a long name of the model": _saved(_long_names("model")),
    "a long name of the optimizer": _saved(_long_names("optimizer", "state")),
    "a text as paths": _saved(a_text_as_paths),
    "one shape of many": _saved(one_shape_of_many),
    "one offset of many": _saved(one_offset_of_many),
    "one list of parts": _saved(one_list_of_parts),
    "one part of many": _saved(one_part_of_many),
    "strips": _saved(strips),
    "parts on a grid": _saved(parts_on_a_grid),
    "long sizes": _saved(long_sizes),
    "many keys": _saved(many_keys),
    "a long name in a param group": _params,
    **{f"{p.__name__.replace('_', ' ')} in .metadata": _as_metadata(p) for p in PICKLES},
    **{
        f"{p.__name__.replace('_', ' ')} in extra": (
            lambda folder, size, p=p: with_extra(folder, p(size))
        )
        for p in PICKLES
    },
    "a deep index": a_deep_index,
    "a wide index": a_wide_index,
    "a deep header": a_deep_header,
    "a wide header": a_wide_header,
    "a deep text in a header": a_deep_text_in_a_header,
    "deep checksums": deep_checksums,
}

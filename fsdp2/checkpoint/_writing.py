"""The files of a sharded checkpoint: a part from each rank, and the metadata over all of them.

Owns the form of a part, of a rank's *report* of what it wrote, and how the first rank makes of all
reports the metadata of ``torch.distributed.checkpoint``, with checksums behind it (see ``_saved``).
It must not know models, nor who waits for whom.

[Note: reports]
A part is one value after another, each as ``torch.save`` writes it, so how many bytes it takes is
known when it is written. For each value of what all ranks have, in the order that all know (see
``_contents``), the report has its length and its CRC-32: twelve bytes, whatever it is called. What
only some ranks have is described in full, in JSON. A report takes its name when it is whole, and
ends with a sum of itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
import uuid
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from fsdp2._core.base.errors import StateError
from fsdp2._core.transfer.chunk_plan import Region
from fsdp2.checkpoint._checksums import tail_of
from fsdp2.checkpoint._contents import Content, Contents, Piece
from fsdp2.checkpoint._saved import METADATA, SUMMED

REPORT = ".told-"
"""What the names of reports begin with; the number of the rank follows."""

RANK = ".rank-"
"""What the names of the files begin with that ranks hold locked as long as they write."""

ROW = struct.Struct("<QI")
HEAD = struct.Struct("<II")
SUM = struct.Struct("<I")
WRITE_NBYTES = 1 << 20
"""Bytes of a write: after each of them progress is told, and other threads of Python may run."""


def part_name(number: int) -> str:
    """Return the name of a rank's file, as ``torch.distributed.checkpoint`` calls it."""
    return f"__{number}_0.distcp"


# What each rank does.


@dataclass
class Progress:
    """How much of a rank's part is written, in bytes of its values."""

    written_nbytes: int = 0
    nbytes: int = 0


def write_part(folder: Path, contents: Contents, pieces: Sequence[Piece], told: Progress) -> None:
    """Write this rank's part, and its report.

    Raises:
        OSError: with the name of the file.
    """
    rows: list[tuple[int, int]] = []
    path = folder / part_name(contents.number)
    if pieces:
        with naming(path) as said, path.open("wb") as file:
            stream = _SummedStream(file, said)
            for piece in pieces:
                stream.begin()
                if isinstance(piece.value, bytes):
                    stream.write(piece.value)
                else:
                    torch.save(_alone(piece.value), stream)  # type: ignore[arg-type]  # it writes
                rows.append((stream.length, stream.sum))
                told.written_nbytes += piece.nbytes
            file.flush()
            os.fsync(file.fileno())
    told_rows = [*zip(pieces, rows, strict=True)]
    common = [row for piece, row in told_rows if piece.is_common]
    rest = [
        {**_description(piece), "length": length, "sum": found}
        for piece, (length, found) in told_rows
        if not piece.is_common
    ]
    body = json.dumps(rest, separators=(",", ":")).encode()
    data = HEAD.pack(len(common), len(body)) + b"".join(ROW.pack(*row) for row in common) + body
    report = folder / f"{REPORT}{contents.number}"
    unnamed = report.with_name(f"{report.name}.new")
    with naming(unnamed):
        unnamed.write_bytes(data + SUM.pack(zlib.crc32(data)))
        os.replace(unnamed, report)


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU with no more memory than its own, which ``torch.save`` writes."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes:
        return tensor.clone()
    return tensor


def _description(piece: Piece) -> dict[str, Any]:
    """Return what a report says of a value that the first rank may not know."""
    content = piece.content
    told: dict[str, Any] = {"path": list(content.path)}
    if piece.region is not None:
        told |= {"shape": content.shape, "dtype": str(content.value.dtype).removeprefix("torch.")}
        told |= {"starts": piece.region.starts, "sizes": piece.region.sizes}
    return told


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[list[OSError]]:
    """Around writes to a file: raise what the system says, with the name of the file.

    torch's archives raise an error of their own over it, about a place where they are not. What is
    put into the list counts as what the system said.
    """
    told: list[OSError] = []
    try:
        yield told
    except Exception as error:
        first = told[0] if told else error
        if isinstance(first, OSError) and first.errno is not None and first.filename is None:
            raise OSError(first.errno, first.strerror, os.fspath(path)) from error
        raise


class _SummedStream:
    """A file to write to, which sums and counts what is written since it was asked to begin."""

    def __init__(self, file: IO[bytes], said: list[OSError]) -> None:
        self._file = file
        self._said = said
        self.length = self.sum = 0

    def begin(self) -> None:
        self.length = self.sum = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), WRITE_NBYTES):
            part = view[start : start + WRITE_NBYTES]
            self.sum = zlib.crc32(part, self.sum)
            try:
                self._file.write(part)
            except OSError as error:
                self._said.append(error)
                raise
        self.length += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: the file is flushed once, when all values are in it."""


# What the first rank does when all have.


@dataclass
class _Listed:
    """Where one value of the metadata lies: for each of its blocks a file, a place, a sum."""

    path: tuple[str | int, ...]
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    parts: dict[tuple[int, ...] | None, tuple[Region | None, str, int, int, int]] = field(
        default_factory=dict
    )


def write_metadata(
    folder: Path,
    ranks: int,
    common: Iterable[tuple[Content, Region | None, int]] = (),
    *,
    save_id: str = "",
) -> dict[str, int]:
    """Write the metadata of what all ranks reported; return the sizes of their files.

    ``common``: what reports do not describe, with the rank that wrote each block, in order.

    Raises:
        StateError: a report is missing or damaged, or not of the same contents.
        OSError: with the name of the file.
    """
    reports = [_Report(folder, number) for number in range(ranks)]
    listed: dict[str, _Listed] = {}

    def add(content_path: Any, shape: Any, dtype: Any, region: Region | None, row: _Row) -> None:
        key = ".".join(map(str, content_path))
        entry = listed.setdefault(key, _Listed(tuple(content_path), shape, dtype))
        start = None if region is None else region.starts
        if (entry.shape, entry.dtype) == (shape, dtype):  # else another value of this name counts
            entry.parts.setdefault(start, (region, *row))

    for content, region, number in common:
        row = reports[number].next_row()
        is_object = region is None
        dtype = None if is_object else content.value.dtype
        add(content.path, None if is_object else content.shape, dtype, region, row)
    for report in reports:
        for told, row in report.rest():
            region = None
            if "shape" in told:
                region = Region(tuple(told["starts"]), tuple(told["sizes"]))
            shape = None if region is None else tuple(told["shape"])
            dtype = None if region is None else getattr(torch, told["dtype"])
            add(told["path"], shape, dtype, region, row)
    content_of_file = _pickled(listed, save_id or str(uuid.uuid4()))
    told_sums = {report.name: report.told() for report in reports if report.nbytes}
    path = folder / METADATA
    with naming(path), path.open("wb") as file:
        file.write(content_of_file)
        file.write(tail_of(content_of_file, told_sums))
        file.flush()
        os.fsync(file.fileno())
    return {report.name: report.nbytes for report in reports if report.nbytes}


_Row = tuple[str, int, int, int]
"""A file, a place in it, how many bytes are there, and their sum."""


class _Report:
    """What one rank said that it wrote, value after value."""

    def __init__(self, folder: Path, number: int) -> None:
        self.name = part_name(number)
        self.nbytes = 0
        self._sums: list[list[int]] = []
        path = folder / f"{REPORT}{number}"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        body = data[: -SUM.size]
        if len(data) < HEAD.size + SUM.size or SUM.pack(zlib.crc32(body)) != data[-SUM.size :]:
            raise StateError(
                "FS613",
                f"save: {path}, which says what a rank wrote, is missing or damaged where the "
                "first rank looks. All ranks must see one file system. The checkpoint before, if "
                "there is one, is as it was.",
            )
        count, _ = HEAD.unpack_from(body)
        end = HEAD.size + count * ROW.size
        self._rows = ROW.iter_unpack(body[HEAD.size : end])
        self._rest: list[dict[str, Any]] = json.loads(body[end:])

    def next_row(self) -> _Row:
        """Return where the next value of what all have lies."""
        return self._placed(*next(self._rows))

    def rest(self) -> Iterator[tuple[dict[str, Any], _Row]]:
        """Yield what only some ranks have. It lies behind what all have."""
        assert next(self._rows, None) is None, "ranks did not divide the same contents"
        for told in self._rest:
            yield told, self._placed(told["length"], told["sum"])

    def _placed(self, length: int, found: int) -> _Row:
        place, self.nbytes = self.nbytes, self.nbytes + length
        self._sums.append([place, length, found])
        return self.name, place, length, found

    def told(self) -> dict[str, Any]:
        return {"size": self.nbytes, "sums": self._sums}


def _pickled(listed: dict[str, _Listed], save_id: str) -> bytes:
    """Return the metadata as ``torch.distributed.checkpoint`` pickles it."""
    # here, because it takes long to import, and only the first rank needs it
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    from fsdp2._core.base.torch_saves import storage_info

    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for key, entry in listed.items():
        chunks: list[Any] = []
        for start, (region, name, place, length, _) in entry.parts.items():
            index = MetadataIndex(key)
            if region is not None:
                index = MetadataIndex(key, start, len(chunks))
                chunks.append(
                    ChunkStorageMetadata(torch.Size(region.starts), torch.Size(region.sizes))
                )
            stored[index] = storage_info(name, place, length)
        if entry.shape is None or entry.dtype is None:
            described[key] = BytesStorageMetadata()
        else:
            properties, size = TensorProperties(entry.dtype), torch.Size(entry.shape)
            described[key] = TensorStorageMetadata(properties, size, chunks)
    paths = {key: entry.path for key, entry in listed.items()}
    meta = StorageMeta(save_id=f"{SUMMED}{save_id}")
    return pickle.dumps(
        Metadata(described, planner_data=paths, storage_data=stored, storage_meta=meta)
    )

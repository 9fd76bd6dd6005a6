"""The files of a sharded checkpoint: one data file per rank, and one metadata file.

The format is that of ``torch.distributed.checkpoint``, with checksums after the metadata. Each rank
writes its data file and a *report* about it; the first rank creates the metadata from all reports.
A read loads the saved blocks that it needs, one at a time. Independent of models.

[Note: reports]
A data file is a sequence of values, each written by ``torch.save``. For each common value, in the
order of the list that all ranks have (see ``_contents``), the report contains the value's length
and CRC-32, in twelve bytes. Values that only some ranks have are described completely, in JSON. A
report ends with its own checksum, and is renamed to its final name once it is complete.

[Note: placeholders]
The metadata is a pickle of instances of a few small torch classes. Each instance is unpickled as a
placeholder, which has the pickled data but no behaviour; ``read`` validates every value before use.
A pickle can use only names from ``_names``, and torch's checkpoint module is not imported.

[Note: sums]
The pickle is followed by the checksums of all values in all files, and by a checksum of the
metadata file itself (see ``_checksums``). Other readers ignore both. A metadata file that declares
checksums but lacks them was truncated.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import math
import os
import pickle
import struct
import uuid
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from fsdp2._core.base.errors import ConfigError, FSDPError, StateError, UnsupportedError
from fsdp2._core.base.fitting import require_representable
from fsdp2._core.base.names import printable
from fsdp2._core.base.regular_files import is_hollow, open_regular, read_regular
from fsdp2._core.transfer.chunk_plan import Region, overlap
from fsdp2.checkpoint._checksums import DamagedError, damaged, said, split, sum_of_part, tail_of
from fsdp2.checkpoint._contents import Content, Contents, Piece, problem_of
from fsdp2.checkpoint._pickle_machine import (
    DTYPES,
    Placeholder,
    RefusedError,
    not_plain,
    plain_names,
    unpickle,
)
from fsdp2.checkpoint._place import METADATA, file_in, plain_name, stamp_of
from fsdp2.checkpoint._torch_files import DEPTH, View, read_torch_file, shared

SUMMED = "fsdp2-sums-"  # prefix of the save id in metadata with checksums
DIMS = 64  # maximum number of dims of a tensor, as in torch's operations
CUT_DIMS = 5  # maximum number of dims that are split: a part has 2 ** dims corners

# classes in pickled metadata
CLASSES = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
    "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """The location of an object, or of a block of a tensor, in a file."""

    region: Region | None
    file: str
    offset: int
    length: int
    sum: int | None  # None: not recorded


@dataclass(frozen=True)
class Entry:
    """A saved value: its flat key, its path in the saved dict, and the locations of its parts."""

    key: str
    path: tuple[Any, ...]
    shape: tuple[int, ...] | None  # None: not a tensor
    dtype: torch.dtype | None
    parts: tuple[Part, ...]

    def is_under(self, key: str) -> bool:
        return len(self.path) > 1 and self.path[0] == key


@dataclass(frozen=True)
class Saved:
    """The metadata of a checkpoint."""

    folder: Path
    entries: tuple[Entry, ...]
    sizes: dict[str, int] | None  # size of each file; None if there are no checksums
    digest: str  # hash of the metadata
    stamp: tuple[int, ...] | None  # see ``stamp_of``


def _names() -> dict[tuple[str, str], Any]:
    def nothing(*args: Any) -> None:
        """Replace an unused object by None: a layout, a memory format, the save's path."""

    where, plain = "torch.distributed.checkpoint", plain_names()
    # torch still writes TensorProperties under this old module name
    older = "torch.distributed._shard.sharded_tensor.metadata"
    classes = [(f"{where}.metadata", name) for name in CLASSES]
    classes.append((f"{where}.filesystem", "_StorageInfo"))
    classes += [(older, name) for name in ("TensorProperties", "MEM_FORMAT_ENCODING")]
    paths = ("Path", "PurePath", "PosixPath", "PurePosixPath", "WindowsPath")
    return {
        **{(module, name): type(name, (Placeholder,), {}) for module, name in classes},
        **{("torch", name): dtype for name, dtype in DTYPES.items()},
        ("torch", "Size"): plain["torch", "Size"],
        ("torch.serialization", "_get_layout"): nothing,
        ("builtins", "getattr"): nothing,  # Python 3.11 pickles an enum member as a getattr call
        ("collections", "OrderedDict"): plain["collections", "OrderedDict"],
        **{(m, name): nothing for m in ("pathlib", "pathlib._local") for name in paths},
    }


def read(folder: Path, *, verify: bool, trust: bool) -> Saved:
    """Read a folder's metadata. FileNotFoundError: a concurrent save replaced the folder."""
    path = file_in(folder, METADATA, "load", trust=trust)
    stamp = stamp_of(path)
    try:
        data = read_regular(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise damaged("load", f"{path} cannot be read: {error.strerror}.") from error
    try:
        content, told = split(data, verify=verify)
        loaded = unpickle(content, _names(), trust=trust)
        if type(loaded).__name__ != "Metadata":
            raise DamagedError(f"it contains a {type(loaded).__name__}")
        save_id = getattr(loaded.__dict__.get("storage_meta"), "save_id", None)
        if told is None and str(save_id).startswith(SUMMED):
            raise DamagedError("it is truncated")
        entries = _Metadata(loaded, told, str(folder / METADATA)).entries()
        sizes = None if told is None else {n: int(f["size"]) for n, f in told.items()}
    except RefusedError as error:
        raise ConfigError(
            "FS616",
            f"load: {folder / METADATA} needs {error}, which checkpoint metadata never uses. "
            "Loading it could run arbitrary code. Pass trust=True if you trust its author.",
        ) from error
    except (ConfigError, UnsupportedError, MemoryError):
        raise
    except Exception as error:  # unpickling damaged data may raise any exception
        raise damaged("load", f"{folder / METADATA} is damaged: {said(error)}.") from error
    # use SHA-256: a CRC is constant for data that ends with its own CRC
    return Saved(folder, tuple(entries), sizes, hashlib.sha256(data).hexdigest(), stamp)


class _Metadata:
    """Converts unpickled metadata, which is untrusted, to entries."""

    def __init__(self, metadata: Any, told: Any, where: str) -> None:
        self._metadata = metadata
        self._where = where
        self._left = len(metadata.storage_data)  # number of parts that may still be listed
        self._infos: dict[tuple[str, tuple[int, ...] | None], Any] = {}
        for index, info in metadata.storage_data.items():
            offset = getattr(index, "offset", None)
            self._infos[index.fqn, None if offset is None else _ints(offset)] = info
        self._sums: dict[tuple[str, int], tuple[int, int]] | None = told and {
            (name, offset): (length, found)
            for name, file in told.items()
            for offset, length, found in file["sums"]
        }

    def entries(self) -> list[Entry]:
        paths = self._metadata.planner_data
        paths = paths if isinstance(paths, dict) else {}
        found = []
        for key, meta in self._metadata.state_dict_metadata.items():
            path = paths.get(key, (key,))
            path = tuple(path) if type(path) in (tuple, list) and len(path) <= DEPTH else path
            if problem := problem_of(path) if isinstance(key, str) else "has no name":
                raise DamagedError(f"the path of {printable(key)} {problem}")
            if type(meta).__name__ == "BytesStorageMetadata":
                found.append(Entry(key, path, None, None, (self._part(key, None, None),)))
            else:
                found.append(self._tensor(key, path, meta))
        _require_tree(found)
        _require_apart(found)
        return found

    def _tensor(self, key: str, path: tuple[Any, ...], meta: Any) -> Entry:
        dtype = meta.properties.args[0]
        if not isinstance(dtype, torch.dtype):
            raise DamagedError(f"{key} has no dtype")
        shape = _ints(meta.size)
        self._left -= len(meta.chunks)
        if self._left < 0:
            raise DamagedError(f"it lists more parts of {printable(key)} than it has locations")
        parts = []
        for chunk in meta.chunks:
            region = Region(_ints(chunk.offsets), _ints(chunk.sizes))
            if len(region.starts) != len(shape) or len(region.sizes) != len(shape):
                raise DamagedError(f"a part of {key} has a different number of dims")
            ends = [s + n for s, n in zip(region.starts, region.sizes, strict=True)]
            if any(end > n for end, n in zip(ends, shape, strict=True)):
                raise DamagedError(f"a part of {key} extends beyond the tensor")
            if region.numel:
                part = self._part(key, region.starts, region)
                if part.length < region.numel * dtype.itemsize:  # torch does not compress
                    raise DamagedError(f"a part of {key} has fewer bytes than its elements need")
                parts.append(part)
        return Entry(key, path, shape, dtype, tuple(parts))

    def _part(
        self,
        key: str,
        offset: tuple[int, ...] | None,
        region: Region | None,
    ) -> Part:
        info = self._infos.get((key, offset))
        if info is None:
            raise DamagedError(f"it has no location for {key}")
        if getattr(info, "transform_descriptors", None):
            raise UnsupportedError(
                "FS619",
                f"load: {key} was written with the transforms {info.transform_descriptors}. Load "
                "it with torch.distributed.checkpoint, and save it again without them.",
            )
        name = plain_name(info.relative_path, self._where)
        start, length = _ints((info.offset, info.length))
        found = None
        if self._sums is not None:
            noted, found = self._sums[name, start]
            if noted != length:
                raise DamagedError(f"it has two lengths for {key}")
        return Part(region, name, start, length, found)


def _require_tree(entries: list[Entry]) -> None:
    """Raise if two values have equal paths, or one value's path is a prefix of another's."""
    paths = {entry.path for entry in entries}
    lengths = sorted({len(path) for path in paths})
    inside = (path[:end] in paths for path in paths for end in lengths if end < len(path))
    if len(paths) != len(entries) or any(inside):
        raise DamagedError("it has two values at one path of the saved dict")


def _require_apart(entries: list[Entry]) -> None:
    """Raise if values share bytes, which would let a small file declare any number of values."""
    parts = ((part.file, part.offset, part.length) for entry in entries for part in entry.parts)
    for file, offset, _ in shared(parts):
        raise DamagedError(f"two values share byte {offset} of {file}")


def _ints(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or len(values) > DIMS:
        found = f"{len(values)} sizes" if isinstance(values, tuple | list) else "another type"
        raise DamagedError(f"it has {found} where up to {DIMS} sizes are expected")
    if not all(type(v) is int and 0 <= v < 1 << 63 for v in values):
        raise DamagedError("one of its sizes is not an int from 0 to 2**63 - 1")
    return tuple(values)


class Reader(contextlib.ExitStack):
    """Reads a checkpoint's values; a context manager. With ``trust``, reading may execute code."""

    def __init__(self, saved: Saved, *, verify: bool, trust: bool) -> None:
        super().__init__()
        self._saved = saved
        self.entries = saved.entries
        self._verify = verify
        self.trust = trust
        self._files: dict[str, IO[bytes]] = {}

    def whole(self, entry: Entry) -> Any:
        if entry.shape is None:
            (part,) = entry.parts
            return self._load(entry, part)
        region = Region((0,) * len(entry.shape), entry.shape)
        self._require_covered(entry, region)  # the shape is untrusted until parts cover it
        made = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self.fill(entry, region, made)
        return made

    def fill(self, entry: Entry, region: Region, out: Tensor) -> None:
        """Copy a region of a saved tensor into ``out``, which has the region's shape."""
        self._require_covered(entry, region)
        for part in entry.parts:
            assert part.region is not None
            both = overlap(part.region, region)
            if both is None:
                continue
            found = self._load(entry, part)
            if (
                not isinstance(found, Tensor)
                or found.dtype is not entry.dtype
                or tuple(found.shape) != part.region.sizes
            ):
                raise self._damaged_part(entry, part, "it has an unexpected shape or dtype")
            source = found[both.inside(part.region)]
            require_representable("load", entry.key, source, out.dtype)
            with torch.no_grad():
                out[both.inside(region)].copy_(source)

    def _require_covered(self, entry: Entry, region: Region) -> None:
        """Raise StateError unless each element of a region is in exactly one part."""
        inside = [overlap(part.region, region) for part in entry.parts]
        found = [both for both in inside if both is not None]
        covered, key = sum(both.numel for both in found), printable(entry.key)
        cut = [d for d, size in enumerate(region.sizes) if any(b.sizes[d] < size for b in found)]
        if len(cut) > CUT_DIMS:
            problem = f"it splits {key} along {len(cut)} dims, expected at most {CUT_DIMS}"
        elif covered != region.numel:
            problem = f"it covers {covered} of {region.numel} elements of a part of {key}"
        elif covered and corners(found, cut) != corners([region], cut):
            problem = f"two parts of {key} cover the same elements"
        else:
            return
        raise self.damaged(f"{self._saved.folder / METADATA} is damaged: {problem}.")

    def _load(self, entry: Entry, part: Part) -> Any:
        is_summed = part.sum is not None and self._verify
        is_intact = False
        try:
            file = self._open(part.file)
            told = os.fstat(file.fileno())
            if part.offset + part.length > told.st_size:
                raise DamagedError("it is truncated")
            if part.region is None and not self.trust and is_hollow(told):
                raise DamagedError("it is mostly holes")
            if is_summed and sum_of_part(file, part.offset, part.length) != part.sum:
                raise DamagedError("its checksum does not match")
            if not self.trust:
                verify = self._verify and not is_summed
                return read_torch_file(file, part.offset, part.length, verify=verify)
            is_intact = is_summed
            view = io.BufferedReader(View(file, part.offset, part.length))
            return torch.load(view, map_location="cpu", weights_only=False)
        except RefusedError as error:
            raise not_plain(printable(entry.key), error) from error
        except (ConfigError, MemoryError):
            raise
        except Exception as error:  # reading a damaged file may raise any exception
            if is_intact:  # code in the file raised the error
                raise
            raise self._damaged_part(entry, part, said(error)) from error

    def _open(self, name: str) -> IO[bytes]:
        if name not in self._files:
            saved = self._saved
            path = file_in(saved.folder, name, str(saved.folder / METADATA), trust=self.trust)
            file = self.enter_context(open_regular(path))
            size = os.fstat(file.fileno()).st_size
            if saved.sizes is not None and self._verify and size != saved.sizes[name]:
                raise DamagedError(f"it has {size} bytes, expected {saved.sizes[name]}")
            self._files[name] = file
        return self._files[name]

    def _damaged_part(self, entry: Entry, part: Part, why: str) -> StateError:
        path = self._saved.folder / part.file
        return self.damaged(
            f"cannot read {printable(entry.key)} from {path}: {why}. The file is missing or "
            "damaged."
        )

    @contextlib.contextmanager
    def making_sense(self) -> Iterator[None]:
        """Convert errors in this context to StateError, unless ``trust`` is set."""
        try:
            yield
        except (FSDPError, MemoryError):
            raise
        except Exception as error:  # for example a number in place of a dict
            if self.trust:
                raise
            where = self._saved.folder / METADATA
            raise self.damaged(f"the contents of {where} are invalid: {said(error)}.") from error

    def damaged(self, problem: str) -> StateError:
        folder = self._saved.folder
        if stamp_of(folder / METADATA) != self._saved.stamp:
            return StateError(
                "FS626",
                f"load: another save replaced {folder} while it was being read. "
                f"Call load again; nothing was changed. (Found: {problem})",
            )
        return damaged("load", problem)


def corners(regions: Iterable[Region], dims: Sequence[int]) -> Counter[tuple[int, ...]]:
    """Count the corners of regions; a corner at the end of an odd number of dims counts as -1.
    The counts are finite differences of the coverage, so equal counts mean equal coverage."""
    found: Counter[tuple[int, ...]] = Counter()
    for region in regions:
        begins, sizes = region.starts, region.sizes
        ends = (((begins[d], 1), (begins[d] + sizes[d], -1)) for d in dims)
        for corner in itertools.product(*ends):
            found[tuple(at for at, _ in corner)] += math.prod(sign for _, sign in corner)
    return found


# Writing files.

REPORT = ".told-"  # file name prefix of reports; the rank's number follows
RANK = ".rank-"  # file name prefix of the files that ranks keep locked while they write
ROW = struct.Struct("<QI")
HEAD = struct.Struct("<II")
SUM = struct.Struct("<I")
WRITE_NBYTES = 1 << 20  # maximum bytes per write, so that other threads can run between writes


def part_name(number: int) -> str:
    return f"__{number}_0.distcp"


@dataclass
class Progress:
    written_nbytes: int = 0
    nbytes: int = 0


def write_part(
    folder: Path,
    contents: Contents,
    pieces: Sequence[Piece],
    told: Progress,
) -> None:
    """Write this rank's data file and report. An OSError contains the file's name."""
    common: list[bytes] = []
    rest: list[dict[str, Any]] = []
    path = folder / part_name(contents.number)
    if pieces:
        with naming(path) as said, path.open("wb") as file:
            stream = _SummedStream(file, said)
            for piece in pieces:
                stream.begin()
                if isinstance(piece.value, bytes):
                    stream.write(piece.value)
                else:
                    torch.save(_alone(piece.value), stream)  # type: ignore[arg-type]  # needs only write()
                if piece.is_common:
                    common.append(ROW.pack(stream.length, stream.sum))
                else:
                    sizes = {"length": stream.length, "sum": stream.sum}
                    rest.append(_description(piece) | sizes)
                told.written_nbytes += piece.nbytes
            file.flush()
            os.fsync(file.fileno())
    body = json.dumps(rest, separators=(",", ":")).encode()
    data = HEAD.pack(len(common), len(body)) + b"".join(common) + body
    report = folder / f"{REPORT}{contents.number}"
    unnamed = report.with_name(f"{report.name}.new")
    with naming(unnamed):
        unnamed.write_bytes(data + SUM.pack(zlib.crc32(data)))
        os.replace(unnamed, report)


def _alone(tensor: Tensor) -> Tensor:
    """Return a CPU tensor with no excess storage, because ``torch.save`` writes entire storages."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.layout is torch.strided and tensor.untyped_storage().nbytes() != tensor.nbytes:
        return tensor.clone()
    return tensor


def _description(piece: Piece) -> dict[str, Any]:
    """Describe a value completely for the report: the first rank may not have the value."""
    content = piece.content
    told: dict[str, Any] = {"path": list(content.path)}
    if piece.region is not None:
        told |= {"shape": content.shape, "dtype": str(content.value.dtype).removeprefix("torch.")}
        told |= {"starts": piece.region.starts, "sizes": piece.region.sizes}
    return told


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[list[OSError]]:
    """Add the file's name to OSErrors. If the yielded list contains errors, raise the first of them
    in place of the caught error, because torch's zip writer raises a misleading error."""
    told: list[OSError] = []
    try:
        yield told
    except Exception as error:
        first = told[0] if told else error
        if isinstance(first, OSError) and first.errno is not None and first.filename is None:
            raise OSError(first.errno, first.strerror, os.fspath(path)) from error
        raise


class _SummedStream:
    """A writable file that computes the length and checksum of the data since ``begin``."""

    def __init__(self, file: IO[bytes], said: list[OSError]) -> None:
        self._file = file
        self._said = said

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
        """No-op: the file is flushed once, after all values."""


def write_metadata(
    folder: Path,
    ranks: int,
    common: Iterable[tuple[Content, Region | None, int]] = (),
    *,
    save_id: str = "",
) -> dict[str, int]:
    """On the first rank, write the metadata from all reports, and return the data files' sizes.
    ``common`` lists the blocks that reports do not describe, in order, each with its writer."""
    reports = [_Report(folder, number) for number in range(ranks)]
    found: dict[str, tuple[Entry, dict[Any, Part]]] = {}

    def add(entry: Entry) -> None:
        (part,) = entry.parts
        first, parts = found.setdefault(entry.key, (entry, {}))
        if (first.shape, first.dtype) == (entry.shape, entry.dtype):  # ignore a conflicting value
            parts.setdefault(part.region and part.region.starts, part)

    for content, region, number in common:
        shape, dtype = (None, None) if region is None else (content.shape, content.value.dtype)
        part = reports[number].next_part(region)
        add(Entry(content.key, content.path, shape, dtype, (part,)))
    for report in reports:
        for entry in report.rest():
            add(entry)
    entries = [replace(entry, parts=tuple(parts.values())) for entry, parts in found.values()]
    content_of_file = _pickled(entries, save_id or str(uuid.uuid4()))
    written = [report for report in reports if report.nbytes]
    told_sums = {each.name: {"size": each.nbytes, "sums": each.sums} for each in written}
    path = folder / METADATA
    with naming(path), path.open("wb") as file:
        file.write(content_of_file)
        file.write(tail_of(content_of_file, told_sums))
        file.flush()
        os.fsync(file.fileno())
    return {report.name: report.nbytes for report in written}


class _Report:
    def __init__(self, folder: Path, number: int) -> None:
        self.name = part_name(number)
        self.nbytes = 0
        self.sums: list[list[int]] = []
        path = folder / f"{REPORT}{number}"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        body = data[: -SUM.size]
        if len(data) < HEAD.size + SUM.size or SUM.pack(zlib.crc32(body)) != data[-SUM.size :]:
            raise StateError(
                "FS613",
                f"save: {path}, a rank's report about its data file, is missing or damaged on the "
                "first rank. Save to a file system that all ranks share. The previous checkpoint, "
                "if any, is unchanged.",
            )
        count, _ = HEAD.unpack_from(body)
        end = HEAD.size + count * ROW.size
        self._rows = ROW.iter_unpack(body[HEAD.size : end])
        self._rest: list[dict[str, Any]] = json.loads(body[end:])

    def next_part(self, region: Region | None) -> Part:
        return self._placed(region, *next(self._rows))

    def rest(self) -> Iterator[Entry]:
        """Yield the entries that only some ranks have. Read all common entries first."""
        assert next(self._rows, None) is None, "ranks have different common contents"
        for told in self._rest:
            region = shape = dtype = None
            if "shape" in told:
                region = Region(tuple(told["starts"]), tuple(told["sizes"]))
                shape, dtype = tuple(told["shape"]), getattr(torch, told["dtype"])
            path = tuple(told["path"])
            part = self._placed(region, told["length"], told["sum"])
            yield Entry(".".join(map(str, path)), path, shape, dtype, (part,))

    def _placed(self, region: Region | None, length: int, found: int) -> Part:
        place, self.nbytes = self.nbytes, self.nbytes + length
        self.sums.append([place, length, found])
        return Part(region, self.name, place, length, found)


def _pickled(entries: Sequence[Entry], save_id: str) -> bytes:
    # a slow import, needed on the first rank only
    from torch.distributed.checkpoint import metadata as dcp

    from fsdp2._core.base.torch_tensors import storage_info

    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    for entry in entries:
        chunks: list[Any] = []
        for part in entry.parts:
            index = dcp.MetadataIndex(entry.key)
            if part.region is not None:
                starts, sizes = torch.Size(part.region.starts), torch.Size(part.region.sizes)
                index = dcp.MetadataIndex(entry.key, part.region.starts, len(chunks))
                chunks.append(dcp.ChunkStorageMetadata(starts, sizes))
            stored[index] = storage_info(part.file, part.offset, part.length)
        described[entry.key] = dcp.BytesStorageMetadata()
        if entry.shape is not None and entry.dtype is not None:
            properties, size = dcp.TensorProperties(entry.dtype), torch.Size(entry.shape)
            described[entry.key] = dcp.TensorStorageMetadata(properties, size, chunks)
    paths = {entry.key: entry.path for entry in entries}
    meta = dcp.StorageMeta(save_id=f"{SUMMED}{save_id}")
    return pickle.dumps(
        dcp.Metadata(described, planner_data=paths, storage_data=stored, storage_meta=meta)
    )

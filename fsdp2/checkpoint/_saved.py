"""What a sharded checkpoint holds and where: the ``.metadata`` of ``torch.distributed.checkpoint``.

Owns the reading of that file without running anything in it, the check that it makes sense, and the
checksums that ours carries. It must not know models, nor how values are read.

[Note: stand-ins]
The file is a pickle of a few small classes of torch. Each of them is read into a stand-in of ours,
which holds what the pickle says and has no behaviour; ``read`` looks at every value of it before
anybody uses one. So a name that is not in the table below cannot be reached, and torch's module of
checkpoints need not be imported to read one.

[Note: sums]
Behind the pickle, where no other reader looks, stand the checksums of every value of every file,
and one of all this: see ``_checksums``. A file that says it has them and has not was cut.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp2._core.base.errors import ConfigError, StateError, UnsupportedError
from fsdp2._core.base.names import printable
from fsdp2._core.base.regular_files import read_regular
from fsdp2._core.transfer.chunk_plan import Region
from fsdp2.checkpoint._archive import shared
from fsdp2.checkpoint._checksums import DamagedError, said, split
from fsdp2.checkpoint._pickle_machine import RefusedError, StandIn
from fsdp2.checkpoint._publish import Stamp, file_in, plain_name
from fsdp2.checkpoint._torch_files import DEPTH
from fsdp2.checkpoint._unpickling import DTYPES, plain_names, unpickle

METADATA = ".metadata"
SUMMED = "fsdp2-sums-"
"""What the id of a save begins with if its metadata has checksums."""


CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
"""What a pickle of metadata is made of."""

DIMS = 64
"""Most dims of a tensor: what torch's operations take."""

NAME_NCHARS = 4096
"""Most characters of a key in a path: each entry may repeat it in two bytes."""


@dataclass(frozen=True)
class Part:
    """A value, or a block of a tensor, in a file. ``sum`` is None where nobody noted one."""

    region: Region | None
    file: str
    offset: int
    length: int
    sum: int | None


@dataclass(frozen=True)
class Entry:
    """One value of a checkpoint: its flat key, and its path in the dict that was saved.

    ``shape`` and ``dtype`` are None for a value that is no tensor.
    """

    key: str
    path: tuple[Any, ...]
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    parts: tuple[Part, ...]

    def is_under(self, key: str) -> bool:
        return len(self.path) > 1 and self.path[0] == key


@dataclass(frozen=True)
class Saved:
    """A checkpoint: its entries, sizes of its files (with checksums only), and a sum of it all.

    ``stamp``: of the file that said so.
    """

    folder: Path
    entries: tuple[Entry, ...]
    sizes: dict[str, int] | None
    digest: str
    stamp: Stamp


def _names() -> dict[tuple[str, str], Any]:
    """Return the table of one unpickling. See [Note: stand-ins]."""

    def nothing(*args: Any) -> None:
        """Stand for what only describes: layouts, memory formats, the path it was saved to."""

    where = "torch.distributed.checkpoint"
    found = {(f"{where}.metadata", name): type(name, (StandIn,), {}) for name in CLASSES}
    found[f"{where}.filesystem", "_StorageInfo"] = type("_StorageInfo", (StandIn,), {})
    # A name in files, which nothing imports: torch writes this older one for tensors' properties.
    older = "torch.distributed._shard.sharded_tensor.metadata"
    for name in ("TensorProperties", "MEM_FORMAT_ENCODING"):
        found[older, name] = type(name, (StandIn,), {})
    plain = plain_names()
    functions: dict[tuple[str, str], Any] = {
        **{("torch", name): dtype for name, dtype in DTYPES.items()},
        ("torch", "Size"): plain["torch", "Size"],
        ("torch.serialization", "_get_layout"): nothing,
        ("builtins", "getattr"): nothing,  # Python 3.11 looks members of enums up so
        ("collections", "OrderedDict"): plain["collections", "OrderedDict"],
    }
    for module in ("pathlib", "pathlib._local"):
        for name in ("Path", "PurePath", "PosixPath", "PurePosixPath", "WindowsPath"):
            functions[module, name] = nothing
    return {**found, **functions}


def read(folder: Path, *, verify: bool, trust: bool) -> Saved:
    """Read what a folder holds.

    Raises:
        FileNotFoundError: another save has replaced the folder meanwhile.
        StateError: the metadata is damaged.
        ConfigError: it names what only trusted files may; it names files outside of the folder.
        UnsupportedError: values were written through an extension of torch's (compression).
    """
    path = file_in(folder, METADATA, "load", trust=trust)
    stamp = Stamp.of(path)
    try:
        data = read_regular(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StateError(
            "FS618",
            f"load: {path} cannot be read: {error.strerror}. Take another checkpoint; nothing was "
            "changed.",
        ) from error
    try:
        content, told = split(data, verify=verify)
        loaded = unpickle(content, _names(), trust=trust)
        if type(loaded).__name__ != "Metadata":
            raise DamagedError(f"it holds a {type(loaded).__name__}")
        save_id = getattr(loaded.__dict__.get("storage_meta"), "save_id", None)
        if told is None and str(save_id).startswith(SUMMED):
            raise DamagedError("it ends too early")
        entries = _Reader(loaded, told, str(folder / METADATA)).entries()
        sizes = None if told is None else {n: int(f["size"]) for n, f in told.items()}
    except RefusedError as error:
        raise ConfigError(
            "FS616",
            f"load: {folder / METADATA} needs {error}, which metadata of a checkpoint needs not: "
            "loading it could run any code. Pass trust=True if you know who wrote it.",
        ) from error
    except (ConfigError, UnsupportedError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise StateError(
            "FS618",
            f"load: {folder / METADATA} is damaged: {said(error)}. Take another checkpoint; "
            "nothing was changed.",
        ) from error
    # a CRC of what ends with its own is the same for all
    return Saved(folder, tuple(entries), sizes, hashlib.sha256(data).hexdigest(), stamp)


class _Reader:
    """Makes entries of what was unpickled, and takes nothing for granted."""

    def __init__(self, metadata: Any, told: Any, where: str) -> None:
        self._metadata = metadata
        self._told = told
        self._where = where
        self._left = len(metadata.storage_data)  # places, one for each part
        self._infos: dict[tuple[str, tuple[int, ...] | None], Any] = {}
        for index, info in metadata.storage_data.items():
            offset = getattr(index, "offset", None)
            self._infos[index.fqn, None if offset is None else _ints(offset)] = info
        self._sums: dict[tuple[str, int], tuple[int, int]] = {
            (name, offset): (length, found)
            for name, file in (told or {}).items()
            for offset, length, found in file["sums"]
        }

    def entries(self) -> list[Entry]:
        paths = self._metadata.planner_data
        paths = paths if isinstance(paths, dict) else {}
        found = []
        for key, meta in self._metadata.state_dict_metadata.items():
            path = paths.get(key, (key,))
            path = tuple(path) if type(path) in (tuple, list) and len(path) <= DEPTH else path
            if problem := problem_of(path) if isinstance(key, str) else "is of no name":
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
            raise DamagedError(f"it names more parts of {printable(key)} than places")
        parts = []
        for chunk in meta.chunks:
            region = Region(_ints(chunk.offsets), _ints(chunk.sizes))
            if len(region.starts) != len(shape) or len(region.sizes) != len(shape):
                raise DamagedError(f"a part of {key} has other dims than it")
            ends = [s + n for s, n in zip(region.starts, region.sizes, strict=True)]
            if any(end > n for end, n in zip(ends, shape, strict=True)):
                raise DamagedError(f"a part of {key} lies outside of it")
            if region.numel:
                part = self._part(key, region.starts, region)
                if part.length < region.numel * dtype.itemsize:  # torch writes them as they are
                    raise DamagedError(f"a part of {key} has more elements than bytes")
                parts.append(part)
        return Entry(key, path, shape, dtype, tuple(parts))

    def _part(self, key: str, offset: tuple[int, ...] | None, region: Region | None) -> Part:
        info = self._infos.get((key, offset))
        if info is None:
            raise DamagedError(f"it does not say where {key} lies")
        if getattr(info, "transform_descriptors", None):
            raise UnsupportedError(
                "FS619",
                f"load: {key} was written through {info.transform_descriptors}. Load it with "
                "torch.distributed.checkpoint, and save it again without.",
            )
        name = plain_name(info.relative_path, self._where)
        start, length = _ints((info.offset, info.length))
        found = None
        if self._told is not None:
            noted, found = self._sums[name, start]
            if noted != length:
                raise DamagedError(f"it tells two lengths of {key}")
        return Part(region, name, start, length, found)


def problem_of(path: Any) -> str:
    """Return why a value under this path is neither saved nor loaded; nothing if it is."""
    if type(path) not in (tuple, list):
        return "is no list of keys"
    if not 0 < len(path) <= DEPTH:
        return f"has {len(path)} keys, and may have 1 to {DEPTH}"
    if not all(isinstance(k, str) or (isinstance(k, int) and k.bit_length() < 64) for k in path):
        return "has a key that is neither a text nor a number of 63 bits"
    longest = max(len(key) for key in ("", *path) if isinstance(key, str))
    if longest > NAME_NCHARS:
        return f"has a key of {longest} characters, and may have up to {NAME_NCHARS}"
    return ""


def _require_tree(entries: list[Entry]) -> None:
    """Raise unless each path ends at one value: what is inside of a value is no path's."""
    paths = {entry.path for entry in entries}
    lengths = sorted({len(path) for path in paths})
    inside = (path[:end] in paths for path in paths for end in lengths if end < len(path))
    if len(paths) != len(entries) or any(inside):
        raise DamagedError("it has two values at one place of the dict that was saved")


def _require_apart(entries: list[Entry]) -> None:
    """Raise if two values lie in the same bytes: a small file could hold any number of them."""
    parts = ((part.file, part.offset, part.length) for entry in entries for part in entry.parts)
    for file, offset, _ in shared(parts):
        raise DamagedError(f"two values lie at byte {offset} of {file}")


def _ints(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple | list) or len(values) > DIMS:
        found = f"{len(values)} sizes" if isinstance(values, tuple | list) else "something else"
        raise DamagedError(f"it has {found} where up to {DIMS} sizes must be")
    if not all(type(v) is int and 0 <= v < 1 << 63 for v in values):
        raise DamagedError("it has a size that is no number of 63 bits")
    return tuple(values)

"""Read ``torch.save`` files without executing code in them, with memory bounded by their size.

Tensors are views of storages that were read, and never extend beyond them. Accepts plain data,
tensors and parameters. Other types that ``torch.load(weights_only=True)`` accepts (quantised and
nested tensors) need ``trust``.

[Note: archives]
``torch.save`` never compresses. Before any entry is read, an archive is therefore refused unless
every entry is uncompressed, lies within the file and shares no bytes with another entry. So a small
file cannot expand into large data.
"""

from __future__ import annotations

import io
import itertools
import math
import os
import struct
import sys
import zipfile
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import IO, Any

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2.checkpoint._checksums import DamagedError, memory_of
from fsdp2.checkpoint._pickle_machine import RefusedError, plain_names, unpickle

HEADER = struct.Struct("<4s5H3I2H")
LOCAL = b"PK\x03\x04"  # magic number of the header before an entry's bytes

PICKLE = "/data.pkl"
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
DEPTH = 200
TIMES = 100  # limit on the factor by which shared parts may inflate a value's apparent size

# dtypes by storage class; for most dtypes, torch writes the name of this class
STORAGES = {
    "BFloat16Storage": torch.bfloat16, "BoolStorage": torch.bool, "ByteStorage": torch.uint8,
    "CharStorage": torch.int8, "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64, "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32, "HalfStorage": torch.float16, "IntStorage": torch.int32,
    "LongStorage": torch.int64, "ShortStorage": torch.int16,
}  # fmt: skip


class View(io.RawIOBase):
    """A file-like view of a byte range. A read allocates at most the bytes left in the range."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        super().__init__()
        self._file = file
        self._offset = offset
        self._length = length
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        self._place = max(0, start + offset)
        return self._place

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._place)
        return super().read(left if size < 0 else min(size, left)) or b""

    def readinto(self, buffer: Any) -> int:
        left = max(0, min(len(buffer), self._length - self._place))
        self._file.seek(self._offset + self._place)
        count: int = self._file.readinto(memoryview(buffer)[:left])  # type: ignore[attr-defined]  # binary files have readinto
        self._place += count
        return count


@dataclass(frozen=True)
class _Stored:
    """The position of an entry's bytes in the archive, and their checksum."""

    offset: int
    length: int
    sum: int


def _entries(file: View) -> dict[str, _Stored]:
    """Return all entries of an archive by name: see [Note: archives]."""
    found: dict[str, _Stored] = {}
    try:
        end = file.seek(0, os.SEEK_END)
        for entry in zipfile.ZipFile(file).infolist():
            if entry.flag_bits & 1:
                raise DamagedError("the directory of its archive has an unexpected entry")
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise DamagedError("an entry of its archive is compressed; torch never compresses")
            if entry.filename in found:
                raise DamagedError("two entries of its archive have the same name")
            header = file.seek(entry.header_offset)
            magic, *_, in_name, in_extra = HEADER.unpack(file.read(HEADER.size))
            begin = header + HEADER.size + in_name + in_extra
            if magic != LOCAL or begin + entry.file_size > end:
                raise DamagedError("an entry of its archive extends beyond the archive")
            found[entry.filename] = _Stored(begin, entry.file_size, entry.CRC)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error) as error:
        raise DamagedError("it is not a torch.save archive, or is truncated") from error
    if [*shared(("", entry.offset, entry.length) for entry in found.values())]:
        raise DamagedError("two entries of its archive overlap")
    return found


def shared(places: Iterable[tuple[str, int, int]]) -> Iterator[tuple[str, int, int]]:
    """Sort byte ranges (file, offset, length), and yield those that overlap the previous range."""
    for (file, offset, length), place in itertools.pairwise(sorted(places)):
        if file == place[0] and offset + length > place[1]:
            yield place


@dataclass(frozen=True)
class _StorageClass:
    dtype: torch.dtype


@dataclass(frozen=True)
class _Storage:
    content: Tensor
    dtype: torch.dtype


def read_torch_file(
    file: IO[bytes],
    offset: int,
    length: int,
    *,
    verify: bool,
) -> Any:
    """Return the value that ``torch.save`` wrote to a byte range of a file. Raises RefusedError if
    the value is not plain data and tensors, and UnpicklingError or DamagedError if the range is
    damaged. With ``verify``, the archive's own checksums are verified too."""
    return _TorchFile(View(file, offset, length), verify).read()


class _TorchFile:
    def __init__(self, file: View, verify: bool) -> None:
        self._file = file
        self._verify = verify
        self._entries = _entries(file)
        self._read: dict[str, Tensor] = {}
        self._top = ""

    def read(self) -> Any:
        tops = [name.removesuffix(PICKLE) for name in self._entries if name.endswith(PICKLE)]
        if len(tops) != 1:
            raise DamagedError(f"its archive has {len(tops)} pickles instead of one")
        self._top = tops[0]
        order = self._entries.get(f"{self._top}/byteorder")
        if order is not None and self._bytes(order) != sys.byteorder.encode():
            raise DamagedError("it was written on a machine with a different byte order")
        data = self._bytes(self._entries[self._top + PICKLE])
        found = unpickle(data, {**plain_names(), **tensor_names()}, persistent=self._storage)
        _require_tree(found)
        return found

    def _bytes(self, entry: _Stored) -> bytes:
        self._file.seek(entry.offset)
        data = self._file.read(entry.length)
        self._check(entry, data)
        return data

    def _check(self, entry: _Stored, data: bytes | memoryview) -> None:
        if len(data) != entry.length:
            raise DamagedError("it is truncated")
        # torch can be configured to write no checksums
        if self._verify and entry.sum and zlib.crc32(data) != entry.sum:
            raise DamagedError("the checksum of an entry of its archive does not match")

    def _storage(self, pid: Any) -> _Storage:
        kind, cls, key, _device, numel = pid
        if kind != "storage" or type(cls) is not _StorageClass or type(key) is not str:
            raise UnpicklingError("a reference does not refer to a storage")
        if key not in self._read:
            self._read[key] = self._tensor(self._entries[f"{self._top}/data/{key}"])
        content = self._read[key]
        if type(numel) is not int or not 0 <= numel * cls.dtype.itemsize <= content.numel():
            raise UnpicklingError("a storage has fewer bytes than it declares")
        return _Storage(content, cls.dtype)

    def _tensor(self, entry: _Stored) -> Tensor:
        made = torch.empty(entry.length, dtype=torch.uint8, device="cpu")
        view = memory_of(made)
        self._file.seek(entry.offset)
        self._check(entry, view[: self._file.readinto(view)])
        return made


def _require_tree(value: Any) -> None:
    """Raise DamagedError if a value contains itself, is nested too deeply, or repeats its parts too
    often. With memo references, a hundred bytes can encode lists that take years to traverse."""
    sizes: dict[int, int] = {}  # number of elements of each traversed value
    entered: set[int] = set()
    elements = 0

    def size_of(one: Any) -> int:
        nonlocal elements
        elements += 1
        if id(one) in sizes or not isinstance(one, CONTAINERS):
            return sizes.get(id(one), 1)
        if id(one) in entered or len(entered) > DEPTH:
            raise DamagedError("a value contains itself, or is nested too deeply")
        entered.add(id(one))
        size = sizes[id(one)] = 1 + sum(map(size_of, _inside(one)))
        entered.discard(id(one))
        if size > TIMES * elements + 1000:
            raise DamagedError("a value repeats its parts too often")
        return size

    size_of(value)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, CONTAINERS) else ()


def tensor_names() -> dict[tuple[str, str], Any]:
    """Return the functions and classes that a pickle of tensors uses, by module and name."""
    functions = {
        ("torch._utils", "_rebuild_tensor"): _view,
        ("torch._utils", "_rebuild_tensor_v2"): _tensor_of,
        ("torch._utils", "_rebuild_tensor_v3"): _tensor_with_dtype,
        ("torch._utils", "_rebuild_parameter"): _parameter,
        ("torch._utils", "_rebuild_sparse_tensor"): _sparse,
    }
    made = {name: (lambda *args, f=function: f(*args)) for name, function in functions.items()}
    known = {id(function) for function in made.values()}
    classes = {"Tensor": object(), "Parameter": object()}

    def with_attributes(function: Any, cls: Any, args: Any, state: Any) -> Tensor:
        if id(function) not in known or not any(cls is one for one in classes.values()):
            raise UnpicklingError("a tensor has an unexpected class")
        tensor: Tensor = function(*args)
        named, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
        if type(named) is not dict or slots or any(type(name) is not str for name in named):
            raise UnpicklingError("the attributes of a tensor are not a dict with str keys")
        vars(tensor).update(named)
        return tensor

    storages: dict[str, Any] = {name: _StorageClass(dtype) for name, dtype in STORAGES.items()}
    return {
        **made,
        **{("torch", name): cls for name, cls in storages.items()},
        ("torch.storage", "UntypedStorage"): _StorageClass(torch.uint8),
        ("torch._tensor", "_rebuild_from_type_v2"): with_attributes,
        ("torch.serialization", "_get_layout"): lambda name: str(name),
        ("torch", "Tensor"): classes["Tensor"],
        ("torch.nn.parameter", "Parameter"): classes["Parameter"],
    }


def _view(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    dtype: Any = None,
) -> Tensor:
    """Return a view of a storage. Checks bounds, because torch would enlarge a short storage."""
    if type(storage) is not _Storage:
        raise UnpicklingError("a tensor has no storage")
    dtype = dtype or storage.dtype
    numbers = (offset, *size, *stride)
    if any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
        raise UnpicklingError("a tensor has sizes that are not numbers")
    if len(size) != len(stride) or math.prod(size) >= 1 << 63:
        raise UnpicklingError("a tensor has different numbers of sizes and strides")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 not in size and (last + 1) * dtype.itemsize > storage.content.numel():
        raise UnpicklingError("a tensor is larger than its storage")
    made = torch.empty(0, dtype=dtype, device="cpu")
    if 0 in size:
        return made.reshape(size)
    return made.set_(storage.content.untyped_storage(), offset, tuple(size), tuple(stride))


def _tensor_of(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any = None,
    metadata: Any = None,
    *,
    dtype: Any = None,
) -> Tensor:
    made = _view(storage, offset, size, stride, dtype)
    told = {name for name, value in (metadata or {}).items() if value}
    if unknown := told - {"conj", "neg"}:
        raise RefusedError(f"a tensor with {min(unknown)!r}")
    if "conj" in told:
        made = made.conj()
    if "neg" in told:
        made = -made
    return made.requires_grad_(bool(requires_grad))


def _tensor_with_dtype(*args: Any) -> Tensor:
    dtype = args[6]  # follows the arguments of ``_tensor_of`` up to ``hooks``
    if not isinstance(dtype, torch.dtype):
        raise UnpicklingError("a tensor has no dtype")
    return _tensor_of(*args[:6], *args[7:], dtype=dtype)


def _sparse(layout: Any, data: Any) -> Tensor:
    if layout != str(torch.sparse_coo):
        raise RefusedError("a sparse tensor whose layout is not torch.sparse_coo")
    indices, values, size, is_coalesced = data
    return torch.sparse_coo_tensor(
        indices, values, tuple(size), check_invariants=True, is_coalesced=bool(is_coalesced)
    )


def _parameter(data: Any, requires_grad: Any, hooks: Any = None) -> nn.Parameter:
    if not isinstance(data, Tensor):
        raise UnpicklingError("a parameter is not a tensor")
    return nn.Parameter(data, requires_grad=bool(requires_grad))

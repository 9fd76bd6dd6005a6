"""What ``torch.save`` wrote, read without running anything in it, and in the memory that it has.

Owns what is in such an archive (a pickle, and the bytes of each storage) and how tensors are made
of it. It must not know what the values are for.

A tensor is a view of a storage that was read, and never larger than that. Values are plain data,
tensors and parameters. What else ``torch.load(weights_only=True)`` knows (quantised and nested
tensors) needs trust.
"""

from __future__ import annotations

import ctypes
import math
import sys
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pickle import UnpicklingError
from typing import IO, Any

import torch
import torch.nn as nn
from torch import Tensor

from fsdp2.checkpoint._archive import Archive, Stored
from fsdp2.checkpoint._checksums import DamagedError
from fsdp2.checkpoint._pickle_machine import RefusedError
from fsdp2.checkpoint._unpickling import plain_names, unpickle

PICKLE = "/data.pkl"
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
DEPTH = 200
TIMES = 100
"""How much larger a value may seem than it is, if parts of it are in it more than once."""

STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}
"""Classes of storages by name, which torch writes for most dtypes."""


@dataclass(frozen=True)
class _StorageClass:
    """Stands for a class of storages."""

    dtype: torch.dtype


@dataclass(frozen=True)
class _Storage:
    """Bytes of an archive, of which tensors are views."""

    content: Tensor
    dtype: torch.dtype


def read_torch_file(file: IO[bytes], offset: int, length: int, *, verify: bool) -> Any:
    """Return the value that ``torch.save`` wrote into a part of a file.

    Args:
        verify: check the sums that the archive itself has.

    Raises:
        RefusedError: it is more than plain data and tensors.
        UnpicklingError, DamagedError: it is damaged.
    """
    return _TorchFile(file, offset, length, verify).read()


class _TorchFile:
    def __init__(self, file: IO[bytes], offset: int, length: int, verify: bool) -> None:
        self._file = file
        self._verify = verify
        self._entries = Archive(file, offset, length).entries()
        self._read: dict[str, Tensor] = {}
        self._top = ""

    def read(self) -> Any:
        tops = [name.removesuffix(PICKLE) for name in self._entries if name.endswith(PICKLE)]
        if len(tops) != 1:
            raise DamagedError(f"its archive has {len(tops)} pickles, and not one")
        self._top = tops[0]
        order = self._entries.get(f"{self._top}/byteorder")
        if order is not None and self._bytes(order) != sys.byteorder.encode():
            raise DamagedError("a machine with another order of bytes wrote it")
        data = self._bytes(self._entries[self._top + PICKLE])
        found = unpickle(data, {**plain_names(), **tensor_names()}, persistent=self._storage)
        _require_tree(found)
        return found

    def _bytes(self, entry: Stored) -> bytes:
        self._file.seek(entry.offset)
        data = self._file.read(entry.length)
        self._check(entry, data)
        return data

    def _check(self, entry: Stored, data: bytes | memoryview) -> None:
        if len(data) != entry.length:
            raise DamagedError("it ends too early")
        # torch can be told to write no sums
        if self._verify and entry.sum and zlib.crc32(data) != entry.sum:
            raise DamagedError("the checksum of an entry of its archive is another one")

    def _storage(self, pid: Any) -> _Storage:
        """Return what a pickle refers to as (kind, class, key, device, number of elements)."""
        kind, cls, key, _, numel = pid
        if kind != "storage" or type(cls) is not _StorageClass or type(key) is not str:
            raise UnpicklingError("a reference is to no storage")
        if key not in self._read:
            self._read[key] = self._tensor(self._entries[f"{self._top}/data/{key}"])
        content = self._read[key]
        if type(numel) is not int or not 0 <= numel * cls.dtype.itemsize <= content.numel():
            raise UnpicklingError("a storage has fewer bytes than it says")
        return _Storage(content, cls.dtype)

    def _tensor(self, entry: Stored) -> Tensor:
        made = torch.empty(entry.length, dtype=torch.uint8, device="cpu")
        if entry.length:
            view = memoryview((ctypes.c_ubyte * entry.length).from_address(made.data_ptr()))
            self._file.seek(entry.offset)
            count: int = self._file.readinto(view)  # type: ignore[attr-defined]  # of files opened in binary mode
            self._check(entry, view[:count])
        return made


def _require_tree(value: Any) -> None:
    """Raise DamagedError for what is in itself, too deep, or in itself so often that it seems huge.

    A memo lets a pickle of a hundred bytes describe a list of two lists of two lists, ..., which
    takes years to walk through.
    """
    sizes: dict[int, int] = {}  # of what was walked through, in elements
    entered: list[Any] = [value]
    rest: list[Iterator[Any]] = [iter(_inside(value))]
    inside, elements = {id(value)}, 0
    while rest:
        below = next(rest[-1], rest)  # which is in no pickle
        if below is rest:
            done = entered.pop()
            rest.pop()
            inside.discard(id(done))
            sizes[id(done)] = 1 + sum(sizes.get(id(one), 1) for one in _inside(done))
            if sizes[id(done)] > TIMES * elements + 1000:
                raise DamagedError("a value is in itself too often")
            continue
        elements += 1
        if id(below) in sizes or not isinstance(below, CONTAINERS):
            continue
        if id(below) in inside or len(rest) > DEPTH:
            raise DamagedError("a value is in itself, or too deep")
        entered.append(below)
        rest.append(iter(_inside(below)))
        inside.add(id(below))


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return value if isinstance(value, CONTAINERS) else ()


# What a pickle of tensors calls.


def tensor_names() -> dict[tuple[str, str], Any]:
    """Return the table for tensors: torch's own functions by name, and ours in their place."""
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
            raise UnpicklingError("a tensor is of another class")
        tensor: Tensor = function(*args)
        named, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
        if type(named) is not dict or slots or any(type(name) is not str for name in named):
            raise UnpicklingError("attributes of a tensor are no dict of names")
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


def _view(storage: Any, offset: Any, size: Any, stride: Any, dtype: Any = None) -> Tensor:
    """Return a tensor that lies in a storage, whole: torch would make the storage larger."""
    if type(storage) is not _Storage:
        raise UnpicklingError("a tensor has no storage")
    dtype = dtype or storage.dtype
    numbers = (offset, *size, *stride)
    if any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
        raise UnpicklingError("a tensor has other sizes than numbers")
    if len(size) != len(stride) or math.prod(size) >= 1 << 63:
        raise UnpicklingError("a tensor has other strides than sizes")
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
    if told - {"conj", "neg"}:
        raise RefusedError(f"a tensor with {min(told - {'conj', 'neg'})!r}")
    if "conj" in told:
        made = made.conj()
    if "neg" in told:
        made = -made
    return made.requires_grad_(bool(requires_grad))


def _tensor_with_dtype(
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> Tensor:
    if not isinstance(dtype, torch.dtype):
        raise UnpicklingError("a tensor has no dtype")
    return _tensor_of(storage, offset, size, stride, requires_grad, None, metadata, dtype=dtype)


def _sparse(layout: Any, data: Any) -> Tensor:
    if layout != str(torch.sparse_coo):
        raise RefusedError("a sparse tensor in another layout than torch.sparse_coo")
    indices, values, size, is_coalesced = data
    return torch.sparse_coo_tensor(
        indices, values, tuple(size), check_invariants=True, is_coalesced=bool(is_coalesced)
    )


def _parameter(data: Any, requires_grad: Any, hooks: Any = None) -> nn.Parameter:
    if not isinstance(data, Tensor):
        raise UnpicklingError("a parameter is no tensor")
    return nn.Parameter(data, requires_grad=bool(requires_grad))

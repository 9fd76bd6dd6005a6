"""CRC-32 checksums of tensors, of byte ranges of files, and of whole files.

A file's checksum is in its *tail*: JSON and a footer after the content. Other readers ignore it.
"""

from __future__ import annotations

import ctypes
import json
import pickle
import struct
import zlib
from typing import IO, Any

from torch import Tensor

from fsdp2._core.base.errors import StateError
from fsdp2._core.base.names import printable

BLOCK_NBYTES = 1 << 20
MAGIC = b"\x00fsdp2\x00\x01"
FOOTER = struct.Struct("<QI8s")


class DamagedError(Exception):
    """Raised if the data read differs from the data written."""


def damaged(what: str, problem: str) -> StateError:
    text = f"{what}: {problem} Use another checkpoint; nothing was changed."
    return StateError("FS618", text)


def said(error: BaseException) -> str:
    """Return the first line of an error's message, prefixed with the error's class unless the
    error is ours."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    line = printable((str(error).splitlines() or [""])[0])
    ours = (DamagedError, pickle.UnpicklingError)
    return line if isinstance(error, ours) else f"{type(error).__name__}: {line}"


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    assert tensor.is_contiguous()
    if tensor.nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr()))


def sum_of_tensor(tensor: Tensor, start: int = 0) -> int:
    """Return the checksum of a contiguous CPU tensor's bytes, continuing from ``start``."""
    return zlib.crc32(memory_of(tensor), start)


def sum_of_part(file: IO[bytes], offset: int, length: int) -> int:
    """Return the checksum of a file's byte range. Raise DamagedError if the file is too short."""
    found, left = 0, length
    buffer = memoryview(bytearray(min(BLOCK_NBYTES, max(length, 1))))
    file.seek(offset)
    while left:
        count: int = file.readinto(buffer[: min(left, len(buffer))])  # type: ignore[attr-defined]  # binary files have readinto
        if not count:
            raise DamagedError(f"it is {left} bytes too short")
        found = zlib.crc32(buffer[:count], found)
        left -= count
    return found


def tail_of(content: bytes, told: Any) -> bytes:
    """Return the tail to append to ``content``. ``split`` recovers ``told`` from it."""
    body = json.dumps(told, separators=(",", ":")).encode()
    length = struct.pack("<Q", len(body))
    return body + FOOTER.pack(len(body), zlib.crc32(content + body + length), MAGIC)


def split(data: bytes, *, verify: bool = True) -> tuple[bytes, Any]:
    """Return the content, and ``told`` (None without a tail). Raise DamagedError on mismatch."""
    if len(data) < FOOTER.size or data[-len(MAGIC) :] != MAGIC:
        return data, None
    length, found, _ = FOOTER.unpack(data[-FOOTER.size :])
    end = len(data) - FOOTER.size - length
    if end < 0 or (verify and found != zlib.crc32(data[: -FOOTER.size + 8])):
        raise DamagedError("its checksum does not match")
    try:
        return data[:end], json.loads(data[end : -FOOTER.size])
    except ValueError as error:
        raise DamagedError(f"its checksums cannot be read ({error})") from error

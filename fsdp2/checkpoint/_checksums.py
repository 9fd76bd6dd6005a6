"""CRC-32 checksums of tensors, of byte ranges of files, and of whole files.

A file's checksum is in its *tail*: JSON and a footer after the content. Other readers ignore it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import pickle
import struct
import zlib
from typing import IO, Any

import torch
import torch.nn.functional as functional
from torch import Tensor

from fsdp2._core.base.errors import StateError
from fsdp2._core.base.names import printable

BLOCK_NBYTES = 1 << 20
BLOCK = 256
"""Size in bytes of a block, the granularity at which ``weights`` detects and sends changes."""
AT_ONCE = 512
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


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Return pseudorandom odd 64-bit numbers, one per word of a block."""
    random = bytearray(hashlib.shake_128(b"fsdp2 weights").digest(2 * BLOCK))
    numbers = torch.frombuffer(random, dtype=torch.int64) | 1
    return numbers.to(device)


def digests_of(buffer: Tensor) -> Tensor:
    """Return a 64-bit checksum for each block of a buffer: ``[blocks]``.

    It is the sum, modulo 2**64, of 32-bit words times random odd numbers. It detects any change of
    one word. It misses a change of several words with probability 2**-32, or with a far smaller
    probability if low bits differ.
    """
    found = []
    for part in buffer.split(AT_ONCE * BLOCK):  # in parts, to limit temporary memory
        rest = -part.numel() % BLOCK
        words = (functional.pad(part, (0, rest)) if rest else part).view(torch.int32)
        products = words.to(torch.int64).view(-1, BLOCK // 4).mul_(_factors(buffer.device))
        found.append(products.sum(1))
    return torch.cat(found)


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

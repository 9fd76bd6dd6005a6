"""Safe reading of untrusted files: regular files only, with a size limit.

[Note: regular files]
A path may refer to a pipe, a socket or a device: opening a pipe blocks until a writer opens it, and
a device may be endless. So the file type is checked before and after opening, and opening does not
block. A file that is read completely has a size limit and must not consist mostly of holes, because
a sparse file of one terabyte can be created instantly.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

WHOLE_NBYTES = 1 << 30  # size limit for files that are read completely: metadata, not values
SOLID_NBYTES = 64 << 20
HOLES = 100
"""A file larger than ``SOLID_NBYTES`` is hollow if less than 1/100 of it is allocated. File-system
compression alone leaves about 1/10."""

KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. OSError: not a regular file. See [Note: regular files]."""
    _check(os.stat(path), path)
    flags = os.O_RDONLY
    for name in ("O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY", "O_BINARY"):
        flags |= getattr(os, name, 0)
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        _check(found, path)
        file = os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
    if found.st_size > SOLID_NBYTES and not any(file.peek()):  # no valid file begins with zeros
        file.close()
        raise OSError(errno.EINVAL, "begins with zeros only", str(path))
    return file


def read_regular(path: Path, most: int = WHOLE_NBYTES) -> bytes:
    """Return a file's contents. OSError: not regular, over ``most`` bytes, or mostly holes."""
    with open_regular(path) as file:
        found = os.fstat(file.fileno())
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"has {found.st_size} bytes, more than {most}", str(path))
        if is_hollow(found):
            raise OSError(errno.EINVAL, f"has {found.st_size} bytes, mostly holes", str(path))
        return file.read(found.st_size)  # not ``most``: Python allocates the requested size


def is_hollow(found: os.stat_result) -> bool:
    """Return True if a large file is mostly holes; False if the system does not report blocks."""
    held = getattr(found, "st_blocks", 0) * 512
    return found.st_size > SOLID_NBYTES and 0 < held * HOLES < found.st_size


def _check(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = next((name for test, name in KINDS if test(found.st_mode)), "a special file")
        raise OSError(errno.EINVAL, f"{kind}, not a regular file", str(path))

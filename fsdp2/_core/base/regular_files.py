"""Files that are read: regular ones only, and not more of them than they can need.

Owns how a file that somebody else made is opened. It must not know what is in it.

[Note: regular files]
A name in a folder may be a pipe, a socket or a device, or lead to one: to open a pipe waits for
ever for somebody who writes, and a device may have no end. So what a name stands for is looked at
before it is opened, and again afterwards, without waiting. What is read whole has a limit, and may
not be mostly holes: a file of a terabyte that takes a kilobyte of a disk is made in a moment.
"""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

WHOLE_NBYTES = 1 << 30
"""Most bytes of a file that is read whole: lists and descriptions, not values."""

SOLID_NBYTES = 64 << 20
HOLES = 100
"""A file larger than the one, of which a disk holds less than a part in so many, is mostly holes.

Disks that compress reach a tenth with such files.
"""

KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read. See [Note: regular files].

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
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
    if found.st_size > SOLID_NBYTES and not any(file.peek()):  # no file that is read begins so
        file.close()
        raise OSError(errno.EINVAL, "begins with nothing but zeros", str(path))
    return file


def read_regular(path: Path, most: int = WHOLE_NBYTES) -> bytes:
    """Return all of a file.

    Raises:
        OSError: as ``open_regular``; it is larger than ``most``, or mostly holes.
    """
    with open_regular(path) as file:
        found = os.fstat(file.fileno())
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"has {found.st_size} bytes, more than {most}", str(path))
        if is_hollow(found):
            raise OSError(errno.EINVAL, f"has {found.st_size} bytes, mostly holes", str(path))
        return file.read(found.st_size)  # Python makes room for as many as it is asked for


def is_hollow(found: os.stat_result) -> bool:
    """True if a disk holds nearly nothing of a large file. Some systems tell of no blocks."""
    held = getattr(found, "st_blocks", 0) * 512
    return found.st_size > SOLID_NBYTES and 0 < held * HOLES < found.st_size


def _check(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = next((name for test, name in KINDS if test(found.st_mode)), "no file")
        raise OSError(errno.EINVAL, f"{kind}, and no regular file", str(path))

"""How files are written beside their place and take their names, whoever else writes there.

Owns the names of what is not finished, the lock under which names are given, and which names inside
a folder may be followed. It must not know what is in the files.

[Note: several saves to one place]
What a save writes lies in a folder ``.NAME.tmp-TOKEN`` of its own, whose token nobody else has. A
file in it stays locked as long as the process that made it lives, so that a later save can tell
remains from what another one is writing, and removes remains alone. Names are given under a lock
beside the place, one save after another: what stands there is one save's, whole, and that of the
last one. Where a file system has no locks, remains of other hosts stay for an hour, and a save that
meets another one among its renames does its own again.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fsdp2._core.base.errors import ConfigError, StateError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

OWNER = ".owner"
ABANDONED_AFTER_S = 3600.0
LOCK_WITHIN_S = 120.0


def neighbour(place: Path, suffix: str) -> Path:
    return place.with_name(f".{place.name}.{suffix}")


def neighbours(place: Path, suffix: str) -> list[Path]:
    """Return what lies beside a place under names with a suffix and anything behind it."""
    return sorted(place.parent.glob(f".{glob.escape(place.name)}.{suffix}*"))


def sync(path: Path) -> None:
    """Let a file, or the names in a folder, reach the disk."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Workspace:
    """A folder for one save, beside its place. See [Note: several saves to one place]."""

    def __init__(self, place: Path, token: str) -> None:
        self.token = token
        self.path = neighbour(place, f"tmp-{token}")
        self._place = place
        self._lock: int | None = None

    def make(self) -> None:
        """Make the folder, and remove what dead saves to the place left."""
        for found in neighbours(self._place, "tmp-"):
            if _is_abandoned(found):
                shutil.rmtree(found, ignore_errors=True)
        self.path.mkdir(parents=True)
        self._lock = own(self.path / OWNER)

    def release(self) -> None:
        """Let the folder be one like any other, right before it takes its name."""
        if self._lock is not None:
            (self.path / OWNER).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def remove(self) -> None:
        """Leave nothing. Another name first: a rank that still writes makes no new file in it."""
        self.release()
        gone = self.path.with_name(f"{self.path.name}.gone")
        with contextlib.suppress(OSError):
            os.rename(self.path, gone)
        shutil.rmtree(gone, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)


def _host() -> str:
    """Name this machine since it was started: locks of one are seen by all its processes."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot}"


def _lock(descriptor: int) -> None:
    """Lock an open file, or raise BlockingIOError; OSError where there are no locks."""
    if fcntl is None:
        raise OSError("no locks here")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def own(path: Path) -> int:
    """Put an owner's file, open and locked, into a folder; return its descriptor.

    It has its name once it is locked and says who holds the lock: others look at it at any moment,
    and one that can be locked is a dead owner's. Without a lock it says nothing.
    """
    unnamed = path.with_name(f"{path.name}.new")
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o644)
    with contextlib.suppress(OSError):
        _lock(descriptor)
        os.write(descriptor, _host().encode())
    os.rename(unnamed, path)
    return descriptor


def is_dead(path: Path) -> bool | None:
    """True if the process that owns a file has ended; None if that cannot be told from here."""
    is_free, host = False, ""
    try:
        # of a pipe, which nobody writes to, a read would never return
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NONBLOCK", 0))
        try:
            _lock(descriptor)
            is_free = _is_named(descriptor, path)  # else its owner lets go of it just now
            host = os.read(descriptor, 1000).decode(errors="replace")
        finally:
            os.close(descriptor)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True if is_free and host == _host() else None


def _is_abandoned(folder: Path) -> bool:
    """True if the save that made a folder is dead, as far as can be told from here."""
    found = is_dead(folder / OWNER)
    return is_old(folder, ABANDONED_AFTER_S) if found is None else found


def remove_remains(folder: Path) -> None:
    """Remove what dead saves to any place in a folder left."""
    for found in folder.glob(".*.tmp-*"):
        if is_dead(found / OWNER):
            shutil.rmtree(found, ignore_errors=True)


def is_old(folder: Path, seconds: float) -> bool:
    """True if nothing was written in a folder for so long."""
    with contextlib.suppress(OSError):
        times = [entry.stat().st_mtime for entry in (folder, *folder.iterdir())]
        return max(times) < time.time() - seconds
    return False


@contextlib.contextmanager
def exclusive(place: Path) -> Iterator[None]:
    """Hold the lock under which names at a place are given.

    Raises:
        StateError: another process holds it for too long.
    """
    path = neighbour(place, "lock")
    descriptor = _acquire(path)
    try:
        yield
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _acquire(path: Path) -> int | None:
    """Return a locked file that has its name; None where there are no locks."""
    deadline = time.monotonic() + LOCK_WITHIN_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor)
            if _is_named(descriptor, path):
                return descriptor
            os.close(descriptor)  # who had the lock removed the file
            continue
        except BlockingIOError:
            os.close(descriptor)
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            return None
        if time.monotonic() > deadline:
            raise StateError(
                "FS614",
                f"save: {path} has been locked for {LOCK_WITHIN_S:.0f} s by another save, which "
                "gives names to its files. End that process, or save to another path.",
            )
        time.sleep(0.01)


def _is_named(descriptor: int, path: Path) -> bool:
    own = os.fstat(descriptor)
    try:
        return os.path.samestat(own, os.stat(path))
    except OSError:
        return False


@dataclass(frozen=True)
class Stamp:
    """Which file stood at a path when somebody looked; ``told`` is None if there was none."""

    path: Path
    told: tuple[int, ...] | None

    @staticmethod
    def of(path: Path) -> Stamp:
        try:
            found = os.stat(path)
        except OSError:
            return Stamp(path, None)
        return Stamp(path, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))

    @property
    def is_replaced(self) -> bool:
        """True if another file stands there now: a save has given names to its own meanwhile."""
        return Stamp.of(self.path) != self


# Names inside a folder.


def plain_name(name: Any, where: str) -> str:
    """Return a name that stands for a file in its own folder.

    Raises:
        ConfigError: it leads elsewhere: an absolute path, one with separators, or ``..``.
    """
    if (
        not isinstance(name, str)
        or name in ("", ".", "..")
        or any(character in name for character in "/\\\0")
        or Path(name).drive
    ):
        raise ConfigError(
            "FS617",
            f"{where}: names {name!r} as one of its files, which is no plain file name. It was "
            "made by hand, or is damaged; nothing outside of the folder is read or removed.",
        )
    return name


def file_in(folder: Path, name: Any, where: str, *, trust: bool = False) -> Path:
    """Return the path of a file in a folder, where it really is.

    A link may lead out of the folder in one case: in a cache of Hugging Face's hub, whose files lie
    under ``blobs`` beside the folder of their revision.

    Raises:
        ConfigError: the name is not plain, or a link that leaves the folder.
    """
    path = folder / plain_name(name, where)
    if trust or not path.is_symlink():
        return path
    real, home = path.resolve(), folder.resolve()
    if real.parent == home:
        return path
    if home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs":
        return path
    raise ConfigError(
        "FS617",
        f"{where}: {name} is a link to {real}, outside of its folder. Pass trust=True if you made "
        "it, or copy the file.",
    )

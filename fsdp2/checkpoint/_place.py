"""Write a folder next to its final path (its *place*), and rename it safely to this path.

Independent of the files' contents.

[Note: concurrent saves]
A save writes to a separate folder ``.NAME.tmp-TOKEN`` with a unique token. A file in the folder
stays locked while the saving process is alive, so a later save removes only folders of dead saves.
A lock file next to the place serialises renames, so the place always has one complete checkpoint,
that of the last save. If locks are inconclusive (another host, a file system without locks), other
saves' folders are kept for an hour. Without locks, a save retries if another save interferes.

[Note: atomic saves]
When every rank has reported its part, the first rank checks that all files are visible to it, and
have the sizes that were written. It then renames the existing checkpoint to ``.NAME.old-TOKEN`` and
the new one to ``NAME``. Files in the old folder that do not belong to a checkpoint are moved to the
new folder, and the old folder is removed. If a save is interrupted before the renames, the old
checkpoint keeps its name. If a save is interrupted between the renames, ``load`` finds
``.NAME.old-TOKEN``.

[Note: series]
Checkpoints saved to one parent folder with ``keep_last`` form a series. Each checkpoint of a series
contains an empty file ``.series``. After the rename of a new checkpoint, the symlink ``latest``
next to it is updated, and the oldest checkpoints of the series are removed. A checkpoint is renamed
before its files are deleted, so any checkpoint under its original name is complete. Checkpoints
saved without ``keep_last`` are kept. Folders of dead saves are removed too, because a restarted
program may never save to their places again.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fsdp2._core.base.errors import ConfigError, StateError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows has no fcntl
    fcntl = None

METADATA = ".metadata"  # written last: a folder with this file is a checkpoint
OWNER = ".owner"
ABANDONED_AFTER_S = 3600.0
LOCK_WITHIN_S = 120.0
OLD = "old"  # infix in the names of checkpoints that are being replaced
GONE = "gone-fsdp2"  # infix in the names of checkpoints that a series is removing
LATEST = "latest"  # the link to the newest checkpoint of a series
SERIES = ".series"
RENAMES = 100  # maximum number of attempts to rename while other saves also rename


def neighbour(place: Path, suffix: str) -> Path:
    return place.with_name(f".{place.name}.{suffix}")


def neighbours(place: Path, suffix: str) -> list[Path]:
    return sorted(place.parent.glob(f".{glob.escape(place.name)}.{suffix}*"))


def sync(path: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Workspace:
    """A folder that one save writes to: see [Note: concurrent saves]."""

    def __init__(self, place: Path, token: str) -> None:
        self.token = token
        self.path = neighbour(place, f"tmp-{token}")
        self._place = place
        self._lock: int | None = None

    def make(self) -> None:
        """Create the folder, and remove the folders of dead saves to the same place."""
        for found in neighbours(self._place, "tmp-"):
            is_gone = is_dead(found / OWNER)
            if is_gone or (is_gone is None and is_old(found, ABANDONED_AFTER_S)):
                shutil.rmtree(found, ignore_errors=True)
        self.path.mkdir(parents=True)
        self._lock = own(self.path / OWNER)

    def release(self) -> None:
        """Remove and unlock the owner's file, right before the folder is renamed to its place."""
        if self._lock is not None:
            (self.path / OWNER).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def remove(self) -> None:
        """Remove the folder. Rename it first, so that ranks still writing cannot add files."""
        self.release()
        gone = self.path.with_name(f"{self.path.name}.gone")
        with contextlib.suppress(OSError):
            os.rename(self.path, gone)
        shutil.rmtree(gone, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)


def _host() -> str:
    """Return this host's name and boot id. Processes with the same result see the same locks."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot}"


def _lock(descriptor: int) -> None:
    """Lock a file. Raise BlockingIOError if it is locked, OSError if locks are unsupported."""
    if fcntl is None:
        raise OSError("locks are unsupported")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def own(path: Path) -> int:
    """Create and lock an owner's file; return its descriptor. The file is renamed to ``path`` once
    it is locked and contains the host, so if another process can lock the file, its owner is dead.
    On a file system without locks, the file is empty."""
    unnamed = path.with_name(f"{path.name}.new")
    descriptor = os.open(unnamed, os.O_RDWR | os.O_CREAT, 0o644)
    with contextlib.suppress(OSError):
        _lock(descriptor)
        os.write(descriptor, _host().encode())
    os.rename(unnamed, path)
    return descriptor


def is_dead(path: Path) -> bool | None:
    """Return whether a file's owner has exited, or None if this host cannot determine that."""
    is_free, host = False, ""
    try:
        # do not block if the file is a pipe
        descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NONBLOCK", 0))
        try:
            _lock(descriptor)
            is_free = _is_named(descriptor, path)  # an unlinked lock file is being released
            host = os.read(descriptor, 1000).decode(errors="replace")
        finally:
            os.close(descriptor)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True if is_free and host == _host() else None


def is_old(folder: Path, seconds: float) -> bool:
    """Return True if no file in a folder was written in the last ``seconds``."""
    with contextlib.suppress(OSError):
        times = [entry.stat().st_mtime for entry in (folder, *folder.iterdir())]
        return max(times) < time.time() - seconds
    return False


@contextlib.contextmanager
def exclusive(place: Path) -> Iterator[None]:
    """Hold a place's rename lock. Raise StateError if another process holds the lock too long."""
    path = neighbour(place, "lock")
    descriptor = _acquire(path)
    try:
        yield
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _acquire(path: Path) -> int | None:
    """Create and lock a file; return its descriptor, or None if locks are unsupported."""
    deadline = time.monotonic() + LOCK_WITHIN_S
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with contextlib.suppress(BlockingIOError):
                _lock(descriptor)
                if _is_named(descriptor, path):  # False if the previous holder removed the file
                    return descriptor
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            return None
        os.close(descriptor)
        if time.monotonic() > deadline:
            raise StateError(
                "FS614",
                f"save: {path} has been locked for {LOCK_WITHIN_S:.0f} s by another process, which "
                "is renaming its checkpoint files. End that process, or save to another path.",
            )
        time.sleep(0.01)


def _is_named(descriptor: int, path: Path) -> bool:
    own = os.fstat(descriptor)
    try:
        return os.path.samestat(own, os.stat(path))
    except OSError:
        return False


def stamp_of(path: Path) -> tuple[int, ...] | None:
    """Return the identity of the file at a path, or None without a file. Another result later
    means that a save replaced the file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def plain_name(name: Any, where: str) -> str:
    if (
        not isinstance(name, str)
        or name in ("", ".", "..")
        or any(character in name for character in "/\\\0")
        or Path(name).drive
    ):
        raise ConfigError(
            "FS617",
            f"{where}: found {name!r}, which is not a plain file name, in its list of files. The "
            "list was edited manually or is damaged; no file outside the folder is used.",
        )
    return name


def file_in(folder: Path, name: Any, where: str, *, trust: bool = False) -> Path:
    """Return the path of a file in a folder. Raise ConfigError if its name or a link points outside
    the folder. Links in a Hugging Face cache may point to ``blobs`` next to ``snapshots``."""
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
        f"{where}: {name} is a link to {real}, outside its folder. Pass trust=True if you created "
        "the link, or copy the file.",
    )


def require_room(place: Path) -> None:
    """Raise ConfigError if a save would replace something that is not a checkpoint. Other saves may
    rename folders during the check, so the check is repeated if the folder changed."""
    for _ in range(RENAMES):
        try:
            found = os.stat(place)
            problem = _in_the_way(place, found)
            if problem is None:
                return
            again = os.stat(place)
            # an inode number may be reused for a new folder, so compare ctimes too
            if os.path.samestat(found, again) and found.st_ctime_ns == again.st_ctime_ns:
                raise ConfigError("FS615", f"save: {problem}")
        except FileNotFoundError:
            if not place.exists():
                return


def _in_the_way(place: Path, found: os.stat_result) -> str | None:
    if not stat.S_ISDIR(found.st_mode):
        return f"{place} is a file. Pass a folder."
    is_here = os.path.samestat(found, os.stat("."))
    if is_here or os.path.ismount(place):
        what = "the working directory" if is_here else "a mount point"
        return f"{place} is {what}, but a save replaces the entire folder. Pass a subfolder."
    is_ours = (place / METADATA).exists() or any(neighbours(place, OLD))
    if not is_ours and any(place.iterdir()):
        return (
            f"{place} is a folder with other files, not a checkpoint. A save replaces the entire "
            "folder, so pass one that is empty or does not exist."
        )
    return None


def require_written(folder: Path, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            found = None
        if found != size:
            what = "does not exist" if found is None else f"has {found} bytes"
            raise StateError(
                "FS613",
                f"save: {folder / name}, which a rank wrote with {size} bytes, {what} on the first "
                "rank. Save to a file system that all ranks share. The previous checkpoint, if "
                "any, is unchanged.",
            )


def give_name(workspace: Workspace, place: Path) -> None:
    """Rename a checkpoint to its place; retry if another save interferes. [Note: atomic saves]"""
    sync(workspace.path)
    with exclusive(place):
        workspace.release()
        for number in range(RENAMES):
            try:
                aside = neighbour(place, f"{OLD}-{workspace.token}-{number}")
                if place.exists():
                    os.rename(place, aside)
                older = neighbours(place, OLD)
                os.rename(workspace.path, place)
            except FileNotFoundError:
                if not workspace.path.exists():
                    raise
            except OSError as error:  # another save has taken the name
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            else:
                break
        else:
            raise StateError(
                "FS614",
                f"save: other saves renamed their checkpoints to {place} {RENAMES} times during "
                "this save. Save to another path.",
            )
        sync(place.parent)
        for old in older:
            retire(old, place)


def retire(old: Path, heir: Path) -> None:
    """Remove ``old``, a replaced checkpoint. First move other files in its folder to ``heir``, the
    new one. Without locks, another save may do so too or rename ``heir``; then ``old`` is kept."""
    try:
        for entry in old.iterdir():
            is_ours = entry.name.startswith((METADATA, SERIES)) or entry.suffix == ".distcp"
            if not is_ours and not (heir / entry.name).exists():
                os.rename(entry, heir / entry.name)
    except FileNotFoundError:
        return
    shutil.rmtree(old, ignore_errors=True)


def find(path: str | os.PathLike[str]) -> Path:
    """Return a checkpoint's folder: ``path``, or its temporary name after an interrupted save."""
    place = Path(path).resolve()
    for _ in range(2):  # another save may rename the folder between the two checks
        if (place / METADATA).exists():
            return place
        older = [old for old in neighbours(place, OLD) if (old / METADATA).exists()]
        if older:
            return max(older, key=lambda old: (old / METADATA).stat().st_mtime)
    hint = "Pass the folder that fsdp2.checkpoint.save or torch.distributed.checkpoint.save wrote."
    if place.is_file():
        hint += " Load a torch.save file with load_full_state(model, {'model': torch.load(path)})."
    elif any(place.glob("*.safetensors")):
        hint += " Load the safetensors files in it with load_safetensors."
    raise ConfigError("FS612", f"load: no checkpoint at {place}. {hint}")


def require_series(place: Path) -> None:
    link = place.parent / LATEST
    if place == link or (os.path.lexists(link) and not link.is_symlink()):
        raise ConfigError(
            "FS615",
            f"save: with keep_last, {link} is reserved for the link to the newest checkpoint, but "
            "another file or folder has this name. Save elsewhere, or rename that file or folder.",
        )


def keep_newest(place: Path, count: int, token: str) -> None:
    """Point ``latest`` to a new checkpoint; remove all but the ``count`` newest of the series."""
    folder = place.parent
    with exclusive(folder / LATEST):
        link = neighbour(folder / LATEST, f"new-{token}")
        os.symlink(place.name, link)
        os.replace(link, folder / LATEST)
        sync(folder)
        series = [one for one in _newest_first(folder) if (one / SERIES).exists() and one != place]
        for one in series[count - 1 :]:
            gone = neighbour(one, f"{GONE}-{token}")
            os.rename(one, gone)
        for remains in folder.glob(f".*.{GONE}-*"):  # including remains of interrupted saves
            shutil.rmtree(remains, ignore_errors=True)
        for remains in folder.glob(".*.tmp-*"):  # remains of dead saves to any place
            if is_dead(remains / OWNER):
                shutil.rmtree(remains, ignore_errors=True)


def candidates(folder: Path) -> list[str]:
    """Return a folder's checkpoints by name, newest first, or ``.`` if the folder itself is one."""
    here = folder.resolve()
    if (here / METADATA).exists() or any(neighbours(here, OLD)):
        return ["."]
    return [one.name for one in _newest_first(here)]


def newest_time(folder: Path) -> int:
    """Return the write time, in ns, of the newest checkpoint in a folder, or 0 if there is none."""
    files = [folder / name / METADATA for name in candidates(folder)]
    return max((file.stat().st_mtime_ns for file in files if file.exists()), default=0)


def _newest_first(folder: Path) -> list[Path]:
    found: dict[Path, int] = {}
    for entry in folder.iterdir() if folder.is_dir() else ():
        name, between, _ = entry.name.removeprefix(".").partition(f".{OLD}-")
        is_old = entry.name.startswith(".") and bool(between)
        if entry.is_symlink() or (entry.name.startswith(".") and not is_old):
            continue
        place = folder / name if is_old else entry
        with contextlib.suppress(OSError):  # the entry is not a checkpoint, or is being removed
            found[place] = max((entry / METADATA).stat().st_mtime_ns, found.get(place, 0))
    return sorted(found, key=lambda place: (found[place], place.name), reverse=True)

"""The place of a checkpoint: what may be replaced there, how it takes its name, where it is found.

Owns the rules below, the names of a series of checkpoints, and which one is the newest. It must not
know what is in the files.

[Note: saves, all or nothing]
A checkpoint is written to a workspace beside its place (see ``_publish``). When every rank has said
that it is done, the first one looks whether it sees all files, as large as they were written; it
renames what is there to ``.NAME.old-TOKEN``, the new one to ``NAME``, and removes the old one;
files in it that are not of a checkpoint go to the new one. Whatever stops a save before, the old
one has its name; if it is stopped between the two renames, the old one is whole under its other
name, where ``load`` looks next.

[Note: series]
Checkpoints that are saved with ``keep_last`` into one folder are a series. Each has an empty file
``.series``. When one has its name, the link ``latest`` beside it is made to lead to it, and then
the oldest of the series go: each loses its name before its files. So what has a name is whole, and
what was saved there in another way stays. What dead saves left in the folder goes, too: a program
that was started again may never save to their places again.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from fsdp2._core.base.errors import ConfigError, StateError
from fsdp2.checkpoint._publish import (
    Workspace,
    exclusive,
    neighbour,
    neighbours,
    remove_remains,
    sync,
)
from fsdp2.checkpoint._saved import METADATA

OLD = "old"
"""What the names of checkpoints say that saves replaced, or had no time to."""

GONE = "gone-fsdp2"
"""What the names of checkpoints say that a series keeps no longer, until they are removed."""

LATEST = "latest"
"""The link to the newest one of a series."""

SERIES = ".series"

RENAMES = 100
"""How often a save gives its names again, where others give theirs at the same time."""


def require_room(place: Path) -> None:
    """Raise ConfigError unless a checkpoint may take the name: nothing else may be lost.

    Other saves rename what is there: what was found counts if it still stands there after.
    """
    for _ in range(RENAMES):
        try:
            found = os.stat(place)
            problem = _in_the_way(place, found)
            if problem is None:
                return
            again = os.stat(place)
            # a number may be that of a folder that was removed, so its time counts too
            if os.path.samestat(found, again) and found.st_ctime_ns == again.st_ctime_ns:
                raise ConfigError("FS615", f"save: {problem}")
        except FileNotFoundError:
            if not place.exists():
                return


def _in_the_way(place: Path, found: os.stat_result) -> str | None:
    """Say what a checkpoint would replace, unless that is nothing, or a checkpoint."""
    if not stat.S_ISDIR(found.st_mode):
        return f"{place} is a file. Pass a folder."
    is_here = os.path.samestat(found, os.stat("."))
    if is_here or os.path.ismount(place):
        what = "the working directory" if is_here else "a mount point"
        return (
            f"{place} is {what}, and a checkpoint takes the place of its folder. Pass a "
            "folder in it."
        )
    is_ours = (place / METADATA).exists() or any(neighbours(place, OLD))
    if not is_ours and any(place.iterdir()):
        return (
            f"{place} is a folder with other files, and no checkpoint. A checkpoint takes "
            "the place of its folder: pass one that is empty, or does not exist."
        )
    return None


def require_written(folder: Path, sizes: dict[str, int]) -> None:
    """Raise StateError unless every file is there, as large as it was written."""
    for name, size in sizes.items():
        try:
            found = (folder / name).stat().st_size
        except FileNotFoundError:
            found = None
        if found != size:
            what = "is not there" if found is None else f"has {found} bytes"
            raise StateError(
                "FS613",
                f"save: {folder / name}, which a rank wrote with {size} bytes, {what} where the "
                "first rank looks. All ranks must see one file system. The checkpoint before, if "
                "there is one, is as it was.",
            )


def give_name(workspace: Workspace, place: Path) -> None:
    """Give a checkpoint its name, whoever else does so. See [Note: saves, all or nothing]."""
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
            except OSError as error:  # the other one's has the name again
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
            else:
                break
        else:
            raise StateError(
                "FS614",
                f"save: others gave {place} to their checkpoints {RENAMES} times meanwhile. Save "
                "to another path.",
            )
        sync(place.parent)
        for old in older:
            retire(old, place)


def retire(old: Path, heir: Path) -> None:
    """Remove a checkpoint. What somebody else put into its folder moves to the heir's.

    Where there are no locks, another save may do the same, or rename the heir meanwhile: then the
    rest is left to it, or to the next save.
    """
    try:
        for entry in old.iterdir():
            is_ours = entry.name.startswith((METADATA, SERIES)) or entry.suffix == ".distcp"
            if not is_ours and not (heir / entry.name).exists():
                os.rename(entry, heir / entry.name)
    except FileNotFoundError:
        return
    shutil.rmtree(old, ignore_errors=True)


def find(path: str | os.PathLike[str]) -> Path:
    """Return where a checkpoint lies: at ``path``, or where an interrupted save left it.

    Raises:
        ConfigError: at neither.
    """
    place = Path(path).resolve()
    for _ in range(2):  # a save may give names between two looks
        if (place / METADATA).exists():
            return place
        older = [old for old in neighbours(place, OLD) if (old / METADATA).exists()]
        if older:
            return max(older, key=lambda old: (old / METADATA).stat().st_mtime)
    hint = "Pass the folder that fsdp2.checkpoint.save or torch.distributed.checkpoint.save wrote."
    if place.is_file():
        hint += " A file of torch.save is for load_full_state(model, {'model': torch.load(path)})."
    elif any(place.glob("*.safetensors")):
        hint += " For the safetensors files in it call load_safetensors."
    raise ConfigError("FS612", f"load: no checkpoint at {place}. {hint}")


# A series, and the newest of all.


def require_series(place: Path) -> None:
    """Raise ConfigError unless a link to the newest checkpoint may be made beside a place."""
    link = place.parent / LATEST
    if place == link or (os.path.lexists(link) and not link.is_symlink()):
        raise ConfigError(
            "FS615",
            f"save: with keep_last, {link} is a link to the newest checkpoint, and something else "
            "has this name. Save to another folder, or rename it.",
        )


def keep_newest(place: Path, count: int, token: str) -> None:
    """Let the link lead to a new checkpoint, and remove all of its series but so many."""
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
        for remains in folder.glob(f".*.{GONE}-*"):  # of saves that had no time to, too
            shutil.rmtree(remains, ignore_errors=True)
        remove_remains(folder)


def candidates(folder: Path) -> list[str]:
    """Return the names under which a folder has checkpoints, the newest first.

    ``.`` is the folder itself, where each save takes the place of the one before.
    """
    here = folder.resolve()
    if (here / METADATA).exists() or any(neighbours(here, OLD)):
        return ["."]
    return [one.name for one in _newest_first(here)]


def newest_time(folder: Path) -> int:
    """Return when the newest checkpoint of a folder was written, in nanoseconds; 0 without one."""
    times = [
        (here / METADATA).stat().st_mtime_ns
        for name in candidates(folder)
        for here in (folder / name,)
        if (here / METADATA).exists()
    ]
    return max(times, default=0)


def _newest_first(folder: Path) -> list[Path]:
    """Return the places of checkpoints in a folder by the time at which they were written."""
    found: dict[Path, int] = {}
    for entry, time in _with_times(folder):
        name, between, _ = entry.name.removeprefix(".").partition(f".{OLD}-")
        is_old = entry.name.startswith(".") and bool(between)
        if is_old or not entry.name.startswith("."):
            place = folder / name if is_old else entry
            found[place] = max(time, found.get(place, 0))
    return sorted(found, key=lambda place: (found[place], place.name), reverse=True)


def _with_times(folder: Path) -> Iterator[tuple[Path, int]]:
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if not entry.is_symlink():
            try:
                yield entry, (entry / METADATA).stat().st_mtime_ns
            except OSError:  # no checkpoint, or one that a save removes just now
                continue

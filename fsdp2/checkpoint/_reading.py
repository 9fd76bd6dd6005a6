"""Values out of the files of a sharded checkpoint, each one checked before it is used.

Owns files that are open, checksums as they are read, and blocks of tensors put together from the
parts that were saved. It must not know models. One saved part is in memory at a time.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from fsdp2._base.errors import ConfigError, StateError
from fsdp2._base.fitting import require_representable
from fsdp2._transfer.chunk_plan import Region
from fsdp2.checkpoint._checksums import DamagedError, sum_of_part
from fsdp2.checkpoint._publish import file_in
from fsdp2.checkpoint._saved import METADATA, Entry, Part, Saved


class Reader(contextlib.ExitStack):
    """Reads values of one checkpoint; a context, which closes its files.

    Args:
        verify: check sums, where there are any.
        trust: let values that are no plain data run what they name.
    """

    def __init__(self, saved: Saved, *, verify: bool, trust: bool) -> None:
        super().__init__()
        self._saved = saved
        self.entries = saved.entries
        self._verify = verify
        self.trust = trust
        self._files: dict[str, IO[bytes]] = {}

    def whole(self, entry: Entry) -> Any:
        """Return a value as it was saved."""
        if entry.shape is None:
            (part,) = entry.parts
            return self._load(entry, part)
        made = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self.fill(entry, Region((0,) * len(entry.shape), entry.shape), made)
        return made

    def fill(self, entry: Entry, region: Region, out: Tensor) -> None:
        """Put a region of a saved tensor into ``out``, which has its shape.

        Raises:
            StateError: a file is missing or damaged, or lacks some of the region.
            ConfigError: values that ``out``'s dtype cannot hold.
        """
        covered = 0
        for part in entry.parts:
            assert part.region is not None
            both = _overlap(part.region, region)
            if both is None:
                continue
            found = self._load(entry, part)
            if (
                not isinstance(found, Tensor)
                or found.dtype is not entry.dtype
                or tuple(found.shape) != part.region.sizes
            ):
                raise self._damaged(entry, part, "it holds something else")
            source = found[_within(both, part.region)]
            require_representable("load", entry.key, source, out.dtype)
            with torch.no_grad():
                out[_within(both, region)].copy_(source)
            covered += both.numel
        if covered != region.numel:
            raise StateError(
                "FS618",
                f"load: {self._saved.folder / METADATA} is damaged: it names {covered} of "
                f"{region.numel} elements of a part of {entry.key}. Take another checkpoint; "
                "nothing was changed.",
            )

    def _load(self, entry: Entry, part: Part) -> Any:
        """Return what ``torch.save`` wrote into a part of a file."""
        try:
            file = self._open(part.file)
            is_summed = part.sum is not None and self._verify
            if is_summed and sum_of_part(file, part.offset, part.length) != part.sum:
                raise DamagedError("its checksum is another one")
            view = io.BufferedReader(_View(file, part.offset, part.length))
            return torch.load(view, map_location="cpu", weights_only=not self.trust)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL ([\w.]+)", str(error))  # as torch words it
            if part.region is None and (named or is_summed):
                what = named[1] if named else _first_line(error)
                raise ConfigError(
                    "FS616",
                    f"load: {entry.key} is no plain data: it needs {what}, and loading that could "
                    "run any code. Pass trust=True if you know who wrote it, or allow its class "
                    "with torch.serialization.add_safe_globals. Nothing was changed.",
                ) from error
            raise self._damaged(entry, part, _first_line(error)) from error
        except ConfigError:
            raise
        except Exception as error:  # what a damaged file lets torch raise is anything
            raise self._damaged(entry, part, f"{type(error).__name__}: {error}") from error

    def _open(self, name: str) -> IO[bytes]:
        if name not in self._files:
            saved = self._saved
            path = file_in(saved.folder, name, str(saved.folder / METADATA), trust=self.trust)
            file = self.enter_context(path.open("rb"))
            size = os.fstat(file.fileno()).st_size
            if saved.sizes is not None and self._verify and size != saved.sizes[name]:
                raise DamagedError(f"it has {size} bytes, and had {saved.sizes[name]}")
            self._files[name] = file
        return self._files[name]

    def _damaged(self, entry: Entry, part: Part, why: str) -> StateError:
        path = Path(self._saved.folder) / part.file
        return StateError(
            "FS618",
            f"load: cannot read {entry.key} from {path}: {why}. The file is missing, damaged, or "
            "was replaced meanwhile. Take another checkpoint; nothing was changed.",
        )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _overlap(a: Region, b: Region) -> Region | None:
    starts = tuple(max(x, y) for x, y in zip(a.starts, b.starts, strict=True))
    ends = tuple(
        min(x + n, y + m) for x, n, y, m in zip(a.starts, a.sizes, b.starts, b.sizes, strict=True)
    )
    if any(end <= start for start, end in zip(starts, ends, strict=True)):
        return None
    return Region(starts, tuple(e - s for s, e in zip(starts, ends, strict=True)))


def _within(part: Region, whole: Region) -> tuple[slice, ...]:
    """Return where a part of the tensor lies in a region of it."""
    return tuple(
        slice(s - first, s - first + n)
        for s, n, first in zip(part.starts, part.sizes, whole.starts, strict=True)
    )


class _View(io.RawIOBase):
    """A part of a file, as a file."""

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

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        left = max(0, min(len(buffer), self._length - self._place))
        self._file.seek(self._offset + self._place)
        count: int = self._file.readinto(memoryview(buffer)[:left])  # type: ignore[attr-defined]  # of files opened in binary mode
        self._place += count
        return count

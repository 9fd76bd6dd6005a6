"""Values out of the files of a sharded checkpoint, each one checked before it is used.

Owns files that are open, checksums as they are read, and blocks of tensors put together from the
parts that were saved. It must not know models. One saved part is in memory at a time.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import Tensor

from fsdp2._core.base.errors import ConfigError, FSDPError, StateError
from fsdp2._core.base.fitting import require_representable
from fsdp2._core.base.names import printable
from fsdp2._core.base.regular_files import is_hollow, open_regular
from fsdp2._core.transfer.chunk_plan import Region
from fsdp2.checkpoint._checksums import DamagedError, said, sum_of_part
from fsdp2.checkpoint._pickle_machine import RefusedError
from fsdp2.checkpoint._publish import file_in
from fsdp2.checkpoint._saved import METADATA, Entry, Part, Saved
from fsdp2.checkpoint._torch_files import read_torch_file
from fsdp2.checkpoint._unpickling import not_plain

CUT_DIMS = 5
"""Most dims along which a tensor is in parts: a part has a corner for each choice of ends."""


@dataclass(frozen=True)
class _Open:
    """A file that is open, and what the system said of it then."""

    file: IO[bytes]
    told: os.stat_result


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
        self._files: dict[str, _Open] = {}

    def whole(self, entry: Entry) -> Any:
        """Return a value as it was saved."""
        if entry.shape is None:
            (part,) = entry.parts
            return self._load(entry, part)
        region = Region((0,) * len(entry.shape), entry.shape)
        self._require_covered(entry, region)  # a shape may be of any size, what covers it is not
        made = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        self.fill(entry, region, made)
        return made

    def fill(self, entry: Entry, region: Region, out: Tensor) -> None:
        """Put a region of a saved tensor into ``out``, which has its shape.

        Raises:
            StateError: a file is missing or damaged, or lacks some of the region.
            ConfigError: values that ``out``'s dtype cannot hold.
        """
        self._require_covered(entry, region)
        for part in entry.parts:
            assert part.region is not None
            both = overlap(part.region, region)
            if both is None:
                continue
            found = self._load(entry, part)
            if (
                not isinstance(found, Tensor)
                or found.dtype is not entry.dtype
                or tuple(found.shape) != part.region.sizes
            ):
                raise self._damaged_part(entry, part, "it holds something else")
            source = found[_within(both, part.region)]
            require_representable("load", entry.key, source, out.dtype)
            with torch.no_grad():
                out[_within(both, region)].copy_(source)

    def _require_covered(self, entry: Entry, region: Region) -> None:
        """Raise StateError unless each element of a region lies in one part."""
        inside = [overlap(part.region, region) for part in entry.parts if part.region is not None]
        found = [both for both in inside if both is not None]
        covered, key = sum(both.numel for both in found), printable(entry.key)
        cut = [d for d, size in enumerate(region.sizes) if any(b.sizes[d] < size for b in found)]
        if len(cut) > CUT_DIMS:
            problem = f"it cuts {key} along {len(cut)} dims, and may along {CUT_DIMS}"
        elif covered != region.numel:
            problem = f"it names {covered} of {region.numel} elements of a part of {key}"
        elif covered and corners(found, cut) != corners([region], cut):
            problem = f"two parts of {key} cover the same elements"
        else:
            return
        raise self.damaged(f"{self._saved.folder / METADATA} is damaged: {problem}.")

    def _load(self, entry: Entry, part: Part) -> Any:
        """Return what ``torch.save`` wrote into a part of a file."""
        is_summed = part.sum is not None and self._verify
        try:
            opened = self._open(part.file)
            file = opened.file
            if part.offset + part.length > opened.told.st_size:
                raise DamagedError("it ends too early")
            if part.region is None and not self.trust and is_hollow(opened.told):
                raise DamagedError("it is mostly holes")
            if is_summed and sum_of_part(file, part.offset, part.length) != part.sum:
                raise DamagedError("its checksum is another one")
            if not self.trust:
                verify = self._verify and not is_summed
                return read_torch_file(file, part.offset, part.length, verify=verify)
        except RefusedError as error:
            raise not_plain(printable(entry.key), error) from error
        except (ConfigError, MemoryError):
            raise
        except Exception as error:  # a damaged file lacks entries, has no text, ...
            raise self._damaged_part(entry, part, said(error)) from error
        view = io.BufferedReader(_View(file, part.offset, part.length))
        try:
            return torch.load(view, map_location="cpu", weights_only=False)
        except Exception as error:
            if is_summed:  # it is what was written, and runs code that raises
                raise
            raise self._damaged_part(entry, part, said(error)) from error

    def _open(self, name: str) -> _Open:
        if name not in self._files:
            saved = self._saved
            path = file_in(saved.folder, name, str(saved.folder / METADATA), trust=self.trust)
            file = self.enter_context(open_regular(path))
            told = os.fstat(file.fileno())
            if saved.sizes is not None and self._verify and told.st_size != saved.sizes[name]:
                raise DamagedError(f"it has {told.st_size} bytes, and had {saved.sizes[name]}")
            self._files[name] = _Open(file, told)
        return self._files[name]

    def _damaged_part(self, entry: Entry, part: Part, why: str) -> StateError:
        path = self._saved.folder / part.file
        return self.damaged(
            f"cannot read {printable(entry.key)} from {path}: {why}. The file is missing, or it is "
            "damaged."
        )

    @contextlib.contextmanager
    def making_sense(self) -> Iterator[None]:
        """Around what is made of values: raise StateError if one is something else than it must be.

        With trust, what code in the values raises is not caught.
        """
        try:
            yield
        except (FSDPError, MemoryError):
            raise
        except Exception as error:  # a number where a dict is needed, a name that is a list, ...
            if self.trust:
                raise
            where = self._saved.folder / METADATA
            raise self.damaged(f"what {where} says makes no sense: {said(error)}.") from error

    def damaged(self, problem: str) -> StateError:
        """Return the error for what cannot be read: damaged, or another save's by now."""
        if self._saved.stamp.is_replaced:
            return StateError(
                "FS626",
                f"load: another save replaced {self._saved.folder} while it was read. Call load "
                f"again; nothing was changed. (What was met: {problem})",
            )
        return StateError("FS618", f"load: {problem} Take another checkpoint; nothing was changed.")


def corners(regions: Iterable[Region], dims: Sequence[int]) -> Counter[tuple[int, ...]]:
    """Count the corners of regions: 1, or -1 if it is the end along an odd number of dims.

    Two lists of regions cover each element equally often if and only if their counts are equal: the
    counts are the differences, along all dims, of how often an element is covered.
    """
    found: Counter[tuple[int, ...]] = Counter()
    for region in regions:
        begins, sizes = region.starts, region.sizes
        ends = (((begins[d], 1), (begins[d] + sizes[d], -1)) for d in dims)
        for corner in itertools.product(*ends):
            found[tuple(at for at, _ in corner)] += math.prod(sign for _, sign in corner)
    return found


def overlap(a: Region, b: Region) -> Region | None:
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

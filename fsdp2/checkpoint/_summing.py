"""A writer for ``torch.distributed.checkpoint`` that notes checksums of what it writes.

Owns where the sums come from and where they end up: each rank sums what passes through its files,
and whoever writes the metadata appends all sums to it (see ``_saved``). Files and metadata are
torch's own, and read by torch. This is the only file that imports it, because that takes long.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fsdp2._comm.process_mesh import Grid
from fsdp2.checkpoint._checksums import sum_of_part, tail_of
from fsdp2.checkpoint._saved import METADATA, SUMMED


def write(state: dict[str, Any], folder: Path, main: Grid) -> dict[str, int]:
    """Write a checkpoint; return the sizes of its files, on the first rank, which writes metadata.

    What each rank has to write is planned by DCP, and so are names and metadata. It travels over
    the axes of ``main``: ``torch.distributed.checkpoint.save`` needs one process group of just
    these ranks, and a mesh of several dims in a larger job (a stage of a pipeline) has none.
    """
    writer, planner = SummingWriter(folder), DefaultSavePlanner()
    metadata: Metadata | None = None
    with main.together("checkpoint"):
        planner.set_up_planner(state, writer.storage_meta(), main.is_first)
        writer.set_up_storage_writer(main.is_first)
        mine = writer.prepare_local_plan(planner.create_local_plan())
    plans = main.gather(mine)
    with main.together("checkpoint"):
        if plans is not None:
            plans, metadata = planner.create_global_plan(plans)
            plans = writer.prepare_global_plan(plans)
    mine = main.scatter(plans)
    with main.together("checkpoint"):
        written = writer.write_data(planner.finish_plan(mine), planner).wait()
    results = main.gather(written)
    with main.together("checkpoint"):
        if results is not None and metadata is not None:  # on the first rank
            writer.finish(metadata, results)
    return writer.sizes


class SummingWriter(FileSystemWriter):
    """Writes a checkpoint, and behind its metadata the checksums of all values.

    ``sizes`` are those of all files, on the rank that wrote the metadata.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._files = _SummedFiles()
        self.fs = self._files
        self.sizes: dict[str, int] = {}

    def storage_meta(self) -> StorageMeta | None:
        meta = super().storage_meta()
        return None if meta is None else replace(meta, save_id=f"{SUMMED}{meta.save_id}")

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        summed: Future[list[WriteResult]] = Future()
        summed.set_result([replace(r, storage_data=self._summed(r.storage_data)) for r in results])
        return summed

    def _summed(self, info: Any) -> tuple[Any, int]:
        """Return where torch says that a value lies, and its checksum, for the first rank."""
        path = Path(self.path) / info.relative_path
        length, found = self._files.sums.get((info.relative_path, info.offset), (-1, 0))
        if length != info.length:  # torch has written in other steps than it does today
            with path.open("rb") as file:
                found = sum_of_part(file, info.offset, info.length)
        return info, found

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        summed = [result.storage_data for of_rank in results for result in of_rank]
        plain = [[replace(r, storage_data=r.storage_data[0]) for r in own] for own in results]
        super().finish(metadata, plain)
        told: dict[str, dict[str, Any]] = {}
        for info, found in summed:
            file = told.setdefault(info.relative_path, {"size": 0, "sums": []})
            file["sums"].append([info.offset, info.length, found])
            file["size"] = max(file["size"], info.offset + info.length)
        path = Path(self.path) / METADATA
        with naming(path), path.open("ab") as stream:
            stream.write(tail_of(path.read_bytes(), told))
            stream.flush()
            os.fsync(stream.fileno())
        self.sizes = {name: file["size"] for name, file in told.items()}


class _SummedFiles(FileSystem):
    """Opens files whose streams sum what is written."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, int], tuple[int, int]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with naming(path) as told, super().create_stream(path, mode) as stream:
            if "r" in mode:
                yield stream
            else:
                yield _SummedStream(stream, Path(path).name, self.sums, told)


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[list[OSError]]:
    """Around writes to a file: raise what the system says, with the name of the file.

    torch's archives raise an error of their own over it, about a place where they are not. What is
    put into the list counts as what the system said.
    """
    told: list[OSError] = []
    try:
        yield told
    except Exception as error:
        first = told[0] if told else error
        if isinstance(first, OSError) and first.errno is not None and first.filename is None:
            raise OSError(first.errno, first.strerror, os.fspath(path)) from error
        raise


class _SummedStream:
    """A stream that is asked where it is before and after each value, and sums what lies between.

    ``sums`` takes (file, offset): (length, sum). Asked twice at one place, it begins anew there.
    ``told`` takes what the system says of a write that fails.
    """

    def __init__(
        self,
        stream: Any,
        name: str,
        sums: dict[tuple[str, int], tuple[int, int]],
        told: list[OSError],
    ) -> None:
        self._told_errors = told
        self._stream = stream
        self._name = name
        self._sums = sums
        self._start = self._told = self._sum = 0

    def write(self, data: Any) -> Any:
        self._sum = zlib.crc32(data, self._sum)
        try:
            return self._stream.write(data)
        except OSError as error:
            self._told_errors.append(error)
            raise

    def tell(self) -> int:
        place: int = self._stream.tell()
        if place == self._told:
            self._start, self._sum = place, 0
        else:
            self._sums[self._name, self._start] = (place - self._start, self._sum)
        self._told = place
        return place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

"""Copies of a state in the memory of hosts, each rank's on its own and on a neighbour's.

Owns where copies lie, how they travel, and which of them a job that was started again can use. It
must not know how a checkpoint is read.

[Note: copies at neighbours]
A launcher that starts a job again ends all processes, so a copy must outlive them: it is a file in
a folder that the host keeps in memory. What a rank writes of a save (see ``_contents``) is copied
to host memory at the call; a thread writes it there as a part of a checkpoint, with a report that
describes it in full, and exchanges both with its neighbours over a process group of its own. So
each part lies on two hosts. A *generation* is one such save; it counts once both of all parts are
there, which all ranks know at the next call. Then the generation before goes.

After a start ranks tell each other which parts their hosts have. The newest generation with all
parts is whole. Each rank then gets the parts that its own shards are made of, wherever they lie,
and reads them as a checkpoint, with checksums. So the ranks may be more or fewer than before.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from fsdp2._core.base.arguments import check_count, check_key, check_path
from fsdp2._core.base.errors import ConfigError, UnsupportedError
from fsdp2._core.base.warn import warn
from fsdp2._core.comm.process_mesh import Grid, carrying, operation
from fsdp2._core.transfer.chunk_plan import Region
from fsdp2._core.transfer.redistribute import Grids, checked_together
from fsdp2.checkpoint._agreed import agree, state_of
from fsdp2.checkpoint._background import Room
from fsdp2.checkpoint._checksums import said
from fsdp2.checkpoint._contents import Contents, Piece
from fsdp2.checkpoint._reading import overlap
from fsdp2.checkpoint._saved import Entry, read
from fsdp2.checkpoint._state import check, model_tensors
from fsdp2.checkpoint._writing import REPORT, Progress, part_name, write_metadata, write_part

MEMORY = "/dev/shm"
GENERATION = re.compile(r"(\d+)-of-(\d+)")
"""The name of a generation: when it was saved, in nanoseconds, and on how many ranks."""

MESSAGE_NBYTES = 64 << 20


@dataclass(frozen=True)
class _Found:
    """A generation that is whole: for each part, the ranks whose hosts have it."""

    name: str
    saved_ns: int
    ranks: int
    holders: dict[int, list[int]]


class NeighbourCopies:
    """Keep the last state in the memory of hosts, from which a job that is started again goes on.

    Every so many steps, call ``save``: it returns when the state is copied, and a thread sends the
    copy to a neighbour. After a restart ``load_latest(..., copies=copies)`` loads the newest of
    these copies and the checkpoints in files. The loss of any one host leaves all parts. If two
    neighbours are lost at once, the state comes from files, and a warning says so.

    All ranks of the job make one, and their models lie on all ranks. The memory of a host holds up
    to five times what its ranks write: the copy, and own and neighbour's parts of two generations.

    Args:
        name: of the job: the same after a restart, and another one for other jobs on these hosts.
        memory: a folder in memory that processes do not take with them. ``/dev/shm`` of a container
            is often small.
        distance: the neighbour is so many ranks further, so that it is on another host; None: as
            many as ranks are on a host (``LOCAL_WORLD_SIZE``), or half of the job on a single host.

    Raises:
        ConfigError: a wrong argument; the memory is no folder that can be written to.
    """

    @operation("NeighbourCopies")
    def __init__(
        self, name: str, *, memory: str | os.PathLike[str] = MEMORY, distance: int | None = None
    ) -> None:
        self._world = Grid.world()
        self._number = dist.get_rank() if dist.is_initialized() else 0
        self._room = Room()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._current: Path | None = None  # what the thread has written and exchanged
        self._last: Path | None = None  # what has arrived everywhere
        self._sent_nbytes = 0
        with self._world.together("NeighbourCopies") as same:
            check_key("NeighbourCopies", "name", name)
            check_path("NeighbourCopies", "memory", memory)
            if distance is not None:
                check_count("NeighbourCopies", "distance", distance)
            if not re.fullmatch(r"[\w.-]{1,100}", name):
                raise ConfigError(
                    "FS102",
                    "NeighbourCopies: expected name to be letters, digits, '.', '_' and '-', found "
                    f"{name[:100]!r}.",
                )
            self._home = Path(memory).resolve() / f"fsdp2-{name}"
            try:
                self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    "FS629",
                    f"NeighbourCopies: cannot make {self._home}: {said(error)}. Pass memory=, a "
                    "folder in the host's memory.",
                ) from error
            if self._home.stat().st_uid != os.getuid():
                raise ConfigError(
                    "FS629",
                    f"NeighbourCopies: {self._home} belongs to another user. Pass another name.",
                )
            same.update(name=name, distance=distance)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        (on_a_host,) = self._world.highest(local)
        size = self._world.size
        self._distance = distance or (on_a_host if 0 < on_a_host < size else max(size // 2, 1))
        self._group = dist.new_group(backend="gloo") if size > 1 else None

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank has sent to its neighbour."""
        return self._sent_nbytes

    @operation("NeighbourCopies.save")
    def save(
        self, model: nn.Module, optimizer: Optimizer | None = None, *, extra: Any = None
    ) -> None:
        """Copy the state, and let a thread bring it to the neighbour. Collective.

        It waits for the copies before, if these have not arrived. A failure of theirs is a warning
        on every rank.

        Args:
            model, optimizer, extra: as for ``fsdp2.checkpoint.save``.

        Raises:
            ConfigError: a wrong argument.
            UnsupportedError: the model does not lie on all ranks of the job.
        """
        what = "NeighbourCopies.save"
        with checked_together(what, model) as same:
            check(what, model, optimizer)
            state = state_of(model)
            same.update(has_optimizer=optimizer is not None)
        self._settle()

        def nothing() -> None:
            """Require nothing more."""

        agreed = agree(what, model, optimizer, extra, state, time.time_ns(), nothing)
        contents = agreed.contents
        folder = self._home / f"{agreed.number}-of-{len(contents.ranks)}"
        with agreed.main.together(what):
            if len(contents.ranks) != self._world.size:
                raise UnsupportedError(
                    "FS624",
                    f"{what}: the model lies on {len(contents.ranks)} of {self._world.size} ranks. "
                    "Keep copies of models that lie on all ranks, and save others to files.",
                )
            pieces = [replace(piece, is_common=False) for piece in contents.pieces()]
            pieces, copied = self._room.copies(pieces)
            self._remove_but(self._last, folder)
            folder.mkdir(parents=True, exist_ok=True)
        self._thread = threading.Thread(
            target=self._run,
            args=(folder, contents, pieces, copied),
            name="fsdp2 copies",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the copies of the last ``save`` have arrived, at this rank and from it.

        Raises:
            Exception: they could not be written or sent.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    @operation("NeighbourCopies.remove")
    def remove(self) -> None:
        """Give the memory back, when the job is done. Collective."""
        self._settle()
        with self._world.together("NeighbourCopies.remove"):
            self._room = Room()
        with self._world.together("NeighbourCopies.remove"):  # nobody removes what others still use
            shutil.rmtree(self._home, ignore_errors=True)

    def _settle(self) -> None:
        """Wait until copies have arrived everywhere; say it where they have not."""
        if self._thread is not None:
            self._thread.join()
        text = None
        if self._error is not None:
            text = f"rank {self._number}: {said(self._error)}"
        if not self._world.any_is(text is not None):
            self._last = self._current or self._last
            return
        self._error = self._current = None
        told = [each for each in self._world.collect(text) if each]
        warn(
            "FS630",
            "NeighbourCopies: the last copies did not arrive: "
            f"{'; '.join(told)}. Those before them count.",
        )

    def _remove_but(self, *kept: Path | None) -> None:
        """Remove generations that do not count: ranks of one host may do so at once."""
        for entry in self._home.iterdir() if self._home.is_dir() else ():
            if entry not in kept and GENERATION.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)

    # The thread.

    def _run(
        self, folder: Path, contents: Contents, pieces: list[Piece], copied: torch.Event | None
    ) -> None:
        self._current = None
        try:
            if copied is not None:
                copied.synchronize()
            write_part(folder, contents, pieces, Progress())
            size, number = self._world.size, self._number
            if size > 1:
                to, of = (number + self._distance) % size, (number - self._distance) % size
                self._swap(folder / part_name(number), folder / part_name(of), to, of)
                self._swap(folder / f"{REPORT}{number}", folder / f"{REPORT}{of}", to, of)
            self._current = folder
        except BaseException as error:
            self._error = error

    def _swap(self, mine: Path, its: Path, to: int, of: int) -> None:
        """Send a file to one rank, and get one of another. The name comes when it is whole."""
        nbytes = mine.stat().st_size if mine.exists() else 0
        told, coming = (torch.tensor([n], dtype=torch.int64, device="cpu") for n in (nbytes, 0))
        self._move([(told, to)], [(coming, of)])
        unnamed = its.with_name(f"{its.name}.{self._number}")
        sent = _mapped(mine, nbytes) if nbytes else told[:0]
        got = _made(unnamed, int(coming)) if coming else coming[:0]
        self._move([(sent, to)], [(got, of)])
        self._sent_nbytes += nbytes
        if coming:
            os.replace(unnamed, its)

    def _move(
        self, sends: Iterable[tuple[Tensor, int]], receives: Iterable[tuple[Tensor, int]]
    ) -> None:
        """Send and receive, in messages of a size that all know."""
        works = [
            dist.irecv(part, rank, self._group)
            for tensor, rank in receives
            for part in tensor.split(MESSAGE_NBYTES)
            if part.numel()
        ]
        works += [
            dist.isend(part, rank, self._group)
            for tensor, rank in sends
            for part in tensor.split(MESSAGE_NBYTES)
            if part.numel()
        ]
        for work in works:
            if work is not None:
                work.wait()


# After a start.


def newest(copies: NeighbourCopies, newer_than_ns: int) -> _Found | None:
    """Return the newest generation of which all parts are there. Collective.

    One that was saved before a time counts as none. Warns if copies were lost that are newer.
    """
    mine: dict[str, list[int]] = {}
    for entry in copies._home.iterdir() if copies._home.is_dir() else ():
        if GENERATION.fullmatch(entry.name):
            reports = [path.name for path in entry.glob(f"{REPORT}*")]
            numbers = (name.removeprefix(REPORT) for name in reports)
            mine[entry.name] = sorted(int(each) for each in numbers if each.isdecimal())
    there = copies._world.collect(mine)
    lost: list[str] = []
    for name in sorted({name for one in there for name in one}, reverse=True):
        saved, ranks = map(int, name.split("-of-"))
        if saved <= newer_than_ns:
            break
        holders = {
            number: [rank for rank, one in enumerate(there) if number in one.get(name, ())]
            for number in range(ranks)
        }
        missing = [number for number, hosts in holders.items() if not hosts]
        if not missing:
            copies._last = copies._home / name
            return _Found(name, saved, ranks, holders)
        lost.append(f"of ranks {', '.join(map(str, missing))}")
    if lost:
        warn(
            "FS630",
            f"load_latest: copies in the memory of hosts are not whole: those {lost[0]} "
            "are lost, so the state is loaded from files.",
        )
    return None


@contextlib.contextmanager
def fetched(copies: NeighbourCopies, found: _Found, model: nn.Module) -> Iterator[Path]:
    """Give a folder with the parts of a generation that this rank needs. Collective."""
    source = {number: ranks[0] for number, ranks in found.holders.items()}
    here = copies._home / found.name
    folder = copies._home / f"load-{copies._number}"
    try:
        told: dict[int, bytes] = {}
        with copies._world.together("load_latest"):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for number, rank in source.items():
                if rank == copies._number:
                    told[number] = (here / f"{REPORT}{number}").read_bytes()
        for reports in copies._world.collect(told):
            for number, report in reports.items():
                (folder / f"{REPORT}{number}").write_bytes(report)
        with copies._world.together("load_latest"):
            write_metadata(folder, found.ranks, save_id=found.name)
            saved = read(folder, verify=True, trust=False)
            needed = _parts_of(saved.entries, model)
            lacking = [
                number
                for number in range(found.ranks)
                if part_name(number) in needed and copies._number not in found.holders[number]
            ]
        sizes = saved.sizes or {}
        moves = [
            (number, source[number], rank)
            for rank, numbers in enumerate(copies._world.collect(lacking))
            for number in numbers
        ]
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        with copies._world.together("load_latest"):
            for number, of, to in moves:
                name = part_name(number)
                if of == copies._number:
                    sends.append((_mapped(here / name, sizes[name]), to))
                if to == copies._number:
                    receives.append((_made(folder / name, sizes[name]), of))
            for number in range(found.ranks):
                if part_name(number) in needed and number not in lacking:
                    os.link(here / part_name(number), folder / part_name(number))
        with carrying():
            copies._move(sends, receives)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _mapped(path: Path, nbytes: int) -> Tensor:
    """Return the bytes of a file in memory, without a copy."""
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def _made(path: Path, nbytes: int) -> Tensor:
    """Return the bytes of a new file.

    Raises:
        OSError: there is no memory for it. (A write to a mapping would end the process.)
    """
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    return _mapped(path, nbytes)


def _parts_of(entries: Iterable[Entry], model: nn.Module) -> set[str]:
    """Return the files that hold what this rank loads."""
    tensors = model_tensors(model)[0]
    grids = Grids([*tensors.values()])
    own: dict[str, tuple[tuple[int, ...], Region]] = {}
    for name, tensor in tensors.items():
        if not tensor.is_meta:  # of those any part may be needed
            held = grids.hold(name, tensor)
            own[name] = (held.shape, held.own)
    found: set[str] = set()
    for entry in entries:
        name = entry.path[2] if entry.path[:2] == ("optimizer", "state") else entry.path[-1]
        shape, region = own.get(str(name), (None, None))
        for part in entry.parts:
            has_own = part.region is not None and region is not None and shape == entry.shape
            if not has_own or overlap(part.region, region) is not None:  # type: ignore[arg-type]  # has_own says that both are there
                found.add(part.file)
    return found

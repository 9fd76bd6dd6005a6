"""Copies of a state in host memory: each rank's part is on its own host and on a neighbour's.

[Note: copies on neighbours]
A launcher ends all processes when it restarts a job, so copies are files in a memory-backed folder
of the host. ``NeighbourCopies.save`` copies a rank's part of the state to host memory. A thread
then writes this copy to the folder as two files, a checkpoint's data file and a complete report
(see ``_files``), and exchanges both with the neighbours over a separate process group. Each part is
then on two hosts. The files of one save are a *generation*, which is valid once both copies of
every part exist. All ranks check this in the next ``save``, which then removes older generations.

After a restart, ranks exchange lists of the parts on their hosts, and select the newest generation
with all parts. Each rank fetches the parts that overlap its shards from hosts that have them, and
loads them like a checkpoint, with checksums. The number of ranks may therefore change.
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

from fsdp2._core.base.errors import (
    ConfigError,
    UnsupportedError,
    carrying,
    check_count,
    check_key,
    check_path,
)
from fsdp2._core.base.warn import warn
from fsdp2._core.comm.process_mesh import Grid, operation
from fsdp2._core.transfer.chunk_plan import Region, overlap
from fsdp2._core.transfer.redistribute import Grids
from fsdp2.checkpoint._checksums import said
from fsdp2.checkpoint._contents import Contents, Piece, agree, state_of
from fsdp2.checkpoint._files import (
    REPORT,
    Entry,
    Progress,
    part_name,
    read,
    write_metadata,
    write_part,
)
from fsdp2.checkpoint._save import Room
from fsdp2.checkpoint._state import checked, model_tensors

MEMORY = "/dev/shm"
GENERATION = re.compile(r"(\d+)-of-(\d+)")  # time of the save in ns, and number of ranks
MESSAGE_NBYTES = 64 << 20


@dataclass(frozen=True)
class _Found:
    name: str
    holders: dict[int, list[int]]  # from each part to the ranks whose hosts have it


class NeighbourCopies:
    """Keep the latest state in host memory, so that a restarted job can continue from it.

    Call ``save`` every few steps: it returns once the state is copied, and a thread sends the copy
    to a neighbour. After a restart, ``load_latest(..., copies=copies)`` loads the newest state from
    these copies or from checkpoint files. All parts survive the loss of one host. If two
    neighbours are lost at the same time, the state is loaded from files, with a warning.

    Every rank of the job must construct a ``NeighbourCopies``, and models must be on all ranks. A
    host needs memory for up to five times the data that its ranks write: one copy, and two
    generations of its own parts and of its neighbour's.

    Args:
        name: the job's name, unique on the hosts, and the same after a restart.
        memory: a memory-backed folder that outlives processes (containers: often small).
        distance: the neighbour's offset in ranks, large enough to reach another host. None: the
            number of ranks per host (``LOCAL_WORLD_SIZE``); on a single host, half of the ranks.

    Raises:
        ConfigError: a wrong argument; the folder cannot be created, or belongs to another user.
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
        self._current: Path | None = None  # the generation that the thread has exchanged
        self._last: Path | None = None  # the last generation that arrived on all ranks
        self._sent_nbytes = 0
        with self._world.together("NeighbourCopies") as same:
            check_key("NeighbourCopies", "name", name)
            check_path("NeighbourCopies", "memory", memory)
            if distance is not None:
                check_count("NeighbourCopies", "distance", distance)
            if not re.fullmatch(r"[\w.-]{1,100}", name):
                raise ConfigError(
                    "FS102",
                    "NeighbourCopies: expected name to consist of at most 100 letters, digits, "
                    f"'.', '_' and '-', found {name[:100]!r}.",
                )
            self._home = Path(memory).resolve() / f"fsdp2-{name}"
            try:
                self._home.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    "FS629",
                    f"NeighbourCopies: cannot create {self._home}: {said(error)}. Pass memory=, a "
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
        """Copy the state; a thread then sends the copy to the neighbour. Collective.

        Waits until the previous copies have arrived. If a copy did not arrive, warns on every rank.

        Args:
            model, optimizer, extra: as for ``fsdp2.checkpoint.save``.

        Raises:
            ConfigError: a wrong argument.
            UnsupportedError: the model is not on all ranks of the job.
        """
        what = "NeighbourCopies.save"
        with checked(what, model, optimizer):
            state = state_of(model)
        self._settle()
        main, contents, number = agree(what, model, optimizer, extra, state, time.time_ns())
        folder = self._home / f"{number}-of-{len(contents.ranks)}"
        with main.together(what):
            if len(contents.ranks) != self._world.size:
                raise UnsupportedError(
                    "FS624",
                    f"{what}: the model is on {len(contents.ranks)} of {self._world.size} ranks. "
                    "Use NeighbourCopies only for models that are on all ranks; save other models "
                    "to files.",
                )
            pieces = [replace(piece, is_common=False) for piece in contents.pieces()]
            pieces, copied = self._room.copies(pieces)
            self._remove_but(self._last, folder)
            folder.mkdir(parents=True, exist_ok=True)
        args, name = (folder, contents, pieces, copied), "fsdp2 copies"
        self._thread = threading.Thread(target=self._run, args=args, name=name, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last ``save`` has exchanged its copies with the neighbours.

        Raises:
            Exception: the copies could not be written or exchanged.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    @operation("NeighbourCopies.remove")
    def remove(self) -> None:
        """Delete the copies at the end of the job. Collective."""
        self._settle()
        with self._world.together("NeighbourCopies.remove"):
            self._room = Room()
        with self._world.together("NeighbourCopies.remove"):  # after all ranks have settled
            shutil.rmtree(self._home, ignore_errors=True)

    def _settle(self) -> None:
        """Wait until the copies have arrived on all ranks; warn on every rank if a copy failed."""
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
            f"{'; '.join(told)}. The previous copies remain valid.",
        )

    def _remove_but(self, *kept: Path | None) -> None:
        """Remove all generations but ``kept``. Ranks on one host may do this concurrently."""
        for entry in self._home.iterdir() if self._home.is_dir() else ():
            if entry not in kept and GENERATION.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)

    def _run(
        self, folder: Path, contents: Contents, pieces: list[Piece], copied: torch.Event | None
    ) -> None:
        """Write and exchange copies. Runs in a thread."""
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
        """Send a file and receive another. Rename the received file once it is complete."""
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
        """Send and receive tensors, split into messages of the same size on all ranks."""
        works = [
            begin(part, rank, self._group)
            for begin, moves in ((dist.irecv, receives), (dist.isend, sends))
            for tensor, rank in moves
            for part in tensor.split(MESSAGE_NBYTES)
            if part.numel()
        ]
        for work in works:
            if work is not None:
                work.wait()


def newest(copies: NeighbourCopies, newer_than_ns: int) -> _Found | None:
    """Return the newest complete generation after a time; warn if all are partial. Collective."""
    copies._settle()  # a save in flight is writing files, and sends over the same process group
    mine: dict[str, list[int]] = {}
    for entry in copies._home.iterdir() if copies._home.is_dir() else ():
        if GENERATION.fullmatch(entry.name):
            numbers = [path.name.removeprefix(REPORT) for path in entry.glob(f"{REPORT}*")]
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
            return _Found(name, holders)
        lost.append(f"of ranks {', '.join(map(str, missing))}")
    if lost:
        warn(
            "FS630",
            f"load_latest: the copies in host memory are incomplete: the parts {lost[0]} "
            "are lost. The state is loaded from files.",
        )
    return None


@contextlib.contextmanager
def fetched(copies: NeighbourCopies, found: _Found, model: nn.Module) -> Iterator[Path]:
    """Yield a folder with the parts of a generation that this rank needs. Collective."""
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
            write_metadata(folder, len(found.holders), save_id=found.name)
            saved = read(folder, verify=True, trust=False)
            needed = _parts_of(saved.entries, model)
            own = [number for number in found.holders if part_name(number) in needed]
            lacking = [number for number in own if copies._number not in found.holders[number]]
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
            for number in {*own} - {*lacking}:
                os.link(here / part_name(number), folder / part_name(number))
        with carrying():
            copies._move(sends, receives)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _mapped(path: Path, nbytes: int) -> Tensor:
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def _made(path: Path, nbytes: int) -> Tensor:
    """Create and map a file. Raises OSError if memory is short: later writes would crash."""
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
    return _mapped(path, nbytes)


def _parts_of(entries: Iterable[Entry], model: nn.Module) -> set[str]:
    tensors = model_tensors(model)[0]
    grids = Grids([*tensors.values()])
    own: dict[str, tuple[tuple[int, ...], Region]] = {}
    for name, tensor in tensors.items():
        if not tensor.is_meta:  # a meta tensor may need any part
            held = grids.hold(name, tensor)
            own[name] = (held.shape, held.own)
    found: set[str] = set()
    for entry in entries:
        name = entry.path[2] if entry.path[:2] == ("optimizer", "state") else entry.path[-1]
        shape, region = own.get(str(name), (None, None))
        for part in entry.parts:
            has_own = part.region is not None and region is not None and shape == entry.shape
            if not has_own or overlap(part.region, region) is not None:
                found.add(part.file)
    return found

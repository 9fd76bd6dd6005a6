"""Links between trainers and engine ranks: process groups, files, or the caller's transport.

Owns the links, the headers of buffers, and the checksums of blocks. Independent of plans.

The ranks of a transfer are numbered from 0: first the trainers, then the engine ranks.

[Note: order of messages]
The two ranks of a pair process their messages in the same order: by phase, round, sender, receiver.
A transport with blocking sends therefore cannot deadlock. If a rank is lost, the others skip it and
continue, and each of them detects at the end that the version did not arrive.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2._core.base import torch_comm
from fsdp2._core.base.errors import (
    LostRank,
    StateError,
    carrying,
    check_count,
    check_number,
    check_path,
    wrong_type,
)
from fsdp2._core.comm.process_mesh import wire_device
from fsdp2._core.params.layout import align
from fsdp2.checkpoint._checksums import AT_ONCE, BLOCK, memory_of
from fsdp2.weights._route import ALIGNED, Buffer

WHOLE, PART, STOPPED = 0, 1, 2
"""Contents of buffers: all data; only changed blocks; no data, because the sender failed."""


class Head(NamedTuple):
    """The header sent before a buffer."""

    plan: int
    version: int
    round: int
    kind: int
    nbytes: int
    check: int


class Rooms:
    """Memory for the buffers of two rounds; ``rounds`` maps peers to buffers, per round."""

    def __init__(self, buffers: Mapping[int, Sequence[Buffer]], device: torch.device) -> None:
        self.rounds = [
            {other: some[number] for other, some in buffers.items() if number < len(some)}
            for number in range(max(map(len, buffers.values()), default=0))
        ]
        self._device = device

    @functools.cached_property
    def slabs(self) -> Tensor:
        """Memory for two rounds, each with the size of the largest: ``[rounds, bytes]``."""
        sizes = [[align(one.nbytes, ALIGNED) for one in due.values()] for due in self.rounds]
        most = max(map(sum, sizes), default=0)
        return torch.empty(len(self.rounds[:2]), most, dtype=torch.uint8, device=self._device)

    def of(self, number: int) -> dict[int, Tensor]:
        """Return the memory of each buffer in a round. Rounds alternate between two areas."""
        found, start = {}, 0
        for other, buffer in self.rounds[number].items():
            found[other] = self.slabs[number % 2][start : start + buffer.nbytes]
            start += align(buffer.nbytes, ALIGNED)
        return found


def view_in(memory: Tensor, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Return a view of a buffer's bytes as a tensor."""
    nbytes = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + nbytes].view(dtype).view(tuple(shape))


class Transport(Protocol):
    """Interface of an object that a caller may pass instead of a process group.

    ``rank`` is the peer's number: trainers are numbered from 0, and engine ranks as in
    ``receivers`` of ``Plan.send`` (by default, after the trainers). Buffers are uint8 tensors on
    the host. A send may return after copying the buffer, or after the peer has received it.
    """

    def send(self, rank: int, buffer: Tensor) -> None: ...

    def receive(self, rank: int, buffer: Tensor) -> None:
        """Receive the rank's next message into the buffer, which has the size of the message."""


# Blocks that changed.


def pack_changed(buffer: Tensor, changed: Tensor) -> int:
    """Move the changed blocks to the start of a buffer, in place. Append the bytes after the last
    full block, and a map of the changed blocks. Return the total number of bytes: 0 if nothing
    changed, or the buffer's size if packing saves too little.
    """
    if not changed.any():
        return 0
    blocks, last = _blocks_of(buffer)
    where = changed[: len(blocks)].nonzero().flatten()
    moved, rest = where.numel() * BLOCK, torch.cat([last, changed.to(torch.uint8)])
    nbytes = moved + rest.numel()
    if 2 * nbytes > buffer.numel():
        return buffer.numel()
    for start in range(0, where.numel(), AT_ONCE):  # never overwrites a block still to be moved
        some = where[start : start + AT_ONCE]
        blocks[start : start + some.numel()] = blocks[some]
    buffer[moved:nbytes] = rest
    return nbytes


def unpack_changed(packed: Tensor, buffer: Tensor) -> None:
    """Write the changed blocks into a buffer that contains the previous values."""
    if packed.numel():
        blocks, last = _blocks_of(buffer)
        changed = packed[packed.numel() + -buffer.numel() // BLOCK :]
        where = changed[: len(blocks)].nonzero().flatten()
        moved = where.numel() * BLOCK
        blocks[where] = packed[:moved].view(-1, BLOCK)
        last.copy_(packed[moved : moved + last.numel()])


def _blocks_of(buffer: Tensor) -> tuple[Tensor, Tensor]:
    """Return the full blocks of a buffer, and the remaining bytes."""
    whole = buffer.numel() // BLOCK
    return buffer[: whole * BLOCK].view(whole, BLOCK), buffer[whole * BLOCK :]


# Links.


class Row(NamedTuple):
    """A rank's entry in the handshake."""

    is_engine: int
    number: int
    plan: int
    version: int  # the version that a trainer sends (0: the next) or an engine rank has
    since: int = 0
    others: tuple[int, ...] = ()  # the ``receivers`` passed to ``Plan.send``


Messages = Mapping[int, Tensor]
"""The byte buffer for each peer number."""
Flight = list[tuple[list[int], Any, object]]
"""Sends and receives in flight: numbers of the peers, works, and tensors to keep alive."""


class Link:
    """The synchronous connection of one rank to the others, over the caller's ``Transport``.

    ``number`` is this rank's number in the transfer. ``lost`` maps the number of each rank that can
    no longer be reached to the error.
    """

    def __init__(self, group: Any, device: torch.device, names: Sequence[int], *ranks: int) -> None:
        trainers, engines, number = ranks
        self.trainers, self.number = range(trainers), number
        self.engines = range(trainers, trainers + engines)
        self._group, self.device = group, device
        self.lost: dict[int, Exception] = {}
        self._names = {each: each for each in range(trainers + engines)}  # ranks in the group
        self._names.update(zip(self.engines, names, strict=False))
        getattr(group, "begin", lambda _: None)(self._names[number])

    def meet(self, row: Row) -> list[Row]:
        """Exchange rows; return the received rows and this rank's own. Collective. If the plans in
        the rows differ, every rank that received them raises StateError.
        """
        rows = self._exchange(row)
        plans = sorted({each.plan for each in rows})
        if len(plans) > 1:
            raise StateError(
                "FS634",
                f"weights: expected the same plan on all ranks, found plans {plans}. Pass the "
                "to_json() of the trainers' plan to the engine ranks.",
            )
        return rows

    def post(self, sends: Messages, receives: Messages | None = None) -> Flight:
        """Start sends and receives, except to and from lost ranks. Call ``wait`` later."""
        due: list[tuple[Any, int, Tensor]] = [(dist.isend, *one) for one in sends.items()]
        due += [(dist.irecv, *one) for one in (receives or {}).items()]
        due = [each for each in due if each[1] not in self.lost and each[2].numel()]
        flight: Flight = []
        # on a device, start all in one batch; on the host, one by one, to know which one failed
        for some in [[each] for each in due] if self.device.type == "cpu" else [due] if due else []:
            others = [other for _, other, _ in some]
            try:
                flight += [(others, work, some) for work in self._start(some)]
            except Exception as error:
                self.lost |= dict.fromkeys(others, error)
        return flight

    def wait(self, flight: Flight) -> None:
        """Wait for all operations. Record the peers of failed operations in ``lost``."""
        for others, work, _ in flight:
            try:
                with carrying():
                    work.wait()
            except Exception as error:
                self.lost |= {o: error for o in others if o not in self.lost}

    def ints(self, numbers: Sequence[int]) -> Tensor:
        """Return ints as a tensor of bytes."""
        return torch.tensor(numbers, dtype=torch.int64, device=self.device).view(torch.uint8)

    def tell(self, numbers: Sequence[int], others: Iterable[int]) -> None:
        """Send a few ints to each of the others."""
        self.wait(self.post(dict.fromkeys(others, self.ints(numbers))))

    def hear(self, count: int, others: Iterable[int]) -> dict[int, list[int]]:
        """Receive a few ints from each of the others; the result omits lost ranks."""
        rooms = {o: torch.zeros(count, dtype=torch.int64, device=self.device) for o in others}
        self.wait(self.post({}, {o: room.view(torch.uint8) for o, room in rooms.items()}))
        return {o: room.tolist() for o, room in rooms.items() if o not in self.lost}

    def _exchange(self, row: Row) -> list[Row]:
        own = [*row[:5], *(row.others or [-1] * len(self.engines))]
        others = self.trainers if row.is_engine else self.engines
        if not row.is_engine:
            self.tell(own, others)
        heard = self.hear(len(own), others).values()
        rows = [Row._make([*flat[:5], tuple(flat[5:])]) for flat in heard]
        for each in rows:
            told = zip(self.engines, each.others, strict=True)
            self._names |= {number: name for number, name in told if name >= 0}
        if row.is_engine:
            self.tell(own, others)
        if self.lost:
            raise next(iter(self.lost.values()))
        return [row, *rows]

    def _start(self, messages: Sequence[tuple[Any, int, Tensor]]) -> Sequence[Any]:
        """Start ``dist.isend`` or ``dist.irecv`` per message; return the works to wait for."""
        for act, other, data in messages:
            start = self._group.send if act is dist.isend else self._group.receive
            try:
                start(self._names[other], data)
            except Exception as error:
                raise LostRank(f"{type(error).__name__}: {error}") from error
        return ()


class GroupLink(Link):
    """A link over a process group that contains exactly the ranks of the transfer."""

    def _exchange(self, row: Row) -> list[Row]:
        ranks = dist.get_process_group_ranks(self._group)
        given = [*row.others, *[-1] * len(ranks)][: len(ranks)]  # same length on every rank
        own = torch.tensor([*row[:5], *given], device=self.device)
        rows = [torch.empty_like(own) for _ in ranks]
        with carrying():
            dist.all_gather(rows, own, group=self._group)
        flat = [each.tolist() for each in rows]
        found = [Row._make([*f[:5], tuple(one for one in f[5:] if one >= 0)]) for f in flat]
        numbers = [each.number + len(self.trainers) * each.is_engine for each in found]
        self._names = dict(zip(numbers, ranks, strict=True))
        engines = tuple(self._names.get(number, -1) for number in self.engines)
        is_right = {each.others for each in found} <= {(), engines}
        if not is_right or sorted(self._names) != [*self.trainers, *self.engines]:
            raise StateError(
                "FS634",
                f"weights: the group has the ranks {ranks}, but the plan has "
                f"{len(self.trainers)} trainers and {len(self.engines)} engine ranks (found: "
                f"{self._names}). On all ranks, pass a group that contains exactly the planned "
                "ranks. As `receivers`, pass the global rank of each engine rank, in the order of "
                "the destination.",
            )
        return found

    def _start(self, messages: Sequence[tuple[Any, int, Tensor]]) -> Sequence[Any]:
        names, pg = self._names, self._group
        ops = [dist.P2POp(act, data, names[other], pg) for act, other, data in messages]
        with carrying():
            return dist.batch_isend_irecv(ops)


def link_of(
    who: str, group: object, receivers: Sequence[int], device: torch.device, *ranks: int
) -> Link:
    """Return the link over a process group or the caller's transport."""
    host = torch.device("cpu")
    if isinstance(group, dist.ProcessGroup):
        found = wire_device(group, device)
        is_host = torch_comm.is_gloo(group, found.type)
        return GroupLink(group, host if is_host else found, (), *ranks)
    if not callable(getattr(group, "send", None)) or not callable(getattr(group, "receive", None)):
        raise wrong_type(who, "group", "a process group, or an object with send and receive", group)
    return Link(group, host, receivers, *ranks)


class Files:
    """A transport over files in a folder, for jobs on one node. Use ``/dev/shm`` for shared memory.

    A rank writes a buffer for a peer into the folder, and continues when the peer has read it.

    Args:
        folder: the same on all ranks; created if missing.
        timeout: seconds to wait for a peer.
    """

    def __init__(self, folder: str | os.PathLike[str], timeout: float = 300.0) -> None:
        self.folder = Path(check_path("Files", "folder", folder))
        self.timeout = check_number("Files", "timeout", timeout, "seconds", 0.0)
        self._me = -1

    def begin(self, rank: int) -> None:
        """Set this rank's number; remove files left by an earlier process that was killed."""
        self._me = check_count("Files", "rank", rank, 0)
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in self.folder.glob(f"{rank}-to-*"):
            path.unlink(missing_ok=True)

    def send(self, rank: int, buffer: Tensor) -> None:
        place = self._path(rank, buffer, sends=True)
        part, whole = place.with_suffix(".part"), buffer.contiguous()
        part.write_bytes(memory_of(whole))
        part.rename(place)
        try:
            self._wait(rank, lambda: not place.exists())
        finally:  # otherwise a later transfer could read the file
            place.unlink(missing_ok=True)

    def receive(self, rank: int, buffer: Tensor) -> None:
        place = self._path(rank, buffer, sends=False)
        self._wait(rank, place.exists)
        with open(place, "rb") as file:
            if file.readinto(memory_of(buffer)) != buffer.numel() or file.read(1):
                raise EOFError(f"{place} does not have the expected size of {buffer.numel()} B")
        place.unlink()

    def _path(self, rank: int, buffer: object, *, sends: bool) -> Path:
        """Return the path of a message; check the arguments."""
        check_count("Files", "rank", rank, 0)
        if not isinstance(buffer, Tensor) or buffer.dtype != torch.uint8:
            raise wrong_type("Files", "buffer", "a tensor of torch.uint8", buffer)
        sender, receiver = (self._me, rank) if sends else (rank, self._me)
        return self.folder / f"{sender}-to-{receiver}"

    def _wait(self, rank: int, there: Any) -> None:
        due, pause = time.monotonic() + self.timeout, 1e-4
        while not there():
            if time.monotonic() > due:
                raise TimeoutError(f"rank {rank}: timed out after {int(self.timeout * 1000)} ms")
            time.sleep(pause)
            pause = min(2 * pause, 0.01)

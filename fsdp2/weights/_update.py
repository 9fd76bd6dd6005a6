"""An update of an engine: trainers send a version, and engine ranks assemble it.

Contains the plan of a model, the trainers' and the engine's side of an update, the checksums of the
values that engine ranks have, and the vote of engine ranks.

[Note: protocol of an update]
An update begins with a handshake, in which each rank reports its number, plan and version. In the
rounds that follow, a header of a few ints precedes each buffer. At the end, engine ranks vote on
whether all of them have received everything, and report the result to the trainers. A trainer that
fails reports the failure in place of its next header, so that engine ranks do not wait for it.

[Note: all or none]
An engine rank that has received a complete version votes for it. Each engine rank sends votes to
every other engine rank twice: first its own vote, then all votes that it has received. If a rank
dies during the first exchange, when its vote has reached only some ranks, the second exchange
spreads this vote to the others. A rank commits a version if it has all votes, all votes are in
favour, and every other rank has received this rank's vote.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

import fsdp2.weights._wire as wire
from fsdp2._core.base.errors import (
    ConfigError,
    StateError,
    check_count,
    check_device,
    check_flag,
    check_function,
    check_key,
    named,
    wrong_value,
)
from fsdp2._core.base.names import cleaned, named_parameters
from fsdp2._core.base.warn import warn
from fsdp2._core.comm.process_mesh import operation
from fsdp2._core.engine.between_steps import require_idle
from fsdp2._core.transfer.chunk_plan import Region
from fsdp2._core.transfer.redistribute import Grids, LocalShard, checked_together
from fsdp2._tools.plan.hardware import hardware_for
from fsdp2.checkpoint._checksums import digests_of, sum_of_tensor
from fsdp2.checkpoint._save import Room, checked_timeout
from fsdp2.weights._layout import PLAN, Layout, ints_of, layouts_of, names_in
from fsdp2.weights._route import FORMAT, Buffer, Figures, Piece, Route, Source, number_of
from fsdp2.weights._wire import Head, Row, Transport

SEND, RECEIVE = "weights.send", "weights.receive"
MOST = (1 << 63) - 1  # ranks exchange versions as int64
UNKNOWN, AGAINST, ANY = -1, 0, 1 << 62
"""Votes that are not version numbers. ``ANY`` is the vote of a rank that receives nothing."""
Callback = Callable[[str, tuple[int, ...], Tensor], Tensor]
Came = tuple[int, Head, Buffer, Tensor]
"""A trainer, the header of its buffer, the buffer, and the received bytes."""

# The plan.


def plan(
    model: nn.Module,
    destination: Sequence[Layout],
    *,
    max_bytes: int = 256 << 20,
    nodes: Sequence[int] | None = None,
    hardware: object = None,
) -> Plan:
    """Plan the transfer of a model's weights to an inference engine with a different layout.

    Collective over the ranks of the model (the trainers). Call it once, before any transfer.
    Trainers are numbered by their position in the model's largest mesh. No rank assembles a full
    parameter: each trainer sends the parts of its own shards that engine ranks need.

    Args:
        model: a sharded model, or any module; its parameters may be DTensors.
        destination: for each engine rank, its tensors by name; the same on every trainer. See
            ``Spec`` and ``tensor_parallel``.
        max_bytes: limit for the buffers on each trainer and engine rank. Two rounds are in memory
            at a time, and share this limit.
        nodes: the node number of each trainer, followed by those of the engine ranks. If several
            trainers hold the same values, a trainer on the engine rank's node sends them.
        hardware: a machine, as for ``fsdp2.plan``; ``print(plan)`` then also estimates seconds.

    Raises:
        ConfigError: a box does not exist, or occurs twice; parts do not add up to a tensor; a dtype
            cannot be cast; ``max_bytes`` is too small for the number of ranks; ranks pass different
            destinations.
        StateError: the call is inside a forward or a backward; a parameter is on the meta device.
        UnsupportedError: a parameter is a partial sum, or a subclass that wraps other tensors.
    """
    with operation(PLAN):
        with checked_together(PLAN, model) as same:
            require_idle(model, PLAN)
            layouts = layouts_of(destination)
            check_count(PLAN, "max_bytes", max_bytes)
            nodes = None if nodes is None else ints_of(PLAN, "nodes", nodes)
            grids, held = _held(model, names_in(layouts))
            same.update(max_bytes=max_bytes, nodes=nodes, destination=number_of(layouts))
        trainers, sources = _common(grids, held.values())
        names = {name: shard.name for name, shard in held.items()}
        route = Route(sources, layouts, len(trainers), max_bytes, nodes, names)
    me = trainers.index(dist.get_rank() if dist.is_initialized() else 0)
    return Plan(model, route, me, hardware_for(hardware))


def _held(model: nn.Module, names: Iterable[str]) -> tuple[Grids, dict[str, LocalShard]]:
    """Return the local shards of the named tensors. Tied tensors get their first name."""
    params = cleaned(dict(model.named_parameters(remove_duplicate=False)))
    found: dict[str, Tensor] = cleaned(dict(model.named_buffers())) | params
    first = {id(tensor): name for name, tensor in reversed(found.items())}
    grids = Grids(list(params.values()))
    known = [name for name in dict.fromkeys(names) if name in found]
    return grids, {name: grids.hold(first[id(found[name])], found[name]) for name in known}


def _common(grids: Grids, shards: Iterable[LocalShard]) -> tuple[list[int], list[Source]]:
    """Return the global rank of each trainer, and the sources of all trainers.

    Sources differ between trainers if experts are on separate meshes. Raise ConfigError if ranks
    have different parameters with the same name.
    """
    trainers = grids.ranks_of(grids.main) or list(range(grids.main.size))
    own = []
    for shard in shards:
        ranks = tuple(map(trainers.index, grids.ranks_of(shard.grid) or trainers))
        own.append(Source(shard.name, shard.shape, shard.dtype, shard.blocks, ranks))
    number = number_of(own)
    most, least = grids.main.highest(number, -number)
    if most == -least:
        return trainers, own
    found: dict[str, dict[int, Source]] = defaultdict(dict)
    for trainer, sources in enumerate(grids.main.collect(own)):
        for source in sources:
            found[source.name][trainer] = source
    common = []
    for name, holders in sorted(found.items()):
        source, *others = dict.fromkeys(holders.values())
        if others:
            raise ConfigError(
                "FS625",
                f"{PLAN}: {name} is not the same parameter on all ranks: found shape "
                f"{others[0].shape} on trainers {others[0].ranks}, and {source.shape} on "
                f"{source.ranks}. Give different parameters different names.",
            )
        ranks = tuple(rank if rank in holders else -1 for rank in source.ranks)
        common.append(replace(source, ranks=ranks))
    return trainers, common


class Plan:
    """The plan of a transfer of weights to an engine, returned by ``weights.plan``.

    ``print(plan)`` shows its cost.

    Attributes:
        figures: the planned cost. See ``Figures``.
        version: the last version that all engine ranks acknowledged; 0 before the first.
        unused: names of parameters that no engine rank uses.
    """

    def __init__(self, model: nn.Module, route: Route, number: int, hardware: object) -> None:
        self._hardware = hardware
        self.version = 0
        self.unused = [name for name in named_parameters(model) if name not in route.wires]
        self._model, self._route, self._number = model, route, number
        found = [route.buffers(engine, number) for engine in range(len(route.destination))]
        ranks = enumerate(found, route.trainers)
        self._buffers = {rank: own[number] for rank, own in ranks if own}
        self._kept: dict[int, tuple[int, list[Tensor]]] = {}  # versions and checksums by rank
        self._room = Room()
        self._last: SendHandle | None = None  # the background update

    @cached_property
    def figures(self) -> Figures:
        return Figures(self._route, self._hardware)

    def __str__(self) -> str:
        return str(self.figures)

    def to_json(self, index: int | None = None) -> str:
        """Return the plan for engine ranks, as JSON of ints and strings.

        For each engine rank, ``of`` contains its ``tensors`` (name, shape, dtype, and whether some
        elements are zeros that are not sent), and a list of buffers for each trainer that sends to
        it. A buffer is a size in bytes, and a list of entries (tensor, start, shape, dtype,
        offset). An entry's values are at its offset in the buffer, in row-major order, and belong
        to the tensor's box with this start and shape. Reading a buffer requires only numpy.

        Args:
            index: an engine rank; None includes all engine ranks.
        """
        engines = len(self._route.destination)
        if index is not None and check_count("to_json", "index", index, 0) >= engines:
            raise wrong_value("to_json", "index", f"one of {engines} engine ranks", index)
        return self._route.to_json(index)

    def send(
        self,
        group: dist.ProcessGroup | Transport,
        receivers: Sequence[int] | None = None,
        *,
        version: int | None = None,
        since: int | None = None,
        callback: Callback | None = None,
        background: bool = False,
    ) -> SendHandle:
        """Send the current weights; engine ranks call ``Receiver.receive``.

        Collective over the trainers and the engine ranks. If the engine's dtype is narrower, values
        are cast before they are sent. Unless ``background`` is True, the call returns once every
        engine rank has the complete version.

        Args:
            group: a process group of exactly the trainers and the engine ranks, which nothing else
                uses during the call; or an object with ``send`` and ``receive`` (``Transport``).
            receivers: the global rank of each engine rank, in the order of the destination. None:
                the ranks that engine ranks report; with a transport, the numbers after the
                trainers' numbers.
            version: a positive number for this version; None increments the last version.
            since: a version, such as ``plan.version``. Engine ranks that have this version receive
                only the changed 256 B blocks of a buffer, unless more than half of the buffer
                changed. Other engine ranks receive everything.
            callback: maps a parameter's name, the start of a box in it, and the box's values to the
                values to send. Called on trainers, in a thread if ``background`` is True.
            background: copy this rank's values to host memory, and send them from a thread.
                Training may continue; a later ``send`` waits for this one.

        Raises:
            ConfigError: an argument has a wrong type or value.
            StateError: the group or a rank's plan does not match; the call is inside a step; the
                version arrived incomplete, and engine ranks keep the previous version.
            LostRank: another rank exited or cannot be reached.
        """
        with operation(SEND):
            if self._last is not None:
                self._last._settle()
            with checked_together(SEND, self._model) as same:
                row = self._row(receivers, version, since)
                check_function(SEND, "callback", callback)
                check_flag(SEND, "background", background)
                require_idle(self._model, SEND)
                shards = self._shards()
                same.update(version=version, since=since, background=background)
            device = next((shard.local.device for shard in shards.values()), torch.device("cpu"))
            sizes = self._route.trainers, len(self._route.destination)
            link = wire.link_of(SEND, group, row.others, device, *sizes, self._number)
            handle = SendHandle()
            sending = _Sending(self, link, row, shards, callback, handle)
            if not background:
                handle._run(sending)
                handle.wait()
                return handle
            copies, sending.copied = self._room.copies_of([one.local for one in shards.values()])
            pairs = zip(shards.items(), copies, strict=True)
            sending.shards = {name: replace(one, local=copy) for (name, one), copy in pairs}
            threading.Thread(target=handle._run, args=(sending,)).start()
            self._last = handle
            return handle

    def _row(self, receivers: Sequence[int] | None, version: int | None, since: int | None) -> Row:
        """Check the arguments; return this rank's entry in the handshake."""
        engines = len(self._route.destination)
        others = () if receivers is None else ints_of(SEND, "receivers", receivers)
        if receivers is not None and not len({*others}) == len(others) == engines:
            raise wrong_value(SEND, "receivers", f"{engines} different ranks", receivers)
        for name, value, low in (("version", version, 1), ("since", since, 0)):
            if value is not None and check_count(SEND, name, value, low) > MOST:
                raise wrong_value(SEND, name, f"an int of at most {MOST}", value)
        return Row(0, self._number, self._route.number, version or 0, since or 0, others)

    def _shards(self) -> dict[str, LocalShard]:
        """Return the current shards that this rank sends from."""
        names = (p.name for some in self._buffers.values() for b in some for p, _ in b.entries)
        _, shards = _held(self._model, names)
        for shard in shards.values():
            planned = self._route.sources[shard.name]
            if (shard.blocks, shard.dtype) != (planned.blocks, planned.dtype):
                raise StateError(
                    "FS634",
                    f"{SEND}: {shard.name} was planned as {planned.dtype} of shape {planned.shape} "
                    "and has changed since. Make a new plan with weights.plan.",
                )
        return shards


# The trainers' side.


@dataclass(eq=False)
class _Sending:
    """One update on one trainer. See [Note: protocol of an update].

    ``copied`` is recorded after the device-to-host copies of shards. For each engine rank, ``has``
    contains the current version, and ``new`` the checksums of the values sent, by round.
    """

    owner: Plan
    link: wire.Link
    row: Row
    shards: dict[str, LocalShard]
    callback: Callback | None
    handle: SendHandle
    copied: torch.Event | None = None
    version: int = 0
    has: dict[int, int] = field(default_factory=dict)
    new: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    @torch.no_grad()
    def run(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()
        rows = self.link.meet(self.row)
        self.has = {self.link.engines[r.number]: r.version for r in rows if r.is_engine}
        self.version = self.row.version or 1 + max([self.owner.version, *self.has.values()])
        self._finish(self._send_rounds())

    def _send_rounds(self) -> Exception | None:
        """Send all rounds. If this rank fails, notify engine ranks, and return the error."""
        link, error = self.link, None
        flight: wire.Flight = []
        rooms = wire.Rooms(self.owner._buffers, link.device)
        for number, due in enumerate(rooms.rounds):
            try:
                heads, payloads = self._pack(rooms, number)
            except Exception as caught:  # the callback failed, or memory ran out
                error = caught
                stopped = Head(self.row.plan, self.version, number, wire.STOPPED, 0, 0)
                heads, payloads = dict.fromkeys(due, link.ints(stopped)), {}
            link.wait(flight)
            flight = link.post(heads) + link.post(payloads)
            self.handle.nbytes += sum(data.nbytes for data in (*heads.values(), *payloads.values()))
            if error is not None:
                break
        link.wait(flight)
        return error

    def _pack(self, rooms: wire.Rooms, number: int) -> tuple[wire.Messages, wire.Messages]:
        """Return the header and payload for each engine rank in a round."""
        heads, payloads = {}, {}
        for other, memory in rooms.of(number).items():
            buffer = rooms.rounds[number][other]
            for piece, offset in buffer.entries:
                wire.view_in(memory, offset, piece.dtype, piece.made).copy_(self._values_of(piece))
            digests = digests_of(memory)
            nbytes, since = buffer.nbytes, self.row.since
            version, before = self.owner._kept.get(other, (0, []))
            if since and version == self.has.get(other) == since:
                nbytes = wire.pack_changed(memory, digests != before[number].to(digests.device))
            self.new[other].append(digests.cpu())
            kind = wire.WHOLE if nbytes == buffer.nbytes else wire.PART
            check = sum_of_tensor(self.new[other][-1])
            head = Head(self.row.plan, self.version, number, kind, nbytes, check)
            heads[other], payloads[other] = self.link.ints(head), memory[:nbytes]
        return heads, payloads

    def _values_of(self, piece: Piece) -> Tensor:
        shard = self.shards[piece.name]
        values = shard.local[piece.region.inside(shard.own)]
        if self.callback is not None:
            values = self.callback(shard.name, piece.region.starts, values)
            if not isinstance(values, Tensor) or tuple(values.shape) != piece.region.sizes:
                expected = f"to return a tensor of shape {piece.region.sizes} for {piece.name}"
                raise wrong_value(SEND, "callback", expected, values)
        return values.transpose(-1, -2) if piece.transposed else values

    def _finish(self, error: Exception | None) -> None:
        """Receive the result from engine ranks, and record the versions that they have."""
        owner, link = self.owner, self.link
        told = link.hear(2, link.engines)
        if [version for version, _ in told.values()] == [self.version] * len(link.engines):
            owner.version = self.handle.version = self.version
            owner._kept = {other: (self.version, new) for other, new in self.new.items()}
            return
        for lost in link.lost:
            owner._kept.pop(lost, None)
        for first in (error, *link.lost.values()):
            if first is not None:
                raise first
        has = {link.engines.index(number): version for number, (_, version) in told.items()}
        raise StateError(
            "FS635",
            f"weights.send: version {self.version} arrived incomplete: engine ranks now have "
            f"versions {has}. Fix the first error that any rank raised, and send again.",
        )


class SendHandle(Future[None]):
    """An update in flight, returned by ``Plan.send``.

    A ``concurrent.futures.Future``: ``done()`` is True once the update has arrived or failed, and
    ``exception()`` returns the error.

    Attributes:
        version: the version sent; 0 until it has arrived.
        nbytes: the number of bytes that this rank sent.
    """

    version = nbytes = 0
    _is_told = False

    def wait(self, timeout: float | None = None) -> None:
        """Wait until all engine ranks have the version.

        Raises:
            StateError: the version did not arrive. Other errors of ``Plan.send`` are raised too.
            TimeoutError: the update is still in flight after ``timeout`` seconds.
        """
        self.exception(checked_timeout(timeout))
        self._is_told = True
        self.result()

    def _run(self, sending: _Sending) -> None:
        try:
            with named(SEND):
                sending.run()
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(None)

    def _settle(self) -> None:
        """Wait until this update ends; warn if it failed and ``wait`` was not called."""
        error = self.exception()
        if error is not None and not self._is_told:
            self._is_told = True
            text = getattr(error, "text", error)  # an FSDPError's text without its code
            warn("FS636", f"weights.send: a background update failed: {text}")


# The engine's side.


class Receiver:
    """Receive weights on one rank of an engine.

    Args:
        text: the result of ``Plan.to_json`` on a trainer.
        index: the index of this engine rank in the plan's destination.
        device: the device of the tensors.

    Attributes:
        version: the current version; 0 before the first.
        tensors: the tensors by name. ``receive`` replaces them and never writes to them.

    Raises:
        ConfigError: ``text`` is not the result of ``Plan.to_json``, or lacks this engine rank.
    """

    def __init__(self, text: str, index: int, device: torch.device | str = "cpu") -> None:
        check_key("Receiver", "text", text)
        self._index = check_count("Receiver", "index", index, 0)
        self._device = check_device("Receiver", "device", device)
        try:
            values = json.loads(text)
            own = values["of"][str(index)]
            assert values["format"] == FORMAT
        except (ValueError, KeyError, TypeError, AssertionError) as error:
            expected = f"a result of Plan.to_json() that includes engine rank {index}"
            raise wrong_value("Receiver", "text", expected, text) from error
        self.version = 0
        self.tensors: dict[str, Tensor] = {}
        self._is_sound = True  # False once the tensors may have been modified
        self._number: int = values["plan"]
        trainers: int = values["trainers"]
        self._ranks = trainers, int(values["receivers"]), trainers + index
        self._made: list[Any] = own["tensors"]
        self._buffers = {
            int(trainer): [Buffer(entries, nbytes) for nbytes, entries in some]
            for trainer, some in own["senders"].items()
        }

    def receive(self, group: dist.ProcessGroup | Transport) -> dict[str, Tensor]:
        """Receive one version, which trainers send with ``Plan.send``.

        The new version is assembled in separate memory. Returns its tensors once every engine rank
        has the complete version. If trainers pass ``since``, do not modify the returned tensors.

        Args:
            group: the trainers' process group, or an object with ``send`` and ``receive``.

        Raises:
            StateError: the version is incomplete on some engine rank, a checksum is wrong, or the
                group or the plan does not match. The previous version is unchanged.
            LostRank: another rank exited or cannot be reached. The previous version is unchanged.
        """
        link = wire.link_of(RECEIVE, group, (), self._device, *self._ranks)
        with named(RECEIVE), torch.no_grad():
            link.meet(Row(1, self._index, self._number, self.version * self._is_sound))
            update = _Update(self, link)
            update.receive()
            version = update.vote()
            link.tell([version, version or self.version], link.trainers)
            if not version:
                raise update.fail("another engine rank lacks a part of it, or did not respond")
        self.version, self.tensors, self._is_sound = version, update.tensors, True
        return dict(self.tensors)


class _Update:
    """The receipt of one version on one engine rank."""

    def __init__(self, owner: Receiver, link: wire.Link) -> None:
        self._owner, self._link = owner, link
        self._problem: BaseException | None = None
        self._versions: set[int] = set()
        self._live = set(owner._buffers)
        self.tensors: dict[str, Tensor] = {}

    # Rounds.

    def receive(self) -> None:
        """Receive all rounds. If an error occurs, store it and discard later rounds."""
        rooms = wire.Rooms(self._owner._buffers, self._link.device)
        try:
            for name, shape, dtype, has_zeros in self._owner._made:
                make = torch.zeros if has_zeros else torch.empty
                kind = getattr(torch, dtype)
                self.tensors[name] = make(shape, dtype=kind, device=self._owner._device)
            _ = rooms.slabs
        except Exception as error:
            self._problem = error
            self.tensors = {}  # free memory for the buffers
        ahead: list[tuple[wire.Flight, list[Came]]] = []
        for number, due in enumerate(rooms.rounds):
            heads, memory = self._heads(number, due), rooms.of(number)
            came = [(t, h, due[t], memory[t][: h.nbytes]) for t, h in heads.items()]
            flight = self._link.post({}, {trainer: data for trainer, _, _, data in came})
            ahead.append((flight, came))
            # unpacking changed blocks needs the memory of the next round
            waits = any(head.kind == wire.PART for head in heads.values())
            while len(ahead) > 1 - waits:
                self._place(*ahead.pop(0))
        for one in ahead:
            self._place(*one)

    def _heads(self, number: int, due: Mapping[int, Buffer]) -> dict[int, Head]:
        """Receive the headers of a round; drop trainers that failed."""
        told = self._link.hear(len(Head._fields), [t for t in due if t in self._live])
        found = {}
        for trainer, numbers in told.items():
            head = Head(*numbers)
            self._versions.add(head.version)
            is_right = (head.plan, head.round) == (self._owner._number, number)
            if head.kind == wire.STOPPED:
                self.fail(f"trainer {trainer} failed")
            elif not is_right or not 0 <= head.nbytes <= due[trainer].nbytes:
                self.fail(f"trainer {trainer} sent an invalid header ({head})")
            else:
                found[trainer] = head
        self._live -= {*told} - {*found}
        return found

    def _place(self, flight: wire.Flight, came: Iterable[Came]) -> None:
        """Wait for a round, check it, and copy its values into the tensors."""
        self._link.wait(flight)
        for trainer, head, buffer, memory in came:
            if self._problem is not None or self._link.lost:
                return
            try:
                if head.kind == wire.PART:
                    memory = self._patched(buffer, memory)
                if sum_of_tensor(digests_of(memory).cpu()) != head.check:
                    self.fail(f"a checksum of trainer {trainer}'s data is wrong")
                    self._owner._is_sound = False  # request everything in the next update
                    return
                for room, values in self._entries(buffer, memory, self.tensors):
                    room.copy_(values)
            except Exception as error:
                self._problem = error

    def _patched(self, buffer: Buffer, packed: Tensor) -> Tensor:
        """Return a buffer of the previous values, updated with the changed blocks."""
        memory = packed.new_empty(buffer.nbytes)
        for room, values in self._entries(buffer, memory, self._owner.tensors):
            values.copy_(room)
        wire.unpack_changed(packed, memory)
        return memory

    def _entries(
        self, buffer: Buffer, memory: Tensor, tensors: Mapping[str, Tensor]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """For each entry, yield views of its box in the tensor and of its values in the buffer."""
        for index, starts, shape, dtype, offset in buffer.entries:
            room = tensors[self._owner._made[index][0]]
            values = wire.view_in(memory, offset, getattr(torch, dtype), shape)
            yield room[Region(starts, shape).slices], values

    def fail(self, text: str) -> BaseException:
        error = StateError(
            "FS635",
            f"{RECEIVE}: the new version is incomplete: {text}. Version {self._owner.version} is "
            "unchanged. Fix the first error that any rank raised, and send again.",
        )
        self._problem = self._problem or next(iter(self._link.lost.values()), error)
        return self._problem

    # The vote. See [Note: all or none].

    def vote(self) -> int:
        """Return the version that all engine ranks commit, or 0."""
        link, me = self._link, self._owner._index
        known = [UNKNOWN] * len(link.engines)
        known[me] = ANY if not self._owner._buffers else max(self._versions, default=AGAINST)
        if self._problem is not None or self._link.lost or len(self._versions) > 1:
            known[me] = AGAINST
        for _ in range(2):
            told = self._share(known)
            votes = zip(known, *told, strict=True)
            known = [AGAINST if AGAINST in some else max(some) for some in votes]
        versions = {vote for vote in known if vote != ANY}
        if any(others[me] == UNKNOWN for others in told) or len(versions) != 1:
            return 0
        return max(versions.pop(), 0)

    def _share(self, known: list[int]) -> list[list[int]]:
        """Send the known votes to all engine ranks; return the votes that they sent."""
        link = self._link
        found: list[list[int]] = []
        for speaker in link.engines:
            if speaker == link.number:
                link.tell(known, [other for other in link.engines if other != speaker])
            else:
                found += link.hear(len(known), [speaker]).values()
        return found

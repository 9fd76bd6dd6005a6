"""Send matrices from their shards to their owners and back, with one all-to-all per round.

``owners`` plans ownership and buffer layouts. Independent of optimizers.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2._core.base import torch_comm, torch_dtensor, torch_modes
from fsdp2._core.base.errors import UnsupportedError, carrying
from fsdp2._core.comm.mesh import MeshAxis
from fsdp2._core.comm.process_mesh import Grid, wire_device
from fsdp2._core.transfer.chunk_plan import Blocks
from fsdp2._core.transfer.owners import Cargo, Cut, Part, Route, rounds, route
from fsdp2._core.transfer.redistribute import blocks_of

Carry = Callable[[Tensor, Tensor, Route], Any]
"""Replaces the all-to-all if the other ranks are simulated."""


@dataclass(frozen=True, eq=False)
class Peers:
    """The ranks over which matrices are distributed, as global ranks in the order of ``pg``. ``me``
    is this rank's index in ``ranks``; ``grid`` is for checks among peers. Without a process group,
    this process is the only peer, unless ``carry`` simulates the others.
    """

    ranks: tuple[int, ...]
    me: int
    grid: Grid
    pg: dist.ProcessGroup | None = None
    carry: Carry | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @staticmethod
    def alone() -> Peers:
        return Peers((dist.get_rank() if dist.is_initialized() else 0,), 0, Grid(()))

    @staticmethod
    def of(mesh: DeviceMesh) -> Peers:
        """Return the ranks of a mesh as peers. Collective over these ranks on first use."""
        if mesh.size() == 1:
            return Peers.alone()
        if mesh.ndim == 1:
            pg = mesh.get_group(0)
        else:
            pg = _joint(sorted(mesh.mesh.flatten().tolist()), mesh.get_group(0))
        ranks = tuple(dist.get_process_group_ranks(pg))
        me = ranks.index(dist.get_rank())
        axis = MeshAxis("owners", len(ranks), me, pg)
        return Peers(ranks, me, Grid((axis,), mesh.device_type), pg)

    def exchange(self, received: Tensor, sent: Tensor, way: Route) -> Any:
        """Issue the all-to-all of a round. Return its work handle, or None if nothing is sent."""
        if way.is_local:  # owners already have their matrices
            received.copy_(sent)
            return None
        if self.carry is not None:
            return self.carry(received, sent, way)
        assert self.pg is not None
        with carrying():
            return dist.all_to_all_single(
                received,
                sent,
                way.received_nbytes,
                way.sent_nbytes,
                group=self.pg,
                async_op=True,
            )

    def cut(self, name: str, tensor: Tensor, lead: int | None = None) -> Cut:
        """Describe how a tensor, or its matrix at index ``lead``, is distributed over the peers."""
        if torch_dtensor.is_wrapper_subclass(torch_dtensor.local_part(tensor)):
            raise UnsupportedError(
                "FS624",
                f"{name}: found a {type(torch_dtensor.local_part(tensor)).__name__}, which wraps "
                "other tensors and has no bytes of its own to send.",
            )
        if isinstance(tensor, DTensor) and self.size > 1:
            return Cut(blocks_of(name, tensor), self._places(tensor.device_mesh), lead)
        return Cut(Blocks(tuple(tensor.shape), (), ()), ((),) * self.size, lead)

    def _places(self, mesh: DeviceMesh) -> tuple[tuple[int, ...], ...]:
        known = _places.setdefault(mesh, {})
        if self.ranks not in known:
            coordinates = itertools.product(*(range(mesh.size(dim)) for dim in range(mesh.ndim)))
            with torch_modes.hidden_from_modes():  # rank numbers must not become fake tensors
                ranks = mesh.mesh.flatten().tolist()
            of_rank = dict(zip(ranks, coordinates, strict=True))
            known[self.ranks] = tuple(of_rank[rank] for rank in self.ranks)
        return known[self.ranks]


_places: weakref.WeakKeyDictionary[DeviceMesh, dict[tuple[int, ...], tuple[tuple[int, ...], ...]]]
_places = weakref.WeakKeyDictionary()

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]
_groups = weakref.WeakKeyDictionary()
"""Process groups of multi-dim meshes, keyed by the default process group and the ranks."""


def _joint(ranks: Sequence[int], like: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a process group of all ranks of a mesh, with the backend of one of its dims."""
    world = dist.group.WORLD
    assert world is not None
    if list(ranks) == dist.get_process_group_ranks(world):
        return world
    known = _groups.setdefault(world, {})
    key = tuple(ranks)
    if key not in known:
        with carrying():
            known[key] = torch_comm.group_of(ranks, "owners", dist.get_backend(like))
    return known[key]


@dataclass
class Flight:
    """A round in flight. ``work`` is None if nothing is sent."""

    indices: list[int]
    cargos: Sequence[Cargo]
    received: Tensor
    way: Route
    work: Any
    sent: Tensor  # kept alive until the round is complete

    def wait(self) -> None:
        if self.work is not None:
            with carrying():
                self.work.wait()
        self.work = None

    def land(self, rooms: Callable[[int], Tensor]) -> None:
        """Copy received parts to this rank's tensors. ``rooms(index)`` returns a cargo's tensor."""
        for part in self.way.received:
            room = rooms(self.indices[part.index])[part.at]
            room.copy_(_in_buffer(self.received, part, self.cargos[part.index]))


def _in_buffer(buffer: Tensor, part: Part, cargo: Cargo) -> Tensor:
    nbytes = part.region.numel * cargo.itemsize
    return buffer[part.start : part.start + nbytes].view(cargo.dtype).view(part.region.sizes)


def part_of(cut: Cut, tensor: Tensor, rank: int) -> Tensor:
    local = torch_dtensor.local_part(tensor)
    if cut.lead is None:
        return local.detach()
    row = cut.lead - cut.blocks.block(cut.places[rank]).starts[0]
    is_here = 0 <= row < len(local)
    return local.detach()[row] if is_here else local.detach()[:0]


@dataclass(frozen=True, eq=False)
class Freight:
    """Transfers between the shards of ``tensors`` and the owners, in rounds. ``cargos`` and
    ``batches`` must be equal on all peers. At most two rounds are in memory at a time, with a total
    of ``max_nbytes``. Values are cast to the cargo's dtype.
    """

    peers: Peers
    tensors: Sequence[Tensor]
    cargos: Sequence[Cargo]
    max_nbytes: int
    batches: Sequence[Sequence[int]] | None = None

    def to_owners(self, wholes: Callable[[int], Tensor]) -> None:
        """Fill the full tensors that this rank owns. Collective."""
        for flight in self.flights(self.part, to_owners=True):
            flight.land(wholes)

    def from_owners(self, wholes: Callable[[int], Tensor]) -> None:
        """Fill the shards from their owners' full tensors. Collective."""
        for flight in self.flights(wholes, to_owners=False):
            flight.land(self.part)

    def part(self, index: int) -> Tensor:
        return part_of(self.cargos[index].cut, self.tensors[index], self.peers.me)

    def flights(
        self,
        own: Callable[[int], Tensor],
        *,
        to_owners: bool,
    ) -> Iterator[Flight]:
        """Send the parts that ``own`` returns. Yield each round when it is complete, while the next
        one is in flight. Copy all values of a round before you advance the iterator.
        """
        batches = self.batches
        if batches is None:
            batches = list(rounds(self.cargos, self.peers.size, self.max_nbytes // 2))
        ahead: Flight | None = None
        for batch in [*batches, None]:
            current = ahead
            ahead = None if batch is None else self._launch(batch, own, to_owners)
            if current is not None:
                current.wait()
                yield current
                del current.received, current.sent  # free them even if the caller holds the flight

    def _launch(
        self, batch: Sequence[int], own: Callable[[int], Tensor], to_owners: bool
    ) -> Flight:
        peers, chosen = self.peers, [self.cargos[index] for index in batch]
        cargos = tuple(cargo if to_owners else cargo.back for cargo in chosen)
        way = route(peers.me, peers.size, cargos)
        device = torch_dtensor.local_part(self.tensors[0]).device
        where = device if peers.pg is None else wire_device(peers.pg, device)
        sent = torch.empty(sum(way.sent_nbytes), dtype=torch.uint8, device=where)
        for part in way.sent:
            source = own(batch[part.index])[part.at]
            _in_buffer(sent, part, cargos[part.index]).copy_(source)
        received = torch.empty(sum(way.received_nbytes), dtype=torch.uint8, device=where)
        work = peers.exchange(received, sent, way)
        return Flight([*batch], cargos, received, way, work, sent)

"""Matrices from their shards to their owners, and back: one all-to-all a round, by bytes.

Owns the ranks that exchange matrices (``Crew``) and the packing of rounds. Who owns what, and what
lies where in a buffer, is in ``owners``. It must not know optimizers.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2._core.base import torch_comm, torch_dtensor, torch_modes
from fsdp2._core.base.errors import UnsupportedError
from fsdp2._core.comm.mesh import MeshAxis
from fsdp2._core.comm.process_mesh import Grid, carrying, wire_device
from fsdp2._core.transfer.chunk_plan import Blocks
from fsdp2._core.transfer.owners import Cargo, Cut, Part, Route, rounds, route
from fsdp2._core.transfer.redistribute import blocks_of

Carry = Callable[[Tensor, Tensor, Route], Any]
"""What stands for an all-to-all where there are no ranks."""


@dataclass(frozen=True, eq=False)
class Crew:
    """The ranks that share the matrices of some tensors.

    ``ranks`` are global ranks, in the order of the process group ``pg``, ``me`` this rank's place
    among them; over ``grid`` they agree. Without a process group this process is alone, unless
    ``carry`` imagines the others.
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
    def alone() -> Crew:
        return Crew((dist.get_rank() if dist.is_initialized() else 0,), 0, Grid(()))

    @staticmethod
    def of(mesh: DeviceMesh) -> Crew:
        """Return the crew of a mesh's ranks. Collective over them, the first time."""
        if mesh.size() == 1:
            return Crew.alone()
        if mesh.ndim == 1:
            pg = mesh.get_group(0)
        else:
            pg = _joint(sorted(mesh.mesh.flatten().tolist()), mesh.get_group(0))
        ranks = tuple(dist.get_process_group_ranks(pg))
        me = ranks.index(dist.get_rank())
        axis = MeshAxis("owners", len(ranks), me, pg)
        return Crew(ranks, me, Grid((axis,), mesh.device_type), pg)

    def exchange(self, received: Tensor, sent: Tensor, way: Route) -> Any:
        """Issue the all-to-all of a round; return its work, or None if nothing is sent."""
        if way.is_local:  # every owner has its matrices already
            received.copy_(sent)
            return None
        if self.carry is not None:
            return self.carry(received, sent, way)
        if self.pg is None:
            received.copy_(sent)
            return None
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
        """Say how a tensor, or one matrix of its batch, lies on the crew's ranks.

        Raises:
            UnsupportedError: it is a partial sum, or wraps other tensors.
        """
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
            with torch_modes.hidden_from_modes():  # numbers of ranks are no fakes
                ranks = mesh.mesh.flatten().tolist()
            of_rank = dict(zip(ranks, coordinates, strict=True))
            known[self.ranks] = tuple(of_rank[rank] for rank in self.ranks)
        return known[self.ranks]


_places: weakref.WeakKeyDictionary[DeviceMesh, dict[tuple[int, ...], tuple[tuple[int, ...], ...]]]
_places = weakref.WeakKeyDictionary()

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]
_groups = weakref.WeakKeyDictionary()
"""The process groups of meshes of several dims, by the world that they are part of."""


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
    """A round on its way. ``work`` is None where nothing is sent."""

    cargos: Sequence[Cargo]
    dtypes: Sequence[torch.dtype]
    received: Tensor
    parts: Sequence[Part]
    work: Any
    sent: Tensor  # until it has arrived

    def wait(self) -> None:
        if self.work is not None:
            with carrying():
                self.work.wait()
        self.work = None

    def each(self) -> Iterator[tuple[Part, Tensor]]:
        """Yield what came: each part as a tensor of its shape, in the dtype that was sent."""
        for part in self.parts:
            dtype = self.dtypes[part.index]
            nbytes = part.region.numel * dtype.itemsize
            piece = self.received[part.start : part.start + nbytes].view(dtype)
            yield part, piece.view(part.region.sizes)


def fly(
    crew: Crew,
    cargos: Sequence[Cargo],
    dtypes: Sequence[torch.dtype],
    own: Callable[[int], Tensor],
    device: torch.device,
    *,
    to_owners: bool,
) -> Flight:
    """Send a round on its way; ``own(index)`` is what this rank has of a cargo.

    On the way to owners that is its part, on the way back the whole of an owned one. Collective
    over the crew: the same cargos and dtypes on every rank. Values are cast to what travels.
    """
    way = route(crew.me, crew.size, tuple(cargos), to_owners)
    where = device if crew.pg is None else wire_device(crew.pg, device)
    sent = torch.empty(sum(way.sent_nbytes), dtype=torch.uint8, device=where)
    for part in way.sent:
        dtype, region = dtypes[part.index], part.region
        nbytes = region.numel * dtype.itemsize
        room = sent[part.start : part.start + nbytes].view(dtype).view(region.sizes)
        source = own(part.index)
        room.copy_(source if to_owners else source[region.slices])
    received = torch.empty(sum(way.received_nbytes), dtype=torch.uint8, device=where)
    work = crew.exchange(received, sent, way)
    return Flight(cargos, dtypes, received, way.received, work, sent)


def part_of(cut: Cut, tensor: Tensor, rank: int) -> Tensor:
    """Return this rank's part of a matrix, out of its tensor: a view."""
    local = torch_dtensor.local_part(tensor)
    if cut.lead is None:
        return local.detach()
    row = cut.row_of(rank)
    is_here = 0 <= row < len(local)
    return local.detach()[row] if is_here else local.detach()[:0]


def stream(
    crew: Crew,
    cargos: Sequence[Cargo],
    dtypes: Sequence[torch.dtype],
    own: Callable[[int], Tensor],
    device: torch.device,
    max_nbytes: int,
    *,
    to_owners: bool,
    batches: Iterable[Sequence[int]] | None = None,
) -> Iterator[tuple[list[int], Iterator[tuple[int, Part, Tensor]]]]:
    """Yield rounds as they arrive: the cargos in it, and (cargo, part, values) of each part.

    The next round is on its way while the caller has one: two are in memory at a time, of
    ``max_nbytes`` together. The caller takes all of a round's values before it goes on.
    """
    if batches is None:
        batches = rounds(cargos, crew.size, max_nbytes // 2)

    def launch(batch: Sequence[int]) -> tuple[list[int], Flight]:
        flight = fly(
            crew,
            [cargos[index] for index in batch],
            [dtypes[index] for index in batch],
            lambda place: own(batch[place]),
            device,
            to_owners=to_owners,
        )
        return [*batch], flight

    ahead: tuple[list[int], Flight] | None = None
    for batch in [*batches, None]:
        current, ahead = ahead, None if batch is None else launch(batch)
        if current is None:
            continue
        numbers, flight = current
        flight.wait()
        yield numbers, ((numbers[part.index], part, value) for part, value in flight.each())
        del current, flight

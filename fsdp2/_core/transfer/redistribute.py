"""Gather full tensors from shards and scatter them back, in bounded memory.

To gather, every rank packs its chunks of a bucket into a byte buffer. One gather per axis sends the
buffer, and receivers unpack it. Scattering is the reverse. See [Note: chunks] in ``chunk_plan``.
Any placement whose shards are blocks is supported: ``Shard`` of any dim on any number of axes (even
or uneven), ``Replicate``, and FSDP and tensor parallelism on the same dim.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2._core.base import torch_comm, torch_dealt, torch_dtensor
from fsdp2._core.base.errors import ConfigError, StateError, UnsupportedError, carrying, named
from fsdp2._core.base.interrupts import kept_interrupts, take_interrupt
from fsdp2._core.comm.mesh import MeshAxis
from fsdp2._core.comm.process_mesh import Grid, wire_device
from fsdp2._core.engine.between_steps import refuse_other_thread, units_below
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.layout import dense_stride
from fsdp2._core.transfer.chunk_plan import (
    Blocks,
    Bucket,
    CutOf,
    Item,
    Region,
    part_of,
    plan,
    within,
)


@dataclass(frozen=True, eq=False)
class LocalShard:
    """This rank's block of a tensor, and the sharding of the full tensor."""

    name: str
    local: Tensor
    blocks: Blocks
    grid: Grid
    stride: tuple[int, ...]

    @cached_property
    def own(self) -> Region:
        return self.blocks.block(self.grid.place)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.blocks.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype


STAGED_NBYTES = 64 << 20  # default memory limit for chunks


class Grids:
    """The grids of a model's meshes; each mesh is read once. The *main* grid is that of the largest
    mesh: ranks exchange checks over it, and plain tensors are replicated on it. A tensor on a slice
    of the main grid is assumed to be replicated over the grid's other axes.
    """

    def __init__(self, tensors: Sequence[object]) -> None:
        self._known: dict[DeviceMesh, Grid] = {}
        self._forms: dict[object, tuple[Grid, Blocks]] = {}
        for mesh in dict.fromkeys(t.device_mesh for t in tensors if isinstance(t, DTensor)):
            if mesh.get_coordinate() is None:
                raise ConfigError(
                    "FS625",
                    f"rank {dist.get_rank()} has a DTensor on {mesh}, which does not contain this "
                    "rank. Call this function only on the ranks of the mesh.",
                )
            self._known[mesh] = Grid.of(mesh)
        largest = max(self._known, key=lambda mesh: mesh.size(), default=None)
        self.main = Grid.world() if largest is None else self._known[largest]

    def hold(self, name: str, tensor: Tensor) -> LocalShard:
        """Describe a tensor; a plain one is replicated. UnsupportedError: shards are not blocks."""
        if not isinstance(tensor, DTensor):
            tensor = tensor.detach()
            _refuse_odd(name, tensor)
            blocks = Blocks(tuple(tensor.shape), self.main.counts, ())
            return LocalShard(name, _plain(tensor), blocks, self.main, tuple(tensor.stride()))
        # DTensor.detach would go through DTensor's dispatch
        local = torch_dtensor.local_tensor(tensor).detach()
        _refuse_odd(name, local)
        form = (tensor.device_mesh, torch_dealt.key_of(tensor.placements), tuple(tensor.shape))
        if form not in self._forms:  # shared by a parameter and its optimizer state
            self._forms[form] = self._form_of(name, tensor)
        grid, blocks = self._forms[form]
        held = LocalShard(name, _plain(local), blocks, grid, tuple(tensor.stride()))
        if tuple(local.shape) != held.own.sizes:
            raise UnsupportedError(
                "FS624",
                f"{name}: found a local tensor of shape {tuple(local.shape)}, but a DTensor of "
                f"shape {held.shape} with placements {tensor.placements} requires "
                f"{held.own.sizes}. Create it with distribute_tensor, which splits tensors as "
                "Shard does.",
            )
        return held

    def _form_of(self, name: str, tensor: DTensor) -> tuple[Grid, Blocks]:
        """Return a tensor's grid and blocks; the main grid, if the mesh is a slice of it."""
        grid = self._known.get(tensor.device_mesh) or Grid.of(tensor.device_mesh)
        self._known[tensor.device_mesh] = grid
        blocks = blocks_of(name, tensor)
        axes = self._axes_of_main(grid)
        if axes is None:
            return grid, blocks
        cuts = tuple(c._replace(axis=axes[c.axis]) for c in blocks.cuts if grid.counts[c.axis] > 1)
        return self.main, Blocks(blocks.shape, self.main.counts, cuts)

    def _axes_of_main(self, grid: Grid) -> list[int] | None:
        """Return the axes of the main grid that ``grid`` has, or None if ``grid`` is not a slice.
        For example, parameters that are not tensor-parallel are on the slice of the data axes.
        """
        if math.prod(grid.counts) == math.prod(self.main.counts):
            return None
        lines = [axis.global_ranks if axis.size > 1 else None for axis in self.main.axes]
        found: list[int] = []
        for axis in grid.axes:
            if axis.size == 1:  # never cut, so any axis is valid
                found.append(0)
            elif axis.global_ranks in lines:
                found.append(lines.index(axis.global_ranks))
            else:
                return None
        return found

    def ranks_of(self, grid: Grid) -> list[int] | None:
        meshes = {known: mesh for mesh, known in self._known.items()}
        return meshes[grid].mesh.flatten().tolist() if grid in meshes else None

    def difference(self, names: list[str]) -> str | None:
        """Describe, identically on all ranks, how the ranks' lists differ; None if equal."""
        found = self.main.collect(names)
        for rank, other in enumerate(found):
            differ = sorted(set(other) ^ set(found[0]))
            if differ:
                has, lacks = (0, rank) if differ[0] in found[0] else (rank, 0)
                return f"{differ[0]} on rank {has}, but not on rank {lacks}"
        return None if all(other == found[0] for other in found) else "names in a different order"

    def require_alike(self, what: str, names: list[str]) -> None:
        """Raise ConfigError on every rank if the ranks' lists differ; ``what`` is the reason."""
        difference = self.difference(names)
        if difference is not None:
            raise ConfigError(
                "FS404",
                f"{what}. Found {difference}. Build the same model on every rank.",
            )

    def require_common(self, helds: Sequence[LocalShard], what: str) -> None:
        """Raise UnsupportedError for tensors that some ranks lack: their names may be ambiguous."""
        ranks = {grid: self.ranks_of(grid) for grid in self._known.values()}
        main = ranks.get(self.main)
        for held in helds:
            found = ranks.get(held.grid, main)
            if main is None or found is None:
                continue
            if len(found) != len(main) or found[0] != main[0]:
                raise UnsupportedError(
                    "FS625",
                    f"{what}: {held.name} is on {len(found)} of {len(main)} ranks, which do not "
                    "form axes of their mesh, so other ranks may have a different tensor with "
                    "this name. Slice all meshes from one init_device_mesh(...) call, or use the "
                    "sharded state.",
                )


def _plain(tensor: Tensor) -> Tensor:
    return tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor)


def _refuse_odd(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise StateError(
            "FS208",
            f"{name} is on the meta device, so it has no values. Call fsdp2.materialize first.",
        )
    if torch_dtensor.is_wrapper_subclass(tensor):
        raise UnsupportedError(
            "FS624",
            f"{name}: found a {type(tensor).__name__}, which wraps other tensors and has no bytes "
            "of its own to send. Use torch.distributed.checkpoint on the sharded state.",
        )


def blocks_of(name: str, tensor: DTensor) -> Blocks:
    """Convert placements to cuts: plain ones from left to right, then strided ones in reverse."""
    plain: list[CutOf] = []
    strided: list[CutOf] = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise UnsupportedError(
                "FS624",
                f"{name} is a partial sum ({placement}). Redistribute it to Shard or Replicate.",
            )
        for dim in range(tensor.dim()):
            if torch_dtensor.shards_dim(placement, dim):
                cut = CutOf(axis, dim, torch_dealt.deal_in(placement))
                (strided if torch_dtensor.is_strided(placement) else plain).append(cut)
    mesh = tensor.device_mesh
    counts = tuple(mesh.size(axis) for axis in range(mesh.ndim))
    return Blocks(tuple(tensor.shape), counts, (*plain, *reversed(strided)))


# From shards to full tensors.


@dataclass(frozen=True)
class Target:
    """The destination of gathered tensors: all ranks (``on_all``), or the first rank of the mesh.
    Floating-point tensors are cast to ``dtype``. If ``device`` is None, the shards' device is used.
    If ``counted``, full tensors count against the limit until the caller has consumed them.
    """

    on_all: bool = True
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    counted: bool = True

    def dtype_of(self, held: LocalShard) -> torch.dtype:
        casts = self.dtype is not None and held.dtype.is_floating_point
        return self.dtype if casts and self.dtype is not None else held.dtype

    def wire_dtype_of(self, held: LocalShard) -> torch.dtype:
        """Return the dtype to send: the narrower of the shard's and the target's dtypes."""
        dtype = self.dtype_of(held)
        return dtype if dtype.itemsize < held.dtype.itemsize else held.dtype

    def takes(self, grid: Grid) -> bool:
        return self.on_all or grid.is_first


def groups_below(model: nn.Module) -> list[ParamGroup]:
    return [group for unit in units_below(model) for group in unit.own_groups]


@contextlib.contextmanager
def checked_together(what: str, model: object) -> Iterator[dict[str, object]]:
    """Check a call's arguments on all ranks: if one rank raises, all raise instead of waiting for
    it. Values that determine later collectives must be stored in the yielded dict, and be equal on
    all ranks. If ``model`` is not a module, the check is collective over all ranks of the job.
    """
    refuse_other_thread(model, what)
    tensors: list[Tensor] = []
    if isinstance(model, nn.Module):
        tensors += [*model.parameters(), *model.buffers()]
        # registered parameters may be full on some ranks only; shards give all ranks the same mesh
        tensors += [param.sharded for group in groups_below(model) for param in group.params]
    placed = [tensor for tensor in tensors if isinstance(tensor, DTensor)]
    shared = [tensor for tensor in placed if tensor.device_mesh.get_coordinate() is not None]
    with Grids(shared or placed).main.together(what) as same:
        Grids(placed)  # all ranks raise an error if a mesh does not contain this rank
        yield same


def gather(
    helds: Sequence[LocalShard],
    max_nbytes: int,
    target: Target,
    main: Grid,
    what: str,
) -> Generator[tuple[int, Tensor | None], None, None]:
    """Yield the index and the full tensor of each shard, in order. The tensor is None on ranks that
    do not receive it. Collective: every rank must exhaust the iterator. Yielded tensors are not
    kept. Before each batch and at the end, the ranks of ``main`` check that all of them continue.
    All of them raise if a rank has left (it closed the generator, or threw an error into it) or
    cannot allocate memory.
    """
    moves = _Gathering(helds, target)
    items = []
    for held, wire in zip(helds, moves.wires, strict=True):
        kept = held.blocks.count * math.prod(held.blocks.largest) * target.dtype_of(held).itemsize
        copies = held.blocks.count if held.blocks.axes else 0
        kept = kept if target.counted else 0
        items.append(Item(held.blocks, held.grid, wire.itemsize, copies, kept))
    for batch in plan(items, max_nbytes):
        # context managers, because decorators would keep the last yielded tensor alive
        with torch.no_grad(), kept_interrupts(leave_pending=True):
            with main.together(what):
                for bucket in batch.buckets.values():
                    moves.make_room(bucket)
            for bucket in batch.buckets.values():
                with named(f"{what}: {moves.first(bucket).name}"):
                    moves.move(bucket)
        for index in batch.finished:
            try:
                yield index, moves.whole.pop(index, None)
            except GeneratorExit:
                interrupt = take_interrupt()
                main.leave(interrupt or _left(what, helds[index].name), what)
                if interrupt is not None:
                    raise interrupt from None
                raise
            except Exception as error:  # thrown by the caller
                main.leave(error, what)
                raise
    with kept_interrupts():
        main.raise_together(None, what)


def _left(what: str, name: str) -> StateError:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return StateError(
        "FS407",
        f"{what}: rank {rank} stopped at {name}, so the other ranks cannot continue. The rank "
        "either left the loop or failed while using the tensor. Iterate to the end on every rank, "
        "or leave the loop at the same tensor on all ranks.",
    )


class _Moves:
    """This rank's side of bucket transfers: tensors, their wire dtypes, and a reused buffer."""

    def __init__(self, helds: Sequence[LocalShard], wires: Sequence[torch.dtype]) -> None:
        self.helds, self.wires = helds, wires
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")

    def first(self, bucket: Bucket) -> LocalShard:
        return self.helds[bucket.chunks[0].index]

    def buffer(self, bucket: Bucket, rows: int, axis: int) -> Tensor:
        """Return a buffer for the parts of ``rows`` ranks, on a device that the group supports."""
        first, nbytes = self.first(bucket), rows * bucket.nbytes
        group = first.grid.axes[axis].pg
        device = wire_device(group, first.local.device)
        if self._buffer.numel() < nbytes or self._buffer.device != device:
            self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._buffer[:nbytes]

    def parts(
        self, bucket: Bucket, place: Sequence[int], row: Tensor
    ) -> Iterator[tuple[int, tuple[slice, ...], tuple[slice, ...], Tensor]]:
        """Yield each part at ``place``: its index, slices in block and full tensor, and memory."""
        for chunk in bucket.chunks:
            block = self.helds[chunk.index].blocks.block(place)
            part, dtype = part_of(block, chunk.region), self.wires[chunk.index]
            nbytes = part.numel * dtype.itemsize
            if nbytes:
                memory = row[chunk.offset : chunk.offset + nbytes].view(dtype).view(part.sizes)
                yield chunk.index, part.slices, within(block, part).slices, memory


class _Gathering(_Moves):
    def __init__(self, helds: Sequence[LocalShard], target: Target) -> None:
        super().__init__(helds, [target.wire_dtype_of(held) for held in helds])
        self.target = target
        self.whole: dict[int, Tensor] = {}

    def make_room(self, bucket: Bucket) -> None:
        for chunk in bucket.chunks if self.target.takes(self.first(bucket).grid) else ():
            if chunk.index not in self.whole:
                held = self.helds[chunk.index]
                dtype, device = self.target.dtype_of(held), self.target.device or held.local.device
                stride = dense_stride(held.shape, held.stride)
                whole = torch.empty_strided(held.shape, stride, dtype=dtype, device=device)
                self.whole[chunk.index] = whole
        self._room(bucket)

    def _room(self, bucket: Bucket) -> Tensor | None:
        """Return a bucket's buffer, or None if no rank sends it or another replica does."""
        first = self.first(bucket)
        others = tuple(axis for axis in range(len(first.grid.axes)) if axis not in bucket.axes)
        is_there = self.target.on_all or first.grid.is_first_on(others)
        if not bucket.axes or not bucket.nbytes or not is_there:
            return None
        rows = first.blocks.count if self.target.on_all else _rows_held(bucket, first.grid)
        return self.buffer(bucket, rows, bucket.axes[0])

    def move(self, bucket: Bucket) -> None:
        first = self.first(bucket)
        grid = first.grid
        if not bucket.axes:
            for chunk in bucket.chunks if self.target.takes(grid) else ():
                self.whole[chunk.index].copy_(self.helds[chunk.index].local)
            return
        buffer = self._room(bucket)
        if buffer is None:
            return
        own = 0  # index of this rank's row
        for axis in bucket.cut if self.target.on_all else ():
            own = own * grid.counts[axis] + grid.place[axis]
        row = buffer[own * bucket.nbytes : (own + 1) * bucket.nbytes]
        for index, held_at, _, memory in self.parts(bucket, grid.place, row):
            memory.copy_(self.helds[index].local[held_at])
        if not _gather_axes(buffer, own, bucket, grid, self.target.on_all):
            return
        for row, place in zip(buffer.view(-1, bucket.nbytes), first.blocks.places(), strict=True):
            for index, _, whole_at, memory in self.parts(bucket, place, row):
                self.whole[index][whole_at].copy_(memory)


def _rows_held(bucket: Bucket, grid: Grid) -> int:
    """Return the number of ranks whose chunks pass through this rank, to or from the first rank."""
    rows = 1
    for axis in reversed(bucket.cut):
        if grid.place[axis]:
            break
        rows *= grid.counts[axis]
    return rows


def _gather_axes(
    buffer: Tensor,
    own: int,
    bucket: Bucket,
    grid: Grid,
    on_all: bool,
) -> bool:
    """Fill the rows of a buffer, which has row ``own``, in place, last axis first. Return True on
    ranks with the result. Allocates no memory: with gloo, it uses broadcasts, because gloo's
    all-gather and gather copy.
    """
    count = 1  # rows that this rank has
    for index in (*bucket.owners, *reversed(bucket.cut)):
        axis, owner = grid.axes[index], bucket.owners.get(index)
        count *= axis.size if owner is None else 1
        start = own // count * count
        line = buffer[start * bucket.nbytes : (start + count) * bucket.nbytes]
        if owner is not None:
            with carrying():
                dist.broadcast(line, group=axis.pg, group_src=owner)
        elif on_all:
            _gather_line(line, axis)
        else:
            _exchange(line, axis, to_first=True)
        if axis.rank != 0 and not on_all:
            return False
    return True


def _gather_line(line: Tensor, axis: MeshAxis) -> None:
    """All-gather in place: each rank of the axis contributes its part of ``line``."""
    parts = list(line.view(axis.size, -1))
    with carrying():
        if line.device.type == "cpu":
            works = [
                dist.broadcast(part, src=source, group=axis.pg, async_op=True)
                for part, source in zip(parts, axis.global_ranks, strict=True)
            ]
            for work in works:
                assert work is not None
                work.wait()
        else:
            torch_comm.all_gather_single(line, parts[axis.rank], group=axis.pg)


def _exchange(line: Tensor, axis: MeshAxis, *, to_first: bool) -> None:
    """Send parts to or from the first rank of an axis, whose ``line`` has the parts of all ranks.
    On the other ranks, ``line`` is the part itself."""
    is_first, pg = axis.rank == 0, axis.pg
    parts = line.view(axis.size, -1)[1:] if is_first else line.view(1, -1)
    peers = axis.global_ranks[1:] if is_first else axis.global_ranks[:1]
    through_host = not parts.is_cpu and torch_comm.is_gloo(pg, parts.device.type)
    carried, receives = parts.cpu() if through_host else parts, is_first is to_first
    act = dist.irecv if receives else dist.isend
    with carrying():
        sent = [dist.P2POp(act, part, peer, pg) for part, peer in zip(carried, peers, strict=True)]
        for work in dist.batch_isend_irecv(sent):
            work.wait()
    if through_host and receives:
        parts.copy_(carried)


# From full tensors to shards.


@torch.no_grad()
def scatter(
    helds: Sequence[LocalShard], max_nbytes: int, source: Callable[[LocalShard], Tensor]
) -> None:
    """Fill all blocks from the first rank's full tensors (``source``, any dtype). Collective."""
    items = []
    for held in helds:
        copies = held.blocks.count if any(count > 1 for count in held.grid.counts) else 0
        items.append(Item(held.blocks, held.grid, held.dtype.itemsize, copies))
    moves = _Moves(helds, [held.dtype for held in helds])
    for batch in plan(items, max_nbytes):
        wholes: dict[int, Tensor] = {}
        for bucket in batch.buckets.values():
            if moves.first(bucket).grid.is_first:
                for chunk in bucket.chunks:
                    if chunk.index not in wholes:
                        wholes[chunk.index] = source(helds[chunk.index])
            with named(moves.first(bucket).name):
                _scatter_bucket(bucket, moves, wholes)


def _scatter_bucket(bucket: Bucket, moves: _Moves, wholes: dict[int, Tensor]) -> None:
    first = moves.first(bucket)
    grid = first.grid
    real = [axis for axis, size in enumerate(grid.counts) if size > 1]
    if bucket.nbytes == 0:
        return
    if not real:
        for chunk in bucket.chunks:
            moves.helds[chunk.index].local.copy_(wholes[chunk.index])
        return
    others = tuple(axis for axis in real if axis not in bucket.cut)
    is_on_line = grid.is_first_on(others)
    buffer = moves.buffer(bucket, _rows_held(bucket, grid) if is_on_line else 1, real[0])
    if grid.is_first:
        for row, place in zip(buffer.view(-1, bucket.nbytes), first.blocks.places(), strict=True):
            for index, _, whole_at, memory in moves.parts(bucket, place, row):
                memory.copy_(wholes[index][whole_at])
    for position, index in enumerate(bucket.cut) if is_on_line else ():
        if grid.is_first_on(bucket.cut[position + 1 :]):
            ranks = math.prod(grid.counts[axis] for axis in bucket.cut[position:])
            _exchange(buffer[: ranks * bucket.nbytes], grid.axes[index], to_first=False)
    own = buffer[: bucket.nbytes]
    for position, index in enumerate(others):
        if grid.is_first_on(others[position + 1 :]):
            axis = grid.axes[index]
            with carrying():
                dist.broadcast(own, src=axis.global_ranks[0], group=axis.pg)
    for index, held_at, _, memory in moves.parts(bucket, grid.place, own):
        moves.helds[index].local[held_at].copy_(memory)

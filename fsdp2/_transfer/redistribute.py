"""Whole tensors from shards and shards from whole tensors, in bounded memory.

Owns the moves: every rank packs its pieces of a lot into one buffer of bytes, one gather for each
axis carries it, and the receivers put the parts where they belong; the other way round with
scatters. It must not know modules, optimizers or files. See [Note: pieces] in ``chunk_plan``.

Any placement will do whose ranks hold blocks: ``Shard`` of any dim, on any number of axes, even or
not, ``Replicate``, and what tensor parallelism and FSDP together make of one dim. All dtypes
travel as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2._base import torch_comm, torch_dtensor
from fsdp2._base.errors import ConfigError, StateError, UnsupportedError
from fsdp2._base.interrupts import kept_interrupts, take_interrupt
from fsdp2._comm.mesh import MeshAxis
from fsdp2._comm.process_mesh import Grid, carrying, named, wire_device
from fsdp2._transfer.chunk_plan import Batch, Blocks, Item, Lot, Region, part_of, plan, within


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor as ranks hold it: this rank's block, and how the whole is cut."""

    name: str
    local: Tensor
    blocks: Blocks
    grid: Grid
    stride: tuple[int, ...]

    @property
    def own(self) -> Region:
        return self.blocks.block(self.grid.place)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.blocks.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype


class Grids:
    """The grids of a model's meshes; each mesh is read once.

    The *main* one, of the largest mesh, is where ranks agree, and where plain tensors lie whole. A
    tensor on a slice of it is taken to be the same along the axes that the slice lacks.
    """

    def __init__(self, tensors: Sequence[object]) -> None:
        meshes = [t.device_mesh for t in tensors if isinstance(t, DTensor)]
        self._known: dict[DeviceMesh, Grid] = {}
        for mesh in meshes:
            if mesh not in self._known:
                if mesh.get_coordinate() is None:
                    raise ConfigError(
                        f"rank {dist.get_rank()} holds a DTensor on {mesh}, which it is not on. "
                        "Call this on the ranks of the mesh only."
                    )
                self._known[mesh] = Grid.of(mesh)
        largest = max(self._known, key=lambda mesh: mesh.size(), default=None)
        self.main = Grid.world() if largest is None else self._known[largest]

    def hold(self, name: str, tensor: Tensor) -> Held:
        """Describe a tensor; a plain one lies whole on every rank.

        Raises:
            UnsupportedError: a partial sum, a shard that is no block, or a tensor subclass.
        """
        if not isinstance(tensor, DTensor):
            tensor = tensor.detach()
            _refuse_odd(name, tensor)
            blocks = Blocks(tuple(tensor.shape), self.main.counts, ())
            return Held(name, _plain(tensor), blocks, self.main, tuple(tensor.stride()))
        grid = self._known.get(tensor.device_mesh) or Grid.of(tensor.device_mesh)
        self._known[tensor.device_mesh] = grid
        local = torch_dtensor.local_tensor(
            tensor
        ).detach()  # of a DTensor it would be planned first
        _refuse_odd(name, local)
        blocks = _blocks_of(name, tensor)
        axes = self._axes_of_main(grid)
        if axes is not None:
            cuts = tuple((axes[axis], dim) for axis, dim in blocks.cuts if grid.counts[axis] > 1)
            grid, blocks = self.main, Blocks(blocks.shape, self.main.counts, cuts)
        held = Held(name, _plain(local), blocks, grid, tuple(tensor.stride()))
        if tuple(local.shape) != held.own.sizes:
            raise UnsupportedError(
                f"{name}: found a local tensor of shape {tuple(local.shape)} where "
                f"{held.own.sizes} was expected from placements {tensor.placements} of "
                f"{held.shape}. Redistribute it to Shard and Replicate placements."
            )
        return held

    def _axes_of_main(self, grid: Grid) -> list[int] | None:
        """Return which axes of the main grid a slice of it has; None if it is none.

        A parameter that tensor parallelism leaves whole lies on the data axes only: the ranks of
        the other axes hold the same values.
        """
        if math.prod(grid.counts) == math.prod(self.main.counts):
            return None
        lines = [axis.global_ranks if axis.size > 1 else None for axis in self.main.axes]
        found: list[int] = []
        for axis in grid.axes:
            if axis.size == 1:  # any axis will do for one rank; it cuts nothing
                found.append(0)
            elif axis.global_ranks in lines:
                found.append(lines.index(axis.global_ranks))
            else:
                return None
        return found

    def require_common(self, helds: Sequence[Held], what: str) -> None:
        """Check that every tensor lies on the ranks of the main grid, with the same first rank.

        Raises:
            UnsupportedError: one lies on fewer ranks, so that there are several tensors of a name.
        """
        ranks = {self._known[mesh]: mesh.mesh.flatten().tolist() for mesh in self._known}
        main = ranks.get(self.main)
        for held in helds:
            found = ranks.get(held.grid, main)
            if main is None or found is None:
                continue
            if len(found) != len(main) or found[0] != main[0]:
                raise UnsupportedError(
                    f"{what}: {held.name} lies on {len(found)} of {len(main)} ranks, and not along "
                    "axes of their mesh, so that other ranks may hold another tensor of this name. "
                    "Slice all meshes from one init_device_mesh(...) call, or use the sharded "
                    "state."
                )


def _plain(tensor: Tensor) -> Tensor:
    return tensor if type(tensor) is Tensor else tensor.as_subclass(Tensor)


def _refuse_odd(name: str, tensor: Tensor) -> None:
    if tensor.is_meta:
        raise StateError(
            f"{name}: is on the meta device, so it has no values. Call fsdp2.materialize first."
        )
    if torch_dtensor.is_wrapper_subclass(tensor):
        raise UnsupportedError(
            f"{name}: found a {type(tensor).__name__}, which wraps other tensors and has no bytes "
            "of its own to send. Use torch.distributed.checkpoint on the sharded state."
        )


def _blocks_of(name: str, tensor: DTensor) -> Blocks:
    """Read placements: cuts from left to right, strided ones last and from right to left."""
    plain: list[tuple[int, int]] = []
    strided: list[tuple[int, int]] = []
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise UnsupportedError(
                f"{name}: is a partial sum ({placement}). Redistribute it to Shard or Replicate."
            )
        for dim in range(tensor.dim()):
            if torch_dtensor.shards_dim(placement, dim):
                (strided if torch_dtensor.is_strided(placement) else plain).append((axis, dim))
    mesh = tensor.device_mesh
    counts = tuple(mesh.size(axis) for axis in range(mesh.ndim))
    return Blocks(tuple(tensor.shape), counts, (*plain, *reversed(strided)))


# From shards to whole tensors.


@dataclass(frozen=True)
class Target:
    """What becomes of gathered tensors.

    Args:
        on_all: every rank gets them; else the first rank of their mesh.
        dtype: floating-point tensors are cast to it; None keeps theirs.
        device: where they are made; None: where the shards are.
        counted: whole tensors count for the limit, until the caller has taken them.
    """

    on_all: bool = True
    dtype: torch.dtype | None = None
    device: torch.device | None = None
    counted: bool = True

    def dtype_of(self, held: Held) -> torch.dtype:
        casts = self.dtype is not None and held.dtype.is_floating_point
        return self.dtype if casts and self.dtype is not None else held.dtype

    def wire_dtype_of(self, held: Held) -> torch.dtype:
        """Return the narrower of the dtypes: it is cast before it is sent, or after."""
        dtype = self.dtype_of(held)
        return dtype if dtype.itemsize < held.dtype.itemsize else held.dtype

    def takes(self, grid: Grid) -> bool:
        return self.on_all or grid.is_first


def gather(
    helds: Sequence[Held], max_nbytes: int, target: Target, main: Grid, what: str
) -> Generator[tuple[int, Tensor | None], None, None]:
    """Yield the index and the whole of each tensor, in order; None where it is not received.

    Collective: every rank takes all of them. The caller must not keep more tensors than it has
    memory for; this keeps none that it has yielded.

    The ranks of ``main`` agree before each batch, and at the end, that all of them are there and
    have memory. So if one leaves (it closes the generator, or throws into it), or cannot make room,
    all of them raise. ``what`` is the name for it in messages.
    """
    grids = list(dict.fromkeys(held.grid for held in helds))
    items = []
    for held in helds:
        wire = target.wire_dtype_of(held).itemsize
        kept = held.blocks.count * math.prod(held.blocks.largest) * target.dtype_of(held).itemsize
        items.append(
            Item(
                held.blocks,
                grids.index(held.grid),
                wire,
                held.blocks.count if held.blocks.count > 1 else 0,
                kept if target.counted else 0,
            )
        )
    whole: dict[int, Tensor] = {}
    staging = Staging()
    for batch in plan(items, max_nbytes):
        # as decorators they would keep what was yielded last
        with torch.no_grad(), kept_interrupts(leave_pending=True):
            with main.together(what):
                for lot in batch.lots.values():
                    _make_room(lot, helds, whole, target, staging)
            for lot in batch.lots.values():
                with named(f"{what}: {helds[lot.pieces[0].index].name}"):
                    _gather_lot(lot, helds, whole, target, staging)
        for index in batch.finished:
            try:
                yield index, whole.pop(index, None)
            except GeneratorExit:
                interrupt = take_interrupt()
                main.leave(interrupt or _left(what, helds[index].name), what)
                if interrupt is not None:
                    raise interrupt from None
                raise
            except Exception as error:  # thrown in
                main.leave(error, what)
                raise
    with kept_interrupts():
        main.raise_together(None, what)


def _left(what: str, name: str) -> StateError:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return StateError(
        f"{what}: rank {rank} stopped at {name}, so the others cannot go on: it left the loop, or "
        "what it did with the tensor failed there. Iterate to the end on every rank, or leave the "
        "loop at the same tensor on all."
    )


def _make_room(
    lot: Lot,
    helds: Sequence[Held],
    whole: dict[int, Tensor],
    target: Target,
    staging: Staging,
) -> None:
    """Allocate what a lot needs here, and all that it needs."""
    first = helds[lot.pieces[0].index]
    grid = first.grid
    for piece in lot.pieces:
        if target.takes(grid) and piece.index not in whole:
            whole[piece.index] = _make_whole(helds[piece.index], target)
    if _travels(lot, grid, target):
        _buffer_of(lot, first, target, staging)


def _travels(lot: Lot, grid: Grid, target: Target) -> bool:
    """True if this rank sends or receives: not for nothing, nor for a replica of what others do."""
    others = tuple(axis for axis in range(len(grid.axes)) if axis not in lot.axes)
    return bool(lot.axes and lot.nbytes and (target.on_all or grid.is_first_on(others)))


def _buffer_of(lot: Lot, first: Held, target: Target, staging: Staging) -> Tensor:
    sizes = [first.grid.counts[axis] for axis in lot.axes]
    rows = _rows_held(lot, first.grid, sizes, target.on_all)
    return staging.take(rows * lot.nbytes, first.grid, lot.axes, first.local)


def _gather_lot(
    lot: Lot,
    helds: Sequence[Held],
    whole: dict[int, Tensor],
    target: Target,
    staging: Staging,
) -> None:
    first = helds[lot.pieces[0].index]
    grid = first.grid
    if not lot.axes:
        for piece in lot.pieces if target.takes(grid) else ():
            whole[piece.index].copy_(helds[piece.index].local)
        return
    if not _travels(lot, grid, target):
        return
    wires = {p.index: target.wire_dtype_of(helds[p.index]) for p in lot.pieces}
    sizes = [grid.counts[axis] for axis in lot.axes]
    buffer = _buffer_of(lot, first, target, staging)
    own = _row_of(lot, grid, sizes) if target.on_all or grid.is_first_on(lot.axes) else 0
    for piece in lot.pieces:
        held = helds[piece.index]
        part = part_of(held.own, piece.region)
        view = _view(buffer, own * lot.nbytes + piece.offset, part, wires[piece.index])
        if view is not None:
            view.copy_(held.local[part.slices])
    if not _gather_axes(buffer, lot, grid, sizes, target.on_all):
        return
    for row, place in zip(buffer.view(-1, lot.nbytes), first.blocks.places(), strict=True):
        for piece in lot.pieces:
            block = helds[piece.index].blocks.block(place)
            part = part_of(block, piece.region)
            view = _view(row, piece.offset, part, wires[piece.index])
            if view is not None:
                whole[piece.index][within(block, part).slices].copy_(view)


def _row_of(lot: Lot, grid: Grid, sizes: Sequence[int]) -> int:
    """Return which row of the gathered buffer is this rank's."""
    row = 0
    for axis, size in zip(lot.axes, sizes, strict=True):
        row = row * size + grid.place[axis]
    return row


def _rows_held(lot: Lot, grid: Grid, sizes: Sequence[int], on_all: bool) -> int:
    """Return how many ranks' pieces pass through this rank.

    The first on the innermost axes collects, or hands out, what their lines hold.
    """
    if on_all:
        return math.prod(sizes)
    nonzero = [k for k, axis in enumerate(lot.axes) if grid.place[axis]]
    return math.prod(sizes[nonzero[-1] + 1 :] if nonzero else sizes)


def _gather_axes(buffer: Tensor, lot: Lot, grid: Grid, sizes: Sequence[int], on_all: bool) -> bool:
    """Fill the rows of a buffer axis by axis, the last first, in place.

    Returns True where the result arrives. What is sent and received lies in the buffer, so that
    nothing else is allocated, by gloo neither: its all-gather and gather copy, broadcasts do not.
    """
    row = _row_of(lot, grid, sizes)
    for position in reversed(range(len(lot.axes))):
        axis = grid.axes[lot.axes[position]]
        assert axis.pg is not None
        nbytes = lot.nbytes * math.prod(sizes[position + 1 :])
        if not on_all:
            _to_first(_lines(buffer, axis, nbytes), axis)
            if axis.rank != 0:
                return False
            continue
        start = row * lot.nbytes // (axis.size * nbytes) * (axis.size * nbytes)
        lines = list(buffer[start : start + axis.size * nbytes].view(axis.size, nbytes))
        with carrying():
            if buffer.device.type == "cpu":
                works = [
                    dist.broadcast(line, src=source, group=axis.pg, async_op=True)
                    for line, source in zip(lines, axis.global_ranks, strict=True)
                ]
                for work in works:
                    assert work is not None
                    work.wait()
            else:
                gathered = buffer[start : start + axis.size * nbytes]
                torch_comm.all_gather_single(gathered, lines[axis.rank], group=axis.pg)
    return True


def _lines(buffer: Tensor, axis: MeshAxis, nbytes: int) -> list[Tensor]:
    """View what a rank holds along an axis: on its first one a line for each rank, else its own."""
    count = axis.size if axis.rank == 0 else 1
    return list(buffer[: count * nbytes].view(count, nbytes))


def _to_first(lines: Sequence[Tensor], axis: MeshAxis) -> None:
    """Send ``lines[0]`` to the first rank of an axis, which receives ``lines[1:]``."""
    ranks = axis.global_ranks
    if axis.rank == 0:
        pairs = zip(lines[1:], ranks[1:], strict=True)
        _exchange([dist.P2POp(dist.irecv, line, peer, axis.pg) for line, peer in pairs])
    else:
        _exchange([dist.P2POp(dist.isend, lines[0], ranks[0], axis.pg)])


def _from_first(lines: Sequence[Tensor], axis: MeshAxis) -> None:
    """The first rank of an axis sends ``lines[1:]``; the others receive into ``lines[0]``."""
    ranks = axis.global_ranks
    if axis.rank == 0:
        pairs = zip(lines[1:], ranks[1:], strict=True)
        _exchange([dist.P2POp(dist.isend, line, peer, axis.pg) for line, peer in pairs])
    else:
        _exchange([dist.P2POp(dist.irecv, lines[0], ranks[0], axis.pg)])


def _exchange(operations: list[dist.P2POp]) -> None:
    with carrying():
        for work in dist.batch_isend_irecv(operations):
            work.wait()


class Staging:
    """The buffer that lots travel in: one, kept for the next lot, which may be larger."""

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, nbytes: int, grid: Grid, axes: Sequence[int], like: Tensor) -> Tensor:
        """Return ``nbytes`` where the process group of an axis takes tensors from."""
        group = grid.axes[axes[0]].pg
        assert group is not None
        device = wire_device(group, like.device)
        if self._kept.numel() < nbytes or self._kept.device != device:
            self._kept = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._kept = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return self._kept[:nbytes]


def _make_whole(held: Held, target: Target) -> Tensor:
    device = target.device or held.local.device
    return torch.empty_strided(
        held.shape, _dense(held.shape, held.stride), dtype=target.dtype_of(held), device=device
    )


def _dense(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return a stride if a tensor with it has no holes and no overlaps, else a row-major one."""
    found = torch.empty(0, dtype=torch.uint8, device="meta").as_strided(tuple(shape), tuple(stride))
    return tuple(torch.empty_like(found, memory_format=torch.preserve_format).stride())


def _view(buffer: Tensor, offset: int, part: Region, dtype: torch.dtype) -> Tensor | None:
    """View a part of a buffer of bytes as a tensor; None if it has no elements."""
    nbytes = part.numel * dtype.itemsize
    if nbytes == 0:
        return None
    return buffer[offset : offset + nbytes].view(dtype).view(part.sizes)


# From whole tensors to shards.


@torch.no_grad()
def scatter(helds: Sequence[Held], max_nbytes: int, source: Callable[[Held], Tensor]) -> None:
    """Fill every rank's blocks with the parts of whole tensors that the first rank has.

    Collective. ``source`` is called on the first rank only, once for each tensor and batch; what it
    returns has the shape of the tensor and any dtype and device.
    """
    grids = list(dict.fromkeys(held.grid for held in helds))
    items = [
        Item(held.blocks, grids.index(held.grid), held.dtype.itemsize, _copies(held))
        for held in helds
    ]
    staging = Staging()
    for batch in plan(items, max_nbytes):
        _scatter_batch(batch, helds, source, staging)


def _copies(held: Held) -> int:
    is_sent = any(count > 1 for count in held.grid.counts)
    return held.blocks.count if is_sent else 0


def _scatter_batch(
    batch: Batch,
    helds: Sequence[Held],
    source: Callable[[Held], Tensor],
    staging: Staging,
) -> None:
    wholes: dict[int, Tensor] = {}
    for lot in batch.lots.values():
        grid = helds[lot.pieces[0].index].grid
        if grid.is_first:
            for piece in lot.pieces:
                if piece.index not in wholes:
                    wholes[piece.index] = source(helds[piece.index])
        real = tuple(axis for axis, count in enumerate(grid.counts) if count > 1)
        if lot.nbytes == 0:
            continue
        if not real:
            for piece in lot.pieces:
                held = helds[piece.index]
                held.local.copy_(wholes[piece.index])
            continue
        with named(helds[lot.pieces[0].index].name):
            buffer = _scatter_lot(lot, helds, wholes, real, staging)
        for piece in lot.pieces:
            held = helds[piece.index]
            part = part_of(held.own, piece.region)
            view = _view(buffer, piece.offset, part, held.dtype)
            if view is not None:
                held.local[part.slices].copy_(view)


def _scatter_lot(
    lot: Lot,
    helds: Sequence[Held],
    wholes: dict[int, Tensor],
    real: tuple[int, ...],
    staging: Staging,
) -> Tensor:
    """Return this rank's buffer of a lot."""
    first = helds[lot.pieces[0].index]
    grid = first.grid
    others = tuple(axis for axis in real if axis not in lot.axes)
    sizes = [grid.counts[axis] for axis in lot.axes]
    is_on_line = grid.is_first_on(others)
    rows = _rows_held(lot, grid, sizes, on_all=False) if is_on_line else 1
    buffer = staging.take(rows * lot.nbytes, grid, real, first.local)
    if grid.is_first:
        for row, place in zip(buffer.view(-1, lot.nbytes), first.blocks.places(), strict=True):
            for piece in lot.pieces:
                held = helds[piece.index]
                block = held.blocks.block(place)
                part = part_of(block, piece.region)
                view = _view(row, piece.offset, part, held.dtype)
                if view is not None:
                    view.copy_(wholes[piece.index][within(block, part).slices])
    for position, index in enumerate(lot.axes) if is_on_line else ():
        if grid.is_first_on(lot.axes[position + 1 :]):
            nbytes = lot.nbytes * math.prod(sizes[position + 1 :])
            axis = grid.axes[index]
            _from_first(_lines(buffer, axis, nbytes), axis)
    buffer = buffer[: lot.nbytes]
    for position, index in enumerate(others):
        if grid.is_first_on(others[position + 1 :]):
            axis = grid.axes[index]
            with carrying():
                dist.broadcast(buffer, src=axis.global_ranks[0], group=axis.pg)
    return buffer

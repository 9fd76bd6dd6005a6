"""The collectives of one group in a compiled graph, and the layouts of their payloads.

Owns ``TracedPlan`` and the keys by which graphs refer to plans. Contains no tensors or units.

Legend: W = number of ranks of the shard axis; a *piece* is the payload of one collective. A large
parameter is a separate piece: collectives write it and read its gradient directly, without copies.
Small parameters share a piece, which is packed and unpacked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from fsdp2._core.base.capabilities import ROW_NBYTES, capabilities
from fsdp2._core.base.policy import Overlap
from fsdp2._core.params.layout import GatherItem, GatherLayout, ReduceLayout, ShardLayout

# Hash of this folder, so that a cache does not reuse graphs compiled by another version of fsdp2.
SOURCE = hashlib.sha256(
    b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()
# On a CPU, a parameter is small if its size is below both the zero-copy size and 1/SMALL_SHARE of
# its group's size, because copies are slow. On a device, kernel launches are slow, so only the
# zero-copy size counts.
SMALL_SHARE = 32


@dataclass(frozen=True)
class Run:
    """A range of elements of a segment."""

    segment: int
    start: int
    numel: int


@dataclass(frozen=True)
class GatherPiece:
    """Payload of one all-gather: concatenated padded shards."""

    dtype: torch.dtype
    runs: tuple[Run, ...]
    indices: tuple[int, ...]  # indices of the piece's items
    gap: int  # number of trailing elements that pad a row
    coded: GatherItem | None = None  # the piece's only parameter, if it is sent encoded as bytes

    @cached_property
    def wire_dtype(self) -> torch.dtype:
        """The dtype passed to the process group: uint8, except for floats of 2 or more bytes."""
        is_usual = self.dtype.is_floating_point and self.dtype.itemsize > 1
        return self.dtype if is_usual else torch.uint8


@dataclass(frozen=True)
class Neighbours:
    """The smaller mesh, over which parameters are sharded between forward and backward."""

    size: int
    rank: int
    outer_group: str  # ranks that keep the same rows; if empty, gather over the shard axis
    inner_group: str


@dataclass(frozen=True)
class Joining:
    dtype: torch.dtype
    wire_dtype: torch.dtype  # dtype in which ranks exchange rows; sums are computed in ``dtype``
    scale: tuple[float, float]  # factors before and after the reduction
    op: str


@dataclass(frozen=True)
class TracedPlan:
    """Describes a group to the functions in ``ops``. Equal plans have equal keys."""

    layout: GatherLayout
    rank: int
    device: str  # compute device; shards may be stored elsewhere
    shard_group: str
    replicate_group: str
    neighbours: Neighbours | None
    recompute: bool
    trainable: tuple[bool, ...]  # per parameter; the layout may have a tail after the parameters
    # Per parameter: a dtype wider than its compute dtype, or None. ``unshard`` returns parameters
    # in this dtype, so autograd also sums gradients over the parameters' own axes in this dtype.
    widened: tuple[torch.dtype | None, ...]
    reduction: Joining
    grad_dtypes: tuple[torch.dtype, ...]  # dtype of each member's gradient after one eager backward
    counts_used: bool  # False: unused parameters get zero gradients
    overlap: Overlap
    bucketed: bool = True
    syncs: bool = True  # False: the graph returns unreduced gradients
    added: tuple[bool, ...] = ()  # per member: True if it adds an unreduced gradient; (): none

    @property
    def size(self) -> int:
        return self.layout.size

    @cached_property
    def signature(self) -> str:
        """All properties that must be equal on all ranks, so that collectives match. ``added`` is
        excluded, because each rank adds its unreduced gradients before the reduction."""
        alike = {"rank": 0, "device": "", "shard_group": "", "replicate_group": "", "added": ()}
        neighbours = self.neighbours and self.neighbours.size
        return f"{replace(self, **alike, neighbours=None)} {neighbours}"  # type: ignore[arg-type]

    @cached_property
    def members(self) -> tuple[int, ...]:
        return tuple(index for index, is_trained in enumerate(self.trainable) if is_trained)

    @cached_property
    def shards(self) -> tuple[ShardLayout, ...]:
        return tuple(self.layout.items[index].shard for index in self.members)

    @cached_property
    def sinks(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shapes and dtypes of sinks: one per piece (per member without sync), and an empty one."""
        rows = [((piece.numel,), self.reduction.dtype) for piece in self.reduces]
        pairs = zip(self.shards, self.grad_dtypes, strict=True)
        wholes = [(shard.shape, dtype) for shard, dtype in pairs]
        return (*(rows if self.syncs else wholes), ((0,), self.reduction.dtype))

    @cached_property
    def gathers(self) -> tuple[GatherPiece, ...]:
        layout, count = self.layout, len(self.trainable)
        least = self._least_nbytes(layout.items[:count])
        small: dict[torch.dtype, list[tuple[int, Run]]] = {}
        pieces: list[list[tuple[int, Run]]] = []
        for position, segment in enumerate(layout.segments):
            if segment.is_replicated:
                continue
            end = 0
            for index in segment.indices:
                item = layout.items[index]
                start, end = end, end + item.shard.padded_numel
                if index >= count or start == end:
                    continue
                piece = [(index, Run(position, start, end - start))]
                if item.coding is not None or self._goes_alone(item, least) or not self.bucketed:
                    pieces.append(piece)
                else:
                    small.setdefault(segment.compute_dtype, []).extend(piece)
        return tuple(map(self._gather_piece, [*small.values(), *pieces]))

    @cached_property
    def reduces(self) -> tuple[ReduceLayout, ...]:
        """Payloads of the reduce-scatters: gradients of *members*, a group's trainable parameters.
        ``members`` of a layout are indices in ``TracedPlan.members``. Each trailing element counts
        the ranks that have a member's gradient."""
        items = [self.layout.items[index] for index in self.members]
        least = self._least_nbytes(items)
        counts = len(items) if self.counts_used else 0
        small = [
            position
            for position, item in enumerate(items)
            if item.shard.dim is None or not self._goes_alone(item, least)
        ]
        if not self.bucketed:
            small = small[:1] if counts else []  # the counts are sent with this item
        alone = [position for position in range(len(items)) if position not in small]
        pieces = [self._reduce_piece((position,), 0) for position in alone]
        if small or counts:
            pieces.insert(0, self._reduce_piece(tuple(small), counts))
        return tuple(pieces)

    def _gather_piece(self, placed: Sequence[tuple[int, Run]]) -> GatherPiece:
        indices = tuple(index for index, _ in placed)
        dtype = self.layout.items[indices[0]].compute_dtype
        nbytes = sum(run.numel for _, run in placed) * dtype.itemsize
        gap = -nbytes % self._row_nbytes // dtype.itemsize
        runs = _joined([run for _, run in placed])
        first = self.layout.items[indices[0]]
        if first.coding is None:
            return GatherPiece(dtype, runs, indices, gap)
        missing = -first.sent_nbytes(self.rank) % self._row_nbytes
        return GatherPiece(torch.uint8, runs, indices, missing, first)

    def _reduce_piece(self, positions: tuple[int, ...], counts: int) -> ReduceLayout:
        shards = [self.shards[position] for position in positions]
        return ReduceLayout.plan(
            positions, shards, self.size, self.reduction.dtype, counts, row_nbytes=self._row_nbytes
        )

    @property
    def _row_nbytes(self) -> int:
        """Alignment of a row, in bytes: 1 on a host, otherwise the same as in eager mode."""
        return 1 if capabilities(torch.device(self.device)).is_host else ROW_NBYTES

    def _goes_alone(self, item: GatherItem, least: int) -> bool:
        row_nbytes = item.shard.padded_numel * item.compute_dtype.itemsize
        return _nbytes(item) >= least and row_nbytes % self._row_nbytes == 0

    def _least_nbytes(self, items: Sequence[GatherItem]) -> int:
        """Return the minimum size in bytes of a parameter that is a separate piece."""
        device = capabilities(torch.device(self.device))
        total = sum(_nbytes(item) for item in items if item.shard.dim is not None)
        rule = device.zero_copy(self.size)
        if rule is None:
            return total + 1
        return max(1, min(rule.nbytes, total // SMALL_SHARE)) if device.is_host else rule.nbytes


def _nbytes(item: GatherItem) -> int:
    return item.shard.numel * item.compute_dtype.itemsize


def _joined(runs: list[Run]) -> tuple[Run, ...]:
    """Merge adjacent runs."""
    joined = runs[:1]
    for run in runs[1:]:
        last = joined[-1]
        if run.segment == last.segment and run.start == last.start + last.numel:
            joined[-1] = Run(last.segment, last.start, last.numel + run.numel)
        else:
            joined.append(run)
    return tuple(joined)


plans: dict[str, TracedPlan] = {}  # graphs refer to plans by these keys
_keys: dict[TracedPlan, str] = {}


def key_of(plan: TracedPlan) -> str:
    """Return the key by which graphs refer to a plan. It is a string, because compilers never make
    strings dynamic. It is a hash of the plan's contents, so equal units share a key,
    restoring settings restores the key, and an on-disk cache never maps a key to another plan."""
    if plan not in _keys:
        _keys[plan] = hashlib.sha256(f"{SOURCE} {plan}".encode()).hexdigest()[:16]
        plans[_keys[plan]] = plan
    return _keys[plan]

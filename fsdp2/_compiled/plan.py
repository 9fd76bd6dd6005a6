"""What a graph does with a group: which collectives carry what. Integers only.

Owns ``TracedPlan`` and the names by which graphs refer to plans. It must not know tensors, groups
or units.

Legend: W = ranks of the shard axis; a *piece* is what one collective carries. A large parameter is
a piece of its own, which is gathered where it is used and reduced from where its gradient is:
nothing is copied. Small ones share a piece, which is packed and unpacked.
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

SOURCE = hashlib.sha256(
    b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()
"""Of this folder: graphs that another version made and a cache kept are not those of this one."""

SMALL_SHARE = 32
"""On a CPU a parameter of less than this part of its group is small, and so is one that is not
zero-copy, but for groups of small ones only: there copies are what there is to save. On a device
what there is to save is launches, so small is what travels with others in eager mode."""


@dataclass(frozen=True)
class Run:
    """Elements of a flat tensor: of which segment, from where, how many."""

    segment: int
    start: int
    numel: int


@dataclass(frozen=True)
class GatherPiece:
    """What one all-gather carries: padded shards, one after another."""

    dtype: torch.dtype
    runs: tuple[Run, ...]
    indices: tuple[int, ...]  # of the items
    gap: int  # elements behind them, which fill a row up
    coded: GatherItem | None = None  # the one parameter that travels in codes, as bytes

    @cached_property
    def wire_dtype(self) -> torch.dtype:
        """What process groups can send: other kinds travel as bytes."""
        is_usual = self.dtype.is_floating_point and self.dtype.itemsize > 1
        return self.dtype if is_usual else torch.uint8


@dataclass(frozen=True)
class ReducePiece:
    """What one reduce-scatter carries: gradients of members, in ``positions`` among all members.

    ``counts``: behind them comes, for each of so many members, on how many ranks it had a gradient.
    """

    layout: ReduceLayout
    positions: tuple[int, ...]
    counts: int

    @cached_property
    def numel(self) -> int:
        """Elements of a row, which is what a rank gets."""
        return self.layout.tail_start + self.counts


@dataclass(frozen=True)
class Neighbours:
    """Where a group waits between forward and backward: whole on ``size`` neighbouring ranks."""

    size: int
    rank: int
    outer_group: str  # ranks that hold the same part; empty: the shard axis itself is gathered
    inner_group: str


@dataclass(frozen=True)
class TracedPlan:
    """Everything that the functions of ``ops`` know about a group. Equal plans have one key."""

    layout: GatherLayout
    rank: int
    device: str  # where it computes: shards may lie elsewhere
    shard_group: str
    replicate_group: str
    neighbours: Neighbours | None
    recompute: bool
    trainable: tuple[bool, ...]  # of each parameter; the layout may have a tail behind them
    widened: tuple[torch.dtype | None, ...]  # what parameters leave the function in, so that
    # gradients arrive in it: summed over the parameters' own axes before they are reduced
    reduce_dtype: torch.dtype
    gradient_wire_dtype: torch.dtype  # narrower: an exchange, and a sum in the reduce dtype
    grad_dtypes: tuple[torch.dtype, ...]  # of members, as one backward leaves them in eager mode
    scale: tuple[float, float]
    op: str
    counts_used: bool  # False: a parameter that nobody used gets zeros
    overlap: Overlap
    bucketed: bool = True
    syncs: bool = True  # False: whole gradients leave the graph, and wait
    added: tuple[bool, ...] = ()  # for which members a gradient waits that is added; (): none

    @property
    def size(self) -> int:
        return self.layout.size

    @cached_property
    def signature(self) -> str:
        """What ranks must agree on for their collectives to fit together.

        Not what waits on each: that is added before anything is sent.
        """
        alike = {"rank": 0, "device": "", "shard_group": "", "replicate_group": "", "added": ()}
        neighbours = self.neighbours and self.neighbours.size
        return f"{replace(self, **alike, neighbours=None)} {neighbours}"  # type: ignore[arg-type]

    @cached_property
    def members(self) -> tuple[int, ...]:
        """Indices of the trainable parameters."""
        return tuple(index for index, is_trained in enumerate(self.trainable) if is_trained)

    @cached_property
    def shards(self) -> tuple[ShardLayout, ...]:
        """Of the members."""
        return tuple(self.layout.items[index].shard for index in self.members)

    @cached_property
    def sinks(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shapes and dtypes of what takes gradients: rows, or whole ones; and one of none."""
        rows = [((piece.numel,), self.reduce_dtype) for piece in self.reduces]
        pairs = zip(self.shards, self.grad_dtypes, strict=True)
        wholes = [(shard.shape, dtype) for shard, dtype in pairs]
        return (*(rows if self.syncs else wholes), ((0,), self.reduce_dtype))

    @cached_property
    def gathers(self) -> tuple[GatherPiece, ...]:
        """What is gathered, in order."""
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
    def reduces(self) -> tuple[ReducePiece, ...]:
        """What is reduced, in order."""
        items = [self.layout.items[index] for index in self.members]
        least = self._least_nbytes(items)
        counts = len(items) if self.counts_used else 0
        small = [
            position
            for position, item in enumerate(items)
            if item.shard.is_replicated or not self._goes_alone(item, least)
        ]
        if not self.bucketed:
            small = small[:1] if counts else []  # the one that counts travel with
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

    def _reduce_piece(self, positions: tuple[int, ...], counts: int) -> ReducePiece:
        shards = [self.shards[position] for position in positions]
        layout = ReduceLayout.plan(
            positions, shards, self.size, self.reduce_dtype, counts, row_nbytes=self._row_nbytes
        )
        return ReducePiece(layout, positions, counts)

    @property
    def _row_nbytes(self) -> int:
        """Bytes that a row is a multiple of, as in eager mode: a host has no use for it."""
        return 1 if capabilities(torch.device(self.device)).is_host else ROW_NBYTES

    def _goes_alone(self, item: GatherItem, least: int) -> bool:
        row_nbytes = item.shard.padded_numel * item.compute_dtype.itemsize
        return _nbytes(item) >= least and row_nbytes % self._row_nbytes == 0

    def _least_nbytes(self, items: Sequence[GatherItem]) -> int:
        """Bytes from which on a parameter is a piece of its own."""
        device = capabilities(torch.device(self.device))
        total = sum(_nbytes(item) for item in items if not item.shard.is_replicated)
        rule = device.zero_copy(self.size)
        if rule is None:
            return total + 1
        return max(1, min(rule.nbytes, total // SMALL_SHARE)) if device.is_host else rule.nbytes


def _nbytes(item: GatherItem) -> int:
    return item.shard.numel * item.compute_dtype.itemsize


def _joined(runs: list[Run]) -> tuple[Run, ...]:
    """Make one of runs that lie side by side."""
    joined = runs[:1]
    for run in runs[1:]:
        last = joined[-1]
        if run.segment == last.segment and run.start == last.start + last.numel:
            joined[-1] = Run(last.segment, last.start, last.numel + run.numel)
        else:
            joined.append(run)
    return tuple(joined)


plans: dict[str, TracedPlan] = {}
"""By the keys by which graphs refer to them."""

_keys: dict[TracedPlan, str] = {}


def key_of(plan: TracedPlan) -> str:
    """Return the name by which a graph refers to a plan: a string, which no compiler makes dynamic.

    It follows from what the plan says and from nothing else. So equal units have one name, a
    compiler that keeps graphs on disk finds no other one under it, and a plan that comes back (a
    setting changed there and back) has its old graph.
    """
    if plan not in _keys:
        _keys[plan] = hashlib.sha256(f"{SOURCE} {plan}".encode()).hexdigest()[:16]
        plans[_keys[plan]] = plan
    return _keys[plan]

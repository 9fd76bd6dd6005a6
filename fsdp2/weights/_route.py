"""The planned route of a transfer (pieces, senders, order and bytes), and the cost of the route.

The route is planned once, from integers and names. This module contains no code for tensors, models
or process groups.

[Note: buffers of a pair]
Each pair of a trainer and an engine rank has a series of buffers; the n-th buffers of all pairs
form round n. Two rounds are in memory at once, so a round may use half of ``max_bytes`` on a rank.
A pair's share of that half is proportional to its share of the rank's bytes. All pairs therefore
need about the same number of rounds, and the buffers of a pair depend only on total sizes.
Entries of a buffer are sorted by descending element size. No entry therefore needs padding.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fsdp2._core.base.errors import ConfigError, wrong_type, wrong_value
from fsdp2._core.base.names import nbytes_text
from fsdp2._core.transfer.chunk_plan import Blocks, Region, overlap, split, within
from fsdp2._tools.plan.hardware import Hardware, hardware_for, seconds_of
from fsdp2.weights._layout import PLAN, Box, Layout, Shape, Spec, boxes_of, turned

ALIGNED = 64
"""Alignment of the buffers of a round, in bytes."""
HEAD_NBYTES = 48
"""Bytes of the header sent before each buffer: see ``_wire.Head``."""
FORMAT = "fsdp2 weights 1"


@dataclass(frozen=True)
class Source:
    """A parameter as sharded over the trainers. ``ranks`` lists the trainers at the positions of
    the blocks' grid, in row-major order; -1 marks a trainer that lacks the parameter (such as an
    expert of another trainer)."""

    name: str
    shape: Shape
    dtype: torch.dtype
    blocks: Blocks
    ranks: tuple[int, ...]


class Piece(NamedTuple):
    """A region of a parameter, and ``at``, the start of this region in a tensor of the engine.

    ``tensor`` is the index of that tensor on its engine rank. ``dtype`` is the wire dtype: the
    narrower of the parameter's and the tensor's.
    """

    tensor: int
    name: str
    region: Region
    at: Shape
    transposed: bool
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.region.numel * self.dtype.itemsize

    @property
    def made(self) -> Shape:
        """The shape on the wire. The engine's shape may differ in leading dims of size 1."""
        return turned(self.region.sizes, self.transposed)

    def part(self, region: Region) -> Piece:
        """Return the piece for a part of the region."""
        offset = tuple(map(operator.sub, region.starts, self.region.starts))
        offset = fitted(turned(offset, self.transposed), len(self.at), fill=0)
        return self._replace(region=region, at=tuple(map(operator.add, self.at, offset)))


# Pieces.


def pieces_of(
    engine: int, layout: Layout, sources: Mapping[str, Source], names: Mapping[str, str]
) -> Iterator[Piece]:
    """Yield the pieces of an engine rank's tensors. ConfigError: they overlap or do not fit."""
    for tensor, (title, spec) in enumerate(layout.items()):
        what = f"{title} of engine rank {engine}"
        found: dict[str, list[Piece]] = defaultdict(list)
        for box, at in _walk(what, spec, (0,) * len(spec.shape)):
            if box.name is None:  # zeros are not sent
                continue
            name = names.get(box.name, box.name)
            dtype = _wire_dtype(what, box, spec.dtype, sources.get(name))
            piece = Piece(tensor, name, Region(box.start, box.shape), at, box.transposed, dtype)
            if 0 not in box.shape:
                found[name].append(piece)
        for name, pieces in found.items():
            _refuse_twice(what, name, pieces)
            yield from pieces


def _walk(what: str, spec: Spec, at: Shape) -> Iterator[tuple[Box, Shape]]:
    """Yield each box of a tensor, and its start in the tensor."""
    along, whole = 0, spec.shape or (1,)
    place = len(at) - len(spec.shape) + spec.dim  # index of the dim in the full tensor
    for part in spec.boxes:
        shape = fitted(part.made, len(spec.shape), fill=1) or (1,)
        if (*shape[: spec.dim], whole[spec.dim], *shape[spec.dim + 1 :]) != whole:
            raise _misfit(what, spec, f"a part of shape {part.made}")
        # a dim that the full tensor lacks has size 1, so its start stays 0
        moved = tuple(a + along if dim == place else a for dim, a in enumerate(at))
        if isinstance(part, Box):
            yield part, moved
        elif part.dtype is spec.dtype:
            yield from _walk(what, part, moved)
        else:
            raise ConfigError(
                "FS633",
                f"{what} has dtype {spec.dtype}, but one of its parts has {part.dtype}. Give all "
                "parts the same dtype.",
            )
        along += shape[spec.dim]
    if along != whole[spec.dim]:
        raise _misfit(what, spec, f"parts of total size {along} along that dim")


def fitted(shape: Shape, ndim: int, fill: int) -> Shape:
    """Add or drop leading dims of size ``fill``, so that a shape has ``ndim`` dims if possible."""
    extra = max(len(shape) - ndim, 0)
    if any(size != fill for size in shape[:extra]):
        return shape
    return (fill,) * (ndim - len(shape)) + shape[extra:]


def _misfit(what: str, spec: Spec, found: str) -> ConfigError:
    return ConfigError(
        "FS632",
        f"{what}: expected parts that add up to {spec.shape} along dim {spec.dim}, found {found}. "
        "Every part must have the tensor's size in all other dims.",
    )


def _wire_dtype(what: str, box: Box, dtype: torch.dtype, source: Source | None) -> torch.dtype:
    """Return the wire dtype of a box; check that the parameter contains the box."""
    if source is None:
        raise ConfigError(
            "FS631",
            f"{what} refers to {box.name}, which the model does not have. Use the names of "
            "model.named_parameters(), without wrapper prefixes.",
        )
    ends = tuple(map(operator.add, box.start, box.shape))
    is_inside = len(ends) == len(source.shape) and all(map(operator.le, ends, source.shape))
    if not is_inside and 0 not in box.shape:
        raise ConfigError(
            "FS631",
            f"{what}: a box of shape {box.shape} at {box.start} extends beyond {box.name}, which "
            f"has shape {source.shape}. Keep boxes inside the parameter.",
        )
    dtypes = {source.dtype, dtype}
    if len(dtypes) > 1 and not all(each.is_floating_point for each in dtypes):
        raise ConfigError(
            "FS633",
            f"{what} has dtype {dtype}, but {box.name} has {source.dtype}. Only floating-point "
            "dtypes are cast; use the same dtype.",
        )
    return min(dtype, source.dtype, key=lambda each: each.itemsize)


def _refuse_twice(what: str, name: str, pieces: list[Piece]) -> None:
    """Reject a tensor that contains an element of a parameter twice."""
    regions = sorted((piece.region for piece in pieces), key=lambda region: region.starts)
    for index, one in enumerate(regions):
        for other in regions[index + 1 :]:
            if overlap(one, other) is not None:
                raise ConfigError(
                    "FS632",
                    f"{what} contains elements of {name} twice: boxes of shape {one.sizes} at "
                    f"{one.starts} and {other.sizes} at {other.starts} overlap. Use boxes that do "
                    "not overlap.",
                )
            if other.starts[0] >= one.starts[0] + one.sizes[0]:
                break


# The route.


@dataclass
class Buffer:
    """A message from a trainer to an engine rank in one round."""

    entries: list[Any] = field(default_factory=list)
    """On a trainer, pairs of a piece and its offset; on an engine rank, results of ``_entry``."""
    nbytes: int = 0


class Route:
    """The plan of a transfer, as plain values: identical on every rank that computes it.

    ``nodes`` lists the nodes of the trainers, followed by those of the engine ranks. ``names`` maps
    each name of a (possibly tied) parameter to the first of the parameter's names.
    """

    def __init__(
        self,
        sources: Iterable[Source],
        destination: Sequence[Layout],
        trainers: int,
        max_bytes: int,
        nodes: Sequence[int] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.sources = {source.name: source for source in sources}
        self.destination = [dict(layout) for layout in destination]
        self.trainers, self.max_bytes, self.nodes = trainers, max_bytes, nodes
        count = trainers + len(self.destination)
        if nodes is not None and len(nodes) != count:
            raise wrong_value(PLAN, "nodes", f"a node for each of {count} ranks", nodes)
        self.pairs: dict[tuple[int, int], int] = defaultdict(int)
        """Bytes from each trainer to each engine rank."""
        self.sent, self.received = [0] * trainers, [0] * len(self.destination)
        pieces = [
            (engine, piece)
            for engine, layout in enumerate(self.destination)
            for piece in pieces_of(engine, layout, self.sources, names or {})
        ]
        self.wires = {piece.name: piece.dtype for _, piece in pieces}
        """The wire dtype of each requested parameter."""
        total = sum(piece.nbytes for _, piece in pieces)
        self._most = min(max(total // (32 * trainers), 1 << 16), max(max_bytes // 2, 1))
        self._cells: dict[tuple[int, int], list[tuple[Piece, Region]]] = defaultdict(list)
        """The cells of each pair: parts of pieces."""
        for engine, piece in pieces:
            self._assign(engine, piece)
        self._peers = Counter(side for pair in self.pairs for side in enumerate(pair))
        """The number of peers of each trainer ``(0, trainer)`` and engine rank ``(1, engine)``."""
        self.number = number_of(self.sources, self.destination, trainers, max_bytes, nodes)
        """A fingerprint that ranks compare to check that they have the same plan."""
        peers = max(self._peers.values(), default=0)
        if max_bytes < 4 * ALIGNED * peers:
            expected = f"at least {4 * ALIGNED * peers} (a rank has {peers} peers)"
            raise wrong_value(PLAN, "max_bytes", expected, max_bytes)

    def _assign(self, engine: int, piece: Piece) -> None:
        """Split a piece into cells, and assign each to its least loaded holder."""
        source, itemsize = self.sources[piece.name], piece.dtype.itemsize
        for region, places in _cells(source.blocks, piece.region, max(self._most // itemsize, 1)):
            holders = [rank for place in places if (rank := source.ranks[place]) >= 0]
            if self.nodes is not None:
                node = self.nodes[self.trainers + engine]
                holders = [rank for rank in holders if self.nodes[rank] == node] or holders
            sender = min(holders, key=self.sent.__getitem__)
            self.pairs[sender, engine] += region.numel * itemsize
            self.sent[sender] += region.numel * itemsize
            self._cells[sender, engine].append((piece, region))
        self.received[engine] += piece.nbytes

    # Buffers. See [Note: buffers of a pair].

    def cap(self, trainer: int, engine: int) -> int:
        """Return the maximum size of a pair's buffer, in bytes."""
        half, nbytes = self.max_bytes // 2, self.pairs[trainer, engine]
        caps = []
        for side, total in enumerate((self.sent[trainer], self.received[engine])):
            count = self._peers[side, (trainer, engine)[side]]
            low = min(4096, half // (2 * count))
            caps.append(low + (half - low * count) * nbytes // total)
        return min(caps) // ALIGNED * ALIGNED

    def buffers(self, engine: int, trainer: int | None = None) -> dict[int, list[Buffer]]:
        """Return an engine rank's buffers by sender, or only those that ``trainer`` sends."""
        found = {}
        for sender in range(self.trainers) if trainer is None else (trainer,):
            if (sender, engine) in self._cells:
                parts = [piece.part(region) for piece, region in self._cells[sender, engine]]
                found[sender] = _packed(parts, self.cap(sender, engine))
        return found

    # Texts.

    def to_json(self, index: int | None) -> str:
        """Return the route as text for engine ranks: see ``Plan.to_json``."""
        of = {}
        for engine in range(len(self.destination)) if index is None else (index,):
            tensors = [
                [name, spec.shape, _short(spec.dtype), any(map(_is_zeros, boxes_of(spec)))]
                for name, spec in self.destination[engine].items()
            ]
            senders = {
                str(trainer): [[b.nbytes, [_entry(*entry) for entry in b.entries]] for b in buffers]
                for trainer, buffers in self.buffers(engine).items()
            }
            of[str(engine)] = {"tensors": tensors, "senders": senders}
        values = {
            "format": FORMAT,
            "plan": self.number,
            "trainers": self.trainers,
            "receivers": len(self.destination),
            "of": of,
        }
        return json.dumps(values, separators=(",", ":"))


def _is_zeros(box: Box) -> bool:
    return box.name is None and 0 not in box.shape


def number_of(*values: object) -> int:
    """Return a fingerprint of values, for comparison between ranks."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:7], "big")


@functools.lru_cache(maxsize=4096)
def _cells(blocks: Blocks, box: Region, most: int) -> list[tuple[Region, list[int]]]:
    """Split a box into cells, each with the positions in the blocks' grid that hold it. A cell that
    several trainers hold has at most ``most`` elements.
    Results are cached, because the layers of a model have equal shapes.
    """
    found = []
    for block, places in blocks.holders.items():
        common = overlap(block, box)
        if common is not None:
            parts = split(common.sizes, most if len(places) > 1 else common.numel)
            found += [(within(common, part), places) for part in parts]
    return found


def _entry(piece: Piece, start: int) -> list[Any]:
    """Return ``[tensor, start in it, shape in it, dtype, offset in the buffer]``."""
    shape = fitted(piece.made, len(piece.at), fill=1)
    return [piece.tensor, piece.at, shape, _short(piece.dtype), start]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _packed(pieces: list[Piece], cap: int) -> list[Buffer]:
    """Pack the pieces of a pair into buffers of at most ``cap`` bytes."""
    found = [Buffer()]
    for piece in sorted(pieces, key=lambda piece: -piece.dtype.itemsize):
        for region in split(piece.region.sizes, max(1, cap // 4 // piece.dtype.itemsize)):
            part = piece.part(within(piece.region, region))
            if found[-1].nbytes + part.nbytes > cap:
                found.append(Buffer())
            found[-1].entries.append((part, found[-1].nbytes))
            found[-1].nbytes += part.nbytes
    return found


class Figures:
    """The planned cost of a transfer.

    Attributes:
        sent_nbytes: bytes of values that each trainer sends.
        received_nbytes: bytes of values that each engine rank receives.
        least_nbytes: the bytes that engine ranks need, a lower bound on the bytes on the wire.
        travels_nbytes: bytes on the wire (values, and a header per buffer).
        messages: the number of buffers.
        rounds: the number of rounds; two are in memory at a time.
        over_least: ratio of the bytes on the wire to the lower bound.
        busiest: bytes sent by the busiest trainer, divided by the mean over all trainers.
        peaks: peak bytes of buffers per trainer and per engine rank.
    """

    def __init__(self, route: Route, hardware: object = None) -> None:
        self._route, self._hardware = route, hardware_for(hardware)
        self.sent_nbytes, self.received_nbytes = list(route.sent), list(route.received)
        self.least_nbytes = least = sum(route.received)
        self.messages = 0
        sizes: Counter[tuple[int, int, int]] = Counter()  # bytes by (is_engine, rank, round)
        for engine in range(len(route.received)):
            for trainer, buffers in route.buffers(engine).items():
                self.messages += len(buffers)
                for number, buffer in enumerate(buffers):
                    sizes[0, trainer, number] += buffer.nbytes
                    sizes[1, engine, number] += buffer.nbytes
        self.rounds = max((number + 1 for _, _, number in sizes), default=0)
        self.travels_nbytes = self.least_nbytes + HEAD_NBYTES * self.messages
        self.over_least = self.travels_nbytes / least if least else 1.0
        self.busiest = max(route.sent) * route.trainers / least if least else 1.0
        self.peaks = ([0] * len(route.sent), [0] * len(route.received))
        for (side, rank, number), nbytes in sizes.items():
            now = nbytes + sizes[side, rank, number + 1]
            self.peaks[side][rank] = max(self.peaks[side][rank], now)

    def seconds(self, hardware: Hardware) -> float:
        """Return the estimated time of the slowest rank, in seconds, considering only its links.

        Without ``nodes``, all traffic is assumed to cross nodes.
        """
        hardware = _links_of(hardware)
        busy: dict[tuple[int, int], float] = defaultdict(float)
        nodes, trainers = self._route.nodes, len(self.sent_nbytes)
        for pair, nbytes in self._route.pairs.items():
            is_near = nodes is not None and nodes[pair[0]] == nodes[trainers + pair[1]]
            for side in enumerate(pair):
                busy[side] += nbytes / (hardware.near if is_near else hardware.far)
        return max(busy.values(), default=0.0) + self.rounds * hardware.latency

    def gathered_seconds(self, hardware: Hardware) -> float:
        """Return the estimated time of a full gather and broadcast, in seconds, for comparison.

        Every trainer gathers all parameters (``full_params``), and one trainer broadcasts them to
        the engine ranks.
        """
        hardware = _links_of(hardware)
        sources = self._route.sources
        whole = sum(math.prod(sources[n].shape) * d.itemsize for n, d in self._route.wires.items())
        ranks = 1 + len(self.received_nbytes)
        broadcast = whole / hardware.far + math.ceil(math.log2(ranks)) * hardware.latency
        return seconds_of(hardware, "all_gather", whole, self._route.trainers, 1) + broadcast

    def __str__(self) -> str:
        peaks = [max(side, default=0) for side in self.peaks]
        rows = [
            ("values", f"{nbytes_text(self.least_nbytes)}, each byte once"),
            ("bytes over lower bound", f"{self.over_least:.4f}"),
            ("sent by a trainer", _spread(self.sent_nbytes)),
            ("received by an engine rank", _spread(self.received_nbytes)),
            ("busiest trainer over mean", f"{self.busiest:.3f}"),
            ("messages", f"{self.messages} in {self.rounds} rounds"),
            ("buffers", f"{nbytes_text(peaks[0])} on a trainer, {nbytes_text(peaks[1])} on an "
             f"engine rank (max_bytes: {nbytes_text(self._route.max_bytes)})"),
        ]  # fmt: skip
        if self._hardware is not None:
            gathered = f"{self.gathered_seconds(self._hardware):.3g}"
            rows.append(
                (f"seconds on {self._hardware.name}", f"{self.seconds(self._hardware):.3g}")
            )
            rows.append(("gathered, then broadcast", gathered))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {text}" for name, text in rows)


def _spread(sizes: Sequence[int]) -> str:
    low, high = min(sizes, default=0), max(sizes, default=0)
    return nbytes_text(low) if low == high else f"{nbytes_text(low)} to {nbytes_text(high)}"


def _links_of(hardware: object) -> Hardware:
    found = hardware_for(hardware)
    if found is None:
        raise wrong_type("Figures", "hardware", "a name or a fsdp2.plans.Hardware", hardware)
    return found

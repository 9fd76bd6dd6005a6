"""What a checkpoint has, and which rank writes which part of it.

Owns the flat keys of a state, and the rule by which ranks divide the writing among them. It must
not know files.

[Note: who writes what]
Ranks with the same list of contents need not tell each other what they have: from the list each
knows which block of a tensor lies where, and so what every rank writes. Blocks that several ranks
hold are dealt to these ranks in turn; what is not sharded is the first rank's to write. So before a
save the ranks exchange one number, which says whether their lists are equal, and no objects: no
rank gets a plan from each of the others.

Where lists differ (a rank has states that others lack), ranks exchange sums of what they have, axis
by axis. What all have is *common*, and divided as above. Anything else is written by each rank that
has it, and described in that rank's report (see ``_writing``).
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._core.base.errors import ConfigError
from fsdp2._core.base.names import printable
from fsdp2._core.comm.process_mesh import Grid
from fsdp2._core.transfer.chunk_plan import Blocks, Region
from fsdp2._core.transfer.redistribute import Grids
from fsdp2.checkpoint._saved import problem_of

Path = tuple[str | int, ...]
NOTHING = Region((), (0,))


def flat(state: Mapping[str, Any]) -> dict[Path, Any]:
    """Return the values of a state by their paths, as ``torch.distributed.checkpoint`` finds them.

    Keys of dicts become strings. A list is looked into only if there is a tensor or a dict in it, a
    tuple never.
    """
    found: dict[Path, Any] = {}

    def visit(path: Path, value: Any) -> None:
        if path and (problem := problem_of(path)):
            raise ConfigError(
                "FS102",
                f"save: the path of {printable(path)} in the state {problem}. Save it in extra.",
            )
        if isinstance(value, Mapping):
            for key, item in value.items():
                visit((*path, str(key)), item)
        elif isinstance(value, list) and _holds_values(value):
            for number, item in enumerate(value):
                visit((*path, number), item)
        else:
            found[path] = value

    visit((), state)
    return found


def _holds_values(value: Sequence[Any]) -> bool:
    return any(
        isinstance(item, Tensor | Mapping) or (isinstance(item, list) and _holds_values(item))
        for item in value
    )


@dataclass(frozen=True, eq=False)
class Content:
    """A value of a state as this rank has it.

    Attributes:
        path: where it stands in the dict that is saved.
        value: this rank's block of a tensor, or any object.
        blocks: how ranks divide a DTensor; None: it is not sharded, and the first rank's counts.
        place, own_block: this rank's among these, and what it holds.
        ranks: the ranks that divide it, in the order of their places.
    """

    path: Path
    value: Any
    blocks: Blocks | None = None
    place: tuple[int, ...] = ()
    own_block: Region = NOTHING
    ranks: tuple[int, ...] = ()

    @cached_property
    def key(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape) if self.blocks is None else self.blocks.shape

    def digest(self, digest_of_ranks: int) -> int:
        """Return a sum that is the same where another rank has a block of the same tensor."""
        told: tuple[Any, ...] = (self.path,)
        if self.blocks is not None:
            cuts = self.blocks.cuts, self.blocks.counts
            told += (self.blocks.shape, str(self.value.dtype), cuts, digest_of_ranks)
        return zlib.crc32(repr(told).encode())

    def writers(self, number: int) -> Iterator[tuple[Region, int]]:
        """Yield the blocks that have elements, each with the rank that writes it.

        ``number``: its place among all contents, by which ranks with the same block take turns.
        """
        assert self.blocks is not None
        at = self._turn(number)
        for place in self.blocks.places():
            region = self.blocks.block(place)
            if region.numel:
                own = [at.get(axis, coordinate) for axis, coordinate in enumerate(place)]
                yield region, self.ranks[_index(own, self.blocks.counts)]

    def own(self, number: int) -> Region | None:
        """Return the block that this rank writes, if it writes one."""
        assert self.blocks is not None
        if any(self.place[axis] != turn for axis, turn in self._turn(number).items()):
            return None
        return self.own_block if self.own_block.numel else None

    def _turn(self, number: int) -> dict[int, int]:
        """Return the coordinates of the writers on the axes whose ranks hold the same."""
        assert self.blocks is not None
        found: dict[int, int] = {}
        for axis, count in enumerate(self.blocks.counts):
            if axis not in self.blocks.axes:
                number, found[axis] = divmod(number, count)
        return found


def _index(place: Sequence[int], counts: Sequence[int]) -> int:
    index = 0
    for coordinate, count in zip(place, counts, strict=True):
        index = index * count + coordinate
    return index


@dataclass(frozen=True, eq=False)
class Piece:
    """What one rank writes of one value.

    Attributes:
        region: where the block lies in the tensor; None for an object.
        value: the block, on any device; or what ``torch.save`` made of an object.
        is_common: all ranks have the content.
    """

    content: Content
    region: Region | None
    value: Tensor | bytes
    is_common: bool

    @property
    def nbytes(self) -> int:
        return len(self.value) if isinstance(self.value, bytes) else self.value.nbytes


@dataclass(frozen=True)
class Contents:
    """All that a state has on this rank, and what other ranks have in common with it.

    Attributes:
        common: what all ranks have, in the same order on each.
        rest: what only some have.
        ranks: the ranks that save, the first one first.
        number: this rank's place among them.
    """

    common: list[Content]
    rest: list[Content]
    ranks: list[int]
    number: int

    @staticmethod
    def of(state: Mapping[str, Any], grids: Grids) -> Contents:
        """List what a state has, before ranks have compared: ``common`` has it all.

        Raises:
            ConfigError: two values have one key.
            UnsupportedError: a tensor that ``load`` could not read.
        """
        main = grids.main
        ranks = grids.ranks_of(main) or list(range(main.size))
        lines: dict[Grid, tuple[int, ...]] = {main: tuple(ranks)}
        found: dict[str, Content] = {}
        for path, value in flat(state).items():
            content = Content(path, value)
            if isinstance(value, Tensor):
                held = grids.hold(_name(path), value)
                has_elements = value.numel() > 0  # else no rank has a block to write
                local = held.local if has_elements else held.local.new_empty(value.shape)
                content = Content(path, local)
                if isinstance(value, DTensor) and has_elements:
                    if held.grid not in lines:
                        lines[held.grid] = tuple(grids.ranks_of(held.grid) or ())
                    on = lines[held.grid]
                    content = Content(path, held.local, held.blocks, held.grid.place, held.own, on)
            if content.key in found:
                raise ConfigError(
                    "FS615",
                    f"save: the state has two values under the key {content.key}. Rename a "
                    "parameter or a key of the optimizer's state.",
                )
            found[content.key] = content
        number = _index(main.place, main.counts)
        return Contents([found[key] for key in sorted(found)], [], ranks, number)

    def digests(self) -> list[int]:
        """Return a sum of each content, in order. See ``Content.digest``."""
        lines = {content.ranks: zlib.crc32(repr(content.ranks).encode()) for content in self.common}
        return [content.digest(lines[content.ranks]) for content in self.common]

    def agreed(self, main: Grid, digests: list[int], is_equal: bool) -> Contents:
        """Tell apart what all ranks have. It is collective unless the sums of all are equal."""
        if is_equal:
            return self
        shared = main.common(set(digests))
        told = [*zip(self.common, digests, strict=True)]
        common = [content for content, digest in told if digest in shared]
        rest = [content for content, digest in told if digest not in shared]
        return Contents(common, rest, self.ranks, self.number)

    def pieces(self) -> Iterator[Piece]:
        """Yield what this rank writes: of what is common first, in order."""
        for number, content in enumerate(self.common):
            if content.blocks is None:
                if self.number == 0:
                    yield _whole(content, is_common=True)
            elif (region := content.own(number)) is not None:
                yield Piece(content, region, content.value, is_common=True)
        for content in self.rest:
            if content.blocks is None:
                yield _whole(content, is_common=False)
            elif content.own_block.numel:
                yield Piece(content, content.own_block, content.value, is_common=False)

    def writers(self) -> Iterator[tuple[Content, Region | None, int]]:
        """Yield the blocks of what is common, in order, and which of the ranks writes each."""
        index_of = {rank: index for index, rank in enumerate(self.ranks)}
        for number, content in enumerate(self.common):
            if content.blocks is not None:
                for region, rank in content.writers(number):
                    yield content, region, index_of[rank]
            elif isinstance(content.value, Tensor):
                yield content, _all_of(content.shape), 0
            else:
                yield content, None, 0


def _name(path: Path) -> str:
    """Return what a user calls a tensor: a parameter's name, with its key in a state."""
    own = path[1:] if path[0] == "model" else path[2:]
    return ".".join(map(str, own or path))


def _whole(content: Content, *, is_common: bool) -> Piece:
    if isinstance(content.value, Tensor):
        return Piece(content, _all_of(content.shape), content.value, is_common)
    pickled = io.BytesIO()
    torch.save(content.value, pickled)
    return Piece(content, None, pickled.getvalue(), is_common)


def _all_of(shape: Sequence[int]) -> Region:
    return Region((0,) * len(shape), tuple(shape))

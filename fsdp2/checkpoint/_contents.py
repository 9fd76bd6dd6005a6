"""The contents of a checkpoint, and the rank that writes each of them.

Flattens a state into paths, compares contents across ranks before a save, assigns writers, and
pickles ``extra``. Accesses no files.

[Note: assignment of writers]
If all ranks have the same list of contents, they exchange no descriptions: each rank computes the
blocks of every tensor, and their writers, from the list. A block that several ranks have is
assigned round-robin, by the index of its content. The first rank writes unsharded values. Before a
save, ranks compare checksums of their lists, to detect whether the lists are equal.

If the lists differ (for example, some ranks lack an optimizer state), ranks exchange hashes of
their contents, axis by axis. Contents that all ranks have are *common*, and are assigned as above.
Each rank writes its remaining contents, and describes them in its report (see ``_files``).
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp2._core.base.errors import ConfigError
from fsdp2._core.base.names import printable
from fsdp2._core.base.slot_clock import clocks
from fsdp2._core.comm.process_mesh import Grid
from fsdp2._core.transfer.chunk_plan import Blocks, Region
from fsdp2._core.transfer.redistribute import Grids, LocalShard
from fsdp2.checkpoint._checksums import DamagedError
from fsdp2.checkpoint._pickle_machine import RefusedError, not_plain, plain_names, unpickle
from fsdp2.checkpoint._state import named_state, opened, settle_state, sharded_state
from fsdp2.checkpoint._torch_files import DEPTH, read_torch_file

Path = tuple[str | int, ...]
NAME_NCHARS = 4096  # maximum length of a path's key, which a pickle can repeat in only two bytes

EXTRA = "fsdp2_extra"
EXTRA_TENSORS = "fsdp2_extra_tensors"
SLOTS = "fsdp2_slots"  # the seed and the step count of ``fsdp2.reproducible``


def problem_of(path: Any) -> str:
    """Return the reason why a value at this path cannot be saved or loaded, or "" if it can."""
    if type(path) not in (tuple, list):
        return "is not a list of keys"
    if not 0 < len(path) <= DEPTH:
        return f"has {len(path)} keys, expected 1 to {DEPTH}"
    if not all(isinstance(k, str) or (isinstance(k, int) and k.bit_length() < 64) for k in path):
        return "has a key that is neither a string nor a 63-bit int"
    longest = max(len(key) for key in ("", *path) if isinstance(key, str))
    if longest > NAME_NCHARS:
        return f"has a key of {longest} characters, expected up to {NAME_NCHARS}"
    return ""


def flat(state: Mapping[str, Any]) -> dict[Path, Any]:
    """Return a state's values by path. As in ``torch.distributed.checkpoint``, keys become strings,
    lists are traversed only if they contain a tensor or a dict, and tuples are never traversed."""
    found: dict[Path, Any] = {}

    def visit(path: Path, value: Any) -> None:
        if path and (problem := problem_of(path)):
            raise ConfigError(
                "FS102",
                f"save: path {printable(path)} in the state {problem}. Save the value in extra.",
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
    """One value of a state: an object, or this rank's block of a tensor."""

    path: Path  # the value's path in the saved dict
    value: Any  # this rank's block of a tensor, or any object
    held: LocalShard | None = None  # of a DTensor; None: unsharded, saved by the first rank
    ranks: tuple[int, ...] = ()  # the ranks that have blocks, ordered by coordinates

    @cached_property
    def key(self) -> str:
        return ".".join(map(str, self.path))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape) if self.held is None else self.held.shape

    @property
    def whole(self) -> Region | None:
        """All of an unsharded tensor; None for another object."""
        if not isinstance(self.value, Tensor):
            return None
        return Region((0,) * len(self.shape), self.shape)

    def digest(self, digest_of_ranks: int) -> int:
        """Return a hash that is equal on all ranks that have a block of the same tensor."""
        told: tuple[Any, ...] = (self.path,)
        if self.held is not None:
            cuts = self.held.blocks.cuts, self.held.blocks.counts
            told += (self.shape, str(self.value.dtype), cuts, digest_of_ranks)
        return zlib.crc32(repr(told).encode())

    def writers(self, number: int) -> Iterator[tuple[Region, int]]:
        """Yield the non-empty blocks, each with its writer. ``number`` is this content's index."""
        assert self.held is not None
        blocks = self.held.blocks
        at = _turn(blocks, number)
        for place in blocks.places():
            region = blocks.block(place)
            if region.numel:
                own = [at.get(axis, coordinate) for axis, coordinate in enumerate(place)]
                yield region, self.ranks[_index(own, blocks.counts)]


def _turn(blocks: Blocks, number: int) -> dict[int, int]:
    """Return the writer's coordinate on each axis along which ranks have the same block."""
    found: dict[int, int] = {}
    for axis, count in enumerate(blocks.counts):
        if axis not in blocks.axes:
            number, found[axis] = divmod(number, count)
    return found


def _index(place: Sequence[int], counts: Sequence[int]) -> int:
    index = 0
    for coordinate, count in zip(place, counts, strict=True):
        index = index * count + coordinate
    return index


@dataclass(frozen=True, eq=False)
class Piece:
    """The part of a value that one rank writes."""

    content: Content
    region: Region | None  # None: a serialised object
    value: Tensor | bytes
    is_common: bool

    @property
    def nbytes(self) -> int:
        return len(self.value) if isinstance(self.value, bytes) else self.value.nbytes


@dataclass(frozen=True)
class Contents:
    """All contents of a state on this rank."""

    common: list[Content]  # contents that all ranks have, in the same order
    rest: list[Content]  # contents that only some ranks have
    ranks: tuple[int, ...]  # the saving ranks, beginning with the first
    number: int  # this rank's index in ``ranks``

    @staticmethod
    def of(state: Mapping[str, Any], grids: Grids) -> Contents:
        """List a state's contents. All are in ``common`` until ranks have compared their lists."""

        @cache
        def ranks_of(grid: Grid) -> tuple[int, ...]:
            return tuple(grids.ranks_of(grid) or range(grid.size))

        found: dict[str, Content] = {}
        for path, value in flat(state).items():
            content = Content(path, value)
            if isinstance(value, Tensor):
                held = grids.hold(_name(path), value)
                has_elements = value.numel() > 0  # a tensor without elements has no block to write
                local = held.local if has_elements else held.local.new_empty(value.shape)
                content = Content(path, local)
                if isinstance(value, DTensor) and has_elements:
                    content = Content(path, local, held, ranks_of(held.grid))
            if content.key in found:
                raise ConfigError(
                    "FS615",
                    f"save: the state has two values under the key {content.key}. Rename a "
                    "parameter or a key of the optimizer's state.",
                )
            found[content.key] = content
        number = _index(grids.main.place, grids.main.counts)
        return Contents([found[key] for key in sorted(found)], [], ranks_of(grids.main), number)

    def digests(self) -> list[int]:
        lines = {content.ranks: zlib.crc32(repr(content.ranks).encode()) for content in self.common}
        return [content.digest(lines[content.ranks]) for content in self.common]

    def agreed(self, main: Grid, digests: list[int], is_equal: bool) -> Contents:
        """Separate common contents from the rest. Collective unless ``is_equal``."""
        if is_equal:
            return self
        shared = main.common(set(digests))
        told = [*zip(self.common, digests, strict=True)]
        common = [content for content, digest in told if digest in shared]
        rest = [content for content, digest in told if digest not in shared]
        return Contents(common, rest, self.ranks, self.number)

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces that this rank writes: first those of common contents, in order."""
        for number, content in enumerate([*self.common, *self.rest]):
            held, is_common = content.held, number < len(self.common)
            turn = _turn(held.blocks, number) if held is not None and is_common else {}
            if held is None:
                if self.number == 0 or not is_common:
                    yield Piece(content, content.whole, _serialised(content.value), is_common)
            elif held.own.numel and all(held.grid.place[axis] == at for axis, at in turn.items()):
                yield Piece(content, held.own, content.value, is_common)

    def writers(self) -> Iterator[tuple[Content, Region | None, int]]:
        """Yield the blocks of common contents, in order, each with the index of its writer."""
        index_of = {rank: index for index, rank in enumerate(self.ranks)}
        for number, content in enumerate(self.common):
            if content.held is None:
                yield content, content.whole, 0
                continue
            for region, rank in content.writers(number):
                yield content, region, index_of[rank]


def _name(path: Path) -> str:
    """Return a tensor's name for messages: a parameter's name, and the key of a state, if any."""
    own = path[1:] if path[0] == "model" else path[2:]
    return ".".join(map(str, own or path))


def _serialised(value: Any) -> Tensor | bytes:
    if isinstance(value, Tensor):
        return value
    pickled = io.BytesIO()
    torch.save(value, pickled)
    return pickled.getvalue()


def state_of(model: nn.Module) -> dict[str, Any]:
    state = sharded_state(model)
    tensors = {name: value for name, value in state["model"].items() if value is not None}
    return {"model": opened(model, tensors)}


def main_of(state: dict[str, Any]) -> Grid:
    return Grids([*state["model"].values()]).main


def agree(
    what: str,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Any,
    state: dict[str, Any],
    number: int,
    require: Callable[[], None] = lambda: None,
) -> tuple[Grid, Contents, int]:
    """Return the saving ranks, this rank's contents, and the first rank's ``number`` (at most 63
    bits). If ``require`` raises on one rank, all ranks raise. Collective."""
    grids = Grids([*state["model"].values()])
    main = grids.main
    settle_state(optimizer)
    with main.together(what) as same:
        if optimizer is not None:  # ranks may have different states
            state["optimizer"] = named = named_state(model, optimizer)
            named["state"] = _without_tuples(named["state"])
        beside = packed(extra, main.is_first) if extra is not None else {}
        own_beside = beside.pop(EXTRA, None)  # None except on the first rank
        same["DTensors in extra"] = [*beside.get(EXTRA_TENSORS, ())]
        contents = Contents.of(state | beside, grids)
        digests = contents.digests()
        require()
    total = zlib.crc32(repr(digests).encode())
    number, most, least = main.highest(number if main.is_first else 0, total, -total)
    contents = contents.agreed(main, digests, is_equal=most == -least)
    if own_beside is not None:
        contents.rest.append(Content((EXTRA,), own_beside))
    if main.is_first and model in clocks:
        contents.rest.append(Content((SLOTS,), clocks[model].packed()))
    return main, contents, number


def _without_tuples(value: Any) -> Any:
    """Convert tuples of tensors to lists, because DCP does not traverse tuples."""
    if isinstance(value, dict):
        return {key: _without_tuples(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(item, Tensor) for item in value):
        return list(value)
    return value


# The ``extra`` of a checkpoint: any object, pickled without its DTensors. Only plain data loads
# without ``trust=True``, because unpickling other objects can run arbitrary code.


class _Pickler(pickle.Pickler):
    """Pickles an object, replacing its tensors with numbers."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.numbered: dict[int, tuple[int, Tensor]] = {}  # by the tensor's id

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        return self.numbered.setdefault(id(obj), (len(self.numbered), obj))[0]


def packed(extra: Any, is_first: bool) -> dict[str, Any]:
    """Return the entries to save for ``extra``: DTensors on all ranks, the rest on the first rank.
    DCP would save a dict's values from any rank, turn keys into strings, and lose empty dicts."""
    file, kept = io.BytesIO(), io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(extra)
    except (AttributeError, TypeError) as error:  # raised for a lambda or a lock, for example
        raise pickle.PicklingError(f"extra cannot be pickled: {error}") from error
    numbered = pickler.numbered.values()
    sharded_tensors = {str(n): t.detach() for n, t in numbered if isinstance(t, DTensor)}
    entries: dict[str, Any] = {EXTRA_TENSORS: sharded_tensors} if sharded_tensors else {}
    if is_first:
        plain = {n: t for n, t in numbered if not isinstance(t, DTensor)}
        torch.save({"pickled": file.getvalue(), "tensors": plain}, kept)
        entries[EXTRA] = kept.getvalue()
    return entries


def unpacked(kept: Any, whole: Any, *, trust: bool) -> Any:
    """Rebuild ``extra`` from its entries, with full tensors in place of DTensors. ConfigError:
    ``extra`` is not plain data. DamagedError, UnpicklingError: ``extra`` is damaged."""
    if not isinstance(kept, bytes) or not isinstance(whole, dict):
        raise DamagedError("extra has an unexpected type")
    try:
        if trust:
            file = torch.load(io.BytesIO(kept), map_location="cpu", weights_only=False)
        else:
            file = read_torch_file(io.BytesIO(kept), 0, len(kept), verify=True)
        if type(file) is not dict or type(file.get("pickled")) is not bytes:
            raise DamagedError("extra has an unexpected type")
        tensors = {**file["tensors"], **{int(number): tensor for number, tensor in whole.items()}}
        if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise DamagedError("a tensor in extra has an unexpected type")
        pickled = file["pickled"]
        return unpickle(pickled, plain_names(), trust=trust, persistent=tensors.__getitem__)
    except RefusedError as error:
        raise not_plain("extra", error) from error

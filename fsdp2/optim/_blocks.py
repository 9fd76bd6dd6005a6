"""States that an optimizer keeps in blocks of elements: codes of few bits, and a scale for each.

Owns what such states are for a shard of some size, and their form in a checkpoint: tensors of the
whole parameter, of which each rank has the part of its rows, as long as no block is divided. It
must not know files, nor how a step runs; an optimizer makes its states by a step that it is asked
for (``Probe``).

[Note: states in blocks]
Libraries keep them in two ways: as plain tensors of other lengths beside those of the parameter's
shape (bitsandbytes), and as a tensor that wraps others (torchao). Nothing in such a tensor says
what it is, so the class is asked: a step on zeros of a shard's shape, with the options of its param
group, makes the states that it makes for such a shard. A plain tensor in them, or in what wraps,
has one element for every ``block`` of the parameter's, counted flat; of several sizes of shards
every one must have the same. So each rank knows what the others have, and nothing is sent. Tables
that translate codes (``qmap``) are the class's own, made by every step that makes states, and are
not saved.

When states come back, the step on zeros makes room, and the values are copied there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from fsdp2._core.base import torch_dealt, torch_dtensor
from fsdp2._core.base.errors import UnsupportedError
from fsdp2._core.base.rows import Deal, rows_of
from fsdp2._core.params.layout import contiguous_stride

State = dict[str, Any]
Probe = Callable[[Sequence[int], torch.dtype, torch.device], State]
"""Makes the states of a shard of a shape, by a step on zeros."""


@dataclass(frozen=True)
class Part:
    """A plain tensor of a state: how many elements of the parameter each of its own is for."""

    block: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Lines:
    """How a parameter's rows lie on the ranks of one axis."""

    axis: int
    size: int
    place: int
    row_numel: int
    rows: tuple[tuple[int, int], ...]

    @staticmethod
    def of(param: DTensor) -> Lines | None:
        """Return it for a parameter that one axis divides, by rows; else None."""
        mesh, cut = param.device_mesh, []
        for axis, placement in enumerate(param.placements):
            if not placement.is_replicate():
                cut.append((axis, placement))
        if len(cut) != 1 or not torch_dtensor.shards_dim(cut[0][1], 0):
            return None
        axis, size = cut[0][0], mesh.size(cut[0][0])
        deal = torch_dealt.deal_in(cut[0][1])
        rows = tuple(rows_of(param.shape[0], size, place, deal) for place in range(size))
        place = mesh.get_local_rank(axis)
        return Lines(axis, size, place, math.prod(param.shape[1:]), rows)

    def ends(self, block: int) -> tuple[int, ...] | None:
        """Return where each rank's blocks end, in blocks; None if some block is divided."""
        if any(start * self.row_numel % block for start, count in self.rows if count):
            return None
        counts = [-(-count * self.row_numel // block) for _, count in self.rows]
        return tuple(itertools.accumulate(counts))


def is_tensor(value: object) -> bool:
    """True for what is no number."""
    return isinstance(value, Tensor) and value.dim() > 0


def is_apart(entry: State, param: Tensor) -> bool:
    """True if a parameter's state is in the form of a checkpoint, and not in that of a step."""
    return any(
        isinstance(value, DTensor) and value.dim() and value.shape != param.shape
        for value in entry.values()
    )


def plain_parts(entry: State) -> dict[str, Tensor]:
    """Return the plain tensors of a state by name, but for numbers and tables of codes."""
    found: dict[str, Tensor] = {}

    def look(name: str, value: Any) -> None:
        if isinstance(value, DTensor):
            value = torch_dtensor.local_tensor(value)
        if not is_tensor(value):
            return
        if name.rpartition(".")[2].startswith("qmap"):
            return
        if type(value) is Tensor:
            found[name] = value
        elif hasattr(value, "__tensor_flatten__"):
            for inner in value.__tensor_flatten__()[0]:
                look(f"{name}.{inner}", getattr(value, inner))

    for key, value in entry.items():
        look(key, value)
    return found


def _block_of(numel: int, count: int) -> int | None:
    """Return how many elements of a shard one of a state's is for; None: not for so many each."""
    if not count or count > numel:
        return None
    if numel % count == 0:
        return numel // count
    block = 2  # the last one is for fewer
    while -(-numel // block) > count:
        block *= 2
    return block if -(-numel // block) == count else None


class StatesInBlocks:
    """What one class keeps for the shards of one parameter.

    ``parts`` are those of every shard with elements, by name.
    """

    def __init__(self, fqn: str, param: DTensor, lines: Lines, parts: dict[str, Part]) -> None:
        self.fqn = fqn
        self.param = param
        self.lines = lines
        self.parts = parts

    @staticmethod
    def of(fqn: str, param: DTensor, probe: Probe) -> StatesInBlocks | None:
        """Ask the class; None: it keeps plain states in the parameter's shape.

        Raises:
            UnsupportedError: shards of this parameter have states that do not go together.
        """
        lines = Lines.of(param)
        if lines is None:
            return None
        local = torch_dtensor.local_tensor(param)
        found: dict[int, dict[str, Part]] = {}
        is_plain = True

        def ask(count: int) -> None:
            nonlocal is_plain
            entry = probe((count, *param.shape[1:]), local.dtype, local.device)
            numel, parts = count * lines.row_numel, {}
            for name, part in plain_parts(entry).items():
                block = _block_of(numel, part.numel())
                if block is None:
                    raise _refused(fqn, f"{name} has {part.numel()} elements for {numel} of it")
                is_plain = is_plain and block == 1 and name in entry
                parts[name] = Part(block, part.dtype)
            found[numel] = parts

        counts = {count for _, count in lines.rows if count}
        for count in sorted(counts, reverse=True):
            ask(count)
        if is_plain:
            return None
        ask(2 * max(counts))  # scales of columns are as many for any number of rows
        if len(set(map(str, found.values()))) > 1:
            names = ", ".join(sorted({name for parts in found.values() for name in parts}))
            raise _refused(
                fqn, f"{names} are of several kinds for shards of {sorted(found)} elements"
            )
        kept = found[max(found)]
        for name, one in kept.items():
            if lines.ends(one.block) is None:
                raise _refused(fqn, f"shards divide the blocks of {one.block} elements of {name}")
        return StatesInBlocks(fqn, param, lines, kept)

    def placed(self, name: str, local: Tensor | None) -> DTensor:
        """Return a part as a tensor of the whole parameter; None: there is only room for it."""
        part, param, lines = self.parts[name], self.param, self.lines
        shape, own = tuple(param.shape), torch_dtensor.local_tensor(param)
        placements: list[Placement] = list(param.placements)
        sizes = tuple(own.shape)
        if part.block > 1:
            ends = lines.ends(part.block)
            assert ends is not None
            shape, start = (ends[-1],), ends[lines.place - 1] if lines.place else 0
            sizes = (ends[lines.place] - start,)
            placements[lines.axis] = torch_dealt.Dealt(0, Deal(1, 0, ends))
        stride = contiguous_stride(shape)
        spec = torch_dtensor.make_spec(param.device_mesh, placements, shape, stride, part.dtype)
        if local is None:
            local = torch.empty(sizes, dtype=part.dtype, device=own.device)
        return torch_dtensor.new_dtensor(local.view(sizes), spec)

    def apart(self, entry: State) -> State:
        """Return a parameter's state in the form of a checkpoint."""
        made = {key: value for key, value in entry.items() if not is_tensor(value)}
        own = plain_parts(entry) if torch_dtensor.local_tensor(self.param).numel() else {}
        for name in self.parts:
            if own and name not in own:
                raise _refused(self.fqn, f"its state has no {name}")
            made[name] = self.placed(name, own.get(name))
        return made

    def together(self, entry: State, probe: Probe) -> State:
        """Return a state that came from a checkpoint as a step of the class has it.

        Collective, if it lies as another model's does: ranks take its parts in one order.

        Raises:
            UnsupportedError: a part of it is missing, or has another form. So it is on all ranks.
        """
        local = torch_dtensor.local_tensor(self.param)
        made = probe(local.shape, local.dtype, local.device)
        made.update({key: value for key, value in entry.items() if not is_tensor(value)})
        targets = plain_parts(made) if local.numel() else {}
        for name in sorted(self.parts):
            source, room = entry.get(name), self.placed(name, None)
            if not isinstance(source, DTensor) or source.shape != room.shape:
                raise _refused(self.fqn, f"what was loaded has no {name} of shape {room.shape}")
            torch_dealt.adopt(source)
            if not torch_dealt.are_same(source.placements, room.placements):
                mesh = self.param.device_mesh
                source = torch_dealt.redistribute(source, mesh, room.placements)
            if name in targets:
                own = torch_dtensor.local_tensor(source)
                targets[name].copy_(own.view(targets[name].shape))
        return made


def _refused(fqn: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        "FS704",
        f"{fqn}: {why}. Such states belong to one rank's shard, and a whole or a sharded "
        "checkpoint would give them to other ranks. Let no shard divide a block, by "
        "shard_placement_fn: fsdp2.Aligned(None, multiple_of=..., at_least=...). Or save "
        "fsdp2.checkpoint.local_state(model, optimizer) on each rank.",
    )

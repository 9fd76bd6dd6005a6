"""Optimizer states stored in blocks of elements: low-bit codes with one scale per block.

In checkpoints, these states are tensors for the full parameter, sharded like its rows. A block must
not be split across ranks.

[Note: states in blocks]
Libraries store such states as plain tensors whose lengths differ from the parameter's length
(bitsandbytes), or as a tensor that wraps other tensors (torchao). These tensors do not describe
their layout, so we probe it: to create the states of a shard, we run one step on zeros of the
shard's shape, with the options of the parameter's group. Each plain tensor among the states, or
inside a wrapper, has one element per ``block`` elements of the flattened parameter. ``block`` must
be the same for all shard sizes, so that each rank can compute the other ranks' layouts without
communication. Tables for decoding (``qmap``) are not saved: the optimizer class creates them
together with the states. Loading runs a step on zeros to allocate the states, and copies values in.
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
from fsdp2.optim._wrapped import State

Probe = Callable[[Sequence[int], torch.dtype, torch.device], State]
"""Creates the states for a shard of the given shape, by running one step on zeros."""


@dataclass(frozen=True)
class Part:
    """A plain tensor of a state: its dtype, and how many parameter elements each element covers."""

    block: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Lines:
    """The distribution of a parameter's rows over the ranks of one axis."""

    axis: int
    place: int
    row_numel: int
    rows: tuple[tuple[int, int], ...]

    @staticmethod
    def of(param: DTensor) -> Lines | None:
        """Return a parameter's distribution, or None unless exactly one axis shards it, by rows."""
        cuts = [(axis, p) for axis, p in enumerate(param.placements) if not p.is_replicate()]
        if len(cuts) != 1 or not torch_dtensor.shards_dim(cuts[0][1], 0):
            return None
        ((axis, placement),) = cuts
        mesh, deal = param.device_mesh, torch_dealt.deal_in(placement)
        size = mesh.size(axis)
        rows = tuple(rows_of(param.shape[0], size, place, deal) for place in range(size))
        place = mesh.get_local_rank(axis)
        return Lines(axis, place, math.prod(param.shape[1:]), rows)

    def ends(self, block: int) -> tuple[int, ...] | None:
        """Return the end of each rank's part, in blocks, or None if any block is split."""
        if any(start * self.row_numel % block for start, count in self.rows if count):
            return None
        counts = [-(-count * self.row_numel // block) for _, count in self.rows]
        return tuple(itertools.accumulate(counts))


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def is_apart(entry: State, param: Tensor) -> bool:
    """Return True if a parameter's state is in the form for checkpoints, not the form for steps."""
    return any(
        isinstance(value, DTensor) and value.dim() and value.shape != param.shape
        for value in entry.values()
    )


def plain_parts(entry: State) -> dict[str, Tensor]:
    """Return a state's plain tensors by name, except 0-dim tensors and tables for decoding."""
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
    """Return the number of shard elements per state element, or None if it is not constant."""
    if not count or count > numel:
        return None
    if numel % count == 0:
        return numel // count
    block = 2  # the last block may be shorter
    while -(-numel // block) > count:
        block *= 2
    return block if -(-numel // block) == count else None


@dataclass(frozen=True, eq=False)
class StatesInBlocks:
    """An optimizer's states for a parameter. ``parts``: the plain tensors of a non-empty shard."""

    fqn: str
    param: DTensor
    lines: Lines
    parts: dict[str, Part]

    @staticmethod
    def of(fqn: str, param: DTensor, probe: Probe) -> StatesInBlocks | None:
        """Probe the states. Return None if they are plain. UnsupportedError: unsupported layout."""
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
                    raise _refused(fqn, f"{name} has {part.numel()} elements; a shard has {numel}")
                is_plain = is_plain and block == 1 and name in entry
                parts[name] = Part(block, part.dtype)
            found[numel] = parts

        counts = {count for _, count in lines.rows if count}
        for count in sorted(counts, reverse=True):
            ask(count)
        if is_plain:
            return None
        ask(2 * max(counts))  # detects per-column scales, whose number does not grow with the rows
        if len(set(map(str, found.values()))) > 1:
            names = ", ".join(sorted({name for parts in found.values() for name in parts}))
            raise _refused(
                fqn, f"{names} have different layouts for shards of {sorted(found)} elements"
            )
        kept = found[max(found)]
        for name, one in kept.items():
            if lines.ends(one.block) is None:
                raise _refused(fqn, f"shards split {name}'s blocks of {one.block} elements")
        return StatesInBlocks(fqn, param, lines, kept)

    def placed(self, name: str, local: Tensor | None) -> DTensor:
        """Return a part as a DTensor for the full parameter. If ``local`` is None, allocate it."""
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
        made = {key: value for key, value in entry.items() if not is_tensor(value)}
        own = plain_parts(entry) if torch_dtensor.local_tensor(self.param).numel() else {}
        for name in self.parts:
            if own and name not in own:
                raise _refused(self.fqn, f"its state has no {name}")
            made[name] = self.placed(name, own.get(name))
        return made

    def together(self, entry: State, probe: Probe) -> State:
        """Return a loaded state in the optimizer's form. Collective if it must be redistributed."""
        local = torch_dtensor.local_tensor(self.param)
        made = probe(local.shape, local.dtype, local.device)
        made.update({key: value for key, value in entry.items() if not is_tensor(value)})
        targets = plain_parts(made) if local.numel() else {}
        for name in sorted(self.parts):  # sorted, so that all ranks use the same order
            source, room = entry.get(name), self.placed(name, None)
            if not isinstance(source, DTensor) or source.shape != room.shape:
                raise _refused(self.fqn, f"the loaded state has no {name} of shape {room.shape}")
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
        f"{fqn}: {why}. Such states fit only one rank's shard, but a full or sharded checkpoint "
        "would load them on other ranks. Keep every block in one shard with shard_placement_fn: "
        "fsdp2.Aligned(None, multiple_of=..., at_least=...). Alternatively, save "
        "fsdp2.checkpoint.local_state(model, optimizer) on each rank.",
    )

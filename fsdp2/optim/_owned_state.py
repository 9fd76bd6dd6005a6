"""What an owner has of a matrix, and the two forms of its state.

Owns ``Owned``, and the ways from the form of checkpoints to the owners (``bring``) and back
(``give_back``). It must not know when an optimizer steps.

[Note: states of owners]
An owner's optimizer keeps for a matrix what it likes: tensors of its shape (momentum), of other
shapes (Shampoo's factors), numbers, in any containers. For checkpoints a tensor becomes a DTensor
on the parameter's mesh. One of the parameter's shape lies as the parameter does, any other one in
rows over the first axis along which the parameter is sharded, so that no rank has more than its
share of either. 0-dim tensors and everything else is the same on every rank. Of a batch, the states
of its matrices are stacked. What is loaded may also be plain tensors, which every rank has whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from fsdp2._core.base import torch_dealt, torch_dtensor, torch_tensors
from fsdp2._core.base.containers import map_tensors
from fsdp2._core.base.rows import rows_of
from fsdp2._core.params.layout import dense_stride
from fsdp2._core.params.param import OwnerMark, own_attributes
from fsdp2._core.transfer.crew import Crew, part_of, stream
from fsdp2._core.transfer.owners import Cargo
from fsdp2.optim._runs import Table, placed_part

Held = Sequence[tuple["Owned", Optimizer | None]]
"""Matrices with the optimizers of their rounds."""


@dataclass(eq=False)
class Owned:
    """A matrix: a parameter, or with ``lead`` one of the batch that its first dim counts.

    ``whole`` is the copy of its owner; None on other ranks.
    """

    name: str
    param: Tensor
    group: int
    lead: int | None
    cargo: Cargo
    whole: nn.Parameter | None = None
    printed: Tensor | None = None  # of this rank's part, when it was last what the owner has
    _cargos: dict[int, Cargo] = field(default_factory=dict)

    def make_whole(self) -> nn.Parameter:
        """Make room for the owner's copy, laid out as the whole parameter is."""
        skip = 0 if self.lead is None else 1
        local = torch_dtensor.local_part(self.param)
        made = torch.empty_strided(
            self.cargo.cut.shape,
            self.param.stride()[skip:],
            dtype=self.param.dtype,
            device=local.device,
        )
        self.whole = nn.Parameter(made, requires_grad=self.param.requires_grad)
        owner = OwnerMark.owner_of(self.param)
        if owner is not None:
            vars(self.whole).update(owner.attributes)
        elif isinstance(self.param, nn.Parameter) and not isinstance(self.param, DTensor):
            vars(self.whole).update(own_attributes(self.param))
        return self.whole

    def part(self, rank: int, tensor: Tensor | None = None) -> Tensor:
        """Return this rank's part of the parameter, or of a tensor that lies as it does."""
        return part_of(self.cargo.cut, self.param if tensor is None else tensor, rank)

    def gradient(self, who: str) -> Tensor:
        """Return the local gradient of the parameter. Collective if it lies in another way."""
        assert self.param.grad is not None
        return placed_part(self.param, self.param.grad, who).detach()

    def whole_gradient(self) -> Tensor:
        """Return the owner's gradient, which is made if there is none."""
        assert self.whole is not None
        assert self.param.grad is not None
        if self.whole.grad is None:
            dtype = self.param.grad.dtype
            if self.whole.grad_dtype is not dtype:  # the user chose one for the parameter
                self.whole.grad_dtype = dtype
            self.whole.grad = torch.empty_like(self.whole, dtype=dtype, requires_grad=False)
        return self.whole.grad

    def cargo_of(self, dtype: torch.dtype) -> Cargo:
        """Return what travels if its elements do in a dtype."""
        itemsize = dtype.itemsize
        if itemsize == self.cargo.itemsize:
            return self.cargo
        if itemsize not in self._cargos:
            self._cargos[itemsize] = Cargo(self.cargo.cut, self.cargo.owner, itemsize)
        return self._cargos[itemsize]

    def drop_gradient(self) -> None:
        if self.whole is not None:
            self.whole.grad = None

    def shard_print(self, rank: int) -> Tensor:
        """Return what tells whether this rank's part was written to."""
        return bit_sum(self.part(rank))

    def identity(self) -> tuple[object, ...]:
        """Return what stays the same if a step writes to the owner's copy where it is."""
        assert self.whole is not None
        storage = torch_tensors.number_of(self.whole.untyped_storage())
        return storage, tuple(self.whole.shape), self.whole.dtype


_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PERIOD = 1 << 16
_ROWS_AT_A_TIME = 16  # of integers of 64 bits: 8 MiB


@functools.cache
def _weights(device: torch.device, count: int, seed: int) -> Tensor:
    """Return odd random integers, which multiply what is summed."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-(2**62), 2**62, (count,), generator=generator, device="cpu")
    return (2 * drawn + 1).to(device)


def bit_sum(part: Tensor) -> Tensor:
    """Return a sum over the bits of a tensor, ``[1]``: another one for other bits.

    Read as integers, each is multiplied by a random one of 64 bits, of its place; products wrap
    around. So two tensors of equal sums are found by nobody who does not look for them.
    """
    flat = part.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    bits = flat.view(_INTS[flat.dtype.itemsize])
    total = torch.zeros(1, dtype=torch.int64, device=part.device)
    if not bits.numel():
        return total
    of_place = _weights(part.device, _PERIOD, 1)
    of_block = _weights(part.device, 1024, 2)
    full = bits.numel() // _PERIOD
    rows = bits[: full * _PERIOD].view(full, _PERIOD)
    for start in range(0, full, _ROWS_AT_A_TIME):
        block = rows[start : start + _ROWS_AT_A_TIME]
        weight = int(1 + 2 * (start // _ROWS_AT_A_TIME))
        sums = (block * of_place).sum(1)
        total += (sums * of_block[: len(sums)]).sum() * weight
    rest = bits[full * _PERIOD :]
    if rest.numel():
        total += (rest * of_place[: rest.numel()]).sum() * 3
    return total


# --- The two forms of a state.


@dataclass(frozen=True)
class _Leaf:
    """Stands for a tensor of some dims in what an owner tells of a state."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]  # a product of matrices rounds by it
    dtype: torch.dtype


@dataclass(frozen=True)
class _Number:
    """Stands for a 0-dim tensor: its value, and whether it was on the device."""

    value: Tensor
    is_on_device: bool


EACH = "of each matrix"
"""In the state of a batch: a field that is not alike for all its matrices, as a list."""


def _of_matrix(entry: dict[str, Any], lead: int | None) -> dict[str, Any]:
    """Return the state of one matrix, out of that of its parameter."""
    if lead is None:
        return entry
    return {
        key: value[EACH][lead] if isinstance(value, dict) and EACH in value else value
        for key, value in entry.items()
    }


def _same_field(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (not one.dim() and not other.dim() and torch.equal(one, other))
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same_field(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_same_field(a, b) for a, b in pairs)
    return bool(one == other)


def bring(crew: Crew, held: Held, table: Table, limit: int) -> None:
    """Let owners have the states of a table. Collective, if there are any."""
    if not any(table.get(one.param) for one, _ in held):
        return
    cargos: list[Cargo] = []
    sources: list[tuple[Owned, DTensor]] = []
    arrived: dict[int, Tensor] = {}
    slots: dict[tuple[int, int], int] = {}

    def leaves(entry: Any, visit: Callable[[Tensor], Tensor]) -> Any:
        return {key: map_tensors(visit, value) for key, value in entry.items()}

    for one, _ in held:

        def note(value: Tensor, one: Owned = one) -> Tensor:
            if isinstance(value, DTensor) and value.dim():
                cut = crew.cut(one.name, value, one.lead)
                slots[id(one), id(value)] = len(cargos)
                cargos.append(Cargo(cut, one.cargo.owner, value.dtype.itemsize))
                sources.append((one, value))
            return value

        leaves(_of_matrix(table.get(one.param, {}), one.lead), note)
    if cargos:
        flights = stream(
            crew,
            cargos,
            [value.dtype for _, value in sources],
            lambda place: part_of(cargos[place].cut, sources[place][1], crew.me),
            torch_dtensor.local_tensor(sources[0][1]).device,
            limit,
            to_owners=True,
        )
        for numbers, parts in flights:
            for place in numbers:
                if cargos[place].owner == crew.me:
                    arrived[place] = _room(*sources[place])
            for place, part, value in parts:
                arrived[place][part.region.slices].copy_(value)
    for one, inner in held:
        if one.whole is None or inner is None or not table.get(one.param):
            continue

        def take(value: Tensor, one: Owned = one) -> Tensor:
            place = slots.get((id(one), id(value)))
            if place is not None:
                return arrived[place]
            own = torch_dtensor.local_part(value)
            is_stacked = one.lead is not None and own.dim() and len(own) == len(one.param)
            return own[one.lead].clone() if is_stacked else own.clone()

        inner.state[one.whole] = leaves(_of_matrix(table[one.param], one.lead), take)


def _room(one: Owned, value: DTensor) -> Tensor:
    """Return room for a whole state, laid out as it was with its owner, if that is known."""
    skip = 0 if one.lead is None else 1
    shape, stride = tuple(value.shape[skip:]), tuple(value.stride()[skip:])
    device = torch_dtensor.local_tensor(value).device
    return torch.empty_strided(shape, dense_stride(shape, stride), dtype=value.dtype, device=device)


def give_back(crew: Crew, held: Held, table: Table, limit: int) -> None:
    """Move the states of owners to a table. Collective."""
    told: dict[int, dict[str, Any]] = {}
    values: dict[tuple[int, int], Tensor] = {}
    counts = [0] * len(held)  # tensors of each matrix so far
    for number, (one, inner) in enumerate(held):
        if one.whole is None or inner is None or one.whole not in inner.state:
            continue

        def describe(value: Tensor, number: int = number) -> Any:
            if not value.dim():
                return _Number(value.detach().cpu(), value.device.type != "cpu")
            values[number, counts[number]] = value.detach()
            counts[number] += 1
            stride = dense_stride(tuple(value.shape), value.stride())
            return _Leaf(tuple(value.shape), stride, value.dtype)

        entry = inner.state[one.whole]
        told[number] = {key: map_tensors(describe, value) for key, value in entry.items()}
    everywhere: dict[int, dict[str, Any]] = {}
    for some in crew.grid.collect(told):
        everywhere.update(some)
    by_param: dict[int, list[int]] = {}
    for number in sorted(everywhere):
        by_param.setdefault(id(held[number][0].param), []).append(number)
    cargos: list[Cargo] = []
    dtypes: list[torch.dtype] = []
    targets: list[Tensor] = []
    owners_values: list[Tensor | None] = []
    for numbers in by_param.values():
        numbers.sort(key=lambda number: held[number][0].lead or 0)
        one = held[numbers[0]][0]
        made: dict[int, Tensor] = {}
        entries: list[dict[str, Any]] = []

        def target(
            leaf: _Leaf, place: int, one: Owned = one, made: dict[int, Tensor] = made
        ) -> Tensor:
            if place not in made:
                made[place] = _empty_like_state(one, leaf)
            return made[place]

        for number in numbers:
            owned = held[number][0]
            place = -1

            def build(value: Any, owned: Owned = owned, number: int = number) -> Any:
                nonlocal place
                if isinstance(value, _Number):
                    local = torch_dtensor.local_part(owned.param)
                    return value.value.to(local.device) if value.is_on_device else value.value
                if not isinstance(value, _Leaf):
                    return value
                place += 1
                tensor = target(value, place)
                cut = crew.cut(owned.name, tensor, owned.lead)
                cargos.append(Cargo(cut, owned.cargo.owner, value.dtype.itemsize))
                dtypes.append(value.dtype)
                targets.append(tensor)
                owners_values.append(values.get((number, place)))
                return tensor

            fields = everywhere[number].items()
            entries.append({key: _map_leaves(build, value) for key, value in fields})
        table[one.param] = {
            key: entries[0][key]
            if all(_same_field(entry.get(key), entries[0][key]) for entry in entries)
            else {EACH: [entry.get(key) for entry in entries]}
            for key in entries[0]
        }
    if not cargos:
        return

    def own(place: int) -> Tensor:
        value = owners_values[place]
        assert value is not None
        return value

    device = torch_dtensor.local_part(targets[0]).device
    for _, parts in stream(crew, cargos, dtypes, own, device, limit, to_owners=False):
        for place, _, value in parts:
            part_of(cargos[place].cut, targets[place], crew.me).copy_(value)


def _map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Replace what stands for tensors, in containers too."""
    if isinstance(value, dict):
        return {key: _map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_map_leaves(function, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return function(value)


def _empty_like_state(one: Owned, leaf: _Leaf) -> Tensor:
    """Return room for a state, placed as [Note: states of owners] says."""
    shape, stride = leaf.shape, leaf.stride
    if one.lead is not None:
        shape, stride = (len(one.param), *shape), (max(math.prod(shape), 1), *stride)
    return room_for_state(one.param, shape, stride, leaf.dtype)


def room_for_state(
    param: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return room for a state of some shape of a parameter."""
    local = torch_dtensor.local_part(param)
    if not isinstance(param, DTensor):
        return torch.empty_strided(shape, stride, dtype=dtype, device=local.device)
    mesh = param.device_mesh
    placements: list[Placement] = list(param.placements)
    sizes = tuple(local.shape)
    if shape != tuple(param.shape):
        placements, count = [Replicate()] * mesh.ndim, shape[0]
        for axis, placement in enumerate(param.placements):
            if not placement.is_replicate():
                is_by_rows = torch_dtensor.shards_dim(placement, 0)
                deal = torch_dealt.deal_in(placement) if is_by_rows else None
                placements[axis] = Shard(0) if deal is None else placement
                _, count = rows_of(count, mesh.size(axis), mesh.get_local_rank(axis), deal)
                break
        sizes = (count, *shape[1:])
    spec = torch_dtensor.make_spec(mesh, placements, shape, stride, dtype)
    made = torch.empty(sizes, dtype=dtype, device=local.device)
    return torch_dtensor.new_dtensor(made, spec)

"""An owner's copy of a matrix, and the two forms of its optimizer state.

``bring`` moves states from the checkpoint form to the owners, and ``give_back`` moves them back.

[Note: states of owners]
An owner's optimizer may keep any state for a matrix: tensors of the matrix's shape (momentum) or of
other shapes (Shampoo's factors) and numbers, in any containers. In the checkpoint form, tensors are
DTensors on the parameter's mesh. Tensors of the parameter's shape have the parameter's placements.
Tensors of other shapes are sharded by rows over the first axis along which the parameter is
sharded. 0-dim tensors and all other values are the same on every rank. The states of a batch of
matrices are stacked. A loaded state may also consist of plain tensors, unsharded on every rank.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer

from fsdp2._core.base import torch_dealt, torch_dtensor, torch_tensors
from fsdp2._core.base.containers import map_tensors
from fsdp2._core.base.rows import rows_of
from fsdp2._core.params.layout import dense_stride
from fsdp2._core.params.param import OwnerMark
from fsdp2._core.transfer.owners import Cargo
from fsdp2._core.transfer.peers import Freight, Peers, part_of
from fsdp2.optim._runs import placed_part
from fsdp2.optim._wrapped import Table


@dataclass(eq=False)
class Owned:
    """A parameter, or matrix ``lead`` of a batch. ``whole`` and ``inner`` are set on the owner."""

    name: str
    param: Tensor
    group: int
    lead: int | None
    cargo: Cargo
    whole: nn.Parameter | None = None
    inner: Optimizer | None = None
    printed: Tensor | None = None  # fingerprint of this rank's part after the last step
    _cargos: dict[torch.dtype, Cargo] = field(default_factory=dict)

    def make_whole(self) -> nn.Parameter:
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
            vars(self.whole).update(torch_dtensor.own_attributes(self.param))
        return self.whole

    @property
    def state(self) -> dict[str, Any]:
        """The state in the owner's optimizer, or an empty dict on other ranks."""
        states: Any = {} if self.inner is None else self.inner.state
        return states.get(self.whole, {})  # type: ignore[no-any-return]  # a dict

    def gradient(self, who: str) -> Tensor:
        assert self.param.grad is not None
        return placed_part(self.param, self.param.grad, who).detach()

    def whole_gradient(self) -> Tensor:
        assert self.whole is not None
        assert self.param.grad is not None
        if self.whole.grad is None:
            dtype = self.param.grad.dtype
            if self.whole.grad_dtype is not dtype:  # the user set the parameter's ``grad_dtype``
                self.whole.grad_dtype = dtype
            self.whole.grad = torch.empty_like(self.whole, dtype=dtype, requires_grad=False)
        return self.whole.grad

    def gradient_cargo(self, wire: torch.dtype | None) -> Cargo:
        """Return the gradient's cargo. Floating-point gradients use ``wire`` as dtype, if set."""
        dtype = self.param.dtype if self.param.grad is None else self.param.grad.dtype
        if wire is not None and dtype.is_floating_point:
            dtype = wire
        if dtype is self.cargo.dtype:
            return self.cargo
        return self._cargos.setdefault(dtype, Cargo(self.cargo.cut, self.cargo.owner, dtype))

    def shard_print(self, rank: int) -> Tensor:
        """Return a fingerprint that changes when this rank's part is written to."""
        return bit_sum(part_of(self.cargo.cut, self.param, rank))

    def identity(self) -> tuple[object, ...]:
        """Return a key that stays the same if the owner's copy is written to in place."""
        assert self.whole is not None
        storage = torch_tensors.number_of(self.whole.untyped_storage())
        return storage, tuple(self.whole.shape), self.whole.dtype


_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PERIOD = 1 << 16
_ROWS_AT_A_TIME = 16  # 8 MiB of 64-bit integers


@functools.cache
def _weights(device: torch.device, count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-(2**62), 2**62, (count,), generator=generator, device="cpu")
    return (2 * drawn + 1).to(device)


def bit_sum(part: Tensor) -> Tensor:
    """Hash the bits to a tensor ``[1]``: a randomly weighted sum of integers, with wraparound."""
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
    """Represents tensor number ``place`` of a state in the description that the owner sends."""

    place: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # the rounding of matmuls depends on strides
    dtype: torch.dtype


@dataclass(frozen=True)
class _Number:
    value: Tensor
    is_on_device: bool


EACH = "of each matrix"
"""A field that differs between a batch's matrices is saved as a list under this key."""


def _of_matrix(entry: dict[str, Any], lead: int | None) -> dict[str, Any]:
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


def bring(peers: Peers, owned: Sequence[Owned], table: Table, limit: int) -> None:
    """Move the states of a table to the owners. Collective if there are states to move."""
    if not any(table.get(one.param) for one in owned):
        return
    cargos: list[Cargo] = []
    sources: list[DTensor] = []
    slots: dict[tuple[int, int], int] = {}
    for one in owned:

        def note(value: Tensor, one: Owned = one) -> Tensor:
            if isinstance(value, DTensor) and value.dim():
                cut = peers.cut(one.name, value, one.lead)
                slots[id(one), id(value)] = len(cargos)
                cargos.append(Cargo(cut, one.cargo.owner, value.dtype))
                sources.append(value)
            return value

        map_tensors(note, _of_matrix(table.get(one.param, {}), one.lead))
    arrived: dict[int, Tensor] = {}
    for place, (source, cargo) in enumerate(zip(sources, cargos, strict=True)):
        if cargo.owner == peers.me:  # strides as they were on the state's owner, if known
            shape = cargo.cut.shape
            stride = dense_stride(shape, source.stride()[source.dim() - len(shape) :])
            device = torch_dtensor.local_tensor(source).device
            made = torch.empty_strided(shape, stride, dtype=source.dtype, device=device)
            arrived[place] = made
    if cargos:
        Freight(peers, sources, cargos, limit).to_owners(arrived.__getitem__)
    for one in owned:
        if one.whole is None or one.inner is None or not table.get(one.param):
            continue

        def take(value: Tensor, one: Owned = one) -> Tensor:
            place = slots.get((id(one), id(value)))
            if place is not None:
                return arrived[place]
            own = torch_dtensor.local_part(value)
            is_stacked = one.lead is not None and own.dim() and len(own) == len(one.param)
            return own[one.lead].clone() if is_stacked else own.clone()

        entry = _of_matrix(table[one.param], one.lead)
        one.inner.state[one.whole] = {key: map_tensors(take, value) for key, value in entry.items()}


def give_back(
    peers: Peers,
    owned: Sequence[Owned],
    table: Table,
    limit: int,
) -> None:
    """Move the owners' states to a table. Collective."""
    told: dict[int, dict[str, Any]] = {}
    values: dict[tuple[int, int], Tensor] = {}  # key: number of the matrix, place in its state
    for number, one in enumerate(owned):
        if one.whole is None or one.inner is None or one.whole not in one.inner.state:
            continue
        places = itertools.count()

        def describe(value: Tensor, number: int = number, places: Iterator[int] = places) -> Any:
            if not value.dim():
                return _Number(value.detach().cpu(), value.device.type != "cpu")
            place = next(places)
            values[number, place] = value.detach()
            shape = tuple(value.shape)
            return _Leaf(place, shape, dense_stride(shape, value.stride()), value.dtype)

        told[number] = {key: map_tensors(describe, value) for key, value in one.state.items()}
    everywhere = {n: entry for some in peers.grid.collect(told) for n, entry in some.items()}
    rooms: dict[tuple[int, int], Tensor] = {}  # key: id of the parameter, place in its state
    cargos: list[Cargo] = []
    targets: list[Tensor] = []
    sources: list[Tensor | None] = []
    entries: dict[Tensor, list[dict[str, Any]]] = {}
    for number in sorted(everywhere, key=lambda number: (owned[number].lead or 0, number)):
        one = owned[number]

        def build(value: Any, one: Owned = one, number: int = number) -> Any:
            if isinstance(value, _Number):
                local = torch_dtensor.local_part(one.param)
                return value.value.to(local.device) if value.is_on_device else value.value
            if not isinstance(value, _Leaf):
                return value
            key = id(one.param), value.place
            if key not in rooms:  # allocate the checkpoint form of the tensor
                shape, stride = value.shape, value.stride
                if one.lead is not None:
                    shape, stride = (len(one.param), *shape), (max(math.prod(shape), 1), *stride)
                rooms[key] = room_for_state(one.param, shape, stride, value.dtype)
            cut = peers.cut(one.name, rooms[key], one.lead)
            cargos.append(Cargo(cut, one.cargo.owner, value.dtype))
            targets.append(rooms[key])
            sources.append(values.get((number, value.place)))
            return rooms[key]

        fields = everywhere[number].items()
        built = {key: _map_leaves(build, value) for key, value in fields}
        entries.setdefault(one.param, []).append(built)
    for param, (first, *others) in entries.items():
        table[param] = {
            key: value
            if all(_same_field(other.get(key), value) for other in others)
            else {EACH: [entry.get(key) for entry in (first, *others)]}
            for key, value in first.items()
        }
    if cargos:
        freight = Freight(peers, targets, cargos, limit)
        freight.from_owners(lambda place: cast(Tensor, sources[place]))


def _map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_map_leaves(function, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return function(value)


def room_for_state(
    param: Tensor, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
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

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
from collections.abc import Iterator, Sequence
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
    of_row = _weights(part.device, _ROWS_AT_A_TIME, 2)
    for index, piece in enumerate(bits.split(_PERIOD * _ROWS_AT_A_TIME)):
        width = min(len(piece), _PERIOD)
        rows = torch.nn.functional.pad(piece, (0, -len(piece) % width)).view(-1, width)
        sums = (rows * of_place[:width]).sum(1)
        total += (sums * of_row[: len(sums)]).sum() * (2 * index + 1)
    return total


# --- The two forms of a state.


EACH = "of each matrix"
"""A field that differs between a batch's matrices is saved as a list under this key."""


def _of_matrix(entry: dict[str, Any], lead: int | None) -> dict[str, Any]:
    if lead is None:
        return entry
    return {
        key: value[EACH][lead] if isinstance(value, dict) and EACH in value else value
        for key, value in entry.items()
    }


def _comparable(value: Any) -> Any:
    """Replace the tensors in a field, because ``==`` does not compare them."""
    return map_tensors(lambda tensor: id(tensor) if tensor.dim() else tensor.item(), value)  # type: ignore[arg-type, return-value]  # no tensors


def bring(peers: Peers, owned: Sequence[Owned], table: Table, limit: int) -> None:
    """Move the states of a table to the owners. Collective if there are states to move."""
    cargos: list[Cargo] = []
    sources: list[Tensor] = []
    arrived: list[Tensor] = []  # full tensors on their owner; the sources on other ranks
    for one in (one for one in owned if table.get(one.param)):

        def take(value: Tensor, one: Owned = one) -> Tensor:
            own = torch_dtensor.local_part(value)
            if isinstance(value, DTensor) and value.dim():
                cut = peers.cut(one.name, value, one.lead)
                cargos.append(Cargo(cut, one.cargo.owner, value.dtype))
                sources.append(value)
                if one.inner is not None:  # strides as they were on the state's owner, if known
                    strides = value.stride()[value.dim() - len(cut.shape) :]
                    strides = dense_stride(cut.shape, strides)
                    device = own.device
                    value = torch.empty_strided(cut.shape, strides, dtype=own.dtype, device=device)
                arrived.append(value)
                return value
            if one.inner is None:
                return value
            is_stacked = one.lead is not None and own.dim() and len(own) == len(one.param)
            return own[one.lead].clone() if is_stacked else own.clone()

        entry = _of_matrix(table[one.param], one.lead)
        entry = {key: map_tensors(take, value) for key, value in entry.items()}
        if one.inner is not None and one.whole is not None:
            one.inner.state[one.whole] = entry
    if cargos:
        Freight(peers, sources, cargos, limit).to_owners(arrived.__getitem__)


def give_back(
    peers: Peers,
    owned: Sequence[Owned],
    table: Table,
    limit: int,
) -> None:
    """Move the owners' states to a table. Collective."""
    told: dict[int, dict[str, Any]] = {}
    values: dict[int, list[Tensor]] = {}  # the tensors of a matrix's state, in order
    for number, one in enumerate(owned):
        if one.inner is None or one.whole not in one.inner.state:
            continue
        own = values.setdefault(number, [])

        def describe(value: Tensor, own: list[Tensor] = own) -> Tensor:
            if not value.dim():  # a number is sent, with one dim if it is on a device
                value = value.detach()
                return value if value.is_cpu else value.cpu().view(1)
            own.append(value.detach())
            # the rounding of matmuls depends on strides
            strides = dense_stride(value.shape, value.stride())
            return torch.empty_strided(value.shape, strides, dtype=value.dtype, device="meta")

        told[number] = {key: map_tensors(describe, value) for key, value in one.state.items()}
    everywhere = {n: entry for some in peers.grid.collect(told) for n, entry in some.items()}
    rooms: dict[tuple[int, int], Tensor] = {}  # key: id of the parameter, place in its state
    cargos: list[Cargo] = []
    targets: list[Tensor] = []
    sources: list[Tensor] = []  # full tensors on their owner; descriptions on other ranks
    entries: dict[Tensor, list[dict[str, Any]]] = {}
    for number in sorted(everywhere, key=lambda number: (owned[number].lead or 0, number)):
        one, places = owned[number], itertools.count()

        def build(
            value: Tensor, one: Owned = one, number: int = number, places: Iterator[int] = places
        ) -> Tensor:
            if not value.is_meta:
                device = torch_dtensor.local_part(one.param).device
                return value[0].to(device) if value.dim() else value
            key = id(one.param), next(places)
            if key not in rooms:  # allocate the checkpoint form of the tensor
                shape, stride = tuple(value.shape), value.stride()
                if one.lead is not None:
                    shape, stride = (len(one.param), *shape), (max(math.prod(shape), 1), *stride)
                rooms[key] = room_for_state(one.param, shape, stride, value.dtype)
            cut = peers.cut(one.name, rooms[key], one.lead)
            cargos.append(Cargo(cut, one.cargo.owner, value.dtype))
            targets.append(rooms[key])
            sources.append(values[number][key[1]] if number in values else value)
            return rooms[key]

        fields = everywhere[number].items()
        built = {key: map_tensors(build, value) for key, value in fields}
        entries.setdefault(one.param, []).append(built)
    for param, (first, *others) in entries.items():
        table[param] = {
            key: value
            if all(_comparable(other.get(key)) == _comparable(value) for other in others)
            else {EACH: [entry.get(key) for entry in (first, *others)]}
            for key, value in first.items()
        }
    if cargos:
        Freight(peers, targets, cargos, limit).from_owners(sources.__getitem__)


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

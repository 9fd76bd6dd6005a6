"""Simulated ranks, a wire without communication, and a copy of a model with fake tensors. The
engine uses the simulated objects like real ones."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._core.base import torch_dtensor, torch_modes
from fsdp2._core.base.errors import UnsupportedError
from fsdp2._core.comm import gloo_p2p
from fsdp2._core.comm.mesh import REPLICATE, SHARD, DataMesh, MeshAxis
from fsdp2._core.comm.wire import Wire
from fsdp2._core.engine.between_steps import units_below
from fsdp2._core.params.group import ParamGroup
from fsdp2._tools.plan.clock import AnyClock
from fsdp2._tools.plan.lanes import LaneClock
from fsdp2._tools.plan.watch import COMMUNICATION, GATHERED, GRADIENTS, MemoryWatch


class Nowhere(Wire):
    """A wire that does not communicate, and tags buffers by purpose. With a clock, collectives take
    as long as on the described machine. Without a clock (CPUs), it allocates gloo's buffers."""

    def __init__(
        self, group: ParamGroup, watch: MemoryWatch, clock: AnyClock | None, is_away: bool
    ) -> None:
        super().__init__()
        self._copies_on = clock if is_away and isinstance(clock, LaneClock) else None
        self.take_over(group.wire)
        self.keeps_landing = not isinstance(clock, LaneClock)
        self._pieces: list[int] | None = None  # sizes of the collectives in one group call
        self._group = group
        self._watch = watch
        self._clock = clock
        self._strides = {role: stride_of(group.data, role) for role in (SHARD, REPLICATE)}

    def all_gather(
        self,
        output: Tensor,
        sent: Tensor,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        if self._watch.kind_of(output) != GATHERED:  # a large parameter is received in place
            self._watch.tag(output, COMMUNICATION)
        if self._clock is None:
            if sent.nbytes >= gloo_p2p.LARGE_NBYTES and gloo_p2p.is_small(axis.pg):
                return None  # sent peer to peer, without a buffer
            return self._holding(torch.empty_like(output))  # the buffer that gloo gathers into
        self._copy(sent)
        return self._send("all_gather", output.nbytes, axis)

    def reduce_scatter(
        self,
        output: Tensor,
        sent: Tensor,
        op: Any,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        self._tag_reduced(output, sent)
        if self._clock is None:
            return self._holding(torch.empty_like(sent))  # gloo reduces a copy
        work = self._send("reduce_scatter", sent.nbytes, axis)
        self._copy(output)
        return work

    def all_gather_uneven(
        self, outputs: Sequence[Tensor], sent: Tensor, axis: MeshAxis, async_op: bool
    ) -> Any:  # received in place
        nbytes = sum(output.nbytes for output in outputs)
        return self._send("all_gather", nbytes, axis, axis.size)

    def reduce_scatter_uneven(
        self,
        output: Tensor,
        sent: Tensor,
        sizes: Sequence[int],
        op: Any,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        self._tag_reduced(output, sent)
        if self._clock is None:
            return self._holding(output.new_empty((axis.size, output.numel())))
        return self._send("reduce_scatter", sent.nbytes, axis, axis.size)

    def _copy(self, shard: Tensor) -> None:
        """Advance the clock by the duration of copying a shard between host and device."""
        if self._copies_on is not None:
            self._copies_on.copy(shard.nbytes)

    def _tag_reduced(self, output: Tensor, sent: Tensor) -> None:
        self._watch.tag(sent, COMMUNICATION)
        if self._watch.kind_of(output) != GRADIENTS:
            self._watch.tag(output, COMMUNICATION)

    def _holding(self, received: Tensor) -> _Holding:
        self._watch.tag(received, COMMUNICATION)
        return _Holding(received)

    def all_reduce(
        self,
        tensor: Tensor,
        op: Any,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        return self._send("all_reduce", tensor.nbytes, axis)

    def all_gather_each(
        self, pairs: Sequence[tuple[Tensor, Tensor]], axis: MeshAxis, async_op: bool
    ) -> Any:
        with self._joined("all_gather", axis):
            return super().all_gather_each(pairs, axis, async_op)

    def reduce_scatter_each(
        self, pairs: Sequence[tuple[Tensor, Tensor]], op: Any, axis: MeshAxis, async_op: bool
    ) -> Any:
        with self._joined("reduce_scatter", axis):
            return super().reduce_scatter_each(pairs, op, axis, async_op)

    @contextlib.contextmanager
    def _joined(self, kind: str, axis: MeshAxis) -> Iterator[None]:
        """On a device, merge the collectives in this context into one, as NCCL does."""
        self._pieces = [] if isinstance(self._clock, LaneClock) else None
        yield
        pieces, self._pieces = self._pieces, None
        if pieces:
            self._send(kind, sum(pieces), axis, len(pieces))

    def _send(self, kind: str, nbytes: int, axis: MeshAxis, pieces: int = 1) -> Any:
        if self._clock is None:
            return None
        if self._pieces is not None:
            self._pieces.append(nbytes)
            return None
        data = self._group.data
        is_outer = kind == "all_reduce" or (data.layers is not None and axis is data.summed)
        stride = self._strides[REPLICATE if is_outer else SHARD]
        return self._clock.send(kind, self._group.fqn, nbytes, axis.size, stride, pieces)


class _Holding:
    """A collective's work object, which keeps the receive buffer alive until ``wait``."""

    def __init__(self, received: Tensor) -> None:
        self._received: Tensor | None = received

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self._received = None


def stride_of(data: DataMesh, role: str) -> int:
    """Return the distance between neighbours on an axis, in global ranks."""
    if role == REPLICATE and data.layers is not None:
        return data.layers.shard.size
    if role not in data.roles:
        return 1
    with torch_modes.hidden_from_modes():  # rank numbers need real tensors
        grid = data.mesh.mesh.movedim(data.roles.index(role), -1)
        line = grid.reshape(-1, grid.shape[-1])[0, :2].tolist()
    return int(line[-1] - line[0]) if len(line) > 1 else 1


def without_memory(model: nn.Module) -> nn.Module:
    """Copy a model in a fake mode, with simulated process groups for its units. Raise
    UnsupportedError if a unit is on a device, or a DTensor belongs to no unit."""
    memo: dict[int, Any] = {}
    for group in groups_of(model):
        if group.residence.compute.type != "cpu":
            raise UnsupportedError(
                "FS907",
                f"plan: {group.fqn or '<root>'} computes on {group.residence.compute}; a "
                "sharded model can be planned only on a CPU. Plan the model before fully_shard.",
            )
        memo[id(group.data)] = _without_ranks(group.data)
        for param in group.params:
            local = _like(torch_dtensor.local_part(param.sharded))
            made = torch_dtensor.placed_like(param.sharded, local)
            memo[id(param.sharded)] = torch_dtensor.as_parameter(made, param.trainable)
    for name, other in model.named_parameters():
        if id(other) in memo:
            continue
        if isinstance(other, DTensor):
            raise UnsupportedError(
                "FS907",
                f"plan: {name} is a DTensor that belongs to no unit. Apply fully_shard to the "
                "model after parallelize_module, on the data-parallel dims of the mesh, and plan "
                "the sharded model.",
            )
        memo[id(other)] = nn.Parameter(_like(other), requires_grad=other.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _like(buffer)
    return copy.deepcopy(model, memo)


def groups_of(model: nn.Module) -> list[ParamGroup]:
    """Return the groups of a model's units, outermost first (an empty list if unsharded)."""
    return [group for unit in units_below(model) for group in unit.own_groups]


def _without_ranks(data: DataMesh) -> DataMesh:
    """Return a mesh of the same ranks that does not communicate."""
    shard, replicate = (
        dataclasses.replace(
            axis, pg=None if axis.pg is None else torch_dtensor.ImaginedGroup(axis.rank, axis.size)
        )
        for axis in (data.shard, data.replicate)
    )
    layers = None if data.layers is None else _without_ranks(data.layers)
    return dataclasses.replace(data, shard=shard, replicate=replicate, layers=layers)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

"""Ranks, collectives and parameters that are not there: the engine runs on them as on real ones.

Owns the imagined mesh, the wire that carries nothing, and the copy of a model whose tensors are
fake. It must not know what is made of a run.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2._core.base import torch_dtensor, torch_modes
from fsdp2._core.base.errors import UnsupportedError
from fsdp2._core.comm import gloo_p2p
from fsdp2._core.comm.mesh import REPLICATE, SHARD, DataMesh, MeshAxis
from fsdp2._core.comm.wire import Wire
from fsdp2._core.engine.between_steps import units_below
from fsdp2._core.params.group import ParamGroup
from fsdp2._tools.plan.clock import Clock
from fsdp2._tools.plan.lanes import LaneClock
from fsdp2._tools.plan.watch import COMMUNICATION, GATHERED, GRADIENTS, MemoryWatch

NAMES = {1: ("shard",), 2: ("replicate", "shard")}


def make_mesh(shape: Sequence[int], rank: int) -> DeviceMesh:
    """Return a CPU mesh of ranks that do not exist, seen by one of them."""
    return torch_dtensor.imagined_mesh(tuple(shape), NAMES[len(shape)], rank)


class Nowhere(Wire):
    """Carries nothing, and says what memory is for.

    With a clock it takes a described machine's time. Without one it takes the memory that gloo's
    collectives take, because then a plan is one of CPU ranks.
    """

    def __init__(
        self,
        group: ParamGroup,
        watch: MemoryWatch,
        clock: Clock | LaneClock | None,
        is_away: bool = False,
    ) -> None:
        super().__init__()
        self._copies_on = clock if is_away and isinstance(clock, LaneClock) else None
        self.take_over(group.wire)
        self.keeps_landing = not isinstance(clock, LaneClock)
        self._pieces: list[int] | None = None  # of collectives that are issued as one
        self._group = group
        self._watch = watch
        self._clock = clock
        self._strides = {role: stride_of(group.data, role) for role in (SHARD, REPLICATE)}

    def all_gather(self, output: Tensor, sent: Tensor, axis: MeshAxis, async_op: bool) -> Any:
        if self._watch.kind_of(output) != GATHERED:  # a large parameter lands in its place
            self._watch.tag(output, COMMUNICATION)
        if self._clock is None:
            assert axis.pg is not None
            is_direct = sent.nbytes >= gloo_p2p.LARGE_NBYTES and gloo_p2p.is_small(axis.pg)
            return None if is_direct else self._copy_of(output)  # which gloo gathers into
        self._copy(sent)
        return self._send("all_gather", output.nbytes, axis, SHARD)

    def reduce_scatter(
        self, output: Tensor, sent: Tensor, op: Any, axis: MeshAxis, async_op: bool
    ) -> Any:
        self._watch.tag(sent, COMMUNICATION)
        if self._watch.kind_of(output) != GRADIENTS:
            self._watch.tag(output, COMMUNICATION)
        if self._clock is None:
            return self._copy_of(sent)  # what others sent; and gloo's own reduces a copy
        is_outer = self._group.data.layers is not None and axis is self._group.data.summed
        role = REPLICATE if is_outer else SHARD
        work = self._send("reduce_scatter", sent.nbytes, axis, role)
        self._copy(output)
        return work

    def all_gather_uneven(
        self, outputs: Sequence[Tensor], sent: Tensor, axis: MeshAxis, async_op: bool
    ) -> Any:  # they land where they are used
        nbytes = sum(output.nbytes for output in outputs)
        return self._send("all_gather", nbytes, axis, SHARD, axis.size)

    def reduce_scatter_uneven(
        self,
        output: Tensor,
        sent: Tensor,
        sizes: Sequence[int],
        op: Any,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        self._watch.tag(sent, COMMUNICATION)
        if self._watch.kind_of(output) != GRADIENTS:
            self._watch.tag(output, COMMUNICATION)
        if self._clock is None:
            made = output.new_empty((axis.size, output.numel()))
            self._watch.tag(made, COMMUNICATION)
            return _Holding(made)
        return self._send("reduce_scatter", sent.nbytes, axis, SHARD, axis.size)

    def _copy(self, shard: Tensor) -> None:
        """Take the time of a copy between a device and the host that keeps its shards."""
        if self._copies_on is not None:
            self._copies_on.copy(shard.nbytes)

    def _copy_of(self, tensor: Tensor) -> _Holding:
        made = torch.empty_like(tensor)
        self._watch.tag(made, COMMUNICATION)
        return _Holding(made)

    def all_reduce(self, tensor: Tensor, op: Any, axis: MeshAxis, async_op: bool) -> Any:
        return self._send("all_reduce", tensor.nbytes, axis, REPLICATE)

    def all_gather_each(
        self, pairs: Sequence[tuple[Tensor, Tensor]], axis: MeshAxis, async_op: bool
    ) -> Any:
        with self._joining():
            work = super().all_gather_each(pairs, axis, async_op)
        return self._send_pieces("all_gather", axis, work)

    def reduce_scatter_each(
        self, pairs: Sequence[tuple[Tensor, Tensor]], op: Any, axis: MeshAxis, async_op: bool
    ) -> Any:
        with self._joining():
            work = super().reduce_scatter_each(pairs, op, axis, async_op)
        return self._send_pieces("reduce_scatter", axis, work)

    @contextlib.contextmanager
    def _joining(self) -> Iterator[None]:
        """Let what is sent inside be one collective, where a device's backend makes it one."""
        self._pieces = [] if isinstance(self._clock, LaneClock) else None
        yield

    def _send_pieces(self, kind: str, axis: MeshAxis, work: Any) -> Any:
        pieces, self._pieces = self._pieces, None
        if pieces:
            self._send(kind, sum(pieces), axis, SHARD, len(pieces))
        return work

    def _send(self, kind: str, nbytes: int, axis: MeshAxis, role: str, pieces: int = 1) -> Any:
        if self._clock is None:
            return None
        if self._pieces is not None:
            self._pieces.append(nbytes)
            return None
        stride = self._strides[role]
        return self._clock.send(kind, self._group.fqn, nbytes, axis.size, stride, pieces)


class _Holding:
    """A work that is not over before it is waited for, and holds what others sent until then."""

    def __init__(self, received: Tensor) -> None:
        self._received: Tensor | None = received

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self._received = None


def stride_of(data: DataMesh, role: str) -> int:
    """Return how far apart neighbours on an axis are, as the whole program counts ranks."""
    if role == REPLICATE and data.layers is not None:
        return data.layers.shard.size
    if role not in data.roles:
        return 1
    with torch_modes.hidden_from_modes():  # numbers of ranks are no fakes
        grid = data.mesh.mesh.movedim(data.roles.index(role), -1)
        line = grid.reshape(-1, grid.shape[-1])[0, :2].tolist()
    return int(line[-1] - line[0]) if len(line) > 1 else 1


# Copies of a model.


def without_memory(model: nn.Module) -> nn.Module:
    """Copy a model; parameters and buffers are fake, and so are process groups of its units.

    Call under a fake mode.

    Raises:
        UnsupportedError: a parameter lies on a mesh, and no unit has it.
    """
    memo: dict[int, Any] = {}
    for group in groups_of(model):
        if group.residence.compute.type != "cpu":
            raise UnsupportedError(
                "FS907",
                f"plan: {group.fqn or '<root>'} computes on {group.residence.compute}; a "
                "sharded model is planned on a CPU only. Plan the model as it was before "
                "fully_shard.",
            )
        memo[id(group.data)] = _without_ranks(group.data)
        for param in group.params:
            memo[id(param.spec)] = param.spec  # with its mesh, which no fake mode can copy
            local = _like(torch_dtensor.local_part(param.sharded))
            made = torch_dtensor.placed_like(param.sharded, local)
            memo[id(param.sharded)] = torch_dtensor.as_parameter(made, param.trainable)
    for name, other in model.named_parameters():
        if id(other) in memo:
            continue
        if isinstance(other, DTensor):
            raise UnsupportedError(
                "FS907",
                f"plan: {name} is a DTensor, and no unit has it. Apply fully_shard to the model "
                "after parallelize_module, on the data-parallel part of the mesh, and plan that.",
            )
        memo[id(other)] = nn.Parameter(_like(other), requires_grad=other.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _like(buffer)
    return copy.deepcopy(model, memo)


def groups_of(model: nn.Module) -> list[ParamGroup]:
    """Return the groups of all units in a model, outermost first; none if it is not sharded."""
    return [group for unit in units_below(model) for group in unit.own_groups]


def _without_ranks(data: DataMesh) -> DataMesh:
    """Return a mesh of the same ranks that nothing is sent to."""
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

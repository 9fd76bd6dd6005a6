"""Several ranks in one process: a comm object that joins them, and groups driven in lockstep.

A `Wire` stands where a process group would. The k-th collective of every rank on a wire is one
`Meeting`; it happens when the last rank has joined, and a rank that waits for it earlier fails, as
it would hang on a real one. Until then outputs hold garbage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from fsdp2._core.base.capabilities import ZERO_COPY_NBYTES, ZeroCopy
from fsdp2._core.base.policy import MixedPrecisionPolicy, Settings
from fsdp2._core.comm.mesh import ABSENT_AXIS, DataMesh, MeshAxis
from fsdp2._core.comm.wire import Streams, _joined
from fsdp2._core.comm.wire import Wire as Sender
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.param import FSDPParam
from fsdp2._core.params.placement import place, shard_dim
from fsdp2._core.params.reduce import Reduction
from fsdp2._core.params.registration import Site


@contextmanager
def fake_process_group(size: int, rank: int = 0) -> Iterator[None]:
    """Let device meshes of `size` ranks exist in this process; nothing is ever sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def reduced(group: ParamGroup) -> Reduction | None:
    """Pack the local gradients of a group; return the reduction to start."""
    return group.reducer.reduce(group.settings, group.context, with_graph=False)


class Meeting:
    """One collective of all ranks of a wire."""

    def __init__(self, kind: str, size: int, divide_by: int = 1) -> None:
        self.kind = kind
        self.divide_by = divide_by
        self.size = size
        self.parts: dict[int, tuple[Tensor, Tensor]] = {}
        self.is_over = False

    def join(self, rank: int, output: Tensor, sent: Tensor) -> None:
        self.parts[rank] = (output, sent)
        for other, _ in self.parts.values():
            assert (other.shape, other.dtype) == (output.shape, output.dtype), "ranks disagree"
        if output is not sent:
            output.view(torch.uint8).fill_(0xA5)
        if len(self.parts) == self.size:
            self._happen()

    def _happen(self) -> None:
        inputs = [self.parts[rank][1] for rank in range(self.size)]
        if self.kind in ("all_gather", "uneven_gather"):
            result = torch.cat([sent.view(-1) for sent in inputs])
            results = [result] * self.size
        else:
            total = inputs[0].clone()
            for other in inputs[1:]:
                total += other
            if self.divide_by > 1:
                total /= self.divide_by
            whole = self.kind == "all_reduce"
            results = [total] * self.size if whole else list(total.view(-1).chunk(self.size))
        for rank, (output, _) in self.parts.items():
            output.view(-1).copy_(results[rank].view(-1))
        self.parts.clear()
        self.is_over = True

    def wait(self) -> None:
        """Stand in for `dist.Work.wait`."""
        assert self.is_over, f"waited for a {self.kind} that not every rank has joined: it hangs"


class Wire:
    """A process group whose ranks all live here."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.meetings: list[Meeting] = []
        self._joined = [0] * size

    def join(
        self, kind: str, rank: int, output: Tensor, sent: Tensor, divide_by: int = 1
    ) -> Meeting:
        position, self._joined[rank] = self._joined[rank], self._joined[rank] + 1
        if position == len(self.meetings):
            self.meetings.append(Meeting(kind, self.size, divide_by))
        meeting = self.meetings[position]
        assert meeting.kind == kind, f"rank {rank} issued {kind}, another one {meeting.kind}"
        meeting.join(rank, output, sent)
        return meeting

    @property
    def kinds(self) -> list[str]:
        """What was sent over this wire, in order."""
        return [meeting.kind for meeting in self.meetings]


class _Landing:
    """A work whose result is copied to where it belongs, once it is there."""

    def __init__(self, work: Any, whole: Tensor, outputs: Any) -> None:
        self._work, self._whole, self._outputs = work, whole, outputs

    def is_completed(self) -> bool:
        return bool(self._work.is_over)

    def wait(self) -> None:
        self._work.wait()
        parts = self._whole.split([output.numel() for output in self._outputs])
        for output, part in zip(self._outputs, parts, strict=True):
            output.view(-1).copy_(part)


class LoopbackComm(Sender):
    """Collectives over the wires that the axes carry."""

    def _join(
        self,
        kind: str,
        axis: MeshAxis,
        output: Tensor,
        sent: Tensor,
        async_op: bool,
        op: Any = None,
    ) -> Any:
        assert isinstance(axis.pg, Wire)
        divide_by = axis.size if op == dist.ReduceOp.AVG else 1
        meeting = axis.pg.join(kind, axis.rank, output, sent, divide_by)
        return meeting if async_op else None

    def all_gather_each(self, pairs: Any, axis: MeshAxis, async_op: bool) -> Any:
        if pairs[0][0].is_cpu:
            return super().all_gather_each(pairs, axis, async_op)
        return _joined([self.all_gather(*pair, axis, async_op) for pair in pairs])  # not coalesced

    def reduce_scatter_each(self, pairs: Any, op: Any, axis: MeshAxis, async_op: bool) -> Any:
        if pairs[0][0].is_cpu:
            return super().reduce_scatter_each(pairs, op, axis, async_op)
        return _joined([self.reduce_scatter(*pair, op, axis, async_op) for pair in pairs])

    def all_gather(self, output: Tensor, sent: Tensor, axis: MeshAxis, async_op: bool) -> Any:
        assert output.numel() == axis.size * sent.numel()
        return self._join("all_gather", axis, output, sent, async_op)

    def reduce_scatter(
        self, output: Tensor, sent: Tensor, op: Any, axis: MeshAxis, async_op: bool
    ) -> Any:
        assert sent.numel() == axis.size * output.numel()
        return self._join("reduce_scatter", axis, output, sent, async_op, op)

    def all_gather_uneven(self, outputs: Any, sent: Tensor, axis: MeshAxis, async_op: bool) -> Any:
        whole = torch.cat([output.view(-1) for output in outputs])
        work = self._join("uneven_gather", axis, whole, sent, async_op)
        return _Landing(work, whole, outputs) if async_op else None

    def reduce_scatter_uneven(
        self, output: Tensor, sent: Tensor, sizes: Any, op: Any, axis: MeshAxis, async_op: bool
    ) -> Any:
        whole = sent.clone()
        work = self._join("all_reduce", axis, whole, whole, async_op, op)
        start = sum(sizes[: axis.rank])
        own = whole[start : start + sizes[axis.rank]]
        return _Landing(work, own, [output]) if async_op else None

    def all_reduce(self, tensor: Tensor, op: Any, axis: MeshAxis, async_op: bool) -> Any:
        return self._join("all_reduce", axis, tensor, tensor, async_op, op)


@dataclass(frozen=True)
class LoopbackMesh(DataMesh):
    """What one simulated rank sees; splitting it joins the same neighbours on every rank."""

    smaller: dict[int, list[DataMesh]] = field(default_factory=dict, compare=False)
    on: str = "cpu"

    def split(self, size: int) -> DataMesh:
        if size not in self.smaller:
            self.smaller[size] = _split(self.mesh, self.shard.size, size)
        return self.smaller[size][self.shard.rank]

    @property
    def device(self) -> torch.device:
        return torch.device(self.on)


def _split(mesh: DeviceMesh, count: int, size: int) -> list[DataMesh]:
    smaller = DeviceMesh("cpu", mesh.mesh.view(-1, size), mesh_dim_names=("outer", "inner"))
    inner = [Wire(size) for _ in range(count // size)]
    outer = [Wire(count // size) for _ in range(size)]
    return [
        DataMesh(
            smaller,
            _axis("inner", rank % size, inner[rank // size]),
            _axis("outer", rank // size, outer[rank % size]),
            ("replicate", "shard"),
        )
        for rank in range(count)
    ]


def _axis(name: str, rank: int, wire: Wire) -> MeshAxis:
    return MeshAxis(name, wire.size, rank, wire)  # type: ignore[arg-type]  # stands for one


def data_meshes(shard: int, replicate: int = 1, device: str = "cpu") -> list[LoopbackMesh]:
    """Return the mesh of every simulated rank, replicas slowest. Needs `fake_process_group`."""
    shard_wires = [Wire(shard) for _ in range(replicate)]
    replicate_wires = [Wire(replicate) for _ in range(shard)]
    names = ("replicate", "shard")
    if replicate == 1:
        mesh = init_device_mesh("cpu", (shard,), mesh_dim_names=names[1:])
    else:
        mesh = init_device_mesh("cpu", (replicate, shard), mesh_dim_names=names)
    smaller: dict[int, list[DataMesh]] = {}
    return [
        LoopbackMesh(
            mesh,
            _axis("shard", j, shard_wires[i]),
            ABSENT_AXIS if replicate == 1 else _axis("replicate", i, replicate_wires[j]),
            names[-mesh.ndim :],
            smaller=smaller,
            on=device,
        )
        for i in range(replicate)
        for j in range(shard)
    ]


class LoopbackGroup:
    """The same group on every simulated rank, moved in lockstep.

    `modules[rank]` is a copy of `module`, and `groups[rank]` its group. On a device the ranks share
    one stream for each lane, in which a collective has happened once the last rank has issued it:
    ranks issue first to last and wait last to first, so that the first wait covers all.
    """

    def __init__(
        self,
        module: nn.Module,
        shard: int,
        replicate: int = 1,
        *,
        policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen
        placement_fn: Callable[[nn.Parameter], Any] | None = None,
        device: str = "cpu",
        streams: Streams | None = None,
        zero_copy_nbytes: int | None = ZERO_COPY_NBYTES,
    ) -> None:
        self.original = module
        self.settings = Settings()
        self.modules: list[nn.Module] = []
        self.groups: list[ParamGroup] = []
        comm = LoopbackComm()
        comm.zero_copy = None if zero_copy_nbytes is None else ZeroCopy(zero_copy_nbytes)
        for data in data_meshes(shard, replicate, device):
            own = copy.deepcopy(module)
            group = ParamGroup(data, policy, data.device)
            group.reducer.wire = comm
            group.rewire()
            if streams is not None:
                group.context.streams = streams
            group.shard(make_params(own, data, placement_fn))
            self.modules.append(own)
            self.groups.append(group)

    def each(self, function: Callable[[ParamGroup], Any]) -> list[Any]:
        """Call on every rank."""
        return [function(group) for group in self.groups]

    def gather(self) -> None:
        """Unshard on every rank, looking at what the user did first, as a forward does."""
        self.each(ParamGroup.inspect)
        self.each(ParamGroup.unshard)
        self.wait()

    def wait(self) -> None:
        for group in reversed(self.groups):
            group.wait_for_unshard()

    def reshard(self) -> None:
        self.each(ParamGroup.reshard)

    def reduce(self, settings: Settings | None = None) -> None:
        """Reduce what lies in the unsharded parameters' `grad`, on every rank."""
        chosen = settings or self.settings
        for group in self.groups:
            group.settings = chosen
        started: list[Reduction | None] = self.each(reduced)
        reductions = [reduction for reduction in started if reduction is not None]
        assert len(reductions) in (0, len(self.groups)), "ranks disagree whether to reduce"
        for reduction in reductions:
            reduction.start()
        for reduction in reversed(reductions):
            reduction.advance()
        for reduction in reversed(reductions):
            reduction.finish()
        for reduction in reductions:
            reduction.wait()

    def parameters(self, rank: int) -> list[nn.Parameter]:
        return list(self.modules[rank].parameters())

    def wire(self, rank: int = 0) -> Wire:
        found: Any = self.groups[rank].data.shard.pg
        return found

    def replicate_wire(self, rank: int = 0) -> Wire:
        found: Any = self.groups[rank].data.replicate.pg
        return found


def make_params(
    module: nn.Module, data: DataMesh, placement_fn: Callable[[nn.Parameter], Any] | None = None
) -> list[FSDPParam]:
    """Do what the collection of parameters does, ties within the module included."""
    found: dict[nn.Parameter, tuple[str, list[Site]]] = {}
    for prefix, child in module.named_modules():
        for name, param in child._parameters.items():
            if param is not None:
                fqn = f"{prefix}.{name}" if prefix else name
                found.setdefault(param, (fqn, []))[1].append(Site(child, name))
    params = []
    for param, (fqn, sites) in found.items():
        dim = shard_dim(placement_fn(param) if placement_fn else None, param, fqn)
        params.append(FSDPParam(fqn, sites, place(param, fqn, data, dim), param))
    return params


def local_of(tensor: Tensor | None) -> Tensor:
    """Return the local part of a DTensor, detached."""
    assert isinstance(tensor, DTensor)
    return tensor.detach().to_local()


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """True if shape, dtype and every bit agree; strides may differ."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    return _bytes(actual) == _bytes(expected)


def _bytes(tensor: Tensor) -> bytes:
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype)
    dense.copy_(tensor.detach().reshape(-1))
    if dense.numel() == 0:
        return b""
    return bytes(dense.view(torch.uint8).tolist())


def chunk_of(whole: Tensor, dim: int | None, rank: int, size: int) -> Tensor:
    """Return what `torch.chunk` gives a rank: the meaning of `Shard(dim)`. None: all of it."""
    if dim is None:
        return whole
    chunks: Sequence[Tensor] = whole.chunk(size, dim) if whole.shape[dim] else [whole]
    if rank < len(chunks):
        return chunks[rank]
    return whole.narrow(dim, 0, 0)

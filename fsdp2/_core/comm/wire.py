"""The wire (a group's collectives and their buffers), and the lanes in which collectives run.

Defines how data is sent, not when. A group calls a ``Wire``, which has an all-gather and a
reduce-scatter that users can replace (``_core.comm.comms``), and the all-reduce over replicas.
Tests use a ``Wire`` that simulates several ranks in one process.

On a CPU, collectives are asynchronous (they return a ``Work``), and the stream-ordering methods of
``Streams`` are no-ops. On a device, each *lane* (``gather``, ``reduce``, ``all_reduce``) is a
stream, and only events order accesses to the same memory from different streams.

[Note: who frees a buffer]
A buffer used by two streams is kept in an ``InFlight`` until the allocating stream has waited for
the other one, without ``record_stream`` or host synchronisation. Compute reads gather buffers,
which the gather lane allocates: ``retire`` records an event in the compute stream. The next launch
in the gather lane does not wait for this event, and can therefore overlap with unpacking; the
launch after that waits for the event and drops the buffers. At the end of a forward or backward,
``drain`` drops the remaining buffers. The reduce lane reads inputs that compute allocates; compute
waits in ``InFlight.wait``.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2._core.base import torch_autograd, torch_comm, torch_dtensor, torch_tensors
from fsdp2._core.base.capabilities import ZERO_COPY_NBYTES, ZeroCopy
from fsdp2._core.base.errors import StateError
from fsdp2._core.base.events import IDLE, Observable
from fsdp2._core.base.torch_autograd import packing_hooks
from fsdp2._core.comm import gloo_p2p
from fsdp2._core.comm.coded_sum import Exact
from fsdp2._core.comm.comms import AllGather, ReduceScatter
from fsdp2._core.comm.late_look import LateLook
from fsdp2._core.comm.mesh import MeshAxis


class TorchMemory:
    """Mixin for a collective: allocates buffers with torch's allocator."""

    def allocate(
        self,
        size: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class DefaultAllGather(TorchMemory, AllGather):
    """torch.distributed's all-gather, or direct sends if these are faster."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        is_large = input_tensor.nbytes >= gloo_p2p.LARGE_NBYTES
        if is_large and gloo_p2p.applies(group, input_tensor) and gloo_p2p.is_small(group):
            rows = output_tensor.view(group.size(), -1)
            return gloo_p2p.run(gloo_p2p.DirectGather(rows, input_tensor, group), async_op)
        return torch_comm.all_gather_single(output_tensor, input_tensor, group, async_op)


class DefaultReduceScatter(TorchMemory, ReduceScatter):
    """torch.distributed's reduce-scatter, or an ``Exchange`` if that is faster."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        is_large = input_tensor.nbytes >= gloo_p2p.LARGE_NBYTES
        is_cast = input_tensor.dtype != output_tensor.dtype
        if is_cast or (is_large and gloo_p2p.applies(group, input_tensor)):
            return gloo_p2p.run(gloo_p2p.Exchange(output_tensor, input_tensor, group, op), async_op)
        return torch_comm.reduce_scatter_single(output_tensor, input_tensor, op, group, async_op)


class GroupMemory:
    """Mixin for a collective: allocates buffers with the process group's allocator, if any."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(
        self,
        size: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        flat = torch_comm.allocate_from_group(self._group, math.prod(size), dtype, device)
        return torch.empty(size, dtype=dtype, device=device) if flat is None else flat.view(*size)


class GroupMemoryAllGather(GroupMemory, DefaultAllGather):
    """torch.distributed's all-gather, in memory from the process group's allocator."""


class GroupMemoryReduceScatter(GroupMemory, DefaultReduceScatter):
    """torch.distributed's reduce-scatter, in memory from the process group's allocator."""


KEPT_NBYTES = 1 << 25
"""Capacity of ``KeptMemory``. malloc maps larger blocks separately, and free unmaps them."""

Cut = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""Widths of a buffer's columns, and shapes of their views, which may have fewer rows."""


class Kept:
    """A reusable host buffer ``[W, C]``, initially zero, and views of its columns."""

    @torch.inference_mode(False)
    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, cut: Cut) -> None:
        self.memory = torch.zeros(shape, dtype=dtype, device="cpu")
        columns = list(self.memory.split(cut[0], 1))
        self.parts = [columns.pop(0)[: shape[0]].view(shape) for shape in cut[1]]
        self._number = torch_tensors.number_of(self.memory.untyped_storage())
        self.at_rest = self.count_owners()

    def count_owners(self) -> tuple[int, int, int]:
        """Return the reference counts of the tensor, in Python and in C++, and of its storage."""
        memory = self.memory
        holders = sys.getrefcount(memory), torch_tensors.owners_of(memory)
        return *holders, torch_tensors.use_count(self._number)


class KeptMemory:
    """Host buffers that the param groups of one process group reuse, one group after another.
    Allocating and freeing a few MB per param group would fragment malloc's heap, and memory use
    would grow with each group. Views of the columns are kept too, because creating them would take
    half the time of unpacking small parameters. Buffers live as long as a group that uses them."""

    def __init__(self, most: int) -> None:
        self._buffers: dict[object, list[Kept]] = {}
        self._room = self._most = most

    def take(
        self,
        use: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        cut: Cut,
    ) -> Kept:
        """Return a free buffer. Only calls with this ``use`` have written outside its columns."""
        key = use, shape, dtype, cut
        for kept in self._buffers.get(key, ()):
            if kept.count_owners() == kept.at_rest:
                return kept
        kept = Kept(shape, dtype, cut)
        nbytes = kept.memory.nbytes
        if nbytes <= self._most:
            if nbytes > self._room:
                self._buffers.clear()
                self._room = self._most
            self._room -= nbytes
            self._buffers.setdefault(key, []).append(kept)
        return kept


_memories: weakref.WeakKeyDictionary[Any, weakref.ref[KeptMemory]] = weakref.WeakKeyDictionary()


def memory_of(axis: MeshAxis) -> KeptMemory:
    """Return the ``KeptMemory`` of an axis's process group. Fake tensors are not kept."""
    if axis.pg is None or not torch_dtensor.has_real_memory():
        return KeptMemory(0)
    known = _memories.get(axis.pg)
    memory = None if known is None else known()
    if memory is None:
        memory = KeptMemory(KEPT_NBYTES)
        _memories[axis.pg] = weakref.ref(memory)
    return memory


@dataclass(eq=False)
class Wire:
    """A group's collectives. Call ``ParamGroup.rewire`` after changing a wire."""

    carries: ClassVar[bool] = True
    adds_alike: ClassVar[bool] = False  # every rank adds in the same order

    gather: Any = field(default_factory=DefaultAllGather)
    scatter: Any = field(default_factory=DefaultReduceScatter)
    uses_group_memory: bool = False  # set in copies only
    is_separate: bool = False  # gradients are reduced over a separate process group
    scatter_group: dist.ProcessGroup | None = None
    # which parameters are large enough to be sent separately
    zero_copy: ZeroCopy | None = field(default_factory=lambda: ZeroCopy(ZERO_COPY_NBYTES))
    gradient_dtype: torch.dtype | None = None  # dtype of sent gradients; None: the reduce dtype
    # the user's reduction hooks, one for each axis; they also receive the exact columns
    sum_rows: Callable[..., None] | None = None
    sum_replicas: Callable[..., None] | None = None
    exact: Exact = ()  # columns of a rank's part that must not be rounded
    keeps_landing: bool = True  # on a CPU, all-gathers may use ``KeptMemory``

    def __getstate__(self) -> dict[str, Any]:
        """Copy all settings. The copy's group recreates objects that need a process group."""
        gather, scatter = self.custom
        kept = {name: value for name, value in vars(self).items() if name != "zero_copy"}
        nbytes, row_nbytes = self.zero_copy or (None, 1)
        return {
            **kept,
            "zero_copy_nbytes": nbytes,  # numbers, so that pickles refer to fewer classes
            "zero_copy_row_nbytes": row_nbytes,
            "gather": gather,
            "scatter": scatter,
            "scatter_group": None,
            "uses_group_memory": isinstance(self.gather, GroupMemory),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]  # not a new object
        state = dict(state)
        nbytes, row_nbytes = state.pop("zero_copy_nbytes"), state.pop("zero_copy_row_nbytes", 1)
        vars(self).update({name: value for name, value in state.items() if value is not None})
        self.zero_copy = None if nbytes is None else ZeroCopy(nbytes, row_nbytes)

    def take_over(self, wire: Wire) -> None:
        """Adopt the collectives and settings of the wire that this one replaces."""
        self.gather, self.scatter = wire.gather, wire.scatter
        self.sum_rows, self.sum_replicas = wire.sum_rows, wire.sum_replicas
        self.is_separate, self.scatter_group = wire.is_separate, wire.scatter_group
        self.uses_group_memory = wire.uses_group_memory
        self.zero_copy, self.gradient_dtype = wire.zero_copy, wire.gradient_dtype

    def use_group_memory(self, pg: dist.ProcessGroup | None) -> None:
        """Allocate buffers with a process group's allocator."""
        if pg is not None:
            self.gather = GroupMemoryAllGather(pg)
            self.scatter = GroupMemoryReduceScatter(self.scatter_group or pg)

    def allocate(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        buffer: Tensor = self.scatter.allocate(shape, dtype=dtype, device=device)
        return buffer

    @property
    def only_sums(self) -> bool:
        """Return True if the wire computes only sums. The engine must then compute means."""
        return self.sum_replicas is not None

    def summands(self, ranks: int) -> int:
        """Return the divisor for means: the number of gradients in a sum over ``ranks``."""
        return ranks

    @property
    def custom(self) -> tuple[Any, Any]:
        """The user's all-gather and reduce-scatter; None for a default one."""
        return (
            None if isinstance(self.gather, DefaultAllGather) else self.gather,
            None if isinstance(self.scatter, DefaultReduceScatter) else self.scatter,
        )

    @property
    def is_custom(self) -> bool:
        return self.custom != (None, None)

    @property
    def gathers_zero_copy(self) -> bool:
        """Return True if the all-gather accepts any buffer; custom ones need packed buffers."""
        return type(self.gather) is DefaultAllGather

    @property
    def scatters_zero_copy(self) -> bool:
        """Return True if the reduce-scatter accepts any buffer."""
        return type(self.scatter) is DefaultReduceScatter

    @property
    def sends_kept(self) -> bool:
        """Return True if a reduce-scatter on a CPU may send from ``KeptMemory``."""
        return self.keeps_landing and self.scatters_zero_copy and self.sum_rows is None

    def stage(self, sent: Tensor, axis: MeshAxis) -> tuple[Tensor, Tensor]:
        """Return the output buffer of an all-gather, and its input, which holds ``sent``. If
        ``sent`` is ``[1, C]``, the output is ``[W, C]``, which avoids a view. If ``sent`` is
        ``[C]``, or the all-gather is custom, the output is ``[W * C]``. The input of a custom
        all-gather is a slice of its output."""
        numel, gather = sent.numel(), self.gather
        if type(gather) is DefaultAllGather:
            shape = (axis.size, numel) if sent.dim() == 2 else (axis.size * numel,)
            return torch.empty(shape, dtype=sent.dtype, device=sent.device), sent
        sent = sent.view(-1)
        output = gather.allocate((axis.size * numel,), dtype=sent.dtype, device=sent.device)
        return output, output.narrow(0, axis.rank * numel, numel).copy_(sent)

    def all_gather(
        self,
        output: Tensor,
        sent: Tensor,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        """Fill ``output`` (``W * C`` elements) with every rank's ``sent``, in rank order."""
        return self.gather(output, sent, axis.pg, async_op)

    def all_gather_each(
        self, pairs: Sequence[tuple[Tensor, Tensor]], axis: MeshAxis, async_op: bool
    ) -> Any:
        if len(pairs) == 1:
            return self.all_gather(*pairs[0], axis, async_op)
        with torch_comm.coalesced(axis.pg, pairs[0][0].device):
            return _joined([self.all_gather(*pair, axis, async_op) for pair in pairs])

    def all_gather_uneven(
        self,
        outputs: Sequence[Tensor],
        sent: Tensor,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        """Fill ``outputs[r]`` with rank r's ``sent``. Lengths may differ, unlike in gloo itself."""
        if gloo_p2p.applies(axis.pg, sent):
            return gloo_p2p.run(gloo_p2p.DirectGather(outputs, sent, axis.pg), async_op)
        return dist.all_gather(list(outputs), sent, axis.pg, async_op)

    def reduce_scatter_uneven(
        self,
        output: Tensor,
        sent: Tensor,
        sizes: Sequence[int],
        op: Any,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        """Fill ``output`` with this rank's part of the reduction. ``sizes``: elements per rank."""
        group = self.scatter_group or axis.pg
        if sent.is_complex():
            output, sent = torch_comm.flat_as_real(output), torch_comm.flat_as_real(sent)
            sizes = [2 * numel for numel in sizes]
        if sent.dtype != output.dtype or gloo_p2p.applies(group, sent):
            return gloo_p2p.run(gloo_p2p.Exchange(output, sent, group, op, sizes), async_op)
        return dist.reduce_scatter(output, list(sent.split(list(sizes))), op, group, async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        sent: Tensor,
        op: Any,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        """Fill ``output`` ``[S]`` with this rank's part of the reduced ``sent`` ``[W * S]``.
        Complex numbers are passed as pairs of reals, even to custom reduce-scatters: NCCL has no
        complex dtypes, and torch's reduce-scatter does not convert them."""
        group = self.scatter_group or axis.pg
        exact = self._exact_in(sent)
        if sent.is_complex():
            output, sent = torch_comm.flat_as_real(output), torch_comm.flat_as_real(sent)
        if self.sum_rows is not None:
            self.sum_rows(sent, output, group, exact)
            return None
        return self.scatter(output, sent, group, op, async_op)

    def reduce_scatter_each(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        op: Any,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        if len(pairs) == 1:
            return self.reduce_scatter(*pairs[0], op, axis, async_op)
        same = pairs[0][0].dtype == pairs[0][1].dtype  # otherwise each is an ``Exchange``
        with torch_comm.coalesced(
            self.scatter_group or axis.pg if same else None, pairs[0][0].device
        ):
            return _joined([self.reduce_scatter(*pair, op, axis, async_op) for pair in pairs])

    def _exact_in(self, tensor: Tensor) -> Exact:
        """Return the columns that must not be rounded. A complex number takes up two columns."""
        if not tensor.is_complex():
            return self.exact
        return [(2 * first, 2 * last) for first, last in self.exact]

    def all_reduce(
        self,
        tensor: Tensor,
        op: Any,
        axis: MeshAxis,
        async_op: bool,
    ) -> dist.Work | None:
        """Reduce ``tensor`` over all ranks of the axis, in place."""
        if self.sum_replicas is not None:
            exact = self._exact_in(tensor)
            tensor = torch_comm.flat_as_real(tensor) if tensor.is_complex() else tensor
            self.sum_replicas(tensor, tensor, axis.pg, exact)
            return None
        work: dist.Work | None = dist.all_reduce(tensor, op, group=axis.pg, async_op=async_op)
        return work


def _joined(works: Sequence[Any]) -> gloo_p2p.Several | None:
    running = [work for work in works if work is not None]
    return gloo_p2p.Several(running) if running else None


class PendingReduction:
    """A tree's reductions in flight, for which the caller has not yet waited."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree  # an ``engine.tree.Runtime``

    def refuse(self, who: str, tree: object) -> None:
        """Raise StateError for a call on ``tree``, which is this tree or shares its streams."""
        whose = "" if self.tree is tree else " of a model with shared streams (share_comm_ctx)"
        raise StateError(
            "FS311",
            f"{who}: found a reduction{whose} that has not been waited for. Call wait() on the "
            "handle from finalize_backward(async_op=True).",
        )


class InFlight:
    """Buffers that are still being read or written. ``wait`` makes them safe to use."""

    __slots__ = ("_event", "_lost", "_work", "buffers")

    def __init__(
        self,
        buffers: tuple[Tensor, ...],
        work: dist.Work | None = None,  # the asynchronous collective
        lost: Callable[[Exception], Exception] | None = None,  # converts errors raised by the work
    ) -> None:
        self.buffers = buffers
        self._work = work
        self._lost = lost
        self._event: torch.Event | None = None  # recorded in a lane, after the work

    def end_with(self, event: torch.Event) -> InFlight:
        """Set the event that marks completion on a device."""
        self._event = event
        return self

    def drop(self, buffers: Sequence[Tensor]) -> None:
        self.buffers = tuple(b for b in self.buffers if not any(b is other for other in buffers))

    @property
    def is_done(self) -> bool:
        """Return True if the work is complete. Always False on a device."""
        return self._event is None and (self._work is None or self._work.is_completed())

    def wait(self) -> None:
        """Make the current stream (on a device) or the caller (on a CPU) wait for the work."""
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                if self._lost is not None:
                    raise self._lost(error) from error
                raise
            self._work = None
        if self._event is not None:
            torch.accelerator.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """Make the host wait for the work. Call this before the host uses the work's memory."""
        self.wait()
        if self._event is not None:
            self._event.synchronize()

    @property
    def runs(self) -> bool:
        """Return True if the work is asynchronous and has not been waited for."""
        return self._work is not None

    def hold_back(self, stream: torch.Stream) -> None:
        """Make another stream wait for the work."""
        if self._event is not None:
            stream.wait_event(self._event)


WHERE_IT_IS = nullcontext()


class Streams(Observable):
    """The lanes of a CPU, which has no streams: collectives are issued with async_op=True."""

    async_op = True
    host_read: InFlight | None = None  # the last launch that reads host memory
    pending: PendingReduction | None = None  # no other step may start until it is waited for
    current: torch.Stream | None = None  # for compute; None on a CPU

    def on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        """Return a context manager to compute in ``stream``, an earlier value of ``current``."""
        return WHERE_IT_IS

    def launch(
        self,
        lane: str,
        issue: Callable[..., InFlight],
        *args: object,
        after: InFlight | None = None,
    ) -> InFlight:
        """Run ``issue(*args)`` in a lane, ordered after ``after``."""
        if after is not None:
            after.wait()
        if packing_hooks(False) is not None:
            with torch_autograd.without_packing():
                return issue(*args)
        return issue(*args)

    def order_after_compute(self, lane: str) -> None:
        """Make a lane wait for all compute issued so far."""

    def retire(self, lane: str, buffers: tuple[Tensor, ...]) -> None:
        """Free a lane's buffers after the compute issued so far, which reads them."""

    def drain(self, lane: str) -> None:
        """Free a lane's retired buffers before a pause in its launches."""

    def order_after_event(self, lane: str, event: torch.Event) -> None:
        """Make a lane wait for a user's event; on a CPU, the host waits."""
        event.synchronize()

    def hold_back(self, stream: torch.Stream | None) -> None:
        """Make a stream wait for compute, which used memory allocated in that stream."""

    def finish_host_reads(self) -> None:
        """Make the host wait for all pending reads of host memory, before the user writes to it."""
        if self.host_read is not None:
            self.host_read.synchronize()
            self.host_read = None

    def note_late(self, looks: Iterable[LateLook]) -> None:
        """Copy received stamps from the device to the host. On a CPU, they are already checked."""

    def look_late(self, looks: Iterable[LateLook]) -> None:
        """Check the copied stamps, without waiting. StateError: ranks gathered different data."""

    def lane_of(self, stream: torch.Stream) -> str:
        """Return the lane of a user-supplied stream. A CPU has no streams."""
        return "all_reduce"

    def reset(self) -> None:
        """Wait for the device, and drop all buffers."""

    def forget(self) -> None:
        """Drop all buffers without waiting. No enqueued operation may use them."""

    observed_as: ClassVar[Mapping[str, Callable[..., Any]]] = {"launch": launch}


@dataclass(eq=False, slots=True)
class StepContext:
    """State shared by the groups of a tree: the lanes, and the phase of its root."""

    streams: Streams
    phase: str = IDLE

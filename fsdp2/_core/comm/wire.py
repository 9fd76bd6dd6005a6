"""What a group sends, and beside what: the wire, and the lanes in which it works.

Owns what is sent, not when. ``Wire`` is what a group calls: an all-gather and a reduce-scatter that
can be swapped (``_core.comm.comms``), and the sum over replicas. A test swaps the ``Wire`` for one
that joins several ranks in a process. Gradient scaling is a pure function here, because it depends
on what the wire can carry.

On a CPU the asynchrony is the collective's own (a ``Work``), and every method of ``Streams`` that
orders streams does nothing. On a device there is a stream for each *lane* (``gather``, ``reduce``,
``all_reduce``), and memory is handed over by events alone.

[Note: who frees a buffer]
A buffer that two streams touch is held by an ``InFlight`` until the stream that allocated it has
been told to wait for the stream that used it last. No ``record_stream``, no synchronisation with
the host. Gather buffers are allocated in the gather lane and read by compute: ``retire`` records
compute's progress, and the launch after the next one in that lane waits for it before it drops
them. The next one does not: it gathers while compute unpacks. What is left when a forward or a
backward is over is dropped by ``drain``. Reduce inputs are allocated by compute and read by the
reduce lane: ``InFlight.wait`` makes compute wait.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from fsdp2._core.base import torch_autograd, torch_comm, torch_modes, torch_tensors
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
    """Mixed into a collective: buffers come from torch's own allocator."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class DefaultAllGather(TorchMemory, AllGather):
    """torch.distributed's, or direct sends where these are better."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        is_large = input_tensor.nbytes >= gloo_p2p.LARGE_NBYTES
        if is_large and gloo_p2p.applies(group, input_tensor) and gloo_p2p.is_small(group):
            rows = output_tensor.view(group.size(), -1)
            gather: Any = gloo_p2p.DirectGather(rows, input_tensor, group)
            if not async_op:
                gather.wait()
            return gather if async_op else None
        work: dist.Work | None = torch_comm.all_gather_single(
            output_tensor, input_tensor, group, async_op
        )
        return work


class DefaultReduceScatter(TorchMemory, ReduceScatter):
    """torch.distributed's, or an exchange where that is better."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        is_large = input_tensor.nbytes >= gloo_p2p.LARGE_NBYTES
        is_cast = input_tensor.dtype != output_tensor.dtype
        if is_cast or (is_large and gloo_p2p.applies(group, input_tensor)):
            exchange: Any = gloo_p2p.Exchange(output_tensor, input_tensor, group, op)
            if not async_op:
                exchange.wait()
            return exchange if async_op else None
        work: dist.Work | None = torch_comm.reduce_scatter_single(
            output_tensor, input_tensor, op, group, async_op
        )
        return work


class GroupMemory:
    """Mixed into a collective: buffers come from the process group's own allocator, if any."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        flat = torch_comm.allocate_from_group(self._group, math.prod(size), dtype, device)
        return torch.empty(size, dtype=dtype, device=device) if flat is None else flat.view(*size)


class GroupMemoryAllGather(GroupMemory, DefaultAllGather):
    """torch.distributed's all-gather, on the process group's memory."""


class GroupMemoryReduceScatter(GroupMemory, DefaultReduceScatter):
    """torch.distributed's reduce-scatter, on the process group's memory."""


KEPT_NBYTES = 1 << 25
"""Limit of ``KeptMemory``. The C library gets larger blocks from the system, and returns them."""

Cut = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""Widths of columns, and the shapes in which these are used: with fewer rows, perhaps."""


class Kept:
    """A kept buffer ``[W, C]``, zeros at first, and its columns."""

    @torch.inference_mode(False)
    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, cut: Cut) -> None:
        self.memory = torch.zeros(shape, dtype=dtype, device="cpu")
        columns = list(self.memory.split(cut[0], 1))
        self.parts = [columns.pop(0)[: shape[0]].view(shape) for shape in cut[1]]
        self._number = torch_tensors.number_of(self.memory.untyped_storage())
        self.at_rest = self.count_owners()

    def count_owners(self) -> tuple[int, int, int]:
        """Count the owners of the tensor, in Python and in C++, and of its storage (views)."""
        memory = self.memory
        holders = sys.getrefcount(memory), torch_tensors.owners_of(memory)
        return *holders, torch_tensors.use_count(self._number)


class KeptMemory:
    """Host buffers for what travels over one process group; groups use them one after another.

    Allocating and freeing a few MB for each of many groups fragments the C library's heap: small
    objects settle in the freed blocks, and the process grows with each group. Views of the columns
    are kept too, because making them costs half of what unpacking small parameters does. They live
    as long as a group that uses them.
    """

    def __init__(self, most: int) -> None:
        self._buffers: dict[object, list[Kept]] = {}
        self._room = self._most = most

    def take(self, use: str, shape: tuple[int, int], dtype: torch.dtype, cut: Cut) -> Kept:
        """Return a free buffer. Outside of its columns only the same ``use`` has written."""
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
    """Return the memory of an axis' process group. Fake tensors are not kept."""
    if axis.pg is None or not torch_modes.has_real_memory():
        return KeptMemory(0)
    known = _memories.get(axis.pg)
    memory = None if known is None else known()
    if memory is None:
        memory = KeptMemory(KEPT_NBYTES)
        _memories[axis.pg] = weakref.ref(memory)
    return memory


class Wire:
    """What one group sends over: an ``AllGather`` and a ``ReduceScatter``, or what acts as one.

    ``zero_copy``: which parameters travel alone; ``gradient_dtype``: what gradients travel in, if
    not in the reduce dtype. Whoever changes a wire tells its group (``ParamGroup.rewire``).
    """

    carries: ClassVar[bool] = True

    def __init__(self) -> None:
        self.gather: Any = DefaultAllGather()
        self.scatter: Any = DefaultReduceScatter()
        self.uses_group_memory = False  # what a copy is told
        self.is_separate = False  # gradients are reduced over a process group of their own
        self.scatter_group: dist.ProcessGroup | None = None
        self.zero_copy: ZeroCopy | None = ZeroCopy(ZERO_COPY_NBYTES)
        self.gradient_dtype: torch.dtype | None = None
        # a hook of the user's, over each axis; what must stay exact is told with the tensors
        self.sum_rows: Callable[..., None] | None = None
        self.sum_replicas: Callable[..., None] | None = None
        self.exact: Exact = ()  # columns of a rank's part that nothing may round
        self.keeps_landing = True  # on a host what is gathered may land in memory that is kept

    def __getstate__(self) -> dict[str, Any]:
        """Copies carry every choice; what hangs on a process group is made again by their group."""
        gather, scatter = self.custom
        kept = {name: value for name, value in vars(self).items() if name != "zero_copy"}
        nbytes, row_nbytes = self.zero_copy or (None, 1)
        return {
            **kept,
            "zero_copy_nbytes": nbytes,  # as numbers: a pickle names as few classes as it can
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
        """Have the collectives and the choices of another wire, in whose place this one is put."""
        self.gather, self.scatter = wire.gather, wire.scatter
        self.sum_rows, self.sum_replicas = wire.sum_rows, wire.sum_replicas
        self.is_separate, self.scatter_group = wire.is_separate, wire.scatter_group
        self.uses_group_memory = wire.uses_group_memory
        self.zero_copy, self.gradient_dtype = wire.zero_copy, wire.gradient_dtype

    def use_group_memory(self, pg: dist.ProcessGroup | None) -> None:
        """Let buffers come from a process group's own allocator."""
        if pg is not None:
            self.gather = GroupMemoryAllGather(pg)
            self.scatter = GroupMemoryReduceScatter(self.scatter_group or pg)

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer of a reduction."""
        buffer: torch.Tensor = self.scatter.allocate(shape, dtype=dtype, device=device)
        return buffer

    @property
    def only_sums(self) -> bool:
        """True if what joins gradients leaves a mean to the engine."""
        return self.sum_replicas is not None

    @property
    def custom(self) -> tuple[Any, Any]:
        """The all-gather and the reduce-scatter of the user's; None in place of one of ours."""
        return (
            None if isinstance(self.gather, DefaultAllGather) else self.gather,
            None if isinstance(self.scatter, DefaultReduceScatter) else self.scatter,
        )

    @property
    def is_custom(self) -> bool:
        """True if a collective of the user's is set."""
        return self.custom != (None, None)

    @property
    def gathers_zero_copy(self) -> bool:
        """True if an all-gather may work on any memory; one of its own has to be packed."""
        return type(self.gather) is DefaultAllGather

    @property
    def scatters_zero_copy(self) -> bool:
        """The same for a reduce-scatter."""
        return type(self.scatter) is DefaultReduceScatter

    @property
    def sends_kept(self) -> bool:
        """True if on a host a reduce-scatter may send what lies in kept memory."""
        return self.keeps_landing and self.scatters_zero_copy and self.sum_rows is None

    def stage(self, sent: torch.Tensor, axis: MeshAxis) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of an all-gather, and ``sent`` where it has to lie.

        That is ``[W, C]`` for ``[1, C]``, which saves a view, and ``[W * C]`` for ``[C]``. A
        swapped all-gather gets the latter, and what it sends is a slice of it, as torch's interface
        has it.
        """
        numel, gather = sent.numel(), self.gather
        if type(gather) is DefaultAllGather:
            shape = (axis.size, numel) if sent.dim() == 2 else (axis.size * numel,)
            return torch.empty(shape, dtype=sent.dtype, device=sent.device), sent
        sent = sent.view(-1)
        output = gather.allocate((axis.size * numel,), dtype=sent.dtype, device=sent.device)
        return output, output.narrow(0, axis.rank * numel, numel).copy_(sent)

    def all_gather(
        self, output: torch.Tensor, sent: torch.Tensor, axis: MeshAxis, async_op: bool
    ) -> Any:
        """Fill ``output``, ``W * C`` elements, with every rank's ``sent``, in rank order."""
        assert axis.pg is not None
        return self.gather(output, sent, axis.pg, async_op)

    def all_gather_each(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], axis: MeshAxis, async_op: bool
    ) -> Any:
        """Gather several pairs of output and input, in order."""
        if len(pairs) == 1:
            return self.all_gather(*pairs[0], axis, async_op)
        with torch_comm.coalesced(axis.pg, pairs[0][0].device):
            return _joined([self.all_gather(*pair, axis, async_op) for pair in pairs])

    def all_gather_uneven(
        self,
        outputs: Sequence[torch.Tensor],
        sent: torch.Tensor,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        """Fill each of ``outputs`` with what that rank has ``sent``: as much as it has room for.

        gloo's own takes equal lengths only, so the parts are sent one by one there.
        """
        assert axis.pg is not None
        if gloo_p2p.applies(axis.pg, sent):
            gather = gloo_p2p.DirectGather(outputs, sent, axis.pg)
            if async_op:
                return gather
            gather.wait()
            return None
        return dist.all_gather(list(outputs), sent, axis.pg, async_op)

    def reduce_scatter_uneven(
        self,
        output: torch.Tensor,
        sent: torch.Tensor,
        sizes: Sequence[int],
        op: Any,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        """Fill ``output`` with this rank's part of all ``sent``, joined.

        ``sizes`` are the elements of ``sent`` for each rank, in order.
        """
        group = self.scatter_group or axis.pg
        assert group is not None
        if sent.is_complex():
            output, sent = torch_comm.flat_as_real(output), torch_comm.flat_as_real(sent)
            sizes = [2 * numel for numel in sizes]
        if sent.dtype != output.dtype or gloo_p2p.applies(group, sent):
            exchange = gloo_p2p.Exchange(output, sent, group, op, sizes)
            if async_op:
                return exchange
            exchange.wait()
            return None
        return dist.reduce_scatter(output, list(sent.split(list(sizes))), op, group, async_op)

    def reduce_scatter(
        self, output: torch.Tensor, sent: torch.Tensor, op: Any, axis: MeshAxis, async_op: bool
    ) -> Any:
        """Fill ``output`` ``[S]`` with this rank's part of all ``sent`` ``[W * S]``, joined.

        Complex numbers travel as their two parts, also to a reduce-scatter of the user's: NCCL has
        none, and torch's reduce-scatter hands them on as they are.
        """
        group = self.scatter_group or axis.pg
        assert group is not None
        exact = self._exact_in(sent)
        if sent.is_complex():
            output, sent = torch_comm.flat_as_real(output), torch_comm.flat_as_real(sent)
        if self.sum_rows is not None:
            self.sum_rows(sent, output, group, exact)
            return None
        return self.scatter(output, sent, group, op, async_op)

    def reduce_scatter_each(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        op: Any,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        """Reduce several pairs of output and input, in order."""
        if len(pairs) == 1:
            return self.reduce_scatter(*pairs[0], op, axis, async_op)
        same = pairs[0][0].dtype == pairs[0][1].dtype  # else each is an exchange, with a sum
        with torch_comm.coalesced(
            self.scatter_group or axis.pg if same else None, pairs[0][0].device
        ):
            return _joined([self.reduce_scatter(*pair, op, axis, async_op) for pair in pairs])

    def _exact_in(self, tensor: torch.Tensor) -> Exact:
        """Return the columns that nothing may round; of complex numbers each has two parts."""
        if not tensor.is_complex():
            return self.exact
        return [(2 * first, 2 * last) for first, last in self.exact]

    def all_reduce(
        self, tensor: torch.Tensor, op: Any, axis: MeshAxis, async_op: bool
    ) -> dist.Work | None:
        """Replace ``tensor`` by what all ranks of the axis hold, joined."""
        if self.sum_replicas is not None:
            assert axis.pg is not None
            exact = self._exact_in(tensor)
            tensor = torch_comm.flat_as_real(tensor) if tensor.is_complex() else tensor
            self.sum_replicas(tensor, axis.pg, exact)
            return None
        work: dist.Work | None = dist.all_reduce(tensor, op, group=axis.pg, async_op=async_op)
        return work


def _joined(works: Sequence[Any]) -> gloo_p2p.Several | None:
    running = [work for work in works if work is not None]
    return gloo_p2p.Several(running) if running else None


class PendingReduction:
    """Gradients of a tree that are being reduced, and that somebody has to wait for."""

    def __init__(self, tree: object) -> None:
        self.tree = tree

    def refuse(self, who: str, tree: object) -> None:
        """Raise StateError: a tree on the same streams, or this one itself, wants to go on."""
        whose = "" if self.tree is tree else " of a model that shares its streams (share_comm_ctx)"
        raise StateError(
            "FS311",
            f"{who}: found a reduction{whose} that nobody has waited for. Call wait() on what "
            "finalize_backward(async_op=True) returned.",
        )


class InFlight:
    """Buffers that something still reads or writes. ``wait`` makes them safe to use."""

    __slots__ = ("_event", "_lost", "_work", "buffers")

    def __init__(
        self,
        buffers: tuple[torch.Tensor, ...],
        work: dist.Work | None = None,  # of an asynchronous collective
        lost: Callable[[Exception], Exception] | None = None,  # makes of the work's error ours
    ) -> None:
        self.buffers = buffers
        self._work = work
        self._lost = lost
        self._event: torch.Event | None = None  # in a lane: what is behind it may begin

    def end_with(self, event: torch.Event) -> InFlight:
        """Be over on a device when an event is."""
        self._event = event
        return self

    def drop(self, buffers: Sequence[torch.Tensor]) -> None:
        """Hold some of the buffers no longer."""
        self.buffers = tuple(b for b in self.buffers if not any(b is other for other in buffers))

    @property
    def is_done(self) -> bool:
        """True if the work has ended already, on a CPU."""
        return self._event is None and (self._work is None or self._work.is_completed())

    def wait(self) -> None:
        """Make the current stream (a device) or the caller (a CPU) wait for the work."""
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
        """Make the host wait for the work: what it wrote to host memory can be read."""
        self.wait()
        if self._event is not None:
            self._event.synchronize()

    @property
    def runs(self) -> bool:
        """True if an asynchronous work was issued, and nobody has waited for it."""
        return self._work is not None

    def hold_back(self, stream: torch.Stream) -> None:
        """Make another stream wait for the work."""
        if self._event is not None:
            stream.wait_event(self._event)


WHERE_IT_IS = nullcontext()


class Streams(Observable):
    """Lanes of a CPU: none. Collectives are issued as async works."""

    async_op = True
    host_read: InFlight | None = None  # the last launch that reads memory of the host
    pending: PendingReduction | None = None  # holds the lanes until somebody has waited for it

    # The stream that computes now; a CPU has none. An attribute: it is read in every step.
    current: torch.Stream | None = None

    def on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        """Compute in a stream that ``current`` returned."""
        return WHERE_IT_IS

    def launch(
        self,
        lane: str,
        issue: Callable[..., InFlight],
        *args: object,
        after: InFlight | None = None,
    ) -> InFlight:
        """Run ``issue(*args)`` in a lane, behind ``after``."""
        if after is not None:
            after.wait()
        if packing_hooks(False) is not None:
            with torch_autograd.without_packing():
                return issue(*args)
        return issue(*args)

    def order_after_compute(self, lane: str) -> None:
        """Let a lane wait for what compute has been given so far."""

    def retire(self, lane: str, buffers: tuple[torch.Tensor, ...]) -> None:
        """Free buffers of a lane once compute, as far as it is enqueued, has read them."""

    def drain(self, lane: str) -> None:
        """Free the retired buffers of a lane: nothing is launched there for a while."""

    def order_after_event(self, lane: str, event: torch.Event) -> None:
        """Let a lane wait for an event of the user's; here, the host does."""
        event.synchronize()

    def hold_back(self, stream: torch.Stream | None) -> None:
        """Let a stream whose memory compute has used, and gives back, wait for compute."""

    def finish_host_reads(self) -> None:
        """Make the host wait until nothing reads its memory, which the user may write to then."""
        if self.host_read is not None:
            self.host_read.synchronize()
            self.host_read = None

    def note_late(self, looks: Iterable[LateLook]) -> None:
        """Let the device tell what it has seen of other ranks; here, the host sees at once."""

    def look_late(self, looks: Iterable[LateLook]) -> None:
        """Look at what the device has told, if that takes no wait.

        Raises:
            StateError: ranks gathered different things.
        """

    def lane_of(self, stream: torch.Stream) -> str:
        """Return the lane that is a stream of the user's; here, none is needed."""
        return "all_reduce"

    def reset(self) -> None:
        """Drop everything held, after the device has finished it."""

    observed_as: ClassVar[Mapping[str, Callable[..., Any]]] = {"launch": launch}


class StepContext:
    """What the groups of a tree share: the phase that its root is in, and the lanes."""

    __slots__ = ("phase", "streams")

    def __init__(self, streams: Streams) -> None:
        self.phase = IDLE
        self.streams = streams

"""Gradients of a group: from autograd's unsharded ones to sharded DTensors.

Owns the reduce layout, what waits for a reduction, one reduction in flight, and the queue of those
of a tree. It must not know units, hooks or when to reduce.

[Note: reduce is constant]
A group reduces every trainable parameter, on every rank, whatever took part: ranks that took
different branches cannot mismatch their collectives. How many ranks had a gradient travels in the
last elements of the buffer, so that a parameter that nobody used keeps ``grad is None``. A rank
that has every gradient itself need not look; on a device, looking makes the host wait in ``wait``.

[Note: what waits for a reduction]
Gradients of backwards without sync stay where autograd leaves them: in ``grad`` of the unsharded
parameters. There they add up in the dtype that they are reduced in, or in their parameter's own.
Where that is no wider dtype, autograd casts to it (``grad_dtype`` of the unsharded parameter). Else
autograd leaves what backward computed, and adds to a wider gradient in place: the first one that
will not be reduced yet is made wider, and whoever syncs each backward casts nothing.

A reduction on a CPU is three calls that may lie far apart (``start``, ``advance``, ``finish``), so
that compute runs between them. On a device they are enqueued at once and streams do the waiting.
``wait`` delivers: where a parameter's ``grad`` is set, compute has waited for it, because autograd
may add to it in the same backward (a term of the loss that is of the shards). For gradients that
are kept in host memory, or that may be those of nobody, the host waits, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._agreement.collective_ids import CollectiveIds
from fsdp2._base.capabilities import capabilities
from fsdp2._base.errors import StateError, UnsupportedError
from fsdp2._base.policy import Residence, Settings
from fsdp2._comm.mesh import DataMesh
from fsdp2._comm.wire import InFlight, StepContext, Streams, Wire
from fsdp2._param_group import gradients
from fsdp2._param_group.gradients import GradientBuffer, local_gradient
from fsdp2._param_group.layout import ReduceLayout
from fsdp2._param_group.param import FSDPParam
from fsdp2._param_group.reduce_plan import ReducePlan, ReducePlanner, Unreduced

AllReduceHook = Callable[[Tensor], None]

SMALL_NBYTES = 1 << 20
"""Bytes of a reduction's input below which its memory does not matter."""


class Reducer:
    """What a group knows about reducing its gradients."""

    def __init__(
        self,
        params: Sequence[FSDPParam],
        data: DataMesh,
        residence: Residence,
        ids: CollectiveIds,
    ) -> None:
        self._params = params
        self._residence = residence
        # on a device the streams of users may read gradients
        self._has_streams = not capabilities(residence.storage).is_host
        self.data = data
        self.ids = ids
        # sharded gradients of the last reduction, to be filled again
        self._buffer: GradientBuffer | None = None
        self.wire = Wire()  # what the group sends over; gathers use it, too
        self.hook: AllReduceHook | None = None
        self.hook_stream: torch.Stream | None = None
        self.unreduced = Unreduced()
        self.planner = ReducePlanner(params, data, residence, ids, self.unreduced)
        self.has_waited = False  # the last gradients had to wait for a reduction

    @property
    def device(self) -> torch.device:
        """Where gradients are computed and reduced."""
        return self._residence.compute

    def forget(self, param: FSDPParam) -> None:
        """Drop the unreduced gradients of a parameter whose place another one takes."""
        if param.unsharded is not None:
            param.unsharded.grad = None

    @property
    def has_unreduced(self) -> bool:
        """True if gradients are here that no reduction has taken."""
        return self.has_local_gradients or self.unreduced.partial is not None

    def refuse_hidden(self, fqn: str) -> None:
        """Raise StateError if gradients came here that nobody will reduce.

        Call it after a forward of which no output told of a backward, and no backward of the tree.
        """
        if self.has_unreduced and not self.unreduced.is_waiting:
            raise StateError(
                "FS321",
                f"{fqn or '<root>'}: a backward left gradients on its unsharded parameters, "
                "and nothing told that it began: what the forward returned held no tensor with a "
                "gradient. So no gradient was reduced. Return the tensors that backward begins "
                "from, or put them on an attribute of the module. zero_grad() on the model drops "
                "the gradients that came.",
            )

    def keep_partial(self, reduced: Tensor) -> None:
        """Keep what was reduced over the shard axis only, in memory that nobody uses again."""
        self.unreduced.is_waiting = True
        self.unreduced.partial, self._buffer = reduced, None

    def discard(self) -> None:
        """Drop every unreduced gradient."""
        self.unreduced.clear()
        self._buffer = None
        for param in self._params:
            if param.unsharded is not None:
                param.unsharded.grad = None

    def plan(self) -> ReducePlan:
        """Plan, or return the plan: constant over ranks and steps."""
        return self.planner.current or self.planner.make(self.wire)

    def prepare(self, settings: Settings) -> ReducePlan:
        """Return the plan, with the scale that the settings ask for."""
        planner = self.planner
        plan = planner.current
        if plan is not None and planner.prepared[0] is plan and planner.prepared[1] is settings:
            return plan
        return planner.prepare(settings, self.wire)

    def begin_sums(self, settings: Settings) -> None:
        """See in which dtypes autograd adds up the gradients of the backward that may follow.

        Only where sync is off, or was for the last gradients: else nothing adds up.
        """
        self.has_waited = waits = not settings.reduce_grads
        for param in self.plan().members:
            param.begin_sum(waits)

    @property
    def has_local_gradients(self) -> bool:
        """True if the last backward, or one before it, left gradients on unsharded parameters."""
        for param in self.plan().members:
            unsharded = param.unsharded
            if unsharded is not None and unsharded.grad is not None:
                return True
        return False

    def reduce(self, settings: Settings, streams: Streams, with_graph: bool) -> Reduction | None:
        """Pack the local gradients; return the reduction to start, or None while sync is off.

        ``with_graph``: this backward creates a graph.

        Raises:
            UnsupportedError: a gradient carries a graph (``backward(create_graph=True)``).
        """
        plan = self.prepare(settings)
        if plan.free:
            plan = self.planner.follow(plan, settings, self.wire)
        layout = plan.layout
        if not layout.members:
            return None
        self.unreduced.is_waiting = not settings.reduce_grads
        if self.unreduced.is_waiting:
            self._widen_gradients(plan, with_graph)
            return None
        grads, missing, is_mixed = self._take_gradients(plan, with_graph)
        behind = plan.complete
        if missing:
            absent = [position for position, grad in enumerate(grads) if grad is None]
            behind = gradients.tail_without(behind, absent, layout)
        if self.data.shard.size > 1:
            # Before the wire is asked for memory: what ranks may have to send first asks, too.
            self.ids.reductions.before()
        inputs = self._inputs_of(grads, behind, layout, is_mixed)
        look = missing > 0 and not settings.reduce_unused and self.hook is None
        return Reduction(self, plan, inputs, look, settings.all_reduce_grads, streams)

    def _widen_gradients(self, plan: ReducePlan, with_graph: bool) -> None:
        """Let gradients wait for a reduction. See [Note: what waits for a reduction]."""
        for param in plan.members:
            grad = None if param.unsharded is None else param.unsharded.grad
            if grad is not None and grad.dtype is not (dtype := param.accumulated_dtype):
                if with_graph:
                    _refuse_graph(param, grad)
                assert param.unsharded is not None
                param.unsharded.grad = grad.to(dtype)

    def _inputs_of(
        self, grads: list[Tensor | None], behind: Tensor, layout: ReduceLayout, is_mixed: bool
    ) -> list[Tensor]:
        """Return what is reduced: packed gradients ``[W, packed_numel]``, and zero-copy ones."""
        shape, device = (layout.size, layout.packed_numel), self._residence.compute
        packed = self.wire.allocate(shape, layout.wire_dtype, device)
        gradients.pack_gradients(grads, layout, self.data.shard.rank, behind, packed, is_mixed)
        if not layout.zero_copy:
            return [packed]
        return [packed, *gradients.zero_copy_gradients(grads, layout, device)]

    def _take_gradients(
        self, plan: ReducePlan, with_graph: bool
    ) -> tuple[list[Tensor | None], int, bool]:
        """Detach the local gradients from the unsharded parameters.

        Returns them, how many miss, and whether they have several dtypes: some have waited, or the
        model computed them in another one than their parameters are in.
        """
        grads: list[Tensor | None] = []
        missing, is_mixed = 0, False
        for param in plan.members:
            grad = None if param.unsharded is None else param.unsharded.grad
            if grad is None:
                missing += 1
            else:
                if with_graph:
                    _refuse_graph(param, grad)
                if param.placement.annotation is not None or (
                    type(grad) is not Tensor and isinstance(grad, DTensor)
                ):
                    grad = local_gradient(grad, param, param.accumulated_dtype)
                if grad.layout is not torch.strided:
                    grad = grad.to_dense()
                if grad.dtype is not plan.grad_dtype:
                    is_mixed = True
            grads.append(grad)
        for param in plan.members:
            if param.unsharded is not None:
                param.unsharded.grad = None
        return grads, missing, is_mixed

    def acquire(self, plan: ReducePlan) -> GradientBuffer:
        """Return a buffer for sharded gradients that nobody reads."""
        buffer = self._buffer
        if buffer is not None and buffer.layout is not plan.layout:
            buffer = None
        if buffer is not None and buffer.is_released:
            buffer.reclaim()
        elif buffer is None or not buffer.is_free:
            rank = self.data.shard.rank
            buffer = GradientBuffer(plan.layout, plan.members, rank, self._residence)
            self._buffer = buffer
        elif self._has_streams:  # the allocator knows of those that users recorded on gradients
            buffer.release()
            buffer.reclaim()
        buffer.is_filling = True
        return buffer

    def release_gradients(self) -> None:
        """Give back the memory of sharded gradients that nobody refers to, until there are others.

        On a device only: the memory of a host costs more to get than to keep.
        """
        buffer = self._buffer
        if buffer is None or buffer.is_released or not self._has_streams:
            return
        if buffer.is_free:
            buffer.release()


def _refuse_graph(param: FSDPParam, grad: Tensor) -> None:
    if grad.requires_grad:
        raise UnsupportedError(
            "FS314",
            f"{param.fqn}: its gradient has a graph, because backward was called with "
            "create_graph=True, and a reduced gradient cannot carry one. Take gradients of inputs "
            "with torch.autograd.grad(..., create_graph=True), then call backward() on what you "
            "made of them.",
        )


class Reduction:
    """One group's gradients under way. Calls must come in the order start, advance, finish."""

    def __init__(
        self,
        owner: Reducer,
        plan: ReducePlan,
        inputs: list[Tensor],
        look: bool,
        all_reduce: bool,
        streams: Streams,
    ) -> None:
        self.owner = owner
        self._plan = plan
        self._data = owner.data
        self._look = look
        self._all_reduce = all_reduce
        self._streams = streams
        self._packed_on = streams.current()  # the memory of the inputs is that stream's
        self._scale = owner.planner.scale
        self._inputs = inputs
        device = inputs[0].device
        self._buffer = owner.acquire(plan)
        only = self._buffer.only  # to reduce into, if every gradient is kept as it is reduced
        fits = only is not None and only.dtype is plan.layout.dtype and only.device == device
        self._reduced: Tensor | None = only if fits else None
        self._is_borrowed = self._reduced is None  # the sum lies in memory that the wire lends
        self._flight: InFlight | None = None  # the part of the reduction that was launched last
        self._held: Tensor | None = None  # an old partial sum, until compute has waited
        self._counts: Tensor | None = None  # how many ranks had each gradient, if one misses here
        self._grads: list[Tensor] | None = None  # gradients that are filled, and not yet set
        self._waits_for_copy = not inputs[0].is_cpu and (look or owner._residence.is_away)
        self.nbytes = plan.layout.nbytes

    @property
    def _sums_replicas(self) -> bool:
        return self._data.replicate.size > 1 and self._all_reduce

    def start(self) -> None:
        """Issue the reduce-scatter."""
        if self._scale.before != 1.0:
            self._inputs[0].mul_(self._scale.before)
        self._streams.order_after_compute("reduce")
        self._flight = self._streams.launch("reduce", self._reduce_scatter)

    def _reduce_scatter(self) -> InFlight:
        owner, layout, axis = self.owner, self._plan.layout, self._data.shard
        packed, *zero_copy = self._inputs
        if axis.size == 1:
            self._reduced, self._is_borrowed = packed.view(-1), True
            return InFlight((packed,))
        if self._reduced is None:
            self._reduced = owner.wire.allocate((layout.numel,), layout.dtype, packed.device)
        scale, async_op = self._scale, self._streams.async_op
        if zero_copy:
            *outputs, last = self._buffer.outputs(self._reduced)
            pairs = [(last, packed.view(-1)), *zip(outputs, zero_copy, strict=True)]
            work = owner.wire.reduce_scatter_each(pairs, scale.op, axis, async_op)
        else:
            sent = packed.view(-1)
            work = owner.wire.reduce_scatter(self._reduced, sent, scale.op, axis, async_op)
        return InFlight((*self._inputs, self._reduced), work, owner.ids.reductions.failed)

    def advance(self) -> None:
        """Issue the all-reduce over the replicate axis, if there is one."""
        if self._data.replicate.size == 1:
            return
        if self._all_reduce:
            self.owner.ids.reductions.before_sum()
        self._flight = self._streams.launch("all_reduce", self._sum_replicas, after=self._flight)

    def _sum_replicas(self) -> InFlight:
        assert self._reduced is not None
        owner = self.owner
        self._held = partial = owner.unreduced.partial  # it may lie in compute's memory
        if partial is not None:
            self._reduced.add_(partial)
            owner.unreduced.partial = None
        reduced = self._reduced
        if not self._all_reduce:
            owner.ids.reductions.arrived(reduced)
            owner.keep_partial(reduced.clone() if self._is_borrowed else reduced)
            self._reduced = None
            return InFlight((reduced,))
        work = owner.wire.all_reduce(
            reduced, self._scale.op, self._data.replicate, self._streams.async_op
        )
        return InFlight((reduced,), work, owner.ids.reductions.failed_sum)

    def free_if_done(self) -> None:
        """Drop the local gradients now if the reduce-scatter has ended. On a CPU."""
        if self._inputs and self._flight is not None and self._flight.is_done:
            self._flight.wait()
            self._flight.buffers = ()
            self._inputs = []

    def finish(self) -> None:
        """Scale, and fill the sharded gradients."""
        lane = "reduce" if self._data.replicate.size == 1 else "all_reduce"
        if self.owner.hook is not None:
            stream = self.owner.hook_stream
            lane = "all_reduce" if stream is None else self._streams.lane_of(stream)
        self._flight = self._streams.launch(lane, self._store, after=self._flight)

    def _store(self) -> InFlight:
        reduced, owner, layout = self._reduced, self.owner, self._plan.layout
        if reduced is None:
            return InFlight(())
        owner.ids.reductions.arrived(reduced)
        if owner.hook is not None:
            owner.hook(reduced[: layout.tail_start])
        if self._scale.after != 1.0:
            reduced.mul_(self._scale.after)
        if self._look:
            counts = reduced[layout.tail_start :][: len(layout.members)]
            self._counts = counts.to("cpu", non_blocking=True)
        self._grads = self._buffer.fill(reduced)
        return InFlight((reduced,))

    def _deliver(self) -> None:
        """Set or add the gradients; where nobody had one, leave what is there."""
        counts, grads = self._counts, self._grads or []
        self._counts = self._grads = None
        params = [member.sharded for member in self._plan.members]
        if counts is not None:
            used = [position for position, count in enumerate(counts.tolist()) if count != 0]
            params, grads = [params[p] for p in used], [grads[p] for p in used]
        self._buffer.deliver(params, grads)

    def wait(self) -> None:
        """Set the gradients, safe to use by compute, and free the buffers."""
        if self._flight is not None and self._grads is not None and self._waits_for_copy:
            self._flight.synchronize()
        elif self._flight is not None:
            self._flight.wait()
        if self._grads is not None:
            self._deliver()
        reduced = self._reduced
        self._drop()
        if reduced is not None and self._sums_replicas:
            self.owner.ids.reductions.arrived_late(reduced)

    def abandon(self) -> None:
        """Free the buffers once nothing uses them; gradients that are not set by then never are."""
        if self._flight is not None:
            self._flight.wait()
        self._drop()

    def _drop(self) -> None:
        flight, packed_on = self._flight, self._packed_on
        if flight is not None and packed_on is not None and packed_on != self._streams.current():
            flight.hold_back(packed_on)
        self._inputs = []
        self._flight = self._reduced = self._held = self._grads = None

    launched_as: ClassVar[Mapping[Callable[..., Any], str]] = {
        _reduce_scatter: "reduce_scatter",
        _sum_replicas: "all_reduce",
        _store: "store",
    }
    """What is launched in lanes, and what that is to an observer."""


class ReductionQueue:
    """Reductions in flight, the oldest first."""

    def __init__(self, context: StepContext, is_large: bool) -> None:
        self._context = context
        self.is_large = is_large  # a group of the tree has inputs whose memory matters
        self._running: deque[Reduction] = deque()

    def __bool__(self) -> bool:
        return bool(self._running)

    def make_room(self, owner: Reducer, settings: Settings) -> None:
        """Complete old reductions before a group packs gradients for another one."""
        while self._is_full_for(owner, settings):
            self._complete_oldest()

    def start(self, reduction: Reduction, settings: Settings) -> None:
        """Begin a reduction, for which there is room."""
        reduction.start()
        if not self._context.streams.async_op:
            reduction.advance()
            reduction.finish()
        self._running.append(reduction)
        if settings.input_buffers is None and settings.overlap.reductions == 0:
            self._complete_oldest()

    def _is_full_for(self, owner: Reducer, settings: Settings) -> bool:
        """True if the oldest reduction must end first: a group has one at a time, and all few."""
        running = self._running
        if not running:
            return False
        limit = settings.input_buffers
        if limit is None:  # one more if that takes next to nothing: it waits for the link only
            limit = settings.overlap.reductions + (running[0].nbytes < SMALL_NBYTES)
        if len(running) >= limit:
            return True
        for reduction in running:  # noqa: SIM110  # each turn of a generator is a call
            if reduction.owner is owner:
                return True
        return False

    def _complete_oldest(self) -> None:
        reduction = self._running.popleft()
        if self._context.streams.async_op:
            reduction.advance()
            reduction.finish()
        reduction.wait()

    def free_done(self) -> None:
        """Free what reductions hold that have ended: at other times on other ranks, so no more."""
        if self._context.streams.async_op:
            for reduction in self._running:
                reduction.free_if_done()

    def wait(self) -> None:
        """Make every reduced gradient safe to use."""
        if self._context.streams.async_op:
            for reduction in self._running:
                reduction.advance()
            for reduction in self._running:
                reduction.finish()
        while self._running:
            self._running.popleft().wait()

    def drop(self) -> None:
        """Wait for what is in flight; gradients that are not set by then never are."""
        while self._running:
            self._running.popleft().abandon()

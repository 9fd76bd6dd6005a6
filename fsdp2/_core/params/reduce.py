"""Reduction of a group's gradients: from autograd's unsharded gradients to sharded DTensors.

Holds gradients that are not reduced yet, reductions in flight, and the queue of a tree's
reductions. Independent of units and hooks; the caller decides when to reduce.

[Note: reduce is constant]
On every rank, a group reduces the gradients of all trainable parameters, used or not. Collectives
thus match even if ranks take different branches. The buffer's last elements contain, for each
gradient, the number of ranks that computed it, so that ``grad`` of an unused parameter stays None.
Only a rank that lacks a gradient reads these counts; on a device, the host must wait for them in
``Reduction.wait``.

[Note: what waits for a reduction]
Gradients of backwards without sync accumulate in ``grad`` of the unsharded parameters, in the
reduce dtype if there is one, else in the dtype of the parameter's gradient. If this dtype is no
wider than the compute dtype, autograd casts each gradient to it (``grad_dtype`` of the unsharded
parameter). If it is wider, we cast the first gradient that is not reduced immediately, and autograd
adds later gradients to the result in place; if sync is on in every backward, we cast nothing. An
optimizer's step checks the reducers that may hold unreduced gradients (``may_hold``): it warns, or
raises an error if no backward will ever reduce them (``_core.engine.between_steps``).

On a CPU, the three calls of a reduction (``start``, ``advance``, ``finish``) may be far apart, with
compute between them; on a device, all three are enqueued immediately, and streams wait. ``wait``
makes compute wait for the result before it sets ``grad``, because autograd may add to ``grad`` in
the same backward (for example, if a loss term depends on the shards). The host also waits if
gradients are stored in host memory, or if it must read the counts.

[Note: reused gradients]
Creating a DTensor for each gradient in every step costs more than the reduction. A group therefore
keeps the gradients of its last reduction, and refills the same memory if there is no other
reference to the DTensors (``p.grad``, a user's list, autograd's saved tensors), their local
tensors, or the storage (views). Otherwise it allocates a new buffer, so a ``p.grad`` that the user
keeps across steps does not change. On a device, an unreferenced buffer is *released* when a forward
begins: its memory would be idle while the step needs the most, and reallocating it is cheap.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._core.agreement.stamp import CollectiveIds
from fsdp2._core.base import events, torch_autograd, torch_dtensor, torch_tensors
from fsdp2._core.base.capabilities import capabilities
from fsdp2._core.base.errors import StateError, UnsupportedError
from fsdp2._core.base.events import Observable
from fsdp2._core.base.policy import Residence, Settings
from fsdp2._core.comm.mesh import DataMesh
from fsdp2._core.comm.wire import InFlight, StepContext, Streams, memory_of
from fsdp2._core.params import gradient_packing
from fsdp2._core.params.gradients import add_to, as_gradient, local_gradient, mismatch
from fsdp2._core.params.layout import ReduceLayout
from fsdp2._core.params.param import FSDPParam
from fsdp2._core.params.planning import ReducePlan, ReducePlanner

AllReduceHook = Callable[[Tensor], None]

_layout_of: Callable[[Any], torch.layout] = attrgetter("layout")

SMALL_NBYTES = 1 << 20  # input size below which one more reduction may be in flight

_buffers: WeakValueDictionary[int, GradientBuffer] = WeakValueDictionary()
"""Live buffers, by the addresses of their storages."""


class GradientBuffer:
    """One flat buffer for each storage dtype, and a DTensor for each member of a reduce layout."""

    def __init__(
        self,
        layout: ReduceLayout,
        params: Sequence[FSDPParam],
        rank: int,
        residence: Residence,
    ) -> None:
        self.is_filling = False
        self.is_released = False
        self._device = device = residence.storage
        self._flats: dict[torch.dtype, Tensor] = {}
        self.layout = layout
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._sums: list[tuple[Tensor, int]] = []
        self._grads: list[Tensor] = []
        for position, param in enumerate(params):
            dtype = param.kept_dtype(layout.dtype)
            if dtype not in self._flats:
                self._flats[dtype] = torch.empty(
                    layout.numel, dtype=dtype, device=device, pin_memory=residence.is_pinned
                )
            local: Tensor | None
            view: Tensor | None
            local = view = gradient_packing.gradient_view(
                self._flats[dtype], layout, position, rank
            )
            if layout.slotted[position]:
                local = torch.empty(view.shape, dtype=dtype, device=device)
                self._sums.append((local, position))
            elif not view.is_contiguous():
                local = torch.empty(view.shape, dtype=dtype, device=device)
                self._copies.append((local, view))
            self._grads.append(as_gradient(local, param))
        self.only = next(iter(self._flats.values())) if len(self._flats) == 1 else None
        self._outputs: list[Tensor] = []
        if self.only is not None and layout.zero_copy:
            self._outputs = list(self.only.split(layout.output_sizes))
        self._storages = [flat.untyped_storage() for flat in self._flats.values()]
        self._storages += [copied.untyped_storage() for copied, _ in self._copies]
        self._storages += [summed.untyped_storage() for summed, _ in self._sums]
        self._numbers = list(map(torch_tensors.number_of, self._storages))
        local = view = None  # these variables would count as references
        self._lent: dict[tuple[int, int, int], Tensor] = {}  # key: storage index, offset, size
        self._held = self._references()
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._enter()

    def _enter(self) -> None:
        if torch_dtensor.has_real_memory():
            for storage in self._storages:
                _buffers[storage.data_ptr()] = self

    def release(self) -> None:
        """Free the memory. Call only if ``is_free``. See [Note: reused gradients]."""
        has_addresses = torch_dtensor.has_real_memory()
        for storage in self._storages:
            if has_addresses:
                _buffers.pop(storage.data_ptr(), None)
            storage.resize_(0)
        self.is_released = True

    def reclaim(self) -> None:
        """Allocate the memory again, uninitialized."""
        for storage, nbytes in zip(self._storages, self._sizes, strict=True):
            storage.resize_(nbytes)
        self._enter()
        self.is_released = False

    def _references(self) -> list[int]:
        counts = list(map(torch_tensors.use_count, self._numbers))
        counts += map(sys.getrefcount, self._storages)  # each storage has one Python object
        shards = list(map(torch_dtensor.local_tensor, self._grads))
        with torch_dtensor.DisableTorchFunctionSubclass():
            for tensors in (self._grads, shards):
                counts += map(sys.getrefcount, tensors)
                counts += map(torch_tensors.owners_of, tensors)
        return counts

    @staticmethod
    def holding(grad: Tensor) -> GradientBuffer | None:
        """Return the buffer that contains gradient ``grad``, if any."""
        if not isinstance(grad, DTensor):
            return None
        storage = torch_dtensor.local_tensor(grad).untyped_storage()
        buffer = _buffers.get(storage.data_ptr())
        if buffer is None or not any(grad is own for own in buffer._grads):
            return None
        return buffer

    def lend(self, first: Tensor, numel: int) -> Tensor:
        """View ``numel`` elements of the buffer, beginning with the gradient ``first``. The view is
        cached and also shows later gradients. Do not use it after the buffer is dropped."""
        local = torch_dtensor.local_tensor(first)
        at = local.untyped_storage().data_ptr()
        index = [storage.data_ptr() for storage in self._storages].index(at)
        key = (index, int(local.storage_offset()), numel)
        if key not in self._lent:
            self._lent[key] = local.as_strided((numel,), (1,))
            self._held[index] += 1
        return self._lent[key]

    @property
    def is_free(self) -> bool:
        """Return True if only this buffer refers to its memory. See [Note: reused gradients]."""
        return not self.is_filling and self._references() == self._held

    def outputs(self, reduced: Tensor) -> list[Tensor]:
        """View each collective's output, in the order of ``output_sizes``."""
        if self._outputs and self.only is reduced:
            return self._outputs
        return list(reduced.split(self.layout.output_sizes))

    def fill(self, reduced: Tensor) -> list[Tensor]:
        """Copy reduced values ``[numel]`` to the gradients; return gradients for ``deliver``."""
        copies = [(flat, reduced) for flat in self._flats.values() if flat is not reduced]
        for local, position in self._sums:
            copies.append((local, gradient_packing.sum_of_slots(reduced, self.layout, position)))
        for target, source in copies:
            narrows = source.is_complex() and not target.is_complex()
            target.copy_(source.real if narrows else source, non_blocking=True)
        return self._grads

    def deliver(self, params: Sequence[torch.nn.Parameter], grads: Sequence[Tensor]) -> None:
        """Set or accumulate gradients, after ``fill`` has copied their values."""
        for local, view in self._copies:
            local.copy_(view)
        self.is_filling = False
        accumulate(params, grads)


may_hold: WeakValueDictionary[int, Reducer] = WeakValueDictionary()
"""Reducers that may hold unreduced gradients; each optimizer step checks them."""


class Reducer(ReducePlanner, Observable):
    """Reduces the gradients of one group, and keeps those that are not reduced yet."""

    def __init__(
        self,
        params: Sequence[FSDPParam],
        data: DataMesh,
        residence: Residence,
        ids: CollectiveIds,
    ) -> None:
        super().__init__(params, data, residence, ids)
        # on a device, user streams may read gradients
        self.has_streams = not capabilities(residence.storage).is_host
        self._buffer: GradientBuffer | None = None  # the last reduction's buffer, kept for reuse
        self._memory = memory_of(data.shard)
        self.hook: AllReduceHook | None = None
        self.hook_stream: torch.Stream | None = None
        self.has_waited = False  # sync was off in the last backward
        self.deliveries = 0  # number of reductions that set gradients or added to them

    @property
    def device(self) -> torch.device:
        return self._residence.compute

    def toggle(self, params: list[FSDPParam], settings: Settings) -> None:
        """Apply a changed ``requires_grad`` to every form of each parameter."""
        self.refuse_toggle(params)
        for param in params:
            param.toggle()
        self.current_plan = None
        self.prepare(settings)  # now: other ranks may issue placeholders for the new plan

    def forget(self, param: FSDPParam) -> None:
        if param.unsharded is not None:
            param.unsharded.grad = None

    @property
    def has_unreduced(self) -> bool:
        """Return True if this rank has unreduced gradients, local or as part of partial sums."""
        return self.has_local_gradients or self.unreduced.own_sums > 0

    def refuse_hidden(self) -> None:
        """Raise StateError if there are gradients that will never be reduced: no output of their
        forward was marked, so the start of backward was not detected."""
        if self.has_unreduced and not self.unreduced.is_waiting:
            raise StateError(
                "FS321",
                f"{self.ids.fqn or '<root>'}: a backward left gradients on the unit's unsharded "
                "parameters, but the start of this backward was not detected, because the forward "
                "returned no tensor with a gradient. No gradient was reduced. Return the tensors "
                "that backward starts from, or store them in an attribute of the module. Call "
                "zero_grad() on the model to discard these gradients.",
            )

    def keep_partial(self, reduced: Tensor) -> None:
        """Keep the result of the reduction over the first axis, and do not reuse its memory."""
        self.unreduced.is_waiting = True
        self.unreduced.partial = reduced.view(self.data.rows_between, -1)
        self._buffer = None

    def discard(self) -> None:
        self.unreduced.clear()
        self._buffer = None
        for param in self.params:
            self.forget(param)

    def begin_sums(self, settings: Settings) -> None:
        """Set the dtypes in which autograd accumulates the gradients of the next backward. Needed
        only if sync is off, or was off in the last backward: otherwise nothing accumulates."""
        self.has_waited = waits = not settings.reduce_grads
        for param in self.plan().members:
            param.begin_sum(waits)

    @property
    def has_local_gradients(self) -> bool:
        """Return True if any unsharded parameter has a gradient."""
        wholes = [param.unsharded for param in self.plan().members]
        return any(whole is not None and whole.grad is not None for whole in wholes)

    def reduce(
        self, settings: Settings, context: StepContext, with_graph: bool
    ) -> Reduction | None:
        """Pack the local gradients. Return the reduction to start, or None if sync is off. Raise
        UnsupportedError if a gradient has an autograd graph (possible only ``with_graph``)."""
        self.unreduced.is_owed = not settings.reduce_grads
        if not (settings.reduce_grads and settings.all_reduce_grads):
            may_hold[id(self)] = self
        plan = self.prepare(settings)
        if plan.free:
            plan = self.follow(plan, settings)
        layout = plan.layout
        if not layout.members:
            return None
        self.unreduced.is_waiting = not settings.reduce_grads
        if self.unreduced.is_waiting:
            self.hold_gradients(plan, with_graph)
            return None
        grads, missing, is_mixed = self.take_gradients(plan, with_graph)
        if settings.all_reduce_grads or self.data.summed.size == 1:
            self.unreduced.own_sums = 0
        else:
            self.unreduced.own_sums += missing < len(grads)
        behind = plan.complete
        absent: list[int] = []
        if missing:
            absent = [position for position, grad in enumerate(grads) if grad is None]
            behind = gradient_packing.tail_without(behind, absent, layout)
        if self.data.shard.size > 1:
            # before packing: this may exchange numbers, and a wire lends one buffer at a time
            self.ids.reductions.before()
        kept = None
        if layout.cut is not None and behind.is_cpu and self.wire.sends_kept:
            shape = layout.size, layout.packed_numel
            kept = self._memory.take("reduce", shape, layout.wire_dtype, layout.cut)
        inputs = gradient_packing.pack_gradients(
            grads, layout, self.data.shard.rank, behind, self.wire.allocate, is_mixed, kept
        )
        if settings.reduce_unused or self.hook is not None:
            absent = []  # members without a gradient on any rank get zeros
        streams = context.streams
        reduction = Reduction(self, plan, inputs, absent, settings.all_reduce_grads, streams)
        if events.listeners:
            events.emit("reduce", self.ids.fqn or "", context.phase, reduction.nbytes)
        return reduction

    def hold_gradients(self, plan: ReducePlan, with_graph: bool) -> None:
        """Keep gradients for a later reduction. See [Note: what waits for a reduction]."""
        for param in plan.members:
            grad = None if param.unsharded is None else param.unsharded.grad
            if grad is not None and grad.dtype is not (dtype := param.accumulated_dtype):
                if with_graph:
                    _refuse_graph(param, grad)
                assert param.unsharded is not None
                param.unsharded.grad = grad.to(dtype)

    def take_gradients(
        self, plan: ReducePlan, with_graph: bool
    ) -> tuple[list[Tensor | None], int, bool]:
        """Take the local gradients from the unsharded parameters, and set ``grad`` to None. Return
        the gradients, the number of missing ones, and whether any has an unplanned dtype."""
        wholes = [param.unsharded for param in plan.members]
        grads: list[Tensor | None] = [None if w is None else w.grad for w in wholes]
        missing = 0
        if with_graph or plan.is_annotated or not _are_plain(grads):
            for position, (param, grad) in enumerate(zip(plan.members, grads, strict=True)):
                if grad is None:
                    missing += 1
                    continue
                if with_graph:
                    _refuse_graph(param, grad)
                if param.placement.annotation is not None or isinstance(grad, DTensor):
                    grad = local_gradient(grad, param, param.accumulated_dtype)
                if grad.layout is not torch.strided:
                    grad = grad.to_dense()
                grads[position] = grad
        for whole in wholes:
            if whole is not None:
                whole.grad = None
        dtypes = {grad.dtype for grad in grads if grad is not None}
        return grads, missing, not dtypes <= {plan.grad_dtype}

    def acquire(self, plan: ReducePlan) -> GradientBuffer:
        """Return an unreferenced buffer for sharded gradients."""
        buffer = self._buffer
        if buffer is not None and buffer.layout is not plan.layout:
            buffer = None
        if buffer is not None and buffer.is_released:
            buffer.reclaim()
        elif buffer is None or not buffer.is_free:
            rank = self.data.shard.rank
            buffer = GradientBuffer(plan.layout, plan.members, rank, self._residence)
            self._buffer = buffer
        elif self.has_streams:  # reallocate, so that the allocator respects users' record_stream()
            buffer.release()
            buffer.reclaim()
        buffer.is_filling = True
        return buffer

    def release_gradients(self) -> None:
        """Free the memory of unreferenced sharded gradients until the next reduction. No-op on a
        host, where reallocating memory costs more than keeping it."""
        buffer = self._buffer
        if buffer is None or buffer.is_released or not self.has_streams:
            return
        if buffer.is_free:
            buffer.release()

    observed_as: ClassVar[Mapping[str, Callable[..., Any]]] = {
        "reduce": reduce,
        "hold": hold_gradients,
        "take": take_gradients,
        "begin_sums": begin_sums,
    }


def _refuse_graph(param: FSDPParam, grad: Tensor) -> None:
    if grad.requires_grad:
        raise UnsupportedError(
            "FS314",
            f"{param.fqn}: its gradient has an autograd graph, because backward was called with "
            "create_graph=True, but a reduced gradient cannot have one. Compute gradients of "
            "inputs with torch.autograd.grad(..., create_graph=True), then call backward() on a "
            "loss computed from them.",
        )


def _are_plain(grads: Sequence[Tensor | None]) -> bool:
    return set(map(type, grads)) == {Tensor} and set(map(_layout_of, grads)) == {torch.strided}


@dataclass(eq=False)
class Reduction:
    """The reduction of one group's gradients. Call start, advance and finish in this order."""

    owner: Reducer
    _plan: ReducePlan
    _inputs: list[Tensor]
    _absent: Sequence[int]  # members without a gradient on this rank
    _all_reduce: bool
    _streams: Streams

    def __post_init__(self) -> None:
        owner, plan, inputs, streams = self.owner, self._plan, self._inputs, self._streams
        self._packed_on = streams.current  # the stream that owns the memory of the inputs
        self._scale = owner.scale
        device = inputs[0].device
        self._buffer = owner.acquire(plan)
        only = self._buffer.only  # target of the reduction if gradients keep the reduce dtype
        fits = only is not None and only.dtype is plan.layout.dtype and only.device == device
        # gradient memory that receives the sum directly; None: memory lent by the wire does
        self._place: Tensor | None = only if fits else None
        self._reduced: Tensor | None = self._place if owner.data.layers is None else None
        self._flight: InFlight | None = None  # the last launched part of the reduction
        self._scattered: InFlight | None = None  # the reduce-scatter, which alone reads the inputs
        self._held: Tensor | None = None  # previous partial sum, kept until compute waits
        # gradients to set, and the counts of ranks if this rank lacks a gradient
        self._filled: tuple[list[Tensor], Tensor | None] | None = None
        waits = bool(self._absent) or owner._residence.is_away
        self._waits_for_copy = waits and not inputs[0].is_cpu

    @property
    def nbytes(self) -> int:
        return self._plan.layout.nbytes

    @property
    def lane(self) -> str:
        if self.owner.hook is None:
            return "reduce" if self.owner.data.summed.size == 1 else "all_reduce"
        stream = self.owner.hook_stream
        return "all_reduce" if stream is None else self._streams.lane_of(stream)

    @property
    def _is_borrowed(self) -> bool:
        """Return True if the sum is in memory lent by the wire."""
        return self._reduced is not self._place

    def start(self) -> None:
        if self._scale.before != 1.0:
            self._inputs[0].mul_(self._scale.before)
        self._streams.order_after_compute("reduce")
        self._flight = self._scattered = self._streams.launch("reduce", self._reduce_scatter)

    def _reduce_scatter(self) -> InFlight:
        owner, layout, axis = self.owner, self._plan.layout, self.owner.data.scattered
        packed, *zero_copy = self._inputs
        if axis.size == 1:
            self._reduced = packed.view(-1)
            return InFlight((packed,))
        if self._reduced is None:
            numel = owner.data.rows_between * layout.numel
            self._reduced = owner.wire.allocate((numel,), layout.dtype, packed.device)
        scale, async_op = self._scale, self._streams.async_op
        if owner.data.layers is not None:
            work = owner.wire.reduce_scatter_each(self._pairs_inside(), scale.op, axis, async_op)
        elif layout.pieces:
            work = owner.wire.reduce_scatter_uneven(
                self._reduced, packed, layout.pieces, scale.op, axis, async_op
            )
        elif zero_copy:
            *outputs, last = self._buffer.outputs(self._reduced)
            pairs = [(last, packed.view(-1)), *zip(outputs, zero_copy, strict=True)]
            work = owner.wire.reduce_scatter_each(pairs, scale.op, axis, async_op)
        else:
            sent = packed.view(-1)
            work = owner.wire.reduce_scatter(self._reduced, sent, scale.op, axis, async_op)
        return InFlight((*self._inputs, self._reduced), work, owner.ids.reductions.failed)

    def _pairs_inside(self) -> list[tuple[Tensor, Tensor]]:
        """Return (output, input) views for the reduce-scatters over the inner axis, for each rank
        of the outer axis. Part ``r`` of an input contains the rows of outer rank ``r``."""
        assert self._reduced is not None
        packed, *zero_copy = self._inputs
        rows = self.owner.data.rows_between
        sent = [list(one.view(-1).chunk(rows)) for one in (packed, *zero_copy)]
        pairs = []
        for row, reduced in enumerate(self._reduced.view(rows, -1)):
            *outputs, last = reduced.split(self._plan.layout.output_sizes)
            pairs += [(out, part[row]) for out, part in zip((last, *outputs), sent, strict=True)]
        return pairs

    def advance(self) -> None:
        if self.owner.data.summed.size == 1:
            return
        if self._all_reduce:
            self.owner.ids.reductions.before_sum()
        self._flight = self._streams.launch("all_reduce", self._sum_replicas, after=self._flight)

    def _sum_replicas(self) -> InFlight:
        assert self._reduced is not None
        owner, layout = self.owner, self._plan.layout
        self._held = partial = owner.unreduced.partial  # maybe the compute stream's memory
        if partial is not None:
            self._reduced.add_(partial.view(-1))
            owner.unreduced.partial = None
        reduced = self._reduced
        if not self._all_reduce:
            owner.ids.reductions.arrived(reduced[: layout.numel])
            owner.keep_partial(reduced.clone() if self._is_borrowed else reduced)
            self._reduced = None
            return InFlight((reduced,))
        axis, op, async_op = owner.data.summed, self._scale.op, self._streams.async_op
        if owner.data.layers is None:
            work = owner.wire.all_reduce(reduced, op, axis, async_op)
            return InFlight((reduced,), work, owner.ids.reductions.failed_sum)
        place = self._place
        if place is None:
            place = owner.wire.allocate((layout.numel,), layout.dtype, reduced.device)
        work = owner.wire.reduce_scatter(place, reduced, op, axis, async_op)
        self._reduced = place
        return InFlight((reduced, place), work, owner.ids.reductions.failed_sum)

    def free_if_done(self) -> None:
        """On a CPU, free the local gradients if the reduce-scatter has completed."""
        if self._inputs and self._flight is not None and self._flight.is_done:
            self._flight.wait()
            self._flight.buffers = ()
            self._inputs = []

    def finish(self) -> None:
        """Scale the result, and copy it to the sharded gradients."""
        self._flight = self._streams.launch(self.lane, self._store, after=self._flight)

    def _store(self) -> InFlight:
        reduced, owner, layout = self._reduced, self.owner, self._plan.layout
        if reduced is None:
            return InFlight(())
        owner.ids.reductions.arrived(reduced)
        if owner.hook is not None:
            owner.hook(reduced[: layout.tail_start - layout.tail_gap])
        if self._scale.after != 1.0:
            reduced.mul_(self._scale.after)
        counts = None
        if self._absent:
            counts = reduced[layout.tail_start :][: len(layout.members)]
            counts = counts.to("cpu", non_blocking=True)
        self._filled = self._buffer.fill(reduced), counts
        return InFlight((reduced,))

    def _deliver(self, grads: list[Tensor], counts: Tensor | None) -> None:
        """Set or accumulate the gradients, except those that no rank computed."""
        self._filled = None
        params = [member.sharded for member in self._plan.members]
        if counts is not None:
            if self.owner.data.shard.is_imagined:  # simulated ranks have this rank's gradients
                used = [place for place in range(len(params)) if place not in self._absent]
            else:
                used = [place for place, count in enumerate(counts.tolist()) if count != 0]
            params, grads = [params[p] for p in used], [grads[p] for p in used]
        self.owner.deliveries += bool(params)
        self._buffer.deliver(params, grads)

    @property
    def can_end_later(self) -> bool:
        """Return True if no leaf has a gradient or hook, and the reduction uses no user memory."""
        wire = self.owner.wire
        if wire.is_custom or wire.uses_group_memory:
            return False
        return is_bare([member.sharded for member in self._plan.members])

    def return_inputs(self) -> None:
        """On a device, free the inputs after the reduce-scatter, even if a sum over replicas or
        copies to the host are still in flight. ``wait`` sets the gradients later."""
        assert self._scattered is not None
        assert self._flight is not None
        self._scattered.wait()
        self._hold_back(self._scattered)
        given_back, self._inputs = self._inputs, []
        data = self.owner.data
        stays_in_lane = data.shard.size > 1 and data.summed.size == 1 and self.owner.hook is None
        if self._is_borrowed and stays_in_lane and self._reduced is not None:
            given_back.append(self._reduced)  # used only in its lane, which runs in order
            self._reduced = None
        for flight in (self._scattered, self._flight):
            flight.drop(given_back)
        self._scattered = None

    @property
    def holds_sum(self) -> bool:
        """Return True if the sum still occupies memory separate from the gradients."""
        return self._is_borrowed and self._reduced is not None

    @property
    def needs_host(self) -> bool:
        """Return True if the host must read the device's results before gradients can be set."""
        return self._flight is not None and self._filled is not None and self._waits_for_copy

    def show_host(self) -> None:
        """Make the host wait until it can read the device's results."""
        assert self._flight is not None
        self._flight.synchronize()

    def wait(self, is_seen: bool = False) -> None:
        """Make compute wait for the gradients, set them, and free the buffers. ``is_seen``: the
        host has already waited for a later launch in the lane, so it can read the results."""
        if self._flight is not None:
            if self.needs_host and not is_seen:
                self._flight.synchronize()
            else:
                self._flight.wait()
        if self._filled is not None:
            self._deliver(*self._filled)
        reduced = self._reduced
        self._drop()
        if reduced is not None and self.owner.data.summed.size > 1 and self._all_reduce:
            self.owner.ids.reductions.arrived_late(reduced)

    def abandon(self, has_run: bool) -> None:
        """Wait if device work uses the buffers, and free them. The gradients are lost."""
        if not has_run:
            self._flight = None
        if self._flight is not None:
            self._flight.wait()
        self._drop()

    def _hold_back(self, flight: InFlight) -> None:
        """Make the stream that owns the inputs wait for ``flight``, unless it is current."""
        if self._packed_on is not None and self._packed_on != self._streams.current:
            flight.hold_back(self._packed_on)

    def _drop(self) -> None:
        if self._flight is not None:
            self._hold_back(self._flight)
        self._inputs = []
        self._flight = self._scattered = self._reduced = self._held = self._filled = None


LAUNCHED_AS: Mapping[Callable[..., Any], str] = {
    Reduction._reduce_scatter: "reduce_scatter",
    Reduction._sum_replicas: "all_reduce",
    Reduction._store: "store",
}
"""Names of the operations launched in lanes, for observers."""


class ReductionQueue:
    """Reductions in flight, oldest first. Only a few of them hold their inputs at a time. On a
    device, older reductions have freed their inputs, and complete when the backward ends. Until
    then, compute does not wait for their sums over replicas, nor the host for their results."""

    def __init__(self, context: StepContext, is_large: bool) -> None:
        self._context = context
        self.is_large = is_large  # some group has large inputs
        self._returned: deque[Reduction] = deque()  # inputs are freed; older than ``_running``
        self._running: deque[Reduction] = deque()

    def __bool__(self) -> bool:
        return bool(self._running or self._returned)

    def reduce(self, owner: Reducer, settings: Settings, with_graph: bool) -> bool:
        """Start a reduction of a group's gradients, if sync is on; return whether it started."""
        while self._is_full_for(owner, settings):  # before more gradients are packed
            self._complete_oldest()
        if self._returned and any(reduction.owner is owner for reduction in self._returned):
            self.settle()
        reduction = owner.reduce(settings, self._context, with_graph)
        if reduction is None:
            return False
        reduction.start()
        if not self._context.streams.async_op:
            reduction.advance()
            reduction.finish()
        self._running.append(reduction)
        if settings.input_buffers is None and settings.overlap.reductions == 0:
            self._complete_oldest()
        return True

    def _is_full_for(self, owner: Reducer, settings: Settings) -> bool:
        """Return True if the oldest reduction must end first: few may run, and one per group."""
        running = self._running
        if not running:
            return False
        limit = settings.input_buffers
        if limit is None:  # one more if the oldest is small, because it holds little memory
            limit = settings.overlap.reductions + (running[0].nbytes < SMALL_NBYTES)
        if len(running) >= limit:
            return True
        for reduction in running:  # noqa: SIM110  # a generator is slower
            if reduction.owner is owner:
                return True
        return False

    def _complete_oldest(self) -> None:
        reduction = self._running.popleft()
        if self._context.streams.async_op:
            reduction.advance()
            reduction.finish()
        elif reduction.can_end_later:
            reduction.return_inputs()
            self._returned.append(reduction)
            if reduction.holds_sum and not reduction.needs_host and len(self._returned) > 1:
                self._returned.popleft().wait()
            return
        if self._returned:
            self.settle()
        reduction.wait()

    def settle(self) -> None:
        """Set the gradients of reductions whose inputs were freed."""
        # a lane runs in order, so the host waits only for the lane's last reduction
        last = {reduction.lane: reduction for reduction in self._returned if reduction.needs_host}
        for reduction in last.values():
            reduction.show_host()
        while self._returned:
            self._returned.popleft().wait(is_seen=True)

    def free_done(self) -> None:
        """Free only the inputs of completed reductions: completion times differ between ranks."""
        if self._context.streams.async_op:
            for reduction in self._running:
                reduction.free_if_done()

    def wait(self) -> None:
        """Complete all reductions, and set their gradients."""
        if self._context.streams.async_op:
            for reduction in self._running:
                reduction.advance()
            for reduction in self._running:
                reduction.finish()
        self._returned.extend(self._running)
        self._running.clear()
        self.settle()

    def drop(self, has_run: bool = True) -> None:
        """Drop reductions in flight; their gradients are lost. ``has_run``: False if they were
        captured, and never ran."""
        self._returned.extend(self._running)
        self._running.clear()
        while self._returned:
            self._returned.popleft().abandon(has_run)


def _have_hooks(params: Sequence[torch.nn.Parameter]) -> bool:
    return any(map(torch_autograd.gradient_hooks_of, params)) or any(
        map(torch_autograd.accumulate_hooks_of, params)
    )


def is_bare(params: Sequence[torch.nn.Parameter]) -> bool:
    """Return True if no leaf has a gradient or a gradient hook."""
    with torch_dtensor.DisableTorchFunctionSubclass():
        return not _have_hooks(params) and all(param.grad is None for param in params)


def accumulate(params: Sequence[torch.nn.Parameter], grads: Sequence[Tensor]) -> None:
    """Accumulate gradients in leaves as autograd does: run hooks, then set or add to ``grad``."""
    try:
        # halves the cost of reading a DTensor
        with torch_dtensor.DisableTorchFunctionSubclass():
            have_hooks = _have_hooks(params)
            if not have_hooks and all(param.grad is None for param in params):
                for param, grad in zip(params, grads, strict=True):
                    param.grad = grad
                return
    except RuntimeError as error:
        raise StateError("FS319", mismatch(param, grad)) from error
    for param, grad in zip(params, grads, strict=True):
        if have_hooks:
            grad = torch_autograd.apply_gradient_hooks(param, grad)
        existing = param.grad
        try:
            if existing is None:
                param.grad = grad
            elif isinstance(grad, DTensor):
                add_to(param, existing, grad)
            else:
                existing.add_(grad)
        except RuntimeError as error:
            raise StateError("FS319", mismatch(param, grad)) from error
        if have_hooks:
            torch_autograd.run_post_accumulate_hooks(param)

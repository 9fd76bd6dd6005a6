"""Gradients of a group: from autograd's unsharded ones to sharded DTensors.

Owns the reduce layout, what is accumulated while sync is off, and one reduction in flight. It must
not know hooks or when to reduce.

[Note: reduce is constant]
A group reduces every trainable parameter, on every rank, whatever took part: ranks that took
different branches cannot mismatch their collectives. How many ranks had a gradient travels in the
last elements of the buffer, so that a parameter that nobody used keeps ``grad is None``. A rank
that has every gradient itself need not look; on a device, looking costs a synchronisation.

A reduction on a CPU is three calls that may lie far apart (``start``, ``advance``, ``finish``), so
that compute runs between them. On a device they are enqueued at once and streams do the waiting.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2 import _packing
from fsdp2._comm import Comm, GradientScale
from fsdp2._errors import StateError, UnsupportedError
from fsdp2._gradients import GradientBuffer, accumulate, local_gradient
from fsdp2._layout import ReduceLayout
from fsdp2._mesh import DataMesh
from fsdp2._param import FSDPParam
from fsdp2._policy import Settings
from fsdp2._streams import InFlight, Launched, Streams


class Reducer:
    """What a group knows about reducing its gradients."""

    def __init__(
        self,
        params: Sequence[FSDPParam],
        data: DataMesh,
        device: torch.device,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self._params = params
        self._device = device
        self._data = data
        self._reduce_dtype = reduce_dtype
        self._layout: ReduceLayout | None = None
        self._members: list[FSDPParam] = []
        self._grad_dtype = torch.float32
        self._grad_dtypes_differ = False
        self._all_present = torch.empty(0)
        self._buffer: GradientBuffer | None = None
        self.scale = GradientScale(1.0, 1.0)
        self.accumulated: Tensor | None = None
        self.partial: Tensor | None = None
        self.is_waiting = False

    def invalidate(self) -> None:
        """Forget the layout: dtypes, or the set of trainable parameters, changed."""
        self._layout = None

    def forget(self, param: FSDPParam) -> None:
        """Drop the unreduced gradients of a parameter whose place another one takes."""
        if param.unsharded is not None:
            param.unsharded.grad = None
        if self.accumulated is not None and param in self._members:
            position = self._members.index(param)
            layout = self.layout()
            start, numel = layout.offsets[position], layout.shards[position].piece_numel
            self.accumulated[:, start : start + numel] = 0
            self.accumulated[:, layout.tail_start + position] = 0

    def check_toggle(self, param: FSDPParam) -> None:
        """Raise StateError if ``requires_grad`` of a parameter must not change now."""
        pending = param.unsharded is not None and param.unsharded.grad is not None
        if pending or self.accumulated is not None or self.partial is not None:
            raise StateError(_toggled_while_accumulating(param.fqn))

    def keep_partial(self, reduced: Tensor) -> None:
        """Keep what was reduced over the shard axis only; its buffer is not reused."""
        self.is_waiting = True
        self.partial, self._buffer = reduced, None

    def discard(self) -> None:
        """Drop every unreduced gradient."""
        self.accumulated = self.partial = self._buffer = None
        self.is_waiting = False
        for param in self._params:
            if param.unsharded is not None:
                param.unsharded.grad = None

    def layout(self) -> ReduceLayout:
        """Plan, or return the plan: constant over ranks and steps."""
        if self._layout is None:
            self._layout = self._plan()
        return self._layout

    @torch.inference_mode(False)
    def _plan(self) -> ReduceLayout:
        indices = [i for i, param in enumerate(self._params) if param.trainable]
        self._members = [self._params[i] for i in indices]
        dtypes = {param.compute_dtype for param in self._members} or {torch.float32}
        grad_dtype = functools.reduce(torch.promote_types, dtypes)
        dtype = self._reduce_dtype or grad_dtype
        if grad_dtype.is_complex:
            dtype = torch.promote_types(dtype, torch.complex64)
        shards = [param.placement.layout for param in self._members]
        layout = ReduceLayout.plan(indices, shards, self._data.shard.size, dtype)
        self._grad_dtype, self._grad_dtypes_differ = grad_dtype, len(dtypes) > 1
        self._all_present = _packing.participation(
            [True] * len(indices), layout, grad_dtype, self._device
        )
        self._buffer = None
        if self.accumulated is not None:
            self.accumulated = self.accumulated.to(dtype)
        if self.partial is not None:
            self.partial = self.partial.to(dtype)
        self.scale = GradientScale.mean(self._data.size, dtype)
        return layout

    @property
    def _accumulates_in_place(self) -> bool:
        """True if autograd itself accumulates in the reduce dtype: nothing to do without sync."""
        return self._grad_dtype == self.layout().dtype and not self._grad_dtypes_differ

    @property
    def has_partial(self) -> bool:
        """True if gradients were reduced over the shard axis only."""
        return self.partial is not None

    @property
    def has_gradients(self) -> bool:
        """True if there is something to reduce that a backward left."""
        if self.accumulated is not None:
            return True
        self.layout()
        return any(p.unsharded is not None and p.unsharded.grad is not None for p in self._members)

    def reduce(
        self, settings: Settings, comm: Comm, streams: Streams, with_graph: bool
    ) -> Reduction | None:
        """Pack the local gradients; return the reduction to start, or None while sync is off.

        ``with_graph``: this backward creates a graph.

        Raises:
            UnsupportedError: a gradient carries a graph (``backward(create_graph=True)``).
        """
        layout = self.layout()
        if not layout.members:
            return None
        self.is_waiting = not settings.reduce_grads
        if self.is_waiting and self._accumulates_in_place:
            return None
        grads = self._take_gradients(with_graph)
        missing = any(grad is None for grad in grads)
        if self.is_waiting and all(grad is None for grad in grads):
            return None
        counts = self._all_present
        if missing:
            present = [grad is not None for grad in grads]
            counts = _packing.participation(present, layout, self._grad_dtype, self._device)
        packed = comm.allocate((layout.size, layout.numel), layout.dtype, self._device)
        _packing.pack_gradients(grads, layout, counts, packed)
        if self.accumulated is not None:
            packed, self.accumulated = self.accumulated.add_(packed), None
        if not settings.reduce_grads:
            self.accumulated = packed
            return None
        return Reduction(self, layout, packed, missing, settings.all_reduce_grads, comm, streams)

    def _take_gradients(self, with_graph: bool) -> list[Tensor | None]:
        """Detach the local gradients from the unsharded parameters."""
        grads: list[Tensor | None] = []
        for param in self._members:
            assert param.unsharded is not None
            grad = param.unsharded.grad
            if grad is not None:
                if with_graph and grad.requires_grad:
                    raise UnsupportedError(
                        f"{param.fqn}: its gradient has a graph, because backward was called with "
                        "create_graph=True, and a reduced gradient cannot carry one. Take "
                        "gradients of inputs with torch.autograd.grad(..., create_graph=True), "
                        "then call backward() on what you made of them."
                    )
                if type(grad) is not Tensor:
                    grad = local_gradient(grad, param) if isinstance(grad, DTensor) else grad
                if grad.layout is not torch.strided:
                    grad = grad.to_dense()
                if self._grad_dtypes_differ:
                    grad = grad.to(self._grad_dtype)
            grads.append(grad)
        for param in self._members:
            param.unsharded.grad = None  # type: ignore[union-attr]  # asserted above
        return grads

    def acquire(self) -> GradientBuffer:
        """Return a buffer for sharded gradients that nobody reads."""
        buffer = self._buffer
        if buffer is None or not buffer.is_free:
            rank = self._data.shard.rank
            buffer = GradientBuffer(self.layout(), self._members, rank, self._device)
            self._buffer = buffer
        buffer.is_filling = True
        return buffer

    def store(self, reduced: Tensor, buffer: GradientBuffer, missing: bool) -> None:
        """Set or add the sharded gradients from a reduced and scaled buffer ``[numel]``."""
        counts = reduced[self.layout().tail_start :].tolist() if missing else None
        for position, grad in enumerate(buffer.fill(reduced)):
            if counts is None or counts[position] != 0:
                accumulate(self._members[position].sharded, grad)


def _toggled_while_accumulating(fqn: str) -> str:
    return (
        f"{fqn}: requires_grad changed while gradients of its group are accumulated without sync. "
        "Set it back and run a backward with gradient sync first, or call reset_iter_state()."
    )


class Reduction:
    """One group's gradients under way. Calls must come in the order start, advance, finish."""

    def __init__(
        self,
        owner: Reducer,
        layout: ReduceLayout,
        packed: Tensor,
        missing: bool,
        all_reduce: bool,
        comm: Comm,
        streams: Streams,
    ) -> None:
        self._owner = owner
        self._layout = layout
        self._data = owner._data
        self._missing = missing
        self._all_reduce = all_reduce
        self._comm = comm
        self._streams = streams
        self._scale = owner.scale
        self._packed: Tensor | None = packed
        self._buffer = owner.acquire()
        self._reduced: Tensor | None = self._buffer.flat(layout.dtype)
        self._flight: InFlight | None = None
        self.nbytes = layout.nbytes

    def start(self) -> None:
        """Issue the reduce-scatter."""
        assert self._packed is not None
        if self._scale.before != 1.0:
            self._packed.mul_(self._scale.before)
        self._streams.order_after_compute("reduce")
        self._flight = self._streams.launch("reduce", self._reduce_scatter)

    def _reduce_scatter(self) -> Launched:
        assert self._packed is not None
        packed, layout, axis = self._packed, self._layout, self._data.shard
        if axis.size == 1:
            self._reduced = packed.view(-1)
            return Launched((packed,), None)
        if self._reduced is None:
            self._reduced = self._comm.allocate((layout.numel,), layout.dtype, packed.device)
        work = self._comm.reduce_scatter(
            self._reduced, packed.view(-1), axis, self._streams.async_op
        )
        return Launched((packed, self._reduced), work)

    def advance(self) -> None:
        """Issue the all-reduce over the replicate axis, if there is one."""
        if self._data.replicate.size > 1:
            self._flight = self._streams.launch("all_reduce", self._sum_replicas, self._flight)

    def _sum_replicas(self) -> Launched:
        assert self._reduced is not None
        owner = self._owner
        if owner.partial is not None:
            self._reduced, owner.partial = owner.partial.add_(self._reduced), None
        reduced = self._reduced
        if not self._all_reduce:
            owner.keep_partial(reduced)
            self._reduced = None
            return Launched((reduced,), None)
        work = self._comm.all_reduce(reduced, self._data.replicate, self._streams.async_op)
        return Launched((reduced,), work)

    def finish(self) -> None:
        """Scale, and set the sharded gradients."""
        lane = "reduce" if self._data.replicate.size == 1 else "all_reduce"
        self._flight = self._streams.launch(lane, self._store, self._flight)

    def _store(self) -> Launched:
        reduced = self._reduced
        if reduced is None:
            return Launched((), None)
        if self._scale.after != 1.0:
            reduced.mul_(self._scale.after)
        self._owner.store(reduced, self._buffer, self._missing)
        return Launched((reduced,), None)

    def wait(self) -> None:
        """Make the gradients safe to use by compute, and free the buffers."""
        if self._flight is not None:
            self._flight.wait()
        self._flight = self._packed = self._reduced = None

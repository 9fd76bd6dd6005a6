"""The flat buffers of a group: stored shards, gathered shards, and unsharded parameters.

Sharded parameters are views of one byte buffer that has the layout of the all-gather, so a gather
needs no copy-in, only casts if dtypes differ. Unsharded parameters are views of a second buffer,
whose memory is allocated and freed repeatedly. Contains no state machine or module code.

[Note: released early]
A large *part* of a root (see ``_core.engine.parts``) is *released early*: after forward if no
rank's backward reads it, and in backward as soon as its gradients have arrived. All ranks agree on
the release, because it affects collectives: the group then counts as sharded, and its next use
gathers it. The next use is never the backward of the same forward, but may be the backward of
another open call. Each rank frees the memory if and only if neither autograd (a saved tensor, or
the storage of a saved view) nor user code on that rank refers to it. Otherwise the unsharded
parameters stay registered, in state RELEASED, until the rank reshards. Recomputation
(checkpointing) reads parameters that had no references before, so the memory of a part under
checkpointing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._core.agreement.stamp import Stamp
from fsdp2._core.base import torch_autograd, torch_tensors
from fsdp2._core.base.capabilities import ROW_NBYTES
from fsdp2._core.comm.mesh import DataMesh, MeshAxis
from fsdp2._core.comm.wire import InFlight, Kept, Wire, memory_of
from fsdp2._core.params import packing
from fsdp2._core.params.layout import GatherLayout, align
from fsdp2._core.params.param import Span
from fsdp2._core.params.registration import FORM_SHARDED, FORM_UNSHARDED, Registration


@dataclass(frozen=True, eq=False)
class Targets:
    """Destinations of gathered shards: views of a full buffer, usable while it has memory."""

    packed: list[Tensor] = field(default_factory=list)
    replicated: Sequence[Tensor] = ()  # replicated parameters, which are not sent
    zero_copy: Sequence[Tensor] = ()
    landed: Tensor | None = None  # flat, for all ranks' pieces; None: separate memory
    dealt: Sequence[Tensor] = ()  # destinations of the rows of dealt parameters


class ShardBuffer:
    """Padded shards of a group's parameters over one axis, stored on ``device`` and gathered on
    ``compute`` (None: ``device``). ``tail`` fills the last item of the layout; None: there is no
    tail. With ``is_freed``, the owner frees and refills the storage, so shards are views of it."""

    def __init__(
        self,
        layout: GatherLayout,
        axis: MeshAxis,
        device: torch.device,
        *,
        compute: torch.device | None = None,
        pinned: bool = False,
        is_freed: bool = False,
        tail: Stamp | None = None,
    ) -> None:
        self.layout = layout
        self.axis = axis
        self.tail = tail
        self.flat = torch.zeros(
            layout.shard_nbytes, dtype=torch.uint8, device=device, pin_memory=pinned
        )
        self._compute = compute or device
        make = packing.shard_view if is_freed else packing.own_shard
        indices = range(len(layout.items))
        self.shards = [make(self.flat, layout, index, axis.rank) for index in indices]
        self._targets = Targets()
        self._inputs: list[Tensor] = []  # cached inputs of the collectives, if nothing is cast
        self._memory = memory_of(axis)
        self._landing: Kept | None = None  # reused memory that the current gather writes to
        self.open_tail_nbytes = 0  # bytes that extended parameters add to each rank's input
        self._keeps_landing = False  # the wire may gather into reused memory
        is_away = self._compute != self.flat.device and not self.flat.is_meta
        self._views = None if is_away else self._views_of(self.flat)

    def write_tail(self) -> None:
        if self.tail is not None and not self.flat.is_meta:
            self.tail.write(self.shards[-1])

    def span(self, index: int) -> Span:
        item = self.layout.items[index]
        nbytes = item.shard.kept_numel(self.axis.rank) * item.storage_dtype.itemsize
        return Span(self.flat, self.layout.shard_offsets[index], nbytes)

    def renew_tail(self) -> None:
        if self.tail is not None:
            last = self.layout.items[-1]
            self.tail.expect(last.compute_dtype, last.shard.padded_numel)
            # without memory (over a smaller mesh), the tail is written later, with the shards
            if self.flat.untyped_storage().nbytes():
                self.write_tail()

    def bind(self, full: Tensor) -> None:
        """Set ``full`` as the target of gathers. It must have memory during this call."""
        layout, tail = self.layout, None
        if self.tail is not None:
            nbytes = layout.padded_nbytes(len(layout.items) - 1)
            tail = self.tail.landing(self.axis.size * nbytes, full.device)
        self._targets = Targets(
            packing.gather_targets(full, layout, layout.packed.order, tail),
            packing.gather_targets(full, layout, layout.replicated),
            packing.gather_targets(full, layout, layout.zero_copy),
            packing.landing_in(full, layout),
            packing.dealt_targets(full, layout),
        )

    def follow(self, wire: Wire) -> None:
        self._keeps_landing = wire.gathers_zero_copy and wire.keeps_landing

    def sent_numels(self) -> list[int]:
        """Return, for each collective, how many elements (in wire dtype) a rank sends."""
        layout, itemsize = self.layout, self.layout.wire_dtype.itemsize
        if layout.landing.pieces:
            return [layout.packed_nbytes // itemsize]
        if not layout.zero_copy:
            return [self.sent_nbytes // itemsize]
        sizes = [layout.packed_nbytes, *(layout.padded_nbytes(index) for index in layout.zero_copy)]
        return [size // itemsize for size in sizes]

    @property
    def gathered_nbytes(self) -> int:
        return sum(self.layout.landing.pieces) or self.axis.size * self.sent_nbytes

    @property
    def sent_nbytes(self) -> int:
        """Bytes that a rank sends, including ``open_tail_nbytes``."""
        if self.open_tail_nbytes == 0:
            return self.layout.gather_nbytes
        return align(align(self.layout.gather_nbytes) + self.open_tail_nbytes, ROW_NBYTES)

    def unpack(self, gathered: Tensor, sent: Tensor, *_open_tails: Tensor) -> None:
        """Copy gathered shards to the full buffer. StateError: collectives differ between ranks."""
        targets = self._targets.packed
        if self._landing is not None:
            torch_tensors.copy_all(targets, self._landing.parts)
            self._landing = None
        elif targets:
            even = gathered
            if self.layout.landing.pieces:
                even = torch.cat(packing.even_parts(gathered, self.layout))
            packing.unpack(even, self.layout, targets)
        if self._targets.dealt:
            packing.unpack_dealt(gathered, self.layout, self._targets.dealt)
        if self._targets.replicated:
            packing.unpack_replicated(sent, self.layout, self._targets.replicated)
        if self.tail is not None:
            self.tail.arrived()

    def _views_of(self, flat: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return a cast's input if one kernel suffices, and the send buffer if nothing is cast."""
        layout = self.layout
        if not layout.casts:
            return None, self._as_wire(flat)
        segment, is_sent = layout.segments[0], layout.items[0].shard.is_even
        is_plain = not layout.landing.pieces and layout.coding is None
        if len(layout.segments) > 1 or not is_sent or not is_plain:
            return None, None
        return packing.typed(flat, 0, segment.numel, segment.storage_dtype), None

    def _as_wire(self, buffer: Tensor) -> Tensor:
        return buffer[: self.layout.gather_nbytes].view(self.layout.wire_dtype).view(1, -1)

    def gather(
        self, wire: Wire, async_op: bool, write_tail: Callable[[Tensor], None] | None = None
    ) -> InFlight:
        """Issue the all-gather of padded shards. Zero-copy shards go directly to the full buffer.

        The buffers of the result are the gathered data ``[W, C]`` in wire dtype, this rank's send
        buffer and, if ``write_tail`` fills an open tail, all tails ``[W, open_tail_nbytes]``.
        """
        layout, axis, flat = self.layout, self.axis, self.flat
        self._landing = None
        if self._views is None:
            # with lanes, the host waits for the copy in ``finish_host_reads``
            has_lanes = not async_op
            flat = flat.to(self._compute, non_blocking=has_lanes)
            to_cast, sent = self._views_of(flat)
        else:
            to_cast, sent = self._views
        kept = flat
        if to_cast is not None:
            shape = (1, to_cast.numel())
            kept = sent = torch.empty(shape, dtype=layout.wire_dtype, device=flat.device)
            sent.copy_(to_cast)
        elif sent is None:
            kept = torch.empty(layout.send_nbytes, dtype=torch.uint8, device=flat.device)
            packing.cast_shards(flat, kept, layout, axis.rank)
            sent = self._as_wire(kept)
        into = self._targets
        if write_tail is not None:
            return self._gather_with_tail(wire, async_op, sent, kept, write_tail)
        failed = None if self.tail is None else self.tail.failed
        if layout.landing.pieces:
            landing = into.landed
            if landing is None:
                numel = layout.landing_numel
                landing = torch.empty(numel, dtype=layout.wire_dtype, device=sent.device)
            pieces = packing.pieces_of(landing, layout)
            work = wire.all_gather_uneven(pieces, sent.view(-1), axis, async_op)
            return InFlight((landing, kept), work, failed)
        if axis.size == 1 or layout.gather_nbytes == 0:
            rows = sent.expand(axis.size, -1)
            return InFlight((rows, kept))
        if not layout.zero_copy:
            gathered = self._landing_for(sent)
            if gathered is None:
                gathered, sent = wire.stage(sent, axis)
            work = wire.all_gather(gathered, sent, axis, async_op)
        else:
            inputs = self._inputs_of(sent)
            gathered = self._landing_for(inputs[0])
            if gathered is None:
                gathered, _ = wire.stage(inputs[0], axis)
            pairs = list(zip([gathered, *into.zero_copy], inputs, strict=True))
            work = wire.all_gather_each(pairs if inputs[0].numel() else pairs[1:], axis, async_op)
        rows = gathered if gathered.dim() == 2 else gathered.view(axis.size, -1)
        return InFlight((rows, kept), work, failed)

    def _landing_for(self, sent: Tensor) -> Tensor | None:
        """Return reused memory for a gather on a CPU, or None if new memory must be allocated."""
        packed = self.layout.packed
        if not (packed.is_dense and sent.is_cpu and self._keeps_landing):
            return None
        shape, cut = (self.axis.size, sent.shape[1]), (packed.sizes, packed.shapes)
        self._landing = self._memory.take("gather", shape, sent.dtype, cut)
        return self._landing.memory

    def free_gathered(self) -> None:
        self._landing = None

    def _inputs_of(self, sent: Tensor) -> list[Tensor]:
        """Return each collective's input as a view of the send buffer, the packed part first."""
        is_kept = self._views is not None and sent is self._views[1]
        if is_kept and self._inputs:
            return self._inputs
        layout, itemsize = self.layout, self.layout.wire_dtype.itemsize
        parts = [(0, layout.packed_nbytes)]
        parts += [(layout.send_offsets[i], layout.padded_nbytes(i)) for i in layout.zero_copy]
        inputs = [sent.narrow(1, at // itemsize, nbytes // itemsize) for at, nbytes in parts]
        if is_kept:
            self._inputs = inputs
        return inputs

    def _gather_with_tail(
        self,
        wire: Wire,
        async_op: bool,
        flat: Tensor,
        kept: Tensor,
        write_tail: Callable[[Tensor], None],
    ) -> InFlight:
        """Send the flat part and the open tail together, as bytes, in one all-gather."""
        axis, nbytes = self.axis, self.layout.gather_nbytes
        start = align(nbytes)
        end = start + self.open_tail_nbytes
        sent = torch.empty(self.sent_nbytes, dtype=torch.uint8, device=flat.device)
        sent[:nbytes].copy_(flat.view(-1).view(torch.uint8))
        write_tail(sent[start:end])
        work, gathered = None, sent
        if axis.size > 1:
            gathered, sent = wire.stage(sent, axis)
            work = wire.all_gather(gathered, sent, axis, async_op)
        rows = gathered.view(axis.size, -1)
        failed = None if self.tail is None else self.tail.failed
        buffers = (rows[:, :nbytes].view(self.layout.wire_dtype), kept, rows[:, start:end])
        return InFlight(buffers, work, failed)


class FullBuffer:
    """Memory of the unsharded parameters, which stay views of its storage while it is freed."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._storage = self.flat.untyped_storage()
        self.number = torch_tensors.number_of(self._storage)  # storage id for reference counts
        self.has_memory = True
        self.is_fixed = False  # keep_unsharded_storage: the address never changes
        self.is_read_later = False  # a backward may read the memory before the next gather
        self.stream: torch.Stream | None = None  # stream that owns the memory

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def allocate(self, nbytes: int, stream: torch.Stream | None = None) -> None:
        if self.has_memory and self._storage.nbytes() == nbytes:
            return
        self._storage.resize_(nbytes)
        self.has_memory, self.stream = True, stream

    def free(self) -> None:
        """Free the memory, unless its address is fixed or a backward may still read it."""
        if self.is_fixed or self.is_read_later:
            return
        self._storage.resize_(0)
        self.has_memory = False

    def bind(self, buffer: ShardBuffer) -> None:
        """Set this buffer as the target of a shard buffer's gathers."""
        self.allocate(buffer.layout.full_nbytes)
        buffer.bind(self.flat)
        self.free()


@dataclass(eq=False)
class PostForward:
    """Shards of parameters over a smaller mesh, used between forward and backward."""

    mesh: DataMesh | None = None  # a mesh with fewer ranks than the group's
    buffer: ShardBuffer | None = None  # shards over this mesh, created by the first gather

    def free(self) -> None:
        if self.buffer is not None:
            self.buffer.flat.untyped_storage().resize_(0)


@dataclass(eq=False)
class EarlyRelease:
    """State of a group's early release, used only if the group is a large part of a root."""

    part: str = ""  # the part's name in its root
    readers: Readers | None = None  # None unless the group is a part
    skips_backward: bool = False  # until the next reshard, backward does not gather the group

    def is_unread(self, full: FullBuffer | None, registration: Registration) -> bool:
        """Return True only if nothing on this rank can refer to the unsharded parameters."""
        readers = self.readers
        if readers is None or full is None or not readers.are_known or registration.placed:
            return False
        registration.show(FORM_SHARDED)
        is_unread = readers.are_gone(full, [param.unsharded for param in registration.params])
        registration.show(FORM_UNSHARDED)
        return is_unread

    def become_part(self, name: str) -> Readers:
        """Make the group a large part of a root, and return the object that tracks its readers."""
        self.part = name
        self.readers = readers = Readers()
        return readers


class Readers:
    """Tracks the readers of a part's unsharded parameters. See [Note: released early]."""

    def __init__(self) -> None:
        self.is_called = False  # the part's hook detected a call of one of its modules
        self.is_recomputed = False  # recomputation reads parameters without holding references
        self.ran_without_grad = False  # as in the first forward of reentrant checkpointing
        # AccumulateGrad nodes, kept alive so that graphs that use them add no references
        self._accumulators: list[Any] = []
        self._stream: torch.Stream | None = None  # stream of the accumulators
        self._at_rest: list[int] | None = None  # reference counts without readers; None: unknown

    def __getstate__(self) -> dict[str, Any]:
        """Copy no state. A copied group and its hooks share one copy of this object."""
        return vars(Readers())

    def forget(self) -> None:
        self._at_rest = None

    def meet(
        self, full: FullBuffer, wholes: Sequence[Tensor | None], stream: torch.Stream | None
    ) -> None:
        """Count the references to new unsharded parameters, while they have no readers."""
        self._accumulators = torch_autograd.accumulators_of(wholes)
        self._stream = stream
        self._at_rest = _owners(full, wholes)

    def follow(self, wholes: Sequence[Tensor | None], stream: torch.Stream | None) -> None:
        """Make autograd accumulate gradients in ``stream``, the stream of the current forward."""
        if stream != self._stream and self._accumulators:
            self._accumulators = []  # otherwise autograd would return the same nodes
            self._accumulators = torch_autograd.accumulators_of(wholes)
            self._stream = stream

    @property
    def are_known(self) -> bool:
        """Return True if reference counts are conclusive."""
        return self._at_rest is not None and not self.is_recomputed and self.is_called

    def are_gone(self, full: FullBuffer, wholes: Sequence[Tensor | None]) -> bool:
        """Return True if no reader refers to the memory. Call this while shards are registered."""
        return _owners(full, wholes) == self._at_rest


def _owners(full: FullBuffer, wholes: Sequence[Tensor | None]) -> list[int] | None:
    """Return reference counts of the memory, or None if they cannot be counted."""
    if any(isinstance(whole, DTensor) for whole in wholes):
        return None
    return [*torch_tensors.count_owners(wholes), torch_tensors.use_count(full.number)]

"""The flat buffers of a group: what a rank keeps and sends, what it gathers, what it computes with.

Owns one byte buffer of shards in a gather layout, and the views into it. Sharded parameters are
these views, so an all-gather needs no copy-in, and a cast is one kernel. Unsharded parameters are
views of another one, whose memory comes and goes. It must not know states or modules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fsdp2._core.base import torch_tensors
from fsdp2._core.base.capabilities import ROW_NBYTES
from fsdp2._core.base.errors import StateError
from fsdp2._core.comm.mesh import DataMesh, MeshAxis
from fsdp2._core.comm.wire import InFlight, Kept, Wire, memory_of
from fsdp2._core.params import packing
from fsdp2._core.params.layout import GatherLayout, Packed, align
from fsdp2._core.params.param import Span


class Tail(Protocol):
    """What travels behind the parameters, in an item of its own at the end of the layout."""

    @property
    def numel(self) -> int:
        """Elements that each rank sends at least."""

    def expect(self, dtype: torch.dtype, numel: int) -> None:
        """What is sent, its dtype, or the length of rows, is another one from now on."""

    def write(self, row: Tensor) -> None:
        """Fill this rank's row ``[numel]``."""

    def landing(self, nbytes: int, device: torch.device) -> Tensor:
        """Return the bytes where the rows of all ranks land."""

    def before(self) -> None:
        """A gather is about to be issued."""

    def arrived(self) -> None:
        """The rows of all ranks are there."""

    def failed(self, error: Exception) -> StateError:
        """Return the error for a gather that failed."""


class ShardBuffer:
    """Padded shards of every parameter of a group over one axis.

    Args:
        device: where the buffer is kept.
        compute: where it is gathered; None: where it is kept.
        pinned: keep it in pinned memory.
        tail: what the last item of the layout holds; None if it is a parameter like the others.
        is_freed: the owner resizes the buffer's storage, so shards must be views of it.
    """

    def __init__(
        self,
        layout: GatherLayout,
        axis: MeshAxis,
        device: torch.device,
        *,
        compute: torch.device | None = None,
        pinned: bool = False,
        is_freed: bool = False,
        tail: Tail | None = None,
    ) -> None:
        self.layout = layout
        self.axis = axis
        self.tail = tail
        self.flat = torch.zeros(
            layout.shard_nbytes, dtype=torch.uint8, device=device, pin_memory=pinned
        )
        self._compute = compute or device
        make = packing.shard_view if is_freed else packing.own_shard
        self.shards = [
            make(self.flat, layout, index, axis.rank) for index in range(len(layout.items))
        ]
        self._together: tuple[Packed, list[Tensor]] = (layout.whole, [])
        self._apart: tuple[Packed, list[Tensor]] = (layout.packed, [])
        self._way = self._together  # what the last gather carried, and where that goes
        self._replicated: list[Tensor] = []  # where parameters go that nobody sends
        self._zero_copy: list[Tensor] = []  # where those land that travel by themselves
        self._inputs: list[Tensor] = []  # what each collective sends, if nothing is cast
        # where the pieces of all ranks land in the full buffer, flat; None: in memory of their own
        self._landed: Tensor | None = None
        self._dealt: list[Tensor] = []  # where rows of dealt parameters are copied
        self._memory = memory_of(axis)
        self._landing: Kept | None = None  # where the current gather lands
        # bytes that extended parameters add to what each rank sends: an open tail, of any size
        self.open_tail_nbytes = 0
        # the wire works on any memory: gathers may land where they are used
        self._lands_directly = False
        self._keeps_landing = True  # the wire lets what is gathered land in kept memory
        self._views = None if self._is_away else self._views_of(self.flat)

    def write_tail(self) -> None:
        """Put the tail behind the parameters, where the all-gather takes it along."""
        if self.tail is not None and not self.flat.is_meta:
            self.tail.write(self.shards[-1])

    def span(self, index: int) -> Span:
        """Say where the shard of an item lies."""
        item = self.layout.items[index]
        nbytes = item.shard.kept_numel(self.axis.rank) * item.storage_dtype.itemsize
        return Span(self.flat, self.layout.shard_offsets[index], nbytes)

    def renew_tail(self) -> None:
        """Send and expect what the tail says now."""
        if self.tail is not None:
            last = self.layout.items[-1]
            self.tail.expect(last.compute_dtype, last.shard.padded_numel)
            # shards over a smaller mesh have no memory now: the tail is written with them
            if self.flat.untyped_storage().nbytes():
                self.write_tail()

    def bind(self, full: Tensor) -> None:
        """Let gathered shards land in a full buffer, which has its memory now."""
        layout = self.layout
        tail = None
        if self.tail is not None:
            nbytes = layout.padded_nbytes(len(layout.items) - 1)
            tail = self.tail.landing(self.axis.size * nbytes, full.device)
        targets = packing.gather_targets(full, layout, layout.whole.order, tail)
        self._way = self._together = (layout.whole, targets)
        self._apart = (layout.packed, targets[: len(layout.packed.order)])
        self._replicated = packing.gather_targets(full, layout, layout.replicated)
        self._zero_copy = packing.gather_targets(full, layout, layout.zero_copy)
        self._landed = packing.landing_in(full, layout)
        self._dealt = packing.dealt_targets(full, layout)

    def follow(self, wire: Wire) -> None:
        """Take notice of what the wire can do from now on."""
        self._lands_directly = wire.gathers_zero_copy
        self._keeps_landing = wire.keeps_landing

    @property
    def gathers_zero_copy(self) -> bool:
        """True if a gather writes to the full buffer, which then must have its memory."""
        if self.layout.pieces:
            return self._landed is not None
        return bool(self._zero_copy) and self.open_tail_nbytes == 0 and self._lands_directly

    def sent_numels(self) -> list[int]:
        """Elements in wire dtype that a rank sends in each collective."""
        layout, itemsize = self.layout, self.layout.wire_dtype.itemsize
        if layout.pieces:
            return [layout.packed_nbytes // itemsize]
        if self.open_tail_nbytes or not layout.zero_copy or not self._lands_directly:
            return [self.sent_nbytes // itemsize]
        sizes = [layout.packed_nbytes, *(layout.padded_nbytes(index) for index in layout.zero_copy)]
        return [size // itemsize for size in sizes]

    @property
    def gathered_nbytes(self) -> int:
        """Bytes that all ranks send."""
        return sum(self.layout.pieces) or self.axis.size * self.sent_nbytes

    @property
    def sent_nbytes(self) -> int:
        """Bytes that a rank sends; ``open_tail_nbytes`` of them are not planned here."""
        if self.open_tail_nbytes == 0:
            return self.layout.gather_nbytes
        return align(align(self.layout.gather_nbytes) + self.open_tail_nbytes, ROW_NBYTES)

    def unpack(self, gathered: Tensor, sent: Tensor, _tail: Tensor | None = None) -> None:
        """Copy gathered shards into the full buffer.

        Raises:
            StateError: another rank gathered something else. See [Note: agreement].
        """
        packed, targets = self._way
        if self._landing is not None:
            torch_tensors.copy_all(targets, self._landing.parts)
            self._landing = None
        elif targets:
            even = gathered
            if self.layout.pieces:
                even = torch.cat(packing.even_parts(gathered, self.layout))
            packing.unpack(even, self.layout, packed, targets)
        if self._dealt:
            packing.unpack_dealt(gathered, self.layout, self._dealt)
        if self._replicated:
            packing.unpack_replicated(sent, self.layout, self._replicated)
        if self.tail is not None:
            self.tail.arrived()

    @property
    def _is_away(self) -> bool:
        """True if the shards are kept on another device than they are gathered on."""
        return self._compute != self.flat.device and self.flat.device.type != "meta"

    def _views_of(self, flat: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return what one kernel casts to the wire, and what is sent if nothing is cast."""
        if self.layout.is_one_cast:
            (segment,) = self.layout.segments
            return packing.typed(flat, 0, segment.numel, segment.storage_dtype), None
        return None, None if self.layout.casts else self._as_wire(flat)

    def _as_wire(self, buffer: Tensor) -> Tensor:
        return packing.typed(buffer, 0, self.layout.wire_numel, self.layout.wire_dtype).view(1, -1)

    def gather(
        self, wire: Wire, async_op: bool, write_tail: Callable[[Tensor], None] | None = None
    ) -> InFlight:
        """Issue the all-gather of every padded shard: zero-copy ones into the full buffer.

        The buffers of the result are ``[W, C]`` in wire dtype and this rank's send buffer. With
        ``write_tail``, which fills ``open_tail_nbytes`` more bytes to send, what was gathered of
        these follows, ``[W, open_tail_nbytes]``.
        """
        layout, axis, flat = self.layout, self.axis, self.flat
        self._landing = None
        if self._views is None:
            # with lanes, ``finish_host_reads`` lets the host wait for the copy
            has_lanes = not async_op
            flat = flat.to(self._compute, non_blocking=has_lanes)
            to_cast, sent = self._views_of(flat)
        else:
            to_cast, sent = self._views
        kept = flat
        if to_cast is not None:
            shape = (1, self.layout.wire_numel)
            kept = sent = torch.empty(shape, dtype=layout.wire_dtype, device=flat.device)
            sent.copy_(to_cast)
        elif sent is None:
            kept = torch.empty(layout.send_nbytes, dtype=torch.uint8, device=flat.device)
            packing.cast_shards(flat, kept, layout, axis.rank)
            sent = self._as_wire(kept)
        is_apart = self._zero_copy and self.gathers_zero_copy
        self._way = self._apart if is_apart else self._together
        if write_tail is not None:
            return self._gather_with_tail(wire, async_op, sent, kept, write_tail)
        if layout.pieces:
            landing = self._landed
            if landing is None:
                numel = layout.landing_numel
                landing = torch.empty(numel, dtype=layout.wire_dtype, device=sent.device)
            pieces = packing.pieces_of(landing, layout)
            work = wire.all_gather_uneven(pieces, sent.view(-1), axis, async_op)
            lost = None if self.tail is None else self.tail.failed
            return InFlight((landing, kept), work, lost)
        if axis.size == 1 or self.layout.wire_numel == 0:
            rows = sent.expand(axis.size, -1)
            return InFlight((rows, kept))
        failed = None if self.tail is None else self.tail.failed
        if self._way is self._together:
            gathered = self._landing_for(sent)
            if gathered is None:
                gathered, sent = wire.stage(sent, axis)
            work = wire.all_gather(gathered, sent, axis, async_op)
        else:
            inputs = self._inputs_of(sent)
            gathered = self._landing_for(inputs[0])
            if gathered is None:
                gathered, _ = wire.stage(inputs[0], axis)
            pairs = list(zip([gathered, *self._zero_copy], inputs, strict=True))
            work = wire.all_gather_each(pairs if inputs[0].numel() else pairs[1:], axis, async_op)
        rows = gathered if gathered.dim() == 2 else gathered.view(axis.size, -1)
        return InFlight((rows, kept), work, failed)

    def _landing_for(self, sent: Tensor) -> Tensor | None:
        """Return where a collective of ours gathers on a CPU; None: somewhere new."""
        packed, _ = self._way
        if not (packed.is_dense and sent.is_cpu and self._lands_directly and self._keeps_landing):
            return None
        shape, cut = (self.axis.size, sent.shape[1]), (packed.sizes, packed.shapes)
        self._landing = self._memory.take("gather", shape, sent.dtype, cut)
        return self._landing.memory

    def free_gathered(self) -> None:
        """Drop what was gathered, and will not be used any more."""
        self._landing = None

    def _inputs_of(self, sent: Tensor) -> list[Tensor]:
        """View what each collective sends, the packed part first, in what is sent altogether."""
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
        """Send the flat part and a tail behind it, as bytes, in one all-gather."""
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
    """Memory of unsharded parameters. They are views of it, made once, also while it is freed."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._storage = self.flat.untyped_storage()
        # the number by which owners of the storage are counted
        self.number = torch_tensors.number_of(self._storage)
        # True while the storage has memory, for a gather that may still fill it, too
        self.has_memory = True
        self.is_fixed = False  # keep_unsharded_storage: the memory stays at one address
        self.is_read_later = False  # a backward may read it before a gather
        self.stream: torch.Stream | None = None  # the stream whose memory it is

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def allocate(self, nbytes: int, stream: torch.Stream | None = None) -> None:
        if self.has_memory and self._storage.nbytes() == nbytes:
            return
        self._storage.resize_(nbytes)
        self.has_memory, self.stream = True, stream

    def fill(
        self, source: ShardBuffer, gathered: Sequence[Tensor], stream: torch.Stream | None
    ) -> None:
        """Copy here what a gather brought; the memory is that of ``stream``, unless it is there.

        Raises:
            StateError: another rank gathered something else.
        """
        if not self.has_memory:
            self.allocate(source.layout.full_nbytes, stream)
        source.unpack(*gathered)

    def free(self) -> None:
        """Give the memory back, unless it is to stay; what it holds counts as gone."""
        if self.is_fixed or self.is_read_later:
            return
        self._storage.resize_(0)
        self.has_memory = False

    def bind(self, buffer: ShardBuffer) -> None:
        """Let another shard buffer fill this one: views cannot be made of a freed storage."""
        self.allocate(buffer.layout.full_nbytes)
        buffer.bind(self.flat)
        self.free()


class PostForward:
    """Where parameters wait between forward and backward, if not on the whole axis."""

    def __init__(self) -> None:
        self.mesh: DataMesh | None = None  # a mesh of fewer ranks than the group's
        # the shards over that mesh, made by the first gather
        self.buffer: ShardBuffer | None = None

    def free(self) -> None:
        if self.buffer is not None:
            self.buffer.flat.untyped_storage().resize_(0)

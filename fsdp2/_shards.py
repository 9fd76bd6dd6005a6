"""The flat shard buffer of a group: what a rank keeps, and what it sends.

Owns one byte buffer in a gather layout and the views into it. Sharded parameters are these views,
so an all-gather needs no copy-in, and a cast is one kernel. It must not know states or modules.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp2 import _packing
from fsdp2._comm import Comm
from fsdp2._layout import GatherLayout
from fsdp2._mesh import MeshAxis
from fsdp2._streams import Launched


class ShardBuffer:
    """Pieces of every parameter of a group over one axis.

    ``is_freed``: the owner resizes the buffer's storage, so shards must be views of it.
    """

    def __init__(
        self, layout: GatherLayout, axis: MeshAxis, device: torch.device, *, is_freed: bool = False
    ) -> None:
        self.layout = layout
        self.axis = axis
        self.flat = torch.zeros(layout.shard_nbytes, dtype=torch.uint8, device=device)
        make = _packing.shard_view if is_freed else _packing.own_shard
        self.shards = [
            make(self.flat, layout, index, axis.rank) for index in range(len(layout.items))
        ]
        self.targets: list[Tensor] = []
        wire = layout.wire_dtype
        self._wire_numel = layout.gather_nbytes // wire.itemsize
        self._one_cast = self._segment_to_cast()
        self._send = None if layout.casts else self.flat
        self._send_wire = self._as_wire(self.flat) if self._send is not None else None

    def _segment_to_cast(self) -> Tensor | None:
        """Return the whole shard buffer, typed, if casting it in one kernel makes what is sent."""
        layout = self.layout
        if not layout.casts or len(layout.segments) > 1 or layout.items[0].shard.is_replicated:
            return None
        (segment,) = layout.segments
        return _packing.typed(self.flat, 0, segment.numel, segment.storage_dtype)

    def _as_wire(self, buffer: Tensor) -> Tensor:
        return _packing.typed(buffer, 0, self._wire_numel, self.layout.wire_dtype)

    def gather(self, comm: Comm, async_op: bool) -> Launched:
        """Issue the all-gather of every sharded piece.

        The buffers of the result are ``[W, C]`` in wire dtype and this rank's send buffer.
        """
        layout, axis = self.layout, self.axis
        send, wire = self._send, self._send_wire
        if self._one_cast is not None:
            send = wire = comm.allocate((self._wire_numel,), layout.wire_dtype, self.flat.device)
            wire.copy_(self._one_cast)
        elif send is None or wire is None:
            send = comm.allocate((layout.send_nbytes,), torch.uint8, self.flat.device)
            _packing.cast_shards(self.flat, send, layout)
            wire = self._as_wire(send)
        if axis.size == 1 or self._wire_numel == 0:
            rows = wire.view(1, self._wire_numel).expand(axis.size, -1)
            return Launched((rows, send), None)
        shape = (axis.size * self._wire_numel,)
        gathered = comm.allocate(shape, layout.wire_dtype, self.flat.device)
        work = comm.all_gather(gathered, wire, axis, async_op)
        return Launched((gathered.view(axis.size, -1), send), work)

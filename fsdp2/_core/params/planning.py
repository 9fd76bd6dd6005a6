"""Where the parameters of one group lie: the plan, and the buffers that are made by it.

Owns the memory of shards, over the whole axis and over a smaller mesh, that of whole parameters,
and how each of these travels. It must not know states, modules or when anything moves. A steady
step enters nothing here.

[Note: one plan]
Everything that depends on shapes and dtypes is computed by ``Buffers.plan``, and lives until a
parameter is replaced behind our back (``.to()``, ``load_state_dict(assign=True)``, ``to_empty``,
``swap_tensors``, unpickling, or an assignment). A forward notices that by identity, and its group
*adopts*: it plans again and copies what is registered into a new shard buffer. The old buffer is
never written, so a parameter that comes back (``functional_call``) still has its values. The full
buffer and the unsharded parameters stay if dtypes allow, because a recorded graph may need them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._core.agreement.collective_ids import CollectiveIds
from fsdp2._core.agreement.operation_ids import Signature
from fsdp2._core.agreement.stamp import Stamp
from fsdp2._core.base import torch_dtensor, torch_tensors
from fsdp2._core.base.capabilities import ZeroCopy, capabilities
from fsdp2._core.base.errors import ConfigError, StateError
from fsdp2._core.base.policy import MixedPrecisionPolicy, Residence
from fsdp2._core.comm.mesh import DataMesh
from fsdp2._core.comm.wire import InFlight, Wire
from fsdp2._core.params import packing
from fsdp2._core.params.buffers import FullBuffer, PostForward, ShardBuffer
from fsdp2._core.params.extension import (
    ExtensionTail,
    dealt_refused,
    has_extension,
    is_extended,
    needs_extension,
    own_shard,
    smaller_mesh_refused,
)
from fsdp2._core.params.layout import GatherItem, GatherLayout
from fsdp2._core.params.param import FSDPParam
from fsdp2._core.params.placement import shrink

# Which shard a registered parameter holds: what a group's plan copies in.

Source = tuple[Tensor, nn.Parameter | None]
"""A shard, unpadded, and the registered parameter that holds it (None: one is to be made)."""


def own_rows(param: FSDPParam, whole: Tensor, rank: int) -> Tensor:
    """View this rank's rows of a whole parameter; an extended one copies them."""
    whole = torch_dtensor.local_part(whole.detach())
    if needs_extension(whole):
        return own_shard(whole, param, rank)
    return packing.shard_of(whole, param.placement.layout, rank)


def own_sources(params: Iterable[FSDPParam]) -> list[Source]:
    """Return the shards that parameters hold now."""
    return [(torch_dtensor.local_tensor(param.sharded), param.sharded) for param in params]


def source_of(param: FSDPParam, new: Tensor | None, rank: int) -> Source:
    """Return the shard that a replaced parameter holds.

    Raises:
        StateError: what is registered is no parameter, or cannot be sharded as the old one was.
    """
    placement = param.placement
    if isinstance(new, nn.Parameter):
        if placement.is_sharded(new):
            local, fits = torch_dtensor.local_tensor(new), placement.layout.shard_shape(rank)
            if tuple(local.shape) != fits or local.layout is not torch.strided:
                raise StateError(
                    "FS317",
                    f"{param.fqn}: its local tensor was replaced by one of shape "
                    f"{tuple(local.shape)} and layout {local.layout}. This rank's shard is dense, "
                    f"of shape {fits}. Put one of that shape there, or a whole nn.Parameter on "
                    "the module.",
                )
            return local, new
        if placement.is_unsharded(new):
            return own_rows(param, new, rank), None
    found = "nothing" if new is None else f"{type(new).__name__} of shape {tuple(new.shape)}"
    if isinstance(new, DTensor):
        found += f" with placements {new.placements} on {new.device_mesh}"
    raise StateError(
        "FS317",
        f"{param.fqn}: was replaced by {found}, which this module cannot shard. Register an "
        f"nn.Parameter {placement.describe()}.",
    )


class Buffers:
    """The buffers of a group. ``params`` is the group's own list."""

    def __init__(
        self,
        params: Sequence[FSDPParam],
        data: DataMesh,
        policy: MixedPrecisionPolicy,
        residence: Residence,
        ids: CollectiveIds,
    ) -> None:
        self._params = params
        self._data = data
        self._residence = residence
        self._ids = ids
        self._trims = capabilities(residence.compute).is_host
        # the shards; None in a copy until it is planned
        self.home: ShardBuffer | None = None
        self.post_forward = PostForward()
        # memory of the unsharded parameters, made by the first gather
        self.full: FullBuffer | None = None
        # what extended parameters send, behind the others
        self.open_tail = ExtensionTail(data, policy, residence.compute)

    @property
    def all(self) -> list[ShardBuffer]:
        """What an all-gather may send from."""
        return [buffer for buffer in (self.home, self.post_forward.buffer) if buffer is not None]

    @property
    def whole_memory(self) -> Tensor | None:
        """What unsharded parameters are views of; it may have no memory now. None: not yet made."""
        return None if self.full is None else self.full.flat

    @property
    def flat_params(self) -> list[FSDPParam]:
        """Those that lie in the flat buffers; the others are extended."""
        return [param for param in self._params if not param.is_extended]

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the unsharded parameters, in the dtypes that they are computed in."""
        return sum(p.sharded.numel() * p.compute_dtype.itemsize for p in self._params)

    def lies_in(self, storage: torch.UntypedStorage) -> bool:
        """True if a storage is that of the unsharded parameters."""
        return self.full is not None and self.full.number == torch_tensors.number_of(storage)

    def compute_by(self, policy: MixedPrecisionPolicy) -> None:
        """Plan for the dtypes of another policy from now on."""
        self.open_tail = ExtensionTail(self._data, policy, self._residence.compute)

    @torch.inference_mode(False)
    @torch.no_grad()
    def plan(self, sources: Sequence[Source], wire: Wire, fqn: str) -> None:
        """Lay the group out for the dtypes and the device of ``sources`` and copy them in.

        Raises:
            StateError: sources are on several devices.
            ConfigError: an extension cannot be used here. Nothing was changed.
        """
        devices = {source.device for source, _ in sources}
        if len(devices) > 1:
            listing = ", ".join(
                f"{p.fqn} on {s.device}" for p, (s, _) in zip(self._params, sources, strict=True)
            )
            raise StateError(
                "FS226",
                f"{fqn or '<root>'}: parameters of one group are on several devices: "
                f"{listing}. Move the whole module to one device.",
            )
        self._split([source for source, _ in sources])
        for param, (source, _) in zip(self._params, sources, strict=True):
            param.storage_dtype = source.dtype
        items = [
            GatherItem(
                param.placement.layout,
                param.storage_dtype,
                param.compute_dtype,
                coding=param.coding_of(param.placement.layout),
            )
            for param in self.flat_params
        ]
        smaller, stamp = self.post_forward.mesh, self._ids.gather
        others = () if smaller is None else (smaller.shard.size,)
        layout = _with_stamp(
            tuple(items),
            self._data.shard.size,
            others,
            None if stamp is None else stamp.numel,
            wire.zero_copy,
            # without dealt parameters the plan of every rank is the same, and is kept once
            self._data.shard.rank if any(item.shard.is_dealt for item in items) else 0,
            trims=self._trims,
        )
        if self.home is None or not layout.has_full_of(self.home.layout):
            self.full = self.post_forward.buffer = None
        device, residence = devices.pop(), self._residence
        if residence.is_away and device.type != "meta":
            device = residence.storage
        buffer = ShardBuffer(
            layout,
            self._data.shard,
            device,
            compute=residence.compute if residence.is_away else None,
            pinned=residence.is_pinned and device.type == "cpu",
            tail=stamp if len(layout.items) > len(items) else None,
        )
        self._number(buffer, stamp, wire)
        if self.full is not None:
            self.full.bind(buffer)
        index = 0
        for param, (source, registered) in zip(self._params, sources, strict=True):
            if param.is_extended:
                param.set_shard(source, registered)
                continue
            local = buffer.shards[index]
            local.copy_(source.detach())
            param.set_shard(local, registered, buffer.span(index))
            index += 1
        self.open_tail.plan([param for param in self._params if param.is_extended])
        self.home = buffer

    def _split(self, shards: Sequence[Tensor]) -> None:
        """See which parameters are extended: these are not in the flat buffer.

        Raises:
            StateError: an extension is not complete, or cannot be used here; nothing was changed.
        """
        extended = [is_extended(p, s) for p, s in zip(self._params, shards, strict=True)]
        some_extended = [p for p, is_so in zip(self._params, extended, strict=True) if is_so]
        dealt = [p for p in self._params if p.placement.layout.is_dealt]
        if self.post_forward.mesh is not None:
            refuse_smaller([*some_extended, *dealt])
        if some_extended and dealt:
            deal = dealt[0].placement.layout.deal
            assert deal is not None
            raise ConfigError(
                "FS510",
                f"{some_extended[0].fqn}: has an all-gather extension, and {dealt[0].fqn}, of the "
                f"same group, {deal.asked_by}. Let shard_placement_fn return Shard(0) or None for "
                "that one, or give the two units of their own.",
            )
        for param, shard, is_so in zip(self._params, shards, extended, strict=True):
            if is_so and not param.is_extended and shard is param.local:
                shard.data = shard.clone()  # the same object, out of the flat buffer
            param.is_extended = is_so

    def wait_on(self, smaller: DataMesh | None) -> None:
        """Plan for another smaller mesh from now on, or for none."""
        self.post_forward.mesh, self.post_forward.buffer = smaller, None
        axis = None if smaller is None else smaller.shard
        self._ids.gather_smaller = None if axis is None else self._ids.make(axis, "gather")

    def number(self, wire: Wire) -> None:
        """Number what is sent by how it travels now, and tell the ranks' agreement."""
        if self.home is not None:
            self._number(self.home, self._ids.gather, wire)
        if self.post_forward.buffer is not None:
            self._number(self.post_forward.buffer, self._ids.gather_smaller, wire)

    def _number(self, buffer: ShardBuffer, stamp: Stamp | None, wire: Wire) -> None:
        """Number what is sent of one buffer, of which nothing is on its way.

        What extended parameters send is agreed on elsewhere.
        """
        buffer.follow(wire)
        if stamp is None or buffer.tail is None:
            return
        layout = buffer.layout
        sent = [(item.shard.signature, item.sent_as) for item in layout.items]
        numels, dtype = buffer.sent_numels(), layout.wire_dtype
        is_custom = wire.custom[0] is not None
        tensors = tuple((param.fqn, param.placement.layout.shape) for param in self.flat_params)
        stamp.update_signature(
            Signature(sent, len(numels) - 1, (dtype, dtype), is_custom, tensors=tensors)
        )
        buffer.renew_tail()
        if buffer.open_tail_nbytes or not self.open_tail.items:
            seen_as = layout.items[-1].compute_dtype
            start = layout.send_offsets[-1] // seen_as.itemsize
            pieces = tuple(nbytes // dtype.itemsize for nbytes in layout.pieces)
            stamp.register(wire, numels, dtype, seen_as, start, pieces=pieces)

    @property
    def has_late_extension(self) -> bool:
        """True if somebody set methods on a local tensor since the plan was made."""
        assert self.home is not None
        return any(map(has_extension, self.home.shards))

    @torch.inference_mode(False)
    @torch.no_grad()
    def build_full(self, wire: Wire, is_fixed: bool) -> FullBuffer:
        """Make the unsharded parameters, and the smaller mesh's, on memory that is freed again."""
        assert self.home is not None
        if self.post_forward.mesh is not None:
            self._build_waiting(self.post_forward.mesh, wire)
        layout = self.home.layout
        self.full = full = FullBuffer(layout.full_nbytes, self._residence.compute)
        for buffer in self.all:
            buffer.bind(full.flat)
        tensors = packing.full_tensors(full.flat, layout)
        for param, tensor in zip(self.flat_params, tensors, strict=False):
            param.set_unsharded(tensor)
        full.is_fixed = is_fixed
        full.free()
        return full

    def _build_waiting(self, smaller: DataMesh, wire: Wire) -> None:
        """Plan the shards over the smaller mesh. Both plans must place unsharded tensors alike."""
        placements = [shrink(param.placement, smaller) for param in self._params]
        items = [
            GatherItem(
                placement.layout,
                param.compute_dtype,
                param.compute_dtype,
                coding=param.coding_of(placement.layout, is_again=True),
            )
            for placement, param in zip(placements, self._params, strict=True)
        ]
        stamp, others = self._ids.gather_smaller, (self._data.shard.size,)
        layout = _with_stamp(
            tuple(items),
            smaller.shard.size,
            others,
            None if stamp is None else stamp.numel,
            wire.zero_copy,
            trims=self._trims,
        )
        tail = stamp if len(layout.items) > len(items) else None
        device = self._residence.compute
        buffer = ShardBuffer(layout, smaller.shard, device, is_freed=True, tail=tail)
        self.post_forward.buffer = buffer
        self._number(buffer, stamp, wire)
        for param, placement, local in zip(self._params, placements, buffer.shards, strict=False):
            param.set_post_forward(local, placement)
        self.post_forward.free()

    def gather_extended(self, wire: Wire, async_op: bool) -> InFlight:
        """Issue the all-gather with the tail of the extended parameters."""
        buffer, tail = self.home, self.open_tail
        assert buffer is not None
        tail.before()
        if buffer.open_tail_nbytes != tail.nbytes:
            buffer.open_tail_nbytes = tail.nbytes
            self._number(buffer, self._ids.gather, wire)
        return buffer.gather(wire, async_op, tail.write)

    @torch.no_grad()
    def shrink(self) -> None:
        """Copy unsharded parameters to the shards over the smaller mesh."""
        waiting = self.post_forward.buffer
        assert waiting is not None
        layout = waiting.layout
        waiting.flat.untyped_storage().resize_(layout.shard_nbytes)
        for param, item, shard in zip(self._params, layout.items, waiting.shards, strict=False):
            assert param.unsharded is not None
            whole = torch_dtensor.local_part(param.unsharded.detach())
            shard.copy_(packing.shard_of(whole, item.shard, waiting.axis.rank))
        waiting.write_tail()

    @torch.inference_mode(False)
    @torch.no_grad()
    def write_back(self, written: Sequence[Tensor]) -> None:
        """Copy this rank's rows to its shards, of each parameter that was written while whole."""
        for param in self.flat_params:
            assert param.unsharded is not None
            forms = param.unsharded, torch_dtensor.local_part(param.unsharded)
            if not any(form is one for form in forms for one in written):
                continue  # a parameter that was not written while whole may have a newer shard
            rows, shard = own_rows(param, param.unsharded, self._data.shard.rank), param.local
            assert shard is not None
            kept = shard.to(rows.device)
            if kept.dtype is not rows.dtype:  # what did not change keeps its precision
                rows = torch.where(rows == kept.to(rows.dtype), kept, rows.to(kept.dtype))
            shard.copy_(rows)


def refuse_smaller(params: Sequence[FSDPParam]) -> None:
    """Raise ConfigError for parameters, extended or dealt, that cannot wait on a smaller mesh."""
    if params:
        fqn, deal = params[0].fqn, params[0].placement.layout.deal
        why = smaller_mesh_refused(fqn) if deal is None else dealt_refused(fqn, deal)
        raise ConfigError("FS211", why)


@functools.lru_cache(maxsize=64)  # the blocks of a model are alike
def _with_stamp(
    items: tuple[GatherItem, ...],
    size: int,
    others: tuple[int, ...],
    numel: int | None,
    zero_copy: ZeroCopy | None,
    rank: int = 0,
    trims: bool = False,
) -> GatherLayout:
    """Plan a layout with room for a stamp of ``numel``, if there is one, behind the parameters."""
    if numel is None:
        return GatherLayout.plan(items, size, others, zero_copy, rank, trims)
    return GatherLayout.plan_with_tail(items, size, numel, others, zero_copy, rank, trims)

"""Parameters that communicate together: ``unshard``, ``wait_for_unshard``, ``reshard``, ``reduce``.

Owns a group's plan, its shard buffer, its full buffer and the moves between them. It must not know
hooks, autograd or other groups: whoever calls decides when.

[Note: one plan]
Everything that depends on shapes and dtypes is computed by ``_plan`` and lives until a parameter is
replaced behind our back (``.to()``, ``load_state_dict(assign=True)``, ``to_empty``,
``swap_tensors``, unpickling, or an assignment). ``unshard`` notices that by identity, and *adopts*:
it plans again and copies what is registered into a new shard buffer. The old buffer is never
written, so a parameter that comes back (``functional_call``) still has its values. The full buffer
and the unsharded parameters stay if dtypes allow, because a recorded graph may need them.

[Note: between steps]
Between steps ``parameters()`` are the shards, so that an optimizer made there trains them. Memory
is another matter: a group may keep its whole parameters for the next forward or backward (by
choice, or because a recorded graph reads them). Then it *shows* its shards: they are registered,
and the state stays UNSHARDED. They serve the backwards of the forward that they stayed from. The
next forward gathers again: what is written to ``.data``, a NumPy array or a local tensor counts no
version, so nobody knows whether the shards still have the gathered values. It takes what stayed
only if the user asked for that: by ``unshard()``, by ``set_reshard_after_backward(False)``, by
``set_reshard_after_forward(False)`` from one forward without gradients to the next, or by
``reshard_after_forward=False`` in a pipeline, of which many forwards run before their backwards.
Then too it compares the versions of the shards with those that were gathered, and gathers again if
they differ. Only ``unshard()`` by hand *holds* whole parameters registered: until ``reshard()``,
the unit's next forward, or the end of a backward of its root.

[Note: written while whole]
A forward may write to its parameters in place: it clamps a weight, renormalizes an embedding, moves
a codebook. Such a write counts a version of the unsharded parameter. Before that is given up, each
rank copies what changed in its own rows to its shard, so ranks have to write the same values, as
replicas of a plain model do. A forward or a backward that raises takes its writes with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fsdp2._agreement.collective_ids import CollectiveIds
from fsdp2._agreement.operation_ids import Signature
from fsdp2._agreement.stamp import Stamp
from fsdp2._base import events, torch_dtensor, torch_tensors
from fsdp2._base.capabilities import capabilities
from fsdp2._base.errors import ConfigError, StateError
from fsdp2._base.events import BACKWARD, IDLE
from fsdp2._base.observing import Observable
from fsdp2._base.policy import MixedPrecisionPolicy, OffloadPolicy, Residence, Settings
from fsdp2._base.torch_autograd import version_of
from fsdp2._comm.mesh import DataMesh
from fsdp2._comm.wire import InFlight, StepContext, Streams, Wire
from fsdp2._param_group import optimizer_steps, packing
from fsdp2._param_group.adoption import Source, own_rows, own_sources, source_of
from fsdp2._param_group.buffers import FullBuffer, PostForward, ShardBuffer
from fsdp2._param_group.early_release import EarlyRelease
from fsdp2._param_group.extension import (
    ExtensionTail,
    has_extension,
    is_extended,
    smaller_mesh_refused,
)
from fsdp2._param_group.functional_call import whole_tensor
from fsdp2._param_group.layout import GatherItem, GatherLayout
from fsdp2._param_group.param import FSDPParam
from fsdp2._param_group.placement import shrink
from fsdp2._param_group.reduce import Reducer, Reduction
from fsdp2._param_group.registration import (
    SHARDED,
    SHARDED_POST_FORWARD,
    UNSHARDED,
    Registration,
    Serves,
)


class ParamGroup(Observable):
    """One frozen layout, one mesh, and the state that its parameters share."""

    def __init__(
        self,
        data: DataMesh,
        policy: MixedPrecisionPolicy,
        device: torch.device,
        offload: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # frozen
    ) -> None:
        self.data = data
        self.policy = policy
        self.residence = Residence(device, offload)
        self.settings = Settings()  # the unit's settings, which are replaced as a whole
        # phase and lanes, the tree's from its first forward on
        self.context = StepContext(Streams())
        self.fqn = ""  # the name of the unit, for messages
        # parameters in the order of registration, which all ranks share
        self.params: list[FSDPParam] = []
        # what extended parameters send, behind the others
        self._tail = ExtensionTail(data, policy, device)
        self.ids = CollectiveIds(data, device)
        self.reducer = Reducer(self.params, data, self.residence, self.ids)
        self.wire.zero_copy_nbytes = capabilities(device).zero_copy_nbytes
        # the flat buffer of the shards; None in a copy until it is planned
        self.home_buffer: ShardBuffer | None = None
        self.post_forward = PostForward()
        # memory of the unsharded parameters, made by the first gather
        self._full: FullBuffer | None = None
        self.registration = Registration(self.params)
        self.early = EarlyRelease()
        self.gathering: InFlight | None = None  # the all-gather that nobody has waited for

    @property
    def wire(self) -> Wire:
        """What the group sends over."""
        return self.reducer.wire

    @wire.setter
    def wire(self, wire: Wire) -> None:
        self.reducer.wire = wire
        self.rewire()

    @property
    def device(self) -> torch.device:
        """Where the group computes."""
        return self.residence.compute

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the unsharded parameters, in the dtypes that they are computed in."""
        return sum(p.sharded.numel() * p.compute_dtype.itemsize for p in self.params)

    @property
    def whole_memory(self) -> torch.Tensor | None:
        """What unsharded parameters are views of; it may have no memory now. None: not yet made."""
        return None if self._full is None else self._full.flat

    @property
    def _shard_buffers(self) -> list[ShardBuffer]:
        both = self.home_buffer, self.post_forward.buffer
        return [buffer for buffer in both if buffer is not None]

    def rewire(self) -> None:
        """Take notice of what changed on the wire: every rank does so between the same steps."""
        if self.gathering is not None:  # a gather that was issued by hand carries the old number
            self._drop_gather()
        self.context.streams.finish_host_reads()  # numbers are written into the memory of shards
        for buffer in self._shard_buffers:
            self._register_ids(buffer)
        self.reducer.invalidate()

    def send_zero_copy(self, nbytes: int | None) -> None:
        """Let parameters of at least ``nbytes`` travel in a collective of their own."""
        if nbytes != self.wire.zero_copy_nbytes:
            self.reshard()
            self.wire.zero_copy_nbytes = nbytes
            self._plan(own_sources(self.params))

    def separate_reductions(self, enable: bool) -> None:
        """Reduce over a process group of its own, or over that of the gathers. Collective."""
        data = self.data
        self.wire.is_separate = enable
        is_other = enable and data.shard.size > 1
        shard = data.shard.separate() if is_other else data.shard
        self.wire.scatter_group = shard.pg if is_other else None
        self.ids.renew_reductions(dataclasses.replace(data, shard=shard))
        self.reducer.erase_stamps()
        self.reducer.invalidate()

    def enroll(self, fqn: str) -> None:
        """Take the name that the unit has in its tree, and numbers for its collectives.

        Not earlier: whoever copies a model on one rank alone, and never runs it, takes no numbers.
        """
        # a copy was told to be separate, and has no process group yet
        if self.wire.is_separate and self.wire.scatter_group is None:
            self.separate_reductions(True)
        self.fqn = fqn
        self.ids.enroll(fqn)
        self.rewire()

    def see_grad_dtypes(self) -> None:
        """Take over each ``grad_dtype`` that the user set before the first forward: it holds now.

        Raises:
            ConfigError: it does not go with the settings.
        """
        for param in self.params:
            param.see_grad_dtype()
        self.check_unused(self.settings)

    def check_unused(self, settings: Settings) -> None:
        """Raise ConfigError if zeros for an unused parameter would have no dtype, on every rank."""
        if not settings.reduce_unused or self.policy.reduce_dtype is not None:
            return
        for param in self.params:
            if param.trainable and param.chosen.has_grad_dtype and param.chosen.grad_dtype is None:
                raise ConfigError(
                    "FS320",
                    f"{param.fqn}: its grad_dtype is None, so zeros in place of a gradient have no "
                    "dtype, and set_reduce_scatter_unused_params(True) asks for them. Give it a "
                    "grad_dtype, or its unit a MixedPrecisionPolicy with a reduce_dtype.",
                )

    def forget_step(self) -> None:
        """Drop what an unfinished step left."""
        self.reducer.discard()
        self.registration.forget_stand_ins()

    # Planning and adoption.

    def shard(self, params: Sequence[FSDPParam]) -> None:
        """Take parameters in: copy this rank's rows of each into the flat buffer, register them.

        A parameter comes whole (``nn.Parameter``, maybe a DTensor over tensor-parallel axes), or
        as the sharded DTensor that another group gave up.
        """
        sources = own_sources(self.params)
        for param in params:
            if param.local is None:
                rows = own_rows(param, param.sharded, self.data.shard.rank)
                if rows.device.type != "meta":
                    rows = rows.to(self.residence.storage)
                sources.append((rows, None))
            else:
                sources.append((torch_dtensor.local_tensor(param.sharded), param.sharded))
            param.registration = self.registration
            param.follow(self.policy)
        self.params.extend(params)
        self._plan(sources)

    def compute_by(self, policy: MixedPrecisionPolicy) -> None:
        """Compute in the dtype of another policy from now on."""
        self.reshard()
        self.policy = policy
        self._tail = ExtensionTail(self.data, policy, self.device)
        for param in self.params:
            param.chosen.param_dtype = policy.param_dtype
        self._plan(own_sources(self.params))

    def release(self, params: Sequence[FSDPParam]) -> None:
        """Give parameters up; another group takes them. A group of none is not used any more."""
        self.params[:] = [param for param in self.params if param not in params]
        if self.params:
            self._plan(own_sources(self.params))

    def follow_storage(self) -> None:
        """Keep the memory of unsharded parameters, or free it, as the settings say from now on."""
        full = self._full
        if full is not None:
            full.is_fixed = self.settings.keep_unsharded_storage
            if self.registration.state is not UNSHARDED and self.gathering is None:
                full.free()

    def keep_memory(self, stays: bool) -> None:
        """Let the memory of unsharded parameters outlive reshards from now on, or no longer."""
        if self._full is not None and (self.is_unsharded or not stays):
            self._full.is_read_later = stays
            self.context.streams.hold_back(self._full.stream)
            self.follow_storage()

    def lies_in(self, storage: torch.UntypedStorage) -> bool:
        """True if a storage is that of the unsharded parameters."""
        return self._full is not None and self._full.number == torch_tensors.number_of(storage)

    def reshard_to(self, size: int | None) -> None:
        """Reshard to ``size`` neighbours after forward from now on; None: to the whole axis.

        Collective, if the smaller mesh does not exist yet.
        """
        if size is not None:
            self._refuse_smaller([param for param in self.params if param.is_extended])
        smaller = None if size is None else self.data.split(size)
        if smaller is not self.post_forward.mesh:
            self.reshard()
            self._wait_on(smaller)
            self._plan(own_sources(self.params))

    def _wait_on(self, smaller: DataMesh | None) -> None:
        self.post_forward.mesh, self.post_forward.buffer = smaller, None
        axis = None if smaller is None else smaller.shard
        self.ids.gather_smaller = None if axis is None else self.ids.make(axis, "gather")

    @torch.inference_mode(False)
    @torch.no_grad()
    def _plan(self, sources: Sequence[Source]) -> None:
        """Lay the group out for the dtypes and the device of ``sources`` and copy them in."""
        devices = {source.device for source, _ in sources}
        if len(devices) > 1:
            listing = ", ".join(
                f"{p.fqn} on {s.device}" for p, (s, _) in zip(self.params, sources, strict=True)
            )
            raise StateError(
                "FS226",
                f"{self.fqn or '<root>'}: parameters of one group are on several devices: "
                f"{listing}. Move the whole module to one device.",
            )
        self._split_params([source for source, _ in sources])
        for param, (source, _) in zip(self.params, sources, strict=True):
            param.storage_dtype = source.dtype
        self.reducer.invalidate()
        if self.early.readers is not None:
            self.early.readers.forget()
        layout = self._layout()
        if self.home_buffer is None or not layout.has_full_of(self.home_buffer.layout):
            self._full = self.post_forward.buffer = None
        device = devices.pop()
        if self.residence.is_away and device.type != "meta":
            device = self.residence.storage
        buffer = ShardBuffer(
            layout,
            self.data.shard,
            device,
            compute=self.device if self.residence.is_away else None,
            pinned=self.residence.is_pinned and device.type == "cpu",
            tail=self.ids.gather if len(layout.items) > len(self._flat_params) else None,
        )
        self._register_ids(buffer)
        if self._full is not None:
            self._full.bind(buffer)
        index = 0
        for param, (source, registered) in zip(self.params, sources, strict=True):
            if param.is_extended:
                param.set_shard(source, registered)
                continue
            local = buffer.shards[index]
            local.copy_(source.detach())
            param.set_shard(local, registered, buffer.span(index))
            index += 1
        self._tail.plan([param for param in self.params if param.is_extended])
        self.home_buffer = buffer
        self.registration.see()
        self.registration.show(SHARDED)

    def _split_params(self, shards: Sequence[Tensor]) -> None:
        """See which parameters are extended: these are not in the flat buffer.

        Raises:
            StateError: an extension is not complete, or cannot be used here; nothing was changed.
        """
        extended = [is_extended(p, s) for p, s in zip(self.params, shards, strict=True)]
        if self.post_forward.mesh is not None:
            self._refuse_smaller(
                [p for p, is_so in zip(self.params, extended, strict=True) if is_so]
            )
        for param, shard, is_so in zip(self.params, shards, extended, strict=True):
            if is_so and not param.is_extended and shard is param.local:
                shard.data = shard.clone()  # the same object, out of the flat buffer
            param.is_extended = is_so

    @property
    def _flat_params(self) -> list[FSDPParam]:
        """Those that lie in the flat buffers."""
        return [param for param in self.params if not param.is_extended]

    def _refuse_smaller(self, extended: Sequence[FSDPParam]) -> None:
        if extended:
            raise ConfigError("FS211", smaller_mesh_refused(extended[0].fqn))

    def _layout(self) -> GatherLayout:
        items = [
            GatherItem(param.placement.layout, param.storage_dtype, param.compute_dtype)
            for param in self._flat_params
        ]
        sizes = () if self.post_forward.mesh is None else (self.post_forward.mesh.shard.size,)
        return self._with_tail(items, self.data.shard.size, sizes, self.ids.gather)

    def _with_tail(
        self, items: list[GatherItem], size: int, others: Sequence[int], stamp: Stamp | None
    ) -> GatherLayout:
        """Plan a layout with room for a stamp, if there is one, behind the parameters."""
        zero_copy = self.wire.zero_copy_nbytes
        layout = GatherLayout.plan(items, size, others, zero_copy)
        tail = None if stamp is None else layout.tail_item(stamp.numel)
        if tail is not None:
            layout = GatherLayout.plan([*items, tail], size, others, zero_copy)
        return layout

    def _register_ids(self, buffer: ShardBuffer) -> None:
        """Number a buffer by how it travels, and tell the ranks' agreement.

        Nothing of it is on its way. What extended parameters send is agreed on elsewhere.
        """
        layout, ids = buffer.layout, self.ids
        stamp = ids.gather if buffer.axis is self.data.shard else ids.gather_smaller
        if stamp is None or buffer.tail is None:
            return
        sent = [(item.shard.signature, item.compute_dtype) for item in layout.items]
        numels, dtype = buffer.sent_numels(self.wire), layout.wire_dtype
        is_custom = self.wire.custom[0] is not None
        tensors = tuple((param.fqn, param.placement.layout.shape) for param in self._flat_params)
        stamp.update_signature(
            Signature(sent, len(numels) - 1, (dtype, dtype), is_custom, tensors=tensors)
        )
        buffer.renew_tail()
        if buffer.open_tail_nbytes or not self._tail.items:
            seen_as = layout.items[-1].compute_dtype
            start = layout.send_offsets[-1] // seen_as.itemsize
            stamp.register(self.wire, numels, dtype, seen_as, start)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _build_full(self) -> None:
        """Make the unsharded parameters, and the smaller mesh's, on memory that is freed again."""
        assert self.home_buffer is not None
        if any(map(has_extension, self.home_buffer.shards)):  # methods were set on a local tensor
            self._plan(own_sources(self.params))
            self.context.streams.order_after_compute("gather")
        if self.post_forward.mesh is not None:
            self._build_waiting(self.post_forward.mesh)
        layout = self.home_buffer.layout
        self._full = full = FullBuffer(layout.full_nbytes, self.device)
        for buffer in self._shard_buffers:
            buffer.bind(full.flat)
        tensors = packing.full_tensors(full.flat, layout)
        for param, tensor in zip(self._flat_params, tensors, strict=False):
            param.set_unsharded(tensor)
        self.registration.see_whole(param.unsharded for param in self._flat_params)
        full.is_fixed = self.settings.keep_unsharded_storage
        full.free()

    def prepare_unsharded(self) -> None:
        """Have unsharded parameters, of memory that is freed: gradients may wait on them."""
        if self._full is None:
            self._build_full()
            self._meet_readers()

    def _meet_readers(self) -> None:
        """Count references to a part's unsharded parameters when there are none but ours."""
        readers = self.early.readers
        if readers is not None and not self._tail.items and self.post_forward.mesh is None:
            assert self._full is not None
            wholes = [param.unsharded for param in self.params]
            readers.meet(self._full, wholes, self.context.streams.current())

    def _build_waiting(self, smaller: DataMesh) -> None:
        """Plan the shards over the smaller mesh. Both plans must place unsharded tensors alike."""
        placements = [shrink(param.placement, smaller) for param in self.params]
        items = [
            GatherItem(placement.layout, param.compute_dtype, param.compute_dtype)
            for placement, param in zip(placements, self.params, strict=True)
        ]
        stamp = self.ids.gather_smaller
        layout = self._with_tail(items, smaller.shard.size, (self.data.shard.size,), stamp)
        stamp = stamp if len(layout.items) > len(items) else None
        buffer = ShardBuffer(layout, smaller.shard, self.device, is_freed=True, tail=stamp)
        self.post_forward.buffer = buffer
        self._register_ids(buffer)
        for param, placement, local in zip(self.params, placements, buffer.shards, strict=False):
            param.set_post_forward(local, placement)
        self.post_forward.free()

    def inspect(self, recomputing: bool = False) -> None:
        """See what the user did to the registered parameters. Call it before a forward's unshard.

        A replaced ``nn.Parameter`` is adopted. Any other tensor in its place is a stand-in for the
        forward that begins (``functional_call``). A changed ``requires_grad`` is carried over. A
        recomputation uses the values of its backward, whatever was written since.
        """
        self.registration.is_held = False
        readers = self.early.readers
        if readers is not None and not recomputing:
            wholes = [param.unsharded for param in self.params]
            readers.follow(wholes, self.context.streams.current())
        registration = self.registration
        stays = registration.values is not None and not recomputing
        if stays and (not registration.serves_this_forward or registration.were_written):
            self.reshard()
        changes = registration.detect_changes()
        if changes.toggled:
            self._toggle(changes.toggled)
        if changes.cast:  # by the model's own forward: what is unsharded lies elsewhere now
            self.reshard()
            self._full = None
        if changes.replaced:
            self._adopt(changes.replaced)

    def follow_toggles(self) -> None:
        """See a changed ``requires_grad`` of a group that may have no forward of its own now."""
        toggled = [param for param in self.params if param.is_toggled]
        if toggled:
            self._toggle(toggled)

    def _toggle(self, params: list[FSDPParam]) -> None:
        """Carry a changed ``requires_grad`` to every form of each parameter."""
        self._check_toggle(params)
        for param in params:
            param.toggle()
        self.reducer.invalidate()
        self.reducer.prepare(self.settings)  # at once: other ranks may stand in for it

    def _adopt(self, replaced: dict[FSDPParam, Tensor | None]) -> None:
        """Take over parameters that were replaced. See [Note: one plan]."""
        rank = self.data.shard.rank
        for param, new in replaced.items():
            if new is not None and new.requires_grad is not param.trainable:
                self._check_toggle([param])
        sources = [source_of(p, replaced.get(p, p.sharded), rank) for p in self.params]
        self.reshard()
        if events.listeners:
            events.emit("adopt", self.fqn, self.context.phase)
        for param, new in replaced.items():
            if new is not param.sharded:
                self.reducer.forget(param)
            param.replace(new)
            for site in param.sites:
                site.put(param.sharded)
        self._plan(sources)
        self.context.streams.order_after_compute("gather")

    def _check_toggle(self, params: Sequence[FSDPParam]) -> None:
        """Raise StateError if ``requires_grad`` must not change now: the same on every rank."""
        if self.reducer.unreduced.is_owed or self.reducer.unreduced.partial is not None:
            raise StateError(
                "FS312",
                f"{params[0].fqn}: requires_grad changed while gradients of its group are "
                "accumulated without sync. Set it back and run a backward with gradient sync "
                "first, or call reset_iter_state().",
            )

    def zero_grad(self, set_to_none: bool) -> None:
        """Clear sharded gradients that are not registered, and those that wait for a reduction."""
        unreduced = self.reducer.unreduced
        if unreduced.is_waiting or unreduced.is_owed or optimizer_steps.may_be_unreduced(self):
            self.reducer.discard()
        if self.registration.state is SHARDED:
            return
        for param in self.params:
            if param.sharded.grad is not None:
                if set_to_none:
                    param.sharded.grad = None
                else:
                    param.sharded.grad.zero_()

    # The moves.

    @property
    def is_unsharded(self) -> bool:
        """True if no rank has to gather. See [Note: released early] in ``early_release``."""
        return self.registration.state is UNSHARDED and not self.early.is_released

    def _show_whole(self) -> None:
        """Register unsharded parameters, and what stands in for them in a forward that begins."""
        self.registration.show(UNSHARDED)
        if self.registration.stand_ins:
            self._lend()

    def _lend(self) -> None:
        for item in self.registration.place_stand_ins():
            item.site.put(whole_tensor(item.tensor, item.param, self.reducer, self.settings))

    def unshard(self) -> None:
        """Issue the all-gather, unless the parameters are whole or on their way."""
        if self.early.is_released:
            self.reshard()
        if self.gathering is not None or self.registration.state is UNSHARDED:
            return
        if self.home_buffer is None:  # a copy, gathered ahead of its own first forward
            self.inspect()
        self.prepare_unsharded()
        source = (
            self.home_buffer if self.registration.state is SHARDED else self.post_forward.buffer
        )
        assert source is not None
        phase = self.context.phase
        if phase is IDLE or (phase is BACKWARD and not self.settings.reshard_after_backward):
            # In a forward, the values of those that stay are noted at its end.
            self.registration.note_values(Serves.FORWARDS)
        if events.listeners:
            nbytes = source.axis.size * source.sent_nbytes
            events.emit("unshard", self.fqn, self.context.phase, nbytes)
        if source.tail is not None:
            source.tail.before()
        wire = self.reducer.wire
        if source.layout.zero_copy and source.gathers_zero_copy(wire):
            assert self._full is not None
            self._full.allocate(source.layout.full_nbytes, self.context.streams.current())
            # compute may still read the memory that the gather writes to
            self.context.streams.order_after_compute("gather")
        gather = self._gather_extended if self._tail.items else source.gather
        streams = self.context.streams
        self.gathering = streams.launch("gather", gather, wire, streams.async_op)
        if self.residence.is_away:
            self.context.streams.host_read = self.gathering  # the last one: a lane runs in order

    def _gather_extended(self, wire: Wire, async_op: bool) -> InFlight:
        """Issue the all-gather with the tail of the extended parameters."""
        buffer, tail = self.home_buffer, self._tail
        assert buffer is not None
        tail.before()
        if buffer.open_tail_nbytes != tail.nbytes:
            buffer.open_tail_nbytes = tail.nbytes
            self._register_ids(buffer)
        return buffer.gather(wire, async_op, tail.write)

    @property
    def _source(self) -> ShardBuffer:
        """What an all-gather sends: the shards, or those over the smaller mesh."""
        is_sharded = self.registration.state is SHARDED
        source = self.home_buffer if is_sharded else self.post_forward.buffer
        assert source is not None
        return source

    def wait_for_unshard(self) -> None:
        """Finish the all-gather: afterwards the unsharded parameters are registered and whole."""
        if self.registration.state is UNSHARDED and not self.early.is_released:
            self._show_whole()
            if self.reducer.has_waited or not self.settings.reduce_grads:
                self.reducer.begin_sums(self.settings)
            return
        if self.gathering is None or self.early.is_released:
            self.unshard()
        assert self.gathering is not None
        assert self._full is not None
        source = (
            self.home_buffer if self.registration.state is SHARDED else self.post_forward.buffer
        )
        assert source is not None
        self.gathering.wait()
        buffers, self.gathering = self.gathering.buffers, None
        if not self._full.has_memory:
            self._full.allocate(source.layout.full_nbytes, self.context.streams.current())
        try:
            source.unpack(*buffers)
            if self._tail.items:
                self._tail.arrived(buffers[2])
                self.reducer.see_dtypes()
        except BaseException:  # ranks differ, or an extension raised
            self.context.streams.retire("gather", buffers)
            self._full.free()
            raise
        self.context.streams.retire("gather", buffers)
        if source is self.post_forward.buffer:
            self.post_forward.free()
        self.registration.move(UNSHARDED, self.fqn)
        if self.registration.stand_ins:
            self._lend()
        if self.reducer.has_waited or not self.settings.reduce_grads:
            self.reducer.begin_sums(self.settings)
        if events.listeners:
            events.emit("wait_for_unshard", self.fqn, self.context.phase)

    def reshard(self) -> None:
        """Register the sharded parameters and free the unsharded ones."""
        self.early.is_released = self.early.skips_backward = self.registration.is_held = False
        self.registration.values = None
        if self.gathering is not None:
            self._drop_gather()
        if self.registration.state is SHARDED:
            return
        if self.registration.state is SHARDED_POST_FORWARD:
            self.post_forward.free()
        else:
            self.take_writes()
        self.registration.move(SHARDED, self.fqn)
        self._give_up_full()

    def take_writes(self) -> None:
        """Copy to the shards what was written in place to unsharded parameters, if anything was.

        See [Note: written while whole].
        """
        if list(map(version_of, self.registration.wholes)) != self.registration.whole_versions:
            self._write_back()

    @torch.inference_mode(False)
    @torch.no_grad()
    def _write_back(self) -> None:
        """Copy this rank's rows to its shards, of each parameter that was written while whole."""
        written = self.registration.take_whole_writes()
        for param in self._flat_params:
            assert param.unsharded is not None
            forms = param.unsharded, torch_dtensor.local_part(param.unsharded)
            if not any(form is one for form in forms for one in written):
                continue  # a parameter that was not written while whole may have a newer shard
            rows, shard = own_rows(param, param.unsharded, self.data.shard.rank), param.local
            assert shard is not None
            kept = shard.to(rows.device)
            if kept.dtype is not rows.dtype:  # what did not change keeps its precision
                rows = torch.where(rows == kept.to(rows.dtype), kept, rows.to(kept.dtype))
            shard.copy_(rows)
        self.context.streams.order_after_compute("gather")

    def show_shards(self) -> None:
        """Register the sharded parameters, whatever stays in memory. See [Note: between steps]."""
        if not self.registration.is_held:
            self.registration.show(SHARDED)

    def _drop_gather(self) -> None:
        """Wait for the gather that is in flight, and forget what it brought."""
        assert self.gathering is not None
        assert self._full is not None
        self.gathering.wait()
        self.context.streams.retire("gather", self.gathering.buffers)
        self.gathering = None
        self._full.free()
        for buffer in self._shard_buffers:
            buffer.free_gathered()

    def release_early(self, skips_backward: bool) -> None:
        """Count as sharded from now on. See [Note: released early] in ``early_release``.

        ``skips_backward``: no pre-backward gathers it before it is resharded.
        """
        if self.registration.state is SHARDED and not skips_backward:
            return
        self.early.is_released = True
        self.early.skips_backward |= skips_backward  # what all ranks decided, whatever each freed
        self.registration.values = None
        if self.registration.state is UNSHARDED and self.is_unread():
            assert self._full is not None
            self.take_writes()
            self.registration.move(SHARDED, self.fqn)
            self.context.streams.hold_back(self._full.stream)
            self._full.free()

    def is_unread(self) -> bool:
        """True if nothing on this rank reads the unsharded parameters any more, this is certain."""
        readers, full = self.early.readers, self._full
        if readers is None or full is None or not readers.are_known or self.registration.placed:
            return False
        self.registration.show(SHARDED)
        is_unread = readers.are_gone(full, [param.unsharded for param in self.params])
        self._show_whole()
        return is_unread

    def reshard_post_forward(self) -> None:
        """Reshard to the smaller mesh, if there is one, else fully."""
        waiting = self.post_forward.buffer
        if waiting is None or self.registration.state is not UNSHARDED:
            self.reshard()
            return
        self.take_writes()
        self.registration.note_values(Serves.BACKWARDS)
        layout = waiting.layout
        waiting.flat.untyped_storage().resize_(layout.shard_nbytes)
        with torch.no_grad():
            for param, item, shard in zip(self.params, layout.items, waiting.shards, strict=False):
                whole = torch_dtensor.local_part(param.unsharded.detach())  # type: ignore[union-attr]  # planned
                shard.copy_(packing.shard_of(whole, item.shard, waiting.axis.rank))
            waiting.write_tail()
        self.context.streams.order_after_compute("gather")
        self.registration.move(SHARDED_POST_FORWARD, self.fqn)
        self._give_up_full()

    def _give_up_full(self) -> None:
        full = self._full
        assert full is not None
        if full.stream is not None:
            self.context.streams.hold_back(full.stream)
        full.free()
        if self._tail.items:
            self._tail.free()
        if events.listeners:
            events.emit("reshard", self.fqn, self.context.phase, full.nbytes)

    def reduce(self, with_graph: bool) -> Reduction | None:
        """Pack local gradients. Returns the reduction to start, or None while sync is off."""
        self.reducer.unreduced.is_owed = not self.settings.reduce_grads
        if not (self.settings.reduce_grads and self.settings.all_reduce_grads):
            optimizer_steps.note_unreduced(self)
        reduction = self.reducer.reduce(self.settings, self.context.streams, with_graph)
        if reduction is not None and events.listeners:
            events.emit("reduce", self.fqn, self.context.phase, reduction.nbytes)
        return reduction

    @property
    def has_unreduced(self) -> bool:
        """True if gradients are here that no reduction has taken."""
        reducer = self.reducer
        return reducer.has_local_gradients or reducer.unreduced.partial is not None

    def refuse_hidden_gradients(self) -> None:
        """Raise StateError if gradients came here that nobody will reduce.

        Call it after a forward of which no output told of a backward, and no backward of the tree.
        """
        if self.has_unreduced and not self.reducer.unreduced.is_waiting:
            raise StateError(
                "FS321",
                f"{self.fqn or '<root>'}: a backward left gradients on its unsharded parameters, "
                "and nothing told that it began: what the forward returned held no tensor with a "
                "gradient. So no gradient was reduced. Return the tensors that backward begins "
                "from, or put them on an attribute of the module. zero_grad() on the model drops "
                "the gradients that came.",
            )

    def __getstate__(self) -> dict[str, Any]:
        """Copies carry the recipe; buffers come back by adoption. See [Note: one plan]."""
        kept = ["data", "policy", "settings", "fqn", "params"]
        state = {name: getattr(self, name) for name in kept}
        state["device"], state["offload"] = self.device, self.residence.offload
        state["wire"], state["hook"] = self.wire, self.reducer.hook
        state["part"], state["readers"] = self.early.part, self.early.readers
        smaller = self.post_forward.mesh
        return {**state, "smaller": None if smaller is None else smaller.shard.size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(  # type: ignore[misc]  # not a new object
            state["data"], state["policy"], state["device"], state["offload"]
        )
        self.settings, self.fqn = state["settings"], state["fqn"]
        self.early.part, self.early.readers = state["part"], state["readers"]
        self.reducer.wire, self.reducer.hook = state["wire"], state["hook"]
        if self.wire.uses_group_memory:
            self.wire.use_group_memory(self.data.shard.pg)
        size = state["smaller"]
        if size is not None:
            self._wait_on(self.data.split(size))
        self.params.extend(state["params"])
        for param in self.params:
            param.registration = self.registration

    observed_as: ClassVar[Mapping[str, Callable[..., Any]]] = {
        "enroll": enroll,
        "unshard": unshard,
        "wait_for_unshard": wait_for_unshard,
        "reshard": reshard,
        "reshard_post_forward": reshard_post_forward,
        "release_early": release_early,
        "reduce": reduce,
        "adopt": _adopt,
    }

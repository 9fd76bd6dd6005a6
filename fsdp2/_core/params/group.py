"""Parameters that communicate together: ``unshard``, ``wait_for_unshard``, ``reshard``.

Owns the moves between sharded and whole parameters. It must not know hooks, autograd or other
groups: whoever calls decides when. Where parameters lie is planned in ``planning``.

[Note: between steps]
Between steps ``parameters()`` are the shards, so that an optimizer made there trains them. Memory
is another matter: a group may keep its whole parameters for the next forward or backward (by
choice, or because a recorded graph reads them). Then it *shows* its shards: they are registered,
and the state stays UNSHARDED. They serve the backwards of the forward that they stayed from. The
next forward gathers again: what is written to ``.data``, a NumPy array or a local tensor counts no
version, so nobody knows whether the shards still have the gathered values. It takes what stayed
only if the user asked for that: by ``unshard()``, by ``set_reshard_after_backward(False)``, by
``set_reshard_after_forward(False)`` from one forward without gradients to the next, by
``reshard_after_forward=False`` in a pipeline, of which many forwards run before their backwards, or
by ``shard``, until the next step ([Note: until the next step] in ``_core/engine/tree``).
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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fsdp2._core.agreement.stamp import CollectiveIds
from fsdp2._core.base import events, torch_dtensor
from fsdp2._core.base.capabilities import ZeroCopy, capabilities
from fsdp2._core.base.events import BACKWARD, IDLE, Observable
from fsdp2._core.base.policy import MixedPrecisionPolicy, OffloadPolicy, Residence, Settings
from fsdp2._core.base.torch_autograd import version_of
from fsdp2._core.comm.mesh import DataMesh
from fsdp2._core.comm.wire import InFlight, StepContext, Streams, Wire
from fsdp2._core.params.buffers import ShardBuffer
from fsdp2._core.params.deals import start_anew
from fsdp2._core.params.early_release import EarlyRelease
from fsdp2._core.params.functional_call import whole_tensor
from fsdp2._core.params.param import FSDPParam
from fsdp2._core.params.planning import (
    Buffers,
    Source,
    own_rows,
    own_sources,
    refuse_smaller,
    source_of,
)
from fsdp2._core.params.reduce import Reducer
from fsdp2._core.params.registration import (
    FORM_SHARDED,
    FORM_UNSHARDED,
    GATHERING,
    RELEASED,
    SHARDED,
    SMALLER,
    WHOLE,
    GroupState,
    Registration,
    Serves,
)


@dataclass(slots=True)
class Gather:
    """An all-gather for which nobody has waited."""

    flight: InFlight
    source: ShardBuffer
    came_from: GroupState


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
        self.ids = CollectiveIds(data, device)
        self.reducer = Reducer(self.params, data, self.residence, self.ids)
        self.wire.zero_copy = capabilities(device).zero_copy(data.shard.size)
        self.buffers = Buffers(self.params, data, policy, self.residence, self.ids)
        self.registration = Registration(self.params)
        self.early = EarlyRelease()
        self._gather: Gather | None = None  # while the state is GATHERING

    @property
    def wire(self) -> Wire:
        """What the group sends over."""
        return self.reducer.wire

    def rewire(self) -> None:
        """Take notice of what changed on the wire: every rank does so between the same steps."""
        if self.state is GATHERING:  # a gather that was issued by hand carries the old number
            self._drop_gather()
        self.context.streams.finish_host_reads()  # numbers are written into the memory of shards
        self.buffers.number(self.wire)
        self.reducer.planner.invalidate()

    def send_zero_copy(self, rule: ZeroCopy | None) -> None:
        """Let parameters that fit a rule travel in a collective of their own; None: none does."""
        if rule != self.wire.zero_copy:
            self.reshard()
            self.wire.zero_copy = rule
            self._plan(own_sources(self.params))

    def enroll(self, fqn: str) -> None:
        """Take the name that the unit has in its tree, and numbers for its collectives.

        Not earlier: whoever copies a model on one rank alone, and never runs it, takes no numbers.
        """
        # a copy was told to be separate, and has no process group yet
        if self.wire.is_separate and self.wire.scatter_group is None:
            self.reducer.planner.separate(True, self.wire)
        self.fqn = fqn
        start_anew(self.data.shard.pg)
        self.ids.enroll(fqn)
        self.rewire()

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
        self.buffers.compute_by(policy)
        for param in self.params:
            param.compute_by(policy)
        self._plan(own_sources(self.params))

    def release(self, params: Sequence[FSDPParam]) -> None:
        """Give parameters up; another group takes them. A group of none is not used any more."""
        self.params[:] = [param for param in self.params if param not in params]
        if self.params:
            self._plan(own_sources(self.params))

    def follow_storage(self) -> None:
        """Keep the memory of unsharded parameters, or free it, as the settings say from now on."""
        full = self.buffers.full
        if full is not None:
            full.is_fixed = self.settings.keep_unsharded_storage
            if self.state in (SHARDED, SMALLER):
                full.free()

    def keep_memory(self, stays: bool) -> None:
        """Let the memory of unsharded parameters outlive reshards from now on, or no longer."""
        full = self.buffers.full
        if full is not None and (self.is_unsharded or not stays):
            full.is_read_later = stays
            self.context.streams.hold_back(full.stream)
            self.follow_storage()

    def reshard_to(self, size: int | None) -> None:
        """Reshard to ``size`` neighbours after forward from now on; None: to the whole axis.

        Collective, if the smaller mesh does not exist yet.
        """
        if size is not None:
            refuse_smaller([p for p in self.params if p.is_extended or p.placement.layout.is_dealt])
        smaller = None if size is None else self.data.split(size)
        if smaller is not self.buffers.post_forward.mesh:
            self.reshard()
            self.buffers.wait_on(smaller)
            self._plan(own_sources(self.params))

    def _plan(self, sources: Sequence[Source]) -> None:
        """Lay the group out for the dtypes and the device of ``sources``, and register shards."""
        self.buffers.plan(sources, self.wire, self.fqn)
        self.reducer.planner.invalidate()
        if self.early.readers is not None:
            self.early.readers.forget()
        self.registration.see()
        self.registration.show(FORM_SHARDED)

    def prepare_unsharded(self) -> None:
        """Have unsharded parameters, of memory that is freed: gradients may wait on them."""
        if self.buffers.full is not None:
            return
        buffers, streams = self.buffers, self.context.streams
        if buffers.has_late_extension:
            self._plan(own_sources(self.params))
            streams.order_after_compute("gather")
        full = buffers.build_full(self.wire, self.settings.keep_unsharded_storage)
        self.registration.see_whole(param.unsharded for param in buffers.flat_params)
        # of a part, references are counted while there are none but ours
        readers = self.early.readers
        if (
            readers is not None
            and not buffers.open_tail.items
            and buffers.post_forward.mesh is None
        ):
            readers.meet(full, [param.unsharded for param in self.params], streams.current)

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
            readers.follow(wholes, self.context.streams.current)
        registration = self.registration
        stays = registration.values is not None and not recomputing
        if stays and (not registration.serves_this_forward or registration.were_written):
            self.reshard()
        changes = registration.detect_changes()
        if changes.toggled:
            self.toggle(changes.toggled)
        if changes.cast:  # by the model's own forward: what is unsharded lies elsewhere now
            self.reshard()
            self.buffers.full = None
        if changes.replaced:
            self._adopt(changes.replaced)

    def toggle(self, params: list[FSDPParam]) -> None:
        """Carry a changed ``requires_grad`` to every form of each parameter."""
        self.reducer.planner.refuse_toggle(params)
        for param in params:
            param.toggle()
        self.reducer.planner.invalidate()
        self.reducer.prepare(self.settings)  # at once: other ranks may stand in for it

    def _adopt(self, replaced: dict[FSDPParam, Tensor | None]) -> None:
        """Take over parameters that were replaced. See [Note: one plan] in ``planning``."""
        rank = self.data.shard.rank
        for param, new in replaced.items():
            if new is not None and new.requires_grad is not param.trainable:
                self.reducer.planner.refuse_toggle([param])
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

    # The moves.

    @property
    def state(self) -> GroupState:
        return self.registration.state

    @property
    def is_unsharded(self) -> bool:
        """True if a forward or backward can go on without a gather: on every rank, or on none."""
        return self.registration.state is WHOLE

    def _lend(self) -> None:
        """Register what stands in for unsharded parameters in a forward that begins."""
        for item in self.registration.place_stand_ins():
            item.site.put(whole_tensor(item.tensor, item.param, self.reducer, self.settings))

    def unshard(self) -> None:
        """Issue the all-gather, unless the parameters are whole or on their way."""
        if self.early.skips_backward or self.registration.state is RELEASED:
            self.reshard()
        came_from = self.registration.state
        if came_from is GATHERING or came_from is WHOLE:
            return
        buffers = self.buffers
        if buffers.home is None:  # a copy, gathered ahead of its own first forward
            self.inspect()
        if buffers.full is None:
            self.prepare_unsharded()
        source = buffers.home if came_from is SHARDED else buffers.post_forward.buffer
        assert source is not None
        phase = self.context.phase
        if phase is IDLE or (phase is BACKWARD and not self.settings.reshard_after_backward):
            # In a forward, the values of those that stay are noted at its end.
            self.registration.note_values(Serves.FORWARDS)
        if events.listeners:
            nbytes = source.gathered_nbytes
            events.emit("unshard", self.fqn, self.context.phase, nbytes)
        if source.tail is not None:
            source.tail.before()
        wire = self.reducer.wire
        layout = source.layout
        if (layout.zero_copy or layout.pieces) and source.gathers_zero_copy:
            assert buffers.full is not None
            buffers.full.allocate(source.layout.full_nbytes, self.context.streams.current)
            # compute may still read the memory that the gather writes to
            self.context.streams.order_after_compute("gather")
        gather = buffers.gather_extended if buffers.open_tail.items else source.gather
        streams = self.context.streams
        flight = streams.launch("gather", gather, wire, streams.async_op)
        self._gather = Gather(flight, source, came_from)
        self.registration.move(GATHERING, self.fqn)
        if self.residence.is_away:
            streams.host_read = flight  # the last one: a lane runs in order

    def wait_for_unshard(self) -> None:
        """Finish the all-gather: afterwards the unsharded parameters are registered and whole."""
        if self.registration.state is WHOLE:
            self.registration.show(FORM_UNSHARDED)
            if self.registration.stand_ins:
                self._lend()
            if self.reducer.has_waited or not self.settings.reduce_grads:
                self.reducer.begin_sums(self.settings)
            return
        if self._gather is None or self.early.skips_backward:
            self.unshard()
        gather, buffers, streams = self._gather, self.buffers, self.context.streams
        full = buffers.full
        assert gather is not None
        assert full is not None
        gather.flight.wait()
        gathered, self._gather = gather.flight.buffers, None
        try:
            full.fill(gather.source, gathered, streams.current)
            if buffers.open_tail.items:
                buffers.open_tail.arrived(gathered[2])
                self.reducer.planner.see_dtypes()
        except BaseException:  # ranks differ, or an extension raised
            streams.retire("gather", gathered)
            full.free()
            self.registration.move(gather.came_from, self.fqn)
            raise
        streams.retire("gather", gathered)
        if gather.came_from is SMALLER:
            buffers.post_forward.free()
        self.registration.move(WHOLE, self.fqn)
        if self.registration.stand_ins:
            self._lend()
        if self.reducer.has_waited or not self.settings.reduce_grads:
            self.reducer.begin_sums(self.settings)
        if events.listeners:
            events.emit("wait_for_unshard", self.fqn, self.context.phase)

    def reshard(self) -> None:
        """Register the sharded parameters and free the unsharded ones."""
        self.early.skips_backward = self.registration.is_held = False
        self.registration.values = None
        if self._gather is not None:
            self._drop_gather()
        state = self.registration.state
        if state is SHARDED:
            return
        if state is SMALLER:
            self.buffers.post_forward.free()
        else:
            self.take_writes()
        self.registration.move(SHARDED, self.fqn)
        self._give_up_full()

    def take_writes(self) -> None:
        """Copy to the shards what was written in place to unsharded parameters, if anything was.

        See [Note: written while whole].
        """
        if list(map(version_of, self.registration.wholes)) != self.registration.whole_versions:
            self.buffers.write_back(self.registration.take_whole_writes())
            self.context.streams.order_after_compute("gather")

    def _drop_gather(self) -> None:
        """Wait for the gather that is in flight, and forget what it brought."""
        gather, full = self._gather, self.buffers.full
        assert gather is not None
        assert full is not None
        gather.flight.wait()
        self.context.streams.retire("gather", gather.flight.buffers)
        self._gather = None
        self.registration.move(gather.came_from, self.fqn)
        full.free()
        for buffer in self.buffers.all:
            buffer.free_gathered()

    def release_early(self, skips_backward: bool) -> None:
        """Count as sharded from now on. See [Note: released early] in ``early_release``.

        ``skips_backward``: no pre-backward gathers it before it is resharded.
        """
        self.early.skips_backward |= skips_backward  # what all ranks decided, whatever each freed
        self.registration.values = None
        if self.registration.state is not WHOLE:
            return
        self.registration.move(RELEASED, self.fqn)
        if self.is_unread():
            full = self.buffers.full
            assert full is not None
            self.take_writes()
            self.registration.move(SHARDED, self.fqn)
            self.context.streams.hold_back(full.stream)
            full.free()

    def is_unread(self) -> bool:
        """True if it is certain that nothing on this rank reads unsharded parameters any more."""
        readers, full = self.early.readers, self.buffers.full
        if readers is None or full is None or not readers.are_known or self.registration.placed:
            return False
        self.registration.show(FORM_SHARDED)
        is_unread = readers.are_gone(full, [param.unsharded for param in self.params])
        self.registration.show(FORM_UNSHARDED)
        return is_unread

    @property
    def may_stay(self) -> bool:
        """True if whole parameters, or shards over the smaller mesh, may serve several forwards."""
        return self.settings.sharding.keeps_whole or self.buffers.post_forward.mesh is not None

    @property
    def stays(self) -> bool:
        """True if whole parameters, or shards over the smaller mesh, outlive a backward."""
        settings = self.settings
        return not settings.reshard_after_backward or (settings.accumulates and self.may_stay)

    def reshard_after_backward(self) -> None:
        """Stay for the next micro-batch, whole or on the smaller mesh, if settings say so."""
        if self.stays:
            registration = self.registration
            if registration.state is WHOLE and not self.settings.sharding.keeps_whole:
                self.reshard_post_forward()
            if registration.state is WHOLE or registration.state is SMALLER:
                registration.is_held = False
                self.keep(Serves.ACCUMULATION)
                return
        self.reshard()

    def keep(self, serves: Serves) -> None:
        """Let what is in memory stay. Shards get what was written while they were not shown.

        At once: whoever writes to the shards next would lose it to what is taken over later.
        """
        if self.registration.state is WHOLE:
            self.take_writes()
        self.registration.note_values(serves)

    def reshard_post_forward(self) -> None:
        """Reshard to the smaller mesh, if there is one, else fully."""
        waiting = self.buffers.post_forward.buffer
        if waiting is None or self.registration.state is not WHOLE:
            self.reshard()
            return
        self.take_writes()
        self.registration.note_values(Serves.BACKWARDS)
        self.buffers.shrink()
        self.context.streams.order_after_compute("gather")
        self.registration.move(SMALLER, self.fqn)
        self._give_up_full()

    def _give_up_full(self) -> None:
        full, tail = self.buffers.full, self.buffers.open_tail
        assert full is not None
        if full.stream is not None:
            self.context.streams.hold_back(full.stream)
        full.free()
        if tail.items:
            tail.free()
        if events.listeners:
            events.emit("reshard", self.fqn, self.context.phase, full.nbytes)

    def __getstate__(self) -> dict[str, Any]:
        """Copies carry the recipe; buffers come back by adoption, see ``planning``."""
        kept = ["data", "policy", "settings", "fqn", "params"]
        state = {name: getattr(self, name) for name in kept}
        state["device"], state["offload"] = self.residence.compute, self.residence.offload
        state["wire"], state["hook"] = self.wire, self.reducer.hook
        state["part"], state["readers"] = self.early.part, self.early.readers
        smaller = self.buffers.post_forward.mesh
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
            self.buffers.wait_on(self.data.split(size))
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
        "adopt": _adopt,
    }

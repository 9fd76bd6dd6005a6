"""Parameters that communicate together: ``unshard``, ``wait_for_unshard``, ``reshard``.

Performs the transitions between sharded and unsharded parameters; the caller decides when. Contains
no hook or autograd code, and is independent of other groups. ``planning`` plans the memory layout.

[Note: between steps]
Between steps, ``parameters()`` returns the shards, so that an optimizer created then trains them.
A group may still keep its unsharded parameters in memory for the next forward or backward (because
of a setting, or because a recorded graph reads them). It then *shows* its shards: the shards are
registered while the state stays WHOLE. Kept parameters are used by the backwards of the forward
that gathered them. The next forward gathers again, because the shards may have new values: writes
through ``.data``, a NumPy array or a local tensor do not increment a version. A later forward
reuses kept parameters only if the user requested this, by ``unshard()``;
``set_reshard_after_backward(False)``; ``set_reshard_after_forward(False)``, from one forward
without gradients to the next; ``reshard_after_forward=False`` in a pipeline, which runs many
forwards before their backwards; or ``shard=``, until the next step ([Note: until the next step] in
``_core/engine/tree``). Even then, a forward gathers again if versions of shards have changed. Only
a manual ``unshard()`` *holds* unsharded parameters: they stay registered until ``reshard()``, the
unit's next forward, or the end of a backward of its root.

[Note: written while whole]
A forward may write to its parameters in place: clamp a weight, renormalize an embedding, or update
a codebook. The write increments the version of the unsharded parameter. Before the parameter is
freed, each rank copies the changes in its own rows to its shard. All ranks must therefore write the
same values, as with replicas of a plain model. Writes are lost if the forward or backward raises.
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
from fsdp2._core.params.buffers import EarlyRelease, ShardBuffer
from fsdp2._core.params.deals import start_anew
from fsdp2._core.params.functional_call import whole_tensor
from fsdp2._core.params.param import FSDPParam
from fsdp2._core.params.planning import (
    Buffers,
    Source,
    own_rows,
    own_sources,
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
    flight: InFlight
    source: ShardBuffer
    came_from: GroupState


class ParamGroup(Observable):
    """Parameters that share one layout, one mesh and one state."""

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
        self.settings = Settings()  # the unit's settings, frozen: a change replaces the object
        self.context = StepContext(Streams())  # replaced in the first forward
        self.fqn = ""  # the unit's name, for messages
        self.params: list[FSDPParam] = []  # in registration order, the same on all ranks
        self.ids = CollectiveIds(data, device)
        self.reducer = Reducer(self.params, data, self.residence, self.ids)
        self.wire.zero_copy = capabilities(device).zero_copy(data.shard.size)
        self.buffers = Buffers(self.params, data, policy, self.residence, self.ids)
        self.registration = Registration(self.params)
        self.early = EarlyRelease()
        self._gather: Gather | None = None  # while the state is GATHERING

    @property
    def wire(self) -> Wire:
        return self.reducer.wire

    def rewire(self) -> None:
        """Apply changes to the wire. All ranks must call this between the same two steps."""
        self.drop_gather()  # one that the caller issued has the old number
        self.context.streams.finish_host_reads()  # new numbers are written to the shards' memory
        if self.buffers.home is not None and self.buffers.rule != self.buffers.rule_for(self.wire):
            self.reshard()
            self._plan(own_sources(self.params))
        self.buffers.number(self.wire)
        self.reducer.current_plan = None

    def send_by(self, wire: Wire) -> None:
        """Replace the wire. All ranks must call this between the same two steps."""
        self.reshard()
        self.reducer.wire = wire
        self.rewire()

    def send_zero_copy(self, rule: ZeroCopy | None) -> None:
        """Set the rule for sending parameters in separate collectives; None: always pack."""
        if rule != self.wire.zero_copy:
            self.wire.zero_copy = rule
            self.rewire()

    def enroll(self, fqn: str) -> None:
        """Set the unit's name in its tree, and number its collectives. Called in the first forward,
        so that a copy of the model that exists on one rank only, and never runs, has no numbers."""
        # a copied group does not have the separate process group of the original
        if self.wire.is_separate and self.wire.scatter_group is None:
            self.reducer.separate(True)
        self.fqn = fqn
        start_anew(self.data.shard.pg)
        self.ids.enroll(fqn)
        self.rewire()

    # Planning and adoption.

    def shard(self, params: Sequence[FSDPParam]) -> None:
        """Add parameters: copy this rank's rows to the flat buffer, and register the shards. Each
        parameter is unsharded (possibly tensor-parallel), or a shard released by another group."""
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
        self.reshard()
        self.policy = policy
        self.buffers.compute_by(policy)
        for param in self.params:
            param.follow(policy)
        self._plan(own_sources(self.params))

    def release(self, params: Sequence[FSDPParam]) -> None:
        """Remove parameters that another group takes over. A group left empty is not used again."""
        self.params[:] = [param for param in self.params if param not in params]
        if self.params:
            self._plan(own_sources(self.params))

    def keep_memory(self, is_read_later: bool | None = None) -> None:
        """Apply ``keep_unsharded_storage`` to the memory of unsharded parameters.
        ``is_read_later``: a backward may read the memory after a reshard; None: unchanged."""
        full = self.buffers.full
        if full is None or (is_read_later and not self.is_unsharded):
            return
        if is_read_later is not None:
            full.is_read_later = is_read_later
            self.context.streams.hold_back(full.stream)
        full.is_fixed = self.settings.keep_unsharded_storage
        if self.state in (SHARDED, SMALLER):
            full.free()

    def reshard_to(self, size: int | None) -> None:
        """Set the mesh size for reshards after forward (None: the full axis). Collective."""
        smaller = None if size is None else self.data.split(size)
        if smaller is not self.buffers.post_forward.mesh:
            self.reshard()
            self.buffers.wait_on(smaller)
            self._plan(own_sources(self.params))

    def _plan(self, sources: Sequence[Source]) -> None:
        self.buffers.plan(sources, self.wire, self.fqn)
        self.reducer.current_plan = None
        if self.early.readers is not None:
            self.early.readers.forget()
        self.registration.see()
        self.registration.show(FORM_SHARDED)

    def prepare_unsharded(self) -> None:
        """Create the unsharded parameters without memory, so that they can hold gradients."""
        if self.buffers.full is not None:
            return
        buffers, streams = self.buffers, self.context.streams
        if buffers.has_late_extension:
            self._plan(own_sources(self.params))
            streams.order_after_compute("gather")
        full = buffers.build_full(self.wire, self.settings.keep_unsharded_storage)
        self.registration.see_whole(param.unsharded for param in buffers.flat_params)
        readers = self.early.readers  # count a part's references before other code adds any
        if (
            readers is not None
            and not buffers.open_tail.items
            and buffers.post_forward.mesh is None
        ):
            readers.meet(full, [param.unsharded for param in self.params], streams.current)

    def inspect(self, recomputing: bool = False) -> None:
        """Detect and apply user changes to the registered parameters, before a forward's unshard.
        A new ``nn.Parameter`` is adopted; any other tensor is a placeholder for one forward
        (``functional_call``). A recomputation reuses the parameters gathered for its backward."""
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
            self.reducer.toggle(changes.toggled, self.settings)
        if changes.cast:  # the model's forward has cast the unsharded parameters
            self.reshard()
            self.buffers.full = None
        if changes.replaced:
            self._adopt(changes.replaced)

    def _adopt(self, replaced: dict[FSDPParam, Tensor | None]) -> None:
        """Adopt new parameters. See [Note: one plan] in ``planning``."""
        rank = self.data.shard.rank
        for param, new in replaced.items():
            if new is not None and new.requires_grad is not param.trainable:
                self.reducer.refuse_toggle([param])
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

    # Transitions.

    @property
    def state(self) -> GroupState:
        return self.registration.state

    @property
    def is_unsharded(self) -> bool:
        """Return True if forward and backward need no gather. The result is equal on all ranks."""
        return self.registration.state is WHOLE

    def _begin_use(self) -> None:
        """Register unsharded forms of placeholders, and prepare the accumulation of gradients."""
        reducer, settings = self.reducer, self.settings
        if self.registration.placeholders:
            for item in self.registration.place_placeholders():
                item.site.put(whole_tensor(item.tensor, item.param, reducer, settings))
        if reducer.has_waited or not settings.reduce_grads:
            reducer.begin_sums(settings)

    def unshard(self) -> None:
        """Issue the all-gather, unless the parameters are unsharded or being gathered."""
        if self.early.skips_backward or self.registration.state is RELEASED:
            self.reshard()
        came_from = self.registration.state
        if came_from is GATHERING or came_from is WHOLE:
            return
        buffers = self.buffers
        if buffers.home is None:  # a copied group, gathered before its first forward
            self.inspect()
        if buffers.full is None:
            self.prepare_unsharded()
        source = buffers.home if came_from is SHARDED else buffers.post_forward.buffer
        assert source is not None
        phase = self.context.phase
        if phase is IDLE or (phase is BACKWARD and not self.settings.reshard_after_backward):
            # a forward that keeps the parameters records the versions at its end
            self.registration.note_values(Serves.FORWARDS)
        if events.listeners:
            nbytes = source.gathered_nbytes
            events.emit("unshard", self.fqn, self.context.phase, nbytes)
        if source.tail is not None:
            source.tail.before()
        wire = self.reducer.wire
        layout = source.layout
        if layout.zero_copy or layout.landing.start is not None:  # written by the collective itself
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
            streams.host_read = flight  # waiting for the last flight suffices: a lane runs in order

    def wait_for_unshard(self) -> None:
        """Complete the all-gather, and register the unsharded parameters."""
        if self.registration.state is WHOLE:
            self.registration.show(FORM_UNSHARDED)
            self._begin_use()
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
            full.allocate(gather.source.layout.full_nbytes, streams.current)
            gather.source.unpack(*gathered)
            if buffers.open_tail.items:
                buffers.open_tail.arrived(gathered[2])
                self.reducer.see_dtypes()
        except BaseException:  # ranks issued different operations, or an extension raised
            streams.retire("gather", gathered)
            full.free()
            self.registration.move(gather.came_from, self.fqn)
            raise
        streams.retire("gather", gathered)
        if gather.came_from is SMALLER:
            buffers.post_forward.free()
        self.registration.move(WHOLE, self.fqn)
        self._begin_use()
        if events.listeners:
            events.emit("wait_for_unshard", self.fqn, self.context.phase)

    def reshard(self) -> None:
        """Register the sharded parameters and free the unsharded ones."""
        self.early.skips_backward = self.registration.is_held = False
        self.registration.values = None
        if self._gather is not None:
            self.drop_gather()
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
        """Copy in-place writes to the shards. See [Note: written while whole]."""
        if list(map(version_of, self.registration.wholes)) != self.registration.whole_versions:
            self.buffers.write_back(self.registration.take_whole_writes())
            self.context.streams.order_after_compute("gather")

    def drop_gather(self, has_run: bool = True) -> None:
        """Drop any gather in flight. ``has_run``: False if it was captured, and never ran."""
        gather, full = self._gather, self.buffers.full
        if gather is None:
            return
        assert full is not None
        if not has_run:
            gather.flight = InFlight(())
        gather.flight.wait()
        self.context.streams.retire("gather", gather.flight.buffers)
        self._gather = None
        self.registration.move(gather.came_from, self.fqn)
        full.free()
        for buffer in self.buffers.all:
            buffer.free_gathered()

    def release_early(self, skips_backward: bool) -> None:
        """Make the group count as sharded; see [Note: released early] in ``buffers``.
        ``skips_backward``: pre-backward hooks do not gather the group until the next reshard."""
        self.early.skips_backward |= skips_backward  # set on all ranks, even if memory is not freed
        self.registration.values = None
        if self.registration.state is not WHOLE:
            return
        self.registration.move(RELEASED, self.fqn)
        if self.early.is_unread(self.buffers.full, self.registration):
            full = self.buffers.full
            assert full is not None
            self.take_writes()
            self.registration.move(SHARDED, self.fqn)
            self.context.streams.hold_back(full.stream)
            full.free()

    @property
    def may_stay(self) -> bool:
        """Return True if several forwards may share unsharded parameters or smaller-mesh shards."""
        return self.settings.sharding.keeps_whole or self.buffers.post_forward.mesh is not None

    @property
    def stays(self) -> bool:
        """Return True if unsharded parameters or smaller-mesh shards are kept after a backward."""
        settings = self.settings
        return not settings.reshard_after_backward or (settings.accumulates and self.may_stay)

    def keep(self, serves: Serves) -> None:
        """Copy in-place writes to the shards; keep the parameters for the uses in ``serves``."""
        if self.registration.state is WHOLE:
            self.take_writes()
        self.registration.note_values(serves)

    def reshard_post_forward(self) -> None:
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
        """Copies contain only the configuration; adoption rebuilds the buffers."""
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

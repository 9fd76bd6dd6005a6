"""Faults that the simulator must find: changes of the package's order of streams, mostly.

Data for `scripts/sim --faults`, beside `tests.lab.faults`, whose faults the other tests find on a CPU.
`tests.lab.plant` finds their places. `expected` is the kind of report: RACE and REUSE are about what
waits for what; HOST about pinned memory that both sides use; WAIT is a wait of the host in a steady
step; VALUE a difference from the host's values; ERROR an exception.
"""

# ruff: noqa: E501  # patterns are the package's own lines

from __future__ import annotations

from dataclasses import dataclass

from tests.lab.faults import Fault

KINDS = ("RACE", "REUSE", "HOST", "WAIT", "VALUE", "ERROR")


@dataclass(frozen=True)
class SimFault(Fault):
    """A change, the scenario that must find it, and what is reported then."""

    near: tuple[str, ...] = ()
    scenario: str = ""
    expected: str = ""


FAULTS = [
    # Lanes, their events, and the buffers they hold.
    SimFault(
        "lane-does-not-wait-for-what-is-before",
        "fsdp2/_core/comm/device_streams.py",
        "DeviceStreams.launch",
        """
        if after is not None:
            after.hold_back(stream)
        """,
        "",
        "A launch begins before the launch that it follows: replicas are summed before the shards are.",
        scenario="replicas",
        expected="RACE",
    ),
    SimFault(
        "retired-buffers-are-not-waited-for",
        "fsdp2/_core/comm/device_streams.py",
        "DeviceStreams.launch",
        """
        for held in retired[:-1]:
            held.hold_back(stream)
        """,
        "",
        "A gather gets the memory of the last one while compute still copies out of it.",
        scenario="fp32",
        expected="REUSE",
    ),
    SimFault(
        "retired-behind-the-lane-itself",
        "fsdp2/_core/comm/device_streams.py",
        "DeviceStreams.retire",
        """
        event = torch.accelerator.current_stream().record_event()
        self._retired[lane].append(InFlight(buffers).end_with(event))
        """,
        """
        event = self._lanes[lane].record_event()
        self._retired[lane].append(InFlight(buffers).end_with(event))
        """,
        "Buffers are held until the lane has got so far, and not compute, which reads them.",
        scenario="fp32",
        expected="REUSE",
    ),
    SimFault(
        "lane-does-not-wait-for-compute",
        "fsdp2/_core/comm/device_streams.py",
        "DeviceStreams.order_after_compute",
        "self._lanes[lane].wait_stream(torch.accelerator.current_stream())",
        "self._lanes[lane].record_event()",
        "Shards are gathered while the optimizer writes them, gradients reduced while backward does.",
        scenario="fp32",
        expected="RACE",
    ),
    SimFault(
        "compute-waits-for-the-lane",
        "fsdp2/_core/comm/device_streams.py",
        "DeviceStreams.order_after_compute",
        "self._lanes[lane].wait_stream(torch.accelerator.current_stream())",
        "torch.accelerator.current_stream().wait_stream(self._lanes[lane])",
        "The wrong stream waits.",
        scenario="fp32",
        expected="RACE",
    ),
    SimFault(
        "launch-recorded-before-it-is-issued",
        "fsdp2/_core/comm/device_streams.py",
        "DeviceStreams.launch",
        """
        flight = issue(*args)
        flight.wait()
        flight.end_with(stream.record_event())
        """,
        """
        event = stream.record_event()
        flight = issue(*args)
        flight.wait()
        flight.end_with(event)
        """,
        "Who waits for a launch waits for what was before it.",
        scenario="fp32",
        expected="RACE",
    ),
    SimFault(
        "work-of-the-users-is-not-waited-for",
        "fsdp2/_core/comm/device_streams.py",
        "DeviceStreams.launch",
        "flight.wait()",
        "",
        "A collective of the user's runs beside its lane, and what is behind it does not wait.",
        scenario="reach_custom_collectives",
        expected="RACE",
    ),
    SimFault(
        "flight-is-not-waited-for",
        "fsdp2/_core/comm/wire.py",
        "InFlight.wait",
        """
        if self._event is not None:
            torch.accelerator.current_stream().wait_event(self._event)
        """,
        "",
        "Compute reads parameters and gradients that have not arrived.",
        scenario="fp32",
        expected="RACE",
    ),
    SimFault(
        "host-does-not-wait-for-a-flight",
        "fsdp2/_core/comm/wire.py",
        "InFlight.synchronize",
        "self._event.synchronize()",
        "self._event.query()",
        "An optimizer on the host reads gradients that are still being copied.",
        scenario="offloaded",
        expected="VALUE",
    ),
    SimFault(
        "buffers-of-the-launch-before-dropped",
        "fsdp2/_core/comm/device_streams.py",
        "DeviceStreams.launch",
        "flight.buffers += after.buffers",
        "flight.buffers += ()",
        "Memory of one lane is free while another one, behind it, reads it.",
        scenario="reach_sums_kept_apart",
        expected="REUSE",
    ),
    SimFault(
        "event-of-the-users-waited-for-by-compute",
        "fsdp2/_core/comm/device_streams.py",
        "DeviceStreams.order_after_event",
        """
        with self._lanes[lane]:
            event.wait()
        """,
        """
        if lane:
            event.wait()
        """,
        "Gathers begin while an optimizer in a stream of its own still writes.",
        scenario="reach_an_optimizer_on_a_stream",
        expected="RACE",
    ),
    SimFault(
        "hook-runs-in-another-lane",
        "fsdp2/_core/comm/device_streams.py",
        "DeviceStreams.lane_of",
        "return name",
        'return "all_reduce"',
        "A hook does not run in the stream that the user gave it, with what the user put there.",
        scenario="reach_a_hook_on_a_stream",
        expected="RACE",
    ),
    SimFault(
        "host-reads-never-finish",
        "fsdp2/_core/comm/wire.py",
        "Streams.finish_host_reads",
        "self.host_read.synchronize()",
        "self.host_read.wait()",
        "The host writes to offloaded shards while they are copied to the device.",
        scenario="reach_writes_after_an_evaluation",
        expected="HOST",
    ),
    # Gathers.
    SimFault(
        "gather-is-not-waited-for",
        "fsdp2/_core/params/group.py",
        "ParamGroup.wait_for_unshard",
        """
        gather.flight.wait()
        gathered, self._gather = gather.flight.buffers, None
        """,
        """
        if self.context.streams.async_op:
            gather.flight.wait()
        gathered, self._gather = gather.flight.buffers, None
        """,
        "Parameters are copied out of a gather that is still running.",
        scenario="reach_a_smaller_mesh",
        expected="RACE",
    ),
    SimFault(
        "gathered-memory-is-not-held",
        "fsdp2/_core/params/group.py",
        "ParamGroup.wait_for_unshard",
        """
        try:
            full.fill(gather.source, gathered, streams.current)
            ...
        except BaseException:
            ...
        streams.retire("gather", gathered)
        """,
        """
        try:
            full.fill(gather.source, gathered, streams.current)
            ...
        except BaseException:
            ...
        """,
        "What was gathered is freed in the lane's stream while compute copies it.",
        scenario="fp32",
        expected="REUSE",
    ),
    SimFault(
        "gather-into-memory-that-compute-still-uses",
        "fsdp2/_core/params/group.py",
        "ParamGroup.unshard",
        'self.context.streams.order_after_compute("gather")',
        "",
        "A gather without copies writes to memory that compute has just given up.",
        scenario="reach_copy_free",
        expected="REUSE",
    ),
    SimFault(
        "whole-memory-freed-beside-its-stream",
        "fsdp2/_core/params/group.py",
        "ParamGroup._give_up_full",
        """
        if full.stream is not None:
            self.context.streams.hold_back(full.stream)
        """,
        "",
        "Memory of whole parameters goes back to a stream that does not know who reads it.",
        scenario="branches_with_no_copies",
        expected="REUSE",
    ),
    SimFault(
        "dropped-gather-is-not-waited-for",
        "fsdp2/_core/params/group.py",
        "ParamGroup._drop_gather",
        """
        gather.flight.wait()
        self.context.streams.retire("gather", gather.flight.buffers)
        """,
        """
        if self.context.streams.async_op:
            gather.flight.wait()
        self.context.streams.retire("gather", gather.flight.buffers)
        """,
        "Memory is given back while a gather in vain still writes to it.",
        scenario="reach_gathers_in_vain",
        expected="REUSE",
    ),
    SimFault(
        "smaller-shards-gathered-while-written",
        "fsdp2/_core/params/group.py",
        "ParamGroup.reshard_post_forward",
        'self.context.streams.order_after_compute("gather")',
        "",
        "Backward gathers shards of the smaller mesh that forward is still copying.",
        scenario="reach_a_smaller_mesh",
        expected="RACE",
    ),
    SimFault(
        "smaller-shards-freed-too-early",
        "fsdp2/_core/params/group.py",
        "ParamGroup.unshard",
        """
        flight = streams.launch("gather", gather, wire, streams.async_op)
        self._gather = Gather(flight, source, came_from)
        """,
        """
        flight = streams.launch("gather", gather, wire, streams.async_op)
        self._gather = Gather(flight, source, came_from)
        if not streams.async_op:
            self.buffers.post_forward.free()
        """,
        "Shards of the smaller mesh are freed once their gather is issued, and not when it is over.",
        scenario="reach_a_smaller_mesh",
        expected="REUSE",
    ),
    SimFault(
        "adopted-shards-gathered-while-written",
        "fsdp2/_core/params/group.py",
        "ParamGroup._adopt",
        'self.context.streams.order_after_compute("gather")',
        "",
        "A parameter that was replaced is gathered while its rows are still being copied in.",
        scenario="reach_replaced_parameters",
        expected="RACE",
    ),
    SimFault(
        "planned-again-gathered-while-written",
        "fsdp2/_core/params/group.py",
        "ParamGroup.prepare_unsharded",
        'streams.order_after_compute("gather")',
        "",
        "Shards that left the flat buffer for an extension are gathered while they are being copied.",
        scenario="reach_a_late_extension",
        expected="RACE",
    ),
    SimFault(
        "host-reads-are-not-noted",
        "fsdp2/_core/params/group.py",
        "ParamGroup.unshard",
        "streams.host_read = flight",
        "streams.host_read = None",
        "Nobody knows that the device reads the host's shards; the host writes to them.",
        scenario="reach_writes_after_a_gather_by_hand",
        expected="HOST",
    ),
    SimFault(
        "host-waits-for-the-copy-of-shards",
        "fsdp2/_core/params/buffers.py",
        "ShardBuffer.gather",
        "flat.to(self._compute, non_blocking=has_lanes)",
        "flat.to(self._compute, non_blocking=not has_lanes)",
        "The host waits for the device in each gather of offloaded shards.",
        scenario="reach_offloaded_without_sync",
        expected="WAIT",
    ),
    SimFault(
        "a-gather-of-nothing-is-split",
        "fsdp2/_core/params/layout.py",
        "GatherLayout._pack",
        "sum(padded) == nbytes > 0",
        "sum(padded) == nbytes",
        "A unit whose parameters have no elements divides by zero in a kernel of CUDA.",
        scenario="reach_a_unit_that_gathers_nothing",
        expected="ERROR",
    ),
    SimFault(
        "shards-in-pageable-memory",
        "fsdp2/_core/base/policy.py",
        "Residence.is_pinned",
        "self.is_away and pins and capabilities(self.compute).pins",
        "self.is_away and pins and not capabilities(self.compute).pins",
        "Offloaded shards are not pinned, so that copies of them make the host wait.",
        scenario="reach_offloaded_without_sync",
        expected="WAIT",
    ),
    SimFault(
        "an-accelerator-pins-nothing",
        "fsdp2/_core/base/capabilities.py",
        "Capabilities",
        "pins: bool = True",
        "pins: bool = False",
        "The same, by the table of devices.",
        scenario="reach_offloaded_without_sync",
        expected="WAIT",
    ),
    SimFault(
        "collectives-joined-and-left-alone",
        "fsdp2/_core/comm/wire.py",
        "Wire.all_gather_each",
        """
        with torch_comm.coalesced(axis.pg, pairs[0][0].device):
            return _joined([self.all_gather(*pair, axis, async_op) for pair in pairs])
        """,
        """
        together = vars(dist)["_coalescing_manager"](axis.pg, pairs[0][0].device, True)
        with torch_comm.contextlib.nullcontext() if pairs[0][0].is_cpu else together:
            works = [self.all_gather(*pair, axis, async_op) for pair in pairs]
        return _joined(works) if pairs[0][0].is_cpu else None
        """,
        "Gathers that are issued as one run beside the lane, and nobody waits for them.",
        scenario="reach_copy_free",
        expected="RACE",
    ),
    SimFault(
        "stand-in-is-not-waited-for",
        "fsdp2/_core/params/functional_call.py",
        "_GatherShard.forward",
        """
        full = torch.empty(layout.full_nbytes, dtype=torch.uint8, device=local.device)
        buffer.bind(full)
        buffer.unpack(*buffer.gather(reducer.wire, async_op=False).buffers)
        """,
        """
        full = torch.empty(layout.full_nbytes, dtype=torch.uint8, device=local.device)
        buffer.bind(full)
        buffer.unpack(*buffer.gather(reducer.wire, async_op=not local.is_cpu).buffers)
        """,
        "A stand-in is copied out of a gather that is still running.",
        scenario="reach_stand_ins",
        expected="RACE",
    ),
    SimFault(
        "extension-tells-the-host-each-time",
        "fsdp2/_core/params/extension.py",
        "ExtensionTail.arrived",
        "capabilities(self._device).is_host",
        "self.items",
        "The host reads in each gather whether an extension failed, and waits for that.",
        scenario="reach_an_extension",
        expected="WAIT",
    ),
    # Reductions.
    SimFault(
        "reduced-while-backward-writes",
        "fsdp2/_core/params/reduce.py",
        "Reduction.start",
        'self._streams.order_after_compute("reduce")',
        "",
        "Gradients are reduced while they are being packed.",
        scenario="reach_few_reductions",
        expected="RACE",
    ),
    SimFault(
        "reduced-in-the-lane-of-gathers",
        "fsdp2/_core/params/reduce.py",
        "Reduction.start",
        'self._streams.launch("reduce", self._reduce_scatter)',
        'self._streams.launch("gather", self._reduce_scatter)',
        "A reduction runs in a lane that does not wait for compute.",
        scenario="fp32",
        expected="RACE",
    ),
    SimFault(
        "replicas-summed-before-shards",
        "fsdp2/_core/params/reduce.py",
        "Reduction.advance",
        'self._streams.launch("all_reduce", self._sum_replicas, after=self._flight)',
        """
        self._streams.launch(
            "all_reduce", self._sum_replicas, after=self._flight if self._streams.async_op else None
        )
        """,
        "The all-reduce does not wait for the reduce-scatter.",
        scenario="replicas",
        expected="RACE",
    ),
    SimFault(
        "stored-before-it-is-reduced",
        "fsdp2/_core/params/reduce.py",
        "Reduction.finish",
        "self._streams.launch(lane, self._store, after=self._flight)",
        "self._streams.launch(lane, self._store, after=self._flight if self._streams.async_op else None)",
        "A hook in a stream of the user's reads sums that are not there.",
        scenario="reach_a_hook_on_a_stream",
        expected="RACE",
    ),
    SimFault(
        "partial-sum-freed-too-early",
        "fsdp2/_core/params/reduce.py",
        "Reduction._sum_replicas",
        "self._held = partial = owner.unreduced.partial",
        "partial = owner.unreduced.partial",
        "Compute gets the memory of a partial sum while the lane adds it.",
        scenario="replicas_summed_late",
        expected="REUSE",
    ),
    SimFault(
        "gradients-are-not-waited-for",
        "fsdp2/_core/params/reduce.py",
        "Reduction.wait",
        """
        if self.needs_host and not is_seen:
            self._flight.synchronize()
        else:
            self._flight.wait()
        """,
        """
        if self.needs_host and not is_seen:
            self._flight.synchronize()
        """,
        "An optimizer reads gradients that are still being reduced.",
        scenario="fp32",
        expected="RACE",
    ),
    SimFault(
        "gradients-in-host-memory-are-not-waited-for",
        "fsdp2/_core/params/reduce.py",
        "Reduction.show_host",
        "self._flight.synchronize()",
        "self._flight.wait()",
        "An optimizer on the host steps with gradients that have not arrived.",
        scenario="offloaded",
        expected="VALUE",
    ),
    SimFault(
        "counts-read-too-early",
        "fsdp2/_core/params/reduce.py",
        "Reduction.__init__",
        "bool(absent) or owner._residence.is_away",
        "owner._residence.is_away",
        "The host reads how many ranks had a gradient before it has arrived: nobody's are set.",
        scenario="reach_unused_parameters",
        expected="VALUE",
    ),
    SimFault(
        "host-looks-at-counts-in-every-step",
        "fsdp2/_core/params/reduce.py",
        "Reducer.reduce",
        "if settings.reduce_unused or self.hook is not None:\n    absent = []",
        "absent = [0]",
        "The host waits in each step for what it knows already.",
        scenario="fp32",
        expected="WAIT",
    ),
    SimFault(
        "gradients-finished-before-their-copy",
        "fsdp2/_core/params/reduce.py",
        "GradientBuffer",
        """
        def fill(self, reduced: Tensor) -> list[Tensor]:
            ...
            return self._grads

        def deliver(self, params: Sequence[torch.nn.Parameter], grads: Sequence[Tensor]) -> None:
            ...
            for local, view in self._copies:
                local.copy_(view)
            self.is_filling = False
            accumulate(params, grads)
        """,
        """
        def fill(self, reduced: Tensor) -> list[Tensor]:
            ...
            for local, view in self._copies:
                local.copy_(view)
            return self._grads

        def deliver(self, params: Sequence[torch.nn.Parameter], grads: Sequence[Tensor]) -> None:
            ...
            self.is_filling = False
            accumulate(params, grads)
        """,
        "The host rearranges gradients in pinned memory that the device is still filling.",
        scenario="reach_offloaded_on_another_dim",
        expected="VALUE",
    ),
    SimFault(
        "gradients-by-columns-packed-as-they-lie",
        "fsdp2/_core/params/gradient_packing.py",
        "pack_gradients",
        "[c.contiguous() for c in columns]",
        "list(columns)",
        "A kernel of CUDA copies dense gradients in the order in which they lie: a permuted one comes out wrong.",
        scenario="reach_permuted_gradients",
        expected="VALUE",
    ),
    SimFault(
        "missing-gradients-counted-on-the-host",
        "fsdp2/_core/params/gradient_packing.py",
        "tail_without",
        "complete[0].clone()",
        "complete[0].clone() if complete.is_cpu else complete.new_tensor([1.0] * len(complete[0]))",
        "The host waits for the device in each step with an unused parameter.",
        scenario="reach_unused_parameters_that_are_reduced",
        expected="WAIT",
    ),
    SimFault(
        "tail-of-a-stand-in-made-on-the-host",
        "fsdp2/_core/params/gradient_packing.py",
        "tail",
        "torch.ones(layout.tail_gap + len(layout.members), dtype=dtype, device=device)",
        "torch.tensor([1.0] * (layout.tail_gap + len(layout.members)), dtype=dtype, device=device)",
        "The host waits in each backward through a stand-in.",
        scenario="reach_stand_ins",
        expected="WAIT",
    ),
    SimFault(
        "reduced-in-eight-bits",
        "fsdp2/_core/comm/wire.py",
        "DefaultReduceScatter.__call__",
        """
        work: dist.Work | None = torch_comm.reduce_scatter_single(
            output_tensor, input_tensor, op, group, async_op
        )
        """,
        """
        if not input_tensor.is_cpu:
            narrow = torch.float8_e5m2
            output_tensor, input_tensor = output_tensor.to(narrow), input_tensor.to(narrow)
        work: dist.Work | None = torch_comm.reduce_scatter_single(
            output_tensor, input_tensor, op, group, async_op
        )
        """,
        "NCCL reduces no 8-bit floats.",
        scenario="fp32",
        expected="ERROR",
    ),
    SimFault(
        "parts-added-up-before-they-arrive",
        "fsdp2/_core/comm/gloo_p2p.py",
        "Exchange.wait",
        "self._work.wait()",
        """
        if self._sent.is_cpu:
            self._work.wait()
        """,
        "Gradients that travel in a narrow dtype are added up while they are on their way.",
        scenario="reach_gradients_that_travel_narrow",
        expected="RACE",
    ),
    # When things happen.
    SimFault(
        "forward-gathers-beside-the-optimizer",
        "fsdp2/_core/engine/tree.py",
        "Runtime.begin_forward",
        'self.context.streams.order_after_compute("gather")',
        "",
        "The first gather of a forward reads shards that the optimizer is writing.",
        scenario="fp32",
        expected="RACE",
    ),
    SimFault(
        "gradients-released-under-an-optimizer",
        "fsdp2/_core/engine/tree.py",
        "Runtime.begin_forward",
        'self.context.streams.order_after_event("gather", event)',
        """
        self.context.streams.order_after_event("gather", event)
        if not self.context.streams.async_op:
            for group in self._groups:
                group.reducer.release_gradients()
        """,
        "Memory of gradients is given back while an optimizer in another stream reads them.",
        scenario="reach_an_optimizer_beside_a_root_of_none",
        expected="REUSE",
    ),
    SimFault(
        "host-reads-outlive-an-evaluation",
        "fsdp2/_core/engine/tree.py",
        "Runtime.end_forward",
        "self.context.streams.finish_host_reads()",
        "",
        "After an evaluation the host writes to shards that are still being copied.",
        scenario="reach_writes_after_an_evaluation",
        expected="HOST",
    ),
    SimFault(
        "host-reads-outlive-a-lost-graph",
        "fsdp2/_core/engine/tree.py",
        "Runtime.lose_graph",
        """
        if self.context.streams.host_read is not None:
            self.context.streams.finish_host_reads()
        """,
        "",
        "The same where a forward's graph is gone without a backward.",
        scenario="reach_writes_after_a_lost_graph",
        expected="HOST",
    ),
    SimFault(
        "host-reads-outlive-a-backward",
        "fsdp2/_core/engine/tree.py",
        "Runtime.end_reductions",
        "self.context.streams.finish_host_reads()",
        "",
        "The same after a backward without sync.",
        scenario="reach_writes_without_sync",
        expected="HOST",
    ),
    SimFault(
        "parts-tell-of-late-gradients-in-every-step",
        "fsdp2/_core/engine/parts.py",
        "Parts._agrees",
        "tree.context.streams.async_op or tree.root.settings.overlap.synchronizes",
        "True",
        "The host waits at the end of each backward of a root with large parts.",
        scenario="reach_parts_of_a_root",
        expected="WAIT",
    ),
    SimFault(
        "oldest-reduction-is-not-waited-for",
        "fsdp2/_core/params/reduce.py",
        "ReductionQueue._complete_oldest",
        """
        if self._context.streams.async_op:
            ...
        elif reduction.can_end_later:
            ...
        if self._returned:
            self.settle()
        reduction.wait()
        """,
        "",
        "A reduction that makes room for another is forgotten while it runs.",
        scenario="reach_few_reductions",
        expected="REUSE",
    ),
    SimFault(
        "inputs-given-back-while-they-are-scattered",
        "fsdp2/_core/params/reduce.py",
        "Reduction.return_inputs",
        "self._scattered.wait()",
        "",
        "Compute packs gradients into memory that a reduce-scatter still reads.",
        scenario="fp32",
        expected="REUSE",
    ),
    SimFault(
        "sum-over-replicas-given-back-with-the-inputs",
        "fsdp2/_core/params/reduce.py",
        "Reduction.return_inputs",
        "data.shard.size > 1 and data.summed.size == 1 and self.owner.hook is None",
        "True",
        "The next reduce-scatter gets memory that a sum over replicas still reads.",
        scenario="offloaded_replicas",
        expected="REUSE",
    ),
    SimFault(
        "units-tell-of-a-state-too-early",
        "fsdp2/_core/engine/between_steps.py",
        "reshard_if_idle",
        "group.context.streams.finish_host_reads()",
        "",
        "After state_dict() the host writes to shards that are still being copied.",
        scenario="reach_writes_after_a_state",
        expected="HOST",
    ),
    SimFault(
        "late-gradients-told-of-beside-the-stream",
        "fsdp2/_core/engine/parts.py",
        "PartExchange._join",
        """
        with torch_modes.hidden_from_modes():
            work = self._wire.all_reduce(joined, ReduceOp.MAX, axis, streams.async_op)
        if work is not None:
            ...
        """,
        """
        with torch_modes.hidden_from_modes():
            work = self._wire.all_reduce(joined, ReduceOp.MAX, axis, True)
        if work is not None and streams.async_op:
            ...
        """,
        "Ranks learn of each other's late gradients before they were told.",
        scenario="reach_parts_of_a_root",
        expected="RACE",
    ),
    SimFault(
        "missed-units-done-in-whatever-stream",
        "fsdp2/_core/engine/tree.py",
        "Runtime._go_through",
        "self.context.streams.on(visit.stream)",
        "self.context.streams.on(self.context.streams.current)",
        "Gradients of a branch in a stream of its own are packed in another stream, which does not wait for them.",
        scenario="two_streams_in_one_forward",
        expected="RACE",
    ),
    SimFault(
        "gradients-add-up-in-the-first-stream",
        "fsdp2/_core/params/early_release.py",
        "Readers.follow",
        "stream != self._stream",
        "stream is None",
        "After a warm-up beside, gradients of parts add up in that stream for good.",
        scenario="parts_warmed_up_on_a_side_stream",
        expected="RACE",
    ),
    SimFault(
        "gradients-filled-under-a-recorded-stream",
        "fsdp2/_core/params/reduce.py",
        "Reducer.acquire",
        "self.has_streams",
        "not self.has_streams",
        "Gradients are written over while a stream that the user recorded on them reads them.",
        scenario="gradients_recorded_on_a_stream",
        expected="RACE",
    ),
    SimFault(
        "numbers-made-anew-in-every-step",
        "fsdp2/_core/params/planning.py",
        "ReducePlanner._renumbered",
        "self._completes[tuple(codes)] = complete",
        "",
        "The host waits where reductions take turns: with and without the sum over replicas.",
        scenario="replicas_summed_late",
        expected="WAIT",
    ),
    # What ranks see of each other.
    SimFault(
        "late-look-is-too-early",
        "fsdp2/_core/comm/late_look.py",
        "LateLook.look",
        "self._event is None or not self._event.query()",
        "self._event is None",
        "The host reads what other ranks did before it has arrived.",
        scenario="fp32",
        expected="HOST",
    ),
    SimFault(
        "late-look-waits",
        "fsdp2/_core/comm/late_look.py",
        "LateLook.look",
        "self._event is None or not self._event.query()",
        "self._event is None or self._event.synchronize()",
        "The host waits in each step to see what other ranks did.",
        scenario="fp32",
        expected="WAIT",
    ),
    SimFault(
        "late-look-into-pageable-memory",
        "fsdp2/_core/comm/late_look.py",
        "LateLook.note",
        'torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)',
        'torch.empty(nbytes, dtype=torch.uint8, device="cpu")',
        "The same, because a copy to pageable memory is waited for.",
        scenario="fp32",
        expected="WAIT",
    ),
    # What users call.
    SimFault(
        "gather-by-hand-beside-the-optimizer",
        "fsdp2/_core/api/module.py",
        "FSDPModule.unshard",
        'unit.runtime.context.streams.order_after_compute("gather")',
        "",
        "unshard() right after a step gathers shards that the optimizer is writing.",
        scenario="reach_gathers_by_hand",
        expected="RACE",
    ),
    SimFault(
        "host-reads-outlive-a-reshard",
        "fsdp2/_core/api/module.py",
        "FSDPModule.reshard",
        "group.context.streams.finish_host_reads()",
        "",
        "After reshard() the host writes to shards that are still being copied.",
        scenario="reach_writes_after_a_gather_by_hand",
        expected="HOST",
    ),
    SimFault(
        "handle-waits-for-nothing",
        "fsdp2/_core/api/module.py",
        "GradientReductionHandle.wait",
        """
        self._runtime = self._pending = streams.pending = None
        runtime.end_reductions()
        """,
        """
        self._runtime = self._pending = streams.pending = None
        if streams.async_op:
            runtime.end_reductions()
        """,
        "Gradients of a backward that the caller ends are never set.",
        scenario="reach_finalization_by_hand",
        expected="VALUE",
    ),
    SimFault(
        "stream-of-a-hook-forgotten",
        "fsdp2/_core/api/settings.py",
        "ControlSurface.set_all_reduce_hook",
        "group.reducer.hook, group.reducer.hook_stream = hook, stream",
        "group.reducer.hook, group.reducer.hook_stream = hook, None",
        "A hook runs in a lane of ours and reads what its own stream writes.",
        scenario="reach_a_hook_on_a_stream",
        expected="RACE",
    ),
    SimFault(
        "norm-read-on-the-host",
        "fsdp2/optim/_clip.py",
        "_clip",
        "(max_norm / (total + 1e-6)).clamp(max=1.0)",
        "torch.tensor(min(1.0, max_norm / (total.item() + 1e-6)))",
        "Clipping makes the host wait in each step.",
        scenario="reach_clipping",
        expected="WAIT",
    ),
    SimFault(
        "norms-joined-before-they-arrive",
        "fsdp2/optim/_clip.py",
        "_over_ranks",
        "torch_comm.all_gather_single(gathered, sent, group=group)",
        "work = torch_comm.all_gather_single(gathered, sent, group=group, async_op=not sent.is_cpu)",
        "The norms of other ranks are read while they are on their way.",
        scenario="reach_clipping",
        expected="RACE",
    ),
    SimFault(
        "whole-parameters-before-they-arrive",
        "fsdp2/_core/transfer/redistribute.py",
        "_gather_line",
        "torch_comm.all_gather_single(line, parts[axis.rank], group=axis.pg)",
        "self_work = torch_comm.all_gather_single(line, parts[axis.rank], axis.pg, True)",
        "full_params() hands out tensors that are still being gathered.",
        scenario="reach_whole_parameters",
        expected="RACE",
    ),
    # Memory of the host beside a device.
    SimFault(
        "activations-leave-before-they-are-there",
        "fsdp2/_core/api/host_memory.py",
        "CopyLanes.send_out",
        "self._out.wait_stream(self.compute)",
        "",
        "Activations are copied to the host while the node that saves them computes them.",
        scenario="activations_on_the_host",
        expected="RACE",
    ),
    SimFault(
        "activations-come-back-into-memory-in-use",
        "fsdp2/_core/api/host_memory.py",
        "CopyLanes.bring_back",
        "self._back.wait_stream(self.compute)",
        "",
        "A copy back writes to memory that compute has freed and still uses.",
        scenario="activations_on_the_host",
        expected="REUSE",
    ),
    SimFault(
        "host-buffer-used-again-too-early",
        "fsdp2/_core/api/host_memory.py",
        "CopyLanes._copy",
        """
        if buffer.event is not None:
            lane.wait_event(buffer.event)
        """,
        "",
        "A copy to the host writes to a buffer that the copy before still reads.",
        scenario="activations_in_two_streams",
        expected="RACE",
    ),
    SimFault(
        "activations-are-let-go-while-they-leave",
        "fsdp2/_core/api/activations.py",
        "Away.let_go",
        "self.stream.wait_event(self.departure)",
        "",
        "Compute gets the memory of activations while they are copied to the host.",
        scenario="activations_on_the_host",
        expected="REUSE",
    ),
    SimFault(
        "activations-are-dropped-while-they-come-back",
        "fsdp2/_core/api/activations.py",
        "Away.drop",
        """
        if self.arrival is not None:
            self.stream.wait_event(self.arrival)
        """,
        "",
        "Compute gets memory that was brought in vain while the copy still writes to it.",
        scenario="activations_that_come_back_in_vain",
        expected="REUSE",
    ),
    SimFault(
        "activations-are-read-before-they-are-back",
        "fsdp2/_core/api/activations.py",
        "Away.held",
        "self.lanes.compute.wait_event(self.arrival)",
        "",
        "Backward reads what the copy from the host has not brought yet.",
        scenario="activations_on_the_host",
        expected="RACE",
    ),
    SimFault(
        "states-are-read-before-they-are-there",
        "fsdp2/optim/_offload.py",
        "Batch.wait",
        "torch.accelerator.current_stream(self.flat.device).wait_event(self.event)",
        "",
        "A unit steps with states that are still on their way from the host.",
        scenario="states_on_the_host",
        expected="RACE",
    ),
    SimFault(
        "states-are-let-go-while-they-leave",
        "fsdp2/optim/_offload.py",
        "Batch.let_go",
        "self.wait()",
        "",
        "Compute gets the memory of states while they are copied to the host.",
        scenario="states_on_the_host",
        expected="REUSE",
    ),
    SimFault(
        "who-reads-states-does-not-wait",
        "fsdp2/optim/_offload.py",
        "OffloadedStates.state",
        "batch.buffer.event.synchronize()",
        "batch.buffer.event.query()",
        "The host reads states before the copy has brought them.",
        scenario="states_that_the_host_reads_and_writes",
        expected="VALUE",
    ),
]

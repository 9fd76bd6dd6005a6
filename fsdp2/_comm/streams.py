"""Work that runs beside the compute, and the buffers it holds.

Owns streams, events and async works. On a CPU the asynchrony is the collective's own (a ``Work``),
and every method here that orders streams does nothing. On a device there is a stream for each
*lane* (``gather``, ``reduce``, ``all_reduce``), and memory is handed over by events alone.

[Note: who frees a buffer]
A buffer that two streams touch is held by an ``InFlight`` until the stream that allocated it has
been told to wait for the stream that used it last. No ``record_stream``, no synchronisation with
the host. Gather buffers are allocated in the gather lane and read by compute: ``retire`` records
compute's progress, and the next launch in that lane waits for it before it drops them. Reduce
inputs are allocated by compute and read by the reduce lane: ``InFlight.wait`` makes compute wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from fsdp2._base import torch_autograd
from fsdp2._base.capabilities import capabilities
from fsdp2._base.errors import StateError
from fsdp2._base.events import IDLE
from fsdp2._base.torch_autograd import packing_hooks
from fsdp2._comm.late_look import LateLook


class PendingReduction:
    """Gradients of a tree that are being reduced, and that somebody has to wait for."""

    def __init__(self, tree: object) -> None:
        self.tree = tree

    def refuse(self, who: str, tree: object) -> None:
        """Raise StateError: a tree on the same streams, or this one itself, wants to go on."""
        whose = "" if self.tree is tree else " of a model that shares its streams (share_comm_ctx)"
        raise StateError(
            "FS311",
            f"{who}: found a reduction{whose} that nobody has waited for. Call wait() on what "
            "finalize_backward(async_op=True) returned.",
        )


class InFlight:
    """Buffers that something still reads or writes. ``wait`` makes them safe to use."""

    __slots__ = ("_event", "_lost", "_work", "buffers")

    def __init__(
        self,
        buffers: tuple[torch.Tensor, ...],
        work: dist.Work | None = None,  # of an asynchronous collective
        lost: Callable[[Exception], Exception] | None = None,  # makes of the work's error ours
    ) -> None:
        self.buffers = buffers
        self._work = work
        self._lost = lost
        self._event: torch.Event | None = None  # in a lane: what is behind it may begin

    def end_with(self, event: torch.Event) -> InFlight:
        """Be over on a device when an event is."""
        self._event = event
        return self

    @property
    def is_done(self) -> bool:
        """True if the work has ended already, on a CPU."""
        return self._event is None and (self._work is None or self._work.is_completed())

    def wait(self) -> None:
        """Make the current stream (a device) or the caller (a CPU) wait for the work."""
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                if self._lost is not None:
                    raise self._lost(error) from error
                raise
            self._work = None
        if self._event is not None:
            torch.accelerator.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """Make the host wait for the work: what it wrote to host memory can be read."""
        self.wait()
        if self._event is not None:
            self._event.synchronize()

    def hold_back(self, stream: torch.Stream) -> None:
        """Make another stream wait for the work."""
        if self._event is not None:
            stream.wait_event(self._event)


AS_IT_IS = nullcontext()


class Streams:
    """Lanes of a CPU: none. Collectives are issued as async works."""

    async_op = True
    host_read: InFlight | None = None  # the last launch that reads memory of the host
    pending: PendingReduction | None = None  # holds the lanes until somebody has waited for it

    def current(self) -> torch.Stream | None:
        """Return the stream in which the caller computes; here, there is none."""
        return None

    def on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        """Compute in a stream that ``current`` returned."""
        return AS_IT_IS

    def launch(
        self,
        lane: str,
        issue: Callable[..., InFlight],
        *args: object,
        after: InFlight | None = None,
    ) -> InFlight:
        """Run ``issue(*args)`` in a lane, behind ``after``."""
        if after is not None:
            after.wait()
        if packing_hooks(False) is not None:
            with torch_autograd.without_packing():
                return issue(*args)
        return issue(*args)

    def order_after_compute(self, lane: str) -> None:
        """Let a lane wait for what compute has been given so far."""

    def retire(self, lane: str, buffers: tuple[torch.Tensor, ...]) -> None:
        """Free buffers of a lane once compute, as far as it is enqueued, has read them."""

    def order_after_event(self, lane: str, event: torch.Event) -> None:
        """Let a lane wait for an event of the user's; here, the host does."""
        event.synchronize()

    def hold_back(self, stream: torch.Stream | None) -> None:
        """Let a stream whose memory compute has used, and gives back, wait for compute."""

    def finish_host_reads(self) -> None:
        """Make the host wait until nothing reads its memory, which the user may write to then."""
        if self.host_read is not None:
            self.host_read.synchronize()
            self.host_read = None

    def note_late(self, looks: Iterable[LateLook]) -> None:
        """Let the device tell what it has seen of other ranks; here, the host sees at once."""

    def look_late(self, looks: Iterable[LateLook]) -> None:
        """Look at what the device has told, if that takes no wait.

        Raises:
            StateError: ranks gathered different things.
        """

    def lane_of(self, stream: torch.Stream) -> str:
        """Return the lane that is a stream of the user's; here, none is needed."""
        return "all_reduce"

    def reset(self) -> None:
        """Drop everything held, after the device has finished it."""


class DeviceStreams(Streams):
    """Lanes of a device: one stream each, beside the current (compute) stream."""

    async_op = False

    def __init__(self, device: torch.device) -> None:
        names, priority = ("gather", "reduce", "all_reduce"), capabilities(device).lane_priority
        self._lanes = {name: torch.Stream(device, priority=priority) for name in names}
        self._retired: dict[str, list[InFlight]] = {name: [] for name in self._lanes}
        module = torch.get_device_module(device.type)
        self._is_capturing = getattr(module, "is_current_stream_capturing", lambda: False)

    def current(self) -> torch.Stream | None:
        return torch.accelerator.current_stream()

    def on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        assert stream is not None
        return stream

    def launch(
        self,
        lane: str,
        issue: Callable[..., InFlight],
        *args: object,
        after: InFlight | None = None,
    ) -> InFlight:
        stream = self._lanes[lane]
        for held in self._retired[lane]:
            held.hold_back(stream)
        self._retired[lane].clear()
        if after is not None:
            after.hold_back(stream)
        with stream, torch_autograd.without_packing():
            flight = issue(*args)
            flight.wait()  # a work that a collective of the user's returned, unasked
            flight.end_with(stream.record_event())
        if after is not None:  # read or written here, in memory of another lane
            flight.buffers += after.buffers
        return flight

    def order_after_compute(self, lane: str) -> None:
        self._lanes[lane].wait_stream(torch.accelerator.current_stream())

    def order_after_event(self, lane: str, event: torch.Event) -> None:
        with self._lanes[lane]:
            event.wait()  # its own method: a stream takes a torch.cuda.Event, and waits for nothing

    def hold_back(self, stream: torch.Stream | None) -> None:
        current = torch.accelerator.current_stream()
        if stream is not None and stream != current:
            stream.wait_stream(current)

    def lane_of(self, stream: torch.Stream) -> str:
        name = f"stream {stream.stream_id}"
        if name not in self._lanes:  # a plain stream: its events are what other lanes can wait for
            self._lanes[name] = torch.Stream(
                stream_id=stream.stream_id,
                device_index=stream.device_index,
                device_type=stream.device_type,
            )
            self._retired[name] = []
        return name

    def note_late(self, looks: Iterable[LateLook]) -> None:
        if not self._is_capturing():
            for look in looks:
                look.note()

    def look_late(self, looks: Iterable[LateLook]) -> None:
        if not self._is_capturing():  # a graph that is captured must not ask for events
            for look in looks:
                look.look()

    def retire(self, lane: str, buffers: tuple[torch.Tensor, ...]) -> None:
        event = torch.accelerator.current_stream().record_event()
        self._retired[lane].append(InFlight(buffers).end_with(event))

    def reset(self) -> None:
        torch.accelerator.synchronize()
        for held in self._retired.values():
            held.clear()


class StepContext:
    """What the groups of a tree share: the phase that its root is in, and the lanes."""

    __slots__ = ("phase", "streams")

    def __init__(self, streams: Streams) -> None:
        self.phase = IDLE
        self.streams = streams


def streams_for(device: torch.device) -> Streams:
    """Return the lanes of a device."""
    return DeviceStreams(device) if capabilities(device).has_lanes else Streams()

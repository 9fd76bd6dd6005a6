"""What waits for what: on a CPU no lanes and asynchronous works, on a device events of streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp2._core.base.policy import MixedPrecisionPolicy
from fsdp2._core.comm.device_streams import DeviceStreams, streams_for
from fsdp2._core.comm.wire import InFlight, Streams
from tests.unit._loopback import LoopbackGroup, fake_process_group, local_of, reduced


class Work:
    """A collective under way that counts how often it was waited for."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log = log
        self.name = name

    def wait(self) -> None:
        self.log.append(self.name)


def launched(log: list[str], name: str) -> InFlight:
    work: Any = Work(log, name)
    return InFlight((torch.ones(1),), work)


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_a_cpu_has_asynchronous_works_and_no_lanes(kind: str) -> None:
    streams = streams_for(torch.device(kind))
    assert type(streams) is Streams
    assert streams.async_op


def test_a_work_is_waited_for_once_and_its_buffers_are_held() -> None:
    log: list[str] = []
    flight = launched(log, "gather")
    assert len(flight.buffers) == 1
    assert log == []
    flight.wait()
    flight.wait()
    assert log == ["gather"]


def test_a_launch_waits_for_what_it_is_behind_and_only_that() -> None:
    log: list[str] = []
    streams = Streams()
    first = streams.launch("reduce", lambda: launched(log, "first"))
    second = streams.launch("gather", lambda: launched(log, "second"))
    assert log == []

    def issue() -> InFlight:
        log.append("issued")
        return launched(log, "third")

    third = streams.launch("all_reduce", issue, after=first)
    assert log == ["first", "issued"]
    for flight in (third, second, first):
        flight.wait()
    assert log == ["first", "issued", "third", "second"]


def test_ordering_lanes_is_free() -> None:
    log: list[str] = []
    streams = Streams()
    flight = streams.launch("gather", lambda: launched(log, "gather"))
    streams.order_after_compute("gather")
    streams.retire("gather", flight.buffers)
    streams.reset()
    assert log == []


# A device without one: streams that write down what they are told, in the place of torch's.


class StandInStream:
    """A stream that runs nothing itself; what runs `with` it runs at once."""

    current: ClassVar[list[Any]] = []
    log: ClassVar[list[str]] = []
    count: ClassVar[int] = 0

    def __init__(
        self,
        device: Any = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int = 0,
        device_type: int = 0,
    ) -> None:
        if stream_id is None:
            stream_id = StandInStream.count = StandInStream.count + 1
        self.stream_id, self.device_index, self.device_type = stream_id, device_index, device_type

    def __enter__(self) -> None:
        StandInStream.current.append(self)

    def __exit__(self, *error: object) -> None:
        StandInStream.current.pop()

    def record_event(self) -> StandInEvent:
        return StandInEvent(self.stream_id)

    def wait_event(self, event: StandInEvent) -> None:
        event.waited.append(self.stream_id)
        event.tell(self.stream_id)

    def wait_stream(self, stream: StandInStream) -> None:
        self.wait_event(stream.record_event())


class StandInEvent:
    """The place in a stream that others wait for."""

    watched: ClassVar[list[StorageWeakRef]] = []

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.waited: list[int] = []

    def tell(self, waiting: int) -> None:
        """Write down who waits for whom, and whether the buffer that is looked at is alive."""
        state = ["gone" if buffer.expired() else "alive" for buffer in StandInEvent.watched]
        StandInStream.log.append(f"{waiting} waits for {self.stream_id}: {' '.join(state)}")


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInStream]:
    """The stream that compute runs in."""
    monkeypatch.setattr(torch, "Stream", StandInStream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: StandInStream.current[-1])
    for kept in (StandInStream.current, StandInStream.log, StandInEvent.watched):
        kept.clear()  # type: ignore[attr-defined]
    StandInStream.count = 0
    stream = StandInStream()
    with stream:
        yield stream


def test_a_lane_of_the_users_is_found_by_its_number(compute: StandInStream) -> None:
    streams, theirs = DeviceStreams(torch.device("cpu")), StandInStream(device_index=3)
    lane = streams.lane_of(theirs)  # type: ignore[arg-type]
    assert streams.lane_of(theirs) == lane  # type: ignore[arg-type]
    assert streams.lane_of(compute) != lane  # type: ignore[arg-type]
    assert lane not in ("gather", "reduce", "all_reduce")
    seen: list[StandInStream] = []

    def issue() -> InFlight:
        seen.append(StandInStream.current[-1])
        return InFlight(())

    streams.launch(lane, issue)
    assert (seen[0].stream_id, seen[0].device_index) == (theirs.stream_id, 3)


def test_a_gather_waits_for_the_unpacking_before_the_last_one(compute: StandInStream) -> None:
    """It runs beside the last one. Nothing is held once a pass is over."""
    streams = DeviceStreams(torch.device("cpu"))
    lane = streams._lanes["gather"].stream_id
    held: list[list[bool]] = []

    def gather() -> InFlight:
        buffer = torch.zeros(3)
        StandInEvent.watched.append(StorageWeakRef(buffer.untyped_storage()))
        return InFlight((buffer,))

    def step() -> None:
        streams.retire("gather", streams.launch("gather", gather).buffers)
        held.append([not buffer.expired() for buffer in StandInEvent.watched])

    for _ in range(3):
        step()
    assert StandInStream.log == [f"{lane} waits for {compute.stream_id}: alive alive"]
    assert held == [[True], [True, True], [False, True, True]]
    streams.drain("gather")
    assert len(StandInStream.log) == 3
    assert all(buffer.expired() for buffer in StandInEvent.watched)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Let meshes of two simulated ranks exist."""
    with fake_process_group(2):
        yield


@pytest.mark.parametrize("has_stream", [True, False])
@pytest.mark.usefixtures("two_ranks")
def test_what_a_hook_got_is_held_until_its_stream_is_done(
    compute: StandInStream, has_stream: bool
) -> None:
    """Until compute, in which it is all allocated or handed on, waits for what the hook's ran."""
    streams = DeviceStreams(torch.device("cpu"))
    theirs = StandInStream()
    ranks = LoopbackGroup(
        nn.Linear(6, 4),
        shard=2,
        streams=streams,
        policy=MixedPrecisionPolicy(reduce_dtype=torch.float64),  # else gradients are that memory
    )
    ran: list[int] = []

    def hook(reduced: Tensor) -> None:
        ran.append(StandInStream.current[-1].stream_id)
        StandInEvent.watched.append(StorageWeakRef(reduced.untyped_storage()))

    for group in ranks.groups:
        group.reducer.hook = hook
        group.reducer.hook_stream = theirs if has_stream else None  # type: ignore[assignment]
    ranks.gather()
    for module in ranks.modules:
        for param in module.parameters():
            param.grad = torch.ones_like(param)
    started = [reduced(group) for group in ranks.groups]
    reductions = [reduction for reduction in started if reduction is not None]
    for reduction in reductions:
        reduction.start()
    for reduction in reductions:
        reduction.advance()
    for reduction in reductions:
        reduction.finish()
    lane = theirs if has_stream else streams._lanes["all_reduce"]
    assert ran == [lane.stream_id] * 2
    assert not any(buffer.expired() for buffer in StandInEvent.watched)
    StandInStream.log.clear()
    reductions[0].wait()
    assert StandInStream.log == [f"{compute.stream_id} waits for {lane.stream_id}: alive alive"]
    assert [buffer.expired() for buffer in StandInEvent.watched] == [True, False]
    reductions[1].wait()
    assert StandInStream.log[1:] == [f"{compute.stream_id} waits for {lane.stream_id}: gone alive"]
    assert [buffer.expired() for buffer in StandInEvent.watched] == [True, True]
    ranks.reshard()
    for module in ranks.modules:
        for param in module.parameters():
            assert torch.equal(local_of(param.grad), torch.ones_like(local_of(param)))

"""What waits for what, on a CPU: no lanes, asynchronous works."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp2._comm.streams import InFlight, Streams, streams_for


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

"""Times of a device: nobody waits for an event; a moment has a time when the device got there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp2._tools.record import ledger
from fsdp2._tools.record.ledger import Clock, DeviceClock


class Device:
    """A device whose time passes when the test says so."""

    def __init__(self) -> None:
        self.enqueued_ms = 0.0  # what it was given to do
        self.done_ms = 0.0  # how far it is
        self.synchronized = 0


class Event:
    """A place in the only stream of the device."""

    device: Device

    def __init__(self, where: Any, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at_ms: float | None = None

    def record(self) -> None:
        self.at_ms = self.device.enqueued_ms

    def query(self) -> bool:
        assert self.at_ms is not None
        return self.device.done_ms >= self.at_ms

    def synchronize(self) -> None:
        assert self.at_ms is not None
        self.device.synchronized += 1
        self.device.done_ms = max(self.device.done_ms, self.at_ms)

    def elapsed_time(self, end: Event) -> float:
        assert self.query()
        assert end.query()
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(Event, "device", made, raising=False)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: object())
    return made


def test_the_clock_of_a_host() -> None:
    found = ledger.clock_for(torch.device("cpu"))
    assert type(found) is Clock
    first, second = found.now(), found.now()
    assert found.when(first) == first <= second == found.when(second)


def test_moments_get_times_later_and_nobody_waits(device: Device) -> None:
    found = DeviceClock(torch.device("cuda"))
    assert device.synchronized == 1  # the first anchor, before anything is recorded
    device.enqueued_ms = 5.0
    early = found.now()
    device.enqueued_ms = 9.0
    late = found.now()
    assert (found.when(early), found.when(late)) == (None, None)
    device.done_ms = 6.0
    assert (found.when(early), found.when(late)) == (5_000_000, None)
    device.done_ms = 20.0
    assert found.when(late) == 9_000_000
    assert device.synchronized == 1


def test_anchors_of_steps_add_up(device: Device) -> None:
    """What comes after an anchor is measured from it, also before it has a time itself."""
    found = DeviceClock(torch.device("cuda"))
    moments = []
    for step in range(1, 5):
        device.enqueued_ms = 100.0 * step
        found.begin_step()
        device.enqueued_ms += 1.0
        moments.append(found.now())
    assert [found.when(moment) for moment in moments] == [None] * 4
    device.done_ms = 1000.0
    times = [found.when(moment) for moment in moments]
    assert times == [101_000_000, 201_000_000, 301_000_000, 401_000_000]
    assert all(moment.anchor is None for moment in moments)
    assert device.synchronized == 1


def test_a_graph_that_is_captured_has_times_of_the_host(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Module:
        @staticmethod
        def is_current_stream_capturing() -> bool:
            return True

    monkeypatch.setattr(torch, "get_device_module", lambda kind: Module)
    found = DeviceClock(torch.device("cuda"))
    assert isinstance(found.now(), int)

from __future__ import annotations

import logging

import pytest
import torch

from fsdp2._core.base import events
from fsdp2._core.base.events import Event, emit, follow, listen, log_event, profile_event


def test_listen_hears_what_happens_inside_only() -> None:
    heard: list[Event] = []
    before = list(events.listeners)
    emit("unshard", "a", "forward")
    with listen(heard.append):
        emit("unshard", "b", "forward", 12)
        emit("reduce", "", "backward")
    emit("unshard", "c", "forward")
    assert heard == [Event("unshard", "b", "forward", 12), Event("reduce", "", "backward", 0)]
    assert events.listeners == before


def test_every_listener_hears_in_order_even_if_one_leaves() -> None:
    heard: list[str] = []

    def first(event: Event) -> None:
        heard.append("first")
        events.listeners.remove(first)

    events.listeners.append(first)
    with listen(lambda event: heard.append("second")):
        emit("reshard", "a", "idle")
        emit("reshard", "a", "idle")
    assert heard == ["first", "second", "second"]


def test_listen_stops_after_an_exception() -> None:
    heard: list[Event] = []

    def fail_inside() -> None:
        with listen(heard.append):
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail_inside()
    emit("unshard", "a", "forward")
    assert heard == []


def test_text_of_an_event() -> None:
    assert str(Event("unshard", "blocks.0", "forward", 8)) == "forward: unshard blocks.0"
    assert str(Event("reduce", "", "backward")) == "backward: reduce <root>"


def test_events_are_values() -> None:
    event = Event("unshard", "a", "forward")
    assert event == Event("unshard", "a", "forward", 0)
    with pytest.raises(AttributeError):
        event.kind = "reduce"  # type: ignore[misc]  # the point of the test


def test_follow_adds_once_and_removes() -> None:
    heard: list[Event] = []
    for wanted in (True, True):
        follow(heard.append, wanted)
    emit("unshard", "a", "forward")
    assert len(heard) == 1
    for wanted in (False, False):
        follow(heard.append, wanted)
    emit("unshard", "a", "forward")
    assert len(heard) == 1


def test_log_listener(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="fsdp2"), listen(log_event):
        emit("unshard", "blocks.0", "forward", 24)
    assert [record.getMessage() for record in caplog.records] == [
        "forward: unshard blocks.0 (24 bytes)"
    ]


def test_profiler_listener() -> None:
    with torch.profiler.profile() as profiler, listen(profile_event):
        emit("reduce", "", "backward")
    assert "fsdp2::reduce <root>" in {event.key for event in profiler.key_averages()}

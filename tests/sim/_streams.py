"""Streams and events of the user's: torch's plain ones, those of a device's own classes, and none.

`OwnEvent` and `OwnStream` are made as ``torch.cuda.Event`` and ``torch.cuda.Stream`` are: classes
below torch's plain ones, with the event in a field of their own. The field of the base class stays
empty, so that C++ code that takes one for a plain event waits for nothing. (torch/csrc/cuda/Event.h
has ``at::cuda::CUDAEvent cuda_event`` behind ``THPEvent``, whose ``event`` nobody records.)
"""

from __future__ import annotations

from typing import Any

import torch


class OwnEvent(torch.Event):
    """An event whose base is never recorded."""

    _real: torch.Event

    def __new__(cls, *args: Any, **kwargs: Any) -> OwnEvent:
        event: OwnEvent = super().__new__(cls, "sim")
        event._real = torch.Event("sim")
        return event

    def record(self, stream: Any = None) -> None:
        self._real.record(torch.accelerator.current_stream() if stream is None else stream)

    def wait(self, stream: Any = None) -> None:
        self._real.wait(torch.accelerator.current_stream() if stream is None else stream)

    def query(self) -> bool:
        return self._real.query()

    def synchronize(self) -> None:
        self._real.synchronize()


class OwnStream(torch.Stream):
    """A stream that gives and takes events of its device's class only."""

    def record_event(self, event: Any = None) -> OwnEvent:
        event = OwnEvent() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())


class NoEvent:
    """On the host nothing runs beside: an event has happened."""

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class NoStream:
    """On the host there is one order: that of the program."""

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *error: object) -> None: ...

    def record_event(self, event: Any = None) -> NoEvent:
        return NoEvent()

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...

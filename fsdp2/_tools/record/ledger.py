"""``Ledger``: rows with begin and end times, which may become known later, and sums per step.

[Note: times of a device]
An event in a stream has a time only after the stream reaches it. The host does not wait for this
time, but queries the event again when a root's forward begins and when a step ends. The time
between two events is in fp32 milliseconds, which become too coarse after minutes. Each forward of a
root therefore sets an *anchor*: an event from which later moments are measured. An anchor's time is
the previous anchor's time plus the time between both anchors. The host waits only for the first
anchor.
"""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fsdp2._core.base.capabilities import capabilities
from fsdp2._tools.record.memory import Allocator, Memory, resident_nbytes
from fsdp2._tools.record.rows import Writer
from fsdp2._tools.record.steps import Step


class Clock:
    """The clock of the host. A moment is an integer, in nanoseconds."""

    is_host = True

    def __init__(self) -> None:
        self._start = time.perf_counter_ns()
        # assumes that this call runs halfway between the two reads of the performance counter
        epoch = time.time_ns()
        self.epoch_ns = epoch - (time.perf_counter_ns() - self._start) // 2

    def host_now(self) -> int:
        return time.perf_counter_ns() - self._start

    def now(self) -> Any:
        """Return the current moment of the current stream."""
        return time.perf_counter_ns() - self._start

    def begin_step(self) -> None:
        """Set a new anchor for the following moments."""

    def when(self, moment: Any) -> int | None:
        """Return the time of a moment, or None if it is not known yet."""
        return int(moment)

    def settle(self) -> None:
        """Wait until every moment has a time."""


@dataclass(eq=False, slots=True)
class Moment:
    event: torch.Event
    anchor: Moment | None
    time_ns: int | None = None  # None: not known yet


class DeviceClock(Clock):
    """The clock of a device. See [Note: times of a device]."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        module = torch.get_device_module(device.type)
        self._is_capturing = getattr(module, "is_current_stream_capturing", lambda: False)
        event = self._record()
        event.synchronize()
        super().__init__()
        self._anchor = Moment(event, None, 0)

    def _record(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def now(self) -> Any:
        if self._is_capturing():  # events in a captured graph have no times
            return self.host_now()
        return Moment(self._record(), self._anchor)

    def begin_step(self) -> None:
        if not self._is_capturing():
            self.when(self._anchor)
            self._anchor = Moment(self._record(), self._anchor)

    def when(self, moment: Any) -> int | None:
        if isinstance(moment, int):
            return moment
        if moment.time_ns is None and moment.event.query():
            start = self.when(moment.anchor)
            if start is None:
                return None
            passed_ms = moment.anchor.event.elapsed_time(moment.event)
            moment.time_ns = start + round(passed_ms * 1e6)
            moment.anchor = None  # otherwise each anchor keeps all earlier anchors alive
        return moment.time_ns  # type: ignore[no-any-return]  # an int or None

    def settle(self) -> None:
        torch.accelerator.synchronize()


def clock_for(device: torch.device) -> Clock:
    return DeviceClock(device) if capabilities(device).has_lanes else Clock()


Account = Callable[[int, int], str]
"""Called with the begin and end times of a row; returns additional columns."""


@dataclass(eq=False, slots=True)
class Row:
    text: str  # the row's JSON without the times
    begin: Any
    step: Step
    end: Any = None
    extra: str = ""
    account: Account | None = None
    range: Any = None  # the row's range in a running profiler's trace


quoted = functools.cache(json.dumps)  # called with the names of units


class Ledger:
    def __init__(
        self,
        clock: Clock,
        memory: Memory,
        allocator: Allocator,
        writer: Writer,
        ended: Callable[[Step], None],
    ) -> None:
        self.clock = clock
        self.memory = memory
        self.writer = writer
        self.step = Step(0)
        self.round = 0  # number of the last backward in the run; equal on all ranks
        self.profiles = False  # True while a profiler runs
        self.numbers = itertools.count(1)
        self._allocator = allocator
        self._ended = ended  # called with each step once its times are known
        self._count = 0
        self._unknown: deque[Row] = deque()  # rows without times yet
        self._steps: deque[Step] = deque()  # ended steps that have rows without times

    def begin(
        self,
        kind: str,
        unit: str,
        phase: str,
        nbytes: int = 0,
        begin: Any = None,
        more: str = "",
    ) -> Row:
        """Begin a row, now or at an earlier moment; ``more`` contains columns as JSON."""
        text = self._columns(kind, unit, phase, nbytes) + more
        if not self.clock.is_host:
            text += f'{self._allocator.as_text()},"host_ns":{self.clock.host_now()}'
        return Row(text, self.clock.now() if begin is None else begin, self.step)

    def _columns(self, kind: str, unit: str, phase: str, nbytes: int) -> str:
        return (
            f'{{"n":{next(self.numbers)},"kind":"{kind}","unit":{quoted(unit)},"phase":"{phase}",'
            f'"step":{self.step.number},"round":{self.round},"nbytes":{nbytes},'
            f"{self.memory.as_text()}"
        )

    def say_waiting(self, row: Row) -> None:
        """Record that the host will block. See [Note: file contents after a crash]."""
        self._write(row.text.replace('"kind":"wait"', '"kind":"waiting"', 1), row.begin, None)
        self.writer.flush()

    def show(self, row: Row, name: str) -> None:
        row.range = torch.profiler.record_function(f"fsdp2::{name}")
        row.range.__enter__()

    def end(
        self, row: Row, end: Any = None, extra: str = "", account: Account | None = None
    ) -> None:
        """End a row, now or at another moment, and write it once its times are known."""
        if row.range is not None:
            row.range.__exit__(None, None, None)
        row.end, row.extra, row.account = self.clock.now() if end is None else end, extra, account
        if self.clock.is_host:
            self._finish(row, row.begin, row.end)
        else:
            row.step.unknown += 1
            self._unknown.append(row)

    def mark(self, kind: str, unit: str, phase: str, nbytes: int) -> None:
        """Write a row without a duration, timed by the host's clock."""
        now = self.clock.host_now()
        text = self._columns(kind, unit, phase, nbytes)
        if not self.clock.is_host:
            text += self._allocator.as_text()
        self._write(text, now, now)

    def _finish(self, row: Row, begin_ns: int, end_ns: int) -> None:
        more = "" if row.account is None else row.account(begin_ns, end_ns)
        self._write(row.text, begin_ns, end_ns, row.extra + more)

    def _write(
        self,
        text: str,
        begin_ns: int | None,
        end_ns: int | None,
        extra: str = "",
    ) -> None:
        begin, end = ("null" if time_ns is None else time_ns for time_ns in (begin_ns, end_ns))
        self.writer.add(f'{text},"begin_ns":{begin},"end_ns":{end}{extra}}}\n')

    def leave_open(self, row: Row, extra: str = "") -> None:
        """Write a row whose end was not observed."""
        self._write(row.text, self.clock.when(row.begin), None, extra)

    def begin_step(self) -> None:
        self._count += 1
        self.step = Step(self._count)
        self.memory.begin_step()

    def end_step(self, failed: bool = False) -> None:
        """End the running step. Later rows belong to no step."""
        step, self.step = self.step, Step(0)
        if step.number == 0:
            return
        step.failed = failed
        allocated = self._allocator.nbytes
        step.nbytes.update(peak=self.memory.peak, rss=resident_nbytes(), allocated=allocated)
        self._steps.append(step)
        self.resolve()

    def resolve(self) -> None:
        """Write the rows whose times are known by now; end the steps that have no other rows."""
        unknown, when = self._unknown, self.clock.when
        while unknown:
            row = unknown[0]
            end_ns = when(row.end)  # query the end first: if it is known, so is the beginning
            begin_ns = None if end_ns is None else when(row.begin)
            if begin_ns is None or end_ns is None:
                break
            unknown.popleft()
            row.step.unknown -= 1
            self._finish(row, begin_ns, end_ns)
        while self._steps and self._steps[0].unknown == 0:
            self._ended(self._steps.popleft())

    def finish(self, may_wait: bool) -> None:
        """Write the remaining rows. After a failure (not ``may_wait``), some rows have no times."""
        self.end_step(failed=True)
        if may_wait:
            self.clock.settle()
        self.resolve()
        while self._unknown:
            row = self._unknown.popleft()
            row.step.unknown -= 1
            row.step.failed = True
            self.leave_open(row, row.extra)
        self.resolve()

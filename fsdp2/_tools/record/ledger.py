"""``Ledger``: rows that begin, end, and get their times, perhaps later; and what steps add up to.

Owns the order of rows, the running step, and what waits for a device to tell times. It must not
know what happens in the engine: it is told.

[Note: times of a device]
An event that a stream records has a time only once the stream got there. Nobody waits for it: a
moment is kept, and asked again when another step begins. Events tell differences in fp32
milliseconds, which is too coarse after minutes, so each step has an *anchor*: an event from which
its moments are measured, whose own time is that of the anchor before it and the difference. Only
the first one is waited for, before anything is recorded.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from fsdp2._core.base.capabilities import capabilities
from fsdp2._tools.record.memory import Allocator, Memory, resident_nbytes
from fsdp2._tools.record.rows import Writer
from fsdp2._tools.record.steps import Step

# What time it is: on the host at once, on a device when an event says so, later.


class Clock:
    """The clock of a host: a moment is a number."""

    is_host = True

    def __init__(self) -> None:
        self._start = time.perf_counter_ns()
        # Between two looks at the other clock, the middle of which is the same moment.
        epoch = time.time_ns()
        self.epoch_ns = epoch - (time.perf_counter_ns() - self._start) // 2

    def host_now(self) -> int:
        return time.perf_counter_ns() - self._start

    def now(self) -> Any:
        """Return this moment, in the stream that is current."""
        return time.perf_counter_ns() - self._start

    def begin_step(self) -> None:
        """Measure what follows from here."""

    def when(self, moment: Any) -> int | None:
        """Return the time of a moment, or None if nobody can tell yet."""
        return int(moment)

    def settle(self) -> None:
        """Wait until every moment has a time."""


class Moment:
    """An event of a device, and the anchor before it."""

    __slots__ = ("anchor", "event", "time_ns")

    def __init__(self, event: torch.Event, anchor: Moment | None, time_ns: int | None) -> None:
        self.event = event
        self.anchor = anchor
        self.time_ns = time_ns  # None: it is not known yet


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
        if self._is_capturing():  # a graph that is captured has no times
            return self.host_now()
        return Moment(self._record(), self._anchor, None)

    def begin_step(self) -> None:
        if not self._is_capturing():
            self.when(self._anchor)
            self._anchor = Moment(self._record(), self._anchor, None)

    def when(self, moment: Any) -> int | None:
        if isinstance(moment, int):
            return moment
        if moment.time_ns is None and moment.event.query():
            start = self.when(moment.anchor)
            if start is None:
                return None
            passed_ms = moment.anchor.event.elapsed_time(moment.event)
            moment.time_ns = start + round(passed_ms * 1e6)
            moment.anchor = None  # else each anchor keeps all before it
        return moment.time_ns  # type: ignore[no-any-return]  # a moment's is a number

    def settle(self) -> None:
        torch.accelerator.synchronize()


def clock_for(device: torch.device) -> Clock:
    return DeviceClock(device) if capabilities(device).has_lanes else Clock()


Account = Callable[[int, int], str]
"""What is told the begin and the end of a row, and returns what the row says besides."""


class Row:
    """A row that has begun."""

    __slots__ = ("account", "begin", "end", "extra", "range", "step", "text")
    end: Any  # the last three are there while times are not known
    extra: str
    account: Account | None

    def __init__(self, text: str, begin: Any, step: Step) -> None:
        self.text = text  # all of it but the times
        self.begin = begin
        self.step = step
        self.range: Any = None  # on the time line of a profiler, if one runs


class Ledger:
    """Rows of one rank."""

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
        self.round = 0  # of the last backward: a number that ranks share, whenever they began
        self.profiles = False  # a profiler runs
        self._allocator = allocator
        self._ended = ended  # is told of steps whose times are known
        self._count = 0
        self._numbers = itertools.count(1)
        self._unknown: deque[Row] = deque()  # whose times a device has not told yet
        self._steps: deque[Step] = deque()  # that are over, and have such rows
        self._quoted: dict[str, str] = {}

    # Rows.

    def begin(
        self, kind: str, unit: str, phase: str, nbytes: int = 0, begin: Any = None, more: str = ""
    ) -> Row:
        """Begin a row, now or at a moment before; ``more`` are columns as JSON."""
        text = self._columns(kind, unit, phase, nbytes, more)
        if not self.clock.is_host:
            text += f'{self._allocator.as_text()},"host_ns":{self.clock.host_now()}'
        return Row(text, self.clock.now() if begin is None else begin, self.step)

    def _columns(self, kind: str, unit: str, phase: str, nbytes: int, more: str) -> str:
        quoted = self._quoted.get(unit) or self.quote(unit)
        return (
            f'{{"n":{next(self._numbers)},"kind":"{kind}","unit":{quoted},"phase":"{phase}",'
            f'"step":{self.step.number},"round":{self.round},"nbytes":{nbytes},'
            f"{self.memory.as_text()}{more}"
        )

    def next_number(self) -> int:
        return next(self._numbers)

    def quote(self, name: str) -> str:
        """Return a name as JSON."""
        quoted = self._quoted.get(name)
        if quoted is None:
            quoted = self._quoted[name] = json.dumps(name)
        return quoted

    def say_waiting(self, row: Row) -> None:
        """Tell the file that the host is about to block in a wait. See its note on dying ranks."""
        text = row.text.replace('"kind":"wait"', '"kind":"waiting"', 1)
        self.writer.add(f'{text},"begin_ns":{row.begin},"end_ns":null}}\n')
        self.writer.flush()

    def show(self, row: Row, name: str) -> None:
        """Open a range on the time line of the profiler that runs, until the row ends."""
        row.range = torch.profiler.record_function(f"fsdp2::{name}")
        row.range.__enter__()

    def end(
        self, row: Row, end: Any = None, extra: str = "", account: Account | None = None
    ) -> None:
        """End a row, now or at another moment, and write it once its times are known."""
        if row.range is not None:
            row.range.__exit__(None, None, None)
        if end is None:
            end = self.clock.now()
        if self.clock.is_host:
            self._write(row, row.begin, end, extra, account)
        else:
            row.end, row.extra, row.account = end, extra, account
            row.step.unknown += 1
            self._unknown.append(row)

    def mark(self, kind: str, unit: str, phase: str, nbytes: int = 0, more: str = "") -> None:
        """Write a row of something that takes no time, by the clock of the host."""
        now = self.clock.host_now()
        text = self._columns(kind, unit, phase, nbytes, more)
        if not self.clock.is_host:
            text += self._allocator.as_text()
        self.writer.add(f'{text},"begin_ns":{now},"end_ns":{now}}}\n')

    def _write(
        self, row: Row, begin_ns: int, end_ns: int, extra: str, account: Account | None
    ) -> None:
        if account is not None:
            extra += account(begin_ns, end_ns)
        self.writer.add(f'{row.text},"begin_ns":{begin_ns},"end_ns":{end_ns}{extra}}}\n')

    def leave_open(self, row: Row, extra: str = "") -> None:
        """Write a row whose end nobody will see."""
        begin_ns = self.clock.when(row.begin)
        begin = "null" if begin_ns is None else begin_ns
        self.writer.add(f'{row.text},"begin_ns":{begin},"end_ns":null{extra}}}\n')

    # Steps.

    def begin_step(self) -> None:
        self._count += 1
        self.step = Step(self._count)
        self.memory.begin_step()

    def end_step(self, failed: bool = False) -> None:
        """The running step is over; what follows is outside of steps."""
        step, self.step = self.step, Step(0)
        if step.number == 0:
            return
        step.is_over, step.failed = True, failed
        step.peak_nbytes = self.memory.peak
        step.rss_nbytes, step.allocated_nbytes = resident_nbytes(), self._allocator.nbytes
        self._steps.append(step)
        self.resolve()

    def resolve(self) -> None:
        """Write the rows whose times the device can tell by now; end the steps that have all."""
        unknown, when = self._unknown, self.clock.when
        while unknown:
            row = unknown[0]
            end_ns = when(row.end)  # the end first: its stream has passed the begin, too
            begin_ns = None if end_ns is None else when(row.begin)
            if begin_ns is None or end_ns is None:
                break
            unknown.popleft()
            row.step.unknown -= 1
            self._write(row, begin_ns, end_ns, row.extra, row.account)
        while self._steps and self._steps[0].unknown == 0:
            self._ended(self._steps.popleft())

    def finish(self, may_wait: bool) -> None:
        """Write what is left. Without ``may_wait`` (something failed) some has no times."""
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

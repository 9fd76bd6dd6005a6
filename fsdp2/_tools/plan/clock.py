"""Time on a machine that is described: compute moves the clock, links carry, whoever waits waits.

Owns the clock, the links, and the spans of what took time. Host time is none: a step's time is what
its operations, its bytes and their order make it. It must not know what a unit does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fsdp2._core.base import torch_dtensor, torch_flops, torch_tensors
from fsdp2._core.base.containers import visit_tensors
from fsdp2._core.base.torch_modes import DispatchMode
from fsdp2._tools.pages.content import COMPUTE, GATHER, REDUCE, Span
from fsdp2._tools.plan.hardware import Hardware, bandwidth_of, flops_of, seconds_of
from fsdp2._tools.plan.lanes import LaneClock, Products

aten = torch.ops.aten
TAKES_NOTHING = {  # memory is taken, and not written
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    torch_flops.VIEW_OF_A_PRODUCT,
}
READS_ROWS = {aten.embedding.default, aten.index.Tensor, aten.gather.default}
"""These read as much as they make, whatever lies beside it."""
LANES = {
    "all_gather": GATHER,
    "reduce_scatter": REDUCE,
    "all_reduce": REDUCE,
    "all_to_all": REDUCE,
}


class Clock:
    """The time of one rank, in seconds, and what it did.

    ``label`` names what computes now. A link is a queue: what comes next starts when what came
    before has left it. Links inside a node and between nodes work at the same time.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.now = 0.0
        self.label = ""
        self.products = Products()
        self.spans: list[Span] = []
        self._began = 0.0  # of compute that no span has yet
        self._labelled = ""
        self._free_at: dict[float, float] = {}  # when each link is idle, by its bandwidth

    def compute(self, seconds: float) -> None:
        """Let an operation take its time."""
        if seconds == 0.0:
            return
        if self.label != self._labelled:
            self._end_compute()
            self._labelled = self.label
        self.now += seconds

    def _end_compute(self) -> None:
        if self.now > self._began:
            self.spans.append(Span(COMPUTE, self._labelled, self._began, self.now))
        self._began = self.now

    def send(
        self, kind: str, unit: str, nbytes: int, ranks: int, stride: int, pieces: int = 1
    ) -> Sent:
        """Queue a collective on its link; ``pieces`` of a host's take no more than one."""
        link = bandwidth_of(self.hardware, ranks, stride)
        began = max(self._free_at.get(link, 0.0), self.now)
        ended = began + seconds_of(self.hardware, kind, nbytes, ranks, stride)
        self._free_at[link] = ended
        name = f"{kind} {unit or '<root>'}"
        self.spans.append(Span(LANES[kind], name, began, ended, nbytes))
        return Sent(self, name, ended)

    def wait(self, until: float, cause: str) -> None:
        """Let compute wait."""
        if until > self.now:
            self._end_compute()
            self.spans.append(Span(COMPUTE, "waits", self.now, until, cause=cause))
            self.now = self._began = until

    def mark(self) -> float:
        """Return what ``time_of`` tells the time of: now."""
        return self.now

    def time_of(self, mark: float) -> float:
        return mark

    @property
    def seconds(self) -> float:
        """How long the step took, after ``finish``."""
        return self.now

    def restart(self) -> None:
        """Forget what was; a step begins at 0, with idle links."""
        self.now = self._began = 0.0
        self.products.seconds = 0.0
        self.spans.clear()
        self._free_at.clear()

    def finish(self) -> None:
        """End what is open, and wait for the links."""
        self._end_compute()
        idle = max(self._free_at.values(), default=0.0)
        self.wait(idle, "the link, to be idle")


class Sent:
    """A work that is over at a time that is known."""

    def __init__(self, clock: Clock, name: str, ended: float) -> None:
        self._clock, self._name, self._ended = clock, name, ended

    def is_completed(self) -> bool:
        return self._clock.now >= self._ended

    def wait(self) -> None:
        self._clock.wait(self._ended, self._name)


class TakesTime(Protocol):
    """A clock, as far as operations move it."""

    hardware: Hardware
    products: Products

    def compute(self, seconds: float) -> None: ...


class ComputeTime(DispatchMode):
    """Move a clock by what operations take: products by their operations, all by their bytes."""

    clock: TakesTime

    def __init__(self, clock: Clock | LaneClock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.clock = clock

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch_dtensor.is_among(types):
            return NotImplemented  # what it does to local tensors takes the time
        kwargs = kwargs or {}
        # fake tensors would make each padded chunk, to return what was given to be filled
        fills = func is torch_tensors.CHUNK_CATS[1]
        made = kwargs["out"] if fills else func(*args, **kwargs)
        if not func.is_view:
            self.clock.compute(self._seconds(func, args, kwargs, made))
        return made

    def _seconds(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any
    ) -> float:
        """Return the longer of computing and of moving what is read and written."""
        hardware = self.clock.hardware
        written = torch_flops.written_arguments(func)
        if func in TAKES_NOTHING or not (written or _tensors_in(made)):
            return 0.0
        tensors = _tensors_in((args, kwargs, made))
        if not tensors or tensors[0].is_meta:  # DTensor asks for shapes only
            return 0.0
        if func in READS_ROWS:
            nbytes = 2 * made.nbytes
        else:  # what is read or made, and what is written in place besides
            moved = {id(one): one.nbytes for one in tensors}
            nbytes = sum(moved.values())
            for key, is_only_written in written:
                given = kwargs.get(key) if isinstance(key, str) else args[key : key + 1]
                if not is_only_written:
                    nbytes += sum(one.nbytes for one in _tensors_in(given))
        moving: float = nbytes / hardware.memory_bandwidth
        count = torch_flops.FLOPS.get(func.overloadpacket)
        if count is None:
            return moving
        operations = count(*args, **kwargs, out_val=made)
        took = operations / flops_of(hardware, tensors[0].dtype)
        self.clock.products.add(took)
        return max(moving, took)


def _tensors_in(values: object) -> Sequence[Tensor]:
    found: list[Tensor] = []
    visit_tensors(found.append, values)
    return found

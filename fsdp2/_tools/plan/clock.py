"""Simulated time of a step on a machine that ``Hardware`` describes: compute and links, no host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fsdp2._core.base import torch_dtensor, torch_flops, torch_tensors
from fsdp2._core.base.containers import visit_tensors
from fsdp2._core.base.torch_modes import DispatchMode
from fsdp2._tools.pages.content import COMPUTE, GATHER, REDUCE, Span
from fsdp2._tools.plan.hardware import Hardware, bandwidth_of, seconds_of, seconds_of_kernel
from fsdp2._tools.plan.lanes import LaneClock

aten = torch.ops.aten
TAKES_NOTHING = {  # operations that allocate memory without writing it
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    torch_flops.VIEW_OF_A_PRODUCT,
}
READS_ROWS = {aten.embedding.default, aten.index.Tensor, aten.gather.default}
"""Operations that read as many bytes as they write, regardless of the size of their input."""


class Clock:
    """The time of one rank, in seconds, and its spans. ``label`` names the current compute. A link
    is a FIFO queue of transfers; links inside a node work in parallel with links between
    nodes. ``products`` is the time of matmuls, excluding recomputed ones."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.counts_products = True
        self.label = ""
        self._labelled = ""
        self.restart()

    def restart(self) -> None:
        self.seconds = self.products = 0.0
        self.spans: list[Span] = []
        self._began = 0.0  # start of the compute that has no span yet
        self._free_at: dict[float, float] = {}  # time when a link becomes idle, keyed by bandwidth

    def compute(self, seconds: float, product: float = 0.0) -> None:
        """Advance by an operation's time. ``product``: the part of this time that matmuls take."""
        if self.label != self._labelled:
            self._end_compute()
            self._labelled = self.label
        self.products += product
        self.seconds += seconds

    def _end_compute(self) -> None:
        if self.seconds > self._began:
            self.spans.append(Span(COMPUTE, self._labelled, self._began, self.seconds))
        self._began = self.seconds

    def send(
        self,
        kind: str,
        unit: str,
        nbytes: int,
        ranks: int,
        stride: int,
        pieces: int = 1,
    ) -> Sent:
        """Queue a collective on its link. On a host, the number of ``pieces`` has no effect."""
        link = bandwidth_of(self.hardware, ranks, stride)
        began = max(self._free_at.get(link, 0.0), self.seconds)
        ended = began + seconds_of(self.hardware, kind, nbytes, ranks, stride)
        self._free_at[link] = ended
        name = f"{kind} {unit or '<root>'}"
        lane = GATHER if kind == "all_gather" else REDUCE
        self.spans.append(Span(lane, name, began, ended, nbytes))
        return Sent(self, name, ended)

    def wait(self, until: float, cause: str) -> None:
        if until > self.seconds:
            self._end_compute()
            self.spans.append(Span(COMPUTE, "waits", self.seconds, until, cause=cause))
            self.seconds = self._began = until

    def mark(self) -> float:
        return self.seconds

    def time_of(self, mark: float) -> float:
        return mark

    def finish(self) -> None:
        """End open spans, and wait until the links are idle."""
        self._end_compute()
        idle = max(self._free_at.values(), default=0.0)
        self.wait(idle, "links to become idle")


AnyClock = Clock | LaneClock


class Sent:
    """The work object of a collective, which completes at a known time."""

    def __init__(self, clock: Clock, name: str, ended: float) -> None:
        self._clock, self._name, self._ended = clock, name, ended

    def is_completed(self) -> bool:
        return self._clock.seconds >= self._ended

    def wait(self) -> None:
        self._clock.wait(self._ended, self._name)


class ComputeTime(DispatchMode):
    """Advances a clock by the time of operations, computed from their matmul FLOPs and bytes."""

    def __init__(self, clock: AnyClock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.clock = clock
        self._take: Callable[[float, float], None] = clock.compute

    @contextmanager
    def aside(self, taken: list[tuple[float, float]]) -> Iterator[None]:
        """Stop the clock. Append the time of each operation, and of its matmuls, to ``taken``."""
        before, self._take = self._take, lambda *took: taken.append(took)
        try:
            yield
        finally:
            self._take = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch_dtensor.is_among(types):
            return NotImplemented  # DTensor's operations on local tensors are timed instead
        kwargs = kwargs or {}
        # do not run the ``out`` op: on fake tensors, it would compute padded chunks in vain
        fills = func is torch_tensors.CHUNK_CATS[1]
        made = kwargs["out"] if fills else func(*args, **kwargs)
        if not func.is_view:
            self._spend(func, args, kwargs, made)
        return made

    def _spend(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Any,
    ) -> None:
        written = torch_flops.written_arguments(func)
        if func in TAKES_NOTHING or not (written or tensors_in(made)):
            return
        tensors = tensors_in((args, kwargs, made))
        if not tensors or tensors[0].is_meta:  # DTensor only computes shapes
            return
        if func in READS_ROWS:
            nbytes = 2 * made.nbytes
        else:  # read or created tensors count once; tensors that are updated in place count twice
            moved = {id(one): one.nbytes for one in tensors}
            nbytes = sum(moved.values())
            for key, is_only_written in written:
                given = kwargs.get(key) if isinstance(key, str) else args[key : key + 1]
                if not is_only_written:
                    nbytes += sum(one.nbytes for one in tensors_in(given))
        count = torch_flops.FLOPS.get(func.overloadpacket)
        operations = 0.0 if count is None else count(*args, **kwargs, out_val=made)
        machine, dtype = self.clock.hardware, tensors[0].dtype
        seconds, product = seconds_of_kernel(machine, nbytes, operations, dtype)
        if seconds > 0.0:
            self._take(seconds, product if self.clock.counts_products else 0.0)


def tensors_in(values: object) -> list[Tensor]:
    found: list[Tensor] = []
    visit_tensors(found.append, values)
    return found

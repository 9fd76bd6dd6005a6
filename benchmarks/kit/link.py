"""A serial link in one process: collectives that are done when the link is.

Owns the clocks, the link, and the process group over it. An operation starts when the one before
it has left the link, takes bytes sent / bandwidth, and is done at a time that is known at once;
whoever waits for it moves the clock there. Compute goes on meanwhile. Every library gets the same
group.

Two clocks: the virtual one moves by what matrix products would take at a fixed rate, so that a
step's time depends on the order of operations alone; the wall clock sleeps.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.kit.noop import NoopGroup, _Done


class VirtualClock(TorchDispatchMode):
    """Time in floating-point operations: every matrix product of the model moves it."""

    unit = "flop"

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, moment: float) -> None:
        self._now = max(self._now, moment)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.mm.default:
            self.advance(2 * args[0].numel() * args[1].shape[1])
        return func(*args, **(kwargs or {}))

    def advance(self, operations: float) -> None:
        """Let compute take its time."""
        self._now += operations

    @contextlib.contextmanager
    def sees_emitted_products(self) -> Iterator[None]:
        """Let the products of code that inductor emitted move the clock; the mode is off inside.

        Emitted code calls them by `extern_kernels.mm` and the like, and compilers refuse to run
        under a mode that is not theirs. A product that is called in another way is not seen, so
        compare the time of a step without collectives with the plain model's.
        """
        from torch._inductor.select_algorithm import extern_kernels
        from torch.utils._python_dispatch import _disable_current_modes

        def timed(name: str) -> Callable[..., Any]:
            product = getattr(extern_kernels, name)
            count = flop_registry[getattr(torch.ops.aten, name)]

            def run(*args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> Any:
                self.advance(count(*args, out_val=out))
                return product(*args, out=out, **kwargs)

            return run

        products = {name: timed(name) for name in ("mm", "addmm", "bmm", "baddbmm")}
        with _disable_current_modes(), mock.patch.multiple(extern_kernels, **products):
            yield


class WallClock:
    """Time in seconds."""

    unit = "s"

    def __enter__(self) -> WallClock:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, moment: float) -> None:
        while (left := moment - time.perf_counter()) > 0:
            time.sleep(left)


class Link:
    """One serial queue. `bandwidth` is in bytes a unit of the clock; None: nothing takes time."""

    def __init__(self, clock: VirtualClock | WallClock, bandwidth: float | None = None) -> None:
        self.clock = clock
        self.bandwidth = bandwidth
        self.nbytes = 0.0
        self._free_at = 0.0

    def send(self, nbytes: float) -> float:
        """Queue an operation; return when it will be done."""
        self.nbytes += nbytes
        took = 0.0 if self.bandwidth is None else nbytes / self.bandwidth
        self._free_at = max(self._free_at, self.clock.now()) + took
        return self._free_at

    def wait_until_idle(self) -> None:
        self.clock.wait_until(self._free_at)


class _Sent(_Done):
    """A work that is done at a known time."""

    def __init__(self, link: Link, done_at: float, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__(tensors)
        self._link = link
        self._done_at = done_at

    def wait(self, timeout: Any = None) -> bool:
        self._link.clock.wait_until(self._done_at)
        return True

    def is_completed(self) -> bool:
        return self._link.clock.now() >= self._done_at


class LinkGroup(NoopGroup):
    """Rank 0 of a group whose ranks each send their parts in a ring, over a link of their own."""

    def __init__(self, rank: int, size: int, link: Link) -> None:
        super().__init__(rank, size)
        self._link = link

    def _send(self, nbytes: int, times: int, tensors: Sequence[torch.Tensor] = ()) -> dist.Work:
        self.calls += 1
        sent = times * nbytes * (self._size - 1) / self._size
        work = _Sent(self._link, self._link.send(sent), tensors)
        self._held.append(work)
        return work

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        return self._send(sum(tensor.nbytes for tensor in tensors), 2, tensors)

    def _repeat(self, output: torch.Tensor, source: torch.Tensor) -> None:
        if isinstance(self._link.clock, VirtualClock):  # else the copy would take real time
            super()._repeat(output, source)

    def allgather(
        self,
        outputs: Sequence[Sequence[torch.Tensor]],
        inputs: Sequence[torch.Tensor] = (),
        *rest: Any,
        **options: Any,
    ) -> dist.Work:
        for output, source in zip(outputs, inputs, strict=True):
            for tensor in output:  # of other lengths, perhaps: as much as both have
                nbytes = min(tensor.nbytes, source.nbytes)
                ctypes.memmove(tensor.data_ptr(), source.data_ptr(), nbytes)
        return self._send(sum(tensor.nbytes for output in outputs for tensor in output), 1)

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        self._repeat(output, source)
        return self._send(output.nbytes, 1)

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        self._copy_own_chunk(output, source)
        return self._send(source.nbytes, 1)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        for output, source in zip(outputs, inputs, strict=True):
            self._copy_own_chunk(output, source)
        return self._send(sum(source.nbytes for source in inputs), 1)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        for output, source in zip(outputs, inputs, strict=True):
            self._repeat(output, source)
        return self._send(sum(output.nbytes for output in outputs), 1)

    def reduce_scatter(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[Sequence[torch.Tensor]],
        opts: Any = None,
    ) -> dist.Work:
        for output, pieces in zip(outputs, inputs, strict=True):
            output.view(-1).copy_(pieces[self._rank].view(-1))
        return self._send(sum(piece.nbytes for pieces in inputs for piece in pieces), 1)

    def all_to_all_single(
        self, output: torch.Tensor, source: torch.Tensor, *rest: Any, **options: Any
    ) -> dist.Work:
        return self._send(source.nbytes, 1)

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # argument names
    alltoall_base = all_to_all_single  # type: ignore[assignment]  # argument names
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

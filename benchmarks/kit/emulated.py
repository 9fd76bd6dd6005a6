"""Collectives of N ranks emulated on one device, the same for every library.

An all-gather broadcasts this rank's shard over the output; a reduce-scatter joins the rows of the
input; an all-reduce leaves its tensor as it is, as if all ranks held the same divided by N. So data
are right for N ranks that hold the same. Kernels are of kinds that the models do not use
(`GATHER_KERNEL`, `SCATTER_KERNEL`), so that a profile tells them from copies. As with NCCL, an
asynchronous call runs in a stream of the group's own and `wait` makes the current stream wait; any
other call runs in the current stream. `sleep_cycles` adds time on the link to each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.kit.noop import NoopGroup, _Done

GATHER_KERNEL = r"[Bb]itwise_?[Oo]r"
SCATTER_KERNEL = r"reduce_kernel"  # the sum of a loss is one too, and small


class _Enqueued(_Done):
    """A work that is in a stream."""

    def __init__(self, event: torch.Event) -> None:
        super().__init__()  # without tensors, or the group would keep the last ones alive
        self._event = event

    def wait(self, timeout: Any = None) -> bool:
        torch.accelerator.current_stream().wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        return self._event.query()


class EmulatedGroup(NoopGroup):
    """Rank 0 of `size` ranks that all hold the same."""

    def __init__(self, rank: int, size: int, sleep_cycles: int = 0) -> None:
        super().__init__(rank, size)
        self._sleep_cycles = sleep_cycles
        self._stream: torch.Stream | None = None

    def _run(
        self, work: Callable[[], None], tensors: Sequence[torch.Tensor], opts: Any
    ) -> dist.Work:
        self.calls += 1
        if not tensors[0].is_cuda:
            work()
            return self._done
        if not getattr(opts, "asyncOp", False):
            self._sleep()
            work()
            return self._done
        stream = self._stream = self._stream or torch.Stream(tensors[0].device)
        stream.wait_stream(torch.accelerator.current_stream())
        for tensor in tensors:
            tensor.record_stream(stream)  # type: ignore[arg-type]  # the stub wants a CUDA stream
        with stream:
            self._sleep()
            work()
            event = stream.record_event()
        enqueued = _Enqueued(event)
        self._held.append(enqueued)
        return enqueued

    def _sleep(self) -> None:
        if self._sleep_cycles:
            torch.cuda._sleep(self._sleep_cycles)

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        def work() -> None:
            for output, source in zip(outputs, inputs, strict=True):
                rows = output.view(-1).view(torch.uint8).view(self._size, -1)
                row = source.reshape(-1).view(torch.uint8).expand(self._size, -1)
                if output.is_cuda:
                    torch.bitwise_or(row, 0, out=rows)
                else:  # a row may lie in the output, which some ops on a CPU refuse
                    rows.copy_(row.clone())

        return self._run(work, [*outputs, *inputs], opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        def work() -> None:
            is_mean = getattr(opts, "reduceOp", dist.ReduceOp.SUM) == dist.ReduceOp.AVG
            add_up = torch.mean if is_mean else torch.sum
            for output, source in zip(outputs, inputs, strict=True):
                add_up(source.reshape(self._size, -1), 0, out=output.view(-1))

        return self._run(work, [*outputs, *inputs], opts)

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        self.calls += 1
        work = _Done(tensors)
        self._held.append(work)
        return work

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # argument names
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

"""Collectives for large buffers, built from sends and receives where gloo's versions are slower.

gloo implements reduce-scatter as an all-reduce, which sends everything twice, and runs every
collective in a separate thread. With few ranks, each rank sends each part directly to its
destination. With many ranks, a single all-to-all sends all parts. Contains no code for layouts or
groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2._core.base import torch_comm

LARGE_NBYTES = 32768  # minimum size at which sends and receives beat gloo (docs/decisions/0013)
MAX_RANKS = 4  # maximum number of ranks with which parts are sent individually
GATHER_TAG, REDUCE_TAG = 0x46530001, 0x46530002
"""Tags that user code is unlikely to use. Messages with the same tag arrive in send order."""


def applies(group: dist.ProcessGroup, tensor: Tensor) -> bool:
    """Return True if sends and receives beat gloo's collectives for a large ``tensor``."""
    return tensor.is_cpu and torch_comm.is_gloo(group)


def is_small(group: dist.ProcessGroup) -> bool:
    """Return True if the group is small enough to send parts individually."""
    return group.size() <= MAX_RANKS


def run(work: Any, async_op: bool) -> dist.Work | None:
    """Return the work if ``async_op`` is set; otherwise wait for it and return None."""
    if not async_op:
        work.wait()
    return work if async_op else None


class Several:
    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class DirectGather(Several):
    """An all-gather: ``rows[r]`` receives ``sent`` from rank r. Lengths may differ by rank."""

    def __init__(
        self, rows: Sequence[Tensor] | Tensor, sent: Tensor, group: dist.ProcessGroup
    ) -> None:
        super().__init__(_swap(rows, [sent] * group.size(), group, GATHER_TAG))
        memmove(rows[group.rank()].data_ptr(), sent.data_ptr(), sent.nbytes)  # bypasses modes
        self._held = (rows, sent)

    def wait(self) -> None:
        super().wait()
        self._works, self._held = [], ()  # type: ignore[assignment]  # all are complete


class Exchange:
    """A reduce-scatter: fills ``output`` ``[S]`` with the sum or mean of all ranks' parts for this
    rank. Parts are added in rank order, so equal parts give equal sums. The additions use the dtype
    of ``output`` or a wider one, so parts may be sent in a narrower dtype. Completes in ``wait``.
    ``sizes``: number of elements of each rank's output, or None if all outputs have equal sizes."""

    def __init__(
        self,
        output: Tensor,
        sent: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self._output = output
        self._is_mean = op == dist.ReduceOp.AVG
        size, rank = group.size(), group.rank()
        received = torch.empty((size, output.numel()), dtype=sent.dtype, device=sent.device)
        own = sent.view(size, -1) if sizes is None else sent.split(list(sizes))
        self._work: Any
        if sent.is_cpu and torch_comm.is_gloo(group) and is_small(group):
            self._work = Several(_swap(received, own, group, REDUCE_TAG))
            self._rows = [own[i] if i == rank else received[i] for i in range(size)]
        else:
            lengths = None if sizes is None else [n * sent.itemsize for n in sizes]
            row = output.numel() * sent.itemsize
            self._work = dist.all_to_all_single(
                received.view(-1).view(torch.uint8),
                sent.view(torch.uint8),
                None if lengths is None else [row] * size,
                lengths,
                group=group,
                async_op=True,
            )
            self._rows = list(received)
        self._sent: Tensor | None = sent

    def is_completed(self) -> bool:
        return self._sent is None or bool(self._work.is_completed())

    def wait(self) -> None:
        if self._sent is None:
            return
        self._work.wait()
        self._add_up()
        if self._is_mean:
            self._output.div_(len(self._rows))
        self._work, self._sent, self._rows = None, None, []

    def _add_up(self) -> None:
        output, (first, second, *others) = self._output, self._rows
        if first.dtype == output.dtype and not others:
            torch.add(first, second, out=output)
        elif first.dtype == output.dtype and output.element_size() < 4:  # round only once
            output.copy_(torch.stack(self._rows).sum(0, dtype=torch.float32))
        else:
            output.copy_(first)
            for part in (second, *others):
                output.add_(part)


def _swap(
    received: Sequence[Tensor] | Tensor,
    sent: Sequence[Tensor] | Tensor,
    group: dist.ProcessGroup,
    tag: int,
) -> list[dist.Work]:
    """Send each of the other ranks its item, and receive one item from each."""
    works, size, rank = [], group.size(), group.rank()
    for step in range(1, size):  # each rank starts with a different peer
        other = (rank + step) % size
        works.append(group.recv([received[other]], other, tag))
        works.append(group.send([sent[other]], other, tag))
    return works

"""Collectives of large buffers made of sends and receives, where the backend's own cost more.

gloo reduce-scatters by an all-reduce, which sends everything twice, and runs every collective in a
thread of its own. Between few ranks each part is sent right from where it lies to where it is used;
between many, parts go in one all-to-all. It must not know layouts or groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2._core.base import torch_comm

LARGE_NBYTES = 32768
"""Bytes of a buffer from which this costs less than gloo's own (docs/decisions/0013)."""

MAX_RANKS = 4
"""Ranks up to which parts are sent one by one."""

GATHER_TAG, REDUCE_TAG = 0x46530001, 0x46530002
"""Beside the tags of the user's own sends. Messages of one tag arrive in the order sent."""


def applies(group: dist.ProcessGroup, tensor: Tensor) -> bool:
    """True if a collective on a large ``tensor`` is cheaper this way."""
    return tensor.is_cpu and torch_comm.is_gloo(group)


def is_small(group: dist.ProcessGroup) -> bool:
    """True if parts are sent one by one."""
    return group.size() <= MAX_RANKS


class Several:
    """Works that were issued one behind the other, as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class DirectGather(Several):
    """An all-gather: each of ``rows`` gets what that rank has ``sent``, of any length."""

    def __init__(
        self, rows: Sequence[Tensor] | Tensor, sent: Tensor, group: dist.ProcessGroup
    ) -> None:
        rank = group.rank()
        works = []
        for other in _others(group):
            works.append(group.recv([rows[other]], other, GATHER_TAG))
            works.append(group.send([sent], other, GATHER_TAG))
        super().__init__(works)
        memmove(rows[rank].data_ptr(), sent.data_ptr(), sent.nbytes)  # seen by no mode
        self._held = (rows, sent)

    def wait(self) -> None:
        super().wait()
        self._works, self._held = [], ()  # type: ignore[assignment]  # done with


class Exchange:
    """A reduce-scatter: ``output`` ``[S]`` gets the sum, or the mean, of this rank's parts.

    Sums are in the dtype of ``output`` and in the order of ranks, so a narrower dtype may travel,
    and equal parts have equal sums. It is done when it has been waited for. ``sizes`` are the
    elements of each rank's output; None: they are as many.
    """

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
            works = []
            for other in _others(group):
                works.append(group.recv([received[other]], other, REDUCE_TAG))
                works.append(group.send([own[other]], other, REDUCE_TAG))
            self._work = Several(works)
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
        """True if nothing has to travel any more."""
        return self._sent is None or bool(self._work.is_completed())

    def wait(self) -> None:
        """Wait for the parts and add them up."""
        if self._sent is None:
            return
        self._work.wait()
        output, (first, second, *others) = self._output, self._rows
        if first.dtype == output.dtype and not others:
            torch.add(first, second, out=output)
        elif first.dtype == output.dtype and output.element_size() < 4:  # one rounding, not many
            output.copy_(torch.stack(self._rows).sum(0, dtype=torch.float32))
        else:
            output.copy_(first)
            for part in (second, *others):
                output.add_(part)
        if self._is_mean:
            output.div_(len(self._rows))
        self._work, self._sent, self._rows = None, None, []


def _others(group: dist.ProcessGroup) -> list[int]:
    """Return the other ranks, beginning with the next one: not all write to one at a time."""
    size, rank = group.size(), group.rank()
    return [(rank + step) % size for step in range(1, size)]

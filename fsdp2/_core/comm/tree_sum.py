"""Sums over ranks in a fixed binary tree, bitwise equal for any number of ranks.

Owns the order of additions between ranks, and the wire that implements it. Contains no code for
slots or layouts: ``params.slot_sums`` adds up the gradients within a rank.

[Note: one tree]
A batch consists of G numbered *slots*. First the gradients of adjacent slots (0 and 1, 2 and 3) are
added, then adjacent sums, up to the root. Rank r of N has slots r * G / N to (r + 1) * G / N - 1. N
and G are powers of two, so a rank's slots form a full subtree, and their sum is a node of the tree.
The nodes of all ranks are added in rank order: first over the shard axis, whose ranks are
neighbours, then over the replicate axis. Each addition thus has the same two operands for every N.
Every node has the wire dtype. If this dtype is narrower than that of the sum, every rank also
rounds the nodes that it does not send.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2._core.base import torch_comm
from fsdp2._core.comm.gloo_p2p import Exchange, Several, run
from fsdp2._core.comm.mesh import MeshAxis
from fsdp2._core.comm.wire import DefaultReduceScatter, Wire


class TreeExchange(Exchange):
    """A reduce-scatter whose receiver adds the parts in the order of [Note: one tree]."""

    def _add_up(self) -> None:
        rows, own = self._rows, cast(Tensor, self._sent)
        while len(rows) > 1:
            rows = [_added(a, b, own) for a, b in zip(rows[::2], rows[1::2], strict=True)]
        self._output.copy_(rows[0])


def _added(first: Tensor, second: Tensor, kept: Tensor) -> Tensor:
    """Add two rows in place, but do not write to the memory of ``kept``, the sent tensor."""
    at = kept.untyped_storage().data_ptr()
    place = second if first.untyped_storage().data_ptr() == at else first
    return torch.add(first, second, out=place)


class TreeAllReduce:
    """An all-reduce: each rank sums one part of ``tensor`` over ranks, and sends the sum to all.

    ``wait`` issues the all-gather, so all ranks must call ``wait`` at the same point. Reductions
    call it in the order of backward. ``is_completed`` must not depend on timing, because
    ``free_if_done`` calls ``wait`` if the work is completed.
    """

    def __init__(
        self,
        tensor: Tensor,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
    ) -> None:
        size, numel = group.size(), tensor.numel()
        width = -(-numel // size)
        sent = tensor.new_zeros(size * width, dtype=dtype)
        sent[:numel] = tensor
        self._tensor: Tensor | None = tensor
        self._group = group
        self._part = sent.new_empty(width)
        self._exchange = TreeExchange(self._part, sent, group, dist.ReduceOp.SUM)

    def is_completed(self) -> bool:
        """Return True once ``wait`` has completed the exchange."""
        return self._tensor is None

    def wait(self) -> None:
        tensor, self._tensor = self._tensor, None
        if tensor is None:
            return
        self._exchange.wait()
        whole = self._part.new_empty(self._group.size() * len(self._part))
        torch_comm.all_gather_single(whole, self._part, group=self._group)
        tensor.copy_(whole[: tensor.numel()])


class TreeWire(Wire):
    """A wire that replaces ``plain`` and sums as in [Note: one tree].

    ``slots``: number of gradients per sum. ``hook_dtype``: dtype to which a hook casts gradients.
    """

    adds_alike: ClassVar[bool] = True

    def __init__(
        self,
        plain: Wire,
        slots: int,
        hook_dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.take_over(plain)
        self.keeps_landing = plain.keeps_landing
        if plain.sum_rows is not None:
            self.scatter, self.sum_rows, self.sum_replicas = DefaultReduceScatter(), None, None
        self.plain = plain
        self.slots = slots
        self._hook_dtype = hook_dtype

    def __reduce__(self) -> tuple[Any, ...]:
        return copy.copy, (self.plain,)  # a copy of the model has no slots

    @property
    def only_sums(self) -> bool:
        return True

    @property
    def node_dtype(self) -> torch.dtype | None:
        """The dtype to which every node is rounded; None: the dtype of the sum."""
        return self.gradient_dtype or self._hook_dtype

    def summands(self, ranks: int) -> int:
        return self.slots

    def reduce_scatter(
        self,
        output: Tensor,
        sent: Tensor,
        op: Any,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        return self.reduce_scatter_uneven(output, sent, (), op, axis, async_op)

    def reduce_scatter_uneven(
        self,
        output: Tensor,
        sent: Tensor,
        sizes: Sequence[int],
        op: Any,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        group = self.scatter_group or axis.pg
        if sent.is_complex():
            output, sent = torch_comm.flat_as_real(output), torch_comm.flat_as_real(sent)
            sizes = [2 * numel for numel in sizes]
        sent = sent.to(self.node_dtype or sent.dtype)
        return run(TreeExchange(output, sent, group, op, sizes or None), async_op)

    def reduce_scatter_each(
        self,
        pairs: Sequence[tuple[Tensor, Tensor]],
        op: Any,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        works = [self.reduce_scatter(*pair, op, axis, True) for pair in pairs]
        return run(Several(works), async_op)

    def all_reduce(
        self,
        tensor: Tensor,
        op: Any,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        real = torch_comm.flat_as_real(tensor)
        dtype = self.node_dtype or real.dtype
        return run(TreeAllReduce(real, axis.pg, dtype), async_op)

"""Local sums of a group's gradients over this rank's slots, computed before the reduction.

``SlotSums`` holds the partial sums of one group, and observes the group's ``Reducer``, so groups
without slots have no overhead. See [Note: one tree] in ``comm.tree_sum``.

Slots arrive in order, so partial sums form a stack: the top two are added while they cover the same
number of slots. For n slots, the stack has at most log2(n) sums plus the newest gradients. A
missing operand of an addition counts as zero, like a rank's missing gradient in the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fsdp2._core.base import torch_tensors
from fsdp2._core.base.errors import StateError
from fsdp2._core.base.slot_clock import SlotClock
from fsdp2._core.comm.tree_codes import LEAST_WIDTH, CodedTreeWire, Spans
from fsdp2._core.comm.tree_sum import TreeWire
from fsdp2._core.params.layout import ReduceLayout, ShardLayout
from fsdp2._core.params.planning import ReducePlan
from fsdp2._core.params.reduce import Reducer

Gradients = list[Tensor | None]


Sum = tuple[int, Gradients]
"""A number of consecutive slots, and the sum of their gradients."""


class SlotSums:
    """Sums the gradients of one group over slots."""

    def __init__(self, reducer: Reducer, clock: SlotClock) -> None:
        self._reducer = reducer
        self._clock = clock
        self._stack: list[Sum] = []
        self._batch = -1  # number of the batch to which the sums belong
        reducer.observe(self)

    @property
    def holds(self) -> bool:
        """Return True if there are partial sums of the current global batch."""
        return bool(self._stack) and self._batch == self._clock.batch

    @property
    def was_dropped(self) -> bool:
        """Return True if the reducer has dropped the gradients that were summed here."""
        return self.holds and not self._reducer.unreduced.own_sums

    def end(self) -> None:
        self._reducer.leave(self)

    def around(
        self,
        kind: str,
        source: Any,
        call: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Intercept the gradients of each slot; in the last slot, return the sum over all slots."""
        if kind == "begin_sums":  # gradients are taken after each slot, so none accumulate
            return call(replace(args[0], reduce_grads=True))
        if kind == "hold":
            self._push(*args)
            source.unreduced.own_sums += 1
            return None
        if kind == "take":
            self._push(*args)
            return self._pop(args[0])
        return call(*args, **kwargs)

    def _push(self, plan: ReducePlan, with_graph: bool) -> None:
        clock = self._clock
        grads = Reducer.take_gradients(self._reducer, plan, with_graph)[0]
        if self._batch != clock.batch:
            self._batch = clock.batch
            self._stack.clear()
        count = sum(slots for slots, _ in self._stack)
        if count > clock.place or not clock.is_begun:
            raise StateError(
                "FS329",
                f"{self._reducer.ids.fqn or '<root>'}: gradients were computed twice in slot "
                f"{clock.slot} of {clock.slots}. Run one backward for each slot, from the output "
                "of the model's forward.",
            )
        clock.is_done = True
        if clock.listener is not None:
            clock.listener(self._reducer, plan.members, grads)
        dtype = self.dtype_of(plan)
        for _ in range(count, clock.place):  # slots without a backward of this group
            self._join((1, [None] * len(grads)), plan)
        self._join((1, [None if grad is None else _rounded(grad, dtype) for grad in grads]), plan)

    def dtype_of(self, plan: ReducePlan) -> torch.dtype:
        """Return the dtype to which every node of the tree is rounded."""
        wire = self._reducer.wire
        node = wire.node_dtype if isinstance(wire, TreeWire) else None
        return node or plan.layout.dtype

    def _join(self, one: Sum, plan: ReducePlan) -> None:
        stack, dtype = self._stack, self.dtype_of(plan)
        while stack and stack[-1][0] == one[0]:
            left, right = (self._operand(grads, plan) for _, grads in (stack.pop(), one))
            one = 2 * one[0], _added(left, right, dtype)
        stack.append(one)

    def _operand(self, grads: Gradients, plan: ReducePlan) -> Gradients:
        """Round a node before it is added to its neighbour. See [Note: rounded nodes]."""
        wire, layout = self._reducer.wire, plan.layout
        if not isinstance(wire, CodedTreeWire):
            return grads
        found: Gradients = []
        for grad, shard in zip(grads, layout.shards, strict=True):
            if grad is not None and row_width(layout, shard):
                moved = grad.movedim(shard.dim or 0, 0)
                rounded = wire.codes.rounded(moved.reshape(len(moved), -1), layout.dtype)
                grad = rounded.reshape(moved.shape).movedim(0, shard.dim or 0)
            found.append(grad)
        return found

    def _pop(self, plan: ReducePlan) -> tuple[Gradients, int, bool]:
        """Return the total in the format of ``Reducer.take_gradients``."""
        ((_, grads),) = self._stack
        self._stack.clear()
        dtypes = {grad.dtype for grad in grads if grad is not None}
        return grads, grads.count(None), not dtypes <= {plan.grad_dtype}


def row_width(layout: ReduceLayout, shard: ShardLayout) -> int:
    """Return the elements per row of a parameter sent in 8-bit codes, or 0 for other parameters."""
    if shard.dim is None or not shard.numel or layout.dtype.is_complex:
        return 0
    width = shard.numel // shard.shape[shard.dim]
    return width if width >= LEAST_WIDTH else 0


def coded_spans(reducer: Reducer) -> Spans:
    layout = reducer.plan().layout
    spans = [
        (start, start + shard.padded_numel, row_width(layout, shard))
        for start, shard in zip(layout.offsets, layout.shards, strict=True)
    ]
    return sorted(span for span in spans if span[2])


def _rounded(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to ``dtype``. Narrower gradients are not cast, because sums are in ``dtype``."""
    return grad if torch.promote_types(grad.dtype, dtype) is dtype else grad.to(dtype)


def _added(
    left: Sequence[Tensor | None], right: Sequence[Tensor | None], dtype: torch.dtype
) -> Gradients:
    """Add two nodes in ``dtype``, in place if the left gradient has this dtype."""
    joined: Gradients = []
    pairs: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for a, b in zip(left, right, strict=True):
        kept = b if a is None else a
        if a is not None and b is not None:
            kept = a.to(dtype)
            sums, addends = pairs.setdefault((a.device, b.dtype), ([], []))
            sums.append(kept)
            addends.append(b)
        elif kept is not None:
            kept.add_(0.0)  # turns -0.0 into 0.0, as adding a missing gradient's zeros would
        joined.append(kept)
    for sums, addends in pairs.values():
        torch_tensors.add_all_(sums, addends)
    return joined

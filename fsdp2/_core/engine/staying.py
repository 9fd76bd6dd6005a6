"""What backwards leave in memory for the forwards of one accumulation, and until when it is valid.

Owns one question: may the forward that begins use what an earlier one gathered? It must not know
how anything is gathered; the runtime tells it where a forward begins and a backward ends.

[Note: until the next step]
A backward without gradient sync says that another one follows before the optimizer's step. After it
parameters may stay whole (``shard``), or sharded over a smaller mesh, for the forward of the next
micro-batch. The first forward after a step gathers them from the shards that the optimizer wrote.

What is written to ``.data``, a NumPy array or a local tensor counts no version, and a fused kernel
on DTensors counts none either. So a forward uses what stayed only if all of this holds:

- a backward without gradient sync left it there, and this forward is recorded;
- it left gradients, and they are there: the same objects, of the same versions. One that computed
  gradients of inputs alone, as for forces, left none: it may have been an evaluation;
- no optimizer has stepped, and no shard has another version.

Otherwise memory is freed when the forward begins, and gathered again unit by unit. Not seen is only
a write that counts no version in the middle of an accumulation that goes on afterwards. Nothing
that is asked here differs between ranks that run alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fsdp2._core.base import torch_dtensor
from fsdp2._core.base.torch_autograd import version_of
from fsdp2._core.params.group import ParamGroup
from fsdp2._core.params.registration import Serves


class Staying:
    """The groups of a tree that stay as they are from a backward to the forwards after it."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._all = groups  # of the tree: a frozen group has no gradients of its own
        self._may_keep = any(group.may_stay for group in groups)
        self._kept: dict[ParamGroup, None] = {}  # in the order in which they were kept
        # the gradients that there were when the last backward began
        self._before: list[tuple[int, int]] = []
        # the gradients that it left; None: it left none
        self._gradients: list[tuple[int, int]] | None = None

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, groups: Iterable[ParamGroup]) -> None:
        """Let groups stay, of which the values were noted, after a backward."""
        for group in groups:
            if group.registration.serves is Serves.ACCUMULATION:
                self._kept[group] = None

    def begin_backward(self) -> None:
        """See which gradients there are before a backward leaves more."""
        if self._may_keep:
            self._before = self._look()

    def note_gradients(self) -> None:
        """A backward is over: see which gradients there are now."""
        found = self._look()
        self._gradients = None if found == self._before else found or None

    def begin_forward(self) -> None:
        """Free what must not be used any more. See [Note: until the next step]."""
        is_evaluation = not torch.is_grad_enabled()
        is_over = is_evaluation or self._gradients is None or self._look() != self._gradients
        for group in list(self._kept):
            registration = group.registration
            stays = registration.values is not None
            if stays and registration.serves is Serves.ACCUMULATION:
                if not is_over and not registration.were_written:
                    continue
                group.reshard()
            del self._kept[group]

    def _look(self) -> list[tuple[int, int]]:
        """Return what tells gradients from others, those included that wait for a reduction.

        The same on ranks that run alike, or different from what it was on each of them.
        """
        found: list[tuple[int, int]] = []
        with torch_dtensor.DisableTorchFunctionSubclass():  # halves what reads of a DTensor cost
            for group in self._all:
                reducer, before = group.reducer, len(found)
                if reducer.unreduced.own_sums:
                    found.append((0, reducer.unreduced.own_sums))
                for param in group.params:
                    for form in (param.sharded, param.unsharded):
                        grad = None if form is None else form.grad
                        if grad is not None:  # not held: a buffer that nobody holds is filled again
                            found.append((id(grad), version_of(grad)))
                if len(found) > before:  # what is added to a DTensor counts no version there
                    found.append((0, reducer.deliveries))
        return found

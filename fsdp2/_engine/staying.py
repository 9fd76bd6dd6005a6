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
- the gradients that it left are there: the same objects, of the same versions, or whole ones that
  wait for a reduction;
- no optimizer has stepped, and no shard has another version.

Otherwise memory is freed when the forward begins, and gathered again unit by unit. Not seen is only
a write that counts no version in the middle of an accumulation that goes on afterwards. Nothing
that is asked here differs between ranks that run alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from fsdp2._base import torch_dtensor
from fsdp2._base.torch_autograd import version_of
from fsdp2._param_group.group import ParamGroup
from fsdp2._param_group.registration import Serves


class Staying:
    """The groups of a tree that stay as they are from a backward to the forwards after it."""

    def __init__(self, groups: Sequence[ParamGroup]) -> None:
        self._all = groups  # of the tree: a frozen group has no gradients of its own
        self._kept: dict[ParamGroup, None] = {}  # in the order in which they were kept
        # the gradients that the last backward left; None: there were none
        self._gradients: list[tuple[int, int]] | None = None

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, groups: Iterable[ParamGroup]) -> None:
        """Let groups stay, of which the values were noted, after a backward."""
        for group in groups:
            if group.registration.serves is Serves.ACCUMULATION:
                self._kept[group] = None

    def note_gradients(self) -> None:
        """A backward is over: see which gradients it left."""
        self._gradients = self._look()

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

    def _look(self) -> list[tuple[int, int]] | None:
        found, is_waiting = [], False
        with torch_dtensor.DisableTorchFunctionSubclass():  # halves what reads of a DTensor cost
            for group in self._all:
                unreduced = group.reducer.unreduced
                is_waiting |= unreduced.is_waiting or unreduced.is_owed
                for param in group.params:
                    grad = param.sharded.grad
                    if grad is not None:  # not held: a buffer that nobody holds is filled again
                        found.append((id(grad), version_of(grad)))
        return found if found or is_waiting else None

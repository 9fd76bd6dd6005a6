"""What backwards leave in memory for the forwards of one accumulation, and until when it is valid.

Owns one question: may the forward that begins use what an earlier one gathered? It must not know
how anything is gathered; the runtime tells it where a forward begins and a backward ends.

[Note: until the next step]
With ``shard="gradients"`` or ``"optimizer"`` parameters stay whole from one micro-batch to the
next, and on a mesh of nodes their shards in a node do. The first forward after a step gathers them
from the shards that the optimizer wrote. What is written to ``.data``, a NumPy array or a local
tensor counts no version, and a fused kernel on DTensors counts none either. So versions alone must
not decide. A forward uses what stayed only if all of this holds:

- a backward left it there, and gradients have come that no step has used up: some sharded
  parameter of the tree has a gradient, or gradients wait for a reduction;
- these gradients are as that backward left them: the same objects, of the same versions;
- no optimizer has stepped, and no shard has another version.

Otherwise memory is freed when the forward begins, and gathered again unit by unit. So a step, a
load, an average that is swapped in, or an update by hand, after which gradients are dropped, is
always seen. Not seen is only a write that counts no version between two backwards of one
accumulation. Nothing that is asked here differs between ranks that run alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        is_over = self._gradients is None or self._look() != self._gradients
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

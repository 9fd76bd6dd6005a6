"""The unsharded parameters of a group: one buffer whose memory comes and goes, and who reads it.

Owns that memory, and the question whether anything on this rank still refers to it. It must not
know how the buffer is filled, or what is registered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._base import torch_autograd, torch_tensors
from fsdp2._param_group.shard_buffer import ShardBuffer


class FullBuffer:
    """Memory of unsharded parameters. They are views of it, made once, also while it is freed."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._storage = self.flat.untyped_storage()
        self.has_memory = True  # the state of the group does not tell: a gather may fill it

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def allocate(self, nbytes: int) -> None:
        self._storage.resize_(nbytes)
        self.has_memory = True

    def free(self) -> None:
        self._storage.resize_(0)
        self.has_memory = False

    def bind(self, buffer: ShardBuffer) -> None:
        """Let another shard buffer fill this one: views cannot be made of a freed storage."""
        self.allocate(buffer.layout.full_nbytes)
        buffer.bind(self.flat)
        self.free()


class Readers:
    """Who reads a part's unsharded parameters. See [Note: laid aside] in ``group``."""

    def __init__(self) -> None:
        self.is_called = False  # through the part's own modules, which are watched
        self.is_recomputed = False  # a recomputation reads parameters that nothing refers to
        self.ran_without_grad = False  # as the reentrant kind of checkpointing does first
        self._accumulators: list[Any] = []  # or a graph that uses them would count as an owner
        self._at_rest: list[int] | None = None  # owners while nobody reads; None: not known

    def __getstate__(self) -> dict[str, Any]:
        """Copies are shared by a copied group and its hooks; they have met nobody yet."""
        return vars(Readers())

    def forget(self) -> None:
        """The unsharded parameters will be made anew."""
        self._at_rest = None

    def meet(self, full: FullBuffer, wholes: Sequence[Tensor | None]) -> None:
        """Count who refers to unsharded parameters that were just made: nobody reads them yet."""
        self._accumulators = torch_autograd.accumulators_of(wholes)
        self._at_rest = _owners(full, wholes)

    @property
    def are_known(self) -> bool:
        """True if looking at references would tell."""
        return self._at_rest is not None and not self.is_recomputed and self.is_called

    def are_gone(self, full: FullBuffer, wholes: Sequence[Tensor | None]) -> bool:
        """True if nothing else refers to the memory. Call it while shards are registered."""
        return _owners(full, wholes) == self._at_rest


def _owners(full: FullBuffer, wholes: Sequence[Tensor | None]) -> list[int] | None:
    """Count what refers to the memory; None if that cannot be told."""
    if any(isinstance(whole, DTensor) for whole in wholes):
        return None
    return [*torch_tensors.count_owners(wholes), torch_tensors.storage_use_count(full._storage)]

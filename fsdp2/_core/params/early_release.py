"""Large parts of a root, released before the root is: who reads them, and whether they still do.

Owns the question whether anything on this rank still refers to unsharded parameters. It must not
know how they are gathered, or what is registered.

[Note: released early]
A large part of a root is *released early* after forward if its backward reads it on no rank, and as
soon as its gradients are in. That is a statement about collectives, the same on every rank: the
group counts as sharded, and whoever needs it next gathers it: after forward that is no backward,
but after its gradients are in it may be the backward of another open call. What all ranks decided
is not taken back on those that kept the memory. What a rank does with it is its own affair. It is
freed if, and only if, nothing else refers to it: not autograd (whatever it saved holds the tensor,
or the storage of a view), not the user. Otherwise this rank keeps the parameters, registered and
whole, until it reshards: its state is RELEASED. Recomputation (checkpointing) needs parameters that
nothing refers to, so a part that ran under it is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._core.base import torch_autograd, torch_tensors
from fsdp2._core.params.buffers import FullBuffer


class EarlyRelease:
    """Whether a group is a large part of a root, and where it is released early."""

    def __init__(self) -> None:
        self.part = ""  # the part's name in its root
        self.readers: Readers | None = None  # of such a part
        self.skips_backward = False  # until it is resharded: backward does not read it

    def become_part(self, name: str) -> Readers:
        """Be a large part of a root, called ``name`` in it. Return who will read it."""
        self.part = name
        self.readers = readers = Readers()
        return readers


class Readers:
    """Who reads a part's unsharded parameters. See [Note: released early]."""

    def __init__(self) -> None:
        self.is_called = False  # through the part's own modules, which are watched
        self.is_recomputed = False  # a recomputation reads parameters that nothing refers to
        self.ran_without_grad = False  # as the reentrant kind of checkpointing does first
        self._accumulators: list[Any] = []  # or a graph that uses them would count as an owner
        self._stream: torch.Stream | None = None  # in which these were made
        self._at_rest: list[int] | None = None  # owners while nobody reads; None: not known

    def __getstate__(self) -> dict[str, Any]:
        """Copies are shared by a copied group and its hooks; they have met nobody yet."""
        return vars(Readers())

    def forget(self) -> None:
        """The unsharded parameters will be made anew."""
        self._at_rest = None

    def meet(
        self, full: FullBuffer, wholes: Sequence[Tensor | None], stream: torch.Stream | None
    ) -> None:
        """Count who refers to unsharded parameters that were just made: nobody reads them yet."""
        self._accumulators = torch_autograd.accumulators_of(wholes)
        self._stream = stream
        self._at_rest = _owners(full, wholes)

    def follow(self, wholes: Sequence[Tensor | None], stream: torch.Stream | None) -> None:
        """Let gradients add up in the stream of a forward that begins.

        They do in the stream in which the nodes were made that accumulate them.
        """
        if stream != self._stream and self._accumulators:
            self._accumulators = []  # or the same ones would be found
            self._accumulators = torch_autograd.accumulators_of(wholes)
            self._stream = stream

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
    return [*torch_tensors.count_owners(wholes), torch_tensors.use_count(full.number)]

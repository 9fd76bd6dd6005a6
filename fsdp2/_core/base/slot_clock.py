"""The current slot of the global batch, and its random numbers, for ``fsdp2.reproducible``.

Counts slots and steps, and sets the generators' state during a slot's forward. Contains no sharding
or gradient code: the code that takes a slot's gradients sets ``is_done``.

[Note: random numbers of a slot]
The random numbers of a forward depend on the seed, the step and the slot, but not on the rank or on
earlier work. The generators have a separate state only during the forward, so that numbers drawn
between forwards are the same as without slots. Recomputed forwards use the state that activation
checkpointing restores.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from dataclasses import InitVar, dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

clocks: weakref.WeakKeyDictionary[nn.Module, SlotClock] = weakref.WeakKeyDictionary()
"""Clocks of reproducible models. While a clock exists, norms are summed exactly."""


@dataclass(frozen=True)
class State:
    """The state in a checkpoint: the seed, and the number of completed global batches."""

    seed: int
    steps: int

    @staticmethod
    def unpacked(kept: object) -> State:
        """Parse the result of ``SlotClock.packed``.

        Raises:
            ValueError: the value has an invalid format.
        """
        if not isinstance(kept, bytes):
            raise ValueError("the state of slots is invalid")
        seed, steps = map(int, kept.split())
        return State(seed, steps)


loaded: weakref.WeakKeyDictionary[nn.Module, State] = weakref.WeakKeyDictionary()
"""States loaded from checkpoints into models that were not reproducible yet."""


@dataclass(eq=False)
class SlotClock:
    """The position of one rank in its cycle of slots.

    ``listener`` is called with each slot's gradients, group by group, before they are summed.
    """

    slots: int
    mine: range
    seed: int
    device: InitVar[torch.device]
    step: int = 0  # global batches before this one
    place: int = 0  # index of the current slot in ``mine``
    batch: int = 0  # like ``step``, but including dropped batches
    is_begun: bool = False  # the forward of the current slot has begun
    is_done: bool = False  # some gradients of the current slot have been taken
    listener: Callable[..., None] | None = None

    def __post_init__(self, device: torch.device) -> None:
        seed_host = torch.default_generator.manual_seed
        self._generators = [_Generator(torch.get_rng_state, torch.set_rng_state, seed_host)]
        if device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device.type)
            self._generators.append(
                _Generator(module.get_rng_state, module.set_rng_state, module.manual_seed)
            )

    @property
    def slot(self) -> int:
        return self.mine[self.place]

    @property
    def is_last(self) -> bool:
        """Return True if gradients are reduced after the current slot."""
        return self.place == len(self.mine) - 1

    def begin_forward(self, was_dropped: bool) -> None:
        """Begin a training forward. ``was_dropped``: gradients of earlier slots were dropped."""
        if was_dropped:
            self.place, self.is_begun, self.is_done = 0, False, False
            self.batch += 1
        elif self.is_done:
            self.is_begun = self.is_done = False
            self.step += self.is_last
            self.batch += self.is_last
            self.place = 0 if self.is_last else self.place + 1
        seed = None if self.is_begun else self._mixed_seed()
        self.is_begun = True
        for generator in self._generators:
            generator.enter(seed)

    def end_forward(self) -> None:
        for generator in self._generators:
            generator.leave()

    def _mixed_seed(self) -> int:
        text = f"{self.seed} {self.step} {self.slot}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1

    def packed(self) -> bytes:
        """Return the state as bytes for a checkpoint."""
        return b"%d %d" % (self.seed, self.step + (self.is_done and self.is_last))

    def go_on(self, state: State) -> None:
        """Continue from a checkpoint, at the first slot of the next global batch."""
        self.seed, self.step = state.seed, state.steps
        self.place, self.is_begun, self.is_done = 0, False, False
        self.batch += 1


def load(model: nn.Module, state: State) -> None:
    """Apply a checkpoint's state, now or when the model becomes reproducible."""
    if model in clocks:
        clocks[model].go_on(state)
    else:
        loaded[model] = state


@dataclass(eq=False)
class _Generator:
    """A device type's random generator, with a separate state during a slot's forward."""

    get: Callable[[], Tensor]
    put: Callable[[Tensor], Any]
    seed: Callable[[int], Any]
    outside: Tensor | None = None
    inside: Tensor | None = None  # the state at the end of the slot's last forward

    def enter(self, seed: int | None) -> None:
        self.outside = self.get()
        if seed is not None:
            self.seed(seed)
        elif self.inside is not None:
            self.put(self.inside)

    def leave(self) -> None:
        if self.outside is not None:
            self.inside = self.get()
            self.put(self.outside)
            self.outside = None

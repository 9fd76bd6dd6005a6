"""Activations and states on the host of a machine that is not there: bytes, and copies on a clock.

Owns what acts as pinned memory and as the two lanes of copies. It must not know what travels.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2._offload.activations import Activations
from fsdp2._offload.host_memory import CopyLanes, HostBuffer, HostMemory
from fsdp2._plan.lanes import BACK, KERNELS, OUT, LaneClock

MIN_NBYTES = 1 << 18
"""As ``offload_activations`` has it."""


class ImaginedMemory(HostMemory):
    """Pinned memory of which nothing is there but its size."""

    def _allocate(self, nbytes: int) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu")


class ImaginedCopies(CopyLanes):
    """Two lanes of a clock. Events are its marks."""

    def __init__(self, clock: LaneClock) -> None:
        self._clock = clock

    @property
    def compute(self) -> Any:
        return self

    def wait_event(self, mark: int) -> None:
        """Let compute wait for a copy."""
        self._clock.hold_back(KERNELS, mark)

    def send_out(self, source: Tensor, buffer: HostBuffer) -> Any:
        return self.move(OUT, source.numel())

    def send_storage(self, tensor: Tensor, buffer: HostBuffer) -> Any:
        return self.move(OUT, tensor.untyped_storage().nbytes())

    def view(
        self,
        held: Tensor,
        dtype: torch.dtype,
        size: torch.Size,
        stride: tuple[int, ...],
        offset: int,
    ) -> Tensor:
        """View memory without ``set_``: a mode of fake tensors remembers storages given to it."""
        of_dtype = held if held.dtype is dtype else held.view(dtype)
        return of_dtype.as_strided(size, stride, offset)

    def bring_back(self, buffer: HostBuffer, target: Tensor) -> Any:
        return self.move(BACK, target.numel())

    def move(self, lane: int, nbytes: int, after: int | None = None) -> int:
        """Copy so many bytes, behind compute or behind a mark; return when that is over."""
        clock = self._clock
        clock.hold_back(lane, clock.mark(KERNELS) if after is None else after)
        with clock.on(lane):
            clock.copy(nbytes)
        return clock.mark(lane)


class ImaginedActivations(Activations):
    """Activations of tensors without memory that leave a device which is not there."""

    def __init__(self, model: nn.Module, chosen: dict[nn.Module, bool], clock: LaneClock) -> None:
        self._copies = ImaginedCopies(clock)
        super().__init__(model, chosen, MIN_NBYTES)

    def _make_memory(self) -> HostMemory:
        return ImaginedMemory()

    def _lanes_of(self, device: torch.device) -> CopyLanes:
        return self._copies

    def _can_copy(self, tensor: Tensor) -> bool:
        return not isinstance(tensor, DTensor)

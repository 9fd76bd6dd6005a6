"""Private torch API, by subject: tensors as memory, and kernels that take many tensors.

Each private name states why it is needed. Tried on torch 2.11.0, 2.13.0 and 2.15.0. Nothing here
knows what a unit or a group is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch

chunk_cat: Callable[..., object] = torch._chunk_cat
"""Write ``size`` padded chunks of every tensor's dim 0 into the rows of ``out``, and cast.

It takes the tensors, 0, ``size`` and ``out``. One kernel for a whole group on CUDA; the public
``chunk`` and ``cat`` take one for each.
"""

DEVICE_OF = torch.ops.prim.device.default
"""What modes see when somebody asks a tensor for its device: no public name, and no operation."""


def device_of_fake(tensor: torch.Tensor) -> torch.device:
    """Return the device of a tensor without memory, as it says itself: asking is dispatched."""
    device: torch.device = getattr(tensor, "fake_device", None) or tensor.device
    return device


CHUNK_CATS = (torch.ops.aten._chunk_cat.default, torch.ops.aten._chunk_cat.out)
"""What that is to a dispatch mode. On a CPU it takes memory that no output shows."""


def by_kind(
    tensors: Iterable[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Return tensors by what one of the kernels below can take together."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return found


# Kernels for lists of tensors of one device and dtype: a few for all of them on a device.

norms_of: Callable[..., Sequence[torch.Tensor]] = torch._foreach_norm
copy_all: Callable[..., object] = torch._foreach_copy_
scale_all_: Callable[..., object] = torch._foreach_mul_
zero_all_: Callable[..., object] = torch._foreach_zero_
lerp_all_: Callable[..., object] = torch._foreach_lerp_
fused_adam = torch._fused_adam_
fused_adamw = torch._fused_adamw_
"""The kernels of ``Adam(fused=True)``, which ``torch.optim`` calls with lists of tensors."""


# References: whether a buffer may be reused. See [Note: reused gradients] in gradients.


local_of: Callable[[torch.Tensor], torch.Tensor] = attrgetter("_local_tensor")
"""The local tensor of a DTensor."""

owners_of: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
"""How many owners a tensor has in C++; ``sys.getrefcount`` tells of those in Python."""


def count_owners(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Return how many owners each plain tensor has, in Python and in C++."""
    counts = []
    for tensor in tensors:
        counts.append(sys.getrefcount(tensor))
        counts.append(0 if tensor is None else tensor._use_count())  # type: ignore[attr-defined]
    return counts


number_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""What ``use_count`` takes: it stays the same as long as the storage lives."""

use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""How many tensors and objects share the storage of a number."""


def clamped_quotients(
    values: Sequence[torch.Tensor], divisors: Sequence[torch.Tensor], most: float
) -> tuple[torch.Tensor, ...]:
    """Return each value over its divisor, between ``-most`` and ``most``, by few calls."""
    found = torch._foreach_div(list(values), list(divisors))
    torch._foreach_clamp_max_(found, most)
    torch._foreach_clamp_min_(found, -most)
    return found

"""Private torch API, by subject: tensors as memory, and kernels that take many tensors.

Each private name states why it is needed. Tried on torch 2.11.0 and 2.13.0. Nothing here knows what
a unit or a group is.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import torch


def copy_bytes(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a contiguous tensor in host memory over another one, as a collective would."""
    ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)


def chunk_cat(tensors: list[torch.Tensor], size: int, out: torch.Tensor) -> None:
    """Write ``size`` padded chunks of every tensor's dim 0 into the rows of ``out`` and cast.

    One kernel for a whole group on CUDA; the public ``chunk`` and ``cat`` take one for each.
    """
    torch._chunk_cat(tensors, 0, size, out=out)


def by_kind(
    tensors: Iterable[torch.Tensor],
) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Return tensors by what one of the kernels below can take together."""
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return found


def norms_of(tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return the vector norm of each tensor: a few kernels for all of them on a device."""
    return list(torch._foreach_norm(list(tensors), order))


copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], object] = torch._foreach_copy_
"""Copy tensors, the second list, over others of the same shapes."""


def scale_all_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors of one device in place: a few kernels for all of them on a device."""
    torch._foreach_mul_(list(tensors), factor)


def zero_all_(tensors: Sequence[torch.Tensor]) -> None:
    """Fill tensors of one device and dtype with zeros: a few kernels for all on a device."""
    torch._foreach_zero_(list(tensors))


def lerp_all_(tensors: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], weight: float) -> None:
    """Move each tensor towards its end by ``weight``, in place: a few kernels for all of them."""
    if tensors:
        torch._foreach_lerp_(list(tensors), list(ends), weight)


fused_adam = torch._fused_adam_
fused_adamw = torch._fused_adamw_
"""The kernels of ``Adam(fused=True)``, which ``torch.optim`` calls with lists of tensors."""


# References: whether a buffer may be reused. See [Note: reused gradients] in gradient_buffer.


def count_references(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return how many owners each DTensor and its local tensor have, in Python and in C++."""
    counts = []
    for tensor in tensors:
        local = tensor._local_tensor  # type: ignore[attr-defined]  # of a DTensor
        counts.append(sys.getrefcount(tensor))
        counts.append(tensor._use_count())  # type: ignore[attr-defined]  # not in the stubs
        counts.append(sys.getrefcount(local))
        counts.append(local._use_count())
    return counts


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

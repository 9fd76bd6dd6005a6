"""Private torch APIs: memory of tensors, tensors in files, and kernels for lists of tensors.

Comments say why each name is needed. Tested: torch 2.11.0, 2.13.0, 2.15.0. No unit or group code.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

chunk_cat: Callable[..., object] = torch._chunk_cat
"""``(tensors, 0, size, out=)``: split dim 0 of each tensor into ``size`` padded chunks, cast them,
and write them to rows of ``out``. On CUDA, this op is one kernel, whereas ``chunk`` and ``cat``
launch one kernel per tensor."""

CHUNK_CATS = (torch.ops.aten._chunk_cat.default, torch.ops.aten._chunk_cat.out)
"""The overloads of the op, as seen by dispatch modes. On a CPU, they also use temporary memory."""

DEVICE_OF = torch.ops.prim.device.default
"""The op that dispatch modes see when a tensor's device is read; it has no public name."""


def device_of_fake(tensor: Tensor) -> torch.device:
    """Return a fake tensor's device from ``fake_device``: reading ``device`` is dispatched."""
    return getattr(tensor, "fake_device", None) or tensor.device


def by_kind(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Group tensors by device and dtype, as the kernels below require."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return found


# Kernels for lists of tensors of one device and dtype. On a device, a list takes a few launches.

norms_of: Callable[..., Sequence[Tensor]] = torch._foreach_norm
copy_all: Callable[..., object] = torch._foreach_copy_
add_all_: Callable[..., object] = torch._foreach_add_
scale_all_: Callable[..., object] = torch._foreach_mul_
lerp_all_: Callable[..., object] = torch._foreach_lerp_
fused_adam = torch._fused_adam_
fused_adamw = torch._fused_adamw_
"""The kernels of ``Adam(fused=True)``, which ``torch.optim`` calls with lists of tensors."""

# Reference counts show whether a buffer is reusable. See [Note: reused gradients] in gradients.

owners_of: Callable[[Tensor], int] = Tensor._use_count  # type: ignore[attr-defined]
"""Number of a tensor's C++ owners; ``sys.getrefcount`` counts those in Python."""


def count_owners(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return two counts for each plain tensor: its owners in Python and its owners in C++."""
    counts = []
    for tensor in tensors:
        counts.append(sys.getrefcount(tensor))
        counts.append(0 if tensor is None else tensor._use_count())  # type: ignore[attr-defined]
    return counts


number_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""The number by which ``use_count`` identifies a storage; constant during its lifetime."""

use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""Number of tensors and objects that share the storage whose ``number_of`` is passed."""


def clamped_quotients(
    values: Sequence[Tensor], divisors: Sequence[Tensor], most: float
) -> tuple[Tensor, ...]:
    """Divide values by their divisors and clamp to ``[-most, most]``, in a few kernel launches."""
    found = torch._foreach_div(list(values), list(divisors))
    torch._foreach_clamp_max_(found, most)
    torch._foreach_clamp_min_(found, -most)
    return found


def storage_info(file: str, offset: int, nbytes: int) -> Any:
    """Return a value's entry in checkpoint metadata. Only torch's own writer creates this type."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # slow to import

    return _StorageInfo(file, offset, nbytes)

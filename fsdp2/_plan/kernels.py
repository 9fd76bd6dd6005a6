"""What a device computes in one kernel, and a host in several: a plan of a device has the one.

Owns the stand-ins. They take the memory and the bytes of the kernel, and no values. The tensors of
a plan lie with the host, so torch would choose the host's way, which keeps more for backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def kernels_of_a_device() -> Iterator[None]:
    """Put stand-ins in the place of functions that a device has a kernel for, for a while."""
    plain = F.rms_norm

    def rms_norm(*args: Any, **kwargs: Any) -> Tensor:
        made = _fused_rms_norm(*args, **kwargs)
        return plain(*args, **kwargs) if made is None else made

    F.rms_norm = rms_norm  # modules of torch look it up there
    try:
        yield
    finally:
        F.rms_norm = plain


def _fused_rms_norm(
    input: Tensor,  # noqa: A002  # torch's name for it
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor | None:
    """Return what ``aten::_fused_rms_norm`` of a device gives; None where it is not used."""
    if weight is None or weight.dtype != input.dtype:
        return None
    width = normalized_shape if isinstance(normalized_shape, int) else math.prod(normalized_shape)
    made: Tensor = _RMSNorm.apply(input, weight, input.numel() // width)  # type: ignore[no-untyped-call]  # torch's own
    return made


class _RMSNorm(torch.autograd.Function):
    """Keeps its input, its weight and one number a row, as the kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: int) -> Tensor:
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        ctx.save_for_backward(x, weight, scale)
        return x.neg()  # reads and writes as much

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, _ = ctx.saved_tensors
        return grads[0].mul(x), weight.neg(), None

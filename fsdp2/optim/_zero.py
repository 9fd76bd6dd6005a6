"""Gradients of sharded and plain parameters set to zero, or to None."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fsdp2._core.base import torch_compiler, torch_dtensor, torch_tensors
from fsdp2._core.base.arguments import check_flag


@torch_compiler.always_eager
def zero_gradients(groups: Iterable[Mapping[str, Any]], set_to_none: bool) -> None:
    """Clear the gradients of param groups: set them to None, or to zero where they lie.

    Torch's own gives all gradients to one kernel, which takes no mixture of sharded and plain
    ones; here it is given local tensors.
    """
    check_flag("zero_grad", "set_to_none", set_to_none)
    strided: list[Tensor] = []
    for param in itertools.chain.from_iterable(group["params"] for group in groups):
        grad = param.grad
        if grad is None:
            continue
        if set_to_none:
            param.grad = None
            continue
        if grad.grad_fn is not None:
            grad.detach_()
        else:
            grad.requires_grad_(False)
        local = torch_dtensor.local_part(grad)
        if local.layout is torch.strided:
            strided.append(local)
        else:
            local.zero_()
    with torch.no_grad():
        for alike in torch_tensors.by_kind(strided).values():
            torch_tensors.zero_all_(alike)

"""User-defined collectives that call the backend, and record their arguments."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp2


class Sent(TorchDispatchMode):
    """Notes the collectives of a context, by name, and the bytes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(str(func))
            found = tree_leaves((args, kwargs))
            self.nbytes += sum(each.nbytes for each in found if isinstance(each, Tensor))
        return func(*args, **(kwargs or {}))


class Gather(fsdp2.AllGather):
    """A test's own may do more around it."""

    def __init__(self) -> None:
        self.given: list[tuple[int, torch.dtype]] = []
        """Elements and dtype of each input."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.given.append((input_tensor.numel(), input_tensor.dtype))
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


class Scatter(fsdp2.ReduceScatter):
    """A test's own may do more around it."""

    def __init__(self) -> None:
        self.given: list[tuple[int, torch.dtype]] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: Any = False,
    ) -> Any:
        self.given.append((input_tensor.numel(), input_tensor.dtype))
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)

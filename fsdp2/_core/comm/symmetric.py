"""An all-gather into symmetric memory. ``set_symm_mem_for_comm`` selects it for a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2._core.base import torch_comm
from fsdp2._core.base.errors import UnsupportedError, wrong_type, wrong_value
from fsdp2._core.comm.wire import DefaultAllGather


class SymmetricMemoryAllGather(DefaultAllGather):
    """torch.distributed's all-gather into symmetric memory, for which NCCL uses copy engines."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        found = dist.get_backend(group)
        if not isinstance(backend, str):
            raise wrong_type("set_symm_mem_for_comm", "backend", "'NCCL'", backend)
        if backend != "NCCL":
            raise wrong_value("set_symm_mem_for_comm", "backend", "'NCCL'", backend)
        if found != "nccl":
            raise UnsupportedError(
                "FS507",
                f"set_symm_mem_for_comm: the process group's backend is {found!r}, which has no "
                "symmetric memory. Use it on GPUs with the NCCL backend only.",
            )
        self._memory = torch_comm.SymmetricMemory(group, backend)

    def allocate(
        self,
        size: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        return self._memory.empty(size, dtype, device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._memory.rendezvous(output_tensor)
        return super().__call__(output_tensor, input_tensor, group, async_op)

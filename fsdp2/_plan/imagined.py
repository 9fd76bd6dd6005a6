"""Ranks, collectives and parameters that are not there: the engine runs on them as on real ones.

Owns the imagined mesh, the wire that carries nothing, and the copy of a model whose tensors are
fake. It must not know what is made of a run.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp2._base import torch_dtensor
from fsdp2._base.errors import UnsupportedError
from fsdp2._comm import gloo_p2p
from fsdp2._comm.collectives import Wire
from fsdp2._comm.mesh import MeshAxis
from fsdp2._engine.unit import unit_of

NAMES = {1: ("shard",), 2: ("replicate", "shard")}


def make_mesh(shape: Sequence[int], rank: int) -> DeviceMesh:
    """Return a CPU mesh of ranks that do not exist, seen by one of them."""
    return torch_dtensor.imagined_mesh(tuple(shape), NAMES[len(shape)], rank)


class Nowhere(Wire):
    """Carries nothing, and takes the memory that gloo's collectives take."""

    def all_gather(self, output: Tensor, sent: Tensor, axis: MeshAxis, async_op: bool) -> Any:
        return None

    def reduce_scatter(
        self, output: Tensor, sent: Tensor, op: Any, axis: MeshAxis, async_op: bool
    ) -> Any:
        is_large = sent.nbytes >= gloo_p2p.LARGE_NBYTES
        return _Holding(torch.empty_like(sent)) if is_large or sent.dtype != output.dtype else None

    def all_reduce(
        self, tensor: Tensor, op: Any, axis: MeshAxis, async_op: bool
    ) -> dist.Work | None:
        return None


class _Holding:
    """A work that holds memory until it has been waited for: what others sent."""

    def __init__(self, received: Tensor) -> None:
        self._received: Tensor | None = received

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self._received = None


def without_memory(model: nn.Module) -> nn.Module:
    """Copy a model that is not sharded; parameters and buffers are fake. Call under a fake mode.

    Raises:
        UnsupportedError: a module is sharded, or a parameter lies on a mesh already.
    """
    for name, module in model.named_modules():
        if unit_of(module) is not None:
            raise UnsupportedError(
                f"plan: {name or '<root>'} is sharded already. Pass the model as it was before "
                "fully_shard, with the policy that picks its units."
            )
    memo: dict[int, Any] = {}
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            raise UnsupportedError(
                f"plan: {name} is a DTensor. Plan the model before parallelize_module, on the "
                "data-parallel mesh alone."
            )
        memo[id(param)] = nn.Parameter(_like(param), requires_grad=param.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _like(buffer)
    return copy.deepcopy(model, memo)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")

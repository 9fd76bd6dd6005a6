"""Interfaces for user-supplied collectives: ``Comm``, ``AllGather`` and ``ReduceScatter``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor


class Comm(ABC):
    """A collective that also allocates its own buffers.

    Source: the interface of the same name in torch 2.13 (``torch.distributed.fsdp``).
    """

    @abstractmethod
    def allocate(
        self,
        size: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Return an uninitialised buffer of ``size`` elements for the collective.

        May return the same buffer every time: a group finishes using it before the next call."""


class AllGather(Comm):
    """Base class of custom all-gathers. Pass an instance to ``set_custom_all_gather``.

    Source: the interface of the same name in torch 2.13 (``torch.distributed.fsdp``).
    """

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` ``[W * C]`` with every rank's ``input_tensor`` ``[C]``.

        W is the number of ranks in ``group``, and C the number of elements per rank. Both tensors
        are 1-D and have the same dtype. ``input_tensor`` is this rank's slice of ``output_tensor``.

        Returns:
            A ``Work`` to wait for, if ``async_op`` is set. None is always allowed; it means that
            the output is complete, or will be complete before later work on the current stream.
        """


class ReduceScatter(Comm):
    """Base class of custom reduce-scatters. Pass an instance to ``set_custom_reduce_scatter``.

    Source: the interface of the same name in torch 2.13 (``torch.distributed.fsdp``).
    """

    @abstractmethod
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` ``[S]`` with this rank's part of the reduced inputs ``[W * S]``.

        W is the number of ranks in ``group``, and S the number of elements per rank. Both tensors
        are 1-D and have the reduce dtype. Complex gradients are passed as real and imaginary parts.
        ``op`` is the reduction: ``AVG``, or ``SUM`` if the group scales the gradients itself.

        Returns:
            A ``Work`` to wait for, if ``async_op`` is set. None is always allowed; it means that
            the output is complete, or will be complete before later work on the current stream.
        """


@runtime_checkable
class CustomComm(Protocol):
    """Interface that the setters for custom collectives accept; torch's classes have it too."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor: ...

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None: ...

"""What users implement to replace a collective: ``Comm``, ``AllGather`` and ``ReduceScatter``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist


class Comm(ABC):
    """A collective and the memory that it works on.

    Source: the interface of the same name in torch 2.13 (``torch.distributed.fsdp``).
    """

    @abstractmethod
    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an uninitialised buffer of ``size`` elements for the collective.

        It may be the same one each time: a group asks again only when it has done with the last.
        """


class AllGather(Comm):
    """A custom all-gather: ``set_custom_all_gather`` takes an instance of a class derived from it.

    Source: the interface of the same name in torch 2.13 (``torch.distributed.fsdp``).
    """

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` ``[W * C]`` with every rank's ``input_tensor`` ``[C]``.

        W is the number of ranks in ``group``, and C is a number of elements. Both tensors are 1-D
        and have the same dtype. ``input_tensor`` is this rank's slice of ``output_tensor``.

        Returns:
            With ``async_op`` a ``Work``, which is waited for; or None, with ``async_op`` or
            without: then the output is ready, or the work that fills it is ordered on the current
            stream.
        """


class ReduceScatter(Comm):
    """A custom reduce-scatter: ``set_custom_reduce_scatter`` takes an instance of a derived class.

    Source: the interface of the same name in torch 2.13 (``torch.distributed.fsdp``).
    """

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Fill ``output_tensor`` ``[S]`` with this rank's part of all ``input_tensor`` ``[W * S]``.

        W is the number of ranks in ``group``, and S is a number of elements. Both tensors are 1-D,
        in the reduce dtype; complex gradients come as their real and imaginary parts. ``op`` says
        how parts are joined: ``AVG``, or ``SUM`` where the group scales the gradients itself.

        Returns:
            With ``async_op`` a ``Work``, which is waited for; or None, with ``async_op`` or
            without: then the output is ready, or the work that fills it is ordered on the current
            stream.
        """


@runtime_checkable
class CustomComm(Protocol):
    """What a setter of a custom collective takes: one of ours, of torch's, or of the same shape."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor: ...

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None: ...

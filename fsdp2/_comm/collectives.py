"""The wire: allocation and the three collectives, as objects that can be swapped.

Owns what is sent, not when. ``Comm``, ``AllGather`` and ``ReduceScatter`` are what users
implement; ``Wire`` is what a group calls: one of each, and the sum over replicas. A test swaps the
``Wire`` for one that joins several ranks in a process. Gradient scaling is a pure function here,
because it depends on what the wire can carry.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from fsdp2._base import torch_comm
from fsdp2._base.arguments import wrong_type, wrong_value
from fsdp2._base.capabilities import ZERO_COPY_NBYTES
from fsdp2._base.errors import UnsupportedError
from fsdp2._comm import gloo_p2p
from fsdp2._comm.mesh import MeshAxis


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


class TorchMemory:
    """Mixed into a collective: buffers come from torch's own allocator."""

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class DefaultAllGather(TorchMemory, AllGather):
    """torch.distributed's, or direct sends where these are better."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        is_large = input_tensor.nbytes >= gloo_p2p.LARGE_NBYTES
        if is_large and gloo_p2p.applies(group, input_tensor) and gloo_p2p.is_small(group):
            gather: Any = gloo_p2p.DirectGather(output_tensor, input_tensor, group)
            if not async_op:
                gather.wait()
            return gather if async_op else None
        work: dist.Work | None = torch_comm.all_gather_single(
            output_tensor, input_tensor, group, async_op
        )
        return work


class DefaultReduceScatter(TorchMemory, ReduceScatter):
    """torch.distributed's, or an exchange where that is better."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        is_large = input_tensor.nbytes >= gloo_p2p.LARGE_NBYTES
        is_cast = input_tensor.dtype != output_tensor.dtype
        if is_cast or (is_large and gloo_p2p.applies(group, input_tensor)):
            exchange: Any = gloo_p2p.Exchange(output_tensor, input_tensor, group, op)
            if not async_op:
                exchange.wait()
            return exchange if async_op else None
        work: dist.Work | None = torch_comm.reduce_scatter_single(
            output_tensor, input_tensor, op, group, async_op
        )
        return work


class GroupMemory:
    """Mixed into a collective: buffers come from the process group's own allocator, if any."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        flat = torch_comm.allocate_from_group(self._group, math.prod(size), dtype, device)
        return torch.empty(size, dtype=dtype, device=device) if flat is None else flat.view(*size)


class GroupMemoryAllGather(GroupMemory, DefaultAllGather):
    """torch.distributed's all-gather, on the process group's memory."""


class GroupMemoryReduceScatter(GroupMemory, DefaultReduceScatter):
    """torch.distributed's reduce-scatter, on the process group's memory."""


class SymmetricMemoryAllGather(DefaultAllGather):
    """torch.distributed's all-gather into symmetric memory, which NCCL gathers by copy engine."""

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
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self._memory.empty(size, dtype, device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._memory.rendezvous(output_tensor)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class Wire:
    """What one group sends over: an ``AllGather`` and a ``ReduceScatter``, or what acts as one.

    ``zero_copy_nbytes``: see ``ZERO_COPY_NBYTES``; ``gradient_dtype``: what gradients travel in, if
    not in the reduce dtype. Whoever changes a wire tells its group (``ParamGroup.rewire``).
    """

    carries: ClassVar[bool] = True

    def __init__(self) -> None:
        self.gather: Any = DefaultAllGather()
        self.scatter: Any = DefaultReduceScatter()
        self.uses_group_memory = False  # what a copy is told
        self.is_separate = False  # gradients are reduced over a process group of their own
        self.scatter_group: dist.ProcessGroup | None = None
        self.zero_copy_nbytes: int | None = ZERO_COPY_NBYTES
        self.gradient_dtype: torch.dtype | None = None
        self.sum_replicas: Callable[[torch.Tensor, dist.ProcessGroup], None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Copies carry every choice; what hangs on a process group is made again by their group."""
        gather, scatter = self.custom
        return {
            **vars(self),
            "gather": gather,
            "scatter": scatter,
            "scatter_group": None,
            "uses_group_memory": isinstance(self.gather, GroupMemory),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]  # not a new object
        vars(self).update({name: value for name, value in state.items() if value is not None})
        self.zero_copy_nbytes = state["zero_copy_nbytes"]

    def use_group_memory(self, pg: dist.ProcessGroup | None) -> None:
        """Let buffers come from a process group's own allocator."""
        if pg is not None:
            self.gather = GroupMemoryAllGather(pg)
            self.scatter = GroupMemoryReduceScatter(self.scatter_group or pg)

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer of a reduction."""
        buffer: torch.Tensor = self.scatter.allocate(shape, dtype=dtype, device=device)
        return buffer

    @property
    def only_sums(self) -> bool:
        """True if what joins gradients leaves a mean to the engine."""
        return self.sum_replicas is not None

    @property
    def custom(self) -> tuple[Any, Any]:
        """The all-gather and the reduce-scatter of the user's; None in place of one of ours."""
        return (
            None if isinstance(self.gather, DefaultAllGather) else self.gather,
            None if isinstance(self.scatter, DefaultReduceScatter) else self.scatter,
        )

    @property
    def is_custom(self) -> bool:
        """True if a collective of the user's is set."""
        return self.custom != (None, None)

    @property
    def gathers_zero_copy(self) -> bool:
        """True if an all-gather may work on any memory; one of its own has to be packed."""
        return type(self.gather) is DefaultAllGather

    @property
    def scatters_zero_copy(self) -> bool:
        """The same for a reduce-scatter."""
        return type(self.scatter) is DefaultReduceScatter

    def stage(self, sent: torch.Tensor, axis: MeshAxis) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of an all-gather, and ``sent`` where it has to lie.

        That is ``[W, C]`` for ``[1, C]``, which saves a view, and ``[W * C]`` for ``[C]``. A
        swapped all-gather gets the latter, and what it sends is a slice of it, as torch's interface
        has it.
        """
        numel, gather = sent.numel(), self.gather
        if type(gather) is DefaultAllGather:
            shape = (axis.size, numel) if sent.dim() == 2 else (axis.size * numel,)
            return torch.empty(shape, dtype=sent.dtype, device=sent.device), sent
        sent = sent.view(-1)
        output = gather.allocate((axis.size * numel,), dtype=sent.dtype, device=sent.device)
        return output, output.narrow(0, axis.rank * numel, numel).copy_(sent)

    def all_gather(
        self, output: torch.Tensor, sent: torch.Tensor, axis: MeshAxis, async_op: bool
    ) -> Any:
        """Fill ``output``, ``W * C`` elements, with every rank's ``sent``, in rank order."""
        assert axis.pg is not None
        return self.gather(output, sent, axis.pg, async_op)

    def all_gather_each(
        self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], axis: MeshAxis, async_op: bool
    ) -> Any:
        """Gather several pairs of output and input, in order."""
        if len(pairs) == 1:
            return self.all_gather(*pairs[0], axis, async_op)
        with torch_comm.coalesced(axis.pg, pairs[0][0].device):
            return _joined([self.all_gather(*pair, axis, async_op) for pair in pairs])

    def reduce_scatter(
        self, output: torch.Tensor, sent: torch.Tensor, op: Any, axis: MeshAxis, async_op: bool
    ) -> Any:
        """Fill ``output`` ``[S]`` with this rank's part of all ``sent`` ``[W * S]``, joined.

        Complex numbers travel as their two parts, also to a reduce-scatter of the user's: NCCL has
        none, and torch's reduce-scatter hands them on as they are.
        """
        group = self.scatter_group or axis.pg
        assert group is not None
        if sent.is_complex():
            output, sent = torch_comm.flat_as_real(output), torch_comm.flat_as_real(sent)
        return self.scatter(output, sent, group, op, async_op)

    def reduce_scatter_each(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        op: Any,
        axis: MeshAxis,
        async_op: bool,
    ) -> Any:
        """Reduce several pairs of output and input, in order."""
        if len(pairs) == 1:
            return self.reduce_scatter(*pairs[0], op, axis, async_op)
        same = pairs[0][0].dtype == pairs[0][1].dtype  # else each is an exchange, with a sum
        with torch_comm.coalesced(
            self.scatter_group or axis.pg if same else None, pairs[0][0].device
        ):
            return _joined([self.reduce_scatter(*pair, op, axis, async_op) for pair in pairs])

    def all_reduce(
        self, tensor: torch.Tensor, op: Any, axis: MeshAxis, async_op: bool
    ) -> dist.Work | None:
        """Replace ``tensor`` by what all ranks of the axis hold, joined."""
        if self.sum_replicas is not None:
            assert axis.pg is not None
            self.sum_replicas(tensor, axis.pg)
            return None
        work: dist.Work | None = dist.all_reduce(tensor, op, group=axis.pg, async_op=async_op)
        return work


def _joined(works: Sequence[Any]) -> gloo_p2p.Several | None:
    running = [work for work in works if work is not None]
    return gloo_p2p.Several(running) if running else None


@dataclass(frozen=True)
class GradientScale:
    """How gradients are joined: factors before and after it, and the operation of the wire."""

    before: float
    after: float
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM

    @staticmethod
    def choose(
        ranks: int,
        dtype: torch.dtype,
        divide_by: float | None = None,
        only_sums: bool = False,
    ) -> GradientScale:
        """Divide the sum over ``ranks`` by ``divide_by``; None means their number (the mean).

        fp16 divides in two steps of about the square root each: it ends at 65504, so a sum before
        the division could overflow, a division before the sum underflow. Wider exponents divide
        once: in the collective, if it is a mean and ``only_sums`` is not asked for, else after the
        sum, on the shard alone.

        Source: the rule of torch's FSDP and DDP communication hooks.
        """
        factor = float(ranks) if divide_by is None else float(divide_by)
        if dtype == torch.float16:
            before = 1
            while factor % before == 0 and factor / before > before:
                before *= 2
            return GradientScale(1.0 / before, before / factor)
        if divide_by is None and not only_sums and ranks > 1:
            return GradientScale(1.0, 1.0, dist.ReduceOp.AVG)
        return GradientScale(1.0, 1.0 / factor)

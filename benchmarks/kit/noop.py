"""A process group of N ranks in one process whose collectives cost next to nothing.

torch's own `fake` backend copies the input once per rank with an op each, and those ops swamp the
host cost under measurement. Here a collective costs one Python call and one raw copy on every side,
some ten thousand instructions. The data are those of N ranks that hold the same: an all-gather
repeats the rank's shard, a mean over ranks hands it its own chunk back, an all-reduce leaves the
tensor as it is. So what a library sends along with its data, to check or to count, arrives, and it
does all the work that it does on a real wire. Collectives on lists of tensors, which only FSDP1
uses, carry nothing.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

BACKEND = "noop"
HELD = 64  # C++ callers of an all-reduce hold no reference to its Python half, so the group does


class _Done(dist.Work):
    """A work that finished before it began. DDP reads `tensors` from its future."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.tensors = list(tensors)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        devices = [tensor.device for tensor in self.tensors if tensor.is_cuda]
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        future.set_result(self.tensors)
        return future


class NoopGroup(dist.ProcessGroup):
    """Answer every collective with a finished work and count the calls.

    torch lets Python subclass `ProcessGroup` (not `Backend`), so a call from Python lands here
    directly. Both spellings of each method are there: torch 2.13 renamed `_allgather_base` to
    `all_gather_single` and so on. The `fake` backend underneath keeps the group's name and device,
    and answers what is not overridden.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # an overload the stub lacks
        fake = FakeProcessGroup._create_internal(rank, size)
        for device in ("cpu", "cuda"):
            self._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, fake)
        self._rank = rank
        self._size = size
        self._held: deque[dist.Work] = deque(maxlen=HELD)
        self._done = _Done()
        self.calls = 0

    def getBackendName(self) -> str:  # noqa: N802  # the base class spells it so
        return BACKEND

    def _finish(self, *args: Any, **kwargs: Any) -> dist.Work:
        self.calls += 1
        return self._done

    allreduce_coalesced = allgather = broadcast = barrier = _finish
    all_to_all_single = alltoall_base = alltoall = _finish

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> dist.Work:
        self.calls += 1
        work = _Done(tensors)
        self._held.append(work)
        return work

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        self.calls += 1
        self._repeat(output, source)
        return self._done

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        self.calls += 1
        for output, source in zip(outputs, inputs, strict=True):
            self._repeat(output, source)
        return self._done

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        self.calls += 1
        self._copy_own_chunk(output, source)
        return self._done

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        self.calls += 1
        for output, source in zip(outputs, inputs, strict=True):
            self._copy_own_chunk(output, source)
        return self._done

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # argument names
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _repeat(self, output: torch.Tensor, source: torch.Tensor) -> None:
        row = ctypes.string_at(source.data_ptr(), source.nbytes)
        ctypes.memmove(output.data_ptr(), row * self._size, output.nbytes)

    def _copy_own_chunk(self, output: torch.Tensor, source: torch.Tensor) -> None:
        nbytes = output.nbytes
        ctypes.memmove(output.data_ptr(), source.data_ptr() + self._rank * nbytes, nbytes)


@contextmanager
def ranks(
    world_size: int, make: Callable[[int, int], NoopGroup] = NoopGroup, device: str = "cpu"
) -> Iterator[tuple[Any, DeviceMesh]]:
    """Be rank 0 of `world_size` for a while: the default group, and a one-axis mesh over it."""
    hook = sys.excepthook  # torch wraps it once more for each default group
    group, mesh = start(world_size, make, device)
    try:
        yield group, mesh
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
        gc.collect()


def start(
    world_size: int, make: Callable[[int, int], NoopGroup] = NoopGroup, device: str = "cpu"
) -> tuple[Any, DeviceMesh]:
    """Make rank 0 of a group of `world_size` the default group, and a one-axis mesh over it."""

    def create(store: dist.Store, rank: int, size: int, timeout: Any) -> NoopGroup:
        return make(rank, size)

    dist.Backend.register_backend(BACKEND, create, devices=[device])
    # Torch 2.15 records collectives of groups that do not do so themselves, as real ones do.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    dist.init_process_group(BACKEND, rank=0, world_size=world_size, store=dist.HashStore())
    return dist.group.WORLD, init_device_mesh(device, (world_size,))

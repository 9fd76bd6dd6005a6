"""Private torch API, by subject: collectives and the memory of their backends.

Each private name states why it is needed. Tried on torch 2.11.0, 2.13.0 and 2.15.0. Nothing here
knows what a unit or a group is.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from fsdp2._base.capabilities import capabilities

# Collectives and kernels.

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Public names; torch 2.13 renamed them and warns at each use of the old ones."""


def is_gloo(group: dist.ProcessGroup, kind: str = "cpu") -> bool:
    """True if a group's collectives on the memory of a kind of device are gloo's.

    On a device gloo has fewer of them. What it has not it takes for operations on host memory:
    sends, receives and functional collectives end the process (torch 2.11.0).
    """
    backends = _backends.get(group)
    if backends is None:
        backends = _backends[group] = frozenset(dist.get_backend_config(group).split(","))
    return f"{kind}:gloo" in backends or "gloo" in backends


_backends: weakref.WeakKeyDictionary[dist.ProcessGroup, frozenset[str]] = (
    weakref.WeakKeyDictionary()
)

EXIT_PAUSE_S = 0.02


@functools.cache
def pause_at_exit() -> None:
    """Give a backend's threads, once this process ends, the moment in which they let go of tensors.

    A thread of gloo's drops the tensors of its last collective after it has told that this is done,
    and needs the interpreter's lock for that. Where it asks for the lock of an interpreter that is
    already ending (Python before 3.14), the process aborts after its last line, with ``terminate
    called without an active exception``. torch's caches of DTensor plans keep the group alive, so
    that destroying it does not end its threads.
    """
    atexit.register(time.sleep, EXIT_PAUSE_S)


def coalesced(group: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Issue what is inside as one operation, where a device's backend can. No public way exists."""
    if group is None or not capabilities(device).coalesces or is_gloo(group, device.type):
        return contextlib.nullcontext()
    manager: AbstractContextManager[Any] = vars(dist)["_coalescing_manager"](group, device)
    return manager


def allocate_from_group(
    group: dist.ProcessGroup, numel: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Return memory of the backend's own allocator; None if it has none. No public way exists."""
    backend: Any = group._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        return None
    tensor: torch.Tensor = backend.allocate_tensor(numel, dtype=dtype, device=device)
    return tensor


class SymmetricMemory:
    """Memory that all ranks of a group map; torch has it as a private module."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        import torch.distributed._symmetric_memory as symmetric  # heavy, and for CUDA alone

        self._module: Any = symmetric
        self._group = group
        self._module.set_backend(backend)
        dist.barrier(group=group)  # the communicator must exist before the first rendezvous

    def empty(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self._module.get_mem_pool(device)):
            return torch.empty(size, dtype=dtype, device=device)

    def rendezvous(self, tensor: torch.Tensor) -> None:
        self._module.rendezvous(tensor, group=self._group.group_name)


def functional(name: str, sent: torch.Tensor, *args: Any) -> torch.Tensor:
    """Return the result of a functional collective: of the operations that compilers know.

    ``args`` are what the operation takes behind ``sent``; process groups go by their names.
    """
    ops = torch.ops._c10d_functional
    received: torch.Tensor = ops.wait_tensor(getattr(ops, name)(sent, *args))
    return received


def functional_coalesced(name: str, sent: Sequence[torch.Tensor], *args: Any) -> list[torch.Tensor]:
    """As ``functional``, of several tensors, which a backend may send as one.

    Those of each dtype are one collective: of several dtypes gloo returns other values than were
    sent, without an error (tried: torch 2.13.0).
    """
    ops = torch.ops._c10d_functional
    received: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(one.dtype for one in sent):
        places = [place for place, one in enumerate(sent) if one.dtype == dtype]
        came = getattr(ops, f"{name}_coalesced")([sent[place] for place in places], *args)
        received.update(zip(places, came, strict=True))
    return [ops.wait_tensor(received[place]) for place in range(len(sent))]

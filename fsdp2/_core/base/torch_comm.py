"""Private torch API for collectives and the memory of their backends.

Comments say why each name is needed. Tested: torch 2.11.0, 2.13.0, 2.15.0. No unit or group code.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fsdp2._core.base.capabilities import capabilities

# Collectives and kernels.

all_gather_single: Callable[..., dist.Work | None]
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., dist.Work | None]
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Public functions. torch 2.13 renamed them, and warns whenever an old name is used."""


def is_gloo(group: dist.ProcessGroup, kind: str = "cpu") -> bool:
    """Return True if gloo runs a group's collectives for a device type. On a device, gloo supports
    only some operations. Other operations access device memory as if it were host memory: sends,
    receives and functional collectives kill the process (torch 2.11.0)."""
    backends = _backends.get(group)
    if backends is None:
        backends = _backends[group] = frozenset(dist.get_backend_config(group).split(","))
    return f"{kind}:gloo" in backends or "gloo" in backends


_backends: weakref.WeakKeyDictionary[Any, frozenset[str]] = weakref.WeakKeyDictionary()

# Process groups of a subset of the ranks, and their timeouts.

_made: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
"""For each world: the number of groups that ``group_of`` has created for each set of ranks."""


def group_of(ranks: Sequence[int], what: str, backend: str | None = None) -> dist.ProcessGroup:
    """Create a process group with the world's timeout. Only ``ranks`` call this function.

    Differences from torch's ``new_group(use_local_synchronization=True)``:
    - Torch derives the name of such a group from its ranks and the number of groups that *this
      rank* is in. If ranks are in different numbers of groups, they wait for each other under
      different names and deadlock. So we derive the name from the group's ranks and the number of
      earlier groups of exactly these ranks.
    - If the world is bound to a device (``init_process_group(device_id=...)``), torch splits the
      world's communicator, and splitting is collective over the world. So we unbind the world,
      and the new group gets a separate communicator."""
    world: Any = dist.group.WORLD
    key = tuple(sorted(ranks))
    count = _made.setdefault(world, Counter())
    count[key] += 1
    digest = hashlib.sha1(repr(key).encode(), usedforsecurity=False).hexdigest()
    with _group_called(f"fsdp2_{count[key]}_{digest}"), _unbound(world):
        made = dist.new_group(
            list(key),
            timeout_of(world),
            backend,
            use_local_synchronization=True,
            group_desc=f"fsdp2 {what}",
        )
    return cast(dist.ProcessGroup, made)


_installing = threading.Lock()


@functools.cache
def _names() -> threading.local:
    """Return a thread-local object whose ``name`` is used for the thread's next process group (no
    public API). torch's function is replaced permanently: ranks may be threads of one process that
    wait for each other in ``new_group``, so a lock for a temporary replacement would deadlock."""
    module, names = vars(distributed_c10d), threading.local()
    original = module["_process_group_name"]

    def name(*args: Any, **kwargs: Any) -> Any:
        return getattr(names, "name", None) or original(*args, **kwargs)

    module["_process_group_name"] = name
    return names


@contextlib.contextmanager
def _group_called(name: str) -> Iterator[None]:
    """Name the next process group of this thread."""
    with _installing:  # never held while waiting
        names = _names()
    names.name = name
    try:
        yield
    finally:
        names.name = None


@contextlib.contextmanager
def _unbound(world: dist.ProcessGroup) -> Iterator[None]:
    """Temporarily unbind a group from its device."""
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def default_store() -> Any:
    """Return the rendezvous store. The public API can set this store, but not return it."""
    return distributed_c10d._get_default_store()


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return a group's timeout; None if its backend does not report it."""
    with contextlib.suppress(AttributeError, IndexError, RuntimeError):
        device = group._device_types[0]
        return group._get_backend(device).options._timeout
    return None


def wait_as_the_world(group: dist.ProcessGroup) -> None:
    """Set a group's timeout to that of the world, if the group's backend supports it."""
    world = dist.group.WORLD
    timeout = None if world is None or group is world else timeout_of(world)
    if timeout is not None and timeout != timeout_of(group) and hasattr(group, "set_timeout"):
        group.set_timeout(timeout)


EXIT_PAUSE_S = 0.02


@functools.cache
def pause_at_exit() -> None:
    """Pause at exit, so that a backend's threads can release their tensors. A gloo thread releases
    the last collective's tensors after reporting completion, and needs the GIL to do so. If the
    interpreter is already finalizing (Python before 3.14), the process aborts with ``terminate
    called without an active exception``. torch's DTensor caches keep the group's threads alive."""
    atexit.register(time.sleep, EXIT_PAUSE_S)


def coalesced(group: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Batch the collectives in the ``with`` block, which must be of the same kind, if the backend
    supports it. There is no public API. We do not pass the device, because torch would otherwise
    mix two coalescing mechanisms."""
    if group is None or not capabilities(device).coalesces or is_gloo(group, device.type):
        return contextlib.nullcontext()
    return cast(AbstractContextManager[Any], vars(dist)["_coalescing_manager"](group))


def allocate_from_group(
    group: dist.ProcessGroup,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | None:
    """Return memory from the backend's allocator, or None if it has no allocator (private API)."""
    backend: Any = group._get_backend(device)
    if not backend.supports_tensor_alloc(device):
        return None
    return cast(torch.Tensor, backend.allocate_tensor(numel, dtype=dtype, device=device))


class SymmetricMemory:
    """Memory that is mapped by all ranks of a group. torch's module for it is private."""

    def __init__(self, group: dist.ProcessGroup, backend: str) -> None:
        import torch.distributed._symmetric_memory as symmetric  # heavy, CUDA only

        self._module: Any = symmetric
        self._group = group
        self._module.set_backend(backend)
        dist.barrier(group=group)  # the communicator must exist before the first rendezvous

    def empty(
        self,
        size: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self._module.get_mem_pool(device)):
            return torch.empty(size, dtype=dtype, device=device)

    def rendezvous(self, tensor: torch.Tensor) -> None:
        self._module.rendezvous(tensor, group=self._group.group_name)


def functional(name: str, sent: torch.Tensor, *args: Any) -> torch.Tensor:
    """Run a functional collective (for compilers), and return its result. Pass groups by name."""
    ops = torch.ops._c10d_functional
    received: torch.Tensor = ops.wait_tensor(getattr(ops, name)(_as_real(sent), *args))
    return torch.view_as_complex(received) if sent.is_complex() else received


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """View complex numbers as real pairs ``[N, 2]`` for NCCL. Most of torch's collectives do this,
    but not its reduce-scatter and functional collectives."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def flat_as_real(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous complex tensor as a flat real one; return other tensors unchanged."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def functional_coalesced(name: str, sent: Sequence[torch.Tensor], *args: Any) -> list[torch.Tensor]:
    """Like ``functional``, but for several tensors. Runs one collective per dtype, because gloo
    silently returns wrong values for mixed dtypes (tested: torch 2.13.0)."""
    ops = torch.ops._c10d_functional
    real = [_as_real(one) for one in sent]
    received: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(one.dtype for one in real):
        places = [place for place, one in enumerate(real) if one.dtype == dtype]
        came = getattr(ops, f"{name}_coalesced")([real[place] for place in places], *args)
        received.update(zip(places, came, strict=True))
    waited = [ops.wait_tensor(received[place]) for place in range(len(sent))]
    return [
        torch.view_as_complex(one) if own.is_complex() else one
        for one, own in zip(waited, sent, strict=True)
    ]

"""Private torch API, by subject: collectives and the memory of their backends.

Each private name states why it is needed. Tried on torch 2.11.0, 2.13.0 and 2.15.0. Nothing here
knows what a unit or a group is.
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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from fsdp2._core.base.capabilities import capabilities

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


# Process groups of some ranks, and how long they wait.

_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)
"""How many groups of the same ranks were made here, for each world."""


def group_of(ranks: Sequence[int], what: str, backend: str | None = None) -> dist.ProcessGroup:
    """Make a process group of some ranks, which alone call this. It waits as long as the world's.

    Torch's ``new_group(use_local_synchronization=True)`` is called for that, with two additions.

    - Torch names such a group by its ranks and by how many groups *this rank* is in. If ranks are
      in different numbers of groups, they wait for each other under different names, for ever. So
      the name is ours: the ranks, and how many groups of just these ranks were made before.
    - If the world is bound to a device (``init_process_group(device_id=...)``), torch splits the
      world's communicator, in which every rank of the world must join. So the world is not bound
      meanwhile: the new group gets a communicator of its own.
    """
    world = dist.group.WORLD
    assert world is not None
    key = tuple(sorted(ranks))
    count = _made.setdefault(world, Counter())
    count[key] += 1
    digest = hashlib.sha1(repr(key).encode(), usedforsecurity=False).hexdigest()
    with _group_called(f"fsdp2_{count[key]}_{digest}"), _unbound(world):
        made: dist.ProcessGroup | None = dist.new_group(
            list(key),
            timeout=timeout_of(world),
            backend=backend,
            use_local_synchronization=True,
            group_desc=f"fsdp2 {what}",
        )
    assert made is not None
    return made


_installing = threading.Lock()


@functools.cache
def _names() -> threading.local:
    """Return what holds ``name``, if any, of the next process group of a thread. No public way.

    torch's function is replaced once, and for good. Ranks may be threads of one process, and wait
    for each other while they make a group: a function replaced for that time alone would need a
    lock, and the rank that holds it would wait for ranks that wait for it.
    """
    module, names = vars(distributed_c10d), threading.local()
    original = module["_process_group_name"]

    def name(*args: Any, **kwargs: Any) -> str:
        chosen: str = getattr(names, "name", None) or original(*args, **kwargs)
        return chosen

    module["_process_group_name"] = name
    return names


@contextlib.contextmanager
def _group_called(name: str) -> Iterator[None]:
    """Let the next process group of this thread have this name."""
    with _installing:  # held for no wait
        names = _names()
    names.name = name
    try:
        yield
    finally:
        names.name = None


@contextlib.contextmanager
def _unbound(world: dist.ProcessGroup) -> Iterator[None]:
    """Let a group be bound to no device meanwhile."""
    device = world.bound_device_id
    if device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


def default_store() -> Any:
    """Return the store that ranks met in. The public API takes one, and never gives it back."""
    return distributed_c10d._get_default_store()


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """Return how long a group's operations wait; None if its backend does not say."""
    with contextlib.suppress(AttributeError, IndexError, RuntimeError):
        device = group._device_types[0]
        found: timedelta = group._get_backend(device).options._timeout
        return found
    return None


def wait_as_the_world(group: dist.ProcessGroup) -> None:
    """Let a group that torch made for us wait as long as the world's, if its backend can."""
    world = dist.group.WORLD
    timeout = None if world is None or group is world else timeout_of(world)
    if timeout is not None and timeout != timeout_of(group) and hasattr(group, "set_timeout"):
        group.set_timeout(timeout)


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
    """Issue what is inside as one operation, where a device's backend can. No public way exists.

    Collectives of one kind only: these torch collects, and gives to the backend together. Were the
    manager told of a device, it would begin to coalesce there, too, and mix both ways.
    """
    if group is None or not capabilities(device).coalesces or is_gloo(group, device.type):
        return contextlib.nullcontext()
    manager: AbstractContextManager[Any] = vars(dist)["_coalescing_manager"](group)
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
    received: torch.Tensor = ops.wait_tensor(getattr(ops, name)(_as_real(sent), *args))
    return torch.view_as_complex(received) if sent.is_complex() else received


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of real ones, ``[N, 2]`` for ``[N]``: NCCL has no others.

    Most of torch.distributed's public functions do so; its reduce-scatter and the functional
    collectives do not.
    """
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def flat_as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return contiguous complex numbers as twice as many real ones; others as they are."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def functional_coalesced(name: str, sent: Sequence[torch.Tensor], *args: Any) -> list[torch.Tensor]:
    """As ``functional``, of several tensors, which a backend may send as one.

    Those of each dtype are one collective: of several dtypes gloo returns other values than were
    sent, without an error (tried: torch 2.13.0).
    """
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

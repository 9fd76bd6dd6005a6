"""The only user of private torch API. Each name states why it is needed.

Tried on torch 2.11.0 and 2.13.0. Nothing here knows what a unit or a group is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd import Variable
from torch.distributed._composable.contract import (  # what `replicate` and the like read
    REGISTRY_KEY,
    STATE_KEY,
    RegistryItem,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta  # both for make_spec
from torch.distributed.tensor.placement_types import _StridedShard  # TP and FSDP on one dim
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass,  # the test torch itself uses
)

# DTensor: a step builds a gradient DTensor for each parameter. The public ``DTensor.from_local``
# costs eight times as much as the constructor, because it builds the spec each time.


def make_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> DTensorSpec:
    """Build the metadata that ``new_dtensor`` takes, once for many tensors."""
    meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def new_dtensor(
    local: torch.Tensor, spec: DTensorSpec, like: torch.Tensor | None = None
) -> DTensor:
    """Wrap a local tensor; the caller answers for its shape.

    ``like`` has the same shape, dtype and device, and offset 0, which ``local`` may not have: torch
    takes a wrapper with an offset for a tensor with memory, and fails to copy or pickle it.
    """
    if like is None:
        return DTensor(local, spec, requires_grad=False)
    tensor = DTensor(like, spec, requires_grad=False)
    tensor._local_tensor = local
    return tensor


def spec_of(tensor: DTensor) -> DTensorSpec:
    return tensor._spec


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor itself; ``to_local()`` would return a view and enter autograd."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor


def set_local_tensor(tensor: DTensor, local: torch.Tensor) -> None:
    """Let a DTensor keep its values in other memory (the group's flat buffer)."""
    tensor._local_tensor = local


get_local_tensor = attrgetter("_local_tensor")
get_spec = attrgetter("_spec")
"""``local_tensor`` and ``spec_of`` for ``map``: an optimizer step asks for hundreds of each."""


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement of a shard of a shard: this axis splits what later axes split first."""
    return _StridedShard(dim, split_factor=split_factor)


def shards_dim(placement: Placement, dim: int) -> bool:
    """True if the placement splits the tensor along ``dim``, strided or not."""
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that ``mesh`` was sliced from (itself if it was not)."""
    return mesh._get_root_mesh()


def is_wrapper_subclass(tensor: torch.Tensor) -> bool:
    return bool(is_traceable_wrapper_subclass(tensor))


# Autograd.


def queue_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` once the running backward is over. No public way exists.

    The engine drops its reference when that backward ends, by an error too.
    """
    Variable._execution_engine.queue_callback(callback)


def graph_task_id() -> int:
    """Return the running backward's number in this thread, -1 outside of any."""
    return torch._C._current_graph_task_id()


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that ``tensor`` is a view of."""
    return tensor._base


def apply_gradient_hooks(param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Run a leaf's ``register_hook`` hooks, which autograd runs for gradients that it computes."""
    for hook in (param._backward_hooks or {}).values():
        replaced = hook(grad)
        if replaced is not None:
            grad = replaced
    return grad


def has_gradient_hooks(param: torch.Tensor) -> bool:
    return bool(param._backward_hooks)


def has_post_accumulate_hooks(param: torch.Tensor) -> bool:
    return bool(param._post_accumulate_grad_hooks)


def run_post_accumulate_hooks(param: torch.Tensor) -> None:
    """Run a leaf's ``register_post_accumulate_grad_hook`` hooks, as autograd would."""
    for hook in tuple((getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()):
        hook(param)


def move_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give hooks that the user put on a parameter to the one that takes its place."""
    for hook in (source._backward_hooks or {}).values():
        target.register_hook(hook)
    for hook in (getattr(source, "_post_accumulate_grad_hooks", None) or {}).values():
        target.register_post_accumulate_grad_hook(hook)


# Collectives and kernels.

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Public names; torch 2.13 renamed them and warns at each use of the old ones."""


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


def hidden_from_modes() -> AbstractContextManager[Any]:
    """Run what is inside where no dispatch mode (a counter, a tracer) sees it."""
    manager: AbstractContextManager[Any] = _disable_current_modes()
    return manager


def chunk_cat(tensors: list[torch.Tensor], size: int, out: torch.Tensor) -> None:
    """Write ``size`` padded chunks of every tensor's dim 0 into the rows of ``out`` and cast.

    One kernel for a whole group on CUDA; the public ``chunk`` and ``cat`` take one for each.
    """
    torch._chunk_cat(tensors, 0, size, out=out)


def norms_of(tensors: Sequence[torch.Tensor], order: float) -> list[torch.Tensor]:
    """Return the vector norm of each tensor: a few kernels for all of them on a device."""
    return list(torch._foreach_norm(list(tensors), order))


def scale_all_(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors of one device in place: a few kernels for all of them on a device."""
    torch._foreach_mul_(list(tensors), factor)


# References: whether a buffer may be reused. See [Note: reused gradients] in _gradients.


def use_count(tensor: torch.Tensor) -> int:
    """Return how many owners a tensor has in C++; its Python object counts as one."""
    return tensor._use_count()  # type: ignore[attr-defined, no-any-return]  # not in the stubs


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written in place."""
    return tensor._version


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Return how many tensors and objects share a storage."""
    return torch._C._storage_Use_Count(storage._cdata)


# Observation and composition.


def profiler_is_running() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)


def register_composable_name(module: nn.Module, name: str) -> None:
    """Enter a name in the registry of composable APIs, which ``replicate`` and the like read.

    The public decorator ``contract`` builds the state itself and checks every name of the tree
    again at each call, which costs quadratic time over a model's units.
    """
    module.__dict__.setdefault(REGISTRY_KEY, {})[name] = RegistryItem()


def composable_names(module: nn.Module) -> list[str]:
    """Return the composable APIs that were applied to the module."""
    return list(module.__dict__.get(REGISTRY_KEY, {}))


def forget_composable_names(state: dict[str, Any]) -> None:
    """Drop the registry from a module's state before it is pickled: its key is per process."""
    state.pop(STATE_KEY, None)
    state.pop(REGISTRY_KEY, None)

"""Private torch API, by subject: dTensors: their parts, their specs, and meshes.

Each private name states why it is needed. Tried on torch 2.11.0, 2.13.0 and 2.15.0. Nothing here
knows what a unit or a group is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._subclasses.meta_utils import MetaTensorDescriber  # `import torch` loads it
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,  # a parameter made of a collective's result; tried on 2.13.0 only
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta  # both for make_spec
from torch.distributed.tensor.placement_types import _StridedShard  # TP and FSDP on one dim
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass,  # the test torch itself uses
)

from fsdp2._core.base.errors import UnsupportedError
from fsdp2._core.base.rows import EVERYTHING, Deal
from fsdp2._core.base.torch_dealt import Dealt, DealtTensor, dealt_axis, key_of
from fsdp2._core.base.torch_modes import hidden_from_modes

# DTensor: a step builds a gradient DTensor for each parameter. The public ``DTensor.from_local``
# costs eight times as much as the constructor, because it builds the spec each time.


def make_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> DTensorSpec:
    """Build the metadata that ``new_dtensor`` takes, once for all tensors that are alike."""
    placements, shape, stride = tuple(placements), tuple(shape), tuple(stride)
    # a spec keeps its mesh alive, so that no other mesh has the id while the spec is known; equal
    # meshes will not do: one of them may have been destroyed
    key = id(mesh), key_of(placements) if Dealt.was_made else placements, shape, stride, dtype
    spec = _specs.get(key)
    if spec is None:
        meta = TensorMeta(torch.Size(shape), stride, dtype)
        spec = _specs[key] = DTensorSpec(mesh, placements, tensor_meta=meta)
    return spec


# The blocks of a model are alike: of 3,200 parameters two have a spec of their own.
_specs: weakref.WeakValueDictionary[object, DTensorSpec] = weakref.WeakValueDictionary()


def new_dtensor(
    local: torch.Tensor, spec: DTensorSpec, like: torch.Tensor | None = None
) -> DTensor:
    """Wrap a local tensor; the caller answers for its shape.

    ``like`` has the same shape, dtype and device, and offset 0, which ``local`` may not have: torch
    takes a wrapper with an offset for a tensor with memory, and fails to copy or pickle it. For its
    compiler see [Note: fake wrappers].
    """
    is_dealt = Dealt.was_made and dealt_axis(spec.placements) is not None
    kind: Any = DealtTensor if is_dealt else DTensor
    if like is None:
        return cast(DTensor, kind(local, spec, requires_grad=False))
    tensor: DTensor = kind(like, spec, requires_grad=False)
    tensor._local_tensor = local
    return tensor


class _AtNoOffset:
    """What a description of a DTensor has for its class, if the wrapper alone has offset 0."""

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> DTensor:
        """Wrap a fake local tensor as ``new_dtensor`` wraps a real one with ``like``."""
        made = DTensor.__tensor_unflatten__(inner, context, size, stride)
        wrapper = torch.Tensor._make_wrapper_subclass(
            DTensor,
            made.size(),
            strides=made.stride(),
            dtype=made.dtype,
            layout=made.layout,
            device=made.device,
            requires_grad=made.requires_grad,
        )
        wrapper._spec, wrapper._local_tensor = made._spec, made._local_tensor
        return wrapper


def _let_fakes_keep_offsets() -> None:
    """Let fakes of DTensors have the storage offset of the real ones. See [Note: fake wrappers].

    [Note: fake wrappers]
    The compiler works on a fake of each tensor. Torch makes that of a DTensor from a description:
    ``__tensor_unflatten__`` of its class wraps a fake local tensor, whose offset the wrapper gets.
    If the real wrapper has another (``new_dtensor`` with ``like``), torch then moves the fake to
    other memory, which fails for a wrapper: no optimizer could be compiled, for every gradient but
    the first of a buffer lies at an offset. Real wrappers cannot have it, because of copies and
    pickles; fakes cannot have it alone, because guards compare the offsets of real tensors. So the
    description of such a wrapper names ``_AtNoOffset`` as its class. No other one is changed, and
    of these torch would make no fake. Nothing public comes between torch and its descriptions.
    """
    describe = MetaTensorDescriber.describe_tensor

    @functools.wraps(describe)
    def describe_wrapper(*args: Any, **kwargs: Any) -> Any:
        found: Any = describe(*args, **kwargs)
        if found.type is not DTensor or type(found.storage_offset) is not int:
            return found
        inner = found.attrs["_local_tensor"].storage_offset
        if found.storage_offset != 0 or (type(inner) is int and inner == 0):  # else symbolic
            return found
        return dataclasses.replace(found, type=_AtNoOffset)

    describer: Any = MetaTensorDescriber  # else assigning to a method is an error of types
    describer.describe_tensor = describe_wrapper


_let_fakes_keep_offsets()


def as_parameter(tensor: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """Make a parameter of a tensor that nothing else holds.

    ``nn.Parameter`` detaches a DTensor, and DTensor plans that op anew for each shape and mesh:
    1.5 ms a parameter, nine tenths of ``fully_shard``. There is nothing to detach from, so the flag
    that ``nn.Parameter`` would set does, on the tensor itself.
    """
    if not isinstance(tensor, DTensor):
        return nn.Parameter(tensor, requires_grad=requires_grad)
    tensor._is_param = True  # what `isinstance` looks for; tried on 2.13.0 only
    tensor.requires_grad = requires_grad  # the method is refused under functorch's transforms
    return cast(nn.Parameter, tensor)


spec_of: Callable[[DTensor], DTensorSpec] = attrgetter("_spec")

local_tensor: Callable[[torch.Tensor], torch.Tensor] = attrgetter("_local_tensor")
"""A DTensor's own local tensor; ``to_local()`` would view it, and enter autograd."""


def is_among(types: Sequence[type]) -> bool:
    """True if a dispatch mode is asked about an operation on DTensors."""
    return any(issubclass(kind, DTensor) for kind in types)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor's own local tensor, and any other tensor itself."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def spec_like(tensor: DTensor, dtype: torch.dtype) -> DTensorSpec:
    """Return the spec of a tensor that is placed as another, perhaps in another dtype."""
    spec = spec_of(tensor)
    if dtype == tensor.dtype:
        return spec
    return make_spec(spec.mesh, spec.placements, tensor.shape, tensor.stride(), dtype)


def placed_like(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return the tensor of a local part, of any dtype, that is placed as another."""
    if not isinstance(tensor, DTensor):
        return local
    return new_dtensor(local, spec_like(tensor, local.dtype))


def set_local_tensor(tensor: DTensor, local: torch.Tensor) -> None:
    """Let a DTensor keep its values in other memory (the group's flat buffer)."""
    tensor._local_tensor = local


DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Inside it an attribute of a subclass is read without looking for its ``__torch_function__``."""


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement of a shard of a shard: this axis splits what later axes split first."""
    return _StridedShard(dim, split_factor=split_factor)


def shards_dim(placement: Placement, dim: int) -> bool:
    """True if the placement splits the tensor along ``dim``, strided or not."""
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def is_strided(placement: Placement) -> bool:
    """True if this axis splits what later axes split first."""
    return isinstance(placement, _StridedShard)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that ``mesh`` was sliced from (itself if it was not)."""
    return mesh._get_root_mesh()


def flatten_dims(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return several dims of a mesh as one dim, the first name slowest. No public way exists.

    Torch keeps the result on the root mesh, under the joined names, so it is made once.
    """
    part = mesh if names == tuple(mesh.mesh_dim_names or ()) else mesh[names]
    return part._flatten()


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the axes of several meshes, in this order and with their groups, as one mesh.

    Public slicing of the root keeps the root's order of axes, knows no flattened or unflattened
    axes, and needs the root: DTensor's caches hand out an *equal* mesh, which may be a slice of
    another root.

    Raises:
        RuntimeError: the meshes share an axis, or are not over the same ranks.
    """
    return DeviceMesh._concatenate([*meshes])


is_wrapper_subclass: Callable[[torch.Tensor], bool] = is_traceable_wrapper_subclass


def is_on_its_way(tensor: torch.Tensor) -> bool:
    """True for the result of a functional collective, which is a plain tensor once it is read."""
    return isinstance(tensor, AsyncCollectiveTensor)


# Meshes of ranks that do not exist: no public way makes one without process groups.


class ImaginedGroup(dist.ProcessGroup):
    """Ranks in number: nothing can be sent."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # an overload the stub lacks

    def __reduce__(self) -> tuple[type[ImaginedGroup], tuple[int, int]]:
        return ImaginedGroup, (self.rank(), self.size())


class ImaginedMesh(DeviceMesh):
    """A mesh whose process groups are imagined."""

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        place = self.get_coordinate()
        assert place is not None
        return place[self._place_of(mesh_dim)]

    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        dim = self._place_of(mesh_dim)
        groups = self.__dict__.setdefault("_fsdp2_groups", {})
        if dim not in groups:
            groups[dim] = ImaginedGroup(self.get_local_rank(dim), self.size(dim))
        group: dist.ProcessGroup = groups[dim]
        return group

    def _place_of(self, dim: int | str | None) -> int:
        return (self.mesh_dim_names or ()).index(dim) if isinstance(dim, str) else dim or 0


def imagined_mesh(shape: tuple[int, ...], names: tuple[str, ...], rank: int) -> ImaginedMesh:
    """Return a mesh on the CPU as one of its ranks would see it."""
    with hidden_from_modes():  # numbers of ranks are no fakes
        ranks = torch.arange(math.prod(shape), device="cpu").view(shape)
        return ImaginedMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


@functools.cache
def asks_subclasses() -> bool:
    """True if torch lets a subclass of DTensor do its operations: 2.12 and later do, 2.11 does not.

    Looked at with a tensor of one element, on a mesh that does not exist.
    """
    with hidden_from_modes(), torch.no_grad():
        mesh = imagined_mesh((1,), ("shard",), 0)
        spec = make_spec(mesh, [Dealt(0, Deal(EVERYTHING))], (1,), (1,), torch.float32)
        probe = new_dtensor(torch.zeros(1, dtype=torch.float32, device="cpu"), spec)
        try:
            return type(probe.detach()) is DealtTensor
        except UnsupportedError:
            return False

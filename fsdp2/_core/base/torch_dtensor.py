"""Private torch API for DTensors: their parts, their specs, and meshes.

Comments say why each private name is needed. Tested with torch 2.11.0, 2.13.0 and 2.15.0.

[Note: annotated parameters]
A plain parameter may be annotated on each axis of a mesh: R (ranks have equal values but compute
different results, so gradients are summed over the ranks), I (ranks have equal values, results and
gradients) or S(dim) (each rank has a part of dim). The placements of a DTensor and of its gradient
express the same properties, so the shards are DTensors. During compute, the unsharded parameter is
plain and has the annotation. Data-parallel axes must be R or omitted, because the group averages
gradients over these axes.

Source: the support for such annotations in ``torch.distributed.fsdp``, torch 2.15.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import attrgetter, methodcaller
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode  # tensors without memory
from torch._subclasses.meta_utils import MetaTensorDescriber  # `import torch` loads it
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,  # for parameters made by a collective; tested with 2.13.0 only
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta  # both for make_spec
from torch.distributed.tensor.placement_types import _StridedShard  # TP and FSDP on one dim
from torch.utils._python_dispatch import (
    is_traceable_wrapper_subclass,  # torch's own test
)

from fsdp2._core.base.errors import ConfigError
from fsdp2._core.base.torch_dealt import Dealt, DealtTensor, dealt_axis, key_of
from fsdp2._core.base.torch_modes import hidden_from_modes

# A step creates a gradient DTensor for each parameter. The public ``DTensor.from_local`` takes
# eight times as long as the constructor, because it builds the spec each time.


def make_spec(
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
) -> DTensorSpec:
    """Build the spec for ``new_dtensor``; all tensors with equal arguments share one spec."""
    placements, shape, stride = tuple(placements), tuple(shape), tuple(stride)
    # keyed by id, as an equal mesh's groups may be destroyed; the cached spec keeps its mesh alive
    key = id(mesh), key_of(placements) if Dealt.was_made else placements, shape, stride, dtype
    spec = _specs.get(key)
    if spec is None:
        meta = TensorMeta(torch.Size(shape), stride, dtype)
        spec = _specs[key] = DTensorSpec(mesh, placements, tensor_meta=meta)
    return spec


# Models repeat identical blocks: in one model, all but two of 3,200 parameters shared a spec.
_specs: weakref.WeakValueDictionary[object, DTensorSpec] = weakref.WeakValueDictionary()


def new_dtensor(local: Tensor, spec: DTensorSpec, like: Tensor | None = None) -> DTensor:
    """Wrap a local tensor; the caller guarantees its shape. ``like`` (same shape, dtype and device,
    but offset 0) replaces ``local`` in the metadata, because torch cannot copy or pickle a
    wrapper with an offset. For the compiler, see [Note: fake wrappers]."""
    is_dealt = Dealt.was_made and dealt_axis(spec.placements) is not None
    kind: Any = DealtTensor if is_dealt else DTensor
    if like is None:
        return cast(DTensor, kind(local, spec, requires_grad=False))
    tensor: DTensor = kind(like, spec, requires_grad=False)
    tensor._local_tensor = local
    return tensor


class _AtNoOffset:
    """The class in the description of a DTensor if only its local tensor has a nonzero offset."""

    @staticmethod
    def __tensor_unflatten__(
        inner: Any,
        context: Any,
        size: Any,
        stride: Any,
    ) -> DTensor:
        """Wrap a fake local tensor as ``new_dtensor`` with ``like`` wraps a real local tensor."""
        made = DTensor.__tensor_unflatten__(inner, context, size, stride)
        wrapper = Tensor._make_wrapper_subclass(
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
    """Give the fake of each DTensor the storage offset of the real DTensor.

    [Note: fake wrappers]
    The compiler uses a fake of each tensor. Torch creates the fake of a DTensor from a description:
    ``__tensor_unflatten__`` of the described class wraps a fake local tensor, and the wrapper gets
    the local tensor's offset. If the real wrapper has a different offset (``new_dtensor`` with
    ``like``), torch then moves the fake to other memory, which fails for a wrapper. So no optimizer
    could be compiled, because all gradients in a buffer except the first have a nonzero offset.
    Real wrappers cannot have such an offset (they are copied and pickled), nor can their fakes
    alone (guards compare with real offsets). Therefore, the description of such a wrapper specifies
    the class ``_AtNoOffset``. Other descriptions are unchanged. Torch has no public hook here."""
    describe = MetaTensorDescriber.describe_tensor

    @functools.wraps(describe)
    def describe_wrapper(*args: Any, **kwargs: Any) -> Any:
        found: Any = describe(*args, **kwargs)
        if found.type is not DTensor or type(found.storage_offset) is not int:
            return found
        inner = found.attrs["_local_tensor"].storage_offset
        if found.storage_offset != 0 or (type(inner) is int and inner == 0):  # otherwise symbolic
            return found
        return dataclasses.replace(found, type=_AtNoOffset)

    describer: Any = MetaTensorDescriber  # assigning to a method is a type error
    describer.describe_tensor = describe_wrapper


_let_fakes_keep_offsets()


def as_parameter(tensor: Tensor, requires_grad: bool) -> nn.Parameter:
    """Make a parameter from an unshared tensor. ``nn.Parameter`` would detach a DTensor. Detaching
    takes 1.5 ms per parameter, 90% of the time of ``fully_shard``, because DTensor plans it for
    each shape and mesh. Therefore, set the flag that marks parameters directly on the DTensor."""
    if not isinstance(tensor, DTensor):
        return nn.Parameter(tensor, requires_grad=requires_grad)
    tensor._is_param = True  # checked by `isinstance`; tested with 2.13.0 only
    tensor.requires_grad = requires_grad  # functorch's transforms reject requires_grad_()
    return cast(nn.Parameter, tensor)


spec_of: Callable[[DTensor], DTensorSpec] = attrgetter("_spec")

local_tensor: Callable[[Tensor], Tensor] = attrgetter("_local_tensor")
"""A DTensor's local tensor; ``to_local()`` would return a view, recorded by autograd."""


def is_among(types: Sequence[type]) -> bool:
    """Return True if an operation passed to a dispatch mode involves DTensors."""
    return any(issubclass(kind, DTensor) for kind in types)


def local_part(tensor: Tensor) -> Tensor:
    """Return a DTensor's local tensor. Return any other tensor unchanged."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def spec_like(tensor: DTensor, dtype: torch.dtype) -> DTensorSpec:
    spec = spec_of(tensor)
    if dtype == tensor.dtype:
        return spec
    return make_spec(spec.mesh, spec.placements, tensor.shape, tensor.stride(), dtype)


def placed_like(tensor: Tensor, local: Tensor) -> Tensor:
    """Wrap a local tensor of any dtype with the placements of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return local
    return new_dtensor(local, spec_like(tensor, local.dtype))


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Move a DTensor to other memory (the group's flat buffer)."""
    tensor._local_tensor = local


DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
"""Context in which reading a subclass's attributes does not call ``__torch_function__``."""


def strided_shard(dim: int, split_factor: int) -> Placement:
    return _StridedShard(dim, split_factor=split_factor)


def shards_dim(placement: Placement, dim: int) -> bool:
    """Return True if the placement, strided or not, splits the tensor along ``dim``."""
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def is_strided(placement: Placement) -> bool:
    """Return True if the placement splits a tensor that later axes have already split."""
    return isinstance(placement, _StridedShard)


root_mesh: Callable[[DeviceMesh], DeviceMesh] = methodcaller("_get_root_mesh")
"""Return the mesh from which a mesh was sliced, or the mesh itself."""


def flatten_dims(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Flatten dims in row-major order; torch caches the result. There is no public API."""
    part = mesh if names == tuple(mesh.mesh_dim_names or ()) else mesh[names]
    return part._flatten()


def join_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Concatenate meshes: return one mesh with all their axes, in order, and their process groups.
    RuntimeError: meshes share an axis or have different ranks. Public slicing keeps the root mesh's
    order of axes, and does not support flattened or unflattened axes. Slicing also needs the root
    mesh, but DTensor's caches return an *equal* mesh, which may be a slice of another root mesh."""
    return DeviceMesh._concatenate([*meshes])


is_wrapper_subclass: Callable[[Tensor], bool] = is_traceable_wrapper_subclass


def is_on_its_way(tensor: Tensor) -> bool:
    """Return True for the result of a functional collective that is still in flight."""
    return isinstance(tensor, AsyncCollectiveTensor)


# Meshes of nonexistent ranks. No public API creates a mesh without process groups.


class ImaginedGroup(dist.ProcessGroup):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the stub lacks this overload

    def __reduce__(self) -> tuple[type[ImaginedGroup], tuple[int, int]]:
        return ImaginedGroup, (self.rank(), self.size())


class ImaginedMesh(DeviceMesh):
    """A mesh of nonexistent ranks, with an ``ImaginedGroup`` per axis."""

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        return cast("list[int]", self.get_coordinate())[self._place_of(mesh_dim)]

    def get_group(self, mesh_dim: int | str | None = None) -> dist.ProcessGroup:
        dim = self._place_of(mesh_dim)
        groups = self.__dict__.setdefault("_fsdp2_groups", {})
        if dim not in groups:
            groups[dim] = ImaginedGroup(self.get_local_rank(dim), self.size(dim))
        return cast(dist.ProcessGroup, groups[dim])

    def _place_of(self, dim: int | str | None) -> int:
        return (self.mesh_dim_names or ()).index(dim) if isinstance(dim, str) else dim or 0


def imagined_mesh(shape: tuple[int, ...], names: tuple[str, ...], rank: int) -> ImaginedMesh:
    """Return a CPU mesh from the perspective of one of its ranks."""
    with hidden_from_modes():  # ``ranks`` must not be a fake tensor
        ranks = torch.arange(math.prod(shape), device="cpu").view(shape)
        return ImaginedMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)


def asks_subclasses() -> bool:
    """Return True if torch dispatches to DTensor subclasses: 2.12 and later do, 2.11 does not."""
    return torch.__version__ >= "2.12.0a0"  # vendors ship builds of alphas


# Tensors without memory.


def without_memory() -> AbstractContextManager[Any]:
    """Context in which new tensors are fake: with shape, dtype and device, but without values."""
    return cast(AbstractContextManager[Any], FakeTensorMode(allow_non_fake_inputs=True))


@contextlib.contextmanager
def without_traces_in_the_log() -> Iterator[None]:
    """Suppress this thread's log of fake tensors: it repeats tracebacks of raised errors."""
    log, thread = logging.getLogger(FakeTensorMode.__module__), threading.get_ident()

    def is_of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    log.addFilter(is_of_others)
    try:
        yield
    finally:
        log.removeFilter(is_of_others)


def has_real_memory() -> bool:
    """Return True unless new tensors are fake, as in an estimate of memory or a trace."""
    return type(torch.empty(0, dtype=torch.uint8, device="cpu")) is Tensor


# The package ``spmd_types``: placements of plain parameters from their annotations.

ATTRIBUTES = frozenset({"_local_type", "_partition_spec"})
"""Attributes of the tensor object in which the package stores annotations."""


@dataclass(frozen=True, eq=False)
class Annotation:
    """A plain parameter's annotation. See [Note: annotated parameters]. ``types`` and ``spec`` are
    restored on the unsharded tensor. ``placements`` and ``gradients``: placements of the parameter
    and its gradient on the full mesh. ``sums``: whether a non-data axis also sums gradients."""

    types: Mapping[Any, Any]
    spec: Any
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    gradients: tuple[Placement, ...]
    sums: bool

    def __deepcopy__(self, memo: dict[int, object]) -> Annotation:
        return self  # frozen, and its mesh is shared

    def placed(self, tensor: Tensor) -> DTensor:
        """Return this rank's plain values as a DTensor on the full mesh."""
        local = tensor.detach()
        return DTensor.from_local(local, self.mesh, self.placements, run_check=False)

    def placed_gradient(self, grad: Tensor) -> DTensor:
        return DTensor.from_local(grad, self.mesh, self.gradients, run_check=False)

    def restore(self, tensor: Tensor) -> None:
        """Restore the parameter's annotation on a plain tensor; omitted data axes become R."""
        _package().assert_type(tensor, dict(self.types), partition_spec=self.spec)


def _package() -> Any:
    return sys.modules.get("spmd_types")


def own_attributes(param: nn.Parameter) -> dict[str, Any]:
    """Return a parameter's attributes set by users, without annotations or wrapper internals."""
    dispatches = type(param).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if dispatches and not isinstance(param, DTensor):
        return {}
    foreign = ATTRIBUTES if _package() is not None else ()
    return {
        name: value
        for name, value in vars(param).items()
        if not name.startswith("_fsdp2") and name not in foreign
    }


def leave_unchecked(functions: Iterable[Callable[..., Any]]) -> None:
    """Make the ``spmd_types`` checker skip functions that move shards, if supported (in 0.3)."""
    register = getattr(_package(), "register_no_typecheck", None)
    if register is not None:
        for function in functions:
            register(function)


def annotation_of(
    param: Tensor,
    fqn: str,
    mesh: DeviceMesh | None,
    data_names: Iterable[str],
) -> Annotation | None:
    """Read the annotation of a plain parameter, if any. ``mesh`` is the full mesh (None without
    ``dp_mesh_dims``), and ``data_names`` are the names of its data-parallel dims."""
    package = _package()
    if package is None or isinstance(param, DTensor):
        return None
    own = dict(package.get_local_type(param))
    if not own:
        return None
    if mesh is None:
        raise ConfigError(
            "FS220",
            f"{fqn} has an spmd_types annotation, but no dp_mesh_dims were passed. Pass the full "
            "mesh with dim names, and dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...).",
        )
    return _Reader(package, fqn, mesh, frozenset(data_names)).read(param, own)


class _Reader:
    """Reads one annotation, for the mesh on which the parameter will be sharded."""

    def __init__(
        self,
        package: Any,
        fqn: str,
        mesh: DeviceMesh,
        data_names: frozenset[str],
    ) -> None:
        self._package = package
        self._fqn = fqn
        self._mesh = mesh
        names = mesh.mesh_dim_names or ()
        self._axes = {name: package.MeshAxis.of(mesh.get_group(name)) for name in names}
        self._data = {name: self._axes[name] for name in names if name in data_names}

    def read(self, param: Tensor, own: dict[Any, Any]) -> Annotation:
        spec = self._package.get_partition_spec(param)
        types = {**own, **self._shards(spec)}
        computed_on = self._compute_mesh(types)
        strangers = [axis for axis in types if axis not in computed_on]
        if strangers:
            raise self._error(
                f"found annotations on {strangers}, which are not axes of the compute mesh, "
                f"{sorted(map(str, computed_on))}. Annotate the parameter on axes of that mesh."
            )
        placed = self._by_name(types)
        pairs = [self._placements(name, placed.get(name)) for name in self._axes]
        placements, gradients = (tuple(column) for column in zip(*pairs, strict=True))
        restored = {axis: own.get(axis, self._package.R) for axis in computed_on}
        sums = any(
            gradient.is_partial()
            for name, gradient in zip(self._axes, gradients, strict=True)
            if name not in self._data
        )
        return Annotation(restored, spec, self._mesh, placements, gradients, sums)

    def _error(self, rest: str) -> ConfigError:
        return ConfigError("FS220", f"{self._fqn}: {rest}")

    def _shards(self, spec: Any) -> dict[Any, Any]:
        """Return the type S(dim) of each axis that splits the parameter, in mesh order."""
        found: dict[Any, Any] = {}
        order = list(self._axes.values())
        for dim, entry in enumerate(spec or ()):
            axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            places = [order.index(axis) for axis in axes if axis in order]
            if places != sorted(places):
                raise self._error(
                    f"found dim {dim} split over {axes}, but the order of axes in the mesh is "
                    f"{self._mesh.mesh_dim_names}. Split the dim over axes in that order."
                )
            found.update((axis, self._package.S(dim)) for axis in axes)
        return found

    def _compute_mesh(self, types: Mapping[Any, Any]) -> tuple[Any, ...]:
        """Return the axes on which the unsharded parameter is annotated again."""
        stored_on = self._ranks(self._axes.values())
        if self._ranks(types) == stored_on:
            return tuple(types)
        current = self._package.current_mesh()
        if current is None:
            raise self._error(
                f"found annotations on {list(types)}, but the axes of the mesh are {self._axes}. "
                "Annotate the parameter on every axis, or call fully_shard inside "
                "spmd_types.set_current_mesh(...) with the compute mesh."
            )
        if self._ranks(current) != stored_on:
            raise self._error(
                f"expected the current spmd_types mesh, {list(current)}, to have the ranks of the "
                f"mesh passed to fully_shard, {self._axes}. Set or pass a matching mesh."
            )
        return tuple(current)

    def _ranks(self, axes: Iterable[Any]) -> set[int]:
        """Return the ranks reachable along some axes, relative to the first rank."""
        axes = tuple(axes)
        try:
            self._package.normalize_mesh(frozenset(axes))
        except self._package.SpmdTypeError as error:
            raise self._error(
                f"found annotations on overlapping axes, {list(axes)}: {error} Annotate the "
                "parameter on axes that are dims of one mesh."
            ) from error
        found = {0}
        for axis in axes:
            steps = axis.layout.all_ranks_from_zero()
            found = {start + step for start in found for step in steps}
        return found

    def _by_name(self, types: Mapping[Any, Any]) -> dict[str, Any]:
        """Return the type on each dim that is not data-parallel; data-parallel dims must be R."""
        names = {axis: name for name, axis in self._axes.items() if name not in self._data}
        data_ranks = self._ranks(self._data.values())
        found = {}
        for axis, said in types.items():
            if self._ranks([axis]) <= data_ranks:
                if said is not self._package.R:
                    raise self._error(
                        f"expected R on the data-parallel axis {axis}, found {said}. fully_shard "
                        "shards the parameter over that axis and averages its gradient. Annotate "
                        "the parameter as R on that axis, or omit the axis."
                    )
            elif axis in names:
                found[names[axis]] = said
            else:
                raise self._error(
                    f"found an annotation on {axis}, which is not a mesh dim (data-parallel: "
                    f"{list(self._data)}, others: {list(names.values())}). Annotate the parameter "
                    "on mesh dims only."
                )
        return found

    def _placements(self, name: str, said: Any) -> tuple[Placement, Placement]:
        """Return the placements of values and gradients on a dim of the mesh."""
        package = self._package
        is_alone = self._axes[name].size() == 1  # the package does not annotate an axis of one rank
        if name in self._data or (said is package.R and not is_alone):
            return Replicate(), Partial()
        if said is package.I or is_alone:
            return Replicate(), Replicate()
        if isinstance(said, package.S):
            return Shard(said.dim), Shard(said.dim)
        found = "nothing" if said is None else repr(said)
        raise self._error(
            f"expected R, I or S(dim) on mesh dim {name!r}, found {found}. The parameter's "
            "placement on this dim is unknown. Annotate it with spmd_types.assert_type."
        )

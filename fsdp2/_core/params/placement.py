"""DTensor specs of a parameter, computed from its mesh and its shard dim.

The *own axes* of a DTensor parameter are its axes that are not data-parallel, such as a
tensor-parallel axis. An annotated parameter ([Note: annotated parameters] in ``torch_dtensor``)
also has own axes. In the sharded spec, these axes come after the data-parallel axes. If the user
named the data-parallel dims of a full mesh, they keep their positions. Independent of groups.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp2._core.base import torch_dealt, torch_dtensor
from fsdp2._core.base.errors import ConfigError, UnsupportedError
from fsdp2._core.base.policy import Aligned, Whole
from fsdp2._core.base.rows import EVERYTHING, Deal, cuts_a_block
from fsdp2._core.comm.mesh import OWN, SHARD, DataMesh, mesh_of
from fsdp2._core.params.deals import Claim
from fsdp2._core.params.layout import ShardLayout, dense_stride


@dataclass(frozen=True)
class ParamPlacement:
    """The placement of one parameter on a mesh. Makes specs for any dtype.

    ``tensor_parallel``: spec of the unsharded parameter (None: a plain tensor). ``data_axes``: axes
    of the ``tensor_parallel`` spec over which the group reduces gradients. ``annotation``: set if
    the unsharded parameter is an annotated plain tensor rather than a DTensor."""

    layout: ShardLayout
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    global_shape: tuple[int, ...]
    global_stride: tuple[int, ...]
    tensor_parallel: torch_dtensor.DTensorSpec | None
    data_axes: tuple[int, ...] = ()
    annotation: torch_dtensor.Annotation | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> ParamPlacement:
        return self  # frozen, and its mesh is shared

    @property
    def may_sum_gradients(self) -> bool:
        """Return True if gradients may also need a sum over the parameter's own axes. Gradients may
        be partial on an own axis on which the parameter is replicated."""
        if self.annotation is not None:
            return self.annotation.sums
        return self.tensor_parallel is not None and any(
            placement.is_replicate()
            for axis, placement in enumerate(self.tensor_parallel.placements)
            if axis not in self.data_axes
        )

    def sharded_spec(self, dtype: torch.dtype) -> torch_dtensor.DTensorSpec:
        """Spec of the sharded parameter, of its gradient and of its optimizer state."""
        return torch_dtensor.make_spec(
            self.mesh, self.placements, self.global_shape, self.global_stride, dtype
        )

    def unsharded_spec(self, dtype: torch.dtype) -> torch_dtensor.DTensorSpec | None:
        """Spec of the unsharded parameter over its own axes; None if it is plain."""
        spec = self.tensor_parallel
        if spec is None or self.annotation is not None:
            return None
        return torch_dtensor.make_spec(
            spec.mesh, spec.placements, self.global_shape, self.global_stride, dtype
        )

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        return self._lies(tensor, self.mesh, self.placements)

    def is_unsharded(self, tensor: torch.Tensor) -> bool:
        spec = self.tensor_parallel
        if spec is None or self.annotation is not None:
            return not isinstance(tensor, DTensor) and tuple(tensor.shape) == self.layout.shape
        return self._lies(tensor, spec.mesh, spec.placements)

    def _lies(
        self, tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
    ) -> bool:
        return (
            isinstance(tensor, DTensor)
            and tensor.device_mesh == mesh
            and torch_dealt.are_same(tensor.placements, placements)
            and tuple(tensor.shape) == self.global_shape
        )

    def describe(self) -> str:
        """Describe the tensors that can replace the parameter, for an error message."""
        spec = self.tensor_parallel
        whole = "a plain full tensor"
        if self.annotation is not None:
            whole = f"a plain tensor of shape {self.layout.shape}, as on this rank"
        elif spec is not None:
            whole = f"a DTensor with placements {spec.placements} on {spec.mesh}"
        return (
            f"of shape {self.global_shape}: {whole}, or a DTensor with placements "
            f"{self.placements} on {self.mesh}"
        )


def place(
    param: torch.Tensor,
    fqn: str,
    data: DataMesh,
    dim: int | None,
    deal: Deal | None = None,
) -> ParamPlacement:
    """Shard a parameter along ``dim`` (None: replicate) over the shard axis of ``data``, in chunks
    or by ``deal``. ConfigError: the parameter's mesh or placements do not match the data mesh."""
    named = () if data.dims is None else (*data.dims.shard_names, *data.dims.replicate_names)
    annotation = torch_dtensor.annotation_of(param, fqn, data.full, named)
    if annotation is not None or isinstance(param, DTensor):
        return _place(param, fqn, data, dim, deal, annotation)
    # the placement keeps its mesh alive, so the id stays unique while the entry exists
    axes = id(data.mesh), data.roles, data.shard.size
    key = (*axes, tuple(param.shape), param.stride(), dim, deal)
    placement = _plain.get(key)
    if placement is None:
        placement = _plain[key] = _place(param, fqn, data, dim, deal, None)
    return placement


# Cached placements of plain parameters: equal blocks of a model share them.
_plain: weakref.WeakValueDictionary[object, ParamPlacement] = weakref.WeakValueDictionary()


def _place(
    param: torch.Tensor,
    fqn: str,
    data: DataMesh,
    dim: int | None,
    deal: Deal | None,
    annotation: torch_dtensor.Annotation | None,
) -> ParamPlacement:
    if annotation is not None:
        param = annotation.placed(param)
    local = torch_dtensor.local_part(param)
    mesh, roles, own, data_axes = _own_axes(param, fqn, data)
    spec = torch_dtensor.spec_of(param) if isinstance(param, DTensor) else None
    if SHARD not in roles:
        dim = 0 if local.dim() else None  # every rank has all rows; dim 0 is cheapest
    # check the full parameter, so that tensor-parallel ranks agree even if their part is empty
    if SHARD not in roles or data.shard.size == 1 or not param.numel():
        deal = None
    rest = iter(own)
    placements = [next(rest) if role == OWN else Replicate() for role in roles]
    if SHARD in roles and dim is not None:
        axis = roles.index(SHARD)
        factor = 1  # axes to the right split the dim first
        for right in range(axis + 1, len(placements)):
            if torch_dtensor.shards_dim(placements[right], dim):
                factor *= mesh.size(right)
        placements[axis] = Shard(dim) if factor == 1 else torch_dtensor.strided_shard(dim, factor)
        if deal is not None:
            is_divided = any(torch_dtensor.shards_dim(p, dim) for p in own)
            if deal.owner is None and is_divided:
                raise ConfigError(
                    "FS213",
                    f"{fqn} {deal.asked_by}, but tensor parallelism also shards its dim {dim} "
                    f"({own}). Align another dim, or return Shard({dim}).",
                )
            placements[axis] = torch_dealt.Dealt(dim, deal)
    shape, stride = tuple(local.shape), dense_stride(local.shape, local.stride())
    layout = ShardLayout(shape, stride, dim, data.shard.size, deal)
    stride = stride if spec is None else tuple(param.stride())
    sharded, shape = tuple(placements), tuple(param.shape)
    return ParamPlacement(layout, mesh, sharded, shape, stride, spec, data_axes, annotation)


_OwnAxes = tuple[DeviceMesh, tuple[str, ...], tuple[Placement, ...], tuple[int, ...]]
"""Mesh and axis roles of a sharded parameter, placements on its own axes, and its data axes."""


def _own_axes(param: torch.Tensor, fqn: str, data: DataMesh) -> _OwnAxes:
    if not isinstance(param, DTensor):
        if OWN in data.roles:
            raise ConfigError(
                "FS219",
                f"{fqn} is a plain tensor, so its placements are unknown on the dims of "
                f"{data.mesh} that are not data-parallel. Convert it to a DTensor first, with "
                "torch.distributed.tensor.distribute_module or parallelize_module.",
            )
        return data.mesh, data.roles, (), ()
    if data.full is None or data.dims is None:
        roles = (*data.roles, *(OWN,) * param.device_mesh.ndim)
        return _join(fqn, data.mesh, param.device_mesh), roles, tuple(param.placements), ()
    if param.device_mesh != data.full:
        raise ConfigError(
            "FS219",
            f"{fqn}: expected a DTensor on the mesh of dp_mesh_dims, {data.full}, found one on "
            f"{param.device_mesh}. Distribute the parameter over the full mesh, with Replicate() "
            "on the data-parallel dims.",
        )
    own: list[Placement] = []
    data_axes = []
    named = (*data.dims.shard_names, *data.dims.replicate_names)
    for axis, (name, placement) in enumerate(
        zip(data.full.mesh_dim_names or (), param.placements, strict=True)
    ):
        if name not in named:
            own.append(placement)
            continue
        data_axes.append(axis)
        if not isinstance(placement, Replicate):
            raise ConfigError(
                "FS219",
                f"{fqn}: expected Replicate() on the data-parallel dim {name!r}, found "
                f"{placement}. Distribute it only over dims that are not in dp_mesh_dims.",
            )
    return data.mesh, data.roles, tuple(own), tuple(data_axes)


def shrink(placement: ParamPlacement, smaller: DataMesh) -> ParamPlacement:
    """Place a parameter on a smaller mesh between forward and backward. For a tensor-parallel
    parameter, the DTensor describes only this rank's part, sharded over the smaller mesh."""
    old = placement.layout
    layout = ShardLayout(old.shape, old.stride, old.dim, smaller.shard.size)
    split: Placement = Replicate() if old.dim is None else Shard(old.dim)
    replicated: tuple[Placement, ...] = (Replicate(),) * (smaller.mesh.ndim - 1)
    return ParamPlacement(layout, smaller.mesh, (*replicated, split), old.shape, old.stride, None)


def shard_dim(choice: object, param: torch.Tensor, fqn: str) -> int | None:
    """Return the dim that ``shard_placement_fn`` chose, or None to replicate. ``Whole()`` and
    alignment by elements mean dim 0. ConfigError: an unsupported value or dim."""
    if isinstance(choice, Replicate):
        return None
    is_by_elements = isinstance(choice, Aligned) and choice.dim is None
    if choice is None or isinstance(choice, Whole) or is_by_elements:
        return 0 if param.dim() else None
    if not isinstance(choice, Shard | Aligned):
        raise ConfigError(
            "FS213",
            f"{fqn}: shard_placement_fn returned {choice!r}. Return None, Shard(dim), Replicate(), "
            "Whole() or Aligned(dim, multiple_of=...).",
        )
    assert choice.dim is not None
    if not -param.dim() <= choice.dim < param.dim():
        raise ConfigError(
            "FS213",
            f"{fqn}: shard_placement_fn returned {type(choice).__name__}({choice.dim}) for a "
            f"parameter of {param.dim()} dims with shape {tuple(param.shape)}. Return a dim in "
            "range, or Replicate() to keep the parameter unsharded.",
        )
    return choice.dim % param.dim()


def claim_of(
    choice: object,
    param: torch.Tensor,
    dim: int | None,
    fqn: str,
    data: DataMesh,
) -> Claim | None:
    """Return the blocks to deal to ranks, or None to store rows in chunks (also for an aligned
    parameter if no chunk ends inside a block). ConfigError: the owner is not a rank of the axis.
    UnsupportedError: this torch version does not support dealt parameters."""
    if not isinstance(choice, Whole | Aligned) or dim is None:
        return None
    if data.shard.size == 1 or not param.numel():
        return None
    shape, itemsize = tuple(param.shape), param.dtype.itemsize
    if isinstance(choice, Whole):
        owner = choice.owner
        if owner is not None and (type(owner) is not int or not 0 <= owner < data.shard.size):
            raise ConfigError(
                "FS213",
                f"{fqn}: shard_placement_fn returned {choice!r}, but the mesh has "
                f"{data.shard.size} ranks to shard over. Pass an owner from 0 to "
                f"{data.shard.size - 1}, or no owner.",
            )
        claim = Claim(shape, itemsize, 0, EVERYTHING, owner)
    else:
        length, block, least = param.shape[dim], choice.multiple_of, choice.at_least
        if choice.dim is None:  # rows that contain full blocks of elements
            row = _row_numel(param)
            block, least = block // math.gcd(block, row), -(-least // row)
        if not cuts_a_block(length, data.shard.size, block, least):
            return None
        is_long = least > 1
        block *= -(-least // block)
        if block >= length or (is_long and 2 * block > length):
            block, is_long = EVERYTHING, False
        claim = Claim(shape, itemsize, dim, block, is_long=is_long)
    if not torch_dtensor.asks_subclasses():
        raise UnsupportedError(
            "FS233",
            f"{fqn}: shard_placement_fn returned {choice!r}, which torch {torch.__version__} does "
            "not support: it assumes that all chunks of the DTensor are equal. Use torch 2.12 or "
            "later, or return Shard(0).",
        )
    return claim


def _row_numel(param: torch.Tensor) -> int:
    """Return the number of elements per row, or 1 if it differs between tensor-parallel ranks."""
    numel, parts = math.prod(param.shape[1:]), 1
    if isinstance(param, DTensor):
        for axis, placement in enumerate(param.placements):
            parts *= 1 if placement.is_replicate() else param.device_mesh.size(axis)
    return 1 if numel % parts else numel // parts


def shard_mesh(choice: Any, fqn: str, data: DataMesh) -> tuple[object, DataMesh]:
    """Split ``choice`` into a placement and a mesh. ConfigError: the mesh is unsuitable."""
    if not hasattr(choice, "mesh_info"):
        return choice, data
    return choice.placement, mesh_of(choice.mesh_info, fqn, data)


def _join(fqn: str, data: DeviceMesh, tensor_parallel: DeviceMesh) -> DeviceMesh:
    names, own = data.mesh_dim_names, tensor_parallel.mesh_dim_names
    if names is None or own is None:
        raise ConfigError(
            "FS219",
            f"{fqn}: expected dim names on the data-parallel and tensor-parallel meshes, found "
            f"{names} and {own}. Create one mesh with named dims, init_device_mesh(..., "
            "mesh_dim_names=...); pass mesh['tensor'] to parallelize_module, and mesh=mesh['data'] "
            "to fully_shard.",
        )
    if set(names) & set(own) and data != tensor_parallel:
        raise ConfigError(
            "FS219",
            f"{fqn}: expected a data-parallel mesh without the dims of the tensor-parallel mesh, "
            f"found {names} and {own}. Pass only the other dims to fully_shard, such as "
            f"mesh=mesh[{next((name for name in names if name not in own), 'data')!r}].",
        )
    if data == tensor_parallel:
        raise ConfigError(
            "FS202",
            f"{fqn} is already a DTensor on {data}, the mesh to shard over. Either pass it "
            "in ignored_params, or replace it with a plain parameter made from its full_tensor().",
        )
    try:
        return torch_dtensor.join_meshes([data, tensor_parallel])
    except RuntimeError as error:
        raise ConfigError(
            "FS219",
            f"{fqn}: expected a DTensor on a mesh that can be combined with the data-parallel "
            f"mesh, found {tensor_parallel} and {data} ({error}). Slice both from one "
            "init_device_mesh(...) call.",
        ) from error

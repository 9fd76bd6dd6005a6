"""From a parameter, a mesh and a shard dim to DTensor specs, by one rule.

Owns the choice of placements. A plain parameter is a DTensor over no axis; a tensor-parallel one
already has axes of its own, which follow the data-parallel axes in the sharded spec. It must not
know groups, states or collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp2 import _torch
from fsdp2._errors import ConfigError
from fsdp2._layout import ShardLayout, contiguous_stride
from fsdp2._mesh import DataMesh


@dataclass(frozen=True)
class ParamPlacement:
    """How one parameter lies on a mesh. Specs differ by dtype only, so they are made for one."""

    layout: ShardLayout
    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    global_shape: tuple[int, ...]
    global_stride: tuple[int, ...]
    tensor_parallel: _torch.DTensorSpec | None

    def __deepcopy__(self, memo: dict[int, object]) -> ParamPlacement:
        return self  # frozen, and its mesh is shared

    def sharded_spec(self, dtype: torch.dtype) -> _torch.DTensorSpec:
        """Spec of the sharded parameter, of its gradient and of its optimizer state."""
        return _torch.make_spec(
            self.mesh, self.placements, self.global_shape, self.global_stride, dtype
        )

    def unsharded_spec(self, dtype: torch.dtype) -> _torch.DTensorSpec | None:
        """Spec of the unsharded parameter over the tensor-parallel axes; None if it is plain."""
        spec = self.tensor_parallel
        if spec is None:
            return None
        return _torch.make_spec(
            spec.mesh, spec.placements, self.global_shape, self.global_stride, dtype
        )

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` lies as the sharded parameter does."""
        return self._lies(tensor, self.mesh, self.placements)

    def is_unsharded(self, tensor: torch.Tensor) -> bool:
        """True if ``tensor`` lies as the unsharded parameter does: whole over the data axes."""
        spec = self.tensor_parallel
        if spec is None:
            return not isinstance(tensor, DTensor) and tuple(tensor.shape) == self.global_shape
        return self._lies(tensor, spec.mesh, spec.placements)

    def _lies(
        self, tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
    ) -> bool:
        return (
            isinstance(tensor, DTensor)
            and tensor.device_mesh == mesh
            and tuple(tensor.placements) == tuple(placements)
            and tuple(tensor.shape) == self.global_shape
        )

    def wrap_unsharded(self, local: torch.Tensor) -> torch.Tensor:
        """Return the unsharded tensor around its local part, differentiably."""
        spec = self.tensor_parallel
        if spec is None:
            return local
        shape, stride = torch.Size(self.global_shape), self.global_stride
        return DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=shape, stride=stride
        )

    def describe(self) -> str:
        """Say, for a message, which tensors can take the parameter's place."""
        spec = self.tensor_parallel
        whole = "a plain one with the whole tensor"
        if spec is not None:
            whole = f"a DTensor with placements {spec.placements} on {spec.mesh}"
        return (
            f"of shape {self.global_shape}: {whole}, or a DTensor with placements "
            f"{self.placements} on {self.mesh}"
        )


def place(param: torch.Tensor, fqn: str, data: DataMesh, dim: int | None) -> ParamPlacement:
    """Place a parameter over the shard axis of ``data`` along ``dim`` (None replicates it).

    Raises:
        ConfigError: a tensor-parallel mesh whose axes cannot stand beside those of the data mesh.
    """
    split: Placement = Replicate() if dim is None else Shard(dim)
    replicated: tuple[Placement, ...] = (Replicate(),) * (data.mesh.ndim - 1)
    local: torch.Tensor = param
    mesh, tensor_parallel = data.mesh, None
    own: tuple[Placement, ...] = ()
    if isinstance(param, DTensor):
        local, tensor_parallel = _torch.local_tensor(param), _torch.spec_of(param)
        mesh = _join(fqn, data.mesh, param.device_mesh)
        own = tuple(param.placements)
        if dim is not None:
            factor = 1
            for axis, placement in enumerate(own):
                if _torch.shards_dim(placement, dim):
                    factor *= param.device_mesh.size(axis)
            if factor > 1:
                split = _torch.strided_shard(dim, factor)
    layout = ShardLayout(tuple(local.shape), _dense_stride(local), dim, data.shard.size)
    stride = tuple(param.stride()) if own else layout.stride
    return ParamPlacement(
        layout, mesh, (*replicated, split, *own), tuple(param.shape), stride, tensor_parallel
    )


def shrink(placement: ParamPlacement, smaller: DataMesh) -> ParamPlacement:
    """Place the same parameter on a smaller mesh, where it waits between forward and backward.

    Plain parameters only: a tensor-parallel one is registered as a plain local shard's DTensor
    over the smaller mesh alone.
    """
    old = placement.layout
    layout = ShardLayout(old.shape, old.stride, old.dim, smaller.shard.size)
    split: Placement = Replicate() if old.dim is None else Shard(old.dim)
    replicated: tuple[Placement, ...] = (Replicate(),) * (smaller.mesh.ndim - 1)
    return ParamPlacement(layout, smaller.mesh, (*replicated, split), old.shape, old.stride, None)


def shard_dim(choice: object, param: torch.Tensor, fqn: str) -> int | None:
    """Read what ``shard_placement_fn`` returned: a dim, or None to replicate.

    Raises:
        ConfigError: not None, ``Shard`` or ``Replicate``; a dim out of range; a dim of a scalar.
    """
    if isinstance(choice, Replicate):
        return None
    if choice is None:
        return 0 if param.dim() else None
    if not isinstance(choice, Shard):
        raise ConfigError(
            f"{fqn}: shard_placement_fn returned {choice!r}. Return None, Shard(dim) or "
            "Replicate()."
        )
    if not -param.dim() <= choice.dim < param.dim():
        raise ConfigError(
            f"{fqn}: shard_placement_fn returned Shard({choice.dim}) for a parameter of "
            f"{param.dim()} dims with shape {tuple(param.shape)}. Return a dim in range, or "
            "Replicate() to keep the parameter whole."
        )
    return choice.dim % param.dim()


def _join(fqn: str, data: DeviceMesh, tensor_parallel: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the data axes followed by the tensor-parallel axes."""
    names, own = data.mesh_dim_names, tensor_parallel.mesh_dim_names
    if names is None or own is None:
        raise ConfigError(
            f"{fqn}: expected names on the data-parallel and the tensor-parallel mesh, found "
            f"{names} and {own}. Pass mesh_dim_names to init_device_mesh."
        )
    try:
        return _torch.join_meshes(data, tensor_parallel)
    except RuntimeError as error:
        raise ConfigError(
            f"{fqn}: expected a DTensor on a mesh beside the data-parallel axes, found the mesh "
            f"{tensor_parallel} and the data mesh {data}, which cannot be joined ({error}). Slice "
            "both from one init_device_mesh(...) call."
        ) from error


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's stride if it fills its memory without gap or overlap, else row-major."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda s: s[1]):
        if size != 1 and stride != expected:
            return contiguous_stride(tensor.shape)
        expected *= size if size > 0 else 1
    if all(size == 1 for size in tensor.shape) or tensor.is_contiguous():
        return contiguous_stride(tensor.shape)
    return tuple(tensor.stride())
